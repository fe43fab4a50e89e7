"""As `shared.spec.layers.linear`, in torch."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def linear(
    x: Float[Tensor, "... inputs"], weight: Float[Tensor, "outputs inputs"]
) -> Float[Tensor, "... outputs"]:
    """As the specification."""
    return functional.linear(x, weight)
