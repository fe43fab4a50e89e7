"""What drafts on the device, as one value: the start plans with it and backends are made for it."""

from dataclasses import dataclass, replace
from typing import Self

from shared.drafts.block import BlockConfig
from shared.drafts.config import DraftConfig, DraftSizes
from shared.models.config import ModelConfig
from shared.models.ranks import local

NOTHING, MTP, MODEL, TEXT = "none", "NEXTN", "STANDALONE", "NGRAM"
"""Kinds beside those of a head, which are `DraftConfig.kind`."""


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """What drafts on the device; it holds no weights.

    Attributes:
      kind: "none" where nothing drafts on the device, "NEXTN" of the target's own mtp layer,
        "EAGLE", "EAGLE3", "DFLASH", "DSPARK" or "DFLASH2" of a head, "STANDALONE" of a whole model,
        "NGRAM" of the table of seen text.
      sizes: What a drafter keeps on the device between steps; None where none drafts.
      head: Settings of a head; None of the other kinds.
      model: Settings of a whole model that drafts; None of the other kinds.
      token_map: The target's ids of the tokens that are drafted, ascending, where the rows of the
        target's head that score them are read in place of all; None: all tokens are drafted.
    """

    kind: str
    sizes: DraftSizes | None
    head: DraftConfig | None
    model: ModelConfig | None
    token_map: tuple[int, ...] | None = None

    @classmethod
    def none(cls) -> Self:
        """Nothing drafts on the device; the host may bring drafts."""
        return cls(kind=NOTHING, sizes=None, head=None, model=None)

    @classmethod
    def of_mtp(cls, target: ModelConfig) -> Self:
        """The target's own mtp layer drafts."""
        return cls(kind=MTP, sizes=DraftSizes.of_layer(target), head=None, model=None)

    @classmethod
    def of_head(cls, head: DraftConfig) -> Self:
        """A head drafts; it has a checkpoint of its own."""
        return cls(kind=head.kind, sizes=head.sizes, head=head, model=None)

    @classmethod
    def of_model(cls, model: ModelConfig) -> Self:
        """A small model with the same tokenizer drafts, as STANDALONE does."""
        return cls(kind=MODEL, sizes=DraftSizes.of_model(model), head=None, model=model)

    @classmethod
    def of_text(cls) -> Self:
        """What was seen of texts drafts; see `shared.spec.ngram`."""
        return cls(kind=TEXT, sizes=None, head=None, model=None)

    def local(self, count: int) -> Self:
        """What one of `count` ranks has of it.

        Raises:
          ValueError: Something does not divide; see `shared.models.ranks.local`.
        """
        return replace(
            self,
            sizes=self.sizes and replace(self.sizes, model=local(self.sizes.model, count)),
            head=self.head and replace(self.head, layer=local(self.head.layer, count)),
            model=self.model and local(self.model, count),
        )

    @property
    def on_device(self) -> bool:
        """Whether a drafter drafts on the device, which has a memory to feed."""
        return self.sizes is not None

    @property
    def from_text(self) -> bool:
        """Whether the device drafts from the table of seen text."""
        return self.kind == TEXT

    @property
    def with_mtp(self) -> bool:
        """Whether the target's mtp layer is needed."""
        return self.kind == MTP

    @property
    def block(self) -> BlockConfig | None:
        """What is drafted in one pass; None where drafts are trees."""
        return self.head.block if self.head else None

    @property
    def streams(self) -> tuple[int, ...]:
        """Residual streams of the target that are kept for what drafts."""
        return self.head.aux_streams if self.head else ()

    @property
    def num_draft_ids(self) -> int:
        """Tokens of a head's own vocabulary, each of which has an id of the target's."""
        return self.head.draft_vocab if self.head and self.head.has_draft_vocab else 0
