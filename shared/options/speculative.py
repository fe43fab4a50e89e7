"""Flags of speculative decoding."""

from dataclasses import dataclass, fields, replace
from typing import Self

from shared.options.adaptive import MOST_STEPS
from shared.options.algorithms import (
    ALGORITHMS,
    HEAD_ALGORITHMS,
    HOST_ALGORITHM,
    JOINED_ALGORITHMS,
    MODEL_ALGORITHM,
    WITH_COPIES,
    algorithm_of,
)
from shared.options.flags import ConfigError, check_rules, flag, spelling
from shared.options.lot import rates_of
from shared.options.ngram import BACKENDS, DEFAULT_NODES, DEVICE, HOST

EXACT, REJECTION = ACCEPT_RULES = ("exact", "rejection")

LAYER_IDS = ("inputs", "outputs")
"""What layers that a head lists may mean; see `shared.drafts.streams`."""

CHAIN_SHAPE = (3, 1, 4)
TREE_SHAPE = (5, 4, 8)
NAIVE_SHAPE = (1, 1, 2)
"""S, k and N where no flag says otherwise; the tree is that of a Llama model with a head."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made, and how wide a draft tree is."""

    speculative_algorithm: str | None = flag(
        None, "NEXTN drafts with the checkpoint's own mtp layer, EAGLE, EAGLE3, DFLASH, DSPARK "
        "and DFLASH2 with a head, NAIVE_EAGLE one token with either, STANDALONE with a small "
        "model, NGRAM from seen text and corpora; NEXTN+NGRAM, and so with a head or a model, both "
        "in one tree; auto is the MTP layer of the checkpoint, else a published head in the "
        "hub's cache, else none; vLLM's names and lower case are taken too (default: no drafts)",
        aliases=("--speculative-algo",),
    )  # fmt: skip
    speculative_draft_model_path: str | None = flag(
        None, "folder or hub id of a draft head, of a small model, or with NEXTN of an mtp layer "
        "in the speculators format", aliases=("--speculative-draft-model",), is_path=True,
    )  # fmt: skip
    speculative_draft_model_revision: str | None = flag(
        None,
        "branch, tag or commit of the hub id of --speculative-draft-model-path (default: main)",
    )
    speculative_num_steps: int | None = flag(
        None, "S, levels of a draft tree (default: 3; 5 for a Llama model with a head)",
        low=1, high=16,
    )  # fmt: skip
    speculative_eagle_topk: int | None = flag(
        None, "k, nodes that a level expands (default: 1, a chain; 4 for a Llama model with a "
        "head)", low=1, high=16,
    )  # fmt: skip
    speculative_num_draft_tokens: int | None = flag(
        None, "N, nodes of a draft tree with its root (default: S + 1 of a chain; 8 for a Llama "
        "model with a head; 12 with NGRAM)", low=2, high=64,
    )  # fmt: skip
    speculative_draft_window_size: int | None = flag(
        None, "positions that a DFLASH, DSPARK or DFLASH2 head looks back, at least the nodes "
        "of its chain (default: what its config.json says)", low=2, high=1 << 24,
    )  # fmt: skip
    speculative_aux_layer_convention: str | None = flag(
        None, "whether a head that lists layers of its target reads their inputs or their outputs "
        "(default: what its list tells)", choices=LAYER_IDS, metavar="WHICH",
        old_names=("--speculative-draft-layer-ids",),
    )  # fmt: skip
    speculative_token_map: str | None = flag(
        None, "JSON file with the ids of the tokens that are drafted, whose rows of the target's "
        "lm_head are read for a draft in place of all (default: all tokens are drafted); "
        "python -m models.token_map makes one", metavar="FILE", is_path=True,
        is_file="read",
    )  # fmt: skip
    speculative_ngram_backend: str | None = flag(
        None, "where NGRAM stores n-grams: a hash table on the device, whose steps overlap, or a "
        "trie on the host (default: host)",
        choices=BACKENDS, metavar="WHERE", old_names=("--speculative-ngram-index",),
        values={"trie": HOST, "table": DEVICE},
    )  # fmt: skip
    speculative_accept_rule: str | None = flag(
        None, "exact: the output is identical to plain decoding; rejection: rejection sampling, "
        "the output follows the same distribution and more draft tokens of a chain are accepted "
        "(default: exact)", choices=ACCEPT_RULES, metavar="RULE",
        old_names=("--accept-rule",), values={"match": EXACT},
        switches={"--speculative-use-rejection-sampling": REJECTION},
    )  # fmt: skip
    speculative_use_block_verification: bool = flag(
        False,
        "reject chains as a whole, not token by token",
        old_names=("--block-verification",),
    )
    speculative_simulate_accept_length: str | None = flag(
        None, "accept drafts by lot, for measurements: tokens of a step on average with the bonus "
        "token, such as 2.5, or how often each level's draft is accepted, such as 0.9,0.6,0; the "
        "texts are not the model's", metavar="L", is_list=True,
        aliases=("--speculative-simulate-acc-len",),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_rules(self)
        if self.speculative_algorithm is not None:
            name = algorithm_of(self.speculative_algorithm)
            object.__setattr__(self, "speculative_algorithm", name)  # while it is being made
        rates_of(self.speculative_simulate_accept_length)
        if self.speculative_algorithm is None:
            self._refuse_draft_flags()

    def _refuse_draft_flags(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) not in (None, False):
                raise ConfigError(
                    f"{spelling(item.name)} needs a drafter; add --speculative-algorithm "
                    f"{ALGORITHMS[0]} or leave the flag out"
                )

    def settled(self, drafts_trees: bool, block: int | None) -> Self:
        """With no shape left open, in a start that drafts.

        Args:
          drafts_trees: See `ModelConfig`.
          block: Nodes of the chain of a head with a block; None without one.
        """
        if self.speculative_algorithm is None:
            return self
        if self.from_text:
            return replace(self, speculative_num_draft_tokens=self.num_draft_tokens)
        shape = (self.num_steps, self.topk, self.num_draft_tokens)
        is_open = all(getattr(self, item) is None for item in _SHAPE_FIELDS)
        has_trees = self.drafter in HEAD_ALGORITHMS and self.verification == "exact"
        if is_open and drafts_trees and has_trees:
            shape = TREE_SHAPE
        if block is not None:
            shape = (block - 1, 1, block)
        return replace(self, **dict(zip(_SHAPE_FIELDS, shape, strict=True)))

    @property
    def drafts(self) -> bool:
        """Whether anything drafts, on the host or on the device."""
        return self.speculative_algorithm is not None

    @property
    def drafter(self) -> str | None:
        """What drafts, without the copies that join; None without drafts."""
        name = self.speculative_algorithm
        return None if name is None else name.removesuffix(WITH_COPIES)

    @property
    def joins_copies(self) -> bool:
        """Whether copies of seen text join what the device drafts."""
        return self.speculative_algorithm in JOINED_ALGORITHMS

    @property
    def with_mtp(self) -> bool:
        """Whether an mtp layer drafts, the checkpoint's own or that of the draft model."""
        has_path = self.speculative_draft_model_path is not None
        is_own = self.drafts and not (has_path or self.from_text)
        return is_own or self.drafter == "NEXTN"

    @property
    def mtp_path(self) -> str | None:
        """Folder of an mtp layer that drafts in place of the checkpoint's own; None without one."""
        return self.speculative_draft_model_path if self.drafter == "NEXTN" else None

    @property
    def head_path(self) -> str | None:
        """Folder of a head or a small model; None of a drafter that has none."""
        has_none = self.drafter in ("NEXTN", HOST_ALGORITHM)
        return None if has_none else self.speculative_draft_model_path

    @property
    def drafts_with_a_model(self) -> bool:
        """Whether the draft model is a whole model."""
        return self.drafter == MODEL_ALGORITHM

    @property
    def from_text(self) -> bool:
        """Whether drafts come from text that was seen alone, not from a model."""
        return self.speculative_algorithm == HOST_ALGORITHM

    @property
    def drafts_on_host(self) -> bool:
        """Whether the host has that text, and brings the drafts."""
        return self.from_text and not self.drafts_from_table

    @property
    def drafts_from_table(self) -> bool:
        """Whether the device has that text, in a table of n-grams."""
        return self.speculative_ngram_backend == DEVICE

    @property
    def copies_text(self) -> bool:
        """Whether drafts come from text that was seen, alone or beside a drafter's."""
        return self.from_text or self.joins_copies

    @property
    def verification(self) -> str:
        """Which of `shared.spec.acceptance.RULES` accepts drafts."""
        return (
            "block"
            if self.speculative_use_block_verification
            else self.speculative_accept_rule or ACCEPT_RULES[0]
        )

    @property
    def accept_rates(self) -> tuple[float, ...] | None:
        """How often the draft of each level is accepted by lot; None where drafts are judged."""
        return rates_of(self.speculative_simulate_accept_length)

    @property
    def topk(self) -> int:
        """k, nodes that a level expands."""
        return self.speculative_eagle_topk or 1

    @property
    def num_steps(self) -> int:
        """S, levels below the root; a chain's follow from its number of nodes."""
        if self.speculative_num_steps:
            return self.speculative_num_steps
        if self.speculative_algorithm == "NAIVE_EAGLE":
            return NAIVE_SHAPE[0]
        if self.from_text:
            return (self.speculative_num_draft_tokens or DEFAULT_NODES) - 1
        nodes = self.speculative_num_draft_tokens
        return min(nodes - 1, MOST_STEPS) if nodes and self.topk == 1 else CHAIN_SHAPE[0]

    @property
    def num_draft_tokens(self) -> int:
        """N, nodes with the root."""
        return self.speculative_num_draft_tokens or self.num_steps + 1


_SHAPE_FIELDS = (
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)
