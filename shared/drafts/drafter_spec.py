"""Drafter specification: the drafter on the device, as one value for startup and backends."""

from dataclasses import dataclass, replace
from typing import Self

from shared.drafts.config import DraftConfig, DraftStateSizes
from shared.drafts.dflash_config import BlockConfig
from shared.drafts.kinds import NEXTN, NGRAM, STANDALONE
from shared.models.config import ModelConfig
from shared.models.tp_sharding import shard_config

NOTHING = "none"
"""Kind without a drafter on the device."""


@dataclass(frozen=True, kw_only=True)
class DrafterSpec:
    """Drafter on the device, without weights.

    Attributes:
      kind: Name of a kind of `shared.drafts.kinds`, or "none" without a drafter on the device.
      sizes: State of the drafter on the device between steps; None without one.
      head: Config of a head; else None.
      model: Config of a draft model; else None.
      token_map: Target token ids of a reduced draft vocabulary, in ascending order, whose LM-head
        rows are read instead of all; None for all tokens.
    """

    kind: str
    sizes: DraftStateSizes | None
    head: DraftConfig | None
    model: ModelConfig | None
    token_map: tuple[int, ...] | None = None

    @classmethod
    def none(cls) -> Self:
        """Returns the specification without a drafter on the device; the host may still supply
        draft tokens.
        """
        return cls(kind=NOTHING, sizes=None, head=None, model=None)

    @classmethod
    def of_mtp(cls, target: ModelConfig) -> Self:
        """Returns the specification of the target's own MTP layer."""
        return cls(
            kind=NEXTN.name, sizes=DraftStateSizes.of_layers(target, 1), head=None, model=None
        )

    @classmethod
    def of_head(cls, head: DraftConfig) -> Self:
        """Returns the specification of a draft head with its own checkpoint."""
        return cls(kind=head.kind, sizes=head.sizes, head=head, model=None)

    @classmethod
    def of_model(cls, model: ModelConfig) -> Self:
        """Returns the specification of a small draft model with the same tokenizer (STANDALONE)."""
        return cls(
            kind=STANDALONE.name, sizes=DraftStateSizes.of_model(model), head=None, model=model
        )

    @classmethod
    def of_text(cls) -> Self:
        """Returns the specification of the n-gram table; see `shared.spec.ngram`."""
        return cls(kind=NGRAM.name, sizes=None, head=None, model=None)

    def local(self, count: int) -> Self:
        """Returns the shard of one of `count` TP ranks.

        Raises:
          ValueError: A size is not divisible; see `shared.models.tp_sharding.shard_config`.
        """
        return replace(
            self,
            sizes=self.sizes and self.sizes.local(count),
            head=self.head and replace(self.head, layer=shard_config(self.head.layer, count)),
            model=self.model and shard_config(self.model, count),
        )

    @property
    def on_device(self) -> bool:
        """True if a drafter with its own state runs on the device."""
        return self.sizes is not None

    @property
    def uses_ngrams(self) -> bool:
        """True if the device drafts from its n-gram table."""
        return self.kind == NGRAM.name

    @property
    def with_mtp(self) -> bool:
        """True if the target's MTP layer is needed."""
        return self.kind == NEXTN.name

    @property
    def block(self) -> BlockConfig | None:
        """Block of draft tokens predicted in one pass; None for drafters of trees."""
        return self.head.block if self.head else None

    @property
    def streams(self) -> tuple[int, ...]:
        """Indices of the target's residual streams that are stored as auxiliary hidden states."""
        return self.head.aux_streams if self.head else ()

    @property
    def num_map_entries(self) -> int:
        """Entries of integer arrays of a head: ids of a draft vocabulary, clusters of tokens."""
        if self.head is None:
            return 0
        ids = self.head.draft_vocab if self.head.has_draft_vocab else 0
        return ids + (self.head.layer.vocab if self.head.clusters else 0)
