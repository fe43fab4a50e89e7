"""Flags of the drafter NGRAM; `shared.options.capabilities` holds them against the others."""

from dataclasses import dataclass

from shared.options.flags import check_rules, flag

RECENCY, FREQUENCY = MATCH_TYPES = ("BFS", "PROB")
TENANT, REQUEST = SCOPES = ("tenant", "request")
DEVICE, HOST = BACKENDS = ("device", "host")
DEFAULT_NODES = 12
"""N where no flag says otherwise."""


@dataclass(frozen=True, kw_only=True)
class NgramConfig:
    """What the drafter NGRAM remembers, and how it grows a tree of it."""

    speculative_ngram_num_draft_tokens: int = flag(
        12, "nodes of seen text that a tree has beside the drafter's, where both draft "
        "(NAME+NGRAM)", low=1, high=32, old_names=("--speculative-ngram-draft-tokens",),
    )  # fmt: skip
    speculative_ngram_min_bfs_breadth: int = flag(
        1, "nodes that a level of the longest match may have below each other one", low=1, high=64
    )
    speculative_ngram_max_bfs_breadth: int = flag(
        10, "the same for the shortest match", low=1, high=64
    )
    speculative_ngram_match_type: str = flag(
        RECENCY, "BFS prefers what followed last, PROB what followed most often",
        choices=MATCH_TYPES, metavar="TYPE",
    )  # fmt: skip
    speculative_ngram_max_trie_depth: int = flag(
        18, "tokens of the longest n-gram that is remembered", low=2, high=64
    )
    speculative_ngram_capacity: int = flag(
        10_000_000, "n-grams that are remembered, of 48 bytes each; in a table the power of two "
        "below, of 12 bytes each", low=1024, high=1 << 28,
    )  # fmt: skip
    speculative_ngram_scope: str = flag(
        TENANT, "whose text a request's drafts come from: its tenant's (the request field user), "
        "or its own alone", choices=SCOPES, metavar="SCOPE",
    )  # fmt: skip
    speculative_ngram_external_corpus_path: str | None = flag(
        None,
        "JSONL file of documents, each a text or a list of token ids",
        is_path=True,
        is_file="read",
    )
    speculative_ngram_external_sam_budget: int = flag(
        0, "draft nodes that external corpora share", low=0, high=63
    )
    speculative_ngram_external_corpus_max_tokens: int = flag(
        10_000_000, "most tokens of all external corpora, of 100 bytes each", low=1, high=1 << 27
    )

    def __post_init__(self) -> None:
        check_rules(self)

    @property
    def num_copies(self) -> int:
        """C, nodes of seen text beside the drafter's."""
        return self.speculative_ngram_num_draft_tokens

    @property
    def sam_budget(self) -> int:
        """Draft nodes that external corpora share."""
        return self.speculative_ngram_external_sam_budget


OF_A_TRIE = (
    "speculative_ngram_min_bfs_breadth",
    "speculative_ngram_max_bfs_breadth",
    "speculative_ngram_match_type",
    "speculative_ngram_max_trie_depth",
    "speculative_ngram_external_corpus_path",
    "speculative_ngram_external_sam_budget",
    "speculative_ngram_external_corpus_max_tokens",
)
"""What a table of n-grams on the device has not."""
