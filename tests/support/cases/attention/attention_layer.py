"""Cases of `attention_layer.attention_layer`: a projection, the rows that it is of, and the pools
behind them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from kernels.tiles import BLOCKS
from shared.drafts.dflash_config import BlockConfig
from shared.spec import attention, attention_layer
from shared.spec.dflash import block_rows
from tests.support.op_case import Arguments, OpCase

EPS = 1e-6


@dataclass(frozen=True)
class MixCase:
    """Arguments of the operation; float32 values that bfloat16 can represent if it is `half`."""

    qkv: np.ndarray
    heads: attention_layer.Heads
    norms: attention_layer.HeadNorms | None
    angles: attention_layer.Angles
    rows: attention.AttentionRows
    row_starts: np.ndarray
    max_rows: int
    k_pages: np.ndarray
    v_pages: np.ndarray
    half: bool
    sinks: np.ndarray | None

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.heads.group(self.qkv.shape[1])

    def only(self, request: int, row: int) -> "MixCase":
        """One row of a request; keys and values of its other rows are written already."""
        flat = slice(self.row_starts[request] + row, self.row_starts[request] + row + 1)
        kept = {name: getattr(self.rows, name)[flat] for name in PER_ROW}
        kept |= {"request": np.zeros(1, np.int32)}
        rows = replace(self.rows, page_table=self.rows.page_table[request, None], **kept)
        _, k_pages, v_pages = specified(self)
        return replace(
            self,
            qkv=self.qkv[flat],
            angles=attention_layer.Angles(self.angles.cos[flat], self.angles.sin[flat]),
            rows=rows,
            row_starts=np.array([0, 1], np.int32),
            max_rows=1,
            k_pages=k_pages,
            v_pages=v_pages,
        )


@dataclass(frozen=True)
class AttentionRows(attention.AttentionRows):
    """Record with the fields of the backends' `AttentionRows`."""

    row_starts: np.ndarray
    max_rows: int


@dataclass(frozen=True)
class PagedKV:
    """Record with the fields of the backends' `PagedKV`."""

    pools: np.ndarray
    bounds: np.ndarray
    arrivals: np.ndarray
    paths: np.ndarray


def arguments(case: MixCase) -> Arguments:
    """Returns the arguments of the operation, for the specification and the backends."""
    arrivals = np.zeros((len(case.rows.page_table), case.heads.num_kv_heads * BLOCKS), np.int32)
    pools = np.stack([case.k_pages, case.v_pages])[None]
    bounds = attention_layer.row_bounds(case.rows, case.row_starts)
    return {
        "qkv": case.qkv,
        "heads": case.heads,
        "norms": case.norms,
        "angles": case.angles,
        "rows": AttentionRows(
            **vars(case.rows), row_starts=case.row_starts, max_rows=case.max_rows
        ),
        "k_pages": case.k_pages,
        "v_pages": case.v_pages,
        "kv": PagedKV(pools, bounds, arrivals, attention_layer.tree_paths(case.rows)),
        "layer": 0,
        "sinks": case.sinks,
    }


PER_ROW = ("positions", "places", "first", "until", "window", "is_real")


def specified(case: MixCase) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    given = (case.qkv, case.heads, case.norms, case.angles, case.rows)
    return attention_layer.attention_layer(*given, case.k_pages, case.v_pages, case.sinks)


def mix_case(
    rows: attention.AttentionRows,
    row_starts: Sequence[int],
    max_rows: int,
    *,
    heads: tuple[int, int] = (4, 2),
    D: int = 16,
    page: int = 16,
    turned: int | None = None,
    has_norms: bool = True,
    gated: bool = False,
    half: bool = False,
    has_kv: bool = True,
    has_sinks: bool = False,
    softcap: float | None = None,
    seed: int = 0,
) -> MixCase:
    """A case of rows; `turned` columns of each head are rotated, or all."""
    rng = np.random.default_rng(seed)
    count, (q_heads, k_heads) = rows.page_table.size, heads
    width = (q_heads * (1 + gated) + 2 * k_heads * has_kv) * D
    qkv = rng.standard_normal((len(rows.request), width), np.float32)
    k_pages, v_pages = rng.standard_normal((2, 1 + count, page, k_heads, D), np.float32)
    if half:  # exact in bfloat16 and in float16, so that only the kernel rounds
        qkv, k_pages, v_pages = (np.round(x * 16) / 16 for x in (qkv, k_pages, v_pages))
    q_norm, k_norm = (1 + rng.standard_normal((2, D), np.float32) / 4).astype(np.float32)
    angle = rows.positions[:, None] * 0.5 ** np.arange((turned or D) // 2)
    names = ("request", "positions", "places", "first", "until", "page_table")
    narrow = {name: getattr(rows, name).astype(np.int32) for name in names}
    return MixCase(
        qkv=qkv,
        # The scale is that of models with a factor.
        heads=attention_layer.Heads(k_heads, D, gated, 1.25 * D**-0.5, has_kv, softcap),
        norms=(
            attention_layer.HeadNorms(q_norm, k_norm if has_kv else None, EPS)
            if has_norms
            else None
        ),
        angles=attention_layer.Angles(*(f(angle).astype(np.float32) for f in (np.cos, np.sin))),
        rows=replace(rows, **narrow),
        row_starts=np.array(row_starts, np.int32),
        max_rows=max_rows,
        k_pages=k_pages,
        v_pages=v_pages,
        half=half,
        sinks=2 * rng.standard_normal(q_heads, np.float32) if has_sinks else None,
    )


def tree_case(
    num_nodes: Sequence[int],
    lengths: Sequence[int],
    *,
    nodes: int = 7,
    columns: int = 8,
    page: int = 16,
    draft_from: Sequence[int] | None = None,
    seed: int = 0,
    **sizes: object,
) -> MixCase:
    """Trees of random form over scattered pages; the last row is padding at least."""
    rng = np.random.default_rng(seed)
    B = len(lengths)
    trees = [[0, *(rng.integers(n) for n in range(1, nodes))] for _ in range(B)]
    given = (np.array(trees, np.int32), np.array(num_nodes), np.array(lengths))
    rows, _ = attention.tree_rows(*given, table_of(B, columns, seed), B * nodes + 1)
    rows = replace(rows, first=np.array(draft_from or [0] * B)[rows.request])
    starts = [0, *np.cumsum(num_nodes)]
    return mix_case(rows, starts, nodes, page=page, seed=seed, **sizes)


def prompt_case(
    chunks: Sequence[tuple[int, int]],
    *,
    page: int = 16,
    draft_from: Sequence[int] | None = None,
    bucket: int = 0,
    seed: int = 0,
    **sizes: object,
) -> MixCase:
    """Chunks of prompts, each the first position and the end; the last row is padding.

    Args:
      bucket: AttentionRows of the program, and most of a request, if they are more.
    """
    first, until = np.array(chunks).T
    starts = np.concatenate([[0], np.cumsum(until - first)])
    table = table_of(len(chunks), -(-int(until.max()) // page), seed)
    drafts = np.array(draft_from or 0 * first)
    num_rows, most = max(bucket, int(starts[-1]) + 1), max(bucket, int((until - first).max()))
    rows = attention.causal_rows(starts, first, drafts, table, num_rows)
    return mix_case(rows, starts, most, page=page, seed=seed, **sizes)


def block_case(
    window: int | None, is_causal: bool, lengths: Sequence[int], draft_from: Sequence[int]
) -> MixCase:
    """Blocks of a DFlash head; one that cannot draft has rows that nothing is written for."""
    block = BlockConfig(
        size=7,
        mask_id=0,
        windows=(window,),
        causal=(is_causal,),
        from_anchor=False,
        first_slot=1,
        parts=(),
    )
    table = table_of(len(lengths), 8, 0)
    (rows,) = block_rows(block, np.array(lengths), np.array(draft_from), table)
    return mix_case(rows, 7 * np.arange(len(lengths) + 1), 7)


def table_of(B: int, columns: int, seed: int) -> np.ndarray:
    """A page table of scattered pages."""
    return 1 + np.random.default_rng(seed).permutation(B * columns).reshape(B, columns)


CASES = {
    name: make()
    for name, make in {
        "trees": partial(tree_case, [7, 4, 1], [30, 17, 105]),
        "nothing committed": partial(tree_case, [7, 1, 7], [0, 0, 64]),
        "draft KV from an offset": partial(
            tree_case, [5, 7, 2], [100, 90, 40], draft_from=(70, 90, 20)
        ),
        "request without rows": partial(tree_case, [4, 0, 2], [9, 0, 60]),
        "gate, partial rotary": partial(
            tree_case, [2, 7, 3], [20, 5, 90], D=32, turned=12, gated=True
        ),
        "wide windows": partial(tree_case, [40, 3], [20, 70], nodes=40, heads=(2, 2)),
        "no norms, group of five": partial(
            tree_case, [3, 2, 5], [20, 5, 9], nodes=5, heads=(10, 2), has_norms=False
        ),
        "one position a page": partial(
            tree_case, [1, 1, 1], [1, 40, 77], nodes=1, page=1, columns=78
        ),
        "large pages, many splits": partial(
            tree_case, [3, 2, 3], [1100, 509, 512], nodes=3, heads=(2, 1), page=64, columns=18
        ),
        "half precision": partial(
            tree_case,
            [4, 3, 2],
            [70, 330, 0],
            nodes=4,
            heads=(8, 1),
            D=64,
            page=64,
            columns=6,
            half=True,
        ),
        "heads of 80, gate, partial rotary": partial(
            tree_case, [2, 7, 3], [20, 5, 90], D=80, turned=20, gated=True
        ),
        "heads of 96 in half precision": partial(
            tree_case, [4, 3, 2], [70, 100, 0], nodes=4, D=96, half=True
        ),
        **{
            f"heads of {D}, chains": partial(prompt_case, [(30, 34), (60, 67)], D=D)
            for D in (192, 512)
        },
        "chains": partial(prompt_case, [(30, 34), (16, 17), (120, 127)], draft_from=(0, 16, 100)),
        "one row a request": partial(
            prompt_case, [(30, 31), (16, 17), (120, 121)], draft_from=(0, 16, 100)
        ),
        "one row, one position a page": partial(prompt_case, [(40, 41), (76, 77)], page=1),
        "questions": partial(prompt_case, [(70, 134), (16, 17), (0, 30)], draft_from=(40, 0, 0)),
        "shared KV, trees": partial(tree_case, [7, 4, 1], [30, 17, 105], has_kv=False),
        "shared KV, gate, partial rotary": partial(
            tree_case, [2, 7, 3], [20, 5, 90], D=32, turned=12, gated=True, has_kv=False
        ),
        "shared KV, no norms, one row a request": partial(
            prompt_case, [(30, 31), (120, 121)], draft_from=(0, 100), has_norms=False, has_kv=False
        ),
        "shared KV, half precision": partial(
            tree_case, [4, 3, 2], [70, 100, 0], nodes=4, D=64, page=64, half=True, has_kv=False
        ),
        "sinks, many splits": partial(
            tree_case, [3, 2, 3], [1100, 509, 512], nodes=3, page=64, columns=18, has_sinks=True
        ),
        "sinks, one row a request": partial(prompt_case, [(0, 1), (120, 121)], has_sinks=True),
        "soft cap and sinks": partial(
            prompt_case, [(70, 134), (16, 17), (0, 30)], has_sinks=True, softcap=1.0
        ),
        "blocks": partial(block_case, None, False, [60, 109, 31], [0, 100, 31]),
        "blocks of windows": partial(block_case, 12, True, [60, 109, 31], [0, 100, 10]),
    }.items()
}

# Heads and pages of an 8B model; its values are rounded to bfloat16.
_MODEL = {"heads": (32, 8), "D": 128, "page": 64}
_HYBRID = {"heads": (16, 4), "D": 256, "page": 64, "turned": 64, "gated": True}
"""The same of Qwen3.5-9B."""


def _chains(
    requests: int, rows: int, context: int, model: dict[str, object] = _MODEL
) -> Callable[..., MixCase]:
    return partial(prompt_case, [(context, context + rows)] * requests, **model)


def _trees(requests: int, nodes: int, context: int, **model: object) -> Callable[..., MixCase]:
    sizes = {"nodes": nodes, "columns": -(-(context + nodes) // 64), **(model or _MODEL)}
    return partial(tree_case, [nodes] * requests, [context] * requests, **sizes)


_LARGE = {
    f"{B} x {N} rows after {context}": _chains(B, N, context)
    for B, N, context in (
        *((B, N, 512) for B, N in ((1, 1), (1, 4), (8, 1), (8, 4), (32, 1), (32, 4))),
        *((B, N, 512) for N in (8, 16) for B in (1, 8, 32)),
        *((B, 1, context) for context in (4096, 32768) for B in (1, 8)),
    )
}
_LARGE |= {
    f"hybrid, {B} x {N} rows after 512": _chains(B, N, 512, _HYBRID)
    for N in (1, 4, 16)
    for B in (1, 8, 32)
}
_LARGE |= {
    f"{name}{B} x {rows} rows after {context}": _chains(B, rows, context, model)
    for name, model in (("", _MODEL), ("hybrid, ", _HYBRID))
    for B, rows, context in ((1, 64, 4096), (8, 64, 512))
}
_LARGE |= {
    f"{name}4 of 64 rows after 4096": partial(prompt_case, [(4096, 4100)], bucket=64, **model)
    for name, model in (("", _MODEL), ("hybrid, ", _HYBRID))
}
"""The end of a prompt with a cached prefix."""
_LARGE |= {f"{B} x {N} nodes after 512": _trees(B, N, 512) for N in (64, 16) for B in (1, 32)}
_LARGE |= {f"1 x {N} nodes after {at}": _trees(1, N, at) for N in (32, 64) for at in (512, 840)}
_LARGE["hybrid, 1 x 64 nodes after 512"] = _trees(1, 64, 512, **_HYBRID)
_LARGE |= {
    f"{name}prompt of {rows}": partial(prompt_case, [(0, rows)], **model)
    for name, model in (("", _MODEL), ("hybrid, ", _HYBRID))
    for rows in (64, 512, 2048)
}
_LARGE |= {
    f"heads of {D}, {name}": _chains(B, rows, 512, _MODEL | {"D": D})
    for D in (64, 80, 96, 192, 512)
    for name, B, rows in (("8 x 4 rows after 512", 8, 4), ("prompt of 512", 1, 512))
}
_LARGE |= {
    "shared KV, 8 x 4 rows after 512": _chains(8, 4, 512, _MODEL | {"has_kv": False}),
    "shared KV, hybrid, 8 x 4 rows after 512": _chains(8, 4, 512, _HYBRID | {"has_kv": False}),
    "shared KV, prompt of 512": partial(prompt_case, [(0, 512)], **_MODEL, has_kv=False),
}

_OSS = {"heads": (64, 8), "D": 64, "page": 64, "has_norms": False, "has_sinks": True}
_CAPPED = {"heads": (8, 4), "D": 256, "page": 64, "has_norms": False, "softcap": 50.0}
_LARGE |= {
    f"{name}, {B} x {rows} rows after {context}": _chains(B, rows, context, model)
    for name, model in (("sinks", _OSS), ("soft cap", _CAPPED))
    for B, rows, context in ((8, 4, 512), (1, 1, 4096), (1, 512, 0))
}

_ONE_GROUP = _HYBRID | {"heads": (8, 1)}
"""The lines of its projection are no multiple of a copy's."""

_DESCRIBED = {
    "8 x 16 rows after 4096": _chains(8, 16, 4096),
    "8 x 64 rows after 512": _LARGE["8 x 64 rows after 512"],
    "hybrid, 32 x 16 rows after 512": _LARGE["hybrid, 32 x 16 rows after 512"],
    "hybrid, one group, 32 x 16 rows": _chains(32, 16, 512, _ONE_GROUP),
    "heads of 64, 8 x 4 rows after 512": _LARGE["heads of 64, 8 x 4 rows after 512"],
}
"""For the sm90 attention layer, independent of the tile files."""

_PROMPTS = {
    "prompt of 2048": (_LARGE["prompt of 2048"], 3),
    "hybrid, prompt of 2048": (_LARGE["hybrid, prompt of 2048"], 2),
    "hybrid, one group, prompt of 2048": (partial(prompt_case, [(0, 2048)], **_ONE_GROUP), 2),
    "heads of 64, prompt of 512": (_LARGE["heads of 64, prompt of 512"], 6),
    "sinks, prompt of 512": (_LARGE["sinks, 1 x 512 rows after 0"], 6),
}
"""For the sm90 attention, independent of the tile files, with the stages that fit."""
_SEPARATE = {"placed": 1, "context_lanes": 32, "tree_rows": 2, "path_rows": 2, "programs": 4}


def specified_rows(arguments: Arguments, chosen: np.ndarray) -> list[np.ndarray]:
    """Returns the specification's results for some rows, after all rows have written."""
    heads, angles, rows = (arguments[name] for name in ("heads", "angles", "rows"))
    pools = (arguments["k_pages"], arguments["v_pages"])
    if heads.has_kv:
        keys = arguments["qkv"][:, -2 * heads.key_columns :]
        pools = attention_layer.write_kv(keys, heads, arguments["norms"], angles, rows, *pools)
    kept = {name: getattr(rows, name)[chosen] for name in ("request", *PER_ROW)}
    angles = attention_layer.Angles(angles.cos[chosen], angles.sin[chosen])
    some = (arguments["qkv"][chosen], heads, arguments["norms"], angles, replace(rows, **kept))
    return [attention_layer.attention_layer(*some, *pools, arguments["sinks"])[0]]


def _bytes(arguments: Arguments, item_bytes: int) -> int:
    """Keys and values that any row of a request can see, once; the projection, the output, and
    the new keys and values."""
    rows, heads, width = arguments["rows"], arguments["heads"], arguments["qkv"].shape[1]
    positions, nodes = 0, rows.window.shape[1]
    for start, stop in pairwise(rows.row_starts):
        if start < stop:
            low = int(rows.first[start:stop].min())
            positions += max(0, int(rows.until[start:stop].max()) + nodes - low)
    pair = 2 * heads.num_kv_heads * heads.head_size
    return item_bytes * (positions * pair + 2 * int(rows.row_starts[-1]) * width)


def _op_case(
    name: str,
    make: Callable[..., MixCase],
    dtype: str,
    is_large: bool,
    tiled: str = "",
    **tiles: int,
) -> OpCase:
    return OpCase(
        op="attention_layer",
        function="attention_layer",
        name=name,
        make=lambda seed: arguments(make(seed=seed)),
        dtype=dtype,
        wide=("norms", "angles"),
        in_place=("kv",),
        is_large=is_large,
        tiles=tiles,
        tiled=tiled,
        real_rows=lambda arguments: np.arange(arguments["rows"].row_starts[-1]),
        specify=specified_rows,
        num_bytes=_bytes,
    )


TABLE = [
    _op_case("two trees", partial(tree_case, [7, 4], [30, 17]), "float32", False),
    _op_case("chunks of prompts", partial(prompt_case, [(0, 7), (16, 37)]), "float32", False),
    *(_op_case(name, make, "bfloat16", True) for name, make in _LARGE.items()),
    *(
        _op_case(f"described, {name}", make, "bfloat16", True, described=1, stages=2)
        for name, make in _DESCRIBED.items()
    ),
    *(
        _op_case(f"described, {name}", make, "bfloat16", True, "attention", described=stages)
        for name, (make, stages) in _PROMPTS.items()
    ),
    _op_case("separate, 1 x 64 nodes after 840", _trees(1, 64, 840), "bfloat16", True, **_SEPARATE),
]
