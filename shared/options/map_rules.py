"""Which drafters draft no vocabulary of the start's, and why; see `shared.options.rules`."""

from shared.options.algorithms import BLOCK_ALGORITHMS, HOST_ALGORITHM, MODEL_ALGORITHM
from shared.options.setup import Example, Rule

MAP_RULES = (
    Rule(
        refuses=lambda s: (
            s.draft.speculative_token_map is not None
            and s.algorithm in (*BLOCK_ALGORITHMS, HOST_ALGORITHM, MODEL_ALGORITHM)
        ),
        reason="--speculative-token-map chooses rows of the target's lm_head that NEXTN, EAGLE and "
        "EAGLE3 draft by, and --speculative-algorithm {algorithm} drafts otherwise",
        way_out="leave the flag out",
        example=Example(
            drafter=HOST_ALGORITHM, flags=("--speculative-token-map", "token_map.json")
        ),
    ),
)
