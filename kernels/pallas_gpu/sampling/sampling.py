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
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Float, Int, Int32

from kernels.pallas_gpu.sampling.lm_head_epilogue import Leaves
from kernels.pallas_gpu.sampling.logits_processing import PAIRS, Part, inputs_of, sizes_of
from kernels.pallas_gpu.sampling.sampling_kernels import (
    NUM_INPUTS,
    border_kernel,
    rows_kernel,
    tiles_kernel,
)
from kernels.pallas_gpu.sampling.topk import Best, Partials
from kernels.pallas_gpu.sampling.topk_topp import NOTES
from kernels.tiles import SamplingTiles

GROUP = 2 * PAIRS
SHARED = 4
"""Beside what a head has left a row has so many times more programs that look at tiles than those
that its tiles have where it has a filter."""


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
    best, _ = _ranked(
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
    return best.ids[:, 0], best.is_finite != 0


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
    best, partials = _ranked(
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
    assert partials.scores is not None  # they are asked for
    return best.ids[:, 0], best.is_finite != 0, partials.scores


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
    leaves: Leaves | None = None,
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
      leaves: What the product with the head has left of rows that may lack their logits; of
        `leaves.asking` with this width, and with the scores of rows with a temperature.
      interpret: Run on a CPU.
    """
    B, k, vocab = logits.shape
    best, partials = _ranked(
        *(logits.reshape(B * k, vocab), seen, positions, sampling, positions, None),
        keys=keys,
        stream=stream,
        width=width,
        is_scored=is_sampled,
        columns=columns,
        tau=tau,
        nodes=k,
        tiles=tiles,
        leaves=leaves,
        interpret=interpret,
    )
    found = best.ids.reshape(B, k, width), best.weights.reshape(B, k, width)
    return *found, partials.scores


def leave(
    logits: Float[jax.Array, "R share"],
    seen: Any,
    positions: Int[jax.Array, " named"],
    sampling: Any,
    request: Int[jax.Array, " named"],
    allowed: Bool[jax.Array, "R vocab"] | None,
    keys: Int[jax.Array, " named"],
    columns: Int[jax.Array, " vocab"] | None,
    part: Part,
    *,
    stream: int | Int[jax.Array, ""],
    width: int,
    tau: float | None,
    nodes: int,
    tiles: SamplingTiles,
    leaves: Leaves | None = None,
    interpret: bool = False,
) -> tuple[Int32[jax.Array, "R words"], Int32[jax.Array, "R groups"], Float[jax.Array, "R groups"]]:
    """What a rank's part of the vocabulary leaves of rows, for `vocabulary.join`.

    Args:
      logits: Of this rank's tokens.
      seen, positions, sampling, request, allowed, keys, columns: As of `choose` and `rank`.
      part: Which tokens those are, and the scores of all for rows with a filter.
      stream: Of the noise.
      width: Tokens of a row.
      tau: Softness of the weights where there is noise; None: they are not asked for.
      nodes: Rows of a request, whose positions and keys are its own; 0: `request` names it.
      tiles: How the work is cut.
      leaves: Of a head that was asked for a part, see `leaves.asking`.
      interpret: Run on a CPU.

    Returns:
      Keys and ids of a row's best tokens among those, or among all where it has a filter, and 1
      where some logit is not finite; then the peaks and masses of all groups, of which those of
      others are undefined, if weights are asked for.
    """
    best, partials = _ranked(
        *(logits, seen, positions, sampling, request, allowed),
        keys=keys,
        stream=stream,
        width=width,
        is_scored=False,
        columns=columns,
        tau=tau,
        nodes=nodes,
        tiles=tiles,
        leaves=leaves,
        part=part,
        interpret=interpret,
    )
    return best.left, partials.peaks, partials.masses


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
    part: Part | None = None,
) -> tuple[Best, Partials]:
    """The best tokens of each row, and what was found of its groups, with its scores.

    Args:
      is_scored: The scores are asked for.
      tau: None: there are no weights.
      nodes: Rows of a request, whose positions and keys are its own; 0: `request` names it.
    """
    (R, vocab), of_ranks = logits.shape, {}
    if part is not None:
        of_ranks, vocab = {"ranks": part.ranks, "share": vocab}, part.vocab
    groups = pl.cdiv(vocab, GROUP)
    num_tiles = pl.cdiv(groups, tiles.groups)
    # Of a part, and where tokens are ranked, rows with a temperature are looked at as a whole.
    held = leaves if part is None else None
    given = (logits, seen, positions, sampling, request, allowed, columns, keys, stream, part)
    inputs = inputs_of(*given)
    is_left = held is not None and tau is None
    sizes = sizes_of(vocab, seen, sampling, allowed, nodes, columns, is_left, **of_ranks)
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
    if held is not None:  # what groups hold stays where no row is looked at
        outputs[:2] = [array(x.shape, x.dtype) for x in (held.peaks, held.masses)]
        aliases |= {NUM_INPUTS + len(left) - 2 + number: number for number in range(2)}
    *outputs, bad = pl.pallas_call(
        functools.partial(tiles_kernel, **chosen),
        grid=(num_tiles if leaves is None else min(num_tiles, SHARED * tiles.programs), R),
        out_shape=[*outputs, array((R, num_tiles), ints)],
        input_output_aliases=aliases,
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=1),
        interpret=interpret,
        name="choose_tiles",
    )(*inputs, *left, *scores)
    partials = Partials(*outputs)
    kernel = functools.partial(border_kernel, sizes=sizes, tiles=tiles, interpret=interpret)
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
    best = Best(
        ids=array((R, width), ints),
        weights=array((R, width), floats),
        is_finite=array((R,), ints),
        left=None,
    )
    if part is not None:
        best = Best(ids=None, weights=None, is_finite=None, left=array((R, 2 * width + 1), ints))
    num_best = sum(x is not None for x in best)
    best, *outputs = pl.pallas_call(
        functools.partial(rows_kernel, interpret=interpret, **chosen),
        grid=(min(tiles.programs, num_tiles), R),
        out_shape=[best, *(array(x.shape, x.dtype) for x in outputs)],
        input_output_aliases={
            NUM_INPUTS + len(left) + number: num_best + number for number in range(len(outputs))
        },
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=1),
        interpret=interpret,
        name="choose_rows",
    )(*inputs, *left, *outputs, bad)
    return best, Partials(*outputs)
