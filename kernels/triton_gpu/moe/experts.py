"""Fused MoE block: routing and two grouped GEMMs (Triton).

The block takes three kernels for few rows and five for many. `route` selects the experts; then
follow the gate-up GEMM and the down GEMM. With few rows, each slot of a row is a tile, and the
program with a row's last slot adds its slots. With many rows, `group` aligns the slots by expert,
rows of one expert share a tile, and a separate kernel adds the slots. Both paths accumulate a slot
along the inputs in one chain and add a row's slots in their order. The bits of a row therefore
depend neither on other rows nor on the path (batch-invariant).
"""

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.routing import RoutingSettings
from kernels.tiles import ExpertsTiles
from kernels.triton_gpu.gemm.activation import act_and_mul, relu_squared
from kernels.triton_gpu.gemm.linear import launching
from kernels.triton_gpu.gemm.lora import RowAdapters
from kernels.triton_gpu.gemm.moe_gemm_tiles import (
    ExpertGemmConfig,
    ExpertWeights,
    bias_of,
    gemm_sizes,
    product_of,
    tile_of,
)
from kernels.triton_gpu.moe import experts_packed_sm90
from kernels.triton_gpu.moe.expert_lora import ExpertAdapters, expand_expert, shrink_experts
from kernels.triton_gpu.moe.expert_sums import (
    ExpertEpilogue,
    ExpertStream,
    ExpertSums,
    add_slots,
    sum_kernel,
)
from kernels.triton_gpu.moe.moe_align import ExpertBlocks, blocks_or_pointers, group, max_tiles
from kernels.triton_gpu.moe.router import RouterChunks, RouterSelection, route, scale_of
from shared.models.activation import Activation
from shared.spec.reduction_order import RouterOrder, ShrinkOrder, SquaresOrder


def experts(
    rows: Float[Tensor, "R columns"],
    scaled: Float[Tensor, "R hidden"],
    squares: Float[Tensor, "R chunks"],
    scored: Float[Tensor, "R hidden"] | None,
    latents: Float[Tensor, "R latent"] | None,
    router: Float[Tensor, "outputs hidden"],
    router_bias: Float[Tensor, " outputs"] | None,
    bias: Float[Tensor, " experts"] | None,
    expert_scale: Float[Tensor, " experts"] | None,
    gate_up: Tensor,
    gate_up_scales: Shaped[Tensor, "stored scales scales_in"] | None,
    gate_up_bias: Float[Tensor, "stored outputs"] | None,
    down: Tensor,
    down_scales: Shaped[Tensor, "stored scales scales_in"] | None,
    down_bias: Float[Tensor, "stored outputs"] | None,
    next_norm: Float[Tensor, " columns"] | None,
    live: Int[Tensor, " 1"],
    arrivals: Int[Tensor, " counters"],
    router_lora: RowAdapters | None = None,
    gate_up_lora: ExpertAdapters | None = None,
    down_lora: ExpertAdapters | None = None,
    *,
    formats: tuple[str, str],
    gathered: Callable[[Tensor], Tensor],
    eps: float,
    activation: Activation,
    routing: RoutingSettings,
    order: RouterOrder,
    squares_order: SquaresOrder,
    shrink_order: ShrinkOrder,
    tiles: ExpertsTiles,
) -> ExpertStream:
    """Adds the output of its experts to each row.

    A TP rank has inner columns of every expert, and a shard of the rows, the outputs of down, the
    next norm and the result.

    Args:
      rows: Rows of the residual stream.
      scored: Rows that the router reads, scaled for its own norm; None for `scaled`.
      latents: Rows that the experts read, without a norm; None for `scaled`. The residual rows and
        the outputs of down then have the columns of latents.
      scaled, squares, router, router_bias, bias, expert_scale, live, arrivals, eps, order,
        squares_order: See `route`; `arrivals_of_experts` returns the number of arrivals.
      gate_up: `[stored, 2 inner, hidden]`, for each expert the rows of gate, then of up; without a
        gate `[stored, inner, hidden]`; packed FP8 has a quarter of the columns.
      gate_up_scales: Scales of packed FP8, see `shared.models.formats.fp8_w8a16`.
      down, down_scales: `[stored, hidden, inner]`, in the same way.
      gate_up_bias, down_bias: Biases of the outputs.
      next_norm: Scale of the norm after the block; None if it is folded into a weight.
      router_lora, gate_up_lora, down_lora: Adapters of the rows; that of the router after its
        shrink.
      formats: Names of the weight formats of `gate_up` and of `down`.
      gathered: All-gather of the ranks' inner columns of all slots; the identity for one rank.
      activation, tiles: Activation of the experts, and tile config.
      routing: Router config; the shared expert is stored last.
      shrink_order: Reduction order of the shrink.

    Returns:
      The new rows; the rows times the next norm's scale, or the rows themselves without one; and
      their sums of squares. Padding rows are undefined.
    """
    read = scaled if latents is None else latents
    gated = ExpertWeights(gate_up, gate_up_scales, gate_up_bias)
    projected = ExpertWeights(down, down_scales, down_bias)
    is_adapted = gate_up_lora is not None or down_lora is not None
    how = {"formats": formats, "activation": activation, "tiles": tiles}
    if is_adapted or not experts_packed_sm90.takes(read, gated, projected, **how):
        tiles = tiles.loaded
    chosen = route(
        scaled if scored is None else scored,
        squares,
        router,
        router_bias,
        bias,
        expert_scale,
        live,
        arrivals,
        router_lora,
        eps=eps,
        routing=routing,
        order=order,
        squares_order=squares_order,
        tiles=tiles,
    )
    blocks = group(chosen.ids, arrivals, routing=routing, tiles=tiles) if tiles.grouped else None
    shrink = partial(
        shrink_experts,
        ids=chosen.ids,
        expert_blocks=blocks,
        routing=routing,
        tiles=tiles,
        order=shrink_order,
    )
    inner = act_and_mul_linear(
        read,
        squares if latents is None else None,
        gated,
        chosen.ids,
        blocks,
        shrink(read, gate_up_lora),
        format=formats[0],
        eps=eps,
        activation=activation,
        routing=routing,
        squares_order=squares_order,
        tiles=tiles,
    )
    inner = gathered(inner)
    return linear_add(
        inner,
        projected,
        chosen,
        blocks,
        rows,
        next_norm,
        arrivals,
        shrink(inner, down_lora),
        format=formats[1],
        routing=routing,
        squares_order=squares_order,
        tiles=tiles,
    )


def act_and_mul_linear(
    scaled: Float[Tensor, "R hidden"],
    squares: Float[Tensor, "R chunks"] | None,
    gate_up: ExpertWeights,
    ids: Int[Tensor, "R slots"],
    expert_blocks: ExpertBlocks | None,
    lora: RowAdapters | None,
    *,
    format: str,
    eps: float,
    activation: Activation,
    routing: RoutingSettings,
    squares_order: SquaresOrder,
    tiles: ExpertsTiles,
) -> Float[Tensor, "all_slots inner"]:
    """Computes the activation of every slot, with its expert and its row's norm, if it has squares.

    Grouped tiles require the expert blocks of `group`. Adapters are those of the slots, after the
    shrink.
    """
    (R, hidden), N = scaled.shape, gate_up.weights.shape[1] // activation.num_projections
    chunks = 0 if squares is None else squares.shape[1]
    spread = triton.next_power_of_2(max(chunks, 1))
    config = ExpertGemmConfig.of(tiles)
    sizes = gemm_sizes(gate_up, format, N, hidden, routing, config, lora, is_scaled=False)
    inner = scaled.new_empty((R * routing.slots, N))
    if tiles.copies_packed:
        experts_packed_sm90.launch_gated(
            scaled,
            squares,
            gate_up,
            ids,
            blocks_or_pointers(expert_blocks, ids),
            inner,
            eps,
            _tiles(R, routing, tiles),
            activation=activation,
            sizes=sizes,
            chunks=RouterChunks(chunks, spread, squares_order.digits_of_chunks),
            tiles=tiles,
            **launching(scaled),
        )
        return inner
    _gated_kernel[(_tiles(R, routing, tiles) * triton.cdiv(N, tiles.columns),)](
        scaled,
        squares,
        gate_up.pointers,
        ids,
        blocks_or_pointers(expert_blocks, ids),
        inner,
        None if lora is None else lora.operands,
        eps,
        activation=activation,
        sizes=sizes,
        chunks=RouterChunks(chunks, spread, squares_order.digits_of_chunks),
        config=config,
        num_warps=tiles.warps,
        **launching(scaled),
    )
    return inner


def linear_add(
    inner: Float[Tensor, "all_slots inner"],
    down: ExpertWeights,
    chosen: RouterSelection,
    expert_blocks: ExpertBlocks | None,
    rows: Float[Tensor, "R hidden"],
    next_norm: Float[Tensor, " hidden"] | None,
    arrivals: Int[Tensor, " counters"],
    lora: RowAdapters | None,
    *,
    format: str,
    routing: RoutingSettings,
    squares_order: SquaresOrder,
    tiles: ExpertsTiles,
) -> ExpertStream:
    """Adds the down GEMM of all slots of a row, each times its weight, to the row."""
    (R, N), K = rows.shape, inner.shape[1]
    config = ExpertGemmConfig.of(tiles, is_down=True)
    sizes = gemm_sizes(down, format, N, K, routing, config, lora, is_scaled=next_norm is not None)
    chunks = triton.cdiv(N, squares_order.chunk)
    parts = torch.empty((R * routing.slots, N), dtype=torch.float32, device=rows.device)
    out = torch.empty_like(rows)
    scaled = out if next_norm is None else torch.empty_like(rows)
    stream = ExpertStream(rows=out, scaled=scaled, squares=parts.new_empty((R, chunks)))
    norm = parts if next_norm is None else next_norm
    epilogue = ExpertEpilogue(rows=rows, weights=chosen.weights, norm=norm)
    sums = ExpertSums(length=squares_order.chunk, digits=squares_order.digits)
    if tiles.copies_packed:
        experts_packed_sm90.launch_down(
            inner,
            down,
            chosen.ids,
            blocks_or_pointers(expert_blocks, chosen.ids),
            parts,
            arrivals,
            epilogue,
            stream,
            _tiles(R, routing, tiles),
            sizes=sizes,
            sums=sums,
            tiles=tiles,
            **launching(rows),
        )
    else:
        _down_kernel[(_tiles(R, routing, tiles) * triton.cdiv(N, tiles.down_columns),)](
            inner,
            down.pointers,
            chosen.ids,
            blocks_or_pointers(expert_blocks, chosen.ids),
            parts,
            arrivals,
            epilogue,
            stream,
            None if lora is None else lora.operands,
            sizes=sizes,
            sums=sums,
            config=config,
            num_warps=tiles.down_warps,
            **launching(rows),
        )
    if tiles.grouped:
        sum_kernel[(R * triton.cdiv(N, tiles.sum_columns),)](
            parts,
            chosen.ids,
            epilogue,
            stream,
            sizes=sizes,
            sums=sums,
            columns=tiles.sum_columns,
            num_warps=tiles.sum_warps,
            **launching(rows),
        )
    return stream


def _tiles(rows: int, routing: RoutingSettings, tiles: ExpertsTiles) -> int:
    return max_tiles(rows, routing, tiles.slots) if tiles.grouped else rows * routing.slots


@triton.jit
def _gated_kernel(
    x_at,
    squares_at,
    gate_up,
    ids_at,
    expert_blocks,
    inner_at,
    adapters,
    eps,
    activation: tl.constexpr,
    sizes: tl.constexpr,
    chunks: tl.constexpr,
    config: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per tile and block of outputs; gate and up rows form one matrix.

    Half of the outputs then fill the wide side of the tensor core, so the programs are doubled.
    Without a gate a program has the up rows of its outputs.
    """
    N: tl.constexpr = sizes.N
    halves: tl.constexpr = 1 if activation.kind == "relu2" else 2
    blocks: tl.constexpr = (N + config.columns - 1) // config.columns
    if is_launched:
        gdc_wait()
    tile = tile_of(tl.program_id(0) // blocks, ids_at, expert_blocks, config)
    if tile.count == 0:
        return
    is_slot = tl.arange(0, config.lanes) < tile.count
    row = tile.slots // sizes.slots
    scale = tl.full((config.lanes,), 1.0, tl.float32)
    if chunks.count > 0:
        scale = scale_of(squares_at, row, is_slot, eps, sizes.K, chunks)
    first, both = tl.program_id(0) % blocks * config.columns, tl.arange(0, halves * config.columns)
    column = first + both % config.columns
    output = column + both // config.columns * N
    x_at += row.to(tl.int64)[:, None] * sizes.K
    is_column = column < N
    outputs: tl.constexpr = halves * N
    acc = product_of(x_at, is_slot, gate_up, tile.expert, outputs, output, is_column, sizes, config)
    if is_launched:
        gdc_launch_dependents()
    column = first + tl.arange(0, config.columns)
    is_column = column < N
    own: tl.constexpr = sizes.adapters
    of_row: tl.constexpr = sizes.slots
    if halves == 1:
        up = tl.trans(acc)
        if own is not None:
            up = expand_expert(up, tile, is_slot, column, is_column, 0, N, adapters, of_row, own)
        up *= scale[:, None]
        if sizes.is_biased:
            up += bias_of(gate_up, tile.expert, column, is_column, N)[None, :]
        out = relu_squared(up)
    else:
        pairs = tl.permute(tl.reshape(acc, (2, config.columns, config.lanes)), (2, 1, 0))
        gate, up = tl.split(pairs)
        if own is not None:
            gate = expand_expert(
                gate, tile, is_slot, column, is_column, 0, N, adapters, of_row, own
            )
            up = expand_expert(
                up, tile, is_slot, N + column, is_column, N, 2 * N, adapters, of_row, own
            )
        gate, up = gate * scale[:, None], up * scale[:, None]
        if sizes.is_biased:
            gate += bias_of(gate_up, tile.expert, column, is_column, 2 * N)[None, :]
            up += bias_of(gate_up, tile.expert, N + column, is_column, 2 * N)[None, :]
        out = act_and_mul(gate, up, activation)
    place = tile.slots.to(tl.int64)[:, None] * N + column[None, :]
    keep = is_slot[:, None] & is_column[None, :]
    tl.store(inner_at + place, out.to(inner_at.dtype.element_ty), mask=keep)


@triton.jit
def _down_kernel(
    x_at,
    down,
    ids_at,
    expert_blocks,
    parts_at,
    arrivals_at,
    epilogue,
    stream,
    adapters,
    sizes: tl.constexpr,
    sums: tl.constexpr,
    config: tl.constexpr,
    is_launched: tl.constexpr,
):
    """Same as `_gated_kernel`, for down; if slots are tiles, a row's last program adds them."""
    N: tl.constexpr = sizes.N
    blocks: tl.constexpr = (N + config.columns - 1) // config.columns
    number, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if is_launched:
        gdc_wait()
    tile = tile_of(number, ids_at, expert_blocks, config)
    if tile.count == 0:
        return
    is_slot = tl.arange(0, config.lanes) < tile.count
    column = block * config.columns + tl.arange(0, config.columns)
    is_column = column < N
    x_at += tile.slots.to(tl.int64)[:, None] * sizes.K
    acc = product_of(x_at, is_slot, down, tile.expert, N, column, is_column, sizes, config)
    if is_launched:
        gdc_launch_dependents()
    place = tile.slots.to(tl.int64)[:, None] * N + column[None, :]
    keep = is_slot[:, None] & is_column[None, :]
    own: tl.constexpr = sizes.adapters
    of_row: tl.constexpr = sizes.slots
    if own is not None:
        acc = expand_expert(
            tl.trans(acc), tile, is_slot, column, is_column, 0, N, adapters, of_row, own
        )
        acc = tl.trans(acc)
    if sizes.is_biased:
        acc += bias_of(down, tile.expert, column, is_column, N)[:, None]
    tl.store(parts_at + place, tl.trans(acc), mask=keep)
    if not config.is_grouped:
        tl.debug_barrier()
        row = number // sizes.slots
        counter = arrivals_at + row * blocks + block
        if tl.atomic_add(counter, 1, sem="acq_rel") == sizes.slots - 1:
            tl.store(counter, 0)
            add_slots(parts_at, epilogue, stream, row, column, block, sizes, sums)
