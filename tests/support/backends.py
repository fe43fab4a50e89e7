"""Makes any of the three backends from a config, weights and a capacity."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shared.boundary.backend import Backend, BackendLimits, StepFuture, StepPlan
from shared.boundary.program import CAPTURED
from shared.drafts.config import DraftHead
from shared.drafts.drafter_spec import DrafterSpec
from shared.models.checkpoint import Weights, open_checkpoint
from shared.models.config import ModelConfig
from shared.models.vision_parameters import check_vision_encoder
from shared.reference.backend import ReferenceBackend
from shared.spec.standalone import SmallModel
from tests.support.ranks import MAKERS, side_by_side

FRAMEWORKS = ("reference", "torch", "jax")
GPU_FRAMEWORKS = ("torch", "torch graphs", "jax")


@dataclass(frozen=True, eq=False)
class Mapped:
    """A drafter that drafts the tokens of a map alone."""

    drafter: str | DraftHead
    token_map: tuple[int, ...]


Drafter = str | DraftHead | SmallModel | Mapped
"""Drafter of a test: "none", "NEXTN", "NGRAM" on the device, or a draft model with its weights."""

JAX_BACKENDS: list[Backend] = []
"""Every JAX backend of the session, for the count of compiled programs at its end."""


class PreparedOnUse:
    """A backend that prepares a program when a test first submits it.

    The capacity of a test lists more programs than a run of it uses, and each one that JAX compiles
    takes seconds. What a test reaches for beyond the boundary is the backend's own.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def submit(self, plan: StepPlan) -> StepFuture:
        if plan.program in self.backend.capacity.programs:
            self.backend.prepare([plan.program], lambda program: None)
        return self.backend.submit(plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


def drafts_of(drafter: Drafter, target: ModelConfig) -> tuple[DrafterSpec, Any]:
    """Returns the drafter spec and its weights, as a backend takes them."""
    if isinstance(drafter, Mapped):
        drafts, own = drafts_of(drafter.drafter, target)
        return replace(drafts, token_map=drafter.token_map), own
    if isinstance(drafter, DraftHead):
        return DrafterSpec.of_head(drafter.config), drafter.weights
    if isinstance(drafter, SmallModel):
        return DrafterSpec.of_model(drafter.config), drafter.weights
    named = {
        "none": DrafterSpec.none(),
        "NEXTN": DrafterSpec.of_mtp(target),
        "NGRAM": DrafterSpec.of_text(),
    }
    return named[drafter], None


def make_backend(
    framework: str, config: ModelConfig, weights: Weights, capacity: BackendLimits, drafter: Drafter
) -> PreparedOnUse:
    """A backend in float32 on the CPU; a framework is imported at its first use."""
    made_from = (config, weights, capacity, *drafts_of(drafter, config))
    if framework == "reference":
        return PreparedOnUse(ReferenceBackend(*made_from))
    if framework in MAKERS:
        return PreparedOnUse(side_by_side(framework, made_from))
    if framework == "torch":
        from torch_impl.backend import TorchBackend

        how = {"dtype": "float32", "device": "cpu", "captured": ()}
        return PreparedOnUse(TorchBackend(*made_from, **how))
    from jax_impl.backend import JaxBackend

    how = {"dtype": "float32", "device": "cpu", "quick_compile": True}
    backend = JaxBackend(*made_from, **how)
    JAX_BACKENDS.append(backend)
    return PreparedOnUse(backend)


def make_seeing_backend(
    framework: str,
    tower: Path | None,
    config: ModelConfig,
    weights: Weights,
    capacity: BackendLimits,
    drafter: Drafter = "NEXTN",
    *,
    on_gpu: bool = False,
) -> PreparedOnUse:
    """Returns a backend for a VLM with the vision encoder of a folder."""
    made_from = (config, weights, capacity, *drafts_of(drafter, config))
    checkpoint, sees = (None if tower is None else open_checkpoint(tower)), capacity.images
    if framework == "reference":
        read = None
        if checkpoint is not None and sees is not None:
            wanted = check_vision_encoder(checkpoint, sees.vision)
            read = {p.name: checkpoint.load(p, np.float32) for p in wanted}
        return PreparedOnUse(ReferenceBackend(*made_from, read))
    assert checkpoint is not None
    assert sees is not None
    if framework.startswith("torch"):
        import torch

        from torch_impl import weights as torch_weights
        from torch_impl.backend import TorchBackend

        device = "cuda" if on_gpu else "cpu"
        where = ("float32", torch.device(device), lambda num_bytes: None)
        seeing = torch_weights.load_vision_encoder(checkpoint, sees.vision, *where)
        if framework in MAKERS:
            return PreparedOnUse(side_by_side(framework, made_from, tower=seeing))
        captured = CAPTURED if framework == "torch graphs" else ()
        how = {"dtype": "float32", "device": device, "captured": captured, "tower": seeing}
        return PreparedOnUse(TorchBackend(*made_from, **how))
    import jax

    from jax_impl import weights as jax_weights
    from jax_impl.backend import JaxBackend

    device = "gpu" if on_gpu else "cpu"
    where = (np.float32, jax.devices(device)[0], lambda num_bytes: None)
    seeing = jax_weights.load_vision_encoder(checkpoint, sees.vision, *where)
    how = {"dtype": "float32", "device": device, "quick_compile": not on_gpu, "tower": seeing}
    backend = JaxBackend(*made_from, **how)
    JAX_BACKENDS.append(backend)
    return PreparedOnUse(backend)


def make_gpu_backend(
    framework: str, config: ModelConfig, weights: Weights, capacity: BackendLimits, drafter: Drafter
) -> PreparedOnUse:
    """A backend in float32 on the first GPU: "torch", "torch graphs" or "jax"."""
    made_from = (config, weights, capacity, *drafts_of(drafter, config))
    if framework == "jax":
        from jax_impl.backend import JaxBackend

        how = {"dtype": "float32", "device": "gpu", "quick_compile": False}
        return PreparedOnUse(JaxBackend(*made_from, **how))
    from torch_impl.backend import TorchBackend

    graphs = framework == "torch graphs"
    how = {"dtype": "float32", "device": "cuda", "captured": CAPTURED if graphs else ()}
    return PreparedOnUse(TorchBackend(*made_from, **how))
