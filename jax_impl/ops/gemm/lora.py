"""LoRA adapters as further inputs of a GEMM; same as `shared.spec.lora`."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Float32, Int

from jax_impl.ops import Kernels, Place, cond_any, zeros_of
from jax_impl.ops.gemm import layers
from kernels.shrink_tiles import ROWS_WITHIN_GEMM
from shared.spec.reduction_order import SHRINK


class AdapterWeights(NamedTuple):
    """Adapters of one weight, by adapter slot; index 0 is slot 1."""

    a: Float[jax.Array, "slots *layers ranks inputs"]
    b: Float[jax.Array, "slots *layers outputs rank"]
    scales: Float32[jax.Array, "slots *layers ranks"]
    factors: Float32[jax.Array, "slots *layers outputs"]
    parts: tuple[int, ...]

    def at(self, place: Place) -> "AdapterWeights":
        """Returns the adapters of one layer of a stack, or of one expert of a layer."""
        arrays = (x[:, place] for x in (self.a, self.b, self.scales, self.factors))
        a, b, scales, factors = arrays
        return AdapterWeights(a, b, scales, factors, self.parts)


def _flatten(weights: AdapterWeights) -> tuple[tuple[Any, ...], Any]:
    """Returns the arrays, and the parts as structure."""
    return weights[:-1], weights.parts


jax.tree_util.register_pytree_node(
    AdapterWeights, _flatten, lambda parts, x: AdapterWeights(x[0], x[1], x[2], x[3], parts)
)


class PassAdapters(NamedTuple):
    """Adapters of the rows of a pass.

    Attributes:
      slots: Adapter slot of each row; 0 for none.
      arrivals: Counters of the adapted GEMMs of few rows, zero before and after each GEMM.
    """

    slots: Int[jax.Array, " R"]
    arrivals: Int[jax.Array, " counters"]

    @classmethod
    def of(
        cls,
        slots: Int[jax.Array, " R"] | None,
        adapters: Mapping[str, AdapterWeights],
        rows: Float[jax.Array, "R hidden"],
    ) -> "PassAdapters | None":
        """Returns the adapters of a pass; None without `slots`."""
        if slots is None:
            return None
        return cls(slots, zeros_of(rows, sum(x.a.shape[1] for x in adapters.values())))


class RowAdapters(NamedTuple):
    """Operand of a GEMM: the adapters of its weight, and the adapter slot of each row.

    Attributes:
      arrivals, counter: See `PassAdapters`, and the counter of this GEMM; None if it counts none.
      layer: Index of the weight if `weights` are stacks. A kernel reads the stack in place; a slice
        would be copied.
    """

    weights: AdapterWeights
    slots: Int[jax.Array, " R"]
    layer: Place | None = None
    arrivals: Int[jax.Array, " counters"] | None = None
    counter: Place | None = None

    @property
    def alone(self) -> AdapterWeights:
        """Returns the adapters of this weight only."""
        return self.weights if self.layer is None else self.weights.at(self.layer)

    def at(self, place: Place) -> "RowAdapters":
        """Returns the operand of one expert of a layer."""
        return RowAdapters(self.alone.at(place), self.slots)


def shrink(
    x: Float[jax.Array, "R inputs"], weights: AdapterWeights, slot: Place
) -> Float[jax.Array, "R ranks"]:
    """Computes the inputs of one adapter for each row."""
    sums = layers.linear(x, weights.a[slot - 1].astype(x.dtype))
    return (sums * weights.scales[slot - 1]).astype(x.dtype)


def expand(
    acc: Float32[jax.Array, "R outputs"],
    a: Float[jax.Array, "R ranks"],
    weights: AdapterWeights,
    slot: Place,
) -> Float32[jax.Array, "R outputs"]:
    """Continues accumulations; the sum over the adapter's inputs is added at once."""
    ends = [sum(weights.parts[: i + 1]) for i in range(len(weights.parts) - 1)]
    b = jnp.split(weights.b[slot - 1].astype(a.dtype), ends)
    each = zip(jnp.split(a, len(weights.parts), axis=1), b, strict=True)
    added = jnp.concatenate([layers.linear(x, own) for x, own in each], axis=1)
    return (acc + added) * weights.factors[slot - 1]


def adapted(
    acc: Float32[jax.Array, "R outputs"], x: Float[jax.Array, "R inputs"], operand: RowAdapters
) -> Float32[jax.Array, "R outputs"]:
    """Continues the accumulation of each row that has an adapter."""
    own = operand.alone
    return continued(acc, operand, lambda slot: expand(acc, shrink(x, own, slot), own, slot))


def continued(
    acc: Float32[jax.Array, "R ..."],
    operand: RowAdapters,
    more: Callable[[jax.Array], Float32[jax.Array, "R ..."]],
) -> Float32[jax.Array, "R ..."]:
    """Returns the accumulations after the adapters; `more` continues them for one adapter.

    Each adapter runs over all rows, and other rows keep their sum.
    """
    slots, row = operand.slots, (-1, *[1] * (acc.ndim - 1))

    def add(out: jax.Array, slot: jax.Array) -> tuple[jax.Array, None]:
        is_own = slots == slot

        def select(out: jax.Array) -> jax.Array:
            return jnp.where(is_own.reshape(row), more(slot), out)

        return cond_any(is_own, select, lambda out: out, out), None

    out, _ = lax.scan(add, acc, jnp.arange(1, len(operand.weights.a) + 1))
    return out


def kernel_shrink(
    kernels: Kernels,
    x: Float[jax.Array, "R inputs"],
    operand: RowAdapters,
    *,
    may_join: bool = False,
) -> Any:
    """Runs `kernels.lora.shrink`; its result is an argument of `kernels.linear.product`.

    With `may_join` the GEMM itself computes the shrink of few rows.
    """
    how, joins = {}, may_join and len(x) <= ROWS_WITHIN_GEMM
    if joins and operand.arrivals is not None:
        how = {"arrivals": operand.arrivals, "counter": jnp.asarray(operand.counter, jnp.int32)}
    own, layer = operand.weights, operand.layer
    if layer is None:
        own, layer = jax.tree.map(lambda array: array[:, None], own), 0
    return kernels.lora.shrink(
        x,
        own.a,
        own.b,
        own.scales,
        own.factors,
        operand.slots,
        jnp.asarray(layer, jnp.int32),
        parts=own.parts,
        order=SHRINK,
        **how,
    )
