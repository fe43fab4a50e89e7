"""As `shared.spec.grammar_bitmask`, in torch."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

_BITS = 8  # of a byte, the first of a word being its lowest


def allowed(
    bits: Int[Tensor, "Q words"], index: Int[Tensor, " R"], vocab: int
) -> Bool[Tensor, "R vocab"]:
    """As the specification; by bytes, which take a quarter of the memory that words would."""
    octets = bits[index].view(torch.uint8)
    places = torch.arange(_BITS, dtype=torch.uint8, device=bits.device)
    is_set = (octets[:, :, None] >> places).bitwise_and_(1)
    return is_set.view(len(index), -1)[:, :vocab] != 0
