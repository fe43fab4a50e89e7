"""Cases of `attention.attend`, trees and prompts over scattered pages, and of `commit_window`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from shared.spec import attention as spec
from tests.support.op_case import Arguments, OpCase


@dataclass(frozen=True)
class Case:
    """One layer's pools and the rows that read them; float32 but for `half` ones."""

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    page_table: np.ndarray
    row_starts: np.ndarray
    first: np.ndarray
    until: np.ndarray
    window: np.ndarray
    max_rows: int
    half: bool

    @property
    def request(self) -> np.ndarray:
        """The request of each row; padding belongs to the first."""
        row = np.arange(len(self.q))
        found = np.searchsorted(self.row_starts[1:], row, side="right")
        return np.where(row < self.row_starts[-1], found, 0).astype(np.int32)

    @property
    def num_rows(self) -> int:
        return int(self.row_starts[-1])

    @property
    def arguments(self) -> Arguments:
        return {
            "q": self.q,
            "k_pages": self.k_pages,
            "v_pages": self.v_pages,
            "page_table": self.page_table,
            "request": self.request,
            "row_starts": self.row_starts,
            "first": self.first,
            "until": self.until,
            "window": self.window,
            "max_rows": self.max_rows,
        }


def specified(case: Case) -> np.ndarray:
    rows = (case.page_table, case.request, case.first, case.until, case.window)
    return spec.attend(case.q, case.k_pages, case.v_pages, *rows)


def tree_case(
    *,
    num_nodes: Sequence[int],
    lengths: Sequence[int],
    nodes: int = 7,
    heads: tuple[int, int] = (4, 2),
    D: int = 16,
    page: int = 16,
    columns: int = 8,
    chain: bool = False,
    draft_from: Sequence[int] | None = None,
    half: bool = False,
    seed: int = 0,
) -> Case:
    """Trees of random form over scattered pages; the last row is padding at least."""
    rng = np.random.default_rng(seed)
    B = len(lengths)
    R = B * nodes + 1
    table, k_pages, v_pages = _pools(rng, (B, columns), (page, heads[1], D))
    trees = [[0, *(n - 1 if chain else rng.integers(n) for n in range(1, nodes))] for _ in range(B)]
    rows, _ = spec.tree_rows(
        np.array(trees, np.int32), np.array(num_nodes), np.array(lengths), table, R
    )
    q = rng.standard_normal((R, heads[0], D), np.float32)
    if half:  # exact in bfloat16 and in float16, so that only the kernel rounds
        q, k_pages, v_pages = (np.round(x * 16) / 16 for x in (q, k_pages, v_pages))
    first = np.array(draft_from or [0] * B)[rows.request]
    starts = np.concatenate([[0], np.cumsum(num_nodes)])
    ints = (x.astype(np.int32) for x in (starts, first, rows.until))
    return Case(q, k_pages, v_pages, table, *ints, rows.window, nodes, half)


def prompt_case(
    *,
    chunks: Sequence[tuple[int, int]],
    heads: tuple[int, int] = (4, 2),
    D: int = 16,
    page: int = 16,
    half: bool = False,
    seed: int = 0,
) -> Case:
    """Chunks of prompts, each the first position and the end; the last row is padding."""
    rng = np.random.default_rng(seed)
    first, until = np.array(chunks).T
    starts = np.concatenate([[0], np.cumsum(until - first)])
    columns = -(-int(until.max()) // page)
    table, k_pages, v_pages = _pools(rng, (len(chunks), columns), (page, heads[1], D))
    rows = spec.causal_rows(starts, first, 0 * first, table, int(starts[-1]) + 1)
    q = rng.standard_normal((starts[-1] + 1, heads[0], D), np.float32)
    ints = (x.astype(np.int32) for x in (starts, rows.first, rows.until))
    max_rows = int((until - first).max())
    return Case(q, k_pages, v_pages, table, *ints, rows.window, max_rows, half)


def _pools(
    rng: np.random.Generator, size: tuple[int, int], row: tuple[int, int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A page table [B, columns] of scattered pages, and the keys and values in them."""
    count = size[0] * size[1]
    table = 1 + rng.permutation(count).reshape(size).astype(np.int32)
    k_pages, v_pages = rng.standard_normal((2, 1 + count, *row), np.float32)
    return table, k_pages, v_pages


SMALL: dict[str, Callable[..., Case]] = {
    "tree": partial(tree_case, num_nodes=[7, 4, 1], lengths=[30, 17, 119]),
    "nothing committed": partial(tree_case, num_nodes=[7, 1, 7], lengths=[0, 0, 64]),
    "draft KV from an offset": partial(
        tree_case, num_nodes=[5, 7, 2], lengths=[100, 90, 40], draft_from=(70, 90, 80)
    ),
    "request without rows": partial(tree_case, num_nodes=[4, 0, 2], lengths=[9, 0, 60]),
    "root alone, one position a page": partial(
        tree_case, nodes=1, num_nodes=[1, 1, 1], lengths=[1, 40, 77], page=1, columns=78
    ),
    "large pages, many splits": partial(
        tree_case, num_nodes=[7, 3, 7], lengths=[1100, 509, 512], heads=(2, 1), page=64, columns=18
    ),
    "group of five": partial(
        tree_case, num_nodes=[3, 2, 7], lengths=[20, 5, 9], heads=(10, 2), D=64
    ),
    "half precision": partial(
        tree_case,
        num_nodes=[7, 6, 5],
        lengths=[70, 530, 0],
        heads=(8, 1),
        D=64,
        page=64,
        columns=9,
        half=True,
    ),
    "chunks of prompts": partial(prompt_case, chunks=[(0, 7), (16, 37), (20, 21)]),
}
CASES = {name: make() for name, make in SMALL.items()}


def _op_case(name: str, make: Callable[..., Case]) -> OpCase:
    return OpCase(
        op="attention",
        function="attend",
        name=name,
        make=lambda seed: make(seed=seed).arguments,
        dtype="bfloat16" if CASES[name].half else "float32",
        real_rows=lambda arguments: np.arange(arguments["row_starts"][-1]),
        row_arguments=("q", "request", "first", "until", "window"),
    )


def commit_arguments(
    seed: int, *, B: int, W: int, heads: int, D: int, page: int = 4, layers: int = 2
) -> Arguments:
    """Paths down trees of 2 W nodes, some of which are chains; the last row is padding."""
    rng = np.random.default_rng(seed)
    columns = -(-(10 + 2 * W) // page)
    table = 1 + rng.permutation(B * columns).reshape(B, columns)
    below_root = [1 + np.sort(rng.permutation(2 * W - 1)[: W - 1]) for _ in range(B)]
    path = np.concatenate([np.zeros((B, 1)), np.reshape(below_root, (B, W - 1))], axis=1)
    path[1::3] = np.arange(W)
    return {
        "pages": rng.random((layers, 2, 1 + table.size, page, heads, D), np.float32),
        "page_table": np.pad(table, ((0, 1), (0, 0))).astype(np.int32),
        "lengths": np.append(rng.integers(0, 10, B), 0).astype(np.int32),
        "path": np.pad(path, ((0, 1), (0, 0))).astype(np.int32),
        "counts": np.append([W, *rng.integers(0, W + 1, B - 1)], 0).astype(np.int32),
    }


def _moved_bytes(arguments: Arguments, item_bytes: int) -> int:
    """Returns the number of bytes read and written."""
    pages, path, step = arguments["pages"], arguments["path"], np.arange(arguments["path"].shape[1])
    moves = (step < arguments["counts"][:, None]) & (path != step)
    pools = math.prod(pages.shape[:-4])
    return int(2 * item_bytes * moves.sum() * pools * math.prod(pages.shape[-2:]))


def _commit_case(B: int, W: int, heads: int, D: int, page: int, layers: int) -> OpCase:
    sizes = {"heads": heads, "D": D, "page": page, "layers": layers}
    return OpCase(
        op="attention",
        function="compact_accepted_kv",
        name=f"{B} x {W} rows of {heads} x {D}, {layers} layers",
        make=partial(commit_arguments, B=B, W=W, **sizes),
        dtype="bfloat16" if layers > 2 else "float32",
        in_place=("pages",),
        is_large=layers > 2,
        num_bytes=_moved_bytes,
    )


COMMITS = [
    _commit_case(*sizes)
    for sizes in (
        *((3, 4, 2, 16, 1, 2), (5, 6, 5, 64, 4, 1), (2, 17, 4, 128, 16, 1)),
        *((1, 6, 8, 128, 16, 36), (32, 6, 8, 128, 16, 36)),
    )
]


def image_arguments(seed: int, *, R: int, heads: int, D: int, spare: int) -> Arguments:
    """Patches of an image; its padding patches are NaN."""
    rng = np.random.default_rng(seed)
    qkv, angles = (
        rng.standard_normal((R, 3 * heads * D), np.float32),
        rng.uniform(-3, 3, (R, D // 2)),
    )
    qkv[R - spare :] = np.nan
    cos, sin = (x.astype(np.float32) for x in (np.cos(angles), np.sin(angles)))
    return {"qkv": qkv, "cos": cos, "sin": sin, "count": np.array([R - spare], np.int32)}


def _image_case(R: int, heads: int, D: int, spare: int, dtype: str, **tiles: int) -> OpCase:
    described = ""
    if tiles:
        described = f"described by {tiles['groups']}, " if tiles["described"] else "by pointers, "
    return OpCase(
        op="attention",
        function="bidirectional_attention",
        name=f"{described}{R} patches, {spare} of padding, {heads} heads of {D}",
        make=partial(image_arguments, R=R, heads=heads, D=D, spare=spare),
        dtype=dtype,
        wide=("cos", "sin"),
        is_large=dtype == "bfloat16",
        tiles=tiles,
        tiled="encoder_attention",
        real_rows=lambda arguments: np.arange(arguments["count"][0]),
        specify=lambda arguments, rows: [spec.bidirectional_attention(**arguments)[rows]],
    )


IMAGES = [
    *(_image_case(R, 2, D, 5, "float32") for R, D in ((21, 16), (140, 72))),
    *(_image_case(R, 16, 72, spare, "bfloat16") for R, spare in ((1024, 100), (4096, 0))),
    *(
        _image_case(1024, 16, 72, 100, "bfloat16", described=stages, groups=groups)
        for stages, groups in ((4, 2), (4, 3))
    ),
    _image_case(1024, 16, 72, 100, "bfloat16", described=0),
]
TABLE = [*(_op_case(name, make) for name, make in SMALL.items()), *COMMITS, *IMAGES]
