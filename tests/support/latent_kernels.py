"""Arguments and calls of the kernels around latent attention, in both languages."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from kernels.latent_tiles import HeadProductTiles
from shared.models.mixers import LatentAttentionConfig
from shared.models.rotary import RotaryConfig
from shared.spec.reduction_order import SQUARES
from tests.support.kernels import AS_WRITTEN, INTERPRET, KERNELS, ON_GPU
from tests.support.op_case import Arguments

EPS = 0.01
"""Large, so that a kernel without it fails."""
LAYERS, LAYER = 3, 1


class LatentSizes(NamedTuple):
    """Sizes of a layer; without `query_rank` there is no query latent."""

    heads: int
    nope: int
    rope: int
    value: int
    rank: int
    query_rank: int | None = None

    def config(self, is_interleaved: bool) -> LatentAttentionConfig:
        """Returns the config of the layer."""
        return LatentAttentionConfig(
            num_heads=self.heads,
            nope_size=self.nope,
            rope_size=self.rope,
            value_size=self.value,
            query_rank=self.query_rank,
            latent_rank=self.rank,
            has_bias=False,
            latent_eps=EPS,
            rotary=RotaryConfig(theta=1e4, width=self.rope, interleaved=is_interleaved),
            scale=1.0,
        )


ODD = LatentSizes(heads=3, nope=24, rope=8, value=20, rank=40)
EVEN = LatentSizes(heads=2, nope=48, rope=12, value=64, rank=80, query_rank=136)
GLM = LatentSizes(heads=20, nope=192, rope=64, value=256, rank=512, query_rank=768)
DEEPSEEK = LatentSizes(heads=16, nope=128, rope=64, value=128, rank=512, query_rank=1536)
"""One of eight TP ranks."""
SIZES = {"odd": ODD, "even": EVEN} | ({"GLM": GLM, "DeepSeek": DEEPSEEK} if ON_GPU else {})


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Returns normal numbers that bfloat16 can represent."""
    drawn = torch.from_numpy(rng.standard_normal(shape, np.float32))
    return drawn.bfloat16().float().numpy()


def angles_of(rng: np.random.Generator, R: int, rope: int) -> Arguments:
    angle = rng.uniform(-3, 3, (R, rope // 2))
    return {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}


def query_arguments(sizes: LatentSizes, R: int, seed: int = 0) -> Arguments:
    """Returns query heads, followed by the other columns of the projection without query latent."""
    rng, spare = np.random.default_rng(seed), 0 if sizes.query_rank else sizes.rank + sizes.rope
    columns = sizes.heads * (sizes.nope + sizes.rope) + spare
    kv_b = normal(rng, sizes.heads, sizes.nope + sizes.value, sizes.rank)
    q = normal(rng, R, columns)
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
    queries = sizes.query_rank or sizes.heads * (sizes.nope + sizes.rope)
    columns = 1 + R // 2 // page + 1
    table = 1 + rng.permutation(2 * columns).reshape(2, columns)
    row, width = np.arange(R), sizes.rank + sizes.rope
    norm = lambda size: (1 + rng.standard_normal(size) / 4).astype(np.float32)  # noqa: E731
    return {
        "projected": normal(rng, R, queries + width),
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
    program = jax.jit(partial(call, **others, interpret=INTERPRET), compiler_options=AS_WRITTEN)
    found = program(**arrays, layer=jnp.full(1, LAYER, jnp.int32))
    return [np.asarray(x.astype(jnp.float32)) for x in jax.tree.leaves(found)]


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray)
