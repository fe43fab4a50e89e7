"""The choice of tokens from logits, on the Triton lowering of Pallas.

Three kernels. The first looks at tiles of the vocabulary, all at once: it finds the best tokens of
a tile or, where a row has a filter, what its groups of tokens hold. The second finds the border of
the support of rows with a filter (`support`). The third finds the best tokens of their tiles, and
joins the tiles of all rows. What a row does not ask for it does not pay for.

Results depend on no order and no tile, see `scores`. What must stay equal in the Triton twin is
listed in `kernels/__init__.py`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Float, Int

from kernels.pallas_gpu.guess import guess
from kernels.pallas_gpu.noise import log, most_noise, noise_of_words
from kernels.pallas_gpu.scores import (
    HIGHEST,
    LOWEST,
    PAIRS,
    Inputs,
    Sizes,
    has_bad,
    ids_of,
    in_order,
    key_of,
    score_of,
    scores_of,
    sharpness_of,
    store_groups,
    tokens_of,
    total_of,
    weight_of,
    wish_of,
    words_at,
)
from kernels.pallas_gpu.support import (
    KEY_OF_NOTHING,
    NOTES,
    Memory,
    Source,
    bounds_of,
    find_border,
    list_near,
)
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
        *(positions, stream, 1, None, None, 0, tiles, interpret),
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
    columns: Int[jax.Array, " vocab"] | None,
    *,
    tau: float,
    tiles: SamplingTiles,
    interpret: bool = False,
) -> tuple[Int[jax.Array, "B k width"], Float[jax.Array, "B k width"]]:
    """The ids and weights of `shared.spec.sampling.rank`, of at most `MOST_WIDTH` children.

    Args:
      logits, seen, positions, sampling, keys, stream, width, columns: As in the specification.
      tau: Softness of the weights where there is noise.
      tiles: How the work is cut.
      interpret: Run on a CPU.
    """
    B, k, vocab = logits.shape
    ids, weights, _ = _ranked(
        *(logits.reshape(B * k, vocab), seen, positions, sampling, positions, None),
        *(keys, stream, width, columns, tau, k, tiles, interpret),
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
    columns: Int[jax.Array, " vocab"] | None,
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
    inputs = _inputs(logits, seen, positions, sampling, request, allowed, columns, keys, stream)
    sizes = _sizes(vocab, seen, sampling, allowed, nodes)
    sizes = sizes._replace(has_columns=columns is not None)
    chosen = {"sizes": sizes, "width": width, "tau": tau, "groups": tiles.groups}
    ints, floats = jnp.int32, jnp.float32
    array = jax.ShapeDtypeStruct
    found = (
        *(array((R, groups), ints), array((R, groups), floats)),
        *(array((2, R, num_tiles * width), ints), array((R, NOTES), ints)),
    )
    *found, bad = pl.pallas_call(
        functools.partial(_tiles_kernel, **chosen),
        grid=(num_tiles, R),
        out_shape=[*found, array((R, num_tiles), ints)],
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=1),
        interpret=interpret,
        name="choose_tiles",
    )(*inputs)
    peaks, masses, winners, notes = found
    kernel = functools.partial(_border_kernel, sizes=sizes, tiles=tiles, interpret=interpret)
    notes, _ = pl.pallas_call(
        kernel,
        grid=(min(tiles.row_programs, pl.cdiv(groups, tiles.at_once)), R),
        out_shape=[array(notes.shape, ints), array((R, 2, tiles.listed), ints)],
        input_output_aliases={len(inputs): 0},
        compiler_params=pltriton.CompilerParams(num_warps=tiles.row_warps, num_stages=1),
        interpret=interpret,
        name="find_border",
    )(*inputs, notes, peaks, masses)
    found = (peaks, masses, winners, notes)
    ids, weights, is_finite, *_ = pl.pallas_call(
        functools.partial(_rows_kernel, interpret=interpret, **chosen),
        grid=(min(tiles.programs, num_tiles), R),
        out_shape=[
            *(array((R, width), ints), array((R, width), floats), array((R,), ints)),
            *(array(x.shape, x.dtype) for x in found),
        ],
        input_output_aliases={len(inputs) + number: 3 + number for number in range(4)},
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=1),
        interpret=interpret,
        name="choose_rows",
    )(*inputs, *found, bad)
    return ids, weights, is_finite != 0


def _inputs(
    logits: Float[jax.Array, "R vocab"],
    seen: Any,
    positions: Int[jax.Array, " named"],
    how: Any,
    request: Int[jax.Array, " named"],
    allowed: Bool[jax.Array, "R vocab"] | None,
    columns: Int[jax.Array, " vocab"] | None,
    keys: Int[jax.Array, " named"],
    stream: int | Int[jax.Array, ""],
) -> Inputs:
    """The arrays as the kernels read them; where one has no columns, there is another."""
    on_path = seen.on_path.astype(jnp.int32)
    return Inputs(
        *(logits, request, positions, keys, seen.slots, seen.counts),
        *((seen.path, on_path) if seen.path.shape[1] else (seen.slots, seen.slots)),
        logits if allowed is None else allowed.astype(jnp.int8),
        seen.slots if columns is None else columns,
        *(how.temperature, how.top_p, how.top_k, how.min_p, how.seed),
        *(how.presence, how.frequency, how.repetition, how.min_length),
        how.stop_ids if how.stop_ids.shape[1] else how.top_k,
        *((how.bias_ids, how.bias_values) if how.bias_ids.shape[1] else (how.top_k, how.top_p)),
        jnp.asarray(stream).astype(jnp.uint32).reshape(1),
    )


def _sizes(vocab: int, seen: Any, sampling: Any, allowed: jax.Array | None, nodes: int) -> Sizes:
    num_bias = sampling.bias_ids.shape[1]
    return Sizes(
        vocab=vocab,
        num_path=seen.path.shape[1],
        num_stops=sampling.stop_ids.shape[1],
        num_bias=num_bias,
        bias_lanes=pl.next_power_of_2(max(num_bias, 1)),
        has_mask=allowed is not None,
        nodes=nodes,
    )


def _tiles_kernel(*refs, groups, sizes, width, tau):
    """One program per tile and row: its best tokens, or what its groups hold before any noise."""
    inputs = Inputs(*refs[:-5])
    peaks_ref, masses_ref, winners_ref, notes_ref, bad_ref = refs[-5:]
    tile, row = pl.program_id(0), pl.program_id(1)
    wish = wish_of(inputs, row, sizes)
    group = tile * groups + lax.iota(jnp.int32, groups)
    pairs, ids = ids_of(group)
    raw, x = scores_of(ids, inputs, row, wish, sizes)
    bad_ref[row, tile] = has_bad(raw).astype(jnp.int32)
    places = _places(group, row, peaks_ref, masses_ref)

    @pl.when(tile == 0)
    def _():
        notes_ref[row, :] = jnp.zeros((NOTES,), jnp.int32)

    @pl.when(wish.is_filtered)
    def _():
        store_groups(*places, x, jnp.where(ids < sizes.vocab, key_of(x), LOWEST), 1.0)

    @pl.when(~wish.is_filtered)
    def _():
        named = (inputs.stream[0], pairs, ids, inputs, sizes)
        noisy = lax.cond(
            wish.temperature > 0,
            lambda: x + noise_of_words(words_at(wish.noise, *named)),
            lambda: x,
        )
        keys = jnp.where(ids < sizes.vocab, key_of(noisy), LOWEST)
        if tau is not None:
            store_groups(*places, noisy, keys, sharpness_of(wish.temperature, tau))
        _store_winners(winners_ref, row, tile, keys, ids, width)


def _places(group, row, peaks_ref, masses_ref):
    """Where what groups hold is stored, and which of them there are."""
    inside = group < peaks_ref.shape[1]
    at = jnp.where(inside, group, peaks_ref.shape[1])  # outside for the interpreter
    return peaks_ref.at[row, at], masses_ref.at[row, at], inside


def _border_kernel(*refs, sizes, tiles, interpret):
    """One program per share of a row with a filter; the last to arrive finds the border."""
    inputs = Inputs(*refs[:-5])
    _, peaks_ref, masses_ref, notes_ref, near_ref = refs[-5:]
    share, row = pl.program_id(0), pl.program_id(1)
    wish = wish_of(inputs, row, sizes)

    @pl.when(wish.is_filtered)
    def _():
        peaks, masses = _load_row(peaks_ref, (row,), LOWEST), _load_row(masses_ref, (row,), 0.0)
        source = Source(inputs, row, wish, sizes, interpret)
        memory = Memory(peaks_ref, near_ref, notes_ref, tiles.at_once)
        bounds = bounds_of(peaks, masses, source)

        def share_work():
            low, high = guess(peaks, masses, bounds, source, tiles.sampled)
            is_flat = (peaks >= low).astype(jnp.int32).sum() * 2 > peaks_ref.shape[1]
            list_near(low, high, bounds.highest, is_flat, share, source, memory)
            return low, high

        is_on = bounds.high > KEY_OF_NOTHING
        low, high = lax.cond(is_on, share_work, lambda: (bounds.low, bounds.high))

        @pl.when(_is_last(notes_ref, row, 5, interpret))
        def _():
            border, limit = find_border(low, high, bounds, source, memory)
            notes_ref[row, 0], notes_ref[row, 1] = border, limit
            notes_ref[row, 2] = key_of(bounds.highest)


def _is_last(notes_ref, row, word, interpret):
    """Whether all other programs of a row have arrived before."""
    if not interpret:
        pltriton.debug_barrier()  # all of this program's words are in memory
    arrived = pltriton.atomic_add(notes_ref, (row, jnp.int32(word)), jnp.int32(1))
    return arrived == pl.num_programs(0) - 1


def _rows_kernel(*refs, interpret, sizes, width, tau, groups):
    """One program per share of a row: the best tokens of its tiles, where they have no noise yet.

    One of a row's programs joins the tiles, the last to arrive where all have something to do.
    """
    inputs = Inputs(*refs[:-12])
    bad_ref, ids_ref, weights_ref, finite_ref, *found = refs[-8:]
    share, row = pl.program_id(0), pl.program_id(1)
    wish = wish_of(inputs, row, sizes)
    sharpness = 1.0 if tau is None else sharpness_of(wish.temperature, tau)
    num_tiles = bad_ref.shape[1]

    def choose():
        source = Source(inputs, row, wish, sizes, interpret)
        return _choose_in_tiles(share, source, sharpness, found, num_tiles, width, tau, groups)

    is_last = lax.cond(wish.is_filtered, choose, lambda: share == 0)

    @pl.when(is_last)
    def _():
        finite_ref[row] = 1 - jnp.max(_load_row(bad_ref, (row,), 0))
        peaks_ref, masses_ref, winners_ref, _ = found
        # Volatile, past the cache of the multiprocessor: other programs have written them.
        load = functools.partial(_load_row, volatile=not interpret)
        keys, ids = load(winners_ref, (0, row), LOWEST), load(winners_ref, (1, row), HIGHEST)
        highest, norm = score_of(jnp.max(keys)), 0.0
        if tau is not None:
            peaks, masses = load(peaks_ref, (row,), LOWEST), load(masses_ref, (row,), 0.0)
            norm = log(total_of(peaks, masses, highest, sharpness))

        def store(rank, key, winner):
            ids_ref[row, rank] = tokens_of(jnp.minimum(winner, sizes.vocab - 1), inputs, sizes)
            if tau is not None:
                weights_ref[row, rank] = (score_of(key) - highest) * sharpness - norm

        in_order(keys, ids, width, store)


def _choose_in_tiles(share, source, sharpness, found, num_tiles, width, tau, groups):
    """Stores the best tokens of a program's tiles, with noise; whether it is the last to arrive."""
    notes_ref, row, programs = found[3], source.row, pl.num_programs(0)
    support = _Support(
        border=notes_ref[row, 0],
        limit=notes_ref[row, 1],
        highest=score_of(notes_ref[row, 2]),
        smallest=source.inputs.min_p[source.wish.request],
    )

    def step(number, best):
        tile = share + number * programs
        given = (tile, best, support, source, sharpness, found, width, tau, groups)
        return jnp.maximum(best, _choose_in_tile(*given))

    best = key_of(support.highest - 3)  # the first token stays, and no noise lies below -3
    steps = lax.div(num_tiles - share + programs - 1, jnp.int32(programs))
    lax.fori_loop(0, steps, step, best)
    return _is_last(notes_ref, row, 6, source.interpret)


class _Support(NamedTuple):
    """Which tokens of a row stay.

    Attributes:
      border: The key of the smallest score; of tokens that have it, those with an id below `limit`.
      highest: The highest score.
      smallest: How likely a token must be beside it.
    """

    border: Any
    limit: Any
    highest: Any
    smallest: Any


def _choose_in_tile(tile, best, support, source, sharpness, found, width, tau, groups):
    """Stores a tile's best tokens of a support, with noise, and what its groups hold then.

    Args:
      tile: Number of it.
      best: A key; where weights are not asked for, tokens below it are not either.
      support: Of the row.
      source: Of the scores.
      sharpness: Of the weights.
      found: What groups hold and the best tokens of tiles, to be replaced.

    Returns:
      The best token's key.
    """
    peaks_ref, masses_ref, winners_ref, _ = found
    row, border, sizes = source.row, support.border, source.sizes
    group = tile * groups + lax.iota(jnp.int32, groups)
    inside = group < peaks_ref.shape[1]
    peaks = pltriton.load(peaks_ref.at[row, group], mask=inside, other=LOWEST)
    likely = weight_of(score_of(peaks), support.highest, 1.0) >= support.smallest
    pairs, ids = ids_of(group)

    def without_any():
        return jnp.full(ids.shape, LOWEST, jnp.int32)

    def with_noise():
        _, x = scores_of(ids, source.inputs, row, source.wish, sizes)
        own = key_of(x)
        stays = (own > border) | ((own == border) & (ids < support.limit))
        stays &= weight_of(x, support.highest, 1.0) >= support.smallest
        x = jnp.where(stays, x, -jnp.inf)
        given = (source.inputs.stream[0], pairs, ids, source.inputs, sizes)
        words = words_at(source.wish.noise, *given)

        def noisy():
            return jnp.where(ids < sizes.vocab, key_of(x + noise_of_words(words)), LOWEST)

        if tau is not None:
            return noisy()
        may_win = jnp.max(x + most_noise(words)) >= score_of(best)
        return lax.cond(may_win, noisy, without_any)

    is_read = jnp.max(((peaks >= border) & likely).astype(jnp.int32)) > 0
    if width > 1:
        is_read |= tile == 0  # where fewer stay than are asked for, its excluded tokens follow
    keys = lax.cond(is_read, with_noise, without_any)
    if tau is not None:
        if not source.interpret:
            pltriton.debug_barrier()  # the keys of groups have been read
        places = _places(group, row, peaks_ref, masses_ref)
        store_groups(*places, score_of(keys), keys, sharpness)
    _store_winners(winners_ref, row, tile, keys, ids, width)
    return jnp.max(keys)


def _store_winners(winners_ref, row, tile, keys, ids, width):
    """Stores the best tokens of a tile."""

    def store(rank, *found):
        for part, value in enumerate(found):
            winners_ref[part, row, tile * width + rank] = value

    in_order(keys, ids, width, store)


def _load_row(ref, at, other, volatile=False):
    """A row in a power of two of lanes."""
    lane = lax.iota(jnp.int32, pl.next_power_of_2(ref.shape[-1]))
    load = functools.partial(pltriton.load, volatile=volatile)
    return load(ref.at[(*at, lane)], mask=lane < ref.shape[-1], other=other)
