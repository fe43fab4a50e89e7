"""Grammar token bitmask; same as `shared.spec.grammar_bitmask`."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

_BITS = 8  # per byte; the first byte of an int32 is the lowest


def allowed(
    bits: Int[Tensor, "Q words"], index: Int[Tensor, " R"], vocab: int
) -> Bool[Tensor, "R vocab"]:
    """Returns the tokens that the grammar allows each row; bytes take a quarter of the memory."""
    octets = bits[index].view(torch.uint8)
    places = torch.arange(_BITS, dtype=torch.uint8, device=bits.device)
    is_set = (octets[:, :, None] >> places).bitwise_and_(1)
    return is_set.view(len(index), -1)[:, :vocab] != 0
