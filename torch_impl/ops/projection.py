"""As `shared.spec.projection`, in torch.

On a GPU the product leaves what a choice needs of each block of its outputs, and stores the scores
of blocks of rows of which one asks for more than its best token; see `torch_impl.ops`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.spec.noise import TARGET_STREAM
from torch_impl import ops
from torch_impl.ops import Kernels, is_bfloat16, kernel_or_plain, sampling
from torch_impl.ops.linear import Matrix, kernel_products, product_float32
from torch_impl.ops.sampling import Chosen, Sampling, Seen
from torch_impl.ops.vocabulary import ALL, Vocabulary


@dataclass(frozen=True)
class Projection:
    """Rows and a head, not multiplied yet; fields as in the specification."""

    rows: Float[Tensor, "R hidden"]
    weight: Matrix
    factor: float = 1.0


def scores(projection: Projection) -> Float[Tensor, "R share"]:
    """The scores of the tokens that this rank has, float32."""
    return product_float32(projection.rows, projection.weight, projection.factor)


def plain_choose(
    projection: Projection,
    seen: Seen,
    positions: Int[Tensor, " R"],
    params: Sampling,
    request: Int[Tensor, " R"],
) -> Chosen:
    """As the specification, of a whole head and without a mask."""
    return sampling.choose(scores(projection), seen, positions, params, request, None)


def kernel_joined(
    kernels: Kernels,
    projection: Projection,
    seen: Seen,
    positions: Int[Tensor, " R"],
    params: Sampling,
    request: Int[Tensor, " R"],
) -> Chosen:
    """As `plain_choose`, of a whole head and without a mask."""
    rows, weight = projection.rows, projection.weight
    asks = kernels.leaves.asking(seen, positions, params, request)
    how = {"factor": projection.factor, "out_type": torch.float32, "asks": asks}
    logits, _, _, left = kernel_products(kernels, rows, weight, **how)
    chosen = kernels.sampling.choose(
        *(logits, seen, positions, params, request, None),
        stream=TARGET_STREAM,
        tiles=kernels.tiles.sampling.of(rows=len(rows)),
        leaves=left,
    )
    return Chosen(*chosen)


joined = kernel_or_plain(kernel_joined, plain_choose, is_bfloat16)


def _pays(rows: Float[Tensor, "R hidden"]) -> bool:
    """Whether a table of the GPU says that a choice joined with the head is faster."""
    assert ops.KERNELS is not None  # else nobody asks
    return is_bfloat16(rows) and ops.KERNELS.tiles.leaves.of(rows=len(rows)).joined


_choose_from = kernel_or_plain(kernel_joined, plain_choose, _pays)


def choose(
    projection: Projection,
    seen: Seen,
    positions: Int[Tensor, " R"],
    params: Sampling,
    request: Int[Tensor, " R"],
    allowed: Bool[Tensor, "R vocab"] | None,
    vocabulary: Vocabulary = ALL,
) -> Chosen:
    """As the specification; with a mask, or of a rank's part of a head, from the scores."""
    given = (seen, positions, params, request)
    if allowed is None and vocabulary.group.is_alone:
        return _choose_from(projection, *given)
    return sampling.choose(scores(projection), *given, allowed, vocabulary)
