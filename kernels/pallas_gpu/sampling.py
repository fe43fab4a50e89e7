"""The choice of tokens from logits, on the Triton lowering of Pallas.

Two kernels. The first looks at tiles of the vocabulary, all at once: it finds the best tokens of a
tile or, where a row has a filter, what its groups of tokens hold. The second has a program a row:
it joins the tiles or, where a row has a filter, searches for the border of the row's support in the
groups that can hold it, and chooses among them. What a row does not ask for it does not pay for.

Results depend on no order and no tile, see `scores`. What must stay equal in the Triton twin is
listed in `kernels/__init__.py`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Float, Int

from kernels.pallas_gpu.noise import gumbel, log
from kernels.pallas_gpu.scores import (
    HIGHEST,
    LOWEST,
    PAIRS,
    Inputs,
    Sizes,
    before_all,
    ids_of,
    key_of,
    next_token,
    score_of,
    scores_of,
    sharpness_of,
    store_groups,
    total_of,
    wish_of,
)
from kernels.pallas_gpu.support import Source, find_support, mass_of_support, next_in_support
from kernels.tiles import SamplingTiles

GROUP = 2 * PAIRS
MOST_WIDTH = 8


def choose(
    logits: Float[jax.Array, "R vocab"],
    seen: Any,
    positions: Int[jax.Array, " R"],
    sampling: Any,
    request: Int[jax.Array, " R"],
    allowed: Bool[jax.Array, "R vocab"] | None,
    *,
    stream: int,
    tiles: SamplingTiles,
    interpret: bool = False,
) -> tuple[Int[jax.Array, " R"], Bool[jax.Array, " R"]]:
    """As `shared.spec.sampling.choose`.

    Args:
      logits, seen, positions, sampling, request, allowed: As in the specification.
      stream: Of the noise.
      tiles: How the work is cut.
      interpret: Run on a CPU.
    """
    ids, _, is_finite = _ranked(
        *(logits, seen, positions, sampling, request, allowed),
        *(positions, stream, 1, None, 0, tiles, interpret),
    )
    return ids[:, 0], is_finite


def rank(
    logits: Float[jax.Array, "B k vocab"],
    seen: Any,
    positions: Int[jax.Array, " B"],
    sampling: Any,
    keys: Int[jax.Array, " B"],
    stream: int | Int[jax.Array, ""],
    width: int,
    *,
    tau: float,
    tiles: SamplingTiles,
    interpret: bool = False,
) -> tuple[Int[jax.Array, "B k width"], Float[jax.Array, "B k width"]]:
    """The ids and weights of `shared.spec.sampling.rank`, of at most `MOST_WIDTH` children.

    Args:
      logits, seen, positions, sampling, keys, stream, width: As in the specification.
      tau: Softness of the weights where there is noise.
      tiles: How the work is cut.
      interpret: Run on a CPU.
    """
    B, k, vocab = logits.shape
    ids, weights, _ = _ranked(
        *(logits.reshape(B * k, vocab), seen, positions, sampling, positions, None),
        *(keys, stream, width, tau, k, tiles, interpret),
    )
    return ids.reshape(B, k, width), weights.reshape(B, k, width)


def _ranked(
    logits: Float[jax.Array, "R vocab"],
    seen: Any,
    positions: Int[jax.Array, " named"],
    sampling: Any,
    request: Int[jax.Array, " named"],
    allowed: Bool[jax.Array, "R vocab"] | None,
    keys: Int[jax.Array, " named"],
    stream: int | Int[jax.Array, ""],
    width: int,
    tau: float | None,
    nodes: int,
    tiles: SamplingTiles,
    interpret: bool,
) -> tuple[Int[jax.Array, "R width"], Float[jax.Array, "R width"], Bool[jax.Array, " R"]]:
    """The best tokens of each row, their weights, and whether its logits are finite.

    Args:
      tau: None: there are no weights.
      nodes: Rows of a request, whose positions and keys are its own; 0: `request` names it.
    """
    R, vocab = logits.shape
    groups = pl.cdiv(vocab, GROUP)
    num_tiles = pl.cdiv(groups, tiles.groups)
    inputs = _inputs(logits, seen, positions, sampling, request, allowed, keys, stream)
    sizes = _sizes(vocab, seen, sampling, allowed, nodes, tiles.at_once)
    fixed = {"sizes": sizes, "width": width, "tau": tau}
    ints, floats = jnp.int32, jnp.float32
    found = pl.pallas_call(
        functools.partial(_tiles_kernel, groups=tiles.groups, **fixed),
        grid=(num_tiles, R),
        out_shape=[
            jax.ShapeDtypeStruct((R, groups), ints),
            jax.ShapeDtypeStruct((R, groups), floats),
            jax.ShapeDtypeStruct((2, R, num_tiles * width), ints),
            jax.ShapeDtypeStruct((R, num_tiles), ints),
        ],
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=1),
        interpret=interpret,
        name="choose_tiles",
    )(*inputs)
    ids, weights, is_finite, _ = pl.pallas_call(
        functools.partial(_rows_kernel, interpret=interpret, **fixed),
        grid=(R,),
        out_shape=[
            jax.ShapeDtypeStruct((R, width), ints),
            jax.ShapeDtypeStruct((R, width), floats),
            jax.ShapeDtypeStruct((R,), ints),
            jax.ShapeDtypeStruct((R, groups), ints),
        ],
        compiler_params=pltriton.CompilerParams(num_warps=tiles.row_warps, num_stages=1),
        interpret=interpret,
        name="choose_rows",
    )(*inputs, *found)
    return ids, weights, is_finite != 0


def _inputs(
    logits: Float[jax.Array, "R vocab"],
    seen: Any,
    positions: Int[jax.Array, " named"],
    how: Any,
    request: Int[jax.Array, " named"],
    allowed: Bool[jax.Array, "R vocab"] | None,
    keys: Int[jax.Array, " named"],
    stream: int | Int[jax.Array, ""],
) -> Inputs:
    """The arrays as the kernels read them; where one has no columns, there is another."""
    on_path = seen.on_path.astype(jnp.int32)
    return Inputs(
        *(logits, request, positions, keys, seen.slots, seen.counts),
        *((seen.path, on_path) if seen.path.shape[1] else (seen.slots, seen.slots)),
        logits if allowed is None else allowed.astype(jnp.int8),
        *(how.temperature, how.top_p, how.top_k, how.min_p, how.seed),
        *(how.presence, how.frequency, how.repetition, how.min_length),
        how.stop_ids if how.stop_ids.shape[1] else how.top_k,
        *((how.bias_ids, how.bias_values) if how.bias_ids.shape[1] else (how.top_k, how.top_p)),
        jnp.asarray(stream).astype(jnp.uint32).reshape(1),
    )


def _sizes(
    vocab: int, seen: Any, sampling: Any, allowed: jax.Array | None, nodes: int, at_once: int
) -> Sizes:
    num_bias = sampling.bias_ids.shape[1]
    return Sizes(
        vocab=vocab,
        num_path=seen.path.shape[1],
        num_stops=sampling.stop_ids.shape[1],
        num_bias=num_bias,
        bias_lanes=pl.next_power_of_2(max(num_bias, 1)),
        has_mask=allowed is not None,
        nodes=nodes,
        at_once=at_once,
    )


def _tiles_kernel(*refs, groups, sizes, width, tau):
    """One program per tile and row: its best tokens, or what its groups hold before any noise."""
    inputs = Inputs(*refs[:-4])
    peaks_ref, masses_ref, winners_ref, bad_ref = refs[-4:]
    tile, row = pl.program_id(0), pl.program_id(1)
    wish = wish_of(inputs, row, sizes)
    group = tile * groups + lax.iota(jnp.int32, groups)
    pairs, ids = ids_of(group)
    raw, x = scores_of(ids, inputs, row, wish, sizes)
    bad_ref[row, tile] = jnp.max(jnp.where(jnp.abs(raw) < jnp.inf, 0, 1))
    inside = group < peaks_ref.shape[1]
    at = jnp.where(inside, group, peaks_ref.shape[1])  # outside for the interpreter
    places = peaks_ref.at[row, at], masses_ref.at[row, at], inside

    @pl.when(wish.is_filtered)
    def _():
        store_groups(*places, x, jnp.where(ids < sizes.vocab, key_of(x), LOWEST), 1.0)

    @pl.when(~wish.is_filtered)
    def _():
        noisy = lax.cond(
            wish.temperature > 0,
            lambda: x + gumbel(*wish.noise, inputs.stream[0], pairs),
            lambda: x,
        )
        keys = jnp.where(ids < sizes.vocab, key_of(noisy), LOWEST)
        if tau is not None:
            store_groups(*places, noisy, keys, sharpness_of(wish.temperature, tau))

        def store_next(rank, last):
            found = next_token(keys, ids, *last)
            for part, value in enumerate(found):
                winners_ref[part, row, tile * width + rank] = value
            return found

        lax.fori_loop(0, width, store_next, before_all())


def _rows_kernel(*refs, interpret, sizes, width, tau):
    """One program per row: its best tokens, from those of the tiles or from its support."""
    inputs = Inputs(*refs[:-8])
    peaks_ref, masses_ref, winners_ref, bad_ref, *out, finite_ref, members_ref = refs[-8:]
    row = pl.program_id(0)
    wish = wish_of(inputs, row, sizes)
    bad = _load_row(bad_ref, (row,), 0)
    finite_ref[row] = 1 - jnp.max(bad)
    group = lax.iota(jnp.int32, pl.next_power_of_2(peaks_ref.shape[1]))
    num_groups = peaks_ref.shape[1]
    num_read = num_groups if tau is not None else num_groups * wish.is_filtered.astype(jnp.int32)
    peaks = _load_row(peaks_ref, (row,), LOWEST, num_read)
    masses = _load_row(masses_ref, (row,), 0.0, num_read)
    sharpness = 1.0 if tau is None else sharpness_of(wish.temperature, tau)

    @pl.when(wish.is_filtered)
    def _():
        source = Source(inputs, row, wish, members_ref, sizes, interpret)
        support = find_support(peaks, masses, group, source)
        first = next_in_support(support, source, *before_all())
        best, norm = score_of(first[0]), 0.0
        if tau is not None:
            norm = log(mass_of_support(support, source, best, sharpness))
        _store(out, row, 0, first, best, norm, sharpness, sizes.vocab, tau)

        def store_next(rank, last):
            found = next_in_support(support, source, *last)
            _store(out, row, rank, found, best, norm, sharpness, sizes.vocab, tau)
            return found

        lax.fori_loop(1, width, store_next, first)

    @pl.when(~wish.is_filtered)
    def _():
        keys = _load_row(winners_ref, (0, row), LOWEST)
        ids = _load_row(winners_ref, (1, row), HIGHEST)
        best, norm = score_of(jnp.max(keys)), 0.0
        if tau is not None:
            norm = log(total_of(peaks, masses, best, sharpness))

        def store_next(rank, last):
            found = next_token(keys, ids, *last)
            _store(out, row, rank, found, best, norm, sharpness, sizes.vocab, tau)
            return found

        lax.fori_loop(0, width, store_next, before_all())


def _load_row(ref, at, other, num_read=None):
    """A row, or the first part of it, in a power of two of lanes."""
    lane = lax.iota(jnp.int32, pl.next_power_of_2(ref.shape[-1]))
    mask = lane < (ref.shape[-1] if num_read is None else num_read)
    return pltriton.load(ref.at[(*at, lane)], mask=mask, other=other)


def _store(out, row, rank, found, best, norm, sharpness, vocab, tau):
    """Stores one token of a row, and its weight."""
    ids_ref, weights_ref = out
    key, winner = found
    ids_ref[row, rank] = jnp.minimum(winner, vocab - 1)
    if tau is not None:
        weights_ref[row, rank] = (score_of(key) - best) * sharpness - norm
