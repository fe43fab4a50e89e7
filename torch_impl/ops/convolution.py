"""As `shared.spec.convolution`, in torch."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def convolved(
    values: Float[Tensor, "R hidden"],
    base: Float[Tensor, "taps hidden"],
    moved: Float[Tensor, "R taps groups"],
    size: int,
) -> Float[Tensor, "R hidden"]:
    """As the specification.

    Products of two numbers in bfloat16 are whole in float32, so no fusion with a sum changes a bit.
    """
    wide, total = values.float().unflatten(0, (-1, size)), torch.zeros_like(values).float()
    for tap, own in enumerate(base.float()):
        read = functional.pad(wide[:, : size - tap], (0, 0, tap, 0)).flatten(0, 1)
        by_group = read.unflatten(1, (moved.shape[2], -1)) * moved[:, tap, :, None].float()
        total = total + own * read + by_group.flatten(1)
    return total
