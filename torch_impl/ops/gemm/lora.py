"""LoRA adapters as further inputs of a GEMM; same as `shared.spec.lora`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from shared.spec.reduction_order import SHRINK
from torch_impl.ops import Kernels
from torch_impl.ops.gemm import layers


@dataclass(frozen=True)
class AdapterWeights:
    """Adapters of one weight, by adapter slot; index 0 is slot 1."""

    a: Float[Tensor, "slots *layers ranks inputs"]
    b: Float[Tensor, "slots *layers outputs rank"]
    scales: Float32[Tensor, "slots *layers ranks"]
    factors: Float32[Tensor, "slots *layers outputs"]
    parts: tuple[int, ...]

    def at(self, place: int) -> "AdapterWeights":
        """Returns the adapters of one layer of a stack, or of one expert of a layer."""
        a, b, scales, factors = self.a, self.b, self.scales, self.factors
        return replace(
            self,
            a=a[:, place],
            b=b[:, place],
            scales=scales[:, place],
            factors=factors[:, place],
        )


@dataclass(frozen=True)
class RowAdapters:
    """Operand of a GEMM: the adapters of its weight, and the adapter slot of each row."""

    weights: AdapterWeights
    slots: Int[Tensor, " R"]

    def at(self, place: int) -> "RowAdapters":
        """Returns the operand of one layer of a stack, or of one expert of a layer."""
        return RowAdapters(self.weights.at(place), self.slots)


def shrink(
    x: Float[Tensor, "R inputs"], weights: AdapterWeights, slot: int
) -> Float[Tensor, "R ranks"]:
    sums = layers.linear(x.float(), weights.a[slot - 1].float())
    return (sums * weights.scales[slot - 1]).to(x.dtype)


def expand(
    acc: Float32[Tensor, "R outputs"],
    a: Float[Tensor, "R ranks"],
    weights: AdapterWeights,
    slot: int,
) -> Float32[Tensor, "R outputs"]:
    """Continues accumulations; the sum over the adapter's inputs is added at once."""
    b, parts = weights.b[slot - 1].float(), weights.parts
    inputs = a.float().chunk(len(parts), dim=1)
    each = zip(inputs, b.split(parts), strict=True)
    added = torch.cat([layers.linear(x.contiguous(), own) for x, own in each], dim=1)
    return (acc + added) * weights.factors[slot - 1]


def adapted(
    acc: Float32[Tensor, "R outputs"], x: Float[Tensor, "R inputs"], operand: RowAdapters
) -> Float32[Tensor, "R outputs"]:
    """Continues the accumulation of each row that has an adapter."""
    own = operand.weights
    return continued(acc, operand, lambda slot: expand(acc, shrink(x, own, slot), own, slot))


def continued(
    acc: Float32[Tensor, "R ..."],
    operand: RowAdapters,
    more: Callable[[int], Float32[Tensor, "R ..."]],
) -> Float32[Tensor, "R ..."]:
    """Returns the accumulations after the adapters; `more` continues them for one adapter.

    Each adapter runs over all rows, and other rows keep their sum.
    """
    out, row = acc, (-1, *[1] * (acc.ndim - 1))
    for slot in _in_use(operand):
        out = torch.where((operand.slots == slot).view(row), more(slot), out)
    return out


def _in_use(operand: RowAdapters) -> Iterable[int]:
    """Returns the adapter slots of any row, or all if reading them would synchronise."""
    if operand.slots.is_cuda:
        return range(1, len(operand.weights.a) + 1)
    return filter(None, operand.slots.unique().tolist())


def kernel_shrink(kernels: Kernels, x: Float[Tensor, "R inputs"], operand: RowAdapters) -> Any:
    """Runs `kernels.lora.shrink`; its result is an argument of `kernels.linear.product`."""
    own = operand.weights
    return kernels.lora.shrink(
        x,
        own.a,
        own.b,
        own.scales,
        own.factors,
        operand.slots,
        parts=own.parts,
        order=SHRINK,
    )
