"""Gated delta rule (GDN): a recurrent state per head, updated per token, in chunks, or along a
tree.

Every value head has a state `[K, V]`. A token first decays it, then replaces a fraction of the
value stored under its key by its own value. The output is read with the query after the update.
Without the delta rule (`beta` is None) a token adds its value under its key instead, as in Mamba2
(`shared.spec.mamba2`).

Source: Gated Delta Networks, Yang et al. 2024, arXiv:2412.06464.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from shared.spec import layers

CHUNK = 64


@dataclass(frozen=True)
class RecurrenceInputs:
    """Inputs of the recurrence, of some tokens.

    Attributes:
      q, k, v: Query, key and value of each head.
      log_decay: Natural log of the decay, at most 0.
      beta: Fraction of the stored value that is replaced, in [0, 1]; None without the delta rule.
      skipped: Addend of the output; None for none.
    """

    q: Float[np.ndarray, "*batch H K"]
    k: Float[np.ndarray, "*batch H K"]
    v: Float[np.ndarray, "*batch H V"]
    log_decay: Float[np.ndarray, "*batch H"]
    beta: Float[np.ndarray, "*batch H"] | None
    skipped: Float[np.ndarray, "*batch H V"] | None

    def batched(self, batch: tuple[int, ...]) -> "RecurrenceInputs":
        """Returns the inputs of flat tokens with other leading axes."""

        def shaped(x: Float[np.ndarray, "R ..."]) -> Float[np.ndarray, "..."]:
            return x.reshape(batch + x.shape[1:])

        return RecurrenceInputs(
            q=shaped(self.q),
            k=shaped(self.k),
            v=shaped(self.v),
            log_decay=shaped(self.log_decay),
            beta=None if self.beta is None else shaped(self.beta),
            skipped=None if self.skipped is None else shaped(self.skipped),
        )


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
    beta: Float[np.ndarray, "*batch H"] | None,
) -> Float[np.ndarray, "*batch H K V"]:
    """Advances each row's state by one token; see `step`."""
    state = np.exp(log_decay)[..., None, None] * state
    if beta is not None:
        v = beta[..., None] * (v - np.einsum("...hk,...hkv->...hv", k, state))
    return state + k[..., None] * v[..., None, :]


def step(
    state: Float[np.ndarray, "B H K V"],
    q: Float[np.ndarray, "B H K"],
    k: Float[np.ndarray, "B H K"],
    v: Float[np.ndarray, "B H V"],
    log_decay: Float[np.ndarray, "B H"],
    beta: Float[np.ndarray, "B H"] | None,
) -> tuple[Float[np.ndarray, "B H K V"], Float[np.ndarray, "B H V"]]:
    """Advances each row's state by one token and reads the output from it.

    Args:
      state: State before the token, float32.
      q, k, v: Query (already scaled), key (unit length) and value of the token.
      log_decay: Natural log of the fraction of the old state that is kept; at most 0.
      beta: Fraction of the value stored under `k` that is replaced, in [0, 1]; None to add `v` to
        the stored value instead.

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
    beta: Float[np.ndarray, "B N H"] | None,
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
        own = None if beta is None else beta[:, node]
        after, output = step(before, q[:, node], k[:, node], v[:, node], log_decay[:, node], own)
        states.append(after)
        outputs.append(output)
    return np.stack(outputs, axis=1)


def chunked(
    state: Float[np.ndarray, "H K V"],
    q: Float[np.ndarray, "T H K"],
    k: Float[np.ndarray, "T H K"],
    v: Float[np.ndarray, "T H V"],
    log_decay: Float[np.ndarray, "T H"],
    beta: Float[np.ndarray, "T H"] | None,
) -> tuple[Float[np.ndarray, "H K V"], Float[np.ndarray, "T H V"]]:
    """Chunked GDN prefill: processes one request's T tokens in chunks of 64.

    The result equals T steps except for the order of sums. The last chunk is padded with rows
    without effect (no decay, beta 0, key 0). If T is a multiple of 64 in all calls but the last,
    the bits do not depend on how a prompt is split.
    """
    T = len(q)
    outputs = [np.zeros_like(v[:0])]
    for start in range(0, T, CHUNK):
        state, out = _one_chunk(
            state,
            _of_chunk(q, start),
            _of_chunk(k, start),
            _of_chunk(v, start),
            _of_chunk(log_decay, start),
            None if beta is None else _of_chunk(beta, start),
        )
        outputs.append(np.moveaxis(out, 0, 1)[: T - start])
    return state, np.concatenate(outputs)


def _of_chunk(x: Float[np.ndarray, "T H ..."], start: int) -> Float[np.ndarray, "H c ..."]:
    """Returns the rows of a chunk, padded with zeros."""
    rows = x[start : start + CHUNK]
    padding = np.zeros((CHUNK - len(rows), *x.shape[1:]), x.dtype)
    return np.moveaxis(np.concatenate([rows, padding]), 0, 1)


def _one_chunk(
    state: Float[np.ndarray, "H K V"],
    q: Float[np.ndarray, "H c K"],
    k: Float[np.ndarray, "H c K"],
    v: Float[np.ndarray, "H c V"],
    log_decay: Float[np.ndarray, "H c"],
    beta: Float[np.ndarray, "H c"] | None,
) -> tuple[Float[np.ndarray, "H K V"], Float[np.ndarray, "H c V"]]:
    """Computes a chunk; the delta rule is one linear system, because the update of a token depends
    on earlier ones.
    """
    c = q.shape[1]
    total = np.cumsum(log_decay, axis=1)  # [H, c]
    lower = np.tril(np.ones((c, c), bool))
    # Masked before exp: above the diagonal the difference is positive and would overflow.
    decay = np.where(lower, np.exp(np.where(lower, total[:, :, None] - total[:, None, :], 0)), 0)
    carried = np.exp(total)[..., None]  # remaining fraction of the incoming state, [H, c, 1]
    stored = v  # [H, c, V]
    if beta is not None:
        among = beta[:, :, None] * (k @ k.swapaxes(1, 2)) * decay * np.tril(lower, -1)
        system = np.eye(c, dtype=np.float32) + among
        stored = np.linalg.solve(system, beta[..., None] * (v - carried * (k @ state)))
    out = carried * (q @ state) + ((q @ k.swapaxes(1, 2)) * decay) @ stored
    left = np.exp(total[:, -1:] - total)[..., None]  # [H, c, 1]
    state = carried[:, -1:] * state + (left * k).swapaxes(1, 2) @ stored
    return state, out
