"""Sampling from logits: top-k / top-p filters, Gumbel-max, ranking (Pallas, Triton backend).

Three kernels. The first processes tiles of the vocabulary in parallel. It finds the best tokens of
a tile or, for a row with a filter, the sums of exponentials of the tile's groups. The second finds
the top-k / top-p threshold of rows with a filter (`topk_topp`). The third finds the best tokens of
the filtered tiles, and reduces the tiles of all rows. Rows skip the work that they do not need.

Results depend neither on order nor on tiles, see `logits_processing`. `kernels/__init__.py` lists
what must stay equal to the Triton twin.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Float, Int, Int32

from kernels.pallas_gpu.sampling.lm_head_epilogue import BlockPartials
from kernels.pallas_gpu.sampling.logits_processing import PAIRS, VocabShard, inputs_of, sizes_of
from kernels.pallas_gpu.sampling.sampling_kernels import (
    NUM_INPUTS,
    rows_kernel,
    threshold_kernel,
    tiles_kernel,
)
from kernels.pallas_gpu.sampling.topk import TilePartials, TopK
from kernels.pallas_gpu.sampling.topk_topp import NOTES
from kernels.tiles import SamplingTiles

GROUP = 2 * PAIRS
SHARED = 4
"""Factor on the number of programs for rows that have a filter and block partials of the LM head.
"""


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
    leaves: BlockPartials | None = None,
    interpret: bool = False,
) -> tuple[Int[jax.Array, " R"], Bool[jax.Array, " R"]]:
    """Implements `shared.spec.sampling.choose`.

    Args:
      logits, seen, positions, sampling, request, allowed: Same as in the specification.
      stream: RNG stream of the noise.
      tiles: Tile config.
      leaves: Block partials of the LM head, for rows without stored logits.
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
    """Same as `choose`, and also returns `shared.spec.sampling.processed` of the arguments."""
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
    assert partials.scores is not None  # `is_scored` is set
    return best.ids[:, 0], best.is_finite != 0, partials.scores


def rank(
    logits: Float[jax.Array, "B k vocab"],
    seen: Any,
    positions: Int[jax.Array, "B ..."],
    sampling: Any,
    keys: Int[jax.Array, "B ..."],
    stream: int | Int[jax.Array, ""],
    width: int,
    is_sampled: bool,
    columns: Int[jax.Array, "*B vocab"] | None,
    *,
    tau: float,
    tiles: SamplingTiles,
    leaves: BlockPartials | None = None,
    interpret: bool = False,
) -> tuple[
    Int[jax.Array, "B k width"],
    Float[jax.Array, "B k width"],
    Float[jax.Array, "R target_vocab"] | None,
]:
    """Implements `shared.spec.sampling.rank`.

    Args:
      logits, seen, positions, sampling, keys, stream, width, is_sampled, columns: Same as in the
        specification. Columns may differ by request, as in `shared.spec.candidate_lists`.
      tau: Softness of the weights of sampled tokens.
      tiles: Tile config.
      leaves: Block partials of the LM head, for rows that may lack logits. They are computed for
        `lm_head_epilogue.row_outputs` with this width, and include the logits of rows with a
        temperature.
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


def shard_partials(
    logits: Float[jax.Array, "R share"],
    seen: Any,
    positions: Int[jax.Array, "named ..."],
    sampling: Any,
    request: Int[jax.Array, "named ..."],
    allowed: Bool[jax.Array, "R vocab"] | None,
    keys: Int[jax.Array, "named ..."],
    columns: Int[jax.Array, " vocab"] | None,
    part: VocabShard,
    *,
    stream: int | Int[jax.Array, ""],
    width: int,
    tau: float | None,
    nodes: int,
    tiles: SamplingTiles,
    leaves: BlockPartials | None = None,
    interpret: bool = False,
) -> tuple[Int32[jax.Array, "R words"], Int32[jax.Array, "R groups"], Float[jax.Array, "R groups"]]:
    """Computes the candidates of a rank's vocabulary shard, for `vocab_parallel.merge_topk`.

    Args:
      logits: Logits of this rank's tokens.
      seen, positions, sampling, request, allowed, keys, columns: Same as in `choose` and `rank`.
      part: This rank's shard, and the logits of all ranks for rows with a filter.
      stream: RNG stream of the noise.
      width: Tokens per row.
      tau: Softness of the weights of sampled tokens; None: no weights are returned.
      nodes: Rows per request, if positions and keys are per request; 0: `request` maps rows to
        requests.
      tiles: Tile config.
      leaves: Block partials of the LM head's shard, see `lm_head_epilogue.row_outputs`.
      interpret: Run on a CPU.

    Returns:
      Keys and ids of a row's best tokens of the shard, or of the whole vocabulary if it has a
      filter; and 1 if some logit is not finite. With weights, also the maxima and sums of
      exponentials of all groups; groups of other ranks are undefined.
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
    positions: Int[jax.Array, "named ..."],
    sampling: Any,
    request: Int[jax.Array, "named ..."],
    allowed: Bool[jax.Array, "R vocab"] | None,
    *,
    keys: Int[jax.Array, "named ..."],
    stream: int | Int[jax.Array, ""],
    width: int,
    is_scored: bool,
    columns: Int[jax.Array, "*B vocab"] | None,
    tau: float | None,
    nodes: int,
    tiles: SamplingTiles,
    interpret: bool,
    leaves: BlockPartials | None = None,
    part: VocabShard | None = None,
) -> tuple[TopK, TilePartials]:
    """Computes the best tokens of each row, its group sums and its processed logits.

    Args:
      is_scored: Processed logits are returned.
      tau: None: no weights are computed.
      nodes: Rows per request, if positions and keys are per request; 0: `request` maps rows to
        requests.
    """
    (R, vocab), of_ranks = logits.shape, {}
    if part is not None:
        of_ranks, vocab = {"ranks": part.ranks, "share": vocab}, part.vocab
    groups = pl.cdiv(vocab, GROUP)
    num_tiles = pl.cdiv(groups, tiles.groups)
    # In a vocabulary shard, and when tokens are ranked, all tiles of a sampled row are processed.
    held = leaves if part is None else None
    given = (logits, seen, positions, sampling, request, allowed, columns, keys, stream, part)
    inputs = inputs_of(*given)
    has_partials = held is not None and tau is None
    sizes = sizes_of(
        vocab, seen, sampling, allowed, nodes, positions, columns, has_partials, **of_ranks
    )
    chosen = {"sizes": sizes, "width": width, "tau": tau, "groups": tiles.groups}
    chosen |= {"is_scored": is_scored}
    ints, floats = jnp.int32, jnp.float32
    array = jax.ShapeDtypeStruct
    outputs = [
        *(array((R, groups), ints), array((R, groups), floats)),
        *(array((2, R, num_tiles * width), ints), array((R, NOTES), ints)),
    ]
    scores = ()
    if is_scored:  # also for tokens outside the draft vocabulary
        scores = (jnp.full((R, sizes.target_vocab), -jnp.inf, floats),)
    outputs += [array(x.shape, floats) for x in scores]
    left = () if leaves is None else tuple(leaves)
    chosen |= {"num_left": len(left)}
    aliases = {NUM_INPUTS + len(left): 4} if is_scored else {}
    if held is not None:  # the LM head's group sums stay for rows without tiles to process
        outputs[:2] = [array(x.shape, x.dtype) for x in (held.peaks, held.masses)]
        aliases |= {NUM_INPUTS + len(left) - 2 + number: number for number in range(2)}
    *outputs, bad = pl.pallas_call(
        functools.partial(tiles_kernel, **chosen),
        grid=(num_tiles if leaves is None else min(num_tiles, SHARED * tiles.programs), R),
        out_shape=[*outputs, array((R, num_tiles), ints)],
        input_output_aliases=aliases,
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=1),
        interpret=interpret,
        name="sample_tiles",
    )(*inputs, *left, *scores)
    partials = TilePartials(*outputs)
    kernel = functools.partial(threshold_kernel, sizes=sizes, tiles=tiles, interpret=interpret)
    notes, _ = pl.pallas_call(
        kernel,
        grid=(min(tiles.row_programs, pl.cdiv(groups, tiles.at_once)), R),
        out_shape=[array(partials.notes.shape, ints), array((R, 2, tiles.listed), ints)],
        input_output_aliases={NUM_INPUTS: 0},
        compiler_params=pltriton.CompilerParams(num_warps=tiles.row_warps, num_stages=1),
        interpret=interpret,
        name="find_threshold",
    )(*inputs, partials.notes, partials.peaks, partials.masses)
    outputs = [x for x in partials._replace(notes=notes) if x is not None]
    best = TopK(
        ids=array((R, width), ints),
        weights=array((R, width), floats),
        is_finite=array((R,), ints),
        left=None,
    )
    if part is not None:
        best = TopK(ids=None, weights=None, is_finite=None, left=array((R, 2 * width + 1), ints))
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
        name="sample_rows",
    )(*inputs, *left, *outputs, bad)
    return best, TilePartials(*outputs)
