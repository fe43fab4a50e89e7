"""Calls of the attention-layer kernels in both languages."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from kernels.tiles import (
    BLOCKS,
    MEASURED,
    AttentionTiles,
    DecodeAttentionTiles,
    Tiles,
)
from kernels.tree_blocks import attention_layer_tiles
from shared.boundary.workspace import MOST_PARTS
from shared.spec.attention_layer import row_bounds, tree_paths
from shared.spec.reduction_order import ATTENTION, SQUARES, AttentionOrder
from tests.support.cases.attention.attention_layer import EPS, MixCase
from tests.support.kernels import AS_ROUNDED, INTERPRET, KERNELS, ON_GPU

TILES = {name: Tiles.load(f"{name}_gpu", MEASURED) for name in ("pallas", "triton")}


class Found(NamedTuple):
    """The outputs, the pools of the layer and of the others, and the counters."""

    out: np.ndarray
    pools: np.ndarray
    others: np.ndarray
    arrivals: np.ndarray | None


class How(NamedTuple):
    """Settings of a kernel call; `tiles` of None selects the tile config of the tables."""

    is_fused: bool
    order: AttentionOrder = ATTENTION
    max_parts: int = MOST_PARTS
    tiles: DecodeAttentionTiles | AttentionTiles | None = None


FUSED, APART = How(True), How(False)
SHORT = replace(ATTENTION, span=64, split=32, tile=16)
"""So that a small case has several spans."""
SHARED = DecodeAttentionTiles(
    lanes=64,
    programs=2,
    splits=3,
    ones=16,
    placed=False,
    described=False,
    warps=4,
    stages=2,
    registers=0,
)
ROWS = ("page_table", "request", "places", "first", "until", "window", "is_real")


def given(case: MixCase, how: How, language: str) -> tuple[dict, dict]:
    """Returns keyword arguments of the kernels that make rows, and of those that attend."""
    new = {"gated": case.heads.gated, "has_kv": case.heads.has_kv}
    new |= {"eps": EPS, "digits": SQUARES.digits}
    item_bytes, pairs = 2 if case.half else 4, case.max_rows * case.group
    sizes = {"item_bytes": item_bytes, "rows": pairs, "head_size": case.heads.head_size}
    if how.is_fused:
        sizes |= {"nodes": case.rows.window.shape[1], "requests": len(case.rows.page_table)}
        tiles = attention_layer_tiles(TILES[language].attention_layer, **sizes)
    else:
        tiles = TILES[language].attention.of(**sizes)
    order = how.order.sizes_for(item_bytes)
    attends = {"max_rows": case.max_rows, **order, "scale": case.heads.scale}
    attends["softcap"] = case.heads.softcap
    return new, attends | {"tiles": how.tiles or tiles}


def pools_of(case: MixCase) -> np.ndarray:
    """The case's layer, between two that hold no numbers."""
    kv = np.stack([case.k_pages, case.v_pages])
    return np.stack([np.full_like(kv, np.nan), kv, np.full_like(kv, np.nan)])


def arrays_of(case: MixCase) -> dict[str, np.ndarray | None]:
    """All arrays of a case by the kernels' names; floats that are rounded in half precision."""
    counts = (len(case.rows.page_table), case.heads.num_kv_heads * BLOCKS)
    bounds = row_bounds(case.rows, case.row_starts)
    return {
        "projected": case.qkv,
        "q_norm": None if case.norms is None else case.norms.q,
        "k_norm": None if case.norms is None else case.norms.k,
        "cos": case.angles.cos,
        "sin": case.angles.sin,
        "kv": pools_of(case),
        "row_starts": case.row_starts,
        "bounds": bounds,
        "paths": tree_paths(case.rows),
        "arrivals": np.zeros(counts, np.int32),
        "sinks": case.sinks,
        **{name: getattr(case.rows, name) for name in ROWS},
    }


def call_with(kernel: Callable, arrays: dict, **settings: object) -> object:
    """Calls a kernel with those of the arrays that it takes."""
    names = inspect.signature(kernel).parameters
    return kernel(**{k: v for k, v in arrays.items() if k in names}, **settings)


@cache
def pallas_program(new: tuple, attends: tuple, max_parts: int | None) -> Callable:
    """Both kernels in one program; or `attention_layer`, where `max_parts` is given."""
    new, attends = ({**dict(x), "interpret": INTERPRET} for x in (new, attends))
    modules = KERNELS["pallas"]

    def program(arrays: dict) -> tuple:
        if max_parts is None or attends["tiles"].placed:
            q, kv = call_with(modules["qk_norm_rope_kv_write"].qk_norm_rope_kv_write, arrays, **new)
            arrays = arrays | {"q": q, "kv": kv}
        if max_parts is not None:
            return call_with(
                modules["attention_layer"].attention_layer,
                arrays,
                max_parts=max_parts,
                **new | attends,
            )
        arrays["gate"] = arrays["projected"] if new["gated"] else None
        return call_with(modules["attention"].attend, arrays, **attends), kv, None

    return jax.jit(program, compiler_options=AS_ROUNDED)


def run_pallas(case: MixCase, how: How = FUSED) -> Found:
    dtype = jnp.bfloat16 if case.half else jnp.float32
    arrays = {k: None if v is None else jnp.asarray(v) for k, v in arrays_of(case).items()}
    arrays |= {k: arrays[k].astype(dtype) for k in ("projected", "kv")}
    arrays["layer"] = jnp.ones(1, jnp.int32)
    if case.sinks is not None:
        arrays["sinks"] = jnp.stack([jnp.full_like(arrays["sinks"], jnp.nan), arrays["sinks"]])
        arrays["sink_layer"] = arrays["layer"]
    new, attends = given(case, how, "pallas")
    settings = (tuple(x.items()) for x in (new, attends))
    program = pallas_program(*settings, how.max_parts if how.is_fused else None)
    out, kv, arrivals = program(arrays)
    kv = np.asarray(kv, np.float32)
    return Found(np.asarray(out, np.float32), kv[1], kv[::2], arrivals)


def run_triton(case: MixCase, how: How = FUSED, given_as: Callable = torch.clone) -> Found:
    device, modules = "cuda" if ON_GPU else "cpu", KERNELS["triton"]
    # Triton's interpreter computes nonsense in bfloat16.
    dtype = (torch.bfloat16 if ON_GPU else torch.float16) if case.half else torch.float32
    own = arrays_of(case).items()
    arrays = {k: None if v is None else torch.tensor(v, device=device) for k, v in own}
    arrays |= {k: given_as(arrays[k]) for k in (*ROWS, "cos", "sin", "projected")} | {"layer": 1}
    arrays |= {k: arrays[k].to(dtype) for k in ("projected", "kv")}
    arrays["page_table"] = arrays["page_table"].long()  # as a step has it
    new, attends = given(case, how, "triton")
    is_placed = not how.is_fused or attends["tiles"].placed
    q = (
        call_with(modules["qk_norm_rope_kv_write"].qk_norm_rope_kv_write, arrays, **new)
        if is_placed
        else None
    )
    if how.is_fused:
        settings = new | attends | {"max_parts": how.max_parts, "q": q}
        out = call_with(modules["attention_layer"].attention_layer, arrays, **settings)
    else:
        gate = arrays["projected"] if case.heads.gated else None
        out = call_with(modules["attention"].attend, arrays | {"q": q, "gate": gate}, **attends)
    kv = arrays["kv"].float().cpu().numpy()
    return Found(out.float().cpu().numpy(), kv[1], kv[::2], arrays["arrivals"].cpu().numpy())
