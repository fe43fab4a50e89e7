"""Sampling from logits: top-k / top-p filters, Gumbel-max, ranking (Triton).

Three kernels. The first processes tiles of the vocabulary in parallel. It finds the best tokens of
a tile or, for a row with a filter, the sums of exponentials of the tile's groups. The second finds
the top-k / top-p threshold of rows with a filter (`topk_topp`). The third finds the best tokens of
the filtered tiles, and reduces the tiles of all rows. Rows skip the work that they do not need.

Results depend neither on order nor on tiles, see `logits_processing`. `kernels/__init__.py` lists
what must stay equal to the Pallas twin.
"""

from typing import Any

import torch
import triton
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from kernels.tiles import SamplingTiles
from kernels.triton_gpu.sampling.lm_head_epilogue import BlockPartials
from kernels.triton_gpu.sampling.logits_processing import PAIRS, VocabShard, inputs_of, sizes_of
from kernels.triton_gpu.sampling.sampling_kernels import (
    rows_kernel,
    threshold_kernel,
    tiles_kernel,
)
from kernels.triton_gpu.sampling.topk import TilePartials, TopK
from kernels.triton_gpu.sampling.topk_topp import NOTES

GROUP = 2 * PAIRS.value
SHARED = 4
"""Factor on the number of programs for rows that have a filter and block partials of the LM head.
"""


def choose(
    logits: Float[Tensor, "R vocab"],
    seen: Any,
    positions: Int[Tensor, " R"],
    sampling: Any,
    request: Int[Tensor, " R"],
    allowed: Bool[Tensor, "R vocab"] | None,
    *,
    stream: int,
    tiles: SamplingTiles,
    leaves: BlockPartials | None = None,
) -> tuple[Int[Tensor, " R"], Bool[Tensor, " R"]]:
    """Implements `shared.spec.sampling.choose`.

    Args:
      logits, seen, positions, sampling, request, allowed: Same as in the specification.
      stream: RNG stream of the noise.
      tiles: Tile config.
      leaves: Block partials of the LM head, for rows without stored logits.
    """
    best, *_ = _ranked(
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
    )
    return best.ids[:, 0], best.is_finite


def score(
    logits: Float[Tensor, "R vocab"],
    seen: Any,
    positions: Int[Tensor, " R"],
    sampling: Any,
    request: Int[Tensor, " R"],
    allowed: Bool[Tensor, "R vocab"] | None,
    *,
    stream: int,
    tiles: SamplingTiles,
) -> tuple[Int[Tensor, " R"], Bool[Tensor, " R"], Float[Tensor, "R vocab"]]:
    """Same as `choose`, and also returns `shared.spec.sampling.processed` of the arguments."""
    best, scores, _ = _ranked(
        *(logits, seen, positions, sampling, request, allowed),
        keys=positions,
        stream=stream,
        width=1,
        is_scored=True,
        columns=None,
        tau=None,
        nodes=0,
        tiles=tiles,
    )
    return best.ids[:, 0], best.is_finite, scores


def rank(
    logits: Float[Tensor, "B k vocab"],
    seen: Any,
    positions: Int[Tensor, "B ..."],
    sampling: Any,
    keys: Int[Tensor, "B ..."],
    stream: int,
    width: int,
    is_sampled: bool,
    columns: Int[Tensor, "*B vocab"] | None,
    *,
    tau: float,
    tiles: SamplingTiles,
    leaves: BlockPartials | None = None,
) -> tuple[
    Int[Tensor, "B k width"], Float[Tensor, "B k width"], Float[Tensor, "R target_vocab"] | None
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
    """
    B, k, _ = logits.shape
    best, scores, _ = _ranked(
        *(logits.flatten(0, 1), seen, positions, sampling, positions, None),
        keys=keys,
        stream=stream,
        width=width,
        is_scored=is_sampled,
        columns=columns,
        tau=tau,
        nodes=k,
        tiles=tiles,
        leaves=leaves,
    )
    found = best.ids.view(B, k, width), best.weights.view(B, k, width)
    return *found, scores if is_sampled else None


def shard_partials(
    logits: Float[Tensor, "R share"],
    seen: Any,
    positions: Int[Tensor, "named ..."],
    sampling: Any,
    request: Int[Tensor, "named ..."],
    allowed: Bool[Tensor, "R vocab"] | None,
    keys: Int[Tensor, "named ..."],
    columns: Int[Tensor, " vocab"] | None,
    part: VocabShard,
    *,
    stream: int,
    width: int,
    tau: float | None,
    nodes: int,
    tiles: SamplingTiles,
    leaves: BlockPartials | None = None,
) -> tuple[Int32[Tensor, "R words"], Int32[Tensor, "R groups"], Float[Tensor, "R groups"]]:
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

    Returns:
      Keys and ids of a row's best tokens of the shard, or of the whole vocabulary if it has a
      filter; and 1 if some logit is not finite. With weights, also the maxima and sums of
      exponentials of all groups; groups of other ranks are undefined.
    """
    best, _, partials = _ranked(
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
    )
    return best.left, partials.peaks, partials.masses


def _ranked(
    logits: Float[Tensor, "R vocab"],
    seen: Any,
    positions: Int[Tensor, "named ..."],
    sampling: Any,
    request: Int[Tensor, "named ..."],
    allowed: Bool[Tensor, "R vocab"] | None,
    *,
    keys: Int[Tensor, "named ..."],
    stream: int,
    width: int,
    is_scored: bool,
    columns: Int[Tensor, "*B vocab"] | None,
    tau: float | None,
    nodes: int,
    tiles: SamplingTiles,
    leaves: BlockPartials | None = None,
    part: VocabShard | None = None,
) -> tuple[TopK, Float[Tensor, "R target_vocab"], TilePartials]:
    """Computes the best tokens of each row, its processed logits and its group sums.

    Args:
      is_scored: Processed logits are stored.
      tau: None: no weights are computed.
      nodes: Rows per request, if positions and keys are per request; 0: `request` maps rows to
        requests.
    """
    (R, vocab), params, new = logits.shape, sampling, logits.new_empty
    of_ranks = {}
    if part is not None:
        of_ranks, vocab = {"ranks": part.ranks, "share": vocab}, part.vocab
    # In a vocabulary shard, and when tokens are ranked, all tiles of a sampled row are processed.
    held = leaves if part is None else None
    groups = triton.cdiv(vocab, GROUP)
    num_tiles = triton.cdiv(groups, tiles.groups)
    ints: dict[str, Any] = {"dtype": torch.int32}
    scores = logits if not is_scored else new(R, seen.counts.shape[1])
    if is_scored and columns is not None:
        scores.fill_(-torch.inf)  # for tokens outside the draft vocabulary
    partials = TilePartials(
        peaks=new(R, groups, **ints) if held is None else held.peaks,
        masses=new(R, groups) if held is None else held.masses,
        winners=new(R, num_tiles, width, **ints),
        winner_ids=new(R, num_tiles, width, **ints),
        bad=new(R, num_tiles, **ints),
        notes=new(R, NOTES.value, **ints),
        scores=scores,
    )
    best = TopK(
        ids=new(R, width, **ints),
        weights=new(R, width),
        is_finite=new(R, dtype=torch.bool),
        left=new(R, 0 if part is None else 2 * width + 1, **ints),
    )
    rows = (logits, seen, positions, params, request, allowed, columns, keys, stream, part)
    inputs = inputs_of(*rows)
    num_leaves = 0 if leaves is None else leaves.keys.shape[1]
    given = (
        BlockPartials(*[partials.bad] * len(BlockPartials._fields)) if leaves is None else leaves
    )
    fixed = {
        "sizes": sizes_of(
            vocab, seen, params, allowed, nodes, positions, columns, held is not None, **of_ranks
        ),
        "enable_fp_fusion": False,  # XLA's Triton does not fuse: same bits as Pallas
    }
    chosen = {"width": width, "tau": tau, "is_scored": is_scored, "num_leaves": num_leaves}
    group_lanes = triton.next_power_of_2(groups)
    # Rows without stored logits have no tiles to process.
    at_once = num_tiles if leaves is None else min(num_tiles, SHARED * tiles.programs)
    tiles_kernel[(at_once, R)](
        *(inputs, partials, given),
        num_tiles=num_tiles,
        groups=tiles.groups,
        num_warps=tiles.warps,
        **fixed,
        **chosen,
    )
    threshold_kernel[(min(tiles.row_programs, triton.cdiv(groups, tiles.at_once)), R)](
        *(inputs, partials, new(R, 2, tiles.listed, **ints)),
        group_lanes=group_lanes,
        at_once=tiles.at_once,
        sampled=tiles.sampled,
        listed=tiles.listed,
        num_warps=tiles.row_warps,
        **fixed,
    )
    rows_kernel[(min(tiles.programs, num_tiles), R)](
        *(inputs, partials, given, best),
        num_tiles=num_tiles,
        tile_lanes=triton.next_power_of_2(num_tiles * width),
        leaf_lanes=triton.next_power_of_2(num_leaves),
        group_lanes=group_lanes,
        groups=tiles.groups,
        num_warps=tiles.warps,
        **fixed,
        **chosen,
    )
    return best, scores, partials
