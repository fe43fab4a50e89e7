"""Options of the n-gram drafter; `shared.options.ngram_rules` has its rules."""

from dataclasses import dataclass

from shared.options.flags import check_rules, flag

RECENCY, FREQUENCY = MATCH_TYPES = ("BFS", "PROB")
TENANT, REQUEST = SCOPES = ("tenant", "request")
DEVICE, HOST = BACKENDS = ("device", "host")
DEFAULT_NODES = 12
"""Default of `--speculative-num-draft-tokens` with NGRAM."""

MIN_CAPACITY = 1024
"""Minimum number of stored n-grams."""


@dataclass(frozen=True, kw_only=True)
class NgramConfig:
    """Options of the n-gram drafter: stored n-grams and the shape of its trees."""

    speculative_ngram_num_draft_tokens: int = flag(
        12,
        "number of n-gram nodes in a merged tree (METHOD+NGRAM)",
        low=1,
        high=32,
        old_names=("--speculative-ngram-draft-tokens",),
    )
    speculative_ngram_min_bfs_breadth: int = flag(
        1,
        "maximum number of children per node for the longest match",
        low=1,
        high=64,
    )
    speculative_ngram_max_bfs_breadth: int = flag(
        10,
        "maximum number of children per node for the shortest match",
        low=1,
        high=64,
    )
    speculative_ngram_match_type: str = flag(
        RECENCY,
        "BFS: prefer the most recent continuations; PROB: prefer the most frequent continuations",
        choices=MATCH_TYPES,
        metavar="TYPE",
    )
    speculative_ngram_max_trie_depth: int = flag(
        18,
        "maximum length of a stored n-gram in tokens",
        low=2,
        high=64,
    )
    speculative_ngram_capacity: int = flag(
        10_000_000,
        "maximum number of stored n-grams, 48 bytes each on the host; on the device the next "
        "lower power of two, 12 bytes each, and by default at most 2 % of the free memory",
        low=MIN_CAPACITY,
        high=1 << 28,
    )
    speculative_ngram_scope: str = flag(
        TENANT,
        "requests that share n-grams; tenant: requests with the same field user; request: none",
        choices=SCOPES,
        metavar="SCOPE",
    )
    speculative_ngram_external_corpus_path: str | None = flag(
        None,
        "JSONL file of documents, each a string or a list of token ids",
        is_path=True,
        is_file="read",
    )
    speculative_ngram_external_sam_budget: int = flag(
        0,
        "number of draft nodes reserved for external corpora",
        low=0,
        high=63,
    )
    speculative_ngram_external_corpus_max_tokens: int = flag(
        10_000_000,
        "maximum number of tokens in all external corpora, 100 bytes each",
        low=1,
        high=1 << 27,
    )

    def __post_init__(self) -> None:
        check_rules(self)

    @property
    def num_copies(self) -> int:
        """C, number of n-gram nodes in a merged tree."""
        return self.speculative_ngram_num_draft_tokens

    @property
    def sam_budget(self) -> int:
        """Number of draft nodes reserved for external corpora."""
        return self.speculative_ngram_external_sam_budget


NEEDS_HOST = (
    "speculative_ngram_min_bfs_breadth",
    "speculative_ngram_max_bfs_breadth",
    "speculative_ngram_match_type",
    "speculative_ngram_max_trie_depth",
    "speculative_ngram_external_corpus_path",
    "speculative_ngram_external_sam_budget",
    "speculative_ngram_external_corpus_max_tokens",
)
"""Options that require the n-gram index on the host."""
