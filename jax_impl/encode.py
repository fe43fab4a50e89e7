"""Steps that make the rows of a picture."""

import jax.numpy as jnp

from jax_impl import tower
from jax_impl.device_state import DeviceState, Fields, Plan
from jax_impl.machine import Machine
from shared.boundary.program import Program


def encode(
    machine: Machine, state: DeviceState, plan: Plan, program: Program
) -> tuple[DeviceState, Fields]:
    """Writes a picture's rows into the pool; those of its padding go to the sink."""
    picture, held, pictures = plan.picture, state.pictures, machine.capacity.pictures
    assert picture is not None  # an encoding has one
    assert held is not None  # and a model that sees
    assert pictures is not None
    assert machine.tower is not None
    vision = pictures.vision
    patches = tower.patches(vision, picture.pixels)
    rows = tower.encoded(vision, machine.tower, patches)
    number = jnp.arange(len(rows), dtype=jnp.int32)
    is_real = number * vision.merged < patches.count
    place = jnp.where(is_real & (picture.place > 0), picture.place + number, 0)
    held = held._replace(pool=held.pool.at[place].set(rows))
    return state._replace(pictures=held), {"counts": jnp.zeros_like(plan.save_at)}
