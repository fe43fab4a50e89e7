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
    added: Float[Tensor, "R hidden"] | None,
) -> Float[Tensor, "R hidden"]:
    """As the specification.

    Products of two numbers in bfloat16 are whole in float32, so no fusion with a sum changes a bit.
    """
    (R, hidden), taps, groups = values.shape, len(base), moved.shape[2]
    wide, moved = values.float().view(R, groups, -1), moved.float()
    own = base.float().view(taps, groups, -1)
    total = torch.zeros_like(wide) if added is None else added.float().view_as(wide)
    for tap in range(taps):
        read = wide
        if tap:
            before = wide.view(-1, size, hidden)[:, : size - tap]
            read = functional.pad(before, (0, 0, tap, 0)).view_as(wide)
        total = torch.addcmul(total, own[tap], read)
        total = torch.addcmul(total, moved[:, tap, :, None], read)
    return total.view(R, hidden)
