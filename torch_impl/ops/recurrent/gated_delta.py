"""Gated delta rule in float32: recurrent, chunked and over a tree.

Same results as `shared.spec.gated_delta`.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.spec.gated_delta import CHUNK
from torch_impl.ops import clamp_rows
from torch_impl.ops.gemm import layers
from torch_impl.ops.trees import draft_tree


def split(
    channels: Float[Tensor, "R C"], num_key_heads: int, num_value_heads: int, key_size: int
) -> tuple[Float[Tensor, "R H K"], Float[Tensor, "R H K"], Float[Tensor, "R H V"]]:
    R, keys = channels.shape[0], num_key_heads * key_size
    q, k, v = channels.float().split([keys, keys, channels.shape[1] - 2 * keys], dim=1)
    repeats = num_value_heads // num_key_heads
    q = layers.l2norm(q.reshape(R, num_key_heads, key_size)) * key_size**-0.5
    k = layers.l2norm(k.reshape(R, num_key_heads, key_size))
    v = v.reshape(R, num_value_heads, -1)
    return q.repeat_interleave(repeats, dim=1), k.repeat_interleave(repeats, dim=1), v


def gates(
    b: Float[Tensor, "R H"],
    a: Float[Tensor, "R H"],
    a_log: Float[Tensor, " H"],
    dt_bias: Float[Tensor, " H"],
) -> tuple[Float[Tensor, "R H"], Float[Tensor, "R H"]]:
    return -a_log.exp() * layers.softplus(a.float() + dt_bias), layers.sigmoid(b.float())


def gated_norm(
    out: Float[Tensor, "R H V"],
    z: Float[Tensor, "R H V"],
    weight: Float[Tensor, " V"],
    eps: float,
) -> Float[Tensor, "R H V"]:
    """Applies RMS norm over V, then the gate silu(z); the result has the dtype of `z`."""
    return (layers.rms_norm(out, weight, eps) * layers.silu(z.float())).to(z.dtype)


def update(
    state: Float[Tensor, "*batch H K V"],
    k: Float[Tensor, "*batch H K"],
    v: Float[Tensor, "*batch H V"],
    log_decay: Float[Tensor, "*batch H"],
    beta: Float[Tensor, "*batch H"],
) -> Float[Tensor, "*batch H K V"]:
    """Advances each row's state by one token, without GEMM, so it is batch-invariant."""
    state = log_decay.exp()[..., None, None] * state
    k = k[..., None]
    stored = (k * state).sum(dim=-2)
    return state.add_(k * (beta[..., None] * (v - stored))[..., None, :])


def step(
    state: Float[Tensor, "B H K V"],
    q: Float[Tensor, "B H K"],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B H V"],
    log_decay: Float[Tensor, "B H"],
    beta: Float[Tensor, "B H"],
) -> tuple[Float[Tensor, "B H K V"], Float[Tensor, "B H V"]]:
    """Advances each row's state by one token and reads the output from it."""
    state = update(state, k, v, log_decay, beta)
    return state, (q[..., None] * state).sum(dim=-2)


def verify(
    state: Float[Tensor, "B H K V"],
    q: Float[Tensor, "B N H K"],
    k: Float[Tensor, "B N H K"],
    v: Float[Tensor, "B N H V"],
    log_decay: Float[Tensor, "B N H"],
    beta: Float[Tensor, "B N H"],
    parents: Int[Tensor, "B N"] | None,
) -> Float[Tensor, "B N H V"]:
    """Same as the specification; `parents` is None for chains."""
    nodes = (q, k, v, log_decay, beta)
    if parents is None:
        return _along_chains(state, *nodes)
    sees = draft_tree.ancestors(parents)
    # 0 x NaN is NaN: a node that is not finite is zeroed, and its descendants are set to NaN.
    spoiled = ~torch.stack([x.isfinite().flatten(2).all(dim=2) for x in nodes[1:]]).all(dim=0)
    q, *others = (x.movedim(1, 2) for x in nodes)  # [B, H, N, ...]
    others = (x.masked_fill(_per_node(spoiled, x.ndim), 0) for x in others)
    out = _along_paths(state, sees, q, *others).movedim(2, 1)
    return out.masked_fill((sees & spoiled[:, None]).any(dim=2)[..., None, None], torch.nan)


def _per_node(flags: Bool[Tensor, "B N"], ndim: int) -> Bool[Tensor, "B 1 N ..."]:
    return flags.view(len(flags), 1, -1, *[1] * (ndim - 3))


def _along_chains(
    state: Float[Tensor, "B H K V"], *nodes: Float[Tensor, "B N ..."]
) -> Float[Tensor, "B N H V"]:
    """Computes the outputs of the nodes of chains one by one, like plain decoding."""
    outputs = []
    for node in zip(*(x.unbind(1) for x in nodes), strict=True):
        state, out = step(state, *node)
        outputs.append(out)
    return torch.stack(outputs, dim=1)


def _along_paths(
    state: Float[Tensor, "B H K V"],
    sees: Bool[Tensor, "B N N"],
    q: Float[Tensor, "B H N K"],
    k: Float[Tensor, "B H N K"],
    v: Float[Tensor, "B H N V"],
    log_decay: Float[Tensor, "B H N"],
    beta: Float[Tensor, "B H N"],
) -> Float[Tensor, "B H N V"]:
    """Computes the outputs of all nodes as one chunk in which only ancestors are visible.

    The states of nodes are not computed: each would be a `[K, V]` matrix to write and read.
    """
    ours = sees[:, None].float()
    decays = ours * log_decay[:, :, None]  # of each node's ancestors and itself
    # Summed over the path between two nodes: a difference of prefix sums would cancel.
    between = decays @ (1 - ours.mT)
    decay = between.exp().masked_fill(~sees[:, None], 0)
    carried, beta = layers.summed(decays).exp(), beta[..., None]
    among = (beta * (k @ k.mT) * decay).tril(-1)
    target = beta * (v - carried * (k @ state))
    stored = torch.linalg.solve_triangular(among, target, upper=False, unitriangular=True)
    return carried * (q @ state) + ((q @ k.mT) * decay) @ stored


def chunked(
    state: Float[Tensor, "B H K V"],
    q: Float[Tensor, "T H K"],
    k: Float[Tensor, "T H K"],
    v: Float[Tensor, "T H V"],
    log_decay: Float[Tensor, "T H"],
    beta: Float[Tensor, "T H"],
    row_starts: Int[Tensor, " B1"],
    save_after: Int[Tensor, " B"],
) -> tuple[Float[Tensor, "B H K V"], Float[Tensor, "T H V"], Float[Tensor, "B H K V"]]:
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
    at = start[:, None] + torch.arange(CHUNK, dtype=torch.int32, device=q.device)
    is_real = at < stop[:, None]  # [chunks, CHUNK]
    at = torch.where(is_real, at, 0)
    inputs = (_rows_of_chunks(x, at, is_real) for x in (q, k, v, log_decay, beta))
    prepared = _prepare(*inputs)
    after = stop - row_starts[owner]
    state, saved, outputs = state.clone(), state.clone(), []
    for i in range(len(owner)):
        row = owner[i : i + 1]
        before = state[row][0]
        following, out = _one_chunk(before, *(x[i] for x in prepared))
        state[row] = following
        saved[row] = torch.where(after[i] == save_after[row][0], following, saved[row][0])
        outputs.append(out)
    out = torch.stack(outputs).movedim(1, 2)  # [chunks, CHUNK, H, V]
    flat = torch.zeros(T + 1, *v.shape[1:], dtype=v.dtype, device=v.device)
    flat[torch.where(is_real, at, T)] = out
    return state, flat[:T], saved


def _chunks(
    row_starts: Int[Tensor, " B1"], most: int
) -> tuple[Int[Tensor, " chunks"], Int[Tensor, " chunks"], Int[Tensor, " chunks"]]:
    """Returns the request of each chunk, its first token and its end, for at most `most` chunks.

    An unused chunk is empty and follows the tokens of the last request.
    """
    lengths = row_starts[1:] - row_starts[:-1]
    ends = torch.div(lengths + (CHUNK - 1), CHUNK, rounding_mode="floor").cumsum(0)
    number = torch.arange(clamp_rows(ends[-1], most, 1), device=row_starts.device)
    owner = torch.searchsorted(ends, number, right=True).clamp(max=len(lengths) - 1)
    first = ends[owner] - torch.div(lengths[owner] + (CHUNK - 1), CHUNK, rounding_mode="floor")
    start = row_starts[owner] + (number - first) * CHUNK
    stop = torch.minimum(start + CHUNK, row_starts[1:][owner])
    return owner, start.int(), stop.int()


def _rows_of_chunks(
    x: Float[Tensor, " T *rest"], at: Int[Tensor, "chunks c"], is_real: Bool[Tensor, "chunks c"]
) -> Float[Tensor, "chunks H c ..."]:
    """Returns the rows of the chunks, heads first; padding has no decay, beta 0 and key 0."""
    rows = x[at]
    mask = is_real.view(*is_real.shape, *[1] * (rows.ndim - 2))
    return torch.where(mask, rows, 0).movedim(1, 2)


def _prepare(
    q: Float[Tensor, "chunks H c K"],
    k: Float[Tensor, "chunks H c K"],
    v: Float[Tensor, "chunks H c V"],
    log_decay: Float[Tensor, "chunks H c"],
    beta: Float[Tensor, "chunks H c"],
) -> tuple[Float[Tensor, "chunks H ..."], ...]:
    """Computes the part of a chunk that does not depend on the incoming state S.

    Returns:
      `U` and `W`, where the chunk stores `U - W S`; the queries scaled for the incoming state and
      their scores within the chunk; the keys decayed to the chunk end, and the decay of the state.
    """
    c = q.shape[2]
    total = log_decay.cumsum(2)
    lower = torch.ones(c, c, dtype=torch.bool, device=q.device).tril()
    # Masked before exp: above the diagonal the difference is positive and would overflow.
    difference = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, 0)
    decay = difference.exp().masked_fill(~lower, 0)
    among = (beta[..., None] * (k @ k.mT) * decay).tril(-1)
    carried = total.exp()[..., None]
    target = torch.cat([beta[..., None] * v, beta[..., None] * carried * k], dim=-1)
    solved = torch.linalg.solve_triangular(among, target, upper=False, unitriangular=True)
    stored, read = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    left = (total[..., -1:] - total).exp()[..., None] * k
    return stored, read, carried * q, (q @ k.mT) * decay, left.mT, carried[..., -1:, :]


def _one_chunk(
    state: Float[Tensor, "H K V"],
    stored: Float[Tensor, "H c V"],
    read: Float[Tensor, "H c K"],
    queries: Float[Tensor, "H c K"],
    among: Float[Tensor, "H c c"],
    left: Float[Tensor, "H K c"],
    carried: Float[Tensor, "H 1 1"],
) -> tuple[Float[Tensor, "H K V"], Float[Tensor, "H c V"]]:
    """Advances the state over one prepared chunk."""
    stored = stored - read @ state
    return carried * state + left @ stored, queries @ state + among @ stored
