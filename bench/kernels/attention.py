"""Times attention by a Hopper's wide matrix unit beside the kernel that a table names.

    python -m bench.kernels.attention
    python -m bench.kernels.attention --sides torch --requests 32 --contexts 4096 --programs 1 4
    python -m bench.kernels.attention --prompts
    python -m bench.kernels.attention --pictures

Without `--prompts` and `--pictures`, that of verify rows. The heads are those of Qwen3-8B, 32 and 8
of 128, and each request has a tree of 16 rows, if no others are asked for. A line says, for a
framework, a number of requests and a context, the microseconds of a layer between its two products
as the table of the GPU has it, those of `mix_described` with each number of programs that share a
request, the GB/s of keys and values at the fastest, and whether all bits are equal; the exit code
is 1 where some are not. Keys and values are a few pages of random numbers that are repeated on the
device, in as many pools as a cache does not keep.

With `--prompts`, that of one prompt, of so many tokens if numbers follow, with the heads of
Qwen3-8B and those of Qwen3.5-9B, 16 and 4 of 256, if no others are asked for. A line says the
microseconds of a layer as the table has it and by `attend_described`, the TFLOP/s of the products
of attention alone at the faster, by the positions that rows see, and whether all bits are equal.
Writing keys and values is in both times, and in the rates.

With `--pictures`, that of one picture, of so many patches if numbers follow, with 16 heads of 72 as
Qwen3.5's tower has. A line says the same of `attend_all` and of `attend_all_described` with two
warpgroups and with three. Laying heads in blocks is in all times.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.kernels.aot_torch import Zeros
from tests.support.cases.attention import picture_arguments
from tests.support.cases.mix import MixCase, arguments, prompt_case, tree_case
from tests.support.op_case import OpCase
from tests.support.op_sides import ROUND_S, SIDES, Placed, Side, changed_record, rounds_for

PAGE = 64
DRAWN_PAGES, DRAWN_ROWS = 32, 2048
"""Of random numbers, which repeat in what is larger."""
ROTATED_BYTES, MOST_SETS = 200 * 2**20, 32
"""Of keys and values, and pools that have them."""
PROMPTS = (512, 2048, 8192)
MODELS = ((32, 8, 128), (16, 4, 256))
"""Heads of queries and of keys, and their size: of Qwen3-8B and of Qwen3.5-9B."""
STAGES = {64: 6, 128: 3, 256: 2}
"""Of `attend_described`, for which there is room with heads of that size."""
PICTURES = (1024, 4096, 16384)
TOWER = (16, 72)
"""Heads of Qwen3.5's tower, and their size."""
DESCRIBED_PICTURES = tuple({"described": 4, "groups": groups} for groups in (2, 3))
PROMPT_S = 0.1
"""Of a round of prompts, or of pictures."""


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


@dataclass(frozen=True)
class Prompt(Sizes):
    """A prompt, all of whose rows are those of one request."""

    @property
    def flops(self) -> int:
        """Of the products of queries with keys, and of weights with values."""
        q_heads, _, D = self.heads
        return 4 * q_heads * D * (self.rows * (self.rows + 1) // 2)


def _made(sizes: Sizes) -> MixCase:
    B, (q_heads, k_heads, D) = sizes.requests, sizes.heads
    heads = {"page": 1, "heads": (q_heads, k_heads), "D": D}
    if isinstance(sizes, Prompt):
        made = prompt_case([(0, sizes.rows)], **heads)
        table = 1 + np.arange(sizes.columns, dtype=np.int32)[None]
        return replace(made, rows=replace(made.rows, page_table=table))
    trees = [sizes.rows] * B, [sizes.context] * B
    return tree_case(*trees, nodes=sizes.rows, columns=sizes.columns, **heads)


def case_of(sizes: Sizes) -> OpCase:
    """Its pools have the pages that are drawn, and no others."""
    _, k_heads, D = sizes.heads

    def make(seed: int) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        with patch.object(np.random, "default_rng", lambda *_: Zeros(rng)):
            made = _made(sizes)
        given = arguments(made)
        rows, columns = given["qkv"].shape
        drawn = rng.standard_normal((min(rows, DRAWN_ROWS), columns), np.float32)
        given["qkv"] = np.resize(drawn, (rows, columns))
        pools = rng.standard_normal((1, 2, DRAWN_PAGES, PAGE, k_heads, D), np.float32)
        given["kv"] = replace(given["kv"], pools=pools)
        return given

    tiled = "attention" if isinstance(sizes, Prompt) else ""
    how = {"dtype": "bfloat16", "wide": ("norms", "angles"), "in_place": ("kv",), "tiled": tiled}
    return OpCase(op="mix", function="mix", name=str(sizes), make=make, **how)


def placed_sets(side: Side, case: OpCase, pages: int, count: int) -> Iterator[Placed]:
    """The arguments, with pools of so many pages each."""
    numpy = import_module({"torch": "torch", "jax": "jax.numpy"}[side.name])
    placed, (place,) = side.placed(case, case.arguments(0)), side.operation(case).in_place
    drawn = placed[place]
    for _ in range(count):
        pools = numpy.tile(drawn.pools, (1, 1, -(-pages // DRAWN_PAGES), 1, 1, 1))
        yield [*placed[:place], changed_record(drawn, pools=pools), *placed[place + 1 :]]


def timed(
    side: Side, sizes: Sizes, ways: Sequence[Mapping[str, int]], seconds: float
) -> tuple[list[float], bool]:
    """As `timed_sets`, of verify rows or a prompt."""
    case = case_of(sizes)
    # What a prompt reads once more is in the cache in its own pass too.
    is_rotated = side.is_gpu and not isinstance(sizes, Prompt)
    count = min(MOST_SETS, -(-ROTATED_BYTES // sizes.num_bytes)) if is_rotated else 1
    sets = list(placed_sets(side, case, 1 + sizes.requests * sizes.columns, count))
    return timed_sets(side, case, sets, ways, seconds)


def timed_sets(
    side: Side,
    case: OpCase,
    sets: list[Placed],
    ways: Sequence[Mapping[str, int]],
    seconds: float,
) -> tuple[list[float], bool]:
    """Microseconds of a layer with each change of tiles, and whether all bits are equal."""
    found, times = [], []
    for tiles in ways if side.is_gpu else ways[:1]:
        with side.with_tiles(case, tiles):
            operation = side.operation(case)
            found.append(side.run(operation, sets[0])[0])
            timer = side.timer(operation, sets)
            rounds = rounds_for(timer, len(sets), seconds)
            times.append(1e6 * statistics.median(timer(rounds) for _ in range(3)))
    return times, all(np.array_equal(found[0], x) for x in found)


def measure(side: Side, sizes: Sizes, programs: list[int]) -> bool:
    """Prints a line of verify rows; whether all bits are equal."""
    described = {"described": 1, "stages": 2}
    ways = [{}, *(described | {"programs": n} for n in programs)]
    times, is_equal = timed(side, sizes, ways, ROUND_S)
    rate = sizes.num_bytes / min(times) / 1e3
    line = f"{side.name:7}{sizes.requests:9}{sizes.rows:6}{sizes.context:9}" + "".join(
        f"{x:10.1f}" for x in times
    )
    print(f"{line}{rate:9.0f}  {'equal' if is_equal else 'DIFFERENT'}", flush=True)
    return is_equal


def measure_prompt(side: Side, prompt: Prompt) -> bool:
    """Prints a line of a prompt; whether all bits are equal."""
    described = {"described": STAGES[prompt.heads[2]]}
    times, is_equal = timed(side, prompt, [{}, described], PROMPT_S)
    line = f"{side.name:7}{prompt.rows:9}{'/'.join(map(str, prompt.heads)):>12}"
    line += "".join(f"{x:12.1f}" for x in times) + f"{prompt.flops / min(times) / 1e6:9.0f}"
    print(f"{line}  {'equal' if is_equal else 'DIFFERENT'}", flush=True)
    return is_equal


def measure_picture(side: Side, patches: int) -> bool:
    """Prints a line of a picture; whether all bits are equal."""
    heads, D = TOWER
    make = partial(picture_arguments, R=patches, heads=heads, D=D, spare=0)
    how = {"dtype": "bfloat16", "wide": ("cos", "sin")}
    case = OpCase(op="attention", function="attend_all", name=str(patches), make=make, **how)
    sets = [side.placed(case, case.arguments(0))]
    times, is_equal = timed_sets(side, case, sets, [{}, *DESCRIBED_PICTURES], PROMPT_S)
    flops = 4 * heads * D * patches * patches
    line = f"{side.name:7}{patches:9}" + "".join(f"{x:12.1f}" for x in times)
    line += f"{flops / min(times) / 1e6:9.0f}"
    print(f"{line}  {'equal' if is_equal else 'DIFFERENT'}", flush=True)
    return is_equal


def options() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--rows", type=int, default=16, help="of a request, up to 64")
    parser.add_argument("--heads", nargs=3, type=int, help="and their size")
    parser.add_argument("--contexts", nargs="+", type=int, default=[256, 512, 4096])
    parser.add_argument("--programs", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--prompts", nargs="*", type=int, help="tokens; no verify rows are timed")
    parser.add_argument("--pictures", nargs="*", type=int, help="patches; the same")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    return parser


def _measure_prompts(side: Side, given: argparse.Namespace) -> bool:
    shared = f"{'described':>12}" if side.is_gpu else ""
    cells = f"{'side':7}{'tokens':>9}{'heads':>12}{'table us':>12}{shared}"
    print(f"{side.name} on {side.device}\n{cells}{'TFLOP/s':>9}  bits", flush=True)
    are_equal = True
    for heads in [given.heads] if given.heads else MODELS:
        for tokens in given.prompts or PROMPTS:
            are_equal &= measure_prompt(side, Prompt(1, tokens, 0, heads))
            side.release()
    return are_equal


def _measure_pictures(side: Side, given: argparse.Namespace) -> bool:
    groups = (f"by {way['groups']}" for way in DESCRIBED_PICTURES if side.is_gpu)
    cells = f"{'side':7}{'patches':>9}{'table us':>12}" + "".join(f"{x:>12}" for x in groups)
    print(f"{side.name} on {side.device}\n{cells}{'TFLOP/s':>9}  bits", flush=True)
    are_equal = True
    for patches in given.pictures or PICTURES:
        are_equal &= measure_picture(side, patches)
        side.release()
    return are_equal


def _measure_verify_rows(side: Side, given: argparse.Namespace) -> bool:
    shared = "".join(f"{f'by {n}':>10}" for n in given.programs if side.is_gpu)
    cells = f"{'side':7}{'requests':>9}{'rows':>6}{'context':>9}{'table us':>10}{shared}"
    print(f"{side.name} on {side.device}\n{cells}{'GB/s':>9}  bits", flush=True)
    are_equal = True
    for requests in given.requests:
        for context in given.contexts:
            sizes = Sizes(requests, given.rows, context, given.heads or MODELS[0])
            are_equal &= measure(side, sizes, given.programs)
            side.release()
    return are_equal


def main() -> int:
    """Prints the table."""
    given, are_equal = options().parse_args(), True
    measure_side = _measure_verify_rows if given.prompts is None else _measure_prompts
    if given.pictures is not None:
        measure_side = _measure_pictures
    for name in (name for name in SIDES if name in given.sides):
        are_equal &= measure_side(SIDES[name](), given)
    return 0 if are_equal else 1


if __name__ == "__main__":
    sys.exit(main())
