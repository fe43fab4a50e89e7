"""GDN layers over whole sequences: the chunked form for all chunks of a batch at once.

Same as `shared.spec.gated_delta.chunked` from a zero state, in float32 throughout. Only the part
that depends on the incoming state runs chunk by chunk.
"""

from functools import reduce
from operator import add

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float

from jax_impl.ops.gemm import layers
from jax_impl.ops.recurrent import gated_delta, recurrent_mixer
from jax_impl.training.layers import Rows, linear
from jax_impl.training.nnx_modules import GatedDeltaStack
from shared.models.config import ModelConfig
from shared.models.mixers import GatedDeltaConfig

CHUNK = 32
"""Half the chunk of serving: the matrices within chunks then have half as many elements in all."""

Matrices = Float[jax.Array, "*batch c c"]


def layer(config: ModelConfig, weights: GatedDeltaStack, place: int, x: Rows, B: int) -> Rows:
    """Computes one GDN layer over B sequences, from the normed input to the output projection.

    `place` is the index among the GDN layers. Each sequence has a multiple of CHUNK tokens.
    """
    sizes = config.recurrent
    assert isinstance(sizes, GatedDeltaConfig)  # the config has such layers
    channels, z, gated = recurrent_mixer.split_inputs(linear(x, weights.inputs[place]), sizes)
    b, a = jnp.split(gated, 2, axis=1)
    q, k, v = _qkv(sizes, weights, place, channels, B)
    gates = gated_delta.gates(b, a, weights.a_log[place], weights.dt_bias[place])
    rows = (part.reshape(B, -1, *part.shape[1:]) for part in (q, k, v, *gates))
    out = chunked(*rows).reshape(v.shape)
    gated = gated_delta.gated_norm(out, z, weights.norm[place], config.rms_eps)
    return linear(gated.reshape(len(x), -1), weights.out[place])


def _qkv(
    sizes: GatedDeltaConfig,
    weights: GatedDeltaStack,
    place: int,
    channels: Float[jax.Array, "R C"],
    B: int,
) -> tuple[Float[jax.Array, "R H K"], Float[jax.Array, "R H K"], Float[jax.Array, "R H V"]]:
    mixed = _conv(channels.reshape(B, -1, sizes.channels), weights.conv[place])
    heads = (sizes.num_key_heads, sizes.num_value_heads)
    return gated_delta.split(mixed.reshape(len(channels), -1), *heads, sizes.key_size)


def _conv(
    inputs: Float[jax.Array, "B T C"], weight: Float[jax.Array, "C width"]
) -> Float[jax.Array, "B T C"]:
    """Computes the depthwise causal convolution and SiLU; zeros precede the first token."""
    T, width = inputs.shape[1], weight.shape[1]
    padded = jnp.pad(inputs, ((0, 0), (width - 1, 0), (0, 0))).astype(jnp.float32)
    wide = weight.astype(jnp.float32)
    return layers.silu(reduce(add, (padded[:, j : j + T] * wide[:, j] for j in range(width))))


def chunked(
    q: Float[jax.Array, "B T H K"],
    k: Float[jax.Array, "B T H K"],
    v: Float[jax.Array, "B T H V"],
    log_decay: Float[jax.Array, "B T H"],
    beta: Float[jax.Array, "B T H"],
) -> Float[jax.Array, "B T H V"]:
    """Computes the outputs of sequences; T is a multiple of CHUNK."""
    B, T, H, V = v.shape
    q, k, v, log_decay, beta = map(_in_chunks, (q, k, v, log_decay, beta))
    total = jnp.cumsum(log_decay, axis=-1)
    lower = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    # Masked before exp: above the diagonal the difference is positive and would overflow.
    difference = jnp.where(lower, total[..., :, None] - total[..., None, :], 0)
    decay = jnp.where(lower, jnp.exp(difference), 0)
    keys = jnp.swapaxes(k, -1, -2)
    solved = inverse(jnp.tril(beta[..., None] * _matmul(k, keys) * decay, -1))
    carried = jnp.exp(total)[..., None]
    stored = _matmul(solved, beta[..., None] * v)
    reads = _matmul(solved, beta[..., None] * carried * k)
    kept_keys = jnp.swapaxes(jnp.exp(total[..., -1:] - total)[..., None] * k, -1, -2)
    states, stored = _carry(stored, reads, kept_keys, carried[..., -1:, :])
    out = _matmul(carried * q, states) + _matmul(_matmul(q, keys) * decay, stored)
    return jnp.moveaxis(out, (0, 3), (1, 2)).reshape(B, T, H, V)


def _in_chunks(x: Float[jax.Array, "B T H *size"]) -> Float[jax.Array, "chunks B H c *size"]:
    B, T, H, *size = x.shape
    return jnp.moveaxis(x.reshape(B, T // CHUNK, CHUNK, H, *size), (1, 2), (0, 3))


def _carry(
    stored: Float[jax.Array, "chunks B H c V"],
    reads: Float[jax.Array, "chunks B H c K"],
    kept_keys: Float[jax.Array, "chunks B H K c"],
    kept: Float[jax.Array, "chunks B H 1 1"],
) -> tuple[Float[jax.Array, "chunks B H K V"], Float[jax.Array, "chunks B H c V"]]:
    """Carries the state from chunk to chunk; returns each chunk's first state and stored values."""

    def advance(
        state: Float[jax.Array, "B H K V"], chunk: tuple[jax.Array, ...]
    ) -> tuple[Float[jax.Array, "B H K V"], tuple[jax.Array, jax.Array]]:
        stored, reads, kept_keys, kept = chunk
        stored = stored - _matmul(reads, state)
        return kept * state + _matmul(kept_keys, stored), (state, stored)

    empty = jnp.zeros((*kept_keys.shape[1:-1], stored.shape[-1]), stored.dtype)
    return lax.scan(advance, empty, (stored, reads, kept_keys, kept))[1]


@jax.custom_vjp
def inverse(among: Matrices) -> Matrices:
    """Computes the inverse of I + A for a strictly lower triangular A of a power-of-two size.

    The inverted diagonal blocks X double in size: the block that couples two halves is - X A X.
    Powers of A need fewer products, but with repeated keys they reach 10^17 before they cancel.
    """
    c = among.shape[-1]
    row, column = jnp.arange(c)[:, None], jnp.arange(c)
    inverted, size = jnp.eye(c, dtype=among.dtype), 1
    while size < c:
        couples = (row // (2 * size) == column // (2 * size)) & (row // size > column // size)
        coupling = jnp.where(couples, among, 0)
        step = coupling if size == 1 else _matmul(_matmul(inverted, coupling), inverted)
        inverted, size = inverted - step, 2 * size
    return inverted


def _inverse_forward(among: Matrices) -> tuple[Matrices, Matrices]:
    inverted = inverse(among)
    return inverted, inverted


def _inverse_backward(inverted: Matrices, slope: Matrices) -> tuple[Matrices]:
    transposed = jnp.swapaxes(inverted, -1, -2)
    return (jnp.tril(-_matmul(_matmul(transposed, slope), transposed), -1),)


inverse.defvjp(_inverse_forward, _inverse_backward)


def _matmul(a: Float[jax.Array, "..."], b: Float[jax.Array, "..."]) -> Float[jax.Array, "..."]:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
