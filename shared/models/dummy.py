"""Weights without files: what `--load-format dummy` makes of a config.json alone.

They are random, and the same on every backend to the last bit. An element is a hash, in whole
numbers of 32 bits, of its parameter's name, its layer and its place there. The top bits of the hash
are a whole number that float32 holds exactly; one product brings it to its size, and what is added
to that is 0 or leaves the sum exact, so that a fused multiply-add gives the same bits as two steps.

Where the config.json states FP8, what such releases have in FP8 is a code times a scale here too:
the code stands for one of the odd whole numbers below 16, which FP8 holds exactly.
"""

import math
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from jaxtyping import Float32, Int32, UInt32

from shared.models import fp8, fp8_words
from shared.models.checkpoint import Array, Checkpoint
from shared.models.config import ModelConfig
from shared.models.fp8 import Granularity
from shared.models.parameters import Parameter, parameters
from shared.models.pieces import Source
from shared.models.tied import LM_HEAD
from shared.models.tower import tower_parameters
from shared.models.vision import TENSORS, VisionConfig

ROUNDS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))
"""Shift and factor of each round of `mixed`."""

LAST_SHIFT = 16

LOGIT_SCALE = 4.0
"""Deviation of the logits: near ties are rare, and yet no token is certain."""

STORED_BYTES = 2
"""Of an element that is not FP8, as released checkpoints store it; the progress of a load counts
such bytes."""


@dataclass(frozen=True)
class Law:
    """How the elements of a parameter are spread: evenly, around a centre.

    Attributes:
      bits: An element is one of 2^bits odd whole numbers between -2^bits and 2^bits.
      step: What the number is multiplied with, a float32. A power of two where there is a centre.
      centre: What is added.
    """

    bits: int
    step: float
    centre: float

    @classmethod
    def of_matrix(cls, deviation: float) -> Self:
        """Around 0, with the given standard deviation."""
        return cls(23, float(np.float32(math.sqrt(3) * deviation / 2**23)), 0.0)

    @classmethod
    def around(cls, centre: float, reach: float) -> Self:
        """At most `reach`, a power of two, away from a centre that is a multiple of 1/4."""
        return cls(9, reach / 2**9, centre)


def law_of(parameter: Parameter) -> Law:
    """How the elements of a parameter are spread.

    Matrices keep the size of what they are given. Norms scale by about 1. The decays of
    gated-delta layers have the sizes of a trained model's. A router's logits differ from row to row
    as the rows do, so that a batch's rows choose different experts.
    """
    leaf, inputs = parameter.name.rsplit(".", 1)[-1], parameter.shape[-1]
    if leaf == "a_log":
        return Law.around(-0.75, 2.0)
    if leaf == "dt_bias":
        return Law.around(-1.0, 2.0)
    if leaf == "score_bias":
        return Law.around(0.0, 2.0**-5)  # far less than scores differ by
    if leaf.endswith("norm"):
        return Law.around(1.0 - parameter.centre, 0.125)
    if leaf in ("embed", "lm_head"):
        return Law.of_matrix(LOGIT_SCALE / math.sqrt(inputs))
    return Law.of_matrix(1 / math.sqrt(inputs))


CODES_LAW = Law(4, 1.0, 0.0)
"""Of the numbers that codes stand for."""
SIZES_LAW = Law.around(1.0, 0.5)
"""Of the sizes of scales; those of neighbours differ, as a trained model's do."""
SCALE_STEP = 2**23 / math.sqrt(3 * 85 * 13 / 12)
"""A scale of size 1, as a multiple of the step of the law that the products are to follow: 85 is
the mean square of the codes' numbers, 13 / 12 that of the sizes."""
CODES = (0x4E4A4438, 0x57555351)
"""Codes of the numbers 1, 3, 5, 7 and 9, 11, 13, 15, the first of each four in its lowest byte."""


def code_scales(parameter: Parameter, granularity: Granularity) -> Float32[np.ndarray, "..."]:
    """The scales of a parameter in FP8, by the law of `law_of`; they are numbers of bfloat16.

    A rank's share has whole blocks of those that blocks have.
    """
    whole = parameter.whole or parameter
    shape = fp8.scale_shape(whole.shape, granularity)
    own = replace(whole, name=f"{whole.name}{fp8_words.SCALES}", shape=shape)
    step = np.float32(law_of(whole).step * SCALE_STEP)
    scales = fp8_words.rounded(parameter_array(own, SIZES_LAW) * step)
    if parameter.whole is None or granularity is Granularity.CHANNEL:
        return parameter.share(scales)
    return np.take(scales, parameter.outputs[:: fp8.BLOCK] // fp8.BLOCK, parameter.axis)


def scales_of_outputs(
    parameter: Parameter, granularity: Granularity
) -> Float32[np.ndarray, "*stack outputs scales_in"]:
    """As `code_scales`, repeated for each output of a block, which a share may cut."""
    whole = parameter.whole or parameter
    scales = code_scales(whole, granularity)
    if granularity is Granularity.BLOCK:
        scales = fp8.scales_of_outputs(scales, whole.shape[-2])
    return parameter.share(scales)


def keys_of(parameter: Parameter) -> UInt32[np.ndarray, " layers"]:
    """What names each layer of a stack, or the one array of a parameter that is none."""
    name = parameter.tied_to or parameter.name
    names = [f"{name}.{layer}" for layer in range(len(parameter.pieces))]
    return np.array([zlib.crc32(name.encode()) for name in names], np.uint32)


def mixed(words: UInt32[np.ndarray, " places"]) -> UInt32[np.ndarray, " places"]:
    """A permutation of the words in which every bit depends on every bit.

    Source: the finaliser of MurmurHash3, Appleby 2011.
    """
    for shift, factor in ROUNDS:
        words = (words ^ (words >> np.uint32(shift))) * np.uint32(factor)
    return words ^ (words >> np.uint32(LAST_SHIFT))


def elements(
    law: Law, key: np.uint32, places: UInt32[np.ndarray, " places"]
) -> Float32[np.ndarray, " places"]:
    """The elements at some places of a layer.

    Args:
      law: See `law_of`.
      key: Of the layer, from `keys_of`.
      places: Counted through the layer's array, row by row.
    """
    tops = mixed(mixed(places) ^ key) >> np.uint32(32 - law.bits)
    whole = 2 * tops.astype(np.int32) + (1 - 2**law.bits)
    return whole.astype(np.float32) * np.float32(law.step) + np.float32(law.centre)


def parameter_array(parameter: Parameter, law: Law) -> Float32[np.ndarray, "..."]:
    """All elements of a whole parameter by the law, in float32, layer by layer."""
    keys = keys_of(parameter)
    places = np.arange(math.prod(parameter.shape) // len(keys), dtype=np.uint32)
    return np.stack([elements(law, key, places) for key in keys]).reshape(parameter.shape)


class DummyCheckpoint:
    """What answers as an opened `Checkpoint` does and has no files.

    Backends make its parameters on their device, by `law`; `load` makes them in main memory.

    Attributes:
      names: The tensors that a checkpoint of this model would hold, without prefix.
      granularity: Of the scales of FP8, of blocks or of channels; those that a release has for
        tensors are made for channels. None: no weight is FP8.
    """

    def __init__(
        self,
        wanted: Sequence[Parameter],
        maps: dict[str, Int32[np.ndarray, "..."]],
        granularity: Granularity | None,
    ) -> None:
        """Args:
        wanted: Every parameter of the model.
        maps: Tensors of whole numbers, by name, such as that of a draft vocabulary.
        granularity: Of the scales of FP8, as a release has it; None: no weight is FP8.
        """
        sources = {source.name for parameter in wanted for source in parameter.sources}
        self.names: Collection[str] = frozenset(sources | maps.keys())
        self._maps = maps
        self.granularity = granularity and fp8_words.kept_granularity(granularity)

    @classmethod
    def of_model(
        cls,
        config: ModelConfig,
        granularity: Granularity | None,
        vision: VisionConfig | None = None,
    ) -> Self:
        """Of a whole model, with an MTP layer and a vision tower where its config names them."""
        tower = [] if vision is None else tower_parameters(vision)
        return cls([*parameters(config, config.has_mtp), *tower], {}, granularity)

    @property
    def has_mtp(self) -> bool:
        """Whether there is an MTP layer."""
        return any(name.startswith("mtp.") for name in self.names)

    @property
    def has_tower(self) -> bool:
        """Whether there is a vision tower."""
        return any(name.startswith(TENSORS) for name in self.names)

    def has(self, name: str) -> bool:
        """Whether a tensor is there."""
        return name in self.names

    def unties(self, config: ModelConfig) -> bool:
        """Returns whether there is an LM head of its own, though the config ties it."""
        return config.tied and self.has(LM_HEAD)

    def tensor(self, name: str) -> Array:
        """One of the tensors of whole numbers."""
        return self._maps[name]

    def num_bytes(self, wanted: Sequence[Parameter]) -> int:
        """What stored parameters of these shapes would take."""
        return sum(map(self._size_of, wanted))

    def known(self, wanted: Sequence[Parameter]) -> set[str]:
        """The tensors that these parameters are made of."""
        return {source.name for parameter in wanted for source in parameter.sources}

    def check(self, config: ModelConfig, with_mtp: bool) -> None:
        """Finds nothing: what a config.json names is there."""

    def check_parameters(self, wanted: Sequence[Parameter]) -> None:
        """Finds nothing, as `check`."""

    def law(self, parameter: Parameter) -> Law:
        """How the elements of a parameter are spread, of FP8 the numbers of its codes."""
        is_fp8 = self.granularity_of(parameter) is not None
        return CODES_LAW if is_fp8 else law_of(parameter.whole or parameter)

    def granularity_of(self, parameter: Parameter) -> Granularity | None:
        """Of a parameter that is codes times the scales of `code_scales`; None: it is not."""
        is_fp8 = all(fp8.is_quantised(source.name) for source in parameter.sources)
        return self.granularity if is_fp8 else None

    def in_words(self, wanted: Sequence[Parameter]) -> fp8_words.InWords:
        """Those of the parameters that can stay FP8; see `Checkpoint.in_words`."""
        return {
            parameter.name: granularity
            for parameter in wanted
            if fp8_words.stays_fp8(parameter.name)
            and (granularity := self.granularity_of(parameter)) is not None
            and all(_can_stay(source, granularity) for source in parameter.sources)
        }

    def in_codes(self, wanted: Sequence[Parameter]) -> frozenset[str]:
        """Those of the parameters that are FP8 in blocks; see `Checkpoint.in_codes`."""
        return frozenset(p.name for p in wanted if self.granularity_of(p) is Granularity.BLOCK)

    def has_scales(self, wanted: Sequence[Parameter]) -> frozenset[str]:
        """Those of the parameters of which some tensors are FP8, by name."""
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
        """Makes one parameter; the arguments are those of `Checkpoint.load`."""
        whole = parameter.whole or parameter
        made = parameter_array(whole, self.law(whole))
        if (granularity := self.granularity_of(whole)) is not None:
            made = fp8.scaled(made, code_scales(whole, granularity))
        progress(self._size_of(parameter))
        return parameter.share(made).astype(np.float32 if parameter.float32 else dtype)

    def _size_of(self, parameter: Parameter) -> int:
        if (granularity := self.granularity_of(parameter)) is not None:
            return fp8_words.bytes_of_words(parameter.shape, granularity)
        return STORED_BYTES * math.prod(parameter.shape)


def _can_stay(source: Source, granularity: Granularity) -> bool:
    """Whether a tensor, or what a rank takes of it, has whole blocks."""
    is_cut = granularity is Granularity.BLOCK and not source.takes_whole(fp8.BLOCK)
    return fp8.are_whole_blocks(source.shape) and not is_cut


Stored = Checkpoint | DummyCheckpoint
"""Where weights come from: files, or nowhere."""
