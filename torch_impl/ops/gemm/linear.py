"""GEMMs with fused norms (prologue) and epilogues; same as `shared.spec.linear`.

On a GPU bfloat16 GEMMs are kernels; see `torch_impl.ops`.
"""

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shared.boundary.tp_group import SINGLE_RANK, TPGroup
from shared.models.activation import SILU_AND_MUL, Activation
from shared.models.formats.fp8 import BLOCK
from shared.spec import reduction_order
from shared.spec.reduction_order import SQUARES
from torch_impl.ops import Kernels, arrivals_of, is_bfloat16, kernel_or_reference
from torch_impl.ops.collectives import all_gather
from torch_impl.ops.gemm import fp8_activations, layers
from torch_impl.ops.gemm.lora import adapted, kernel_shrink
from torch_impl.ops.gemm.matrix import Matrix, widened


@dataclass(frozen=True)
class NormedStream:
    """Residual stream between two operations of a layer; see the specification.

    Attributes:
      group: Tensor-parallel group; each rank computes its columns. All ranks have whole rows, or
        their own columns and whole `scaled` and `squares`.
    """

    rows: Float[Tensor, "R columns"]
    norm: Float[Tensor, " hidden"] | None = None
    scaled: Float[Tensor, "R hidden"] | None = None
    squares: Float[Tensor, "R chunks"] | None = None
    count: Int[Tensor, " 1"] | None = None
    arrivals: Int[Tensor, " counters"] | None = None
    group: TPGroup = SINGLE_RANK

    @property
    def is_share(self) -> bool:
        """Returns True if `rows` has only this rank's columns."""
        return self.scaled is not None and self.scaled.shape != self.rows.shape

    @property
    def factors(self) -> Float[Tensor, "R hidden"]:
        """Returns the input of GEMM kernels: the rows times the scale of their norm."""
        return self.rows if self.scaled is None else self.scaled

    def with_next_norm(
        self,
        rows: Float[Tensor, "R columns"],
        norm: Float[Tensor, " hidden"] | None = None,
        scaled: Float[Tensor, "R hidden"] | None = None,
        squares: Float[Tensor, "R chunks"] | None = None,
    ) -> "NormedStream":
        return replace(self, rows=rows, norm=norm, scaled=scaled, squares=squares)

    @property
    def own(self) -> Float[Tensor, "R share"]:
        """Returns this rank's columns of the rows."""
        return self.rows if self.is_share else all_gather.local_columns(self.group, self.rows)

    @property
    def whole(self) -> Float[Tensor, "R hidden"]:
        """Returns the rows with the columns of all ranks."""
        return all_gather.all_gather(self.group, self.rows) if self.is_share else self.rows


def plain_stream(
    rows: Float[Tensor, "R hidden"],
    norm: Float[Tensor, " hidden"] | None = None,
    count: Int[Tensor, " 1"] | None = None,
    group: TPGroup = SINGLE_RANK,
) -> NormedStream:
    return NormedStream(rows, norm, count=count, group=group)


def kernel_stream(
    kernels: Kernels,
    rows: Float[Tensor, "R hidden"],
    norm: Float[Tensor, " hidden"] | None = None,
    count: Int[Tensor, " 1"] | None = None,
    group: TPGroup = SINGLE_RANK,
) -> NormedStream:
    scaled, squares = kernels.layers.beside(rows, norm, order=SQUARES)
    own = all_gather.kept(group, rows, norm)
    return NormedStream(own, norm, scaled, squares, count, group=group)


stream = kernel_or_reference(kernel_stream, plain_stream, is_bfloat16)


def plain_product(
    x: Float[Tensor, "R inputs"], weight: Matrix, first: int = 0
) -> Float[Tensor, "R outputs"]:
    return _product_of_segments(x, weight.rows(first), 1)


def _product_of_segments(
    x: Float[Tensor, "R inputs"], weight: Matrix, segments: int
) -> Float[Tensor, "R outputs"]:
    """Computes `product` with the inputs in segments, whose sum is rounded once."""
    if weight.format.quantizes_activations:
        return _of_codes(x, weight, segments).to(x.dtype)
    if segments > 1:
        out = _sums(x, weight, segments).to(x.dtype)
        return out if weight.bias is None else out + weight.bias
    out = layers.linear(x, widened(weight).to(x.dtype))
    if weight.lora is not None:  # base rows keep the bits of a product that is rounded at once
        sums = _sums(x, weight).to(x.dtype)
        out = torch.where(weight.lora.slots[:, None] == 0, out, sums)
    return out if weight.bias is None else out + weight.bias


def kernel_product(
    kernels: Kernels, x: Float[Tensor, "R inputs"], weight: Matrix, first: int = 0
) -> Float[Tensor, "R outputs"]:
    return _multiplied(kernels, x, weight.rows(first)).rows


product = kernel_or_reference(kernel_product, plain_product, is_bfloat16)


def plain_product_float32(
    x: Float[Tensor, "R inputs"], weight: Matrix, factor: float = 1.0
) -> Float[Tensor, "R outputs"]:
    """Same as `product` times a factor, but the result stays float32."""
    if weight.format.quantizes_activations:
        return _times(_of_codes(x, weight), factor)
    sums = _sums(x, weight)
    return _times(sums if weight.bias is None else sums + weight.bias, factor)


def kernel_product_float32(
    kernels: Kernels, x: Float[Tensor, "R inputs"], weight: Matrix, factor: float = 1.0
) -> Float[Tensor, "R outputs"]:
    return _multiplied(kernels, x, weight, factor=factor, out_type=torch.float32).rows


product_float32 = kernel_or_reference(kernel_product_float32, plain_product_float32, is_bfloat16)


def plain_rmsnorm_linear(
    stream: NormedStream, eps: float | None, weight: Matrix
) -> Float[Tensor, "R outputs"]:
    rows = stream.rows if eps is None else layers.rms_norm(stream.rows, stream.norm, eps)
    return product(rows, weight)


def kernel_rmsnorm_linear(
    kernels: Kernels, stream: NormedStream, eps: float | None, weight: Matrix
) -> Float[Tensor, "R outputs"]:
    return _normed(kernels, stream, eps, weight, None)


rmsnorm_linear = kernel_or_reference(kernel_rmsnorm_linear, plain_rmsnorm_linear, is_bfloat16)


def plain_residual_product(
    x: Float[Tensor, "R inputs"], weight: Matrix, arrivals: Int[Tensor, " counters"] | None = None
) -> Float[Tensor, "R outputs"]:
    """Computes `product` in segments; `arrivals` are counters, see `NormedStream`."""
    del arrivals
    return _product_of_segments(x, weight, _segments_of(x, weight))


def kernel_residual_product(
    kernels: Kernels,
    x: Float[Tensor, "R inputs"],
    weight: Matrix,
    arrivals: Int[Tensor, " counters"] | None = None,
) -> Float[Tensor, "R outputs"]:
    how = {"segments": _segments_of(x, weight), "arrivals": arrivals}
    return _multiplied(kernels, x, weight, **how).rows


residual_product = kernel_or_reference(kernel_residual_product, plain_residual_product, is_bfloat16)


def plain_linear_add(
    x: Float[Tensor, "R inputs"],
    weight: Matrix,
    stream: NormedStream,
    factor: float = 1.0,
    norm: Float[Tensor, " hidden"] | None = None,
) -> NormedStream:
    own = stream.own + _times(plain_residual_product(x, weight), factor)
    return stream.with_next_norm(all_gather.all_gather(stream.group, own), norm)


def kernel_linear_add(
    kernels: Kernels,
    x: Float[Tensor, "R inputs"],
    weight: Matrix,
    stream: NormedStream,
    factor: float = 1.0,
    norm: Float[Tensor, " hidden"] | None = None,
) -> NormedStream:
    return kernel_added(kernels, x, weight, stream, factor, norm, _segments_of(x, weight))


def kernel_added(
    kernels: Kernels,
    x: Float[Tensor, "R inputs"],
    weight: Matrix,
    stream: NormedStream,
    factor: float,
    norm: Float[Tensor, " hidden"] | None,
    segments: int,
) -> NormedStream:
    """Same as `linear_add`, with some segments of the inputs."""
    group, own = stream.group, stream.own.contiguous()
    gather = group.on_device.next() if all_gather.gathers_with_squares(group, own) else None
    scale = all_gather.norm_with_squares(group, own, norm)
    how = {"factor": factor, "added": own, "norm": scale, "gather": gather}
    if segments > 1 and stream.arrivals is None:  # the first of the pass
        stream = replace(stream, arrivals=arrivals_of(own))
    how |= {"segments": segments, "arrivals": stream.arrivals}
    return ended(kernels, stream, _multiplied(kernels, x, weight, **how), norm)


def ended(
    kernels: Kernels, stream: NormedStream, added: Any, norm: Float[Tensor, " hidden"] | None
) -> NormedStream:
    """Returns the stream after a kernel has added to it.

    Args:
      added: This rank's columns; with `gathers_with_squares` also the scaled rows and squares of
        all.
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


linear_add = kernel_or_reference(kernel_linear_add, plain_linear_add, is_bfloat16)


def plain_act_and_mul_linear(
    stream: NormedStream, eps: float | None, weight: Matrix, activation: Activation = SILU_AND_MUL
) -> Float[Tensor, "R intermediate"]:
    activated = layers.activated(rmsnorm_linear(stream, eps, weight), activation)
    return all_gather.all_gather(stream.group, activated)


def kernel_act_and_mul_linear(
    kernels: Kernels,
    stream: NormedStream,
    eps: float | None,
    weight: Matrix,
    activation: Activation = SILU_AND_MUL,
) -> Float[Tensor, "R intermediate"]:
    exchange, factors = stream.group.on_device, stream.factors
    share = weight.num_outputs // activation.num_projections
    if exchange is not None and exchange.fits(len(factors), share, factors.element_size()):
        return _normed(kernels, stream, eps, weight, activation, gather=exchange.next())
    return all_gather.all_gather(stream.group, _normed(kernels, stream, eps, weight, activation))


act_and_mul_linear = kernel_or_reference(
    kernel_act_and_mul_linear, plain_act_and_mul_linear, is_bfloat16
)


def _sums(
    x: Float[Tensor, "R inputs"], weight: Matrix, segments: int = 1
) -> Float[Tensor, "R outputs"]:
    """Computes the GEMM in float32, with the adapters of the rows and without the bias."""
    values, sums = widened(weight), []
    for part in reduction_order.parts_of_inputs(x.shape[1], segments):
        of_rows, of_outputs = x[:, part], values[:, part]
        if x.is_cuda:
            sums.append(torch.mm(of_rows, of_outputs.t(), out_dtype=torch.float32))
        else:  # not supported on a CPU
            sums.append(layers.linear(of_rows.float(), of_outputs.float()))
    total = reduce(torch.add, sums)
    return total if weight.lora is None else adapted(total, x, weight.lora)


def _of_codes(
    x: Float[Tensor, "R inputs"], weight: Matrix, segments: int = 1
) -> Float[Tensor, "R outputs"]:
    """Computes the W8A8 GEMM in float32, with the bias."""
    assert weight.scales is not None  # W8A8
    scales = weight.scales.repeat_interleave(weight.num_outputs // len(weight.scales), 0)
    rows, sums = fp8_activations.quantised(x), []
    for part in reduction_order.parts_of_inputs(x.shape[1], segments):
        blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
        of_part = fp8_activations.Quantised(rows.codes[:, part], rows.scales[:, blocks])
        values = weight.values[:, part]
        sums.append(fp8_activations.product(of_part, values, scales[:, blocks]))
    total = reduce(torch.add, sums)
    return total if weight.bias is None else total + weight.bias.float()


def _segments_of(x: Float[Tensor, "R inputs"], weight: Matrix) -> int:
    """Returns the segments of `residual_product`."""
    return reduction_order.LINEAR.segments_of(x.shape[1], is_packed=weight.format.expands_dense)


def completed(kernels: Kernels, stream: NormedStream) -> NormedStream:
    """Adds the kernel fields to a stream that has none yet."""
    if stream.squares is not None:
        return stream
    begun = kernel_stream(kernels, stream.whole, stream.norm)
    return stream.with_next_norm(begun.rows, begun.norm, begun.scaled, begun.squares)


def _times(x: Float[Tensor, "R outputs"], factor: float) -> Float[Tensor, "R outputs"]:
    return x if factor == 1 else x * factor


def _normed(
    kernels: Kernels,
    stream: NormedStream,
    eps: float | None,
    weight: Matrix,
    activation: Activation | None,
    gather: Any = None,
) -> Float[Tensor, "R outputs"]:
    """Computes the GEMM of the normed rows, or of the rows themselves without `eps`."""
    how: dict[str, Any] = {"activation": activation, "gather": gather}
    if eps is None:
        return _multiplied(kernels, stream.whole, weight, **how).rows
    stream = completed(kernels, stream)
    how |= {"squares": stream.squares, "eps": eps}
    return _multiplied(kernels, stream.factors, weight, **how).rows


def _multiplied(
    kernels: Kernels,
    x: Float[Tensor, "R inputs"],
    weight: Matrix,
    *,
    norm: Float[Tensor, " outputs"] | None = None,
    **how: Any,
) -> NormedStream:
    out, scaled, sums, _ = kernel_products(kernels, x, weight, norm=norm, **how)
    return NormedStream(out, norm, scaled, sums)


def kernel_products(
    kernels: Kernels,
    x: Float[Tensor, "R inputs"],
    weight: Matrix,
    *,
    out_type: torch.dtype | None = None,
    activation: Activation | None = None,
    segments: int = 1,
    **how: Any,
) -> tuple[Any, ...]:
    """Runs `kernels.linear.product` with the tile config of the GEMM."""
    tables, row_scales, x = kernels.tiles, None, x.contiguous()
    is_gated = activation is not None and activation.is_gated
    tiles = (tables.fp8_activations if weight.format.quantizes_activations else tables.linear).of(
        item_bytes=weight.format.item_bytes,
        rows=len(x),
        outputs=weight.num_outputs // (2 if is_gated else 1),
        gated=int(is_gated),
        one_segment=int(segments == 1),
    )
    out_type = out_type or x.dtype
    if weight.format.quantizes_activations:
        x, row_scales = kernels.fp8_activations.quantised(x)
    return kernels.linear.product(
        x,
        weight.values,
        weight.scales,
        row_scales,
        format=weight.format.name,
        out_type=out_type,
        is_gated=is_gated,
        activation=activation or SILU_AND_MUL,
        bias=weight.bias,
        order=SQUARES,
        segments=segments,
        tiles=tiles,
        lora=weight.lora and kernel_shrink(kernels, x, weight.lora),
        **how,
    )
