"""Times the head of a model joined with the choice of tokens, beside both one after the other.

    python -m bench.kernels.head
    python -m bench.kernels.head --rows 32 512 --sides torch --temperature 0.8

The head is that of Qwen3-8B, 4,096 inputs and 151,936 tokens. A line says, for a framework and a
number of rows, the microseconds of the product and the choice apart, of both joined, and whether
all tokens are equal; the exit code is 1 where some are not. In the end it says whether the tokens
of both frameworks are. A GPU is warmed up until its clock is the one that its power allows.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from tests.support.cases.projection import greedy_arguments
from tests.support.op_case import OpCase
from tests.support.op_sides import SIDES, SUSTAINED_S, Operation, Placed, Side, rounds_for

INPUTS, TOKENS = 4096, 151_936
HEADER = f"{'side':7}{'rows':>6}{'apart us':>10}{'joined us':>11}{'saved':>8}  tokens"


def apart(side: Side) -> Callable[..., Any]:
    """The product with the head, and then the choice from its scores."""
    projection = import_module(f"{side.name}_impl.ops.projection")
    sampling = import_module(f"{side.name}_impl.ops.sampling")

    def choose(rows: Any, *given: Any) -> Any:
        return sampling.choose(projection.scores(rows), *given, None)

    return choose


def seconds_of(side: Side, call: Callable[..., Any], placed: Placed) -> float:
    """The median of five, once the card has worked for a while."""
    timer = side.timer(Operation(call, ()), [placed])
    rounds = rounds_for(timer, 1, SUSTAINED_S) if side.is_gpu else 1
    timer(rounds)
    return statistics.median(timer(rounds) for _ in range(5))


def measure(side: Side, rows: int, temperature: float) -> tuple[np.ndarray, bool]:
    """Prints a line; the tokens, and whether those of both ways are equal."""

    def make(seed: int) -> dict[str, Any]:
        return greedy_arguments(seed, R=rows, K=INPUTS, N=TOKENS, temperature=temperature)

    how = {"dtype": "bfloat16", "wide": ("seen", "params")}
    case = OpCase(op="projection", function="joined", name=f"{rows} rows", make=make, **how)
    placed = side.placed(case, case.arguments(0))
    ways = [apart(side), side.operation(case).call]
    found = [side.run(Operation(way, ()), placed) for way in ways]
    is_equal = all(np.array_equal(x, y) for x, y in zip(*found, strict=True))
    before, after = (1e6 * seconds_of(side, way, placed) for way in ways)
    line = f"{side.name:7}{rows:6}{before:10.1f}{after:11.1f}{before - after:8.1f}"
    print(f"{line}  {'equal' if is_equal else 'DIFFERENT'}", flush=True)
    return found[1][0], is_equal


def options() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 128, 256, 512])
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--temperature", type=float, default=0.0, help="of all rows")
    return parser


def main() -> int:
    """Prints the table."""
    arguments, are_equal = options().parse_args(), True
    tokens: dict[int, list[np.ndarray]] = {}
    for name in (name for name in SIDES if name in arguments.sides):
        side = SIDES[name]()
        print(f"{name} on {side.device}\n{HEADER}", flush=True)
        for rows in arguments.rows:
            ids, is_equal = measure(side, rows, arguments.temperature)
            tokens.setdefault(rows, []).append(ids)
            are_equal &= is_equal
            side.release()
    same = all(np.array_equal(first, x) for first, *rest in tokens.values() for x in rest)
    print(f"tokens of all sides: {'equal' if same else 'DIFFERENT'}")
    return 0 if are_equal and same else 1


if __name__ == "__main__":
    sys.exit(main())
