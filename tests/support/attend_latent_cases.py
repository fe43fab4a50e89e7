"""Cases of `latent_attention.attend_latent`: trees, chains and prompts over scattered pages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from shared.spec import latent_attention as spec
from tests.support.cases.attention.attention import Case, prompt_case, tree_case
from tests.support.cases.attention.attention_layer import AttentionRows
from tests.support.op_case import Arguments, OpCase


@dataclass(frozen=True)
class AttendCase:
    """Rows and pools as of attention with one KV head, of which only the keys are used.

    Attributes:
      rows: Rows, and the pool of the layer.
      rank: Columns of the latent.
      scale: Multiplier of the scores.
    """

    rows: Case
    rank: int
    scale: float

    @property
    def attention_rows(self) -> AttentionRows:
        """Rows of the operation; attention does not read their positions."""
        rows = self.rows
        real = np.arange(len(rows.q)) < rows.num_rows
        names = ("request", "first", "until", "window", "page_table", "row_starts", "max_rows")
        given = {name: getattr(rows, name) for name in names}
        return AttentionRows(positions=rows.until, places=rows.until, is_real=real, **given)

    @property
    def arguments(self) -> Arguments:
        pages = self.rows.k_pages
        return {
            "q": self.rows.q,
            "pool": pages[None, None],
            "layer": 0,
            "rows": self.attention_rows,
            "scale": self.scale,
            "rank": self.rank,
            "pages": pages,
        }


def specified(case: AttendCase) -> np.ndarray:
    pages, rows = case.rows.k_pages, case.attention_rows
    return spec.attend_latent(case.rows.q, pages, rows, case.scale, case.rank)


def attend_case(
    make: Callable[..., Case], heads: int, sizes: tuple[int, int], seed: int = 0, **how: object
) -> AttendCase:
    """Returns rows over latent pools; `sizes` are the columns of the latent and of the rope key."""
    rows = make(heads=(heads, 1), D=sum(sizes), seed=seed, **how)
    return AttendCase(rows, sizes[0], sum(sizes) ** -0.5)


SMALL: dict[str, Callable[..., AttendCase]] = {
    "tree": partial(
        attend_case, tree_case, 4, (32, 16), num_nodes=[7, 4, 1], lengths=[30, 17, 119]
    ),
    "tiny rope": partial(
        attend_case, tree_case, 2, (16, 8), num_nodes=[7, 1, 7], lengths=[0, 0, 64]
    ),
    "padded latent": partial(
        attend_case, tree_case, 3, (80, 24), num_nodes=[3, 2, 7], lengths=[20, 5, 9]
    ),
    "draft KV from an offset": partial(
        attend_case,
        tree_case,
        4,
        (32, 16),
        num_nodes=[5, 7, 2],
        lengths=[100, 90, 40],
        draft_from=(70, 90, 80),
    ),
    "request without rows": partial(
        attend_case, tree_case, 4, (32, 16), num_nodes=[4, 0, 2], lengths=[9, 0, 60]
    ),
    "root alone, one position a page": partial(
        attend_case,
        tree_case,
        5,
        (32, 16),
        nodes=1,
        num_nodes=[1, 1, 1],
        lengths=[1, 40, 77],
        page=1,
        columns=78,
    ),
    "large pages, many splits": partial(
        attend_case,
        tree_case,
        2,
        (256, 64),
        num_nodes=[7, 3, 7],
        lengths=[1100, 509, 512],
        page=64,
        columns=18,
    ),
    "half precision": partial(
        attend_case,
        tree_case,
        5,
        (512, 64),
        num_nodes=[7, 6, 5],
        lengths=[70, 530, 0],
        page=64,
        columns=9,
        half=True,
    ),
    "chunks of prompts": partial(
        attend_case, prompt_case, 4, (32, 16), chunks=[(0, 7), (16, 37), (20, 21)]
    ),
}
CASES = {name: make() for name, make in SMALL.items()}


def _latent_bytes(arguments: Arguments, item_bytes: int) -> int:
    """Returns the bytes of the latent rows that any row attends to, of queries and of outputs."""
    q, rows = arguments["q"], arguments["rows"]
    starts, until, window = rows.row_starts, rows.until, rows.window.shape[1]
    size, rank = q.shape[2], arguments["rank"]
    ends = [until[begin:end].max(initial=0) for begin, end in pairwise(starts)]
    read = sum(ends) + (len(ends) * window)
    return int(item_bytes * (read * size + starts[-1] * q.shape[1] * (size + rank)))


def _specified(arguments: Arguments, rows: np.ndarray) -> list[np.ndarray]:
    """Returns the results of some rows, one by one: the pools of all would take gigabytes."""
    found, of_all = [], arguments["rows"]
    names = ("request", "positions", "places", "first", "until", "window", "is_real")
    for row in rows:
        own = replace(of_all, **{name: getattr(of_all, name)[[row]] for name in names})
        q, pages = arguments["q"][[row]], arguments["pages"]
        found.append(spec.attend_latent(q, pages, own, arguments["scale"], arguments["rank"]))
    return [np.concatenate(found)]


def _op_case(name: str, make: Callable[..., AttendCase], dtype: str, is_large: bool) -> OpCase:
    return OpCase(
        op="latent_attention",
        function="attend_latent",
        name=name,
        make=lambda seed: make(seed=seed).arguments,
        dtype=dtype,
        is_large=is_large,
        real_rows=lambda arguments: np.arange(arguments["rows"].row_starts[-1]),
        specify=_specified,
        num_bytes=_latent_bytes,
    )


def _chains(B: int, rows: int, length: int, heads: int) -> Callable[..., AttendCase]:
    """Verify rows of some requests, each after `length` positions; with 1 row plain decoding."""
    return _prompt([(length, length + rows)] * B, heads)


def _trees(B: int, nodes: int, length: int, heads: int) -> Callable[..., AttendCase]:
    return partial(
        attend_case,
        tree_case,
        heads,
        (512, 64),
        nodes=nodes,
        num_nodes=[nodes] * B,
        lengths=[length] * B,
        page=64,
        columns=-(-(length + nodes) // 64),
    )


def _prompt(chunks: Sequence[tuple[int, int]], heads: int) -> Callable[..., AttendCase]:
    return partial(attend_case, prompt_case, heads, (512, 64), chunks=chunks, page=64)


LARGE = {
    **{
        f"{heads} heads, {B} x {rows} rows after {length}": _chains(B, rows, length, heads)
        for heads, B, rows, length in (
            (20, 1, 1, 512),
            (20, 1, 1, 4096),
            (20, 1, 1, 32768),
            (20, 1, 1, 131072),
            (20, 1, 4, 4096),
            (20, 1, 4, 131072),
            (20, 8, 1, 4096),
            (20, 8, 4, 4096),
            (20, 8, 1, 16384),
            (20, 32, 1, 512),
            (20, 32, 1, 4096),
            (20, 32, 4, 512),
            (10, 1, 1, 4096),
            (128, 1, 1, 4096),
            (128, 1, 1, 131072),
            (128, 8, 1, 4096),
            (128, 32, 4, 512),
        )
    },
    "20 heads, 1 x 8 nodes after 4096": _trees(1, 8, 4096, 20),
    "20 heads, 8 x 16 nodes after 4096": _trees(8, 16, 4096, 20),
    "20 heads, prompt of 2048": _prompt([(0, 2048)], 20),
    "20 heads, chunk of 2048 after 6144": _prompt([(6144, 8192)], 20),
    "128 heads, prompt of 512": _prompt([(0, 512)], 128),
}
TABLE = [
    *(
        _op_case(name, make, "bfloat16" if CASES[name].rows.half else "float32", False)
        for name, make in SMALL.items()
    ),
    *(_op_case(name, make, "bfloat16", True) for name, make in LARGE.items()),
]
