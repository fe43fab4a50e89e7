"""Elements of dummy weights, bitwise equal on all backends.

An element is a 32-bit integer hash of its parameter's name, its layer and its index. The top bits
of the hash form an integer that float32 represents exactly. One multiplication scales it; the
constant added after that is 0 or leaves the sum exact, so a fused multiply-add gives the same bits
as two operations.
"""

import math
import zlib
from dataclasses import dataclass
from typing import Self

import numpy as np
from jaxtyping import Float32, UInt32

from shared.models.parameter import Parameter

ROUNDS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))
"""Shift and factor of each round of `hash_u32`."""

LAST_SHIFT = 16

LOGIT_SCALE = 1.5
"""Standard deviation of the logits, in units of sqrt(2 ln vocab).

Next-token distributions then have an entropy of 1 to 2 nats at temperatures from 0.8 to 1, with any
vocabulary. Sampling of such distributions costs as much as with a trained model.
"""


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
    if leaf == "skip":
        return InitSpec.around(1.0, 0.125)
    if leaf == "score_bias":
        return InitSpec.around(0.0, 2.0**-5)  # much smaller than differences of scores
    if leaf in ("layer_scalar", "expert_scale"):
        return InitSpec.around(1.0, 0.125)
    if leaf.endswith("norm"):
        return InitSpec.around(1.0 - parameter.centre, 0.125)
    if leaf in ("embed", "lm_head"):
        vocab = parameter.shape[-2]
        return InitSpec.of_matrix(LOGIT_SCALE * math.sqrt(2 * math.log(vocab) / inputs))
    return InitSpec.of_matrix(1 / math.sqrt(inputs))


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
