"""Elementary operations of all layers in float32: norms, activations, embedding, rotary
embedding.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from shared.models.activation import GELU_TANH, SCALED_SILU, SILU, Activation
from shared.models.rotary import RotaryConfig


def linear(
    x: Float[np.ndarray, "... inputs"], weight: Float[np.ndarray, "outputs inputs"]
) -> Float[np.ndarray, "... outputs"]:
    """Multiplies by a weight stored as `[out, in]`."""
    return x @ weight.T


def sigmoid(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Computes 1 / (1 + exp(-x)) without overflow at either end."""
    return np.exp(-np.logaddexp(np.float32(0), -x))


def softplus(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Computes log(1 + exp(x)) without overflow."""
    return np.logaddexp(np.float32(0), x)


def silu(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Computes x * sigmoid(x)."""
    return x * sigmoid(x)


def softcap(x: Float[np.ndarray, "..."], capped: float) -> Float[np.ndarray, "..."]:
    """Computes a soft cap: capped * tanh(x / capped).

    Source: Gemma 2, arXiv:2408.00118.
    """
    return np.float32(capped) * np.tanh(x / np.float32(capped))


def act_and_mul(
    gate: Float[np.ndarray, "..."], up: Float[np.ndarray, "..."], activation: Activation
) -> Float[np.ndarray, "..."]:
    """Applies the activation of a gated MLP.

    Source: SwiGLU, Shazeer 2020, arXiv:2002.05202; gpt-oss model card, arXiv:2508.10925.
    """
    if activation.kind == GELU_TANH:
        return gelu_tanh(gate) * up
    if activation.kind == SILU:
        return silu(gate) * up
    if activation.kind == SCALED_SILU:
        scaled = silu(gate * np.float32(activation.alpha)) * up
        return scaled * np.float32(activation.factor)
    gate = np.minimum(gate, np.float32(activation.limit))
    up = np.clip(up, np.float32(-activation.limit), np.float32(activation.limit))
    return gate * sigmoid(np.float32(activation.alpha) * gate) * (up + 1)


def activated(x: Float[np.ndarray, "... columns"], activation: Activation) -> np.ndarray:
    """Applies the activation of an MLP to its first product: gate columns and then up columns, or
    up columns alone.

    Source: squared ReLU: Primer, So et al. 2021, arXiv:2109.08668.
    """
    if not activation.is_gated:
        return np.square(np.maximum(x, np.float32(0)))
    gate, up = np.split(x, 2, axis=-1)
    return act_and_mul(gate, up, activation)


@dataclass(frozen=True)
class ImageEmbeds:
    """Image embeddings that replace token embeddings.

    Attributes:
      pool: Encoder cache with the embeddings of all images; row 0 is unused.
      sources: Cache row used for each token; 0 for the token's own embedding.
    """

    pool: Float[np.ndarray, "rows hidden"]
    sources: Int[np.ndarray, " R"]


def embed_tokens(
    table: Float[np.ndarray, "vocab hidden"],
    tokens: Int[np.ndarray, " R"],
    shown: ImageEmbeds | None,
    factor: float = 1.0,
) -> Float[np.ndarray, "R hidden"]:
    """Looks up token embeddings, times a factor, and replaces those of image tokens."""
    embeds = table[tokens] if factor == 1 else table[tokens] * np.float32(factor)
    if shown is None:
        return embeds
    return np.where(shown.sources[:, None] > 0, shown.pool[shown.sources], embeds)


def rms_norm(
    x: Float[np.ndarray, "... size"], weight: Float[np.ndarray, " size"] | None, eps: float
) -> Float[np.ndarray, "... size"]:
    """Divides by the root mean square over the last axis and scales by `weight`, if given.

    Source: Root Mean Square Layer Normalization, Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed if weight is None else normed * weight


def layer_norm(
    x: Float[np.ndarray, "... size"],
    weight: Float[np.ndarray, " size"],
    bias: Float[np.ndarray, " size"],
    eps: float,
) -> Float[np.ndarray, "... size"]:
    """Subtracts the mean, divides by the standard deviation over the last axis, scales and shifts.

    Source: Layer Normalization, Ba et al. 2016, arXiv:1607.06450.
    """
    centred = x - np.mean(x, axis=-1, keepdims=True)
    return (
        centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + eps) * weight + bias
    )


def gelu(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Computes GELU: x times the standard normal cumulative distribution at x.

    Source: Gaussian Error Linear Units, Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    below = np.vectorize(math.erf, otypes=[np.float64])(x * math.sqrt(0.5))
    return (0.5 * x * (1 + below)).astype(x.dtype)


def gelu_tanh(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Computes the tanh approximation of `gelu`, from the same paper."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


def bilinear_pos_embed(
    table: Float[np.ndarray, "places hidden"],
    corners: Int[np.ndarray, "R 4"],
    shares: Float[np.ndarray, "R 4"],
) -> Float[np.ndarray, "R hidden"]:
    """Interpolates learned position embeddings: the weighted sum of four rows of a table."""
    return (table[corners] * shares[..., None]).sum(axis=1)


def l2norm(x: Float[np.ndarray, "... size"]) -> Float[np.ndarray, "... size"]:
    """Scales the last axis to unit length; epsilon 1e-6 is inside the root."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def rotary_frequencies(rotary: RotaryConfig) -> Float[np.ndarray, " half"]:
    """Computes the radians per position of each rotated pair, `half = rotary.width // 2`.

    Computed in float32 throughout: rounding a float64 result instead changes logits of a tiny model
    by 4e-4 at position 9000.

    Source: RoFormer, Su et al. 2021, arXiv:2104.09864; YaRN: Peng et al. 2023, arXiv:2309.00071.
    """
    exponent = np.arange(0, rotary.width, 2, dtype=np.float32) / np.float32(rotary.width)
    plain = np.float32(1) / np.float32(rotary.theta) ** exponent
    slow = plain / np.float32(rotary.factor)
    match rotary.type:
        case "longrope":
            return plain / np.array(rotary.extensions, np.float32)
        case "none":
            return np.zeros_like(plain)
        case "linear":
            return slow
        case "proportional":
            is_rotated = np.arange(len(plain)) < rotary.rotated_pairs
            return np.where(is_rotated, slow, np.float32(0))
        case "llama3":
            return _llama3(rotary, plain, slow)
        case "yarn":
            ramp = _yarn_ramp(rotary)
            return slow * ramp + plain * (1 - ramp)
    return plain


def _llama3(
    rotary: RotaryConfig, plain: Float[np.ndarray, " half"], slow: Float[np.ndarray, " half"]
) -> Float[np.ndarray, " half"]:
    """Scales frequencies as Llama 3: unchanged short wavelengths, divided long ones, and a blend
    between.
    """
    wavelength = np.float32(2 * math.pi) / plain
    low, high = rotary.low_freq_factor, rotary.high_freq_factor
    share = (rotary.original_context / wavelength - low) / (high - low)
    blended = (1 - share) * slow + share * plain
    long = wavelength > rotary.original_context / low
    short = wavelength < rotary.original_context / high
    return np.where(short, plain, np.where(long, slow, blended)).astype(np.float32)


def _yarn_ramp(rotary: RotaryConfig) -> Float[np.ndarray, " half"]:
    """Returns the YaRN ramp: 0 for pairs of unchanged frequency, 1 for pairs that are fully
    scaled.
    """

    def pair_of(rotations: float) -> float:
        turns = math.log(rotary.original_context / (rotations * 2 * math.pi))
        return rotary.width * turns / (2 * math.log(rotary.theta))

    low, high = pair_of(rotary.beta_fast), pair_of(rotary.beta_slow)
    if rotary.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.width - 1)
    distance = high - low if high != low else 0.001
    pair = np.arange(rotary.width // 2, dtype=np.float32)
    return np.clip((pair - np.float32(low)) / np.float32(distance), 0, 1)


def rotary_angles(
    positions: Int[np.ndarray, "R ..."], rotary: RotaryConfig
) -> tuple[Float[np.ndarray, "R half"], Float[np.ndarray, "R half"]]:
    """Computes cosine and sine of the rotary angles, times the attention factor.

    Args:
      positions: Position of each row, or of each pair of its dimensions (M-RoPE).
      rotary: Rotary config.
    """
    each = positions.astype(np.float32).reshape(len(positions), -1)
    angles = each * rotary_frequencies(rotary)
    factor = np.float32(rotary.attention_factor)
    return np.cos(angles) * factor, np.sin(angles) * factor


def query_scaling(
    positions: Int[np.ndarray, " R"], beta: float, context: int
) -> Float[np.ndarray, " R"]:
    """Computes long-context query scaling: 1 before `context`, then growing with log of the
    position.

    Source: Ministral 3 (`llama_4_scaling_beta`), following Llama 4's attention for long contexts.
    """
    passed = np.floor(positions.astype(np.float32) / np.float32(context))
    return np.float32(1) + np.float32(beta) * np.log(np.float32(1) + passed)


def apply_rotary_interleaved(
    x: Float[np.ndarray, "R H D"],
    cos: Float[np.ndarray, "R half"],
    sin: Float[np.ndarray, "R half"],
) -> Float[np.ndarray, "R H D"]:
    """Rotates dimension 2 i with dimension 2 i + 1 (GPT-J style), in place of both."""
    first, second = x[..., ::2], x[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    pairs = [first * cos - second * sin, second * cos + first * sin]
    return np.stack(pairs, axis=-1).reshape(x.shape)


def apply_rotary(
    x: Float[np.ndarray, "R H D"],
    cos: Float[np.ndarray, "R half"],
    sin: Float[np.ndarray, "R half"],
) -> Float[np.ndarray, "R H D"]:
    """Rotates dimension i with dimension i + half (NeoX style); dimensions from 2 * half on are
    unchanged.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
