"""GEMMs for the residual stream, with their inputs in segments, in the kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from kernels.tiles import LinearTiles
from shared.models.formats import fp8
from shared.models.formats.fp8 import quantize
from shared.models.formats.weight_format import SCALES, VALUES
from shared.spec import linear, reduction_order
from shared.spec.linear import Matrix, NormedStream
from shared.spec.lora import AdapterWeights, RowAdapters
from shared.spec.reduction_order import SHRINK, SQUARES, LinearOrder, chunks_of_squares
from tests.support.cases.gemm.linear import QUANTIZED
from tests.support.kernels import AS_WRITTEN, INTERPRET, KERNELS, ON_GPU
from tests.support.linear_kernels import EPS, Arrays, normal, tiles
from tests.support.lora_kernels import adapters
from tests.support.weight_formats import w8a8_matrix

ROWS, INPUTS, OUTPUTS, FACTOR = 70, 1024, 256, 0.25
FORMATS = ("plain", "FP8", "INT4", "AWQ", "MXFP4", "W8A8")
KINDS = ("added", "biased", "adapted", "alone")
"""The last is not added to a residual, as before a norm."""


class Product(NamedTuple):
    """Rows, weight, and adapters of the rows; residual and next norm of a GEMM that is added."""

    x: np.ndarray
    weight: Matrix
    lora: RowAdapters | None
    stream: np.ndarray | None
    norm: np.ndarray | None

    def of_rows(self, rows: int) -> Product:
        """Returns the GEMM of the first rows."""
        lora = self.lora and self.lora.of_rows(np.arange(rows))
        stream = None if self.stream is None else self.stream[:rows]
        return self._replace(x=self.x[:rows], stream=stream, lora=lora)


def in_bfloat16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def product_of(
    format: str, kind: str, *, rows: int = ROWS, inputs: int = INPUTS, outputs: int = OUTPUTS
) -> Product:
    """Returns a random GEMM of numbers that are bfloat16."""
    wide = in_bfloat16(normal(1, outputs, inputs) / np.float32(inputs**0.5))
    if format == "plain":
        weight = Matrix.plain(wide)
    elif format == "W8A8":
        shape = outputs // fp8.BLOCK, inputs // fp8.BLOCK
        scales = np.resize(np.arange(3, 10, dtype=np.float32), shape) / np.float32(2**12)
        weight = w8a8_matrix(quantize(wide * 2**9), scales, None)
    else:
        weight = QUANTIZED[format](wide)
    bias = in_bfloat16(normal(3, outputs)) if kind == "biased" else None
    lora = adapters(3, 16, (outputs,), inputs) if kind == "adapted" else None
    return Product(
        x=in_bfloat16(normal(0, rows, inputs)),
        weight=Matrix(weight.format, weight.planes, bias),
        lora=lora and RowAdapters(_rounded(lora), np.arange(rows) % 4),
        stream=None if kind == "alone" else normal(2, rows, outputs),
        norm=None if kind == "alone" else 1 + normal(4, outputs) / 4,
    )


def _rounded(lora: AdapterWeights) -> AdapterWeights:
    return AdapterWeights(
        a=in_bfloat16(lora.a),
        b=in_bfloat16(lora.b),
        scales=lora.scales,
        factors=lora.factors,
        parts=lora.parts,
    )


def specified(given: Product, segments: int, patch: pytest.MonkeyPatch) -> np.ndarray:
    """Returns the specification's result."""
    order = LinearOrder(segments=segments, least=1, unit=1)
    patch.setattr(reduction_order, "LINEAR", order)
    weight = Matrix(given.weight.format, given.weight.planes, given.weight.bias, given.lora)
    if given.stream is None:
        return linear.residual_product(given.x, weight) * np.float32(FACTOR)
    return linear.linear_add(given.x, weight, NormedStream(given.stream), FACTOR).rows


def calls_of(patch: pytest.MonkeyPatch, kernel: str) -> list[tuple[int, bool]]:
    """Returns the segments of launches of a kernel of Triton, and whether they are separate."""
    module, calls = getattr(KERNELS["triton"]["linear"], kernel), list[tuple[int, bool]]()
    healthy = module.launch

    def launch(*args: Any, config: Any, **how: Any) -> None:
        calls.append((config.segments, config.is_separate))
        healthy(*args, config=config, **how)

    patch.setattr(module, "launch", launch)
    return calls


def cut_of(format: str, **changed: int | bool) -> LinearTiles:
    """Returns tiles for a format: packed weights are dequantised in registers."""
    usual: dict[str, Any] = {"widens": format in ("plain", "W8A8")}
    usual |= {"depth": fp8.BLOCK if format == "W8A8" else 64}
    return tiles(**(usual | changed))


def added(
    language: str,
    given: Product,
    cut: LinearTiles,
    segments: int,
    out_type: str = "float32",
    arrivals: torch.Tensor | None = None,
    *,
    is_normed: bool = False,
    has_norm: bool = True,
) -> Arrays:
    """Returns the sum, the sum times the scale of the next norm, and its squares, as float32.

    Only the first without a residual. In Pallas the counters are those of the program, and the rows
    have no norm but the next one.

    Args:
      arrivals: Zeroed counters; None for some of this call.
      is_normed, has_norm: Whether the rows are of a norm, and whether there is a next one.
    """
    if language == "pallas":
        return _in_pallas(given, cut, segments, out_type)
    device, modules, kind = "cuda" if ON_GPU else "cpu", KERNELS["triton"], getattr(torch, out_type)

    def of(x: np.ndarray, kind: torch.dtype | None = None) -> torch.Tensor:
        array = torch.from_numpy(x.copy()).to(device)
        return array if kind is None else array.to(kind)

    half, planes, row_scales = torch.bfloat16, given.weight.planes, None
    x, values, scales = of(given.x, half), of(planes[VALUES]), None
    if SCALES in planes:
        stored = np.asarray(planes[SCALES])
        is_whole = stored.dtype.kind in "iu" or given.weight.format.quantizes_activations
        scales = of(stored) if is_whole else of(stored.astype(np.float32), half)
    else:
        values = values.to(half)
    lora = None
    if given.lora is not None:
        own = given.lora.weights
        lora = modules["lora"].shrink(
            x,
            of(own.a, half),
            of(own.b, half),
            of(own.scales),
            of(own.factors),
            of(given.lora.slots.astype(np.int32)),
            parts=own.parts,
            order=SHRINK,
        )
    if given.weight.format.quantizes_activations:
        values = values.view(torch.float8_e4m3fn)
        x, row_scales = modules["fp8_activations"].quantised(x)
    out, scaled, sums, _ = modules["linear"].product(
        x,
        values,
        scales,
        row_scales,
        format=given.weight.format.name,
        out_type=kind,
        bias=None if given.weight.bias is None else of(given.weight.bias, half),
        factor=FACTOR,
        added=None if given.stream is None else of(given.stream, kind),
        squares=of(chunks_of_squares(given.x)) if is_normed else None,
        eps=EPS,
        norm=of(given.norm) if has_norm and given.norm is not None else None,
        order=SQUARES,
        segments=segments,
        arrivals=arrivals,
        tiles=cut,
        lora=lora,
    )
    found = (out, scaled, sums)
    return tuple(each.float().cpu().numpy() for each in found if each is not None)


def _in_pallas(given: Product, cut: LinearTiles, segments: int, out_type: str) -> Arrays:
    modules, format = KERNELS["pallas"], given.weight.format
    planes = dict(given.weight.planes)
    if format.quantizes_activations:
        planes[VALUES] = planes[VALUES].view(ml_dtypes.float8_e4m3fn)
    elif SCALES in planes and planes[SCALES].dtype.kind not in "iu":
        planes[SCALES] = planes[SCALES].astype(ml_dtypes.bfloat16)
    elif SCALES not in planes:
        planes[VALUES] = planes[VALUES].astype(ml_dtypes.bfloat16)
    arrays: dict[str, Any] = {
        "x": given.x.astype(ml_dtypes.bfloat16),
        "planes": {name: plane[None] for name, plane in planes.items()},
        "bias": given.weight.bias,
        "added": given.stream,
        "norm": given.norm,
        "lora": None,
    }
    if given.stream is not None and given.norm is not None:
        arrays["added"] = given.stream.astype(jnp.dtype(out_type))
        arrays["norm"] = given.norm[None]
    if arrays["bias"] is not None:
        arrays["bias"] = arrays["bias"][None].astype(ml_dtypes.bfloat16)
    parts = () if given.lora is None else given.lora.weights.parts
    if given.lora is not None:
        own = given.lora.weights
        matrices = {name: getattr(own, name).astype(ml_dtypes.bfloat16) for name in ("a", "b")}
        arrays["lora"] = matrices | {"scales": own.scales, "factors": own.factors}
        arrays["lora"] = {name: x[:, None] for name, x in arrays["lora"].items()}
        arrays["lora"]["slots"] = given.lora.slots.astype(np.int32)

    def run(
        x: jax.Array, planes: dict[str, jax.Array], lora: dict[str, jax.Array] | None, **more: Any
    ) -> list[jax.Array]:
        layer, row_scales, num_rows = jnp.int32(0), None, len(x)
        zeros = jnp.zeros(64, jnp.int32) + (x[0, 0] > 1e30).astype(jnp.int32)  # no constant
        how = {"layer": layer, "interpret": INTERPRET}
        adapted = lora and modules["lora"].shrink(
            x, **lora, **how, parts=parts, order=SHRINK, arrivals=zeros * 2, counter=layer
        )
        if format.quantizes_activations:
            x, row_scales = modules["fp8_activations"].quantised(x, interpret=INTERPRET)
        return modules["linear"].product(
            x,
            planes[VALUES],
            planes.get(SCALES),
            row_scales=row_scales,
            format=format.name,
            num_rows=num_rows,
            first=0,
            out_type=jnp.dtype(out_type),
            factor=FACTOR,
            norm_layer=layer,
            order=SQUARES,
            segments=segments,
            arrivals=zeros,
            tiles=cut,
            lora=adapted,
            **how,
            **more,
        )[:3]

    program = jax.jit(run, compiler_options=AS_WRITTEN)
    found = program(**arrays)
    return tuple(np.asarray(each).astype(np.float32) for each in found if each is not None)
