"""Gated delta rule in float32: recurrent, chunked and over a tree.

Same results as `shared.spec.gated_delta`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int

from jax_impl.ops import scan
from jax_impl.ops.gemm import layers
from jax_impl.ops.trees import draft_tree
from shared.spec.gated_delta import CHUNK


class Prepared(NamedTuple):
    """Part of a chunk, or of all chunks, that does not depend on the incoming state S.

    Attributes:
      stored, read: `U` and `W`, where the chunk stores `U - W S`; no `W` without the delta rule.
      queries, scores: Queries scaled for the incoming state, and their scores within the chunk.
      keys, decay: Keys decayed to the end of the chunk, and the decay of the state.
    """

    stored: Float[jax.Array, "*chunks H c V"]
    read: Float[jax.Array, "*chunks H c K"] | None
    queries: Float[jax.Array, "*chunks H c K"]
    scores: Float[jax.Array, "*chunks H c c"]
    keys: Float[jax.Array, "*chunks H K c"]
    decay: Float[jax.Array, "*chunks H 1 1"]


class RecurrenceInputs(NamedTuple):
    """Inputs of the recurrence, of some tokens; same as in the specification."""

    q: Float[jax.Array, "*batch H K"]
    k: Float[jax.Array, "*batch H K"]
    v: Float[jax.Array, "*batch H V"]
    log_decay: Float[jax.Array, "*batch H"]
    beta: Float[jax.Array, "*batch H"] | None
    skipped: Float[jax.Array, "*batch H V"] | None

    def batched(self, batch: tuple[int, ...]) -> "RecurrenceInputs":
        """Returns the inputs of flat tokens with other leading axes."""
        return jax.tree.map(lambda x: x.reshape(batch + x.shape[1:]), self)


def split(
    channels: Float[jax.Array, "R C"], num_key_heads: int, num_value_heads: int, key_size: int
) -> tuple[Float[jax.Array, "R H K"], Float[jax.Array, "R H K"], Float[jax.Array, "R H V"]]:
    """Splits the convolution's output into queries, keys and values, per value head."""
    R, keys = channels.shape[0], num_key_heads * key_size
    q, k, v = jnp.split(channels.astype(jnp.float32), [keys, 2 * keys], axis=-1)
    repeats = num_value_heads // num_key_heads
    q = layers.l2norm(q.reshape(R, num_key_heads, key_size)) * jnp.float32(key_size**-0.5)
    k = layers.l2norm(k.reshape(R, num_key_heads, key_size))
    v = v.reshape(R, num_value_heads, -1)
    return jnp.repeat(q, repeats, axis=1), jnp.repeat(k, repeats, axis=1), v


def gates(
    b: Float[jax.Array, "R H"],
    a: Float[jax.Array, "R H"],
    a_log: Float[jax.Array, " H"],
    dt_bias: Float[jax.Array, " H"],
) -> tuple[Float[jax.Array, "R H"], Float[jax.Array, "R H"]]:
    """Computes the log decay (at most 0) and beta in [0, 1] of each token and head."""
    wide_a, wide_b = a.astype(jnp.float32), b.astype(jnp.float32)
    return -jnp.exp(a_log) * layers.softplus(wide_a + dt_bias), layers.sigmoid(wide_b)


def gated_norm(
    out: Float[jax.Array, "R H V"],
    z: Float[jax.Array, "R H V"],
    weight: Float[jax.Array, " V"],
    eps: float,
) -> Float[jax.Array, "R H V"]:
    """Applies RMS norm over V, then the gate silu(z); the result has the dtype of `z`."""
    normed = layers.rms_norm(out, weight, eps)
    return (normed * layers.silu(z.astype(jnp.float32))).astype(z.dtype)


def update(
    state: Float[jax.Array, "*batch H K V"],
    k: Float[jax.Array, "*batch H K"],
    v: Float[jax.Array, "*batch H V"],
    log_decay: Float[jax.Array, "*batch H"],
    beta: Float[jax.Array, "*batch H"] | None,
) -> Float[jax.Array, "*batch H K V"]:
    """Advances each row's state by one token."""
    state = jnp.exp(log_decay)[..., None, None] * state
    if beta is not None:
        v = beta[..., None] * (v - _read(k, state))
    return state + k[..., None] * v[..., None, :]


def _read(
    key: Float[jax.Array, "*batch H K"], state: Float[jax.Array, "*batch H K V"]
) -> Float[jax.Array, "*batch H V"]:
    """Reads the value stored under a key, with one GEMM per row, so it is batch-invariant.

    On a CPU a sum fused with its terms, including the exponential of the decay, takes ten times as
    long as a GEMM. On a GPU the GEMM would be a separate kernel.
    """

    def fused(key: jax.Array, state: jax.Array) -> Float[jax.Array, "*batch H V"]:
        return (key[..., None] * state).sum(axis=-2)

    def product(key: jax.Array, state: jax.Array) -> Float[jax.Array, "*batch H V"]:
        return _matmul(key[..., None, :], state)[..., 0, :]

    return lax.platform_dependent(key, state, cuda=fused, default=product)


def step(
    state: Float[jax.Array, "B H K V"],
    q: Float[jax.Array, "B H K"],
    k: Float[jax.Array, "B H K"],
    v: Float[jax.Array, "B H V"],
    log_decay: Float[jax.Array, "B H"],
    beta: Float[jax.Array, "B H"] | None,
) -> tuple[Float[jax.Array, "B H K V"], Float[jax.Array, "B H V"]]:
    """Advances each row's state by one token and reads the output from it."""
    state = update(state, k, v, log_decay, beta)
    return state, _read(q, state)


def verify(
    state: Float[jax.Array, "B H K V"],
    q: Float[jax.Array, "B N H K"],
    k: Float[jax.Array, "B N H K"],
    v: Float[jax.Array, "B N H V"],
    log_decay: Float[jax.Array, "B N H"],
    beta: Float[jax.Array, "B N H"] | None,
    parents: Int[jax.Array, "B N"] | None,
) -> Float[jax.Array, "B N H V"]:
    """Computes the outputs of a draft tree's nodes; the state is not changed.

    Args:
      state: State before the root.
      q, k, v, log_decay, beta: Inputs of the nodes.
      parents: Parent of each node; None for a chain, which keeps one state at a time.
    """
    nodes = (q, k, v, log_decay, beta)
    if parents is None:
        nodes = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), nodes)
        return jnp.moveaxis(scan(lambda s, node: step(s, *node), state, nodes)[1], 0, 1)
    sees = draft_tree.ancestors(parents)
    # 0 x NaN is NaN: a node that is not finite is zeroed, and its descendants are set to NaN.
    parts = jax.tree.leaves(nodes[1:])
    spoiled = ~jnp.stack([jnp.isfinite(x).reshape(*sees.shape[:2], -1).all(2) for x in parts])
    spoiled = spoiled.any(axis=0)
    q, *others = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 2), nodes)  # [B, H, N, ...]
    others = jax.tree.map(lambda x: jnp.where(_per_node(spoiled, x.ndim), 0, x), others)
    out = _along_paths(state, sees, q, *others)
    sees_spoiled = (sees & spoiled[:, None]).any(axis=2)
    return jnp.where(sees_spoiled[..., None, None], jnp.nan, jnp.moveaxis(out, 1, 2))


def _per_node(flags: Bool[jax.Array, "B N"], ndim: int) -> Bool[jax.Array, "B 1 N ..."]:
    return flags.reshape(len(flags), 1, -1, *[1] * (ndim - 3))


def _along_paths(
    state: Float[jax.Array, "B H K V"],
    sees: Bool[jax.Array, "B N N"],
    q: Float[jax.Array, "B H N K"],
    k: Float[jax.Array, "B H N K"],
    v: Float[jax.Array, "B H N V"],
    log_decay: Float[jax.Array, "B H N"],
    beta: Float[jax.Array, "B H N"] | None,
) -> Float[jax.Array, "B H N V"]:
    """Computes the outputs of all nodes as one chunk in which only ancestors are visible.

    The states of nodes are not computed: each would be a `[K, V]` matrix to write and read.
    """
    ours = sees[:, None].astype(jnp.float32)
    decays = ours * log_decay[:, :, None]  # of each node's ancestors and itself
    # Summed over the path between two nodes: a difference of prefix sums would cancel.
    between = _matmul(decays, 1 - jnp.swapaxes(ours, 2, 3))
    decay = jnp.where(sees[:, None], jnp.exp(between), 0)
    carried, keys, stored = jnp.exp(layers.summed(decays)), jnp.swapaxes(k, 2, 3), v
    if beta is not None:
        beta = beta[..., None]
        among = jnp.tril(beta * _matmul(k, keys) * decay, -1)
        stored = _solve(among, beta * (v - carried * _matmul(k, state)))
    return carried * _matmul(q, state) + _matmul(_matmul(q, keys) * decay, stored)


def chunked(
    state: Float[jax.Array, "B H K V"],
    q: Float[jax.Array, "T H K"],
    k: Float[jax.Array, "T H K"],
    v: Float[jax.Array, "T H V"],
    log_decay: Float[jax.Array, "T H"],
    beta: Float[jax.Array, "T H"] | None,
    row_starts: Int[jax.Array, " B1"],
    save_after: Int[jax.Array, " B"],
) -> tuple[Float[jax.Array, "B H K V"], Float[jax.Array, "T H V"], Float[jax.Array, "B H K V"]]:
    """Same as the specification, for many requests; chunks start at each request's first token.

    Args:
      state: Each request's state before its tokens.
      q, k, v, log_decay, beta: Inputs of all requests, concatenated.
      row_starts: First token of each request, and the end; later tokens are padding.
      save_after: Number of tokens of this call after which a snapshot is saved, at a chunk end.

    Returns:
      The states after the tokens, the outputs, and the snapshots, which are valid only if
      `save_after` is the end of a chunk.
    """
    T, B = len(q), len(state)
    owner, start, stop = _chunks(row_starts, T // CHUNK + B)
    at = start[:, None] + jnp.arange(CHUNK, dtype=jnp.int32)
    is_real = at < stop[:, None]  # [chunks, CHUNK]
    parts = (q, k, v, log_decay, beta)
    inputs = jax.tree.map(lambda x: _rows_of_chunks(x, at, is_real), parts)
    is_saved = stop - row_starts[owner] == save_after[owner]

    def advance(
        carry: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, jax.Array, Prepared]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        states, saved = carry
        row, saves, prepared = chunk
        after, out = _one_chunk(states[row], prepared)
        saved = saved.at[row].set(jnp.where(saves, after, saved[row]))
        return (states.at[row].set(after), saved), out

    chunks = (owner, is_saved, _prepare(*inputs))
    (final, saved), out = lax.scan(advance, (state, state), chunks)
    places = jnp.where(is_real, at, T)  # out of bounds for padding, which is dropped
    flat = jnp.zeros((T, *v.shape[1:]), v.dtype)
    return final, flat.at[places].set(jnp.moveaxis(out, 1, 2), mode="drop"), saved


def _chunks(
    row_starts: Int[jax.Array, " B1"], count: int
) -> tuple[Int[jax.Array, " chunks"], Int[jax.Array, " chunks"], Int[jax.Array, " chunks"]]:
    """Returns the request of each chunk, its first token and its end.

    An unused chunk is empty and follows the tokens of the last request.
    """
    needed = -(-(row_starts[1:] - row_starts[:-1]) // CHUNK)
    ends = jnp.cumsum(needed)
    number = jnp.arange(count, dtype=jnp.int32)
    owner = (number[:, None] >= ends).sum(axis=1, dtype=jnp.int32)
    owner = jnp.minimum(owner, len(needed) - 1)
    start = row_starts[owner] + (number - (ends - needed)[owner]) * CHUNK
    return owner, start, jnp.minimum(start + CHUNK, row_starts[owner + 1])


def _rows_of_chunks(
    x: Float[jax.Array, " T *rest"],
    at: Int[jax.Array, "chunks c"],
    is_real: Bool[jax.Array, "chunks c"],
) -> Float[jax.Array, "chunks H c ..."]:
    """Returns the rows of the chunks, heads first; padding has no decay, beta 0 and key 0."""
    rows = x[jnp.where(is_real, at, 0)]
    mask = is_real.reshape(*is_real.shape, *[1] * (rows.ndim - 2))
    return jnp.moveaxis(jnp.where(mask, rows, 0), 1, 2)


def _prepare(
    q: Float[jax.Array, "chunks H c K"],
    k: Float[jax.Array, "chunks H c K"],
    v: Float[jax.Array, "chunks H c V"],
    log_decay: Float[jax.Array, "chunks H c"],
    beta: Float[jax.Array, "chunks H c"] | None,
) -> Prepared:
    """Computes the part of the chunks that does not depend on the incoming states."""
    c = q.shape[2]
    total = jnp.cumsum(log_decay, axis=2)
    lower = jnp.tril(jnp.ones((c, c), bool))
    # Masked before exp: above the diagonal the difference is positive and would overflow.
    difference = jnp.where(lower, total[..., :, None] - total[..., None, :], 0)
    decay = jnp.where(lower, jnp.exp(difference), 0)
    keys = jnp.swapaxes(k, 2, 3)
    carried, stored, read = jnp.exp(total)[..., None], v, None
    if beta is not None:
        among = jnp.tril(beta[..., None] * _matmul(k, keys) * decay, -1)
        target = jnp.concatenate([beta[..., None] * v, beta[..., None] * carried * k], axis=-1)
        stored, read = jnp.split(_solve(among, target), [v.shape[-1]], axis=-1)
    left = jnp.exp(total[..., -1:] - total)[..., None] * k
    reach = _matmul(q, keys) * decay
    keys = jnp.swapaxes(left, 2, 3)
    return Prepared(stored, read, carried * q, reach, keys, carried[..., -1:, :])


def _one_chunk(
    state: Float[jax.Array, "H K V"], chunk: Prepared
) -> tuple[Float[jax.Array, "H K V"], Float[jax.Array, "H c V"]]:
    """Advances the state over one prepared chunk."""
    stored = chunk.stored
    if chunk.read is not None:
        stored = stored - _matmul(chunk.read, state)
    out = _matmul(chunk.queries, state) + _matmul(chunk.scores, stored)
    return chunk.decay * state + _matmul(chunk.keys, stored), out


def _solve(
    among: Float[jax.Array, "*batch c c"], target: Float[jax.Array, "*batch c size"]
) -> Float[jax.Array, "*batch c size"]:
    """Solves `(I + among) x = target`, where `among` is strictly lower triangular.

    JAX's solver is not used on a CPU. It distributes its batch over the threads of XLA's pool and
    waits in one of them, so independent solvers that occupy all threads deadlock.
    """

    def library(among: jax.Array, target: jax.Array) -> Float[jax.Array, "*batch c size"]:
        return lax.linalg.triangular_solve(  # noqa: TID251 - not in CPU programs
            among, target, left_side=True, lower=True, unit_diagonal=True
        )

    return lax.platform_dependent(among, target, cuda=library, default=_by_rows)


def _by_rows(
    among: Float[jax.Array, "*batch c c"], target: Float[jax.Array, "*batch c size"]
) -> Float[jax.Array, "*batch c size"]:
    """Same as `_solve`, by forward substitution: subtracts the known rows from each row."""

    def substitute(x: jax.Array, row: Int[jax.Array, ""]) -> tuple[jax.Array, None]:
        line, wanted = (lax.dynamic_slice_in_dim(part, row, 1, -2) for part in (among, target))
        return lax.dynamic_update_slice_in_dim(x, wanted - _matmul(line, x), row, -2), None

    return lax.scan(substitute, jnp.zeros_like(target), jnp.arange(among.shape[-1]))[0]


def _matmul(a: Float[jax.Array, "..."], b: Float[jax.Array, "..."]) -> Float[jax.Array, "..."]:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
