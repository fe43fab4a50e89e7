"""Times the LM head fused with token sampling, next to both one after the other.

    python -m bench.kernels.lm_head
    python -m bench.kernels.lm_head --rows 32 512 --sides torch --temperature 0.8
    python -m bench.kernels.lm_head --widths 1 4

The head is that of Qwen3-8B, 4,096 inputs and 151,936 tokens. A line has the microseconds of GEMM
and sampling, of the fused kernel, and whether all tokens are equal, for a framework and a number of
rows. With `--widths` the best children of nodes are ranked with their weights, as drafters do, one
node per row. The exit code is 1 if tokens differ. The last line compares the tokens of both
frameworks. A GPU is warmed up until its clock settles at its power limit.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np

from shared.spec.gumbel_noise import TARGET_STREAM
from tests.support.cases.gemm.linear import product_arguments
from tests.support.cases.sampling.lm_head import greedy_arguments
from tests.support.op_case import OpCase
from tests.support.op_sides import SIDES, SUSTAINED_S, Operation, Placed, Side, rounds_for

INPUTS, TOKENS = 4096, 151_936
HEADER = f"{'side':7}{'rows':>6}{'width':>7}{'apart us':>10}{'joined us':>11}{'saved':>8}  tokens"


def apart(side: Side) -> Callable[..., Any]:
    """The product with the head, and then the choice from its scores."""
    projection = import_module(f"{side.name}_impl.ops.sampling.lm_head")
    sampling = import_module(f"{side.name}_impl.ops.sampling.sampling")

    def choose(rows: Any, *given: Any) -> Any:
        return sampling.choose(projection.scores(rows), *given, None)

    return choose


def ranked_apart(side: Side, width: int) -> Callable[..., Any]:
    """As `apart`, of the best children of nodes."""
    projection = import_module(f"{side.name}_impl.ops.sampling.lm_head")

    def rank(*given: Any) -> Any:
        return projection.rank_apart(*given, TARGET_STREAM, width, False, None)

    return rank


@cache
def head() -> Any:
    """The weight, which takes the host a while to draw."""
    return product_arguments(1, R=1, K=INPUTS, N=TOKENS)["weight"]


def arguments_of(rows: int, temperature: float, is_ranked: bool) -> dict[str, Any]:
    """Returns the arguments of `projection.joined`, or the first ones of `projection.ranked`."""
    made = greedy_arguments(0, R=rows, K=INPUTS, N=64, temperature=temperature)
    seen, positions = made["seen"], made["positions"]
    params = replace(made["params"], top_k=np.full(rows, TOKENS, np.int32))
    given = {
        "projection": replace(made["projection"], weight=head()),
        "seen": replace(seen, counts=np.zeros((2, TOKENS), np.int32)),
        "positions": positions,
        "params": params,
    }
    return given | ({"keys": positions} if is_ranked else {"request": made["request"]})


def seconds_of(side: Side, call: Callable[..., Any], placed: Placed) -> float:
    """The median of five, once the card has worked for a while."""
    timer = side.timer(Operation(call, ()), [placed])
    rounds = rounds_for(timer, 1, SUSTAINED_S) if side.is_gpu else 1
    timer(rounds)
    return statistics.median(timer(rounds) for _ in range(5))


def measure(side: Side, rows: int, temperature: float, width: int) -> tuple[np.ndarray, bool]:
    """Prints a line; the tokens, and whether what both ways give is equal."""

    def make(_: int) -> dict[str, Any]:
        return arguments_of(rows, temperature, width > 0)

    how = {"dtype": "bfloat16", "wide": ("seen", "params")}
    function = "fused_rank" if width else "fused_choose"
    case = OpCase(op="lm_head", function=function, name=f"{rows} rows", make=make, **how)
    placed, joined = side.placed(case, case.arguments(0)), side.operation(case).call
    ways = [apart(side), joined]
    if width:
        ways = [ranked_apart(side, width), lambda *x: joined(*x, TARGET_STREAM, width, None)]
    found = [side.run(Operation(way, ()), placed) for way in ways]
    is_equal = all(np.array_equal(x, y) for x, y in zip(*found, strict=True))
    before, after = (1e6 * seconds_of(side, way, placed) for way in ways)
    line = f"{side.name:7}{rows:6}{width or '':>7}{before:10.1f}{after:11.1f}{before - after:8.1f}"
    print(f"{line}  {'equal' if is_equal else 'DIFFERENT'}", flush=True)
    return found[1][0], is_equal


def options() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 128, 256, 512])
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument(
        "--widths", nargs="+", type=int, default=[0], help="children per node; 0 samples one token"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="temperature of all rows")
    return parser


def main() -> int:
    """Prints the table."""
    arguments, are_equal = options().parse_args(), True
    tokens: dict[tuple[int, int], list[np.ndarray]] = {}
    for name in (name for name in SIDES if name in arguments.sides):
        side = SIDES[name]()
        print(f"{name} on {side.device}\n{HEADER}", flush=True)
        for rows, width in product(arguments.rows, arguments.widths):
            ids, is_equal = measure(side, rows, arguments.temperature, width)
            tokens.setdefault((rows, width), []).append(ids)
            are_equal &= is_equal
            side.release()
    same = all(np.array_equal(first, x) for first, *rest in tokens.values() for x in rest)
    print(f"tokens of all sides: {'equal' if same else 'DIFFERENT'}")
    return 0 if are_equal and same else 1


if __name__ == "__main__":
    sys.exit(main())
