"""Config of a DFlash2 draft model, in addition to that of a DFlash model."""

from dataclasses import dataclass
from itertools import product

from shared.drafts.block_part import BlockPart, PartTensor
from shared.drafts.raw_config import RawDraftConfig
from shared.models.config import ModelConfig
from shared.models.sharded_range import VOCAB_GROUP

SELECTOR = "selector."
"""Prefix of the parameters of the selector."""

SELECTOR_BEFORE = "candidate_selector.predecessor_codebook"

CONVOLVED = ("attention", "mlp")
"""Parts of a layer that have a convolution before and after them."""


@dataclass(frozen=True, kw_only=True)
class ConvConfig(BlockPart):
    """Convolutions around each part of a layer, along the rows of a block.

    Attributes:
      taps: Kernel size: an output reads its own row and the rows before it.
      group_size: Neighbouring columns that share the dynamic part of their coefficients.
    """

    taps: int
    group_size: int

    def moved(self, hidden: int) -> int:
        """Returns the dynamic coefficients per row of a part's two convolutions.

        Args:
          hidden: Hidden size.
        """
        return 2 * self.taps * (hidden // self.group_size)

    def tensors(self, layer: ModelConfig, draft_vocab: int) -> list[PartTensor]:
        """Same as `BlockPart.tensors`: the two convolutions around each part of a layer."""
        hidden, tensors = layer.hidden, []
        for i, part in product(range(layer.num_layers), CONVOLVED):
            name, folder = f"conv.{i}.{part}", f"layers.{i}.{part}_conv"
            base, moved = (2, self.taps, hidden), (self.moved(hidden), hidden)
            moving = f"{folder}.kernel_projection.weight"
            tensors += [
                PartTensor(name=f"{name}.base", tensor=f"{folder}.base_kernel", shape=base),
                PartTensor(name=f"{name}.moved", tensor=moving, shape=moved),
            ]
        return tensors


@dataclass(frozen=True, kw_only=True)
class SelectorConfig(BlockPart):
    """Selector of a slot's draft token among its top candidates, conditioned on the token before.

    Attributes:
      rank: Width of the codebooks that score pairs of tokens.
      candidates: Top candidates of a slot.
    """

    rank: int
    candidates: int

    def tensors(self, layer: ModelConfig, draft_vocab: int) -> list[PartTensor]:
        """Same as `BlockPart.tensors`; replicated on all ranks, because few rows are read."""
        folder, tokens = "candidate_selector", (layer.vocab, self.rank)
        after, projection = f"{folder}.successor_codebook", f"{folder}.hidden_projection.weight"
        projected = (self.rank, layer.hidden)
        return [
            PartTensor(name=f"{SELECTOR}before", tensor=SELECTOR_BEFORE, shape=tokens),
            PartTensor(name=f"{SELECTOR}after", tensor=after, shape=tokens),
            PartTensor(name=f"{SELECTOR}hidden", tensor=projection, shape=projected),
        ]


def conv_of(stated: RawDraftConfig, layer: ModelConfig, size: int) -> ConvConfig:
    """Reads the convolutions of a DFlash2 draft model.

    Args:
      stated: Normalised fields of its config.json.
      layer: Config of its layers.
      size: Rows of its block.

    Raises:
      ValueError: A field is missing or out of range; the message names it.
    """
    conv = ConvConfig(
        taps=_whole(stated, "conv_kernel_size", size, "the block"),
        group_size=_whole(stated, "conv_group_size", layer.hidden, "the hidden size"),
    )
    if layer.hidden % conv.group_size:
        raise ValueError(
            f"the draft model's conv_group_size ({conv.group_size}) must divide its hidden_size "
            f"({layer.hidden})"
        )
    return conv


def selector_of(stated: RawDraftConfig, layer: ModelConfig) -> SelectorConfig:
    """Reads the candidate selector of a DFlash2 draft model.

    Raises:
      ValueError: A field is missing or out of range; the message names it.
    """
    most = min(VOCAB_GROUP, layer.vocab)  # candidates that TP ranks exchange
    return SelectorConfig(
        rank=_whole(stated, "selector_rank", layer.vocab, "the vocabulary"),
        candidates=_whole(stated, "selector_top_k", most, "the top candidates of a slot"),
    )


def _whole(stated: RawDraftConfig, field: str, most: int, what: str) -> int:
    value = stated.settings.get(field)
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"the draft model's {field} must be 1 to {most} ({what}), got {value!r}")
    return value
