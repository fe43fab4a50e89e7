"""Dummy weights: random parameters from a config.json alone (`--load-format dummy`).

`shared.models.dummy_elements` defines their elements. If the config.json declares quantised
weights, the tensors that such releases quantise consist of quantised elements and scales.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Self

import numpy as np
from jaxtyping import Int32

from shared.models.checkpoint import Array, Checkpoint
from shared.models.config import ModelConfig
from shared.models.dummy_elements import InitSpec, init_of, parameter_array
from shared.models.formats.weight_format import StoredTensor, TensorEncoding
from shared.models.parameter import CheckpointTensor, Parameter
from shared.models.parameter_arrays import shard_array
from shared.models.parameters import parameters
from shared.models.tied import LM_HEAD
from shared.models.vision_config import TENSORS, VisionConfig
from shared.models.vision_parameters import vision_encoder_parameters

STORED_BYTES = 2
"""Bytes of an unquantised element in released checkpoints; loading progress counts such
bytes."""


class DummyCheckpoint:
    """Checkpoint without files, with the interface of `Checkpoint`.

    Backends generate its parameters on their device; `load` generates them in main
    memory.

    Attributes:
      names: Names of the tensors that a checkpoint of this model would contain, without prefix.
      encoding: Encoding of quantised weights; None if no weight is quantised.
    """

    def __init__(
        self,
        wanted: Sequence[Parameter],
        maps: dict[str, Int32[np.ndarray, "..."]],
        encoding: TensorEncoding | None,
    ) -> None:
        """Creates a checkpoint of these parameters.

        Args:
          wanted: All parameters of the model.
          maps: Integer tensors by name, such as the map of a draft vocabulary.
          encoding: Encoding of quantised weights in a release; None if no weight is quantised.
        """
        sources = {source.name for parameter in wanted for source in parameter.sources}
        self.names: Collection[str] = frozenset(sources | maps.keys())
        self._maps = maps
        self.encoding = encoding and encoding.of_dummies

    @classmethod
    def of_model(
        cls,
        config: ModelConfig,
        encoding: TensorEncoding | None,
        vision: VisionConfig | None = None,
    ) -> Self:
        """Creates the checkpoint of a whole model, with the MTP layer and vision encoder that its
        config names.
        """
        tower = [] if vision is None else vision_encoder_parameters(vision)
        return cls([*parameters(config, config.has_mtp), *tower], {}, encoding)

    @property
    def has_vision_encoder(self) -> bool:
        """True if there is a vision encoder."""
        return any(name.startswith(TENSORS) for name in self.names)

    def has_mtp(self, config: ModelConfig) -> bool:
        """Returns True if there is an MTP layer that the config names."""
        return config.mtp is not None and config.mtp.is_in(self.names)

    def has(self, name: str) -> bool:
        """Returns True if a tensor exists."""
        return name in self.names

    def unties(self, config: ModelConfig) -> bool:
        """Returns True if there is a separate LM head though the config ties it."""
        return config.tied and self.has(LM_HEAD)

    def tensor(self, name: str) -> Array:
        """Returns one of the integer tensors."""
        return self._maps[name]

    def num_bytes(self, wanted: Sequence[Parameter]) -> int:
        """Returns the bytes that these parameters would take in stored form."""
        return sum(map(self._size_of, wanted))

    def known(self, wanted: Sequence[Parameter]) -> set[str]:
        """Returns the names of the tensors that these parameters use."""
        return {source.name for parameter in wanted for source in parameter.sources}

    def check(self, config: ModelConfig, with_mtp: bool) -> None:
        """Does nothing: all tensors that a config.json names exist."""

    def check_parameters(self, wanted: Sequence[Parameter]) -> None:
        """Does nothing, for the same reason as `check`."""

    def init_spec(self, parameter: Parameter) -> InitSpec:
        """Returns the initialisation of a parameter, or of its quantised elements."""
        encoding = self.encoding_of(parameter)
        return init_of(parameter.whole or parameter) if encoding is None else encoding.init

    def encoding_of(self, parameter: Parameter) -> TensorEncoding | None:
        """Returns the encoding of a parameter; None if it is not quantised."""
        is_quantised = all(self._encoding(source) for source in parameter.sources)
        return self.encoding if is_quantised else None

    def stored(self, parameter: Parameter) -> list[StoredTensor | None]:
        """Returns the quantised tensors of a parameter; see `Checkpoint.stored`."""
        return [
            None if (encoding := self._encoding(source)) is None else _stored(source, encoding)
            for source in parameter.sources
        ]

    def load(
        self,
        parameter: Parameter,
        dtype: np.dtype | type,
        progress: Callable[[int], None] = lambda num_bytes: None,
    ) -> Array:
        """Generates one parameter; for the arguments see `Checkpoint.load`."""
        whole = parameter.whole or parameter
        made = parameter_array(whole, self.init_spec(whole))
        if (encoding := self.encoding_of(whole)) is not None:
            made = encoding.scaled_dummy(whole, made)
        progress(self._size_of(parameter))
        return shard_array(parameter, made).astype(np.float32 if parameter.float32 else dtype)

    def _size_of(self, parameter: Parameter) -> int:
        if (encoding := self.encoding_of(parameter)) is not None:
            return encoding.num_bytes(parameter.shape)
        return STORED_BYTES * math.prod(parameter.shape)

    def _encoding(self, source: CheckpointTensor) -> TensorEncoding | None:
        is_quantised = self.encoding is not None and self.encoding.is_usual(source.name)
        return self.encoding if is_quantised else None


def _stored(source: CheckpointTensor, encoding: TensorEncoding) -> StoredTensor:
    """Returns a tensor with scales for checks only: all are exact in bfloat16."""
    return StoredTensor(source, encoding, lambda plane: np.ones(1, np.float32))


Stored = Checkpoint | DummyCheckpoint
"""Source of weights: files, or generated."""
