"""The choice of tokens from logits, on the Triton lowering of Pallas.

Three kernels. The first looks at tiles of the vocabulary, all at once: it finds the best tokens of
a tile or, where a row has a filter, what its groups of tokens hold. The second finds the border of
the support of rows with a filter (`support`). The third finds the best tokens of their tiles, and
joins the tiles of all rows. What a row does not ask for it does not pay for.

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

from kernels.pallas_gpu.guess import guess
from kernels.pallas_gpu.leaves import (
    NOTHING,
    SCORES,
    Leaves,
    asked_of,
    best_left,
    is_left_bad,
)
from kernels.pallas_gpu.noise import log, noise_of_words
from kernels.pallas_gpu.scores import (
    HIGHEST,
    KEY_OF_NOTHING,
    LOWEST,
    PAIRS,
    Inputs,
    has_bad,
    ids_of,
    in_order,
    inputs_of,
    key_of,
    score_of,
    scores_of,
    sharpness_of,
    sizes_of,
    store_groups,
    tokens_of,
    total_of,
    wish_of,
    words_at,
)
from kernels.pallas_gpu.support import (
    NOTES,
    Memory,
    Source,
    bounds_of,
    find_border,
    list_near,
)
from kernels.pallas_gpu.winners import (
    Partials,
    choose_in_tiles,
    is_last,
    load_row,
    places,
    store_scores,
    store_winners,
)
from kernels.tiles import SamplingTiles

GROUP = 2 * PAIRS
SHARED = 4
"""Beside what a head has left a row has so many times more programs that look at tiles than those
that its tiles have where it has a filter."""
NUM_INPUTS = len(Inputs._fields)


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
    leaves: Leaves | None = None,
    interpret: bool = False,
) -> tuple[Int[jax.Array, " R"], Bool[jax.Array, " R"]]:
    """As `shared.spec.sampling.choose`.

    Args:
      logits, seen, positions, sampling, request, allowed: As in the specification.
      stream: Of the noise.
      tiles: How the work is cut.
      leaves: What the product with the head has left of rows whose logits are not there.
      interpret: Run on a CPU.
    """
    ids, _, is_finite, _ = _ranked(
        *(logits, seen, positions, sampling, request, allowed),
        keys=positions,
        stream=stream,
        width=1,
        is_scored=False,
        columns=None,
        tau=None,
        nodes=0,
        tiles=tiles,
        leaves=leaves,
        interpret=interpret,
    )
    return ids[:, 0], is_finite


def score(
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
) -> tuple[Int[jax.Array, " R"], Bool[jax.Array, " R"], Float[jax.Array, "R vocab"]]:
    """As `choose`, and `shared.spec.sampling.processed` of the same arguments."""
    ids, _, is_finite, scores = _ranked(
        *(logits, seen, positions, sampling, request, allowed),
        keys=positions,
        stream=stream,
        width=1,
        is_scored=True,
        columns=None,
        tau=None,
        nodes=0,
        tiles=tiles,
        interpret=interpret,
    )
    assert scores is not None  # they are asked for
    return ids[:, 0], is_finite, scores


def rank(
    logits: Float[jax.Array, "B k vocab"],
    seen: Any,
    positions: Int[jax.Array, " B"],
    sampling: Any,
    keys: Int[jax.Array, " B"],
    stream: int | Int[jax.Array, ""],
    width: int,
    is_sampled: bool,
    columns: Int[jax.Array, " vocab"] | None,
    *,
    tau: float,
    tiles: SamplingTiles,
    interpret: bool = False,
) -> tuple[
    Int[jax.Array, "B k width"],
    Float[jax.Array, "B k width"],
    Float[jax.Array, "R target_vocab"] | None,
]:
    """As `shared.spec.sampling.rank`.

    Args:
      logits, seen, positions, sampling, keys, stream, width, is_sampled, columns: As in the
        specification.
      tau: Softness of the weights where there is noise.
      tiles: How the work is cut.
      interpret: Run on a CPU.
    """
    B, k, vocab = logits.shape
    ids, weights, _, scores = _ranked(
        *(logits.reshape(B * k, vocab), seen, positions, sampling, positions, None),
        keys=keys,
        stream=stream,
        width=width,
        is_scored=is_sampled,
        columns=columns,
        tau=tau,
        nodes=k,
        tiles=tiles,
        interpret=interpret,
    )
    return ids.reshape(B, k, width), weights.reshape(B, k, width), scores


def _ranked(
    logits: Float[jax.Array, "R vocab"],
    seen: Any,
    positions: Int[jax.Array, " named"],
    sampling: Any,
    request: Int[jax.Array, " named"],
    allowed: Bool[jax.Array, "R vocab"] | None,
    *,
    keys: Int[jax.Array, " named"],
    stream: int | Int[jax.Array, ""],
    width: int,
    is_scored: bool,
    columns: Int[jax.Array, " vocab"] | None,
    tau: float | None,
    nodes: int,
    tiles: SamplingTiles,
    interpret: bool,
    leaves: Leaves | None = None,
) -> tuple[
    Int[jax.Array, "R width"],
    Float[jax.Array, "R width"],
    Bool[jax.Array, " R"],
    Float[jax.Array, "R target_vocab"] | None,
]:
    """The best tokens of each row, their weights, whether its logits are finite, and its scores.

    Args:
      is_scored: The scores are asked for.
      tau: None: there are no weights.
      nodes: Rows of a request, whose positions and keys are its own; 0: `request` names it.
    """
    R, vocab = logits.shape
    groups = pl.cdiv(vocab, GROUP)
    num_tiles = pl.cdiv(groups, tiles.groups)
    inputs = inputs_of(logits, seen, positions, sampling, request, allowed, columns, keys, stream)
    sizes = sizes_of(vocab, seen, sampling, allowed, nodes, columns, leaves is not None)
    chosen = {"sizes": sizes, "width": width, "tau": tau, "groups": tiles.groups}
    chosen |= {"is_scored": is_scored}
    ints, floats = jnp.int32, jnp.float32
    array = jax.ShapeDtypeStruct
    outputs = [
        *(array((R, groups), ints), array((R, groups), floats)),
        *(array((2, R, num_tiles * width), ints), array((R, NOTES), ints)),
    ]
    scores = ()
    if is_scored:  # of tokens that the drafter does not have as well
        scores = (jnp.full((R, sizes.target_vocab), -jnp.inf, floats),)
    outputs += [array(x.shape, floats) for x in scores]
    left = () if leaves is None else tuple(leaves)
    chosen |= {"num_left": len(left)}
    aliases = {NUM_INPUTS + len(left): 4} if is_scored else {}
    if leaves is not None:  # what groups hold stays where no row is looked at
        outputs[:2] = [array(x.shape, x.dtype) for x in (leaves.peaks, leaves.masses)]
        aliases |= {NUM_INPUTS + len(left) - 2 + number: number for number in range(2)}
    *outputs, bad = pl.pallas_call(
        functools.partial(_tiles_kernel, **chosen),
        grid=(num_tiles if leaves is None else min(num_tiles, SHARED * tiles.programs), R),
        out_shape=[*outputs, array((R, num_tiles), ints)],
        input_output_aliases=aliases,
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=1),
        interpret=interpret,
        name="choose_tiles",
    )(*inputs, *left, *scores)
    partials = Partials(*outputs)
    kernel = functools.partial(_border_kernel, sizes=sizes, tiles=tiles, interpret=interpret)
    notes, _ = pl.pallas_call(
        kernel,
        grid=(min(tiles.row_programs, pl.cdiv(groups, tiles.at_once)), R),
        out_shape=[array(partials.notes.shape, ints), array((R, 2, tiles.listed), ints)],
        input_output_aliases={NUM_INPUTS: 0},
        compiler_params=pltriton.CompilerParams(num_warps=tiles.row_warps, num_stages=1),
        interpret=interpret,
        name="find_border",
    )(*inputs, partials.notes, partials.peaks, partials.masses)
    outputs = [x for x in partials._replace(notes=notes) if x is not None]
    ids, weights, is_finite, *outputs = pl.pallas_call(
        functools.partial(_rows_kernel, interpret=interpret, **chosen),
        grid=(min(tiles.programs, num_tiles), R),
        out_shape=[
            *(array((R, width), ints), array((R, width), floats), array((R,), ints)),
            *(array(x.shape, x.dtype) for x in outputs),
        ],
        input_output_aliases={
            NUM_INPUTS + len(left) + number: 3 + number for number in range(len(outputs))
        },
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=1),
        interpret=interpret,
        name="choose_rows",
    )(*inputs, *left, *outputs, bad)
    return ids, weights, is_finite != 0, Partials(*outputs).scores


def _tiles_kernel(*refs, num_left, **how):
    """One program per tile and row: its best tokens, or what its groups hold before any noise.

    Where the head has left what a row asks for, there is nothing to look at, and programs are fewer
    than tiles.
    """
    inputs, leaves = Inputs(*refs[:NUM_INPUTS]), _leaves_of(refs, num_left)
    num_partials = 5 if how["is_scored"] else 4
    *outputs, bad_ref = refs[-num_partials - 1 :]
    share, row, programs = pl.program_id(0), pl.program_id(1), pl.num_programs(0)
    partials = Partials(*outputs)

    @pl.when(share == 0)
    def _():
        partials.notes[row, :] = jnp.zeros((NOTES,), jnp.int32)

    def look_at(number, _):
        tile = share + number * programs
        _look_at(tile, row, inputs, partials, bad_ref, **how)

    if leaves is None:
        look_at(0, None)
        return
    of_program = lax.div(bad_ref.shape[1] - share + programs - 1, jnp.int32(programs))
    is_asked = jnp.asarray(asked_of(leaves, row) == SCORES, jnp.int32)
    lax.fori_loop(0, of_program * is_asked, look_at, None)


def _leaves_of(refs, num_left):
    return Leaves(*refs[NUM_INPUTS : NUM_INPUTS + num_left]) if num_left else None


def _look_at(tile, row, inputs, partials, bad_ref, *, groups, sizes, width, tau, is_scored):
    wish = wish_of(inputs, row, sizes)
    group = tile * groups + lax.iota(jnp.int32, groups)
    pairs, ids = ids_of(group)
    raw, x = scores_of(ids, inputs, row, wish, sizes)
    bad_ref[row, tile] = has_bad(raw).astype(jnp.int32)
    at = places(group, row, partials.peaks, partials.masses)

    @pl.when(wish.is_filtered)
    def _():
        store_groups(*at, x, jnp.where(ids < sizes.vocab, key_of(x), LOWEST), 1.0)

    @pl.when(~wish.is_filtered)
    def _():
        named = (pairs, ids, inputs, sizes)
        noisy = lax.cond(
            wish.temperature > 0,
            lambda: x + noise_of_words(words_at(wish.noise, *named)),
            lambda: x,
        )
        keys = jnp.where(ids < sizes.vocab, key_of(noisy), LOWEST)
        if tau is not None:
            store_groups(*at, noisy, keys, sharpness_of(wish.temperature, tau))
        if is_scored:
            store_scores(partials.scores, x, ids, inputs, row, sizes)
        store_winners(partials.winners, row, tile, keys, ids, width)


def _border_kernel(*refs, sizes, tiles, interpret):
    """One program per share of a row with a filter; the last to arrive finds the border."""
    inputs = Inputs(*refs[:-5])
    _, peaks_ref, masses_ref, notes_ref, near_ref = refs[-5:]
    share, row = pl.program_id(0), pl.program_id(1)
    wish = wish_of(inputs, row, sizes)

    @pl.when(wish.is_filtered)
    def _():
        peaks, masses = load_row(peaks_ref, (row,), LOWEST), load_row(masses_ref, (row,), 0.0)
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

        @pl.when(is_last(notes_ref, row, 5, interpret))
        def _():
            border, limit = find_border(low, high, bounds, source, memory)
            notes_ref[row, 0], notes_ref[row, 1] = border, limit
            notes_ref[row, 2] = key_of(bounds.highest)


def _rows_kernel(*refs, interpret, sizes, width, tau, groups, is_scored, num_left):
    """One program per share of a row: the best tokens of its tiles, where they have no noise yet.

    One of a row's programs joins the tiles, the last to arrive where all have something to do.
    """
    inputs, num_partials = Inputs(*refs[:NUM_INPUTS]), 5 if is_scored else 4
    bad_ref, ids_ref, weights_ref, finite_ref, *outputs = refs[
        NUM_INPUTS + num_left + num_partials :
    ]
    partials = Partials(*outputs)
    share, row = pl.program_id(0), pl.program_id(1)
    wish = wish_of(inputs, row, sizes)
    sharpness = 1.0 if tau is None else sharpness_of(wish.temperature, tau)
    num_tiles = bad_ref.shape[1]

    def choose():
        source = Source(inputs, row, wish, sizes, interpret)
        return choose_in_tiles(share, source, sharpness, partials, num_tiles, width, tau, groups)

    joins = lax.cond(wish.is_filtered, choose, lambda: share == 0)
    leaves = _leaves_of(refs, num_left)
    asks = asked_of(leaves, row)
    if leaves is not None:

        @pl.when(joins & (asks != SCORES))
        def _():
            finite_ref[row] = 1 - is_left_bad(leaves, row)

        @pl.when(joins & (asks == NOTHING))
        def _():
            ids_ref[row, 0] = tokens_of(best_left(leaves, row), inputs, sizes)

        joins &= asks != NOTHING

    @pl.when(joins)
    def _():
        @pl.when(asks == SCORES)
        def _():
            finite_ref[row] = 1 - jnp.max(load_row(bad_ref, (row,), 0))

        # Volatile, past the cache of the multiprocessor: other programs have written them.
        load = functools.partial(load_row, volatile=not interpret)
        keys, ids = (
            load(partials.winners, (0, row), LOWEST),
            load(partials.winners, (1, row), HIGHEST),
        )
        highest, norm = score_of(jnp.max(keys)), 0.0
        if tau is not None:
            peaks, masses = (
                load(partials.peaks, (row,), LOWEST),
                load(partials.masses, (row,), 0.0),
            )
            norm = log(total_of(peaks, masses, highest, sharpness))

        def store(rank, key, winner):
            ids_ref[row, rank] = tokens_of(jnp.minimum(winner, sizes.vocab - 1), inputs, sizes)
            if tau is not None:
                weights_ref[row, rank] = (score_of(key) - highest) * sharpness - norm

        in_order(keys, ids, width, store)
