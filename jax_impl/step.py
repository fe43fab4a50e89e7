"""A step as one function of the device state and the plan buffer, compiled once per program."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from jax_impl.adapters import load
from jax_impl.decode import decode
from jax_impl.device_state import DeviceState, Fields, Plan, pack, read_plan
from jax_impl.draft import draft
from jax_impl.encode_image import encode
from jax_impl.kv_transfer import transfer
from jax_impl.prefill import count_tokens, prefill
from jax_impl.step_context import Step, StepContext
from shared.boundary.adapter_pool import WORDS
from shared.boundary.buffers import has_plan_rows
from shared.boundary.program import Program, StepKind
from shared.boundary.transfer_spec import TRANSFERS

WORK = {
    StepKind.PREFILL: prefill,
    StepKind.DECODE: decode,
    StepKind.DRAFT: draft,
    StepKind.COUNT: count_tokens,
}
"""Functions of the step kinds that have rows."""


def step(
    context: StepContext, state: DeviceState, words: Int[jax.Array, " words"], program: Program
) -> tuple[DeviceState, Int[jax.Array, " out"]]:
    """Runs the plan in an int32 buffer; returns the new state and the result buffer."""
    plan = read_plan(words, program, context.capacity)
    if program.work is StepKind.ENCODE:
        state, fields = encode(context, state, plan, program)
    elif program.work in TRANSFERS:
        state, fields = transfer(context, state, plan, program)
    elif program.work is StepKind.LOAD_ADAPTER:
        state, fields = _load(context, state, plan, program), {}
    else:
        state, fields = WORK[program.work](Step.of(context, state, plan, program), state)
    return _end(context, state, plan, fields, program)


def _load(context: StepContext, state: DeviceState, plan: Plan, program: Program) -> DeviceState:
    """Writes layers of an adapter."""
    pool, group = context.capacity.adapters, context.model.group
    assert pool is not None  # otherwise the program does not exist
    assert plan.adapters is not None
    adapters = load(state.adapters, pool, group, program, plan.adapters, plan.kv[WORDS])
    return state._replace(adapters=adapters)


def _end(
    context: StepContext, state: DeviceState, plan: Plan, fields: Fields, program: Program
) -> tuple[DeviceState, Int[jax.Array, " out"]]:
    """Finishes a step of any kind; returns the result buffer."""
    is_row = plan.slots != 0
    fields = {
        name: _rows_only(is_row, value) if has_plan_rows(name) else value
        for name, value in fields.items()
    }
    # Slot 0 is never reset: without this, padded rows would grow its length without bound.
    state = state._replace(lengths=state.lengths.at[0].set(0))
    return state, pack(fields, program, context.capacity)


def _rows_only(is_row: Bool[jax.Array, " B"], values: jax.Array) -> jax.Array:
    mask = is_row.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.where(mask, values, jnp.zeros((), values.dtype))
