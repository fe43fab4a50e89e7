"""MoE router: top-k experts of each row and their weights (Triton)."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.routing import RoutingSettings
from kernels.tiles import ExpertsTiles
from kernels.triton_gpu.gemm.linear import launching
from kernels.triton_gpu.gemm.lora import AdapterSizes, RowAdapters, expand_logits
from kernels.triton_gpu.gemm.sum_of_squares import add_up
from shared.spec.reduction_order import RouterOrder, SquaresOrder

LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-(2**31))
_OUTPUTS = 16
"""Logits per program: the fewest that a tensor core supports, so that there are many programs."""


class RouterSelection(NamedTuple):
    """Experts of each row by ascending number, the shared one last, and their weights.

    Padding rows have -1 in every slot.
    """

    ids: Any
    weights: Any


class RouterInputs(NamedTuple):
    """Inputs of the logits; the sums of squares are of the rows before their scale.

    `adapters` are LoRA adapters of the router; None without.
    """

    scaled: Any
    squares: Any
    router: Any
    logit_bias: Any
    bias: Any
    expert_scale: Any
    live: Any
    eps: Any
    adapters: Any


class PartialLogits(NamedTuple):
    """Partial logits of segments, and the number of programs that have finished."""

    parts: Any
    arrivals: Any


class RouterChunks(NamedTuple):
    """Chunks of a row's squares, lanes that read them, and the bits of their fixed-point units."""

    count: int
    spread: int
    digits: int


class RoutingConfig(NamedTuple):
    """Fields of `RoutingSettings`, whether there are biases and scales, and sizes of the kernel.

    Attributes:
      spread, lanes: Lanes of all experts, and of the selected ones.
      digits: Bits of the integers in which weights are added.
      adapters: Sizes of LoRA adapters; None without.
    """

    experts: int
    top: int
    groups: int
    top_groups: int
    slots: int
    outputs: int
    is_sigmoid: bool
    is_renormalised: bool
    factor: float
    is_shared: bool
    is_gated: bool
    is_biased: bool
    has_logit_bias: bool
    has_expert_scale: bool
    spread: int
    lanes: int
    digits: int
    adapters: AdapterSizes | None


class RouterTileConfig(NamedTuple):
    """Tile config: inputs, inputs of a segment and of a step, and the rows of a program."""

    hidden: int
    segment: int
    segments: int
    depth: int
    rows: int
    outputs: int
    stages: int


def route(
    scaled: Float[Tensor, "R hidden"],
    squares: Float[Tensor, "R chunks"],
    router: Float[Tensor, "outputs hidden"],
    router_bias: Float[Tensor, " outputs"] | None,
    bias: Float[Tensor, " experts"] | None,
    expert_scale: Float[Tensor, " experts"] | None,
    live: Int[Tensor, " 1"],
    arrivals: Int[Tensor, " counters"],
    lora: RowAdapters | None,
    *,
    eps: float,
    routing: RoutingSettings,
    order: RouterOrder,
    squares_order: SquaresOrder,
    tiles: ExpertsTiles,
) -> RouterSelection:
    """Selects the experts of each row: the highest scores, and the lower number among equal ones.

    Args:
      scaled: Rows times the scale of their norm, without the division by the norm.
      squares: Sums of squares of the rows per chunk, for that division.
      router: Router weights: the experts' rows, then that of the shared expert's gate, if any.
      router_bias: Added to the logits.
      bias: Added to an expert's score for the selection, not for its weight.
      expert_scale: Multiplier of an expert's weight.
      live: Number of rows without padding; padding rows select nothing and are not read.
      arrivals: Zeros, one counter per row or more; the kernel resets them to zero.
      lora: Adapters of the router for the rows, of `lora.shrink`; part 0 has the experts.
      eps: Epsilon of the norm.
      routing: Router config.
      order, squares_order: Reduction orders of logits, weights and squares.
      tiles: Tile config.
    """
    (R, hidden), chunks = scaled.shape, squares.shape[1]
    rows = min(tiles.router_rows, triton.next_power_of_2(R))
    blocks, columns = triton.cdiv(R, rows), triton.cdiv(routing.outputs, _OUTPUTS)
    parts = squares.new_empty((order.segments, R, routing.outputs))
    ids = torch.empty((R, routing.slots), dtype=torch.int32, device=scaled.device)
    weights = squares.new_empty((R, routing.slots))
    _route_kernel[(blocks * columns * order.segments,)](
        RouterInputs(
            scaled=scaled,
            squares=squares,
            router=router,
            logit_bias=squares if router_bias is None else router_bias,
            bias=squares if bias is None else bias,
            expert_scale=squares if expert_scale is None else expert_scale,
            live=live,
            eps=eps,
            adapters=None if lora is None else lora.operands,
        ),
        PartialLogits(parts=parts, arrivals=arrivals),
        RouterSelection(ids=ids, weights=weights),
        R,
        blocks,
        chunks=RouterChunks(chunks, triton.next_power_of_2(chunks), squares_order.digits_of_chunks),
        routing=RoutingConfig(
            experts=routing.experts,
            top=routing.top,
            groups=routing.groups,
            top_groups=routing.top_groups,
            slots=routing.slots,
            outputs=routing.outputs,
            is_sigmoid=routing.is_sigmoid,
            is_renormalised=routing.is_renormalised,
            factor=routing.factor,
            is_shared=routing.is_shared,
            is_gated=routing.is_gated,
            is_biased=bias is not None,
            has_logit_bias=router_bias is not None,
            has_expert_scale=expert_scale is not None,
            spread=triton.next_power_of_2(routing.experts),
            lanes=triton.next_power_of_2(routing.top),
            digits=order.digits,
            adapters=None if lora is None else lora.sizes,
        ),
        config=RouterTileConfig(
            hidden=hidden,
            segment=order.segment(hidden),
            segments=order.segments,
            depth=tiles.router_depth,
            rows=rows,
            outputs=_OUTPUTS,
            stages=tiles.router_stages,
        ),
        num_warps=tiles.router_warps,
        **launching(scaled),
    )
    return RouterSelection(ids=ids, weights=weights)


@triton.jit(do_not_specialize=["num_rows", "blocks"])
def _route_kernel(
    read,
    partials,
    chosen,
    num_rows,
    blocks,
    chunks: tl.constexpr,
    routing: tl.constexpr,
    config: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per block of rows, block of logits and segment; the last of a block selects."""
    number, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if is_launched:
        gdc_wait()
    live = tl.minimum(tl.load(read.live), num_rows)
    if block * config.rows < live:
        _route_block(
            read,
            partials,
            chosen,
            number,
            block,
            live,
            num_rows,
            chunks,
            routing,
            config,
            is_launched,
        )
    elif number == 0:
        _choose_nothing(chosen, block, num_rows, routing, config.rows)


@triton.jit
def _route_block(
    read,
    partials,
    chosen,
    number,
    block,
    live,
    num_rows,
    chunks: tl.constexpr,
    routing: tl.constexpr,
    config: tl.constexpr,
    is_launched: tl.constexpr,
):
    """Runs one program, for a block with rows that are not padding."""
    hidden: tl.constexpr = config.hidden
    rows: tl.constexpr = config.rows
    outputs: tl.constexpr = routing.outputs
    columns: tl.constexpr = (outputs + config.outputs - 1) // config.outputs
    lanes: tl.constexpr = rows if rows > 16 else 16
    has_all: tl.constexpr = (
        config.segment % config.depth == 0 and config.segment * config.segments == hidden
    )
    segment = number // columns
    column = number % columns * config.outputs + tl.arange(0, config.outputs)
    lane = tl.arange(0, lanes)
    row = block * rows + lane
    step = segment * config.segment + tl.arange(0, config.depth)
    end = (segment + 1) * config.segment
    is_row, is_column = (lane < rows) & (row < live), column < outputs
    x_at = read.scaled + row.to(tl.int64)[:, None] * hidden + step[None, :]
    weight_at = read.router + column[:, None] * hidden + step[None, :]
    width: tl.constexpr = config.outputs
    acc = tl.zeros((width, lanes), tl.float32)
    for at in tl.range(0, config.segment, config.depth, num_stages=config.stages):
        if has_all:
            x = tl.load(x_at + at, mask=is_row[:, None], other=0.0)
            weight = tl.load(weight_at + at, mask=is_column[:, None], other=0.0)
        else:
            inside = ((step + at < end) & (step + at < hidden))[None, :]
            x = tl.load(x_at + at, mask=is_row[:, None] & inside, other=0.0)
            weight = tl.load(weight_at + at, mask=is_column[:, None] & inside, other=0.0)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    if is_launched:
        gdc_launch_dependents()
    at = (segment * num_rows + row.to(tl.int64))[:, None] * outputs + column[None, :]
    tl.store(partials.parts + at, tl.trans(acc), mask=is_row[:, None] & is_column[None, :])
    tl.debug_barrier()
    counter = partials.arrivals + block
    if tl.atomic_add(counter, 1, sem="acq_rel") == columns * config.segments - 1:
        tl.store(counter, 0)
        _choose(read, partials, chosen, block, live, num_rows, chunks, routing, config)


@triton.jit
def _choose_nothing(chosen, block, num_rows, routing: tl.constexpr, rows: tl.constexpr):
    """Stores -1 for padding rows."""
    lanes: tl.constexpr = 2 * routing.lanes
    row, slot = block * rows + tl.arange(0, rows), tl.arange(0, lanes)
    at = row[:, None] * routing.slots + slot[None, :]
    nothing = tl.zeros((rows, lanes), tl.int32) - 1
    is_slot = (row < num_rows)[:, None] & (slot < routing.slots)[None, :]
    tl.store(chosen.ids + at, nothing, mask=is_slot)


@triton.jit
def _choose(
    read,
    partials,
    chosen,
    block,
    live,
    num_rows,
    chunks: tl.constexpr,
    routing: tl.constexpr,
    config: tl.constexpr,
):
    """Selects the experts of a block of rows, after all its logits are stored."""
    rows: tl.constexpr = config.rows
    top: tl.constexpr = routing.top
    row, expert = block * rows + tl.arange(0, rows), tl.arange(0, routing.spread)
    is_row, is_live, is_expert = row < num_rows, row < live, expert < routing.experts
    scale = scale_of(read.squares, row, is_live, read.eps, config.hidden, chunks)
    spread: tl.constexpr = routing.spread
    lanes: tl.constexpr = routing.lanes
    logits = tl.zeros((rows, spread), tl.float32)
    gate = tl.zeros((rows,), tl.float32)
    keep = is_live[:, None] & is_expert[None, :]
    segments: tl.constexpr = config.segments
    for segment in tl.static_range(segments):
        at = partials.parts + (segment * num_rows + row.to(tl.int64)) * routing.outputs
        # Volatile loads bypass the L1 cache: other programs have written the values.
        logits += tl.load(at[:, None] + expert[None, :], mask=keep, other=0.0, cache_modifier=".cg")
        if routing.is_gated:
            gate += tl.load(at + routing.experts, mask=is_live, other=0.0, cache_modifier=".cg")
    if routing.adapters is not None:
        logits, gate = expand_logits(logits, gate, row, is_live, expert, read.adapters, routing)
    scores = logits * scale[:, None] + 0.0  # maps -0 to 0
    if routing.has_logit_bias:
        bias = tl.load(read.logit_bias + expert, mask=is_expert, other=0.0).to(tl.float32)
        scores = scores + bias[None, :] + 0.0
    if routing.is_sigmoid:
        scores = 1.0 / (1.0 + tl.exp2(-scores * LOG2_E))
    keys = scores
    if routing.is_biased:
        bias = tl.load(read.bias + expert, mask=is_expert, other=0.0).to(tl.float32)
        keys = scores + bias[None, :] + 0.0
    keys = tl.where(is_expert[None, :], _sortable(keys), _LOWEST)
    if routing.groups > 1:
        keys = _within_groups(keys, expert, routing)

    lane = tl.arange(0, routing.lanes)[None, :]
    ids = tl.zeros((rows, lanes), tl.int32) + spread
    values = tl.zeros((rows, lanes), tl.float32)
    for number in range(top):
        highest = tl.max(keys, 1)
        best = tl.min(tl.where(keys == highest[:, None], expert[None, :], routing.spread), 1)
        is_best = expert[None, :] == best[:, None]
        value = tl.sum(tl.where(is_best, scores, 0.0), 1)
        keys = tl.where(is_best, _LOWEST, keys)
        ids = tl.where(lane == number, best[:, None], ids)
        values = tl.where(lane == number, value[:, None], values)
    # The position of an expert is the number of lower experts in its row.
    place = tl.sum((ids[:, None, :] < ids[:, :, None]).to(tl.int32), 2)
    weights = _weights(values, scores, lane < top, is_expert, routing)
    if routing.has_expert_scale:
        scale = tl.load(read.expert_scale + ids, mask=lane < top, other=0.0)
        weights *= scale.to(tl.float32)
    at = row[:, None] * routing.slots + place
    keep = is_row[:, None] & (lane < top)
    tl.store(chosen.ids + at, tl.where(is_live[:, None], ids, -1), mask=keep)
    tl.store(chosen.weights + at, weights, mask=keep)
    if routing.is_shared:
        weight = tl.zeros((rows,), tl.float32) + 1.0
        if routing.is_gated:
            weight = 1.0 / (1.0 + tl.exp2(-(gate * scale) * LOG2_E))
        at = row * routing.slots + top
        tl.store(chosen.ids + at, tl.where(is_live, routing.experts, -1), mask=is_row)
        tl.store(chosen.weights + at, weight, mask=is_row)


@triton.jit
def _sortable(x):
    """Maps floats to integers above the lowest, in the same order; NaN becomes the smallest."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), _LOWEST + 1)


@triton.jit
def _within_groups(keys, expert, routing: tl.constexpr):
    """Keeps the keys of the groups with the highest sums of their two highest keys."""
    group = expert // (routing.experts // routing.groups)
    groups: tl.constexpr = routing.groups
    lanes: tl.constexpr = triton.next_power_of_2(groups)
    lane = tl.arange(0, lanes)[None, :]
    sums = tl.zeros((keys.shape[0], lanes), tl.int32) + _LOWEST
    for number in range(groups):
        own = tl.where((group == number)[None, :], keys, _LOWEST)
        first = tl.max(own, 1)
        best = tl.min(tl.where(own == first[:, None], expert[None, :], routing.spread), 1)
        second = tl.max(tl.where(expert[None, :] == best[:, None], _LOWEST, own), 1)
        both = _sortable(_float_of(first) + _float_of(second) + 0.0)
        sums = tl.where(lane == number, both[:, None], sums)
    left = keys * 0 + _LOWEST
    for _ in range(routing.top_groups):
        highest = tl.max(sums, 1)
        best = tl.min(tl.where(sums == highest[:, None], lane, routing.groups), 1)
        left = tl.where(group[None, :] == best[:, None], keys, left)
        sums = tl.where(lane == best[:, None], _LOWEST, sums)
    return left


@triton.jit
def _float_of(key):
    """Converts a sortable integer back to a float."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(values, scores, is_chosen, is_expert, routing: tl.constexpr):
    """Computes the weights of the selected experts; the first has the highest score.

    Sums are in integer units, so they do not depend on the order.
    """
    if routing.is_sigmoid:
        weights = tl.where(is_chosen, values, 0.0)
        if routing.is_renormalised:
            weights = weights / (add_up(weights, routing.digits) + 1e-20)[:, None]
    else:
        is_first = tl.arange(0, routing.lanes)[None, :] == 0
        highest = tl.sum(tl.where(is_first, values, 0.0), 1)[:, None]
        weights = tl.where(is_chosen, tl.exp2((values - highest) * LOG2_E), 0.0)
        if routing.is_renormalised:
            total = add_up(weights, routing.digits)
        else:
            terms = tl.exp2((scores - highest) * LOG2_E)
            total = add_up(tl.where(is_expert[None, :], terms, 0.0), routing.digits)
        weights = weights / total[:, None]
    if routing.factor != 1.0:
        weights = weights * routing.factor
    return weights


@triton.jit
def scale_of(squares_at, row, is_row, eps, hidden: tl.constexpr, chunks: tl.constexpr):
    """Computes the norm scale of some rows."""
    chunk = tl.arange(0, chunks.spread)
    mask = is_row[:, None] & (chunk < chunks.count)[None, :]
    at = squares_at + row.to(tl.int64)[:, None] * chunks.count + chunk[None, :]
    squares = tl.load(at, mask=mask, other=0.0)
    return tl.rsqrt(add_up(squares, chunks.digits) * (1.0 / hidden) + eps)
