"""What the config.json of a DFlash2 draft model says beside that of a DFlash one."""

from dataclasses import dataclass

from shared.drafts.formats import Stated
from shared.models.config import ModelConfig
from shared.models.ranks import VOCAB_GROUP


@dataclass(frozen=True, kw_only=True)
class ConvConfig:
    """The convolutions around each part of a layer, along the rows of a block.

    Attributes:
      taps: Rows that an output reads: its own and those before it.
      group_size: Neighbouring columns whose coefficients move by the same number.
    """

    taps: int
    group_size: int

    def moved(self, hidden: int) -> int:
        """Numbers that move the coefficients of a part's two convolutions, for each row.

        Args:
          hidden: Size of a hidden state.
        """
        return 2 * self.taps * (hidden // self.group_size)


@dataclass(frozen=True, kw_only=True)
class SelectorConfig:
    """How a slot's draft is selected among its best tokens, by the token before.

    Attributes:
      rank: Width of what pairs of tokens are compared by.
      candidates: Best tokens of a slot, among which one is selected.
    """

    rank: int
    candidates: int


def conv_of(stated: Stated, layer: ModelConfig, size: int) -> ConvConfig:
    """The convolutions of a DFlash2 draft model.

    Args:
      layer: Sizes of its layers.
      size: Rows of its block.

    Raises:
      ValueError: A field is missing or out of range; one sentence that names it.
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


def selector_of(stated: Stated, layer: ModelConfig) -> SelectorConfig:
    """The selector of candidates of a DFlash2 draft model.

    Raises:
      ValueError: A field is missing or out of range; one sentence that names it.
    """
    most = min(VOCAB_GROUP, layer.vocab)  # what ranks leave of a row
    return SelectorConfig(
        rank=_whole(stated, "selector_rank", layer.vocab, "the vocabulary"),
        candidates=_whole(stated, "selector_top_k", most, "what is ranked of a slot"),
    )


def _whole(stated: Stated, field: str, most: int, what: str) -> int:
    value = stated.settings.get(field)
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"the draft model's {field} must be 1 to {most} ({what}), got {value!r}")
    return value
