"""Encode steps: compute image embeddings with the vision encoder."""

import torch

from shared.boundary.program import Program
from torch_impl import vision_encoder
from torch_impl.device_state import Fields, ImageState, Plan
from torch_impl.step_context import StepContext
from torch_impl.vision_encoder import Begun


def encode(context: StepContext, plan: Plan, program: Program) -> Fields:
    """Runs blocks of the vision encoder; after the last block writes the encoder cache.

    Padding writes row 0. The activations for later steps are stored in the device state.
    """
    image, held, images = plan.image, context.state.images, context.capacity.images
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
        _keep(held, begun)
    else:
        rows = vision_encoder.project(vision, context.tower, begun)
        number = torch.arange(len(rows), device=rows.device)
        is_real = number * vision.merged < begun.count
        place = torch.where(is_real & (image.place > 0), image.place + number, 0)
        held.pool[place] = rows
    return {"counts": torch.zeros_like(plan.save_at)}


def _kept(held: ImageState, size: int) -> Begun:
    """Returns the activations stored by the previous encode step, cut to `size` rows."""
    assert held.begun is not None  # required by a program that continues
    return Begun(**{name: x[:size] for name, x in vars(held.begun).items()})


def _keep(held: ImageState, begun: Begun) -> None:
    assert held.begun is not None
    for name, x in vars(begun).items():
        getattr(held.begun, name)[: len(x)] = x
