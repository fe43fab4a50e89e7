"""The vision encoder of the golden folders in every implementation, image by image."""

from dataclasses import replace
from functools import cache, partial
from typing import Protocol

import jax
import numpy as np
import torch

from jax_impl import vision_encoder as jax_tower
from jax_impl import weights as jax_weights
from jax_impl.backend import compiler_options
from shared.models.checkpoint import open_checkpoint
from shared.models.vision_parameters import check_vision_encoder
from shared.spec import vision_encoder
from shared.spec.vision_encoder import Patches, Pixels
from tests.support.golden_images import MODEL, vision
from torch_impl import vision_encoder as torch_tower
from torch_impl import weights as torch_weights

SIZE = 128
"""Patches of a padded image; the golden ones have 40 to 120."""


class Tower(Protocol):
    """An implementation: patches with their padding become rows, those of padding too."""

    def __call__(self, image: Patches) -> np.ndarray: ...


def padded(patches: Patches, size: int) -> Patches:
    """The same with zero rows appended, `size` in all."""
    names = ("pixels", "corners", "shares", "cos", "sin")
    rows = {name: getattr(patches, name) for name in names}
    spare = size - len(patches.pixels)
    return replace(patches, **{x: np.pad(y, ((0, spare), (0, 0))) for x, y in rows.items()})


def of_specification() -> Tower:
    checkpoint, config = open_checkpoint(MODEL), vision()
    weights = {
        p.name: checkpoint.load(p, np.float32) for p in check_vision_encoder(checkpoint, config)
    }
    return partial(vision_encoder.encoded, config, weights)


def of_torch() -> Tower:
    config, cpu = vision(), torch.device("cpu")
    weights = torch_weights.load_vision_encoder(
        open_checkpoint(MODEL), config, "float32", cpu, _unseen
    )

    def encoded(image: Patches) -> np.ndarray:
        given = torch_tower.Patches(**{x: torch.from_numpy(y) for x, y in vars(image).items()})
        return torch_tower.encoded(config, weights, given).numpy()

    return encoded


@cache
def of_jax() -> Tower:
    config, cpu = vision(), jax.devices("cpu")[0]
    loaded = jax_weights.load_vision_encoder(
        open_checkpoint(MODEL), config, np.float32, cpu, _unseen
    )

    @partial(jax.jit, compiler_options=compiler_options(cpu, quick_compile=True))
    def program(arrays, image):
        return jax_tower.encoded(config, jax_weights.vision_encoder_of(arrays), image)

    def encoded(image: Patches) -> np.ndarray:
        return np.asarray(program(loaded, jax_tower.Patches(**vars(image))))

    return encoded


def _unseen(num_bytes: int) -> None:
    """Ignores the progress of loading."""


TOWERS = {"spec": of_specification, "torch": of_torch, "jax": of_jax}


class Cutter(Protocol):
    """An implementation: an image becomes patches, with those of its padding."""

    def __call__(self, image: Pixels) -> Patches: ...


def cut_by_torch(image: Pixels) -> Patches:
    given = torch_tower.Pixels(**{x: torch.from_numpy(y) for x, y in vars(image).items()})
    found = torch_tower.patches(vision(), given)
    return Patches(**{name: x.numpy() for name, x in vars(found).items()})


def cut_by_jax(image: Pixels) -> Patches:
    cpu = jax.devices("cpu")[0]
    options = compiler_options(cpu, quick_compile=True)
    program = jax.jit(partial(jax_tower.patches, vision()), compiler_options=options)
    found = program(jax_tower.Pixels(**vars(image)))
    return Patches(**{name: np.asarray(x) for name, x in found._asdict().items()})


CUTTERS = {"torch": cut_by_torch, "jax": cut_by_jax}
