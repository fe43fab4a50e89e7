"""Dummy weights: random parameters from a config.json alone (`--load-format dummy`).

The weights are bitwise equal on all backends. An element is a 32-bit integer hash of its
parameter's name, its layer and its index. The top bits of the hash form an integer that float32
represents exactly. One multiplication scales it; the constant added after that is 0 or leaves the
sum exact, so a fused multiply-add gives the same bits as two operations.

If the config.json declares FP8, the weights that FP8 releases quantise are an FP8 value times a
scale. The values are odd integers below 16, which FP8 represents exactly.
"""

import math
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from jaxtyping import Float32, Int32, UInt32

from shared.models.checkpoint import Array, Checkpoint
from shared.models.config import ModelConfig
from shared.models.formats import fp8, fp8_w8a16
from shared.models.formats.fp8 import Granularity
from shared.models.parameters import Parameter, parameters
from shared.models.tied import LM_HEAD
from shared.models.vision_config import TENSORS, VisionConfig
from shared.models.vision_parameters import vision_encoder_parameters

ROUNDS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))
"""Shift and factor of each round of `hash_u32`."""

LAST_SHIFT = 16

LOGIT_SCALE = 4.0
"""Standard deviation of the logits: near ties are rare, and no token is certain."""

STORED_BYTES = 2
"""Bytes of an element that is not FP8 in released checkpoints; loading progress counts such
bytes."""


@dataclass(frozen=True)
class InitSpec:
    """Initialisation of a parameter: a uniform distribution around a centre.

    Attributes:
      bits: An element is one of 2^bits odd integers between -2^bits and 2^bits.
      step: Multiplier of the integer, a float32. A power of two if `centre` is not 0.
      centre: Constant added after the multiplication.
    """

    bits: int
    step: float
    centre: float

    @classmethod
    def of_matrix(cls, deviation: float) -> Self:
        """Returns a distribution around 0 with the given standard deviation."""
        return cls(23, float(np.float32(math.sqrt(3) * deviation / 2**23)), 0.0)

    @classmethod
    def around(cls, centre: float, reach: float) -> Self:
        """Returns a distribution of width `reach`, a power of two, around a multiple of 1/4."""
        return cls(9, reach / 2**9, centre)


def init_of(parameter: Parameter) -> InitSpec:
    """Returns the initialisation of a parameter.

    Matrices preserve the scale of their inputs. Norms scale by about 1. The decays of GDN layers
    are in the range of a trained model's. Router logits vary between tokens like the hidden states,
    so that the tokens of a batch select different experts.
    """
    leaf, inputs = parameter.name.rsplit(".", 1)[-1], parameter.shape[-1]
    if leaf == "a_log":
        return InitSpec.around(-0.75, 2.0)
    if leaf == "dt_bias":
        return InitSpec.around(-1.0, 2.0)
    if leaf == "score_bias":
        return InitSpec.around(0.0, 2.0**-5)  # much smaller than differences of scores
    if leaf.endswith("norm"):
        return InitSpec.around(1.0 - parameter.centre, 0.125)
    if leaf in ("embed", "lm_head"):
        return InitSpec.of_matrix(LOGIT_SCALE / math.sqrt(inputs))
    return InitSpec.of_matrix(1 / math.sqrt(inputs))


FP8_INIT = InitSpec(4, 1.0, 0.0)
"""Distribution of FP8 values."""
SIZES_LAW = InitSpec.around(1.0, 0.5)
"""Distribution of the relative sizes of scales; neighbouring scales differ, as in a trained
model."""
SCALE_STEP = 2**23 / math.sqrt(3 * 85 * 13 / 12)
"""Scale of relative size 1, as a multiple of the step of the target distribution. 85 is the mean
square of the FP8 values, 13 / 12 the mean square of the relative sizes."""
CODES = (0x4E4A4438, 0x57555351)
"""FP8 encodings of 1, 3, 5, 7 and of 9, 11, 13, 15, the first of each four in the lowest byte."""


def code_scales(parameter: Parameter, granularity: Granularity) -> Float32[np.ndarray, "..."]:
    """Returns the scales of an FP8 parameter according to `init_of`, exact in bfloat16.

    With block scales, a TP shard must consist of whole blocks.
    """
    whole = parameter.whole or parameter
    shape = fp8.scale_shape(whole.shape, granularity)
    own = replace(whole, name=f"{whole.name}{fp8_w8a16.SCALES}", shape=shape)
    step = np.float32(init_of(whole).step * SCALE_STEP)
    scales = fp8_w8a16.rounded(parameter_array(own, SIZES_LAW) * step)
    if parameter.whole is None or granularity is Granularity.CHANNEL:
        return parameter.share(scales)
    return np.take(scales, parameter.outputs[:: fp8.BLOCK] // fp8.BLOCK, parameter.axis)


def scales_of_outputs(
    parameter: Parameter, granularity: Granularity
) -> Float32[np.ndarray, "*stack outputs scales_in"]:
    """Returns the scales of `code_scales` repeated for each output, so that a TP shard may cut
    blocks.
    """
    whole = parameter.whole or parameter
    scales = code_scales(whole, granularity)
    if granularity is Granularity.BLOCK:
        scales = fp8.scales_of_outputs(scales, whole.shape[-2])
    return parameter.share(scales)


def keys_of(parameter: Parameter) -> UInt32[np.ndarray, " layers"]:
    """Returns a hash key per layer of a stack, or one for a parameter that is not stacked."""
    name = parameter.tied_to or parameter.name
    names = [f"{name}.{layer}" for layer in range(len(parameter.pieces))]
    return np.array([zlib.crc32(name.encode()) for name in names], np.uint32)


def hash_u32(words: UInt32[np.ndarray, " places"]) -> UInt32[np.ndarray, " places"]:
    """Permutes the 32-bit integers so that each output bit depends on all input bits.

    Source: the finaliser of MurmurHash3, Appleby 2011.
    """
    for shift, factor in ROUNDS:
        words = (words ^ (words >> np.uint32(shift))) * np.uint32(factor)
    return words ^ (words >> np.uint32(LAST_SHIFT))


def random_elements(
    init: InitSpec, key: np.uint32, places: UInt32[np.ndarray, " places"]
) -> Float32[np.ndarray, " places"]:
    """Returns the elements at some indices of a layer.

    Args:
      init: See `init_of`.
      key: Key of the layer, from `keys_of`.
      places: Flat indices into the layer's array, in row-major order.
    """
    tops = hash_u32(hash_u32(places) ^ key) >> np.uint32(32 - init.bits)
    whole = 2 * tops.astype(np.int32) + (1 - 2**init.bits)
    return whole.astype(np.float32) * np.float32(init.step) + np.float32(init.centre)


def parameter_array(parameter: Parameter, init: InitSpec) -> Float32[np.ndarray, "..."]:
    """Returns all elements of a whole parameter in float32, layer by layer."""
    keys = keys_of(parameter)
    places = np.arange(math.prod(parameter.shape) // len(keys), dtype=np.uint32)
    return np.stack([random_elements(init, key, places) for key in keys]).reshape(parameter.shape)


class DummyCheckpoint:
    """Checkpoint without files, with the interface of `Checkpoint`.

    Backends generate its parameters on their device; `load` generates them in main
    memory.

    Attributes:
      names: Names of the tensors that a checkpoint of this model would contain, without prefix.
      granularity: Granularity of the FP8 scales, block or channel; per-tensor scales are generated
        per channel. None if no weight is FP8.
    """

    def __init__(
        self,
        wanted: Sequence[Parameter],
        maps: dict[str, Int32[np.ndarray, "..."]],
        granularity: Granularity | None,
    ) -> None:
        """Creates a checkpoint of these parameters.

        Args:
          wanted: All parameters of the model.
          maps: Integer tensors by name, such as the map of a draft vocabulary.
          granularity: Granularity of the FP8 scales in a release; None if no weight is FP8.
        """
        sources = {source.name for parameter in wanted for source in parameter.sources}
        self.names: Collection[str] = frozenset(sources | maps.keys())
        self._maps = maps
        self.granularity = granularity and fp8_w8a16.kept_granularity(granularity)

    @classmethod
    def of_model(
        cls,
        config: ModelConfig,
        granularity: Granularity | None,
        vision: VisionConfig | None = None,
    ) -> Self:
        """Creates the checkpoint of a whole model, with the MTP layer and vision encoder that its
        config names.
        """
        tower = [] if vision is None else vision_encoder_parameters(vision)
        return cls([*parameters(config, config.has_mtp), *tower], {}, granularity)

    @property
    def has_mtp(self) -> bool:
        """True if there is an MTP layer."""
        return any(name.startswith("mtp.") for name in self.names)

    @property
    def has_vision_encoder(self) -> bool:
        """True if there is a vision encoder."""
        return any(name.startswith(TENSORS) for name in self.names)

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
        """Returns the initialisation of a parameter; for FP8, of its quantised values."""
        is_fp8 = self.granularity_of(parameter) is not None
        return FP8_INIT if is_fp8 else init_of(parameter.whole or parameter)

    def granularity_of(self, parameter: Parameter) -> Granularity | None:
        """Returns the scale granularity of an FP8 parameter; None if it is not FP8."""
        is_fp8 = all(fp8.is_quantised(source.name) for source in parameter.sources)
        return self.granularity if is_fp8 else None

    def as_w8a16(self, wanted: Sequence[Parameter]) -> fp8_w8a16.InWords:
        """Returns the parameters that can be stored as packed FP8; see `Checkpoint.as_w8a16`."""
        return {
            parameter.name: granularity
            for parameter in wanted
            if fp8_w8a16.is_kept_fp8(parameter.name)
            and (granularity := self.granularity_of(parameter)) is not None
            and all(fp8_w8a16.has_whole_blocks(source, granularity) for source in parameter.sources)
        }

    def as_w8a8(self, wanted: Sequence[Parameter]) -> frozenset[str]:
        """Returns the names of the parameters with block-scaled FP8; see `Checkpoint.as_w8a8`."""
        return frozenset(p.name for p in wanted if self.granularity_of(p) is Granularity.BLOCK)

    def has_scales(self, wanted: Sequence[Parameter]) -> frozenset[str]:
        """Returns the names of the parameters with at least one FP8 tensor."""
        return frozenset(
            parameter.name
            for parameter in wanted
            if self.granularity is not None
            and any(fp8.is_quantised(x.name) for x in parameter.sources)
        )

    def load(
        self,
        parameter: Parameter,
        dtype: np.dtype | type,
        progress: Callable[[int], None] = lambda num_bytes: None,
    ) -> Array:
        """Generates one parameter; for the arguments see `Checkpoint.load`."""
        whole = parameter.whole or parameter
        made = parameter_array(whole, self.init_spec(whole))
        if (granularity := self.granularity_of(whole)) is not None:
            made = fp8.apply_scales(made, code_scales(whole, granularity))
        progress(self._size_of(parameter))
        return parameter.share(made).astype(np.float32 if parameter.float32 else dtype)

    def _size_of(self, parameter: Parameter) -> int:
        if (granularity := self.granularity_of(parameter)) is not None:
            return fp8_w8a16.bytes_of_words(parameter.shape, granularity)
        return STORED_BYTES * math.prod(parameter.shape)


Stored = Checkpoint | DummyCheckpoint
"""Source of weights: files, or generated."""
