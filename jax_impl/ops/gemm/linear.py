"""GEMMs with fused norms (prologue) and epilogues; same as `shared.spec.linear`.

Sums are float32; results have the dtype of the rows. On a GPU bfloat16 GEMMs are kernels; see
`jax_impl.ops`.
"""

from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jax_impl.ops import (
    Kernels,
    Norm,
    alone,
    arrivals_of,
    is_bfloat16,
    kernel_or_reference,
    stacked,
)
from jax_impl.ops.collectives import all_gather
from jax_impl.ops.gemm import fp8_activations, layers
from jax_impl.ops.gemm.lora import adapted, kernel_shrink
from jax_impl.ops.gemm.matrix import Matrix, widened
from shared.boundary.tp_group import SINGLE_RANK, TPGroup
from shared.models.activation import SILU_AND_MUL, Activation
from shared.models.formats.fp8 import BLOCK
from shared.spec import reduction_order
from shared.spec.reduction_order import SQUARES


class NormedStream(NamedTuple):
    """Residual stream between two operations of a layer; see the specification.

    Attributes:
      group: Tensor-parallel group; each rank computes its columns. All ranks have whole rows, or
        their own columns and whole `scaled` and `squares`.
    """

    rows: Float[jax.Array, "R columns"]
    norm: Norm | None = None
    scaled: Float[jax.Array, "R hidden"] | None = None
    squares: Float[jax.Array, "R chunks"] | None = None
    count: Int[jax.Array, " 1"] | None = None
    arrivals: Int[jax.Array, " counters"] | None = None
    group: TPGroup = SINGLE_RANK

    @property
    def is_share(self) -> bool:
        """Returns True if `rows` has only this rank's columns."""
        return self.scaled is not None and self.scaled.shape != self.rows.shape

    @property
    def factors(self) -> Float[jax.Array, "R hidden"]:
        """Returns the input of GEMM kernels: the rows times the scale of their norm."""
        return self.rows if self.scaled is None else self.scaled

    def with_next_norm(
        self,
        rows: Float[jax.Array, "R columns"],
        norm: Norm | None = None,
        scaled: Float[jax.Array, "R hidden"] | None = None,
        squares: Float[jax.Array, "R chunks"] | None = None,
    ) -> "NormedStream":
        return self._replace(rows=rows, norm=norm, scaled=scaled, squares=squares)

    @property
    def own(self) -> Float[jax.Array, "R share"]:
        """Returns this rank's columns of the rows."""
        return self.rows if self.is_share else all_gather.local_columns(self.group, self.rows)

    @property
    def whole(self) -> Float[jax.Array, "R hidden"]:
        """Returns the rows with the columns of all ranks."""
        return all_gather.all_gather(self.group, self.rows) if self.is_share else self.rows


def plain_stream(
    rows: Float[jax.Array, "R hidden"],
    norm: Norm | None = None,
    count: Int[jax.Array, " 1"] | None = None,
    group: TPGroup = SINGLE_RANK,
) -> NormedStream:
    return NormedStream(rows, norm, count=count, group=group)


def kernel_stream(
    kernels: Kernels,
    rows: Float[jax.Array, "R hidden"],
    norm: Norm | None = None,
    count: Int[jax.Array, " 1"] | None = None,
    group: TPGroup = SINGLE_RANK,
) -> NormedStream:
    scaled, squares = kernels.layers.beside(rows, *stacked(norm), order=SQUARES)
    own, arrivals = all_gather.kept(group, rows, norm), arrivals_of(rows)
    return NormedStream(own, norm, scaled, squares, count, arrivals, group)


def beside_kernels(stream: NormedStream) -> NormedStream:
    """Gives a stream of reference GEMMs the structure of kernel results, with unused fields."""
    rows = stream.rows
    squares = jnp.zeros((len(rows), -(-rows.shape[1] // SQUARES.chunk)))
    scaled = None if stream.norm is None else rows
    kept = all_gather.kept(stream.group, rows, stream.norm)
    return stream._replace(rows=kept, scaled=scaled, squares=squares)


def _stream_beside_kernels(rows: jax.Array, *args: Any, **how: Any) -> NormedStream:
    return beside_kernels(plain_stream(rows, *args, **how))._replace(arrivals=arrivals_of(rows))


stream = kernel_or_reference(kernel_stream, plain_stream, is_bfloat16, _stream_beside_kernels)


def plain_product(
    x: Float[jax.Array, "R inputs"], weight: Matrix, first: int = 0
) -> Float[jax.Array, "R outputs"]:
    return _sums(x, weight, first).astype(x.dtype)


def kernel_product(
    kernels: Kernels, x: Float[jax.Array, "R inputs"], weight: Matrix, first: int = 0
) -> Float[jax.Array, "R outputs"]:
    return _multiplied(kernels, x, weight, first=first).rows


product = kernel_or_reference(kernel_product, plain_product, is_bfloat16)


def plain_product_float32(
    x: Float[jax.Array, "R inputs"], weight: Matrix, factor: float = 1.0
) -> Float[jax.Array, "R outputs"]:
    return _times(_sums(x, weight), factor)


def kernel_product_float32(
    kernels: Kernels, x: Float[jax.Array, "R inputs"], weight: Matrix, factor: float = 1.0
) -> Float[jax.Array, "R outputs"]:
    return _multiplied(kernels, x, weight, factor=factor, out_type=jnp.float32).rows


product_float32 = kernel_or_reference(kernel_product_float32, plain_product_float32, is_bfloat16)


def plain_rmsnorm_linear(
    stream: NormedStream, eps: float | None, weight: Matrix
) -> Float[jax.Array, "R outputs"]:
    rows, norm = stream.whole, stream.norm
    if eps is not None:
        rows = layers.rms_norm(rows, alone(norm), eps)
    return plain_product(rows, weight)


def kernel_rmsnorm_linear(
    kernels: Kernels, stream: NormedStream, eps: float | None, weight: Matrix
) -> Float[jax.Array, "R outputs"]:
    return _normed(kernels, stream, eps, weight)


rmsnorm_linear = kernel_or_reference(kernel_rmsnorm_linear, plain_rmsnorm_linear, is_bfloat16)


def plain_residual_product(
    x: Float[jax.Array, "R inputs"],
    weight: Matrix,
    arrivals: Int[jax.Array, " counters"] | None = None,
) -> Float[jax.Array, "R outputs"]:
    """Computes `product` in segments; `arrivals` are counters, see `NormedStream`."""
    del arrivals
    return _sums(x, weight, segments=_segments_of(x, weight)).astype(x.dtype)


def kernel_residual_product(
    kernels: Kernels,
    x: Float[jax.Array, "R inputs"],
    weight: Matrix,
    arrivals: Int[jax.Array, " counters"] | None = None,
) -> Float[jax.Array, "R outputs"]:
    how: dict[str, Any] = {"segments": _segments_of(x, weight)}
    how["arrivals"] = arrivals_of(x) if arrivals is None else arrivals  # partial pass
    return _multiplied(kernels, x, weight, **how).rows


residual_product = kernel_or_reference(kernel_residual_product, plain_residual_product, is_bfloat16)


def plain_linear_add(
    x: Float[jax.Array, "R inputs"],
    weight: Matrix,
    stream: NormedStream,
    factor: float = 1.0,
    norm: Norm | None = None,
) -> NormedStream:
    own = stream.own + _times(plain_residual_product(x, weight), factor)
    return stream.with_next_norm(all_gather.all_gather(stream.group, own), norm)


def kernel_linear_add(
    kernels: Kernels,
    x: Float[jax.Array, "R inputs"],
    weight: Matrix,
    stream: NormedStream,
    factor: float = 1.0,
    norm: Norm | None = None,
) -> NormedStream:
    return kernel_added(kernels, x, weight, stream, factor, norm, _segments_of(x, weight))


def kernel_added(
    kernels: Kernels,
    x: Float[jax.Array, "R inputs"],
    weight: Matrix,
    stream: NormedStream,
    factor: float,
    norm: Norm | None,
    segments: int,
) -> NormedStream:
    """Same as `linear_add`, with some segments of the inputs."""
    group, own = stream.group, stream.own
    gather = group.on_device.next() if all_gather.gathers_with_squares(group, own) else None
    scale = all_gather.norm_with_squares(group, own, norm)
    how = {"factor": factor, "added": own, "norm": scale, "gather": gather, "segments": segments}
    how["arrivals"] = arrivals_of(x) if stream.arrivals is None else stream.arrivals  # partial pass
    return ended(kernels, stream, _multiplied(kernels, x, weight, **how), norm)


def ended(kernels: Kernels, stream: NormedStream, added: Any, norm: Norm | None) -> NormedStream:
    """Returns the stream after a kernel has added to this rank's columns.

    With `gathers_with_squares`, `added` also has the scaled rows and squares of all ranks.
    """
    group, rows = stream.group, added.rows
    if not (group.is_single or all_gather.gathers_with_squares(group, rows)):
        rows = all_gather.all_gather(group, rows)
        begun = kernel_stream(kernels, rows, norm)
        return stream.with_next_norm(rows, norm, begun.scaled, begun.squares)
    if norm is None:
        rows = rows if group.is_single else added.scaled
        return stream.with_next_norm(rows, squares=added.squares)
    return stream.with_next_norm(rows, norm, added.scaled, added.squares)


def _added_beside_kernels(*args: Any, **how: Any) -> NormedStream:
    return beside_kernels(plain_linear_add(*args, **how))


linear_add = kernel_or_reference(
    kernel_linear_add, plain_linear_add, is_bfloat16, _added_beside_kernels
)


def plain_act_and_mul_linear(
    stream: NormedStream, eps: float | None, weight: Matrix, activation: Activation = SILU_AND_MUL
) -> Float[jax.Array, "R intermediate"]:
    product = plain_rmsnorm_linear(stream, eps, weight)
    return all_gather.all_gather(stream.group, layers.activated(product, activation))


def kernel_act_and_mul_linear(
    kernels: Kernels,
    stream: NormedStream,
    eps: float | None,
    weight: Matrix,
    activation: Activation = SILU_AND_MUL,
) -> Float[jax.Array, "R intermediate"]:
    exchange, x, n = stream.group.on_device, stream.factors, activation.num_projections
    if exchange is not None and exchange.fits(len(x), weight.num_outputs // n, x.dtype.itemsize):
        how = {"activation": activation, "gather": exchange.next()}
        return _normed(kernels, stream, eps, weight, **how)
    own = _normed(kernels, stream, eps, weight, activation=activation)
    return all_gather.all_gather(stream.group, own)


act_and_mul_linear = kernel_or_reference(
    kernel_act_and_mul_linear, plain_act_and_mul_linear, is_bfloat16
)


def _times(x: Float[jax.Array, "R outputs"], factor: float) -> Float[jax.Array, "R outputs"]:
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def _sums(
    x: Float[jax.Array, "R inputs"], weight: Matrix, first: int = 0, segments: int = 1
) -> Float[jax.Array, "R outputs"]:
    """Computes the GEMM in float32 from output `first` on, with the bias."""
    weight, sums = weight.rows(first), []
    for part in reduction_order.parts_of_inputs(x.shape[1], segments):
        if weight.format.quantizes_activations:
            sums.append(_of_codes(x[:, part], weight, part))
        else:
            sums.append(layers.linear(x[:, part], widened(weight)[:, part].astype(x.dtype)))
    total = reduce(jnp.add, sums)
    if weight.lora is not None:
        total = adapted(total, x, weight.lora)
    return total if weight.bias is None else total + weight.bias.astype(jnp.float32)


def _of_codes(
    x: Float[jax.Array, "R inputs"], weight: Matrix, part: slice
) -> Float[jax.Array, "R outputs"]:
    """Multiplies some inputs, whole blocks, with their part of a W8A8 weight."""
    assert weight.scales is not None  # W8A8
    scales = jnp.repeat(weight.scales, weight.num_outputs // len(weight.scales), axis=0)
    scales = scales[:, part.start // BLOCK : -(-part.stop // BLOCK)]
    return fp8_activations.product(fp8_activations.quantised(x), weight.values[:, part], scales)


def _normed(
    kernels: Kernels, stream: NormedStream, eps: float | None, weight: Matrix, **how: Any
) -> Float[jax.Array, "R outputs"]:
    """Computes the GEMM of the normed rows, or of the rows themselves without `eps`."""
    if eps is None:
        return _multiplied(kernels, stream.whole, weight, **how).rows
    stream = completed(kernels, stream)
    how |= {"squares": stream.squares, "eps": eps}
    return _multiplied(kernels, stream.factors, weight, **how).rows


def _segments_of(x: Float[jax.Array, "R inputs"], weight: Matrix) -> int:
    """Returns the segments of `residual_product`."""
    return reduction_order.LINEAR.segments_of(x.shape[1], is_packed=weight.format.expands_dense)


def completed(kernels: Kernels, stream: NormedStream) -> NormedStream:
    """Adds the kernel fields to a stream that has none yet."""
    if stream.squares is not None:
        return stream
    begun = kernel_stream(kernels, stream.whole, stream.norm)
    return stream.with_next_norm(begun.rows, begun.norm, begun.scaled, begun.squares)


def _multiplied(
    kernels: Kernels, x: Float[jax.Array, "R inputs"], weight: Matrix, **how: Any
) -> NormedStream:
    out, scaled, sums, _ = kernel_products(kernels, x, weight, **how)
    return NormedStream(out, how.get("norm"), scaled, sums)


def kernel_products(
    kernels: Kernels,
    x: Float[jax.Array, "R inputs"],
    weight: Matrix,
    *,
    first: int = 0,
    out_type: np.dtype | type | None = None,
    activation: Activation | None = None,
    norm: Norm | None = None,
    segments: int = 1,
    **how: Any,
) -> tuple[Any, ...]:
    """Runs `kernels.linear.product` with the tile config of the GEMM."""
    is_gated = activation is not None and activation.is_gated
    tables, stored, scales, row_scales = kernels.tiles, weight.num_outputs, weight.scales, None
    is_quantised = weight.format.quantizes_activations
    tiles = (tables.fp8_activations if is_quantised else tables.linear).of(
        item_bytes=weight.format.item_bytes,
        rows=len(x),
        outputs=(stored - first) // (2 if is_gated else 1),
        gated=int(is_gated),
        one_segment=int(segments == 1),
    )
    scale, scale_layer = stacked(norm)
    out_type, num_rows = out_type or x.dtype, len(x)
    if is_quantised:
        x, row_scales = kernels.fp8_activations.quantised(x)
    return kernels.linear.product(
        x,
        weight.values.reshape(-1, *weight.values.shape[-2:]),
        None if scales is None else scales.reshape(-1, *scales.shape[-2:]),
        jnp.asarray(0 if weight.layer is None else weight.layer, jnp.int32),
        row_scales,
        format=weight.format.name,
        num_rows=num_rows,
        first=first,
        out_type=out_type,
        is_gated=is_gated,
        activation=activation or SILU_AND_MUL,
        bias=None if weight.bias is None else weight.bias.reshape(-1, stored),
        norm=scale,
        norm_layer=scale_layer,
        order=SQUARES,
        segments=segments,
        tiles=tiles,
        lora=weight.lora and kernel_shrink(kernels, x, weight.lora, may_join=True),
        **how,
    )
