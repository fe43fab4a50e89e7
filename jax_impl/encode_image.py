"""Encode steps: compute image embeddings with the vision encoder."""

import jax.numpy as jnp

from jax_impl import vision_encoder
from jax_impl.device_state import DeviceState, Fields, ImageState, Plan
from jax_impl.step_context import StepContext
from jax_impl.vision_encoder import Begun
from shared.boundary.program import Program


def encode(
    context: StepContext, state: DeviceState, plan: Plan, program: Program
) -> tuple[DeviceState, Fields]:
    """Runs blocks of the vision encoder; after the last block writes the encoder cache.

    Padding writes row 0. The activations for later steps are stored in the device state.
    """
    image, held, images = plan.image, state.images, context.capacity.images
    assert image is not None  # set in an encode step
    assert held is not None  # set with a vision encoder
    assert images is not None
    assert context.tower is not None
    vision = images.vision
    if image.pixels is not None:
        begun = vision_encoder.embed_patches(
            context.tower, vision_encoder.patches(vision, image.pixels)
        )
    else:
        begun = _kept(held, program.tokens)
    begun = vision_encoder.run_blocks(context.tower, begun, program.blocks)
    if program.blocks.stop < vision.depth:
        held = _keep(held, begun)
    else:
        rows = vision_encoder.project(vision, context.tower, begun)
        number = jnp.arange(len(rows), dtype=jnp.int32)
        is_real = number * vision.merged < begun.count
        place = jnp.where(is_real & (image.place > 0), image.place + number, 0)
        held = held._replace(pool=held.pool.at[place].set(rows))
    return state._replace(images=held), {"counts": jnp.zeros_like(plan.save_at)}


def _kept(held: ImageState, size: int) -> Begun:
    """Returns the activations stored by the previous encode step, cut to `size` rows."""
    assert held.begun is not None  # required by a program that continues
    return Begun(*(x[:size] for x in held.begun))


def _keep(held: ImageState, begun: Begun) -> ImageState:
    assert held.begun is not None
    kept = zip(held.begun, begun, strict=True)
    return held._replace(begun=Begun(*(to.at[: len(x)].set(x) for to, x in kept)))
