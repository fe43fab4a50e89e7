"""Implementations of the golden models and heads."""

from tests.support.golden_jax import JaxHead, JaxModel
from tests.support.golden_models import GoldenHead, GoldenModel, SpecHead, SpecModel
from tests.support.golden_torch import TorchHead, TorchModel

IMPLEMENTATIONS: dict[str, type[GoldenModel]] = {
    "spec": SpecModel,
    "torch": TorchModel,
    "jax": JaxModel,
}
HEADS: dict[str, type[GoldenHead]] = {"spec": SpecHead, "torch": TorchHead, "jax": JaxHead}
