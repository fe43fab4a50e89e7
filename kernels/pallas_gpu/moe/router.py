"""MoE router: top-k experts of each row and their weights (Pallas, Triton backend)."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from kernels.pallas_gpu.attention.qk_norm_rope_kv_write import early
from kernels.pallas_gpu.gemm.lora import RowAdapters, expand_logits
from kernels.pallas_gpu.gemm.sum_of_squares import add_up, load_squares
from kernels.routing import RoutingSettings
from kernels.tiles import ExpertsTiles
from shared.spec.reduction_order import RouterOrder, SquaresOrder

LOG2_E = 1.4426950408889634
_LOWEST = -(2**31)
_OUTPUTS = 16
"""Logits per program: the fewest that a tensor core supports, so that there are many programs."""


class RouterSelection(NamedTuple):
    """Experts of each row by ascending number, the shared one last, and their weights.

    Padding rows have -1 in every slot.
    """

    ids: Any
    weights: Any


class _RouterInputs(NamedTuple):
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
    layer: Any
    adapters: Any


class _RouterConfig(NamedTuple):
    """Static config of the router kernel."""

    eps: float
    routing: RoutingSettings
    order: RouterOrder
    squares: SquaresOrder
    depth: int
    rows: int
    interpret: bool


def route(
    scaled: Float[jax.Array, "R hidden"],
    squares: Float[jax.Array, "R chunks"],
    router: Float[jax.Array, "L outputs hidden"],
    router_bias: Float[jax.Array, "L outputs"] | None,
    bias: Float[jax.Array, "L experts"] | None,
    expert_scale: Float[jax.Array, "L experts"] | None,
    live: Int[jax.Array, " 1"],
    arrivals: Int[jax.Array, " counters"],
    layer: Int[jax.Array, ""],
    lora: RowAdapters | None,
    *,
    eps: float,
    routing: RoutingSettings,
    order: RouterOrder,
    squares_order: SquaresOrder,
    tiles: ExpertsTiles,
    interpret: bool = False,
) -> tuple[RouterSelection, Int[jax.Array, " counters"]]:
    """Selects the experts of each row: the highest scores, and the lower number among equal ones.

    Args:
      scaled: Rows times the scale of their norm, without the division by the norm.
      squares: Sums of squares of the rows per chunk, for that division.
      router: Stacked router weights: the experts' rows, then that of the shared expert's gate, if
        any.
      router_bias: Added to the logits.
      bias: Added to an expert's score for the selection, not for its weight.
      expert_scale: Multiplier of an expert's weight.
      live: Number of rows without padding; padding rows select nothing and are not read.
      arrivals: Zeros, one counter per row or more.
      layer: Index into the stacks.
      lora: Adapters of the router for the rows, of `lora.shrink`; part 0 has the experts.
      eps: Epsilon of the norm.
      routing: Router config.
      order, squares_order: Reduction orders of logits, weights and squares.
      tiles: Tile config.
      interpret: Run on a CPU.

    Returns:
      The selected experts, and the arrivals, reset to zero.
    """
    R = len(scaled)
    rows = min(tiles.router_rows, pl.next_power_of_2(R))
    blocks, columns = pl.cdiv(R, rows), pl.cdiv(routing.outputs, _OUTPUTS)
    config = _RouterConfig(
        eps=eps,
        routing=routing,
        order=order,
        squares=squares_order,
        depth=tiles.router_depth,
        rows=rows,
        interpret=interpret,
    )
    of = jax.ShapeDtypeStruct
    arrivals, chosen, _ = pl.pallas_call(
        partial(_route_kernel, blocks=blocks, config=config),
        grid=(blocks * columns * order.segments,),
        out_shape=(
            of(arrivals.shape, jnp.int32),
            RouterSelection(
                ids=of((R, routing.slots), jnp.int32),
                weights=of((R, routing.slots), jnp.float32),
            ),
            of((order.segments, R, routing.outputs), jnp.float32),
        ),
        input_output_aliases={0: 0},
        compiler_params=pltriton.CompilerParams(
            num_warps=tiles.router_warps, num_stages=tiles.router_stages
        ),
        interpret=interpret,
        name="router",
    )(
        arrivals,
        _RouterInputs(
            scaled=scaled,
            squares=squares,
            router=router,
            logit_bias=router_bias,
            bias=bias,
            expert_scale=expert_scale,
            live=live,
            layer=layer.reshape(1),
            adapters=lora and lora.operands,
        ),
    )
    return chosen, arrivals


def _route_kernel(_, read, arrivals_ref, chosen, parts_ref, *, blocks, config):
    """One program per block of rows, block of logits and segment; the last of a block selects."""
    R, hidden = read.scaled.shape
    outputs, segment_size = config.routing.outputs, config.order.segment(hidden)
    columns = pl.cdiv(outputs, _OUTPUTS)
    number, block = lax.div(pl.program_id(0), blocks), lax.rem(pl.program_id(0), blocks)
    segment = lax.div(number, columns)
    live = jnp.minimum(read.live[0], R)
    is_any = block * config.rows < live

    @pl.when(jnp.logical_not(is_any) & (number == 0))
    def _():
        _choose_nothing(chosen, block, config)

    @pl.when(is_any)
    def _():
        column = lax.rem(number, columns) * _OUTPUTS + lax.iota(jnp.int32, _OUTPUTS)
        lane = lax.iota(jnp.int32, max(16, config.rows))
        row = block * config.rows + lane
        is_row, is_column = (lane < config.rows) & (row < live), column < outputs
        step = segment * segment_size + lax.iota(jnp.int32, config.depth)
        end = jnp.minimum((segment + 1) * segment_size, hidden)
        whole = (config.order.segments * segment_size, 0)
        has_all = (hidden, segment_size % config.depth) == whole
        layer = read.layer[0]

        def part(ref, lead, at, is_one):
            inputs = (step + at * config.depth)[None, :]
            keep = is_one[:, None] if has_all else is_one[:, None] & (inputs < end)
            keep = jnp.broadcast_to(keep, (len(is_one), config.depth))
            return pltriton.load(ref.at[(*lead, inputs)], mask=keep, other=0.0)

        def add(at, total):
            x = part(read.scaled, (row[:, None],), at, is_row)
            weight = part(read.router, (layer, column[:, None]), at, is_column)
            return total + pltriton.dot(weight, x.T, precision=lax.Precision.HIGHEST)

        nothing = jnp.zeros((_OUTPUTS, len(lane)), jnp.float32)
        total = lax.fori_loop(0, pl.cdiv(segment_size, config.depth), add, nothing)
        total = early(total, config.interpret)
        # Elements that are not stored get an index outside the array, which the interpreter
        # requires.
        at = (jnp.where(is_row, row, R)[:, None], jnp.where(is_column, column, outputs)[None, :])
        keep = is_row[:, None] & is_column[None, :]
        pltriton.store(parts_ref.at[(segment, *at)], total.T, mask=keep)
        barrier(config.interpret)
        arrived = pltriton.atomic_add(arrivals_ref, (block,), jnp.int32(1))

        @pl.when(arrived == columns * config.order.segments - 1)
        def _():
            arrivals_ref[block] = 0
            _choose(read, parts_ref, chosen, block, live, layer, config)


def _choose_nothing(chosen, block, config):
    """Stores -1 for padding rows."""
    R, slots = chosen.ids.shape
    row, slot = block * config.rows + lax.iota(jnp.int32, config.rows), lanes_of(slots)
    keep = (row < R)[:, None] & (slot < slots)[None, :]
    at = (jnp.where(row < R, row, R)[:, None], jnp.where(slot < slots, slot, slots)[None, :])
    pltriton.store(chosen.ids.at[at], jnp.full(keep.shape, -1, jnp.int32), mask=keep)


def _choose(read, parts_ref, chosen, block, live, layer, config):
    """Selects the experts of a block of rows, after all its logits are stored."""
    routing, (R, hidden) = config.routing, read.scaled.shape
    row, expert = block * config.rows + lax.iota(jnp.int32, config.rows), lanes_of(routing.experts)
    is_row, is_live, is_expert = row < R, row < live, expert < routing.experts
    spread, at_row = len(expert), jnp.where(is_row, row, R)
    load = partial(pltriton.load, other=0.0)
    # Volatile loads bypass the L1 cache: other programs have written the values.
    load_volatile = partial(load, volatile=not config.interpret)
    scale = scale_of(read.squares, row, is_live, hidden, config.eps, config.squares)
    logits = jnp.zeros((config.rows, spread), jnp.float32)
    gate = jnp.zeros((config.rows,), jnp.float32)
    keep = is_live[:, None] & is_expert[None, :]
    for segment in range(config.order.segments):
        logits += load_volatile(parts_ref.at[segment, row[:, None], expert[None, :]], mask=keep)
        if routing.is_gated:
            column = jnp.full(row.shape, routing.experts, jnp.int32)
            gate += load_volatile(parts_ref.at[segment, row, column], mask=is_live)
    if read.adapters is not None:
        logits, gate = expand_logits(logits, gate, row, is_live, expert, read.adapters, routing)
    scores = logits * scale[:, None] + 0.0  # maps -0 to 0
    if read.logit_bias is not None:
        bias = load(read.logit_bias.at[layer, expert], mask=is_expert).astype(jnp.float32)
        scores = scores + bias[None, :] + 0.0
    if routing.is_sigmoid:
        scores = 1.0 / (1.0 + jnp.exp2(-scores * LOG2_E))
    keys = scores
    if read.bias is not None:
        bias = load(read.bias.at[layer, expert], mask=is_expert).astype(jnp.float32)
        keys = scores + bias[None, :] + 0.0
    keys = jnp.where(is_expert[None, :], _sortable(keys), _LOWEST)
    if routing.groups > 1:
        keys = _within_groups(keys, expert, routing)
    lane = lanes_of(routing.top)[None, :]

    def choose(number, found):
        keys, ids, values = found
        highest = keys.max(axis=1)
        best = jnp.where(keys == highest[:, None], expert[None, :], spread).min(axis=1)
        is_best = expert[None, :] == best[:, None]
        value = jnp.where(is_best, scores, 0.0).sum(axis=1)
        keys = jnp.where(is_best, _LOWEST, keys)
        ids = jnp.where(lane == number, best[:, None], ids)
        return keys, ids, jnp.where(lane == number, value[:, None], values)

    shape = (config.rows, lane.shape[1])
    found = (keys, jnp.full(shape, spread, jnp.int32), jnp.zeros(shape, jnp.float32))
    _, ids, values = lax.fori_loop(0, routing.top, choose, found)
    # The position of an expert is the number of lower experts in its row.
    place = (ids[:, None, :] < ids[:, :, None]).astype(jnp.int32).sum(axis=2)
    weights = _weights(values, scores, lane < routing.top, is_expert, config)
    if read.expert_scale is not None:
        at = read.expert_scale.at[layer, jnp.where(lane < routing.top, ids, 0)]
        weights = weights * load(at, mask=lane < routing.top).astype(jnp.float32)
    keep = is_row[:, None] & (lane < routing.top)
    at = (at_row[:, None], jnp.where(keep, place, routing.slots))
    pltriton.store(chosen.ids.at[at], jnp.where(is_live[:, None], ids, -1), mask=keep)
    pltriton.store(chosen.weights.at[at], weights, mask=keep)
    if routing.is_shared:
        weight = jnp.ones((config.rows,), jnp.float32)
        if routing.is_gated:
            weight = 1.0 / (1.0 + jnp.exp2(-(gate * scale) * LOG2_E))
        at = (at_row, jnp.full(row.shape, routing.top, jnp.int32))
        last = jnp.full(row.shape, routing.experts, jnp.int32)
        pltriton.store(chosen.ids.at[at], jnp.where(is_live, last, -1), mask=is_row)
        pltriton.store(chosen.weights.at[at], weight, mask=is_row)


def _sortable(x):
    """Maps floats to integers above the lowest, in the same order; NaN becomes the smallest."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    sign = lax.shift_right_arithmetic(bits, jnp.int32(31))
    return jnp.where(x == x, bits ^ (sign & 0x7FFFFFFF), _LOWEST + 1)


def _within_groups(keys, expert, routing):
    """Keeps the keys of the groups with the highest sums of their two highest keys."""
    group = lax.div(expert, routing.experts // routing.groups)
    lane = lanes_of(routing.groups)[None, :]

    def add(number, sums):
        own = jnp.where((group == number)[None, :], keys, _LOWEST)
        first = own.max(axis=1)
        best = jnp.where(own == first[:, None], expert[None, :], len(expert)).min(axis=1)
        second = jnp.where(expert[None, :] == best[:, None], _LOWEST, own).max(axis=1)
        both = _sortable(_float_of(first) + _float_of(second) + 0.0)
        return jnp.where(lane == number, both[:, None], sums)

    def leave(_, found):
        left, sums = found
        highest = sums.max(axis=1)
        best = jnp.where(sums == highest[:, None], lane, routing.groups).min(axis=1)
        left = jnp.where(group[None, :] == best[:, None], keys, left)
        return left, jnp.where(lane == best[:, None], _LOWEST, sums)

    sums = jnp.full((len(keys), lane.shape[1]), _LOWEST, jnp.int32)
    sums = lax.fori_loop(0, routing.groups, add, sums)
    nothing = jnp.full(keys.shape, _LOWEST, jnp.int32)
    return lax.fori_loop(0, routing.top_groups, leave, (nothing, sums))[0]


def _float_of(key):
    """Converts a sortable integer back to a float."""
    sign = lax.shift_right_arithmetic(key, jnp.int32(31))
    return lax.bitcast_convert_type(key ^ (sign & 0x7FFFFFFF), jnp.float32)


def _weights(values, scores, is_chosen, is_expert, config):
    """Computes the weights of the selected experts; the first has the highest score.

    Sums are in integer units, so they do not depend on the order.
    """
    routing, digits = config.routing, config.order.digits
    if routing.is_sigmoid:
        weights = jnp.where(is_chosen, values, 0.0)
        if routing.is_renormalised:
            weights = weights / (add_up(weights, digits) + 1e-20)[:, None]
    else:
        is_first = lax.iota(jnp.int32, values.shape[1])[None, :] == 0
        highest = jnp.where(is_first, values, 0.0).sum(axis=1)[:, None]
        weights = jnp.where(is_chosen, jnp.exp2((values - highest) * LOG2_E), 0.0)
        if routing.is_renormalised:
            total = add_up(weights, digits)
        else:
            terms = jnp.exp2((scores - highest) * LOG2_E)
            total = add_up(jnp.where(is_expert[None, :], terms, 0.0), digits)
        weights = weights / total[:, None]
    return weights * routing.factor if routing.factor != 1 else weights


def scale_of(squares_ref, row, is_row, hidden, eps, order):
    """Computes the norm scale of some rows."""
    squares = load_squares(squares_ref, row, is_row)
    return lax.rsqrt(add_up(squares, order.digits_of_chunks) * (1.0 / hidden) + eps)


def lanes_of(count):
    """Returns the indices of lanes for a count, padded to a power of two."""
    return lax.iota(jnp.int32, pl.next_power_of_2(count))


def barrier(interpret):
    """Makes stores of the program's threads visible to its other threads."""
    if not interpret:
        pltriton.debug_barrier()
