"""Rules of the token map, which reduces the draft vocabulary."""

from shared.options.algorithms import BLOCK_ALGORITHMS, HOST_ALGORITHM, MODEL_ALGORITHM
from shared.options.rule_context import Example, Rule

MAP_RULES = (
    Rule(
        applies=lambda s: (
            s.draft.speculative_token_map is not None
            and s.algorithm in (*BLOCK_ALGORITHMS, HOST_ALGORITHM, MODEL_ALGORITHM)
        ),
        reason="--speculative-token-map requires a drafter that uses the target's LM head (NEXTN, "
        "EAGLE, EAGLE3), and --speculative-algorithm {algorithm} does not",
        hint="remove the flag",
        example=Example(
            drafter=HOST_ALGORITHM, flags=("--speculative-token-map", "token_map.json")
        ),
    ),
)
