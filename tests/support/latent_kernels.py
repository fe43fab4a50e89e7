"""Arguments and calls of the kernels around latent attention, in both languages."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_impl import ops as jax_ops
from jax_impl.ops.attention import latent_attention as jax_latent
from kernels.latent_tiles import HeadProductTiles
from shared.spec.lora import RowAdapters
from shared.spec.reduction_order import SQUARES
from tests.support.implementations import to_jax
from tests.support.kernels import AS_WRITTEN, INTERPRET, KERNELS, ON_GPU, bind_kernels
from tests.support.latent_sizes import DEEPSEEK_RANK, EPS, EVEN, GLM, ODD, LatentSizes
from tests.support.op_case import Arguments, OpCase
from tests.support.op_records import mapped
from torch_impl import ops as torch_ops
from torch_impl.ops.attention import latent_attention as torch_latent

LAYERS, LAYER = 3, 1


SIZES = {"odd": ODD, "even": EVEN} | ({"GLM": GLM, "DeepSeek": DEEPSEEK_RANK} if ON_GPU else {})


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Returns normal numbers that bfloat16 can represent."""
    drawn = torch.from_numpy(rng.standard_normal(shape, np.float32))
    return drawn.bfloat16().float().numpy()


def angles_of(rng: np.random.Generator, R: int, rope: int) -> Arguments:
    angle = rng.uniform(-3, 3, (R, rope // 2))
    return {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}


def query_arguments(sizes: LatentSizes, R: int, seed: int = 0) -> Arguments:
    """Returns query heads, followed by the other columns of the projection without query latent."""
    rng = np.random.default_rng(seed)
    kv_b = normal(rng, sizes.heads, sizes.nope + sizes.value, sizes.rank)
    q = normal(rng, R, sizes.query_columns)
    return {"q": q, **angles_of(rng, R, sizes.rope), "kv_b": kv_b, "nope_size": sizes.nope}


def value_arguments(sizes: LatentSizes, R: int, seed: int = 0) -> Arguments:
    """Returns attention outputs in the latent space."""
    rng = np.random.default_rng(seed)
    kv_b = normal(rng, sizes.heads, sizes.nope + sizes.value, sizes.rank)
    x = normal(rng, R, sizes.heads, sizes.rank)
    return {"x": x, "kv_b": kv_b, "nope_size": sizes.nope}


def row_arguments(sizes: LatentSizes, R: int, seed: int = 0, page: int = 4) -> Arguments:
    """Returns rows of two requests at consecutive positions; the last row is padding."""
    rng = np.random.default_rng(seed)
    columns = 1 + R // 2 // page + 1
    table = 1 + rng.permutation(2 * columns).reshape(2, columns)
    row, width = np.arange(R), sizes.rank + sizes.rope
    norm = lambda size: (1 + rng.standard_normal(size) / 4).astype(np.float32)  # noqa: E731
    return {
        "projected": normal(rng, R, sizes.input_columns),
        "query_norm": norm(sizes.query_rank) if sizes.query_rank else None,
        "latent_norm": norm(sizes.rank),
        **angles_of(rng, R, sizes.rope),
        "pools": normal(rng, LAYERS, 1, 1 + table.size, page, 1, width),
        "page_table": table.astype(np.int32),
        "request": (row % 2).astype(np.int32),
        "places": (row // 2 + 3).astype(np.int32),
        "is_real": row < R - 1,
    }


def product_tiles(**changed: int) -> HeadProductTiles:
    """Returns small tiles with some fields changed."""
    usual = {"rows": 16, "columns": 32, "depth": 32, "warps": 4, "stages": 2}
    return HeadProductTiles(**(usual | changed))


HALF = ("q", "kv_b", "x", "projected", "pools")
STACKED = ("kv_b", "query_norm", "latent_norm")


def run(language: str, name: str, given: Arguments, dtype: str, **how: Any) -> list[np.ndarray]:
    """Calls a kernel function; returns its results and, for `latent_rows`, the pools, in float32.

    Pallas gets the weights and norms as the second of three layers.
    """
    module = KERNELS[language]["latent_rows" if name == "latent_rows" else "head_product"]
    if name == "latent_rows":
        how |= {"eps": EPS, "order": SQUARES}
    call = partial(getattr(module, name), **how)
    if language == "triton":
        return _in_triton(call, given, dtype)
    return _in_pallas(call, given, dtype)


def _in_triton(call: partial, given: Arguments, dtype: str) -> list[np.ndarray]:
    device = "cuda" if ON_GPU else "cpu"
    arrays = {k: torch.tensor(x, device=device) for k, x in given.items() if _is_array(x)}
    arrays |= {k: arrays[k].to(getattr(torch, dtype)) for k in HALF if k in arrays}
    others = {k: x for k, x in given.items() if not _is_array(x)}
    if "lora" in given:
        slots, a, b, scales = (torch.tensor(x, device=device) for x in _operands(given["lora"]))
        a, b = (x.to(getattr(torch, dtype)) for x in (a, b))
        others |= {"lora": KERNELS["triton"]["head_product"].HeadAdapters(slots, a, b, scales)}
    if "pools" in arrays:
        others |= {"layer": LAYER}
        arrays |= {"page_table": arrays["page_table"].long()}  # as a step has it
    found = [call(**arrays, **others), arrays.get("pools")]
    return [x.float().cpu().numpy() for x in found if x is not None]


def _in_pallas(call: partial, given: Arguments, dtype: str) -> list[np.ndarray]:
    arrays = {k: x for k, x in given.items() if _is_array(x)}
    for name in arrays.keys() & set(STACKED):
        stack = np.full((LAYERS, *arrays[name].shape), np.nan, np.float32)
        stack[LAYER] = arrays[name]
        arrays |= {name: stack}
    arrays = {k: jnp.asarray(x) for k, x in arrays.items()}
    arrays |= {k: arrays[k].astype(dtype) for k in HALF if k in arrays}
    others = {k: x for k, x in given.items() if not _is_array(x)}
    if "lora" in given:
        slots, *stacks = map(jnp.asarray, _operands(others.pop("lora")))
        nan = [jnp.full_like(x, np.nan) for x in stacks]
        stacks = [jnp.stack([y, x, y], 1) for x, y in zip(stacks, nan, strict=True)]
        a, b, scales = stacks[0].astype(dtype), stacks[1].astype(dtype), stacks[2]
        kind = KERNELS["pallas"]["head_product"].HeadAdapters
        arrays |= {"lora": kind(slots, jnp.full(1, LAYER, jnp.int32), a, b, scales)}
    program = jax.jit(partial(call, **others, interpret=INTERPRET), compiler_options=AS_WRITTEN)
    found = program(**arrays, layer=jnp.full(1, LAYER, jnp.int32))
    return [np.asarray(x.astype(jnp.float32)) for x in jax.tree.leaves(found)]


def _operands(lora: RowAdapters) -> tuple[np.ndarray, ...]:
    """Returns the arrays that kernels read."""
    return lora.slots, lora.weights.a, lora.weights.b, lora.weights.scales


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def launches(case: OpCase, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Returns the kernels in the program of a case's operation in JAX, by platform."""
    bind_kernels(monkeypatch, jax_ops, KERNELS["pallas"])
    placed = _placed(case, jax_latent, to_jax)
    leaves, tree = jax.tree.flatten(placed)
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    operation = getattr(jax_latent, case.function)

    def call(*arrays: jax.Array) -> Any:
        given = iter(arrays)
        rest = [next(given) if isinstance(x, jax.Array) else x for x in leaves]
        return operation(*jax.tree.unflatten(tree, rest))

    traced = jax.jit(call).trace(*arrays)
    return {
        platform: traced.lower(lowering_platforms=(platform,)).as_text().count("xla.gpu.triton")
        for platform in ("cpu", "cuda")
    }


def from_torch_kernel(case: OpCase, monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Returns the results of a case's operation in torch, and the arrays that it changes."""
    bind_kernels(monkeypatch, torch_ops, KERNELS["triton"])
    module = torch_latent
    device = "cuda" if ON_GPU else "cpu"

    def placed(x: Any) -> Any:
        return torch.from_numpy(x.copy()).to(device) if _is_array(x) else x

    given = _placed(case, module, placed)
    names = list(inspect.signature(getattr(module, case.function)).parameters)
    found = getattr(module, f"kernel_{case.function}")(torch_ops.KERNELS, *given)
    changed = [given[names.index(name)] for name in case.in_place]
    return [x.cpu().numpy() for x in (found, *changed)]


def _placed(case: OpCase, module: ModuleType, leaf: Callable[[Any], Any]) -> list[Any]:
    """Returns the arguments of a case's operation in its order."""
    arguments = case.arguments(seed=0)
    names = inspect.signature(getattr(module, case.function)).parameters
    given = [arguments[name] for name in names if name in arguments]
    return [mapped(value, leaf=leaf, module=module) for value in given]
