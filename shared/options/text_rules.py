"""What drafts from seen text cannot do, and why; see `shared.options.rules`."""

from shared.options.algorithms import HOST_ALGORITHM
from shared.options.flags import spelling
from shared.options.joined_rules import JOINED_RULES
from shared.options.ngram import OF_A_TRIE
from shared.options.options import Options
from shared.options.setup import Example, Rule


def needs_trie(options: Options) -> bool:
    """Whether a start asks for what a table of n-grams has not."""
    return options.adaptive.speculative_adaptive or not options.given.isdisjoint(OF_A_TRIE)


TEXT_RULES = (
    *JOINED_RULES,
    Rule(
        refuses=lambda s: s.draft.speculative_ngram_index is not None and not s.draft.from_text,
        reason="--speculative-ngram-index is where --speculative-algorithm NGRAM keeps n-grams",
        way_out="leave it out",
        example=Example(drafter="NEXTN", flags=("--speculative-ngram-index", "trie")),
    ),
    Rule(
        refuses=lambda s: s.draft.drafts_from_table and needs_trie(s.options),
        reason="--speculative-ngram-index table is on the device, and --speculative-adaptive, "
        + ", ".join(map(spelling, OF_A_TRIE[:-1]))
        + f" and {spelling(OF_A_TRIE[-1])} are for a trie on the host",
        way_out="give --speculative-ngram-index trie, or leave it out",
        example=Example(
            drafter=HOST_ALGORITHM,
            flags=("--speculative-ngram-index", "table", "--speculative-adaptive"),
        ),
    ),
)
