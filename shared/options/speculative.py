"""Options of speculative decoding."""

from dataclasses import dataclass, fields, replace
from typing import Self

from shared.drafts.kinds import BLOCK_KINDS, HEADS, KINDS, DrafterKind, Form, Source
from shared.models.sentence_list import sentence_list
from shared.options.adaptive import MOST_STEPS
from shared.options.algorithms import ALGORITHMS, JOINED_ALGORITHMS, WITH_COPIES, algorithm_of
from shared.options.flags import ConfigError, check_rules, flag, spelling
from shared.options.ngram import BACKENDS, DEFAULT_NODES, DEVICE, HOST
from shared.options.simulated_acceptance import rates_of

EXACT, REJECTION = ACCEPT_RULES = ("exact", "rejection")

LAYER_IDS = ("inputs", "outputs")
"""Meanings of the layer ids in a head's config.json; see `shared.drafts.aux_hidden_states`."""

CHAIN_SHAPE = (3, 1, 4)
TREE_SHAPE = (5, 4, 8)
NAIVE_SHAPE = (1, 1, 2)
"""Default S, k and N; the tree is for a Llama model with a draft head."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Drafting method, draft shape and accept rule."""

    speculative_algorithm: str | None = flag(
        None,
        f"drafting method. NEXTN: the checkpoint's MTP layer, or a Gemma 4 assistant. "
        f"{', '.join(HEADS)}: a draft head. "
        "STANDALONE: a small draft model. NGRAM: n-grams of prompts, "
        "outputs and corpora. NAIVE_EAGLE: one draft token per step. METHOD+NGRAM: both, merged "
        "into one tree. auto: the checkpoint's MTP layer, else a published head in the hub "
        "cache, else none. Names of vLLM and lower case are accepted (default: none)",
        aliases=("--speculative-algo",),
    )
    speculative_draft_model_path: str | None = flag(
        None,
        "folder or hub id of the draft head or draft model; with NEXTN, of a Gemma 4 assistant, or "
        "of an MTP layer in the speculators format",
        aliases=("--speculative-draft-model",),
        is_path=True,
    )
    speculative_draft_model_revision: str | None = flag(
        None,
        "branch, tag or commit of the hub id in --speculative-draft-model-path (default: main)",
    )
    speculative_num_steps: int | None = flag(
        None,
        "S, depth of the draft chain or tree (default: 3; 5 for a Llama model with a draft head; "
        "the block of a block head)",
        low=1,
        high=16,
    )
    speculative_eagle_topk: int | None = flag(
        None,
        "k, number of nodes expanded per level of the draft tree; of a block head, candidates per "
        "slot (default: 1, a chain; 4 for a Llama model with a draft head)",
        low=1,
        high=16,
    )
    speculative_num_draft_tokens: int | None = flag(
        None,
        "N, number of nodes of the draft tree, root included (default: S + 1 for a chain; 8 for "
        "a Llama model with a draft head; 12 with NGRAM)",
        low=2,
        high=64,
    )
    speculative_draft_window_size: int | None = flag(
        None,
        f"attention window of a {sentence_list(BLOCK_KINDS)} head, at least the length of its "
        "chain (default: from the head's config.json)",
        low=2,
        high=1 << 24,
    )
    speculative_aux_layer_convention: str | None = flag(
        None,
        "whether the layer ids in a head's config.json mean inputs or outputs of the target's "
        "layers (default: detected)",
        choices=LAYER_IDS,
        metavar="WHICH",
        old_names=("--speculative-draft-layer-ids",),
    )
    speculative_token_map: str | None = flag(
        None,
        "JSON file of token ids, the reduced draft vocabulary: drafts read only these rows of "
        "the target's LM head; python -m models.token_map writes one (default: the full "
        "vocabulary)",
        metavar="FILE",
        is_path=True,
        is_file="read",
    )
    speculative_ngram_backend: str | None = flag(
        None,
        "where NGRAM stores n-grams; device: a hash table on the device, whose steps overlap; "
        "host: a trie on the host (default: device; host if another flag requires it)",
        choices=BACKENDS,
        metavar="WHERE",
        old_names=("--speculative-ngram-index",),
        values={"trie": HOST, "table": DEVICE},
    )
    speculative_accept_rule: str | None = flag(
        None,
        "exact: the output is identical to plain decoding; rejection: rejection sampling, the "
        "output follows the same distribution and more draft tokens are accepted, for chains "
        "only (default: exact)",
        choices=ACCEPT_RULES,
        metavar="RULE",
        old_names=("--accept-rule",),
        values={"match": EXACT},
        switches={"--speculative-use-rejection-sampling": REJECTION},
    )
    speculative_use_block_verification: bool = flag(
        False,
        "accept or reject blocks of draft tokens as a whole (block verification) instead of "
        "token by token; requires --speculative-accept-rule rejection",
        old_names=("--block-verification",),
    )
    speculative_simulate_accept_length: str | None = flag(
        None,
        "simulated acceptance for benchmarks: mean tokens per step, bonus token included, such "
        "as 2.5, or the acceptance rate of each position, such as 0.9,0.6,0; outputs are "
        "meaningless",
        metavar="L",
        is_list=True,
        aliases=("--speculative-simulate-acc-len",),
    )

    def __post_init__(self) -> None:
        check_rules(self)
        if self.speculative_algorithm is not None:
            name = algorithm_of(self.speculative_algorithm)
            object.__setattr__(self, "speculative_algorithm", name)  # frozen, but not in use yet
        rates_of(self.speculative_simulate_accept_length)
        if self.speculative_algorithm is None:
            self._refuse_draft_flags()

    def _refuse_draft_flags(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) not in (None, False):
                raise ConfigError(
                    f"{spelling(item.name)} requires a drafter; add --speculative-algorithm "
                    f"{ALGORITHMS[0]}, or remove the flag"
                )

    def settled(self, drafts_trees: bool, block: int | None) -> Self:
        """Returns the options with the draft shape filled in.

        Args:
          drafts_trees: See `ModelConfig`.
          block: Chain length of a block-parallel head; None for other drafters.
        """
        if self.speculative_algorithm is None:
            return self
        if self.from_text:
            return replace(self, speculative_num_draft_tokens=self.num_draft_tokens)
        shape = (self.num_steps, self.topk, self.num_draft_tokens)
        is_open = all(getattr(self, item) is None for item in _SHAPE_FIELDS)
        has_trees = self.has_source(Source.HEAD) and self.verification == "exact"
        if is_open and drafts_trees and has_trees:
            shape = TREE_SHAPE
        if block is not None:
            shape = self._block_shape(block)
        return replace(self, **dict(zip(_SHAPE_FIELDS, shape, strict=True)))

    def _block_shape(self, block: int) -> tuple[int, int, int]:
        """Returns S, k and N over a block: its whole chain, or a tree of its levels."""
        if self.topk == 1:
            return block - 1, 1, block
        nodes = self.num_draft_tokens
        return self.speculative_num_steps or min(block, nodes) - 1, self.topk, nodes

    @property
    def drafts(self) -> bool:
        """True if speculative decoding is on."""
        return self.speculative_algorithm is not None

    @property
    def drafter(self) -> str | None:
        """Drafter without `+NGRAM`; None for plain decoding."""
        name = self.speculative_algorithm
        return None if name is None else name.removesuffix(WITH_COPIES)

    @property
    def kind(self) -> DrafterKind | None:
        """Record of the drafter; None for plain decoding, and for `auto` before it is resolved."""
        return KINDS.get(self.drafter or "")

    def has_source(self, *sources: Source) -> bool:
        """Returns True if the draft tokens of the drafter have one of these origins."""
        return self.kind is not None and self.kind.source in sources

    def has_form(self, *forms: Form) -> bool:
        """Returns True if the drafts of the drafter have one of these forms."""
        return self.kind is not None and self.kind.form in forms

    @property
    def joins_copies(self) -> bool:
        """True if n-gram drafts are merged into the trees of another drafter."""
        return self.speculative_algorithm in JOINED_ALGORITHMS

    @property
    def with_mtp(self) -> bool:
        """True if an MTP layer drafts, of the checkpoint or of the draft model."""
        has_path = self.speculative_draft_model_path is not None
        is_own = self.drafts and not (has_path or self.from_text)
        return is_own or self.has_source(Source.MTP)

    @property
    def mtp_path(self) -> str | None:
        """Folder of an MTP layer that replaces the checkpoint's own; None without one."""
        return self.speculative_draft_model_path if self.has_source(Source.MTP) else None

    @property
    def head_path(self) -> str | None:
        """Folder of the draft head or draft model; None for other drafters."""
        has_none = self.has_source(Source.MTP, Source.NGRAMS)
        return None if has_none else self.speculative_draft_model_path

    @property
    def drafts_with_a_model(self) -> bool:
        """True if a small model drafts (STANDALONE)."""
        return self.has_source(Source.MODEL)

    @property
    def from_text(self) -> bool:
        """True if all drafts are n-grams (NGRAM)."""
        return self.has_source(Source.NGRAMS)

    @property
    def drafts_on_host(self) -> bool:
        """True if NGRAM drafts on the host."""
        return self.from_text and not self.drafts_from_table

    @property
    def drafts_from_table(self) -> bool:
        """True if NGRAM drafts on the device, from a hash table."""
        return self.speculative_ngram_backend == DEVICE

    @property
    def copies_text(self) -> bool:
        """True if n-grams are drafted, alone or merged."""
        return self.from_text or self.joins_copies

    @property
    def verification(self) -> str:
        """Accept rule, one of `shared.spec.acceptance.RULES`."""
        return (
            "block"
            if self.speculative_use_block_verification
            else self.speculative_accept_rule or ACCEPT_RULES[0]
        )

    @property
    def accept_rates(self) -> tuple[float, ...] | None:
        """Simulated acceptance rate of each position; None without simulation."""
        return rates_of(self.speculative_simulate_accept_length)

    @property
    def topk(self) -> int:
        """k, number of nodes expanded per level."""
        return self.speculative_eagle_topk or 1

    @property
    def num_steps(self) -> int:
        """S, depth; for a chain it follows from its number of nodes."""
        if self.speculative_num_steps:
            return self.speculative_num_steps
        if self.has_form(Form.TOKEN):
            return NAIVE_SHAPE[0]
        if self.from_text:
            return (self.speculative_num_draft_tokens or DEFAULT_NODES) - 1
        nodes = self.speculative_num_draft_tokens
        return min(nodes - 1, MOST_STEPS) if nodes and self.topk == 1 else CHAIN_SHAPE[0]

    @property
    def num_draft_tokens(self) -> int:
        """N, number of nodes with the root."""
        return self.speculative_num_draft_tokens or self.num_steps + 1


_SHAPE_FIELDS = (
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)
