"""Makes any of the three backends from a config, weights and limits."""

from __future__ import annotations

from shared.boundary.backend import Backend, Limits
from shared.models.checkpoint import Weights
from shared.models.config import ModelConfig
from shared.reference.backend import Drafter, ReferenceBackend

FRAMEWORKS = ("reference", "torch", "jax")

JAX_BACKENDS: list[Backend] = []
"""Every JAX backend of the session, so that its end can say how many programs were compiled."""


def make_backend(
    framework: str, config: ModelConfig, weights: Weights, limits: Limits, drafter: Drafter
) -> Backend:
    """A backend in float32 on the CPU; a framework is imported when it is first asked for."""
    if framework == "reference":
        return ReferenceBackend(config, weights, limits, drafter)
    if framework == "torch":
        from torch_impl.backend import TorchBackend

        return TorchBackend(
            config, weights, limits, drafter, dtype="float32", device="cpu", cuda_graphs=False
        )
    from jax_impl.backend import JaxBackend

    backend = JaxBackend(
        config, weights, limits, drafter, dtype="float32", device="cpu", quick_compile=True
    )
    JAX_BACKENDS.append(backend)
    return backend


def make_gpu_backend(
    framework: str, config: ModelConfig, weights: Weights, limits: Limits, drafter: Drafter
) -> Backend:
    """A backend in float32 on the first GPU: "torch", "torch graphs" or "jax"."""
    if framework == "jax":
        from jax_impl.backend import JaxBackend

        return JaxBackend(
            config, weights, limits, drafter, dtype="float32", device="gpu", quick_compile=False
        )
    from torch_impl.backend import TorchBackend

    graphs = framework == "torch graphs"
    return TorchBackend(
        config, weights, limits, drafter, dtype="float32", device="cuda", cuda_graphs=graphs
    )
