"""Rules of the token map, which reduces the draft vocabulary."""

from shared.drafts.kinds import KINDS, NGRAM, TOKEN_MAP
from shared.options.rule_context import Example, Rule

_MAPPED = [name for name, kind in KINDS.items() if TOKEN_MAP in kind.flags and kind.merges_ngrams]

MAP_RULES = (
    Rule(
        applies=lambda s: (
            s.draft.speculative_token_map is not None
            and s.kind is not None
            and TOKEN_MAP not in s.kind.flags
        ),
        reason="--speculative-token-map requires a drafter that uses the target's LM head "
        f"({', '.join(_MAPPED)}), and --speculative-algorithm {{algorithm}} does not",
        hint="remove the flag",
        example=Example(drafter=NGRAM.name, flags=("--speculative-token-map", "token_map.json")),
    ),
)
