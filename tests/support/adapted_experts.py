"""MoE blocks with LoRA adapters in both languages, as functions of the specification's records."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_impl import ops as jax_ops
from jax_impl.ops.moe import experts as jax_experts
from kernels.tile_tables import Line, Table
from kernels.tiles import MEASURED, ExpertsTiles, Tiles
from shared.spec.experts import Experts
from shared.spec.lora import AdapterWeights, RowAdapters
from tests.support.kernels import AS_WRITTEN, INTERPRET, KERNELS, ON_GPU
from tests.support.op_case import Arguments
from tests.support.op_records import mapped
from torch_impl import ops as torch_ops
from torch_impl.ops.moe import experts as torch_experts

MATRICES = ("router", "gate_up", "down")


def with_slots(given: Arguments, slots: np.ndarray | None) -> Arguments:
    """The arguments of a block with other adapter slots of its rows; None: without adapters."""
    block: Experts = given["weights"]
    changed = {}
    for name in MATRICES:
        matrix = getattr(block, name)
        lora = None if slots is None else RowAdapters(matrix.lora.weights, slots.astype(np.int32))
        changed[name] = replace(matrix, lora=lora)
    return given | {"weights": replace(block, **changed)}


def with_broken(given: Arguments, slot: int) -> Arguments:
    """The arguments of a block in which one adapter is huge, with NaN in all experts."""
    block: Experts = given["weights"]
    changed = {}
    for name in MATRICES:
        matrix = getattr(block, name)
        own: AdapterWeights = matrix.lora.weights
        a, b = own.a.copy(), own.b.copy()
        a[slot - 1] *= 1e30
        b[slot - 1] *= 1e30
        b[slot - 1, ..., 0, :] = np.nan
        lora = replace(matrix.lora, weights=replace(own, a=a, b=b))
        changed[name] = replace(matrix, lora=lora)
    return given | {"weights": replace(block, **changed)}


def of_rows(given: Arguments, rows: slice) -> Arguments:
    """The arguments of a block for some of its rows."""
    stream, router = given["stream"], given["weights"].router
    given = given | {"stream": replace(stream, rows=stream.rows[rows])}
    return given if router.lora is None else with_slots(given, router.lora.slots[rows])


def run(
    language: str, given: Arguments, cut: ExpertsTiles | None = None, dtype: str = "float32"
) -> np.ndarray:
    """Runs the kernels of a block with its tiles, or those of the GPU; rows are float32."""
    where = f"{language}_gpu"
    tiles = Tiles.load(where, torch.cuda.get_device_name() if ON_GPU else MEASURED)
    if cut is not None:
        tiles = replace(tiles, experts=Table((Line({}, cut),)))
    call = _in_triton if language == "triton" else _in_pallas
    return call(given, tiles, dtype)


def _in_triton(given: Arguments, tiles: Tiles, dtype: str) -> np.ndarray:
    device, kind = "cuda" if ON_GPU else "cpu", getattr(torch, dtype)

    def leaf(x: Any, to: torch.dtype = kind) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        found = torch.from_numpy(x)
        return found.to(device, to) if found.is_floating_point() else found.to(device)

    kernels = _bound(torch_ops, KERNELS["triton"], tiles)
    wide = partial(leaf, to=torch.float32)
    placed = {k: mapped(v, leaf, torch_experts, wide) for k, v in given.items() if k != "config"}
    found = torch_experts.kernel_added_experts(kernels, config=given["config"], **placed)
    return found.rows.float().cpu().numpy()


def _in_pallas(given: Arguments, tiles: Tiles, dtype: str) -> np.ndarray:
    def leaf(x: Any, to: str = dtype) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        return jnp.asarray(x, to if x.dtype.kind == "f" else x.dtype)

    modules = {name: _Interpreting(module) for name, module in KERNELS["pallas"].items()}
    kernels = _bound(jax_ops, modules, tiles)
    wide = partial(leaf, to="float32")
    named = ("stream", "weights", "norm")
    placed = {name: mapped(given[name], leaf, jax_experts, wide) for name in named}

    def call(arrays: dict[str, Any]) -> jax.Array:
        return jax_experts.kernel_added_experts(
            kernels, eps=given["eps"], config=given["config"], **arrays
        ).rows

    found = jax.jit(call, compiler_options=AS_WRITTEN)(placed)
    return np.asarray(found.astype(jnp.float32))


def _bound(ops: ModuleType, modules: dict[str, Any], tiles: Tiles) -> Any:
    found = {field.name: modules.get(field.name) for field in fields(ops.Kernels)}
    return ops.Kernels(**found | {"tiles": tiles})


class _Interpreting:
    """A module of kernels that are interpreted on a CPU."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if inspect.isfunction(found) and "interpret" in inspect.signature(found).parameters:
            return partial(found, interpret=INTERPRET)
        return found
