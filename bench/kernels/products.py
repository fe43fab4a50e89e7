"""Times the products of a layer with the tiles of the GPU's file beside others, at 64 to 512 rows.

    python -m bench.kernels.products
    python -m bench.kernels.products --sides jax --rows 128 --seconds 60
    python -m bench.kernels.products --lines head
    python -m bench.kernels.products --sides jax --rows 40 96

The layer is one of Qwen3-8B, with the norms, the gate and the sums that stand around its products.
A line says, for a framework, a number of rows, a product and tiles, the microseconds of one product
over weights that rotate, once the card has worked for a while; its clock and power meanwhile; and
whether all that it leaves has the bits of today's tiles, and its rows those of the other framework.
The exit code is 1 where something has not. In the end stand the lines of a table (`kernels/gpus`)
that are faster than today's; each goes before the line that takes its products now.
"""

import argparse
import inspect
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np

from bench.ground.card import HEADER as CARD_HEADER
from bench.ground.card import told_card, watched
from tests.support.cases.linear import (
    added_arguments,
    gated_arguments,
    normed_arguments,
    product_arguments,
)
from tests.support.op_case import OpCase
from tests.support.op_sides import SIDES, Placed, Side, changed_record

PRODUCTS = {
    "qkv": ("normed_product", normed_arguments, 4096, 6144),
    "o": ("added_product", added_arguments, 4096, 4096),
    "down": ("added_product", added_arguments, 12288, 4096),
    "gate and up": ("gated_product", gated_arguments, 4096, 12288),
    "head": ("product_float32", product_arguments, 4096, 151_936),
}
"""The operation of each, its arguments, inputs and outputs."""
LINES = {
    "o, down": {"outputs": 4096, "gated": 0},
    "qkv": {"outputs": 6144, "gated": 0},
    "gate and up": {"outputs": 12288},
    "head": {"gated": 0},
}
"""Products that share a line of a table, and its bounds beside that of the rows: more
outputs may fill a GPU better in other tiles."""
ROWS = (512, 128, 256, 64)
"""What lines of a table bound, in the order in which they are timed."""
ROTATED_BYTES = 90 * 2**20
"""Of weights that are taken in turn: more than a cache keeps."""
DURATIONS = 0.15, 0.04
"""Seconds that a card works before it is timed, and of each of two times, or longer."""
MOST_BYTES_A_SECOND = 5e12
"""Of a card's memory, by which rounds are counted: in JAX to time a round takes a second."""
UNTOLD = ("swapped", "described", "widens")
LEAST_GAIN = 0.01
HEADER = f"{'side':7}{'rows':>5}  {'product':13}{'us':>7}{CARD_HEADER}  {'bits':7}tiles"

Tiles = dict[str, int]


def _tiles(rows: int, columns: int, depth: int, stages: int) -> Tiles:
    """Tiles that descriptors copy, with four warps for 64 rows."""
    how = {"rows": rows, "columns": columns, "depth": depth, "swapped": False, "described": True}
    return how | {"persistent": True, "widens": True, "warps": rows // 16, "stages": stages}


TRIED: dict[str, dict[tuple[int, str], list[Tiles]]] = {
    "torch": {
        (64, "gate and up"): [_tiles(64, 96, 64, 6)],
        (128, "gate and up"): [_tiles(64, 96, 64, 6), _tiles(128, 96, 64, 5)],
        (256, "gate and up"): [_tiles(128, 96, 64, 5), _tiles(64, 96, 64, 6)],
        (512, "qkv"): [_tiles(128, 192, 64, 4)],
        (256, "head"): [_tiles(128, 256, 64, 3) | {"persistent": False}],
    },
    "jax": {
        (64, "qkv"): [_tiles(64, 64, 128, 6)],
        (64, "o, down"): [_tiles(64, 64, 128, 6)],
        (64, "gate and up"): [_tiles(64, 96, 64, 6)],
        (128, "qkv"): [_tiles(64, 128, 128, 4), _tiles(128, 64, 64, 6)],
        (128, "o, down"): [_tiles(64, 64, 128, 6)],
        (128, "gate and up"): [_tiles(64, 96, 64, 6)],
        (256, "qkv"): [_tiles(128, 128, 64, 6)],
        (256, "o, down"): [_tiles(128, 64, 64, 8)],
        (256, "gate and up"): [_tiles(128, 96, 64, 5)],
        (512, "qkv"): [_tiles(128, 192, 64, 4)],
        (64, "head"): [_tiles(64, 128, 128, 4), _tiles(64, 256, 64, 4)],
        (128, "head"): [_tiles(128, 128, 64, 6), _tiles(128, 256, 64, 4)],
        (256, "head"): [_tiles(128, 256, 64, 4)],
    },
}
"""By the most rows and the products of a line."""


class Product:
    """A product of a framework, and what it is given, on its device.

    Attributes:
      name: In `PRODUCTS`.
      case: It, with the most rows.
    """

    def __init__(self, side: Side, name: str, most_rows: int) -> None:
        function, make, K, N = PRODUCTS[name]
        self.name, self._side = name, side
        self.case = OpCase(
            op="linear",
            function=function,
            name=name,
            make=lambda seed: make(seed, R=most_rows, K=K, N=N),
            dtype="bfloat16",
        )
        made = self.case.arguments(0)
        names = inspect.signature(side.operation(self.case).call).parameters
        placed = zip((x for x in names if x in made), side.placed(self.case, made), strict=True)
        self._placed = dict(placed)
        weight = self._placed["weight"]
        copies = range(1, -(-ROTATED_BYTES // (2 * N * K)) if side.is_gpu else 1)
        # A sum, as a copy can be the same memory.
        self._weights = [
            weight,
            *(changed_record(weight, values=weight.values + 0 * i) for i in copies),
        ]
        self._stream = import_module(f"{side.name}_impl.ops.linear").stream

    def sets_of(self, rows: int) -> list[Placed]:
        """The arguments for some rows with each weight, as kernels have left them."""
        given = dict(self._placed)
        if "x" in given:  # a stream is what is added to
            given["x"] = given["x"][:rows]
        if "x" in given and "stream" in given:
            given["stream"] = self._stream(given["stream"].rows[:rows])
        elif "stream" in given:
            given["stream"] = self._stream(given["stream"].rows[:rows], given["stream"].norm)
        return [list((given | {"weight": weight}).values()) for weight in self._weights]


@dataclass
class Report:
    """What is found, printed as it comes.

    Attributes:
      first: The results that others are compared with, by rows and product, and by side too.
      are_equal: Whether all bits are.
    """

    first: dict[tuple[Any, ...], list[np.ndarray]] = field(default_factory=dict)
    are_equal: bool = True

    def measure(self, side: Side, product: Product, rows: int, tiles: Tiles) -> float:
        """Times a product, looks at its bits, and prints a line; microseconds."""
        sets, name = product.sets_of(rows), product.name
        with side.with_tiles(product.case, tiles):
            operation = side.operation(product.case)
            found = side.run(operation, sets[0])
            timer = side.timer(operation, sets)
            _, _, K, N = PRODUCTS[name]
            once = len(sets) * 2 * N * K / MOST_BYTES_A_SECOND
            hold, take = (max(1, round(s / once)) if side.is_gpu else 1 for s in DURATIONS)
            with watched(side.is_gpu) as card:
                timer(hold)
                us = 1e6 * statistics.mean(timer(take) for _ in range(2))
        today = self.first.setdefault((rows, name, side.name), found)
        other = self.first.setdefault((rows, name), found)
        is_equal = np.array_equal(other[0], found[0])
        is_equal &= all(np.array_equal(x, y) for x, y in zip(today, found, strict=True))
        self.are_equal &= is_equal
        told = " ".join(f"{k} {int(v)}" for k, v in tiles.items() if k not in UNTOLD)
        line = f"{side.name:7}{rows:5}  {name:13}{us:7.1f}{told_card(card)}"
        print(f"{line}  {'equal' if is_equal else 'OTHER':7}{told or 'today'}", flush=True)
        return us


def told_line(rows: int, line: str, tiles: Tiles) -> str:
    """As a table has it."""
    return json.dumps({"at_most": {"rows": rows, **LINES[line]}} | tiles)


def run(side: Side, cuts: list[tuple[int, str]], until: float, report: Report) -> list[str]:
    """Times what is tried with a framework, by rows and line; what is to be said in the end."""
    made = cache(partial(Product, side, most_rows=max(rows for rows, _ in cuts)))
    said = []
    for count, line in cuts:
        bound = min((most for most in ROWS if most >= count), default=count)
        tried = TRIED[side.name].get((bound, line), []) if side.is_gpu else []
        us: dict[str, float] = {}
        for tiles in [{}, *tried] if tried or not side.is_gpu else []:
            if time.monotonic() > until:
                said.append(f"left out: {side.name}, {count} rows, {line}, {tiles or 'today'}")
                continue
            names = line.split(", ")
            us[json.dumps(tiles)] = sum(
                report.measure(side, made(name), count, tiles) for name in names
            )
        best = min(us, key=us.__getitem__, default="{}")
        if best != "{}" and "{}" in us and us[best] < (1 - LEAST_GAIN) * us["{}"]:
            told = f"{side.name}, {count} rows, {line}: {us['{}']:.1f} us become {us[best]:.1f}"
            said.append(f"{told}\n   {told_line(bound, line, json.loads(best))},")
    return said


def options() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    layer = [line for line in LINES if line != "head"]
    parser.add_argument("--lines", nargs="+", choices=list(LINES), default=layer)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--seconds", type=float, default=110, help="begin nothing after that long")
    return parser


def main() -> int:
    """Prints the table, and what it says."""
    given, report, said = options().parse_args(), Report(), []
    until = time.monotonic() + given.seconds
    for name in (name for name in SIDES if name in given.sides):
        side = SIDES[name]()
        print(f"{name} on {side.device}\n{HEADER}", flush=True)
        said += run(side, list(product(given.rows, given.lines)), until, report)
        side.release()
    print("\n".join(said))
    print("all bits are equal" if report.are_equal else "bits DIFFER")
    return 0 if report.are_equal else 1


if __name__ == "__main__":
    sys.exit(main())
