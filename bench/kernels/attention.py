"""Times the attention of verify rows by 64 pairs a program beside the kernel that a table names.

    python -m bench.kernels.attention
    python -m bench.kernels.attention --sides torch --requests 32 --contexts 4096 --programs 1 4

The heads are those of Qwen3-8B, 32 and 8 of 128, and each request has a tree of 16 rows, if no
others are asked for. A line says, for a framework, a number of requests and a context, the
microseconds of a layer between its two products as the table of the GPU has it, those of
`mix_described` with each number of programs that share a request, the GB/s of keys and values at
the fastest, and whether all bits are equal; the exit code is 1 where some are not. Keys and values
are a few pages of random numbers that are repeated on the device, in as many pools as a cache does
not keep.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.kernels.aot_torch import Zeros
from tests.support.cases.mix import arguments, tree_case
from tests.support.op_case import OpCase
from tests.support.op_sides import SIDES, Placed, Side, rounds_for

PAGE = 64
DRAWN_PAGES = 32
ROTATED_BYTES, MOST_SETS = 200 * 2**20, 32
"""Of keys and values, and pools that have them."""


@dataclass(frozen=True)
class Sizes:
    """Requests, the rows of each, positions before them, and heads: of queries, of keys, a size."""

    requests: int
    rows: int
    context: int
    heads: tuple[int, int, int]

    @property
    def columns(self) -> int:
        """Pages of a request."""
        return -(-(self.context + self.rows) // PAGE)

    @property
    def num_bytes(self) -> int:
        """Of keys and values that rows see."""
        _, k_heads, D = self.heads
        return 2 * 2 * self.requests * (self.context + self.rows) * k_heads * D


def case_of(sizes: Sizes) -> OpCase:
    """Its pools have the pages that are drawn, and no others."""
    B, (q_heads, k_heads, D) = sizes.requests, sizes.heads

    def make(seed: int) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        with patch.object(np.random, "default_rng", lambda *_: Zeros(rng)):
            made = tree_case(
                [sizes.rows] * B,
                [sizes.context] * B,
                nodes=sizes.rows,
                columns=sizes.columns,
                page=1,
                heads=(q_heads, k_heads),
                D=D,
            )
        given = arguments(made)
        given["qkv"] = rng.standard_normal(given["qkv"].shape, np.float32)
        pools = rng.standard_normal((1, 2, DRAWN_PAGES, PAGE, k_heads, D), np.float32)
        given["kv"] = replace(given["kv"], pools=pools)
        return given

    how = {"dtype": "bfloat16", "wide": ("norms", "angles"), "in_place": ("kv",)}
    return OpCase(op="mix", function="mix", name=str(sizes), make=make, **how)


def placed_sets(side: Side, case: OpCase, pages: int, count: int) -> Iterator[Placed]:
    """The arguments, with pools of so many pages each."""
    numpy = import_module({"torch": "torch", "jax": "jax.numpy"}[side.name])
    placed, (place,) = side.placed(case, case.arguments(0)), side.operation(case).in_place
    drawn = placed[place]
    for _ in range(count):
        pools = numpy.tile(drawn.pools, (1, 1, -(-pages // DRAWN_PAGES), 1, 1, 1))
        yield [*placed[:place], with_pools(drawn, pools), *placed[place + 1 :]]


def with_pools(kv: Any, pools: Any) -> Any:
    """A record of one framework or the other, with other pools."""
    return kv._replace(pools=pools) if hasattr(kv, "_replace") else replace(kv, pools=pools)


def measure(side: Side, sizes: Sizes, programs: list[int]) -> bool:
    """Prints a line; whether all bits are equal."""
    case, num_bytes = case_of(sizes), sizes.num_bytes
    count = min(MOST_SETS, -(-ROTATED_BYTES // num_bytes)) if side.is_gpu else 1
    sets = list(placed_sets(side, case, 1 + sizes.requests * sizes.columns, count))
    described = {"described": 1, "stages": 2}
    ways = [{}, *(described | {"programs": n} for n in programs)]
    found, times = [], []
    for tiles in ways if side.is_gpu else ways[:1]:
        with side.with_tiles(case, tiles):
            operation = side.operation(case)
            found.append(side.run(operation, sets[0])[0])
            timer = side.timer(operation, sets)
            rounds = rounds_for(timer, count)
            times.append(1e6 * statistics.median(timer(rounds) for _ in range(5)))
    is_equal = all(np.array_equal(found[0], x) for x in found)
    rate = num_bytes / min(times) / 1e3
    line = f"{side.name:7}{sizes.requests:9}{sizes.rows:6}{sizes.context:9}" + "".join(
        f"{x:10.1f}" for x in times
    )
    print(f"{line}{rate:9.0f}  {'equal' if is_equal else 'DIFFERENT'}", flush=True)
    return is_equal


def options() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--rows", type=int, default=16, help="of a request, up to 64")
    parser.add_argument("--heads", nargs=3, type=int, default=(32, 8, 128), help="and their size")
    parser.add_argument("--contexts", nargs="+", type=int, default=[256, 512, 4096])
    parser.add_argument("--programs", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    return parser


def main() -> int:
    """Prints the table."""
    given, are_equal = options().parse_args(), True
    for name in (name for name in SIDES if name in given.sides):
        side = SIDES[name]()
        shared = "".join(f"{f'by {n}':>10}" for n in given.programs if side.is_gpu)
        cells = f"{'side':7}{'requests':>9}{'rows':>6}{'context':>9}{'table us':>10}{shared}"
        print(f"{name} on {side.device}\n{cells}{'GB/s':>9}  bits", flush=True)
        for requests in given.requests:
            for context in given.contexts:
                sizes = Sizes(requests, given.rows, context, tuple(given.heads))
                are_equal &= measure(side, sizes, given.programs)
                side.release()
    return 0 if are_equal else 1


if __name__ == "__main__":
    sys.exit(main())
