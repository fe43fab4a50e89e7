"""Cases of `attention.attend`: trees and prompts over scattered pages."""

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
        """Rows that are no padding."""
        return int(self.row_starts[-1])

    @property
    def arguments(self) -> Arguments:
        """Of the operation."""
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
            "most_rows": self.max_rows,
        }


def specified(case: Case) -> np.ndarray:
    """What the specification gives."""
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
    most_rows = int((until - first).max())
    return Case(q, k_pages, v_pages, table, *ints, rows.window, most_rows, half)


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
    "whole draft KV later": partial(
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


TABLE = [_op_case(name, make) for name, make in SMALL.items()]
