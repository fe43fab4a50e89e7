"""Steps that make the rows of a picture."""

import jax.numpy as jnp

from jax_impl import vision_encoder
from jax_impl.device_state import DeviceState, Fields, PictureState, Plan
from jax_impl.step_context import Machine
from jax_impl.vision_encoder import Begun
from shared.boundary.program import Program


def encode(
    machine: Machine, state: DeviceState, plan: Plan, program: Program
) -> tuple[DeviceState, Fields]:
    """Takes a picture through blocks of the tower; behind the last its rows are in the pool.

    Those of its padding go to the sink. What is left for later steps waits in the state.
    """
    picture, held, pictures = plan.picture, state.pictures, machine.capacity.pictures
    assert picture is not None  # an encoding has one
    assert held is not None  # and a model that sees
    assert pictures is not None
    assert machine.tower is not None
    vision = pictures.vision
    if picture.pixels is not None:
        begun = vision_encoder.begun(machine.tower, vision_encoder.patches(vision, picture.pixels))
    else:
        begun = _kept(held, program.tokens)
    begun = vision_encoder.advanced(machine.tower, begun, program.blocks)
    if program.blocks.stop < vision.depth:
        held = _keeping(held, begun)
    else:
        rows = vision_encoder.finished(vision, machine.tower, begun)
        number = jnp.arange(len(rows), dtype=jnp.int32)
        is_real = number * vision.merged < begun.count
        place = jnp.where(is_real & (picture.place > 0), picture.place + number, 0)
        held = held._replace(pool=held.pool.at[place].set(rows))
    return state._replace(pictures=held), {"counts": jnp.zeros_like(plan.save_at)}


def _kept(held: PictureState, size: int) -> Begun:
    """The picture of the encoding before, in so many rows."""
    assert held.begun is not None  # a program that goes on has one to go on with
    return Begun(*(x[:size] for x in held.begun))


def _keeping(held: PictureState, begun: Begun) -> PictureState:
    assert held.begun is not None
    kept = zip(held.begun, begun, strict=True)
    return held._replace(begun=Begun(*(to.at[: len(x)].set(x) for to, x in kept)))
