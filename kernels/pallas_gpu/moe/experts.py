"""Fused MoE block: routing and two grouped GEMMs (Pallas, Triton backend).

The block takes three kernels for few rows and five for many. `route` selects the experts; then
follow the gate-up GEMM and the down GEMM. With few rows, each slot of a row is a tile, and the
program with a row's last slot adds its slots. With many rows, `group` aligns the slots by expert,
rows of one expert share a tile, and a separate kernel adds the slots. Both paths accumulate a slot
along the inputs in one chain and add a row's slots in their order. The bits of a row therefore
depend neither on other rows nor on the path (batch-invariant).
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int, Shaped

from kernels.pallas_gpu.attention.qk_norm_rope_kv_write import early
from kernels.pallas_gpu.gemm.activation import act_and_mul, relu_squared
from kernels.pallas_gpu.gemm.lora import RowAdapters
from kernels.pallas_gpu.gemm.moe_gemm_tiles import (
    ExpertGemmConfig,
    ExpertWeights,
    bias_of,
    product,
    tile_of,
)
from kernels.pallas_gpu.moe import experts_packed_sm90
from kernels.pallas_gpu.moe.expert_lora import (
    ExpertAdapters,
    SlotAdapters,
    expand_expert,
    shrink_experts,
)
from kernels.pallas_gpu.moe.expert_sums import (
    ExpertEpilogue,
    ExpertStream,
    add_slots,
    stream_of,
    sum_slots,
)
from kernels.pallas_gpu.moe.moe_align import ExpertBlocks, group, max_tiles
from kernels.pallas_gpu.moe.router import RouterSelection, barrier, route, scale_of
from kernels.routing import RoutingSettings
from kernels.tiles import ExpertsTiles
from shared.models.activation import Activation
from shared.spec.reduction_order import RouterOrder, ShrinkOrder, SquaresOrder


def experts(
    rows: Float[jax.Array, "R columns"],
    scaled: Float[jax.Array, "R hidden"],
    squares: Float[jax.Array, "R chunks"],
    scored: Float[jax.Array, "R hidden"] | None,
    latents: Float[jax.Array, "R latent"] | None,
    router: Float[jax.Array, "L outputs hidden"],
    router_bias: Float[jax.Array, "L outputs"] | None,
    bias: Float[jax.Array, "L experts"] | None,
    expert_scale: Float[jax.Array, "L experts"] | None,
    gate_up: jax.Array,
    gate_up_scales: Shaped[jax.Array, "L stored scales scales_in"] | None,
    gate_up_bias: Float[jax.Array, "L stored outputs"] | None,
    down: jax.Array,
    down_scales: Shaped[jax.Array, "L stored scales scales_in"] | None,
    down_bias: Float[jax.Array, "L stored outputs"] | None,
    next_norm: Float[jax.Array, "L2 columns"] | None,
    live: Int[jax.Array, " 1"],
    arrivals: Int[jax.Array, " counters"],
    layer: Int[jax.Array, ""],
    norm_layer: Int[jax.Array, ""],
    router_lora: RowAdapters | None = None,
    gate_up_lora: ExpertAdapters | None = None,
    down_lora: ExpertAdapters | None = None,
    *,
    formats: tuple[str, str],
    gathered: Callable[[jax.Array], jax.Array],
    eps: float,
    activation: Activation,
    routing: RoutingSettings,
    order: RouterOrder,
    squares_order: SquaresOrder,
    shrink_order: ShrinkOrder,
    tiles: ExpertsTiles,
    interpret: bool = False,
) -> tuple[ExpertStream, Int[jax.Array, " counters"]]:
    """Adds the output of its experts to each row.

    With tensor parallelism, each rank has inner columns of every expert and columns of the residual
    stream: the rows, the outputs of down, the next norm and the result are its shard.

    Args:
      rows: Rows of the residual stream.
      scored: Rows that the router reads, scaled for its own norm; None for `scaled`.
      latents: Rows that the experts read, without a norm; None for `scaled`. The residual rows and
        the outputs of down then have the columns of latents.
      scaled, squares, router, router_bias, bias, expert_scale, live, arrivals, layer, eps, order,
        squares_order: See `route`; `arrivals_of_experts` returns the number of arrivals.
      gate_up: `[L, stored, 2 inner, hidden]`, for each expert the gate's rows, then the up
        projection's; or packed FP8, `[L, stored, 2 inner, hidden / 4]`. The stack avoids the copy
        of a slice.
      gate_up_scales: Scales of packed FP8, see `shared.models.formats.fp8_w8a16`.
      down, down_scales: `[L, stored, hidden, inner]`, in the same way.
      gate_up_bias, down_bias: Biases of the outputs.
      next_norm, norm_layer: Stacked norm scales, and the index of the norm after the block; None if
        nothing scales the new rows.
      router_lora, gate_up_lora, down_lora: Adapters of the rows; that of the router after its
        shrink.
      formats: Names of the weight formats of `gate_up` and of `down`.
      gathered: All-gather of the ranks' inner columns of all slots; the identity for one rank.
      activation: Activation of the experts.
      routing: Router config; the shared expert is stored last.
      shrink_order: Reduction order of the shrink.
      tiles: Tile config.
      interpret: Run on a CPU.

    Returns:
      The new rows; the rows times the next norm's scale, or the rows themselves without one; and
      their sums of squares. Padding rows are undefined. And the arrivals, reset to zero.
    """
    read = scaled if latents is None else latents
    stored = ExpertWeights(gate_up, gate_up_scales, gate_up_bias)
    stored_down = ExpertWeights(down, down_scales, down_bias)
    is_copied = experts_packed_sm90.takes(
        read,
        stored,
        stored_down,
        formats=formats,
        squares=squares if latents is None else None,
        activation=activation,
        is_adapted=gate_up_lora is not None or down_lora is not None,
        tiles=tiles,
    )
    tiles = tiles if is_copied else tiles.loaded
    chosen, arrivals = route(
        scaled if scored is None else scored,
        squares,
        router,
        router_bias,
        bias,
        expert_scale,
        live,
        arrivals,
        layer,
        router_lora,
        eps=eps,
        routing=routing,
        order=order,
        squares_order=squares_order,
        tiles=tiles,
        interpret=interpret,
    )
    expert_blocks = None
    if tiles.grouped:
        expert_blocks, arrivals = group(
            chosen.ids, arrivals, routing=routing, tiles=tiles, interpret=interpret
        )
    if is_copied:
        selected = {"ids": chosen.ids, "expert_blocks": expert_blocks, "layer": layer}
        how = {"eps": eps, "activation": activation, "format": formats[0]}
        sums = {"squares_order": squares_order, "tiles": tiles}
        parts = experts_packed_sm90.outputs_of_slots(
            read, squares, stored, stored_down, **selected, **how, **sums
        )
        epilogue = ExpertEpilogue(rows, chosen.weights, next_norm, norm_layer.reshape(1))
        sums |= {"factor": routing.output_factor}
        return sum_slots(parts, chosen.ids, epilogue, **sums), arrivals
    shrink = partial(
        shrink_experts,
        ids=chosen.ids,
        expert_blocks=expert_blocks,
        layer=layer,
        routing=routing,
        tiles=tiles,
        order=shrink_order,
        interpret=interpret,
    )
    inner = act_and_mul_linear(
        read,
        squares if latents is None else None,
        stored,
        chosen.ids,
        expert_blocks,
        layer,
        shrink(read, gate_up_lora),
        format=formats[0],
        eps=eps,
        activation=activation,
        routing=routing,
        squares_order=squares_order,
        tiles=tiles,
        interpret=interpret,
    )
    inner = gathered(inner)
    return linear_add(
        inner,
        stored_down,
        chosen,
        expert_blocks,
        rows,
        next_norm,
        arrivals,
        layer,
        norm_layer,
        shrink(inner, down_lora),
        format=formats[1],
        routing=routing,
        squares_order=squares_order,
        tiles=tiles,
        interpret=interpret,
    )


def act_and_mul_linear(
    scaled: Float[jax.Array, "R hidden"],
    squares: Float[jax.Array, "R chunks"] | None,
    gate_up: ExpertWeights,
    ids: Int[jax.Array, "R slots"],
    expert_blocks: ExpertBlocks | None,
    layer: Int[jax.Array, ""],
    lora: SlotAdapters | None,
    *,
    format: str,
    eps: float,
    activation: Activation,
    routing: RoutingSettings,
    squares_order: SquaresOrder,
    tiles: ExpertsTiles,
    interpret: bool = False,
) -> Float[jax.Array, "all_slots inner"]:
    """Computes the activation of every slot, with its expert and its row's norm, if it has squares.

    Grouped tiles require the expert blocks of `group`. Adapters are those of the slots, after the
    shrink.
    """
    R, N = len(scaled), gate_up.weights.shape[2] // activation.num_projections
    config = ExpertGemmConfig.of(format, tiles, routing.slots, interpret)
    return pl.pallas_call(
        partial(
            _gated_kernel,
            eps=eps,
            activation=activation,
            squares_order=squares_order,
            adapted=lora and lora.experts,
            config=config,
        ),
        grid=(_tiles(R, routing, tiles) * pl.cdiv(N, tiles.columns),),
        out_shape=jax.ShapeDtypeStruct((R * routing.slots, N), scaled.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="experts_gate_up",
    )(scaled, squares, gate_up, ids, expert_blocks, lora and lora.operands, layer.reshape(1))


def linear_add(
    inner: Float[jax.Array, "all_slots inner"],
    down: ExpertWeights,
    chosen: RouterSelection,
    expert_blocks: ExpertBlocks | None,
    rows: Float[jax.Array, "R hidden"],
    next_norm: Float[jax.Array, "L2 hidden"] | None,
    arrivals: Int[jax.Array, " counters"],
    layer: Int[jax.Array, ""],
    norm_layer: Int[jax.Array, ""],
    lora: SlotAdapters | None,
    *,
    format: str,
    routing: RoutingSettings,
    squares_order: SquaresOrder,
    tiles: ExpertsTiles,
    interpret: bool = False,
) -> tuple[ExpertStream, Int[jax.Array, " counters"]]:
    """Adds the down GEMM of all slots of a row, each times its weight, to the row."""
    R, N = rows.shape
    config = ExpertGemmConfig.of(format, tiles, routing.slots, interpret, is_down=True)
    of = jax.ShapeDtypeStruct
    epilogue = ExpertEpilogue(rows, chosen.weights, next_norm, norm_layer.reshape(1))
    stream = stream_of(epilogue, squares_order)
    arrivals, parts, out = pl.pallas_call(
        partial(
            _down_kernel,
            factor=routing.output_factor,
            squares_order=squares_order,
            adapted=lora and lora.experts,
            config=config,
        ),
        grid=(_tiles(R, routing, tiles) * pl.cdiv(N, tiles.down_columns),),
        out_shape=(
            of(arrivals.shape, jnp.int32),
            of((R * routing.slots, N), jnp.float32),
            None if tiles.grouped else stream,
        ),
        input_output_aliases={0: 0},
        compiler_params=pltriton.CompilerParams(
            num_warps=tiles.down_warps, num_stages=tiles.down_stages
        ),
        interpret=interpret,
        name="experts_down",
    )(
        arrivals,
        inner,
        down,
        chosen.ids,
        expert_blocks,
        None if tiles.grouped else epilogue,
        lora and lora.operands,
        layer.reshape(1),
    )
    if tiles.grouped:
        how = {"squares_order": squares_order, "tiles": tiles, "interpret": interpret}
        out = sum_slots(parts, chosen.ids, epilogue, factor=routing.output_factor, **how)
    return out._replace(scaled=out.rows if next_norm is None else out.scaled), arrivals


def _tiles(rows, routing, tiles):
    return max_tiles(rows, routing, tiles.slots) if tiles.grouped else rows * routing.slots


def _gated_kernel(
    x_ref,
    squares_ref,
    gate_up,
    ids_ref,
    expert_blocks,
    adapters,
    layer_ref,
    inner_ref,
    *,
    eps,
    activation,
    squares_order,
    adapted,
    config,
):
    """One program per tile and block of outputs; gate and up rows form one matrix.

    Half of the outputs then fill the wide side of the tensor core, so the programs are doubled.
    Without a gate a program has the up rows of its outputs.
    """
    (_, K), (S, N), halves = x_ref.shape, inner_ref.shape, activation.num_projections
    blocks, layer = pl.cdiv(N, config.columns), layer_ref[0]
    number, block = lax.div(pl.program_id(0), blocks), lax.rem(pl.program_id(0), blocks)
    tile = tile_of(number, ids_ref, expert_blocks, config)

    @pl.when(tile.count > 0)
    def _():
        is_slot = lax.iota(jnp.int32, config.lanes) < tile.count
        row = lax.div(tile.slots, config.slots)
        scale = None
        if squares_ref is not None:
            scale = scale_of(squares_ref, row, is_slot, K, eps, squares_order)
        first, both = block * config.columns, lax.iota(jnp.int32, halves * config.columns)
        column = first + lax.rem(both, config.columns)
        output = column + lax.div(both, config.columns) * N
        of_expert, has_all = (layer, tile.expert), N % config.columns == 0
        total = product(
            x_ref, row, is_slot, gate_up, of_expert, output, column < N, has_all, config
        )
        parts = lax.split(early(total, config.interpret).T, (config.columns,) * halves, axis=1)
        if adapted is not None:
            column = first + lax.iota(jnp.int32, config.columns)
            of_tile = partial(expand_expert, tile=tile, is_slot=is_slot, is_output=column < N)
            of_tile = partial(of_tile, adapters=adapters, adapted=adapted, of_row=config.slots)
            parts = [
                of_tile(part, output=half * N + column, first=half * N, last=(half + 1) * N)
                for half, part in enumerate(parts)
            ]
        if scale is not None:
            parts = [part * scale[:, None] for part in parts]
        column = first + lax.iota(jnp.int32, config.columns)
        if gate_up.bias is not None:
            parts = [
                part + bias_of(gate_up, of_expert, number * N + column, column < N)[None, :]
                for number, part in enumerate(parts)
            ]
        first, last = parts[0], parts[-1]
        out = act_and_mul(first, last, activation) if halves == 2 else relu_squared(first)
        # Elements that are not stored get an index outside the array, which the interpreter
        # requires.
        slot, column = jnp.where(is_slot, tile.slots, S), jnp.where(column < N, column, N)
        keep = is_slot[:, None] & (column < N)[None, :]
        at = inner_ref.at[slot[:, None], column[None, :]]
        pltriton.store(at, out.astype(inner_ref.dtype), mask=keep)


def _down_kernel(
    _,
    x_ref,
    down,
    ids_ref,
    expert_blocks,
    epilogue,
    adapters,
    layer_ref,
    arrivals_ref,
    parts_ref,
    stream,
    *,
    factor,
    squares_order,
    adapted,
    config,
):
    """Same as `_gated_kernel`, for down; if slots are tiles, a row's last program adds them."""
    S, N = parts_ref.shape
    blocks, layer = pl.cdiv(N, config.columns), layer_ref[0]
    number, block = lax.div(pl.program_id(0), blocks), lax.rem(pl.program_id(0), blocks)
    tile = tile_of(number, ids_ref, expert_blocks, config)

    @pl.when(tile.count > 0)
    def _():
        is_slot = lax.iota(jnp.int32, config.lanes) < tile.count
        column = block * config.columns + lax.iota(jnp.int32, config.columns)
        of_expert, has_all = (layer, tile.expert), N % config.columns == 0
        total = product(
            x_ref, tile.slots, is_slot, down, of_expert, column, column < N, has_all, config
        )
        total = early(total, config.interpret)
        if adapted is not None:
            total = expand_expert(
                total.T,
                tile,
                is_slot,
                column,
                column < N,
                0,
                N,
                adapters,
                adapted,
                config.slots,
            ).T
        if down.bias is not None:
            total += bias_of(down, of_expert, column, column < N)[:, None]
        slot, at_column = jnp.where(is_slot, tile.slots, S), jnp.where(column < N, column, N)
        keep = is_slot[:, None] & (column < N)[None, :]
        pltriton.store(parts_ref.at[slot[:, None], at_column[None, :]], total.T, mask=keep)
        if expert_blocks is None:
            barrier(config.interpret)
            row = lax.div(number, config.slots)
            counter = row * blocks + block
            arrived = pltriton.atomic_add(arrivals_ref, (counter,), jnp.int32(1))

            @pl.when(arrived == config.slots - 1)
            def _():
                arrivals_ref[counter] = 0
                place, order = (row, column, block), squares_order
                add_slots(parts_ref, epilogue, stream, place, factor, order, config.interpret)
