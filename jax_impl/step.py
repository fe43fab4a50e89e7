"""One step as one function of the device state and the plan; compiled once per program."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jaxtyping import Bool

from jax_impl.decode import decode, draft
from jax_impl.device_state import DeviceState
from jax_impl.machine import Fields, Machine
from jax_impl.prefill import count_tokens, prefill
from shared.boundary.backend import Program, Work


def step(
    program: Program, machine: Machine, state: DeviceState, plan: SimpleNamespace
) -> tuple[DeviceState, Fields]:
    """Runs one plan, whose arrays it finds by name: the state after it, and the result's fields."""
    work = {Work.PREFILL: prefill, Work.DECODE: decode, Work.DRAFT: draft, Work.COUNT: count_tokens}
    state, result = work[program.work](program, machine, state, plan)
    is_row = plan.slots != 0
    result = {name: _rows_only(is_row, value) for name, value in result.items()}
    # Nobody resets the sink: without the pin, padding would grow its length for ever.
    return state._replace(lengths=state.lengths.at[0].set(0)), result


def _rows_only(is_row: Bool[jax.Array, " B"], values: jax.Array) -> jax.Array:
    mask = is_row.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.where(mask, values, jnp.zeros((), values.dtype))
