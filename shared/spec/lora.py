"""LoRA: an adapter as further inputs of the same product, with one adapter per row.

The accumulation of a row and its epilogue, with the adapter of that row:

    acc = W x
    a   = round(s * (A x))     to the dtype of the row
    acc = acc + B a            input after input of B, in float32
    acc = c * acc              c is 1 for all adapters but DoRA
    out = round(epilogue(acc)) bias, activation, residual addition

A weight that concatenates several modules, such as q, k and v, has parts: outputs that share the
rows of A. The `A` of all parts are one product, and each output reads the `a` of its own part. This
equals a block-diagonal `B` without its zeros.

Kernels accumulate `A x` by chunks of the inputs (`reduction_order.ShrinkOrder`); those of the
products over heads (`latent_attention`) in one chain.

Only the row's own adapter is read. Adding zeros for the others would turn -0 into +0 and spread
their NaN. A row without an adapter keeps the bits of the plain accumulation. With tensor
parallelism `B` is sharded by outputs like `W`, and `A` is replicated.

Source: LoRA, Hu et al. 2021, arXiv:2106.09685; DoRA, Liu et al. 2024, arXiv:2402.09353.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int

from shared.spec import layers

LORA = "_lora"
"""Suffix of the name of a weight's `RowAdapters` among the weights of a pass."""


@dataclass(frozen=True)
class AdapterWeights:
    """Adapters of one weight, by adapter slot; index 0 is slot 1, as slot 0 means none.

    Axes named `layers` are those of the weight's stack before its outputs, such as experts.

    Attributes:
      a: Rows of A, part after part; ranks are zero-padded.
      b: Columns of B; output i multiplies the `a` of its part.
      scales: Multiplier s of each row of A.
      factors: Multiplier c of each output.
      parts: Number of outputs of each part, in order.
    """

    a: Float[np.ndarray, "slots *layers ranks inputs"]
    b: Float[np.ndarray, "slots *layers outputs rank"]
    scales: Float32[np.ndarray, "slots *layers ranks"]
    factors: Float32[np.ndarray, "slots *layers outputs"]
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
    """Operand of a product: the adapters of its weight, and the adapter slot of each row.

    Attributes:
      weights: The adapters.
      slots: Adapter slot of each row; 0 for none.
    """

    weights: AdapterWeights
    slots: Int[np.ndarray, " R"]

    def at(self, place: int) -> "RowAdapters":
        """Returns the operand of one layer of a stack, or of one expert of a layer."""
        return replace(self, weights=self.weights.at(place))

    def of_rows(self, rows: Int[np.ndarray, " some"]) -> "RowAdapters":
        """Returns the operand for some of the rows."""
        return replace(self, slots=self.slots[rows])


@dataclass(frozen=True)
class BatchAdapters:
    """Adapters of a batch.

    Attributes:
      weights: Adapters of each parameter that has some, by name; stacks of layers.
      slots: Adapter slot of each request; 0 for none.
    """

    weights: Mapping[str, AdapterWeights]
    slots: Int[np.ndarray, " B"]


def with_adapters(
    weights: Mapping[str, Any], lora: BatchAdapters | None, request: Int[np.ndarray, " R"]
) -> Mapping[str, Any]:
    """Returns the weights of a pass with the adapters of its rows.

    Args:
      weights: Arrays of the model by name.
      lora: Adapters of the batch; None without.
      request: Request of each row.
    """
    if lora is None:
        return weights
    slots = lora.slots[request]
    return {**weights, **{f"{x}{LORA}": RowAdapters(y, slots) for x, y in lora.weights.items()}}


def shrink(
    x: Float[np.ndarray, "R inputs"], weights: AdapterWeights, slot: int
) -> Float[np.ndarray, "R ranks"]:
    """Computes `round(s * (A x))` of each row for one adapter."""
    sums = layers.linear(x, weights.a[slot - 1]) * weights.scales[slot - 1]
    return sums.astype(x.dtype)


def expand(
    acc: Float32[np.ndarray, "R outputs"],
    a: Float[np.ndarray, "R ranks"],
    weights: AdapterWeights,
    slot: int,
) -> Float32[np.ndarray, "R outputs"]:
    """Continues accumulations over the inputs of one adapter: `c * (acc + B a)`."""
    b, parts = weights.b[slot - 1].astype(np.float32), weights.parts
    by_part = a.astype(np.float32).reshape(len(a), len(parts), -1)
    of_outputs = np.repeat(by_part, parts, axis=1)
    for i in range(b.shape[1]):
        acc = acc + of_outputs[:, :, i] * b[:, i]
    return acc * weights.factors[slot - 1]


def adapted(
    acc: Float[np.ndarray, "R outputs"], x: Float[np.ndarray, "R inputs"], operand: RowAdapters
) -> Float[np.ndarray, "R outputs"]:
    """Continues the accumulation of each row that has an adapter.

    Args:
      acc: The product of each row with the weight.
      x: The rows.
      operand: Adapters of the weight and of the rows.
    """
    out = acc.copy()
    for row in np.flatnonzero(operand.slots):
        at, slot = slice(row, row + 1), int(operand.slots[row])
        a = shrink(x[at], operand.weights, slot)
        out[at] = expand(acc[at].astype(np.float32), a, operand.weights, slot)
    return out
