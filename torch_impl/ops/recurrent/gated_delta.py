"""Gated delta rule in float32: recurrent, chunked and over a tree.

Same results as `shared.spec.gated_delta`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.spec.gated_delta import CHUNK
from torch_impl.ops import clamp_rows
from torch_impl.ops.gemm import layers
from torch_impl.ops.trees import draft_tree


@dataclass(frozen=True)
class RecurrenceInputs:
    """Inputs of the recurrence, of some tokens; same as in the specification."""

    q: Float[Tensor, "*batch H K"]
    k: Float[Tensor, "*batch H K"]
    v: Float[Tensor, "*batch H V"]
    log_decay: Float[Tensor, "*batch H"]
    beta: Float[Tensor, "*batch H"] | None
    skipped: Float[Tensor, "*batch H V"] | None

    def batched(self, batch: tuple[int, ...]) -> "RecurrenceInputs":
        """Returns the inputs of flat tokens with other leading axes."""

        def shaped(x: Float[Tensor, "R ..."]) -> Float[Tensor, "..."]:
            return x.unflatten(0, batch)

        return RecurrenceInputs(
            q=shaped(self.q),
            k=shaped(self.k),
            v=shaped(self.v),
            log_decay=shaped(self.log_decay),
            beta=None if self.beta is None else shaped(self.beta),
            skipped=None if self.skipped is None else shaped(self.skipped),
        )


class Prepared(NamedTuple):
    """Part of a chunk, or of all chunks, that does not depend on the incoming state S.

    Attributes:
      stored, read: `U` and `W`, where the chunk stores `U - W S`; no `W` without the delta rule.
      queries, scores: Queries scaled for the incoming state, and their scores within the chunk.
      keys, decay: Keys decayed to the end of the chunk, and the decay of the state.
    """

    stored: Float[Tensor, "*chunks H c V"]
    read: Float[Tensor, "*chunks H c K"] | None
    queries: Float[Tensor, "*chunks H c K"]
    scores: Float[Tensor, "*chunks H c c"]
    keys: Float[Tensor, "*chunks H K c"]
    decay: Float[Tensor, "*chunks H 1 1"]


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
    beta: Float[Tensor, "*batch H"] | None,
) -> Float[Tensor, "*batch H K V"]:
    """Advances each row's state by one token, without GEMM, so it is batch-invariant."""
    state = log_decay.exp()[..., None, None] * state
    k = k[..., None]
    if beta is not None:
        v = beta[..., None] * (v - (k * state).sum(dim=-2))
    return state.add_(k * v[..., None, :])


def step(
    state: Float[Tensor, "B H K V"],
    q: Float[Tensor, "B H K"],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B H V"],
    log_decay: Float[Tensor, "B H"],
    beta: Float[Tensor, "B H"] | None,
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
    beta: Float[Tensor, "B N H"] | None,
    parents: Int[Tensor, "B N"] | None,
) -> Float[Tensor, "B N H V"]:
    """Same as the specification; `parents` is None for chains."""
    nodes = (q, k, v, log_decay) if beta is None else (q, k, v, log_decay, beta)
    if parents is None:
        return _along_chains(state, *nodes)
    sees = draft_tree.ancestors(parents)
    # 0 x NaN is NaN: a node that is not finite is zeroed, and its descendants are set to NaN.
    spoiled = ~torch.stack([x.isfinite().flatten(2).all(dim=2) for x in nodes[1:]]).all(dim=0)
    q, *others = (x.movedim(1, 2) for x in nodes)  # [B, H, N, ...]
    others = (x.masked_fill(_per_node(spoiled, x.ndim), 0) for x in others)
    k, v, log_decay, *betas = others
    beta = betas[0] if betas else None
    out = _along_paths(state, sees, q, k, v, log_decay, beta).movedim(2, 1)
    return out.masked_fill((sees & spoiled[:, None]).any(dim=2)[..., None, None], torch.nan)


def _per_node(flags: Bool[Tensor, "B N"], ndim: int) -> Bool[Tensor, "B 1 N ..."]:
    return flags.view(len(flags), 1, -1, *[1] * (ndim - 3))


def _along_chains(
    state: Float[Tensor, "B H K V"], *nodes: Float[Tensor, "B N ..."]
) -> Float[Tensor, "B N H V"]:
    """Computes the outputs of the nodes of chains one by one, like plain decoding."""
    outputs = []
    for q, k, v, log_decay, *beta in zip(*(x.unbind(1) for x in nodes), strict=True):
        state, out = step(state, q, k, v, log_decay, *beta or (None,))
        outputs.append(out)
    return torch.stack(outputs, dim=1)


def _along_paths(
    state: Float[Tensor, "B H K V"],
    sees: Bool[Tensor, "B N N"],
    q: Float[Tensor, "B H N K"],
    k: Float[Tensor, "B H N K"],
    v: Float[Tensor, "B H N V"],
    log_decay: Float[Tensor, "B H N"],
    beta: Float[Tensor, "B H N"] | None,
) -> Float[Tensor, "B H N V"]:
    """Computes the outputs of all nodes as one chunk in which only ancestors are visible.

    The states of nodes are not computed: each would be a `[K, V]` matrix to write and read.
    """
    ours = sees[:, None].float()
    decays = ours * log_decay[:, :, None]  # of each node's ancestors and itself
    # Summed over the path between two nodes: a difference of prefix sums would cancel.
    between = decays @ (1 - ours.mT)
    decay = between.exp().masked_fill(~sees[:, None], 0)
    carried, stored = layers.summed(decays).exp(), v
    if beta is not None:
        beta = beta[..., None]
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
    beta: Float[Tensor, "T H"] | None,
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
    q, k, v, log_decay = (_rows_of_chunks(x, at, is_real) for x in (q, k, v, log_decay))
    own = None if beta is None else _rows_of_chunks(beta, at, is_real)
    prepared = _prepare(q, k, v, log_decay, own)
    after = stop - row_starts[owner]
    state, saved, outputs = state.clone(), state.clone(), []
    for i in range(len(owner)):
        row = owner[i : i + 1]
        before = state[row][0]
        following, out = _one_chunk(before, _chunk_of(prepared, i))
        state[row] = following
        saved[row] = torch.where(after[i] == save_after[row][0], following, saved[row][0])
        outputs.append(out)
    out = torch.stack(outputs).movedim(1, 2)  # [chunks, CHUNK, H, V]
    flat = torch.zeros(T + 1, *out.shape[2:], dtype=out.dtype, device=out.device)
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
    beta: Float[Tensor, "chunks H c"] | None,
) -> Prepared:
    """Computes the part of the chunks that does not depend on the incoming states."""
    c = q.shape[2]
    total = log_decay.cumsum(2)
    lower = torch.ones(c, c, dtype=torch.bool, device=q.device).tril()
    # Masked before exp: above the diagonal the difference is positive and would overflow.
    difference = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, 0)
    decay = difference.exp().masked_fill(~lower, 0)
    carried, stored, read = total.exp()[..., None], v, None
    if beta is not None:
        among = (beta[..., None] * (k @ k.mT) * decay).tril(-1)
        target = torch.cat([beta[..., None] * v, beta[..., None] * carried * k], dim=-1)
        solved = torch.linalg.solve_triangular(among, target, upper=False, unitriangular=True)
        stored, read = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    left = (total[..., -1:] - total).exp()[..., None] * k
    return Prepared(stored, read, carried * q, (q @ k.mT) * decay, left.mT, carried[..., -1:, :])


def _chunk_of(prepared: Prepared, number: int) -> Prepared:
    stored, read, *others = prepared
    own = None if read is None else read[number]
    return Prepared(stored[number], own, *(x[number] for x in others))


def _one_chunk(
    state: Float[Tensor, "H K V"], chunk: Prepared
) -> tuple[Float[Tensor, "H K V"], Float[Tensor, "H c V"]]:
    """Advances the state over one prepared chunk."""
    stored = chunk.stored
    if chunk.read is not None:
        stored = stored - chunk.read @ state
    out = chunk.queries @ state + chunk.scores @ stored
    return chunk.decay * state + chunk.keys @ stored, out
