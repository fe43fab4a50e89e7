"""Gated delta rule (GDN): a recurrent state per head, updated per token, in chunks, or along a
tree.

Every value head has a state `[K, V]`. A token first decays it, then replaces a fraction of the
value stored under its key by its own value. The output is read with the query after the update.

Source: Gated Delta Networks, Yang et al. 2024, arXiv:2412.06464.
"""

import numpy as np
from jaxtyping import Float, Int

from shared.spec import layers

CHUNK = 64


def split(
    channels: Float[np.ndarray, "R C"], num_key_heads: int, num_value_heads: int, key_size: int
) -> tuple[Float[np.ndarray, "R H K"], Float[np.ndarray, "R H K"], Float[np.ndarray, "R H V"]]:
    """Splits the convolution's output into queries, keys and values per value head.

    Args:
      channels: Channels of all query heads, then of all key heads, then of all value heads.
      num_key_heads, num_value_heads, key_size: Sizes of the layer.

    Returns:
      Queries of unit length times K^-0.5, keys of unit length, values. Value head h uses query and
      key of key head h // (value heads / key heads).
    """
    R = channels.shape[0]
    keys = num_key_heads * key_size
    q, k, v = np.split(channels, [keys, 2 * keys], axis=-1)
    repeats = num_value_heads // num_key_heads
    q = layers.l2norm(q.reshape(R, num_key_heads, key_size)) * np.float32(key_size**-0.5)
    k = layers.l2norm(k.reshape(R, num_key_heads, key_size))
    v = v.reshape(R, num_value_heads, -1)
    return np.repeat(q, repeats, axis=1), np.repeat(k, repeats, axis=1), v


def gates(
    b: Float[np.ndarray, "R H"],
    a: Float[np.ndarray, "R H"],
    a_log: Float[np.ndarray, " H"],
    dt_bias: Float[np.ndarray, " H"],
) -> tuple[Float[np.ndarray, "R H"], Float[np.ndarray, "R H"]]:
    """Computes the natural log of the decay (at most 0), and beta in [0, 1], of each token and
    head.
    """
    return -np.exp(a_log) * layers.softplus(a + dt_bias), layers.sigmoid(b)


def gated_norm(
    out: Float[np.ndarray, "R H V"],
    z: Float[np.ndarray, "R H V"],
    weight: Float[np.ndarray, " V"],
    eps: float,
) -> Float[np.ndarray, "R H V"]:
    """Applies the output norm: RMS over V with a plain weight, then the gate silu(z)."""
    return layers.rms_norm(out, weight, eps) * layers.silu(z)


def update(
    state: Float[np.ndarray, "*batch H K V"],
    k: Float[np.ndarray, "*batch H K"],
    v: Float[np.ndarray, "*batch H V"],
    log_decay: Float[np.ndarray, "*batch H"],
    beta: Float[np.ndarray, "*batch H"],
) -> Float[np.ndarray, "*batch H K V"]:
    """Advances each row's state by one token; see `step`."""
    state = np.exp(log_decay)[..., None, None] * state
    stored = np.einsum("...hk,...hkv->...hv", k, state)
    return state + k[..., None] * (beta[..., None] * (v - stored))[..., None, :]


def step(
    state: Float[np.ndarray, "B H K V"],
    q: Float[np.ndarray, "B H K"],
    k: Float[np.ndarray, "B H K"],
    v: Float[np.ndarray, "B H V"],
    log_decay: Float[np.ndarray, "B H"],
    beta: Float[np.ndarray, "B H"],
) -> tuple[Float[np.ndarray, "B H K V"], Float[np.ndarray, "B H V"]]:
    """Advances each row's state by one token and reads the output from it.

    Args:
      state: State before the token, float32.
      q, k, v: Query (already scaled), key (unit length) and value of the token.
      log_decay: Natural log of the fraction of the old state that is kept; at most 0.
      beta: Fraction of the value stored under `k` that is replaced, in [0, 1].

    Returns:
      The state after the token, and the output.

    Raises:
      ValueError: A decay is above 0, so that the state would grow without bound.
    """
    if (log_decay > 0).any():
        raise ValueError(f"log_decay must not exceed 0, got {log_decay.max()}")
    state = update(state, k, v, log_decay, beta)
    return state, np.einsum("bhk,bhkv->bhv", q, state)


def verify(
    state: Float[np.ndarray, "B H K V"],
    q: Float[np.ndarray, "B N H K"],
    k: Float[np.ndarray, "B N H K"],
    v: Float[np.ndarray, "B N H V"],
    log_decay: Float[np.ndarray, "B N H"],
    beta: Float[np.ndarray, "B N H"],
    parents: Int[np.ndarray, "B N"],
) -> Float[np.ndarray, "B N H V"]:
    """Computes the outputs of a draft tree's nodes (tree verification) without changing the state.

    Each node starts from its parent's state, the root from `state`. `parents[i] < i` except for the
    root.
    """
    rows = np.arange(state.shape[0])
    states, outputs = [], []
    for node in range(q.shape[1]):
        before = state if node == 0 else np.stack(states)[parents[:, node], rows]
        after, output = step(
            before, q[:, node], k[:, node], v[:, node], log_decay[:, node], beta[:, node]
        )
        states.append(after)
        outputs.append(output)
    return np.stack(outputs, axis=1)


def chunked(
    state: Float[np.ndarray, "H K V"],
    q: Float[np.ndarray, "T H K"],
    k: Float[np.ndarray, "T H K"],
    v: Float[np.ndarray, "T H V"],
    log_decay: Float[np.ndarray, "T H"],
    beta: Float[np.ndarray, "T H"],
) -> tuple[Float[np.ndarray, "H K V"], Float[np.ndarray, "T H V"]]:
    """Chunked GDN prefill: processes one request's T tokens in chunks of 64.

    The result equals T steps except for the order of sums. The last chunk is padded with rows
    without effect (no decay, beta 0, key 0). If T is a multiple of 64 in all calls but the last,
    the bits do not depend on how a prompt is split.
    """
    T = len(q)
    outputs = [np.zeros_like(v[:0])]
    for start in range(0, T, CHUNK):
        rows = [_padded(x[start : start + CHUNK]) for x in (q, k, v, log_decay, beta)]
        state, out = _one_chunk(state, *(np.moveaxis(x, 0, 1) for x in rows))
        outputs.append(np.moveaxis(out, 0, 1)[: T - start])
    return state, np.concatenate(outputs)


def _padded(x: Float[np.ndarray, "T ..."]) -> Float[np.ndarray, "c ..."]:
    return np.concatenate([x, np.zeros((CHUNK - len(x), *x.shape[1:]), x.dtype)])


def _one_chunk(
    state: Float[np.ndarray, "H K V"],
    q: Float[np.ndarray, "H c K"],
    k: Float[np.ndarray, "H c K"],
    v: Float[np.ndarray, "H c V"],
    log_decay: Float[np.ndarray, "H c"],
    beta: Float[np.ndarray, "H c"],
) -> tuple[Float[np.ndarray, "H K V"], Float[np.ndarray, "H c V"]]:
    """Solves the delta rule of a chunk as one linear system: the update of a token depends on
    earlier ones.
    """
    c = q.shape[1]
    total = np.cumsum(log_decay, axis=1)  # [H, c]
    lower = np.tril(np.ones((c, c), bool))
    # Masked before exp: above the diagonal the difference is positive and would overflow.
    decay = np.where(lower, np.exp(np.where(lower, total[:, :, None] - total[:, None, :], 0)), 0)
    among = beta[:, :, None] * (k @ k.swapaxes(1, 2)) * decay * np.tril(lower, -1)
    system = np.eye(c, dtype=np.float32) + among
    carried = np.exp(total)[..., None]  # remaining fraction of the incoming state, [H, c, 1]
    target = beta[..., None] * (v - carried * (k @ state))
    stored = np.linalg.solve(system, target)  # [H, c, V]
    out = carried * (q @ state) + ((q @ k.swapaxes(1, 2)) * decay) @ stored
    left = np.exp(total[:, -1:] - total)[..., None]  # [H, c, 1]
    state = carried[:, -1:] * state + (left * k).swapaxes(1, 2) @ stored
    return state, out
