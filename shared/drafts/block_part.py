"""Parts that a kind of block head has in addition to a DFlash head."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from shared.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class PartTensor:
    """Tensor of a part in a head's files.

    Attributes:
      name: Name of the parameter.
      tensor: Name of the tensor.
      shape: Its shape.
      is_lm_head: True for rows of output tokens, which are sharded like `lm_head`. Other tensors
        are replicated on all ranks.
      bias: Name of the tensor with its bias; None without one.
    """

    name: str
    tensor: str
    shape: tuple[int, ...]
    is_lm_head: bool = False
    bias: str | None = None


@dataclass(frozen=True, kw_only=True)
class BlockPart(ABC):
    """Settings of a part of a block head."""

    @abstractmethod
    def tensors(self, layer: ModelConfig, draft_vocab: int) -> list[PartTensor]:
        """Returns the tensors of the part in loading order.

        Args:
          layer: Config of the head's layers.
          draft_vocab: Size of its output vocabulary.
        """

    def inferred(
        self, shape_of: Callable[[str], tuple[int, ...] | None], layer: ModelConfig
    ) -> Self:
        """Returns the part with the settings that its tensors determine.

        Args:
          shape_of: Returns the shape of a tensor; None if the files do not contain it.
          layer: Config of the head's layers.
        """
        return self
