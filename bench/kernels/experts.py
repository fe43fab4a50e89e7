"""Times a block of experts and its kernels alone, in both languages.

    python -m bench.kernels.experts --out bench/results/experts.json
    python -m bench.kernels.experts --shapes "256 of 512" --weights fp8 --rows 1 8 \
        --tiles '{}' '{"columns": 32}'

Rows are random, so that they choose experts as unlike each other as can be; weights are those of
several layers in turn, more than a cache holds. Beside the time of a block stands the bytes' limit:
the weights of the experts that are chosen, at the rate of a large copy. A line also says whether
the languages have the same bits, and whether the first row has those that it has alone. With
`--tiles` the fields of a GPU's file are replaced. Each line is printed, and the file written, as
soon as it is known; a part that fails is a line too. Without a GPU, small blocks are interpreted,
Triton's with TRITON_INTERPRET=1: that shows that the program runs, and times nothing.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.limits import arrivals_of_experts
from kernels.routing import Routing
from kernels.tiles import MEASURED, ExpertsTiles, Tiles
from shared.models.fp8_words import FP8_BLOCK, SCALE_FACTOR
from shared.spec.numerics import ROUTER, SQUARES
from tests.support.gpu_activity import traced
from tests.support.op_sides import ROUND_S, SIDES, Side

LAYERS = 4
"""Whose weights are taken in turn."""
CALLS = 16
"""In one graph or program, each of rows of its own."""
LANGUAGES = {"torch": "triton_gpu", "jax": "pallas_gpu"}
EPS = 1e-6
ROWS = (1, 4, 8, 32, 128, 512)


@dataclass(frozen=True)
class Shape:
    """A block of experts: those with the shared one are Qwen3.5's, the others Qwen3's."""

    hidden: int
    inner: int
    routing: Routing


def _routing(experts: int, top: int, is_shared: bool) -> Routing:
    return Routing(
        experts=experts,
        top=top,
        groups=1,
        top_groups=1,
        is_sigmoid=False,
        is_renormalised=True,
        factor=1.0,
        is_shared=is_shared,
        is_gated=is_shared,
    )


SHAPES = {
    "256 of 512": Shape(2048, 512, _routing(256, 8, True)),
    "128 of 768": Shape(2048, 768, _routing(128, 8, False)),
}
SMALL = {"6 of 128": Shape(128, 128, _routing(6, 2, True))}


class Block:
    """Weights of some layers in torch, on the device.

    Attributes:
      shape: Of the block.
      item_bytes: Of a number of the experts' weights.
      weights: By the names of `experts.experts`, each a stack of layers; scales only of FP8.
    """

    def __init__(self, shape: Shape, is_fp8: bool, device: str) -> None:
        self.shape = shape
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.item_bytes = 1 if is_fp8 else self.dtype.itemsize
        self._device, self._draws = device, torch.Generator(device).manual_seed(0)
        hidden, inner, stored = shape.hidden, shape.inner, shape.routing.stored
        self.weights: dict[str, torch.Tensor | None] = {
            "router": self._normal(LAYERS, shape.routing.outputs, hidden) * 2 / hidden**0.5,
            "bias": None,
            "next_norm": 1 + self._normal(LAYERS, hidden).float() / 10,
        }
        for name, outputs, inputs in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            made = self._fp8 if is_fp8 else self._plain
            self.weights[name], self.weights[f"{name}_scales"] = made(stored, outputs, inputs)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._draws, device=self._device, dtype=self.dtype)

    def _plain(self, *shape: int) -> tuple[torch.Tensor, None]:
        found = torch.empty(LAYERS, *shape, device=self._device, dtype=self.dtype)
        return found.normal_(0, shape[-1] ** -0.5, generator=self._draws), None

    def _fp8(self, stored: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of up to 30, at random: any order of them is one."""
        words = torch.empty(
            (LAYERS, stored, outputs, inputs // 4), device=self._device, dtype=torch.int32
        )
        codes = words.view(torch.uint8)
        for layer in codes:
            layer.random_(0, 256, generator=self._draws)
            layer.bitwise_and_(0xDF)
        blocks = (LAYERS, stored, outputs // FP8_BLOCK, inputs // FP8_BLOCK)
        scales = torch.full(blocks, inputs**-0.5 / 10, device=self._device)
        return words, (scales.bfloat16().float() * SCALE_FACTOR).bfloat16()

    def rows(self, count: int, call: int) -> dict[str, torch.Tensor]:
        """Rows of a call, of which those of a smaller count are the first."""
        draws = torch.Generator(self._device).manual_seed(call)
        rows = torch.randn(
            (max(ROWS), self.shape.hidden), generator=draws, device=self._device, dtype=self.dtype
        )[:count]
        chunks = rows.float().square().view(count, -1, SQUARES.chunk).sum(dim=2)
        return {"rows": rows, "scaled": (rows.float() * 1.01).to(self.dtype), "squares": chunks}

    def bytes_of(self, ids: np.ndarray) -> int:
        """Of what a call must read, whose rows have chosen these experts."""
        hidden, inner = self.shape.hidden, self.shape.inner
        own = len(np.unique(ids)) * 3 * hidden * inner * self.item_bytes
        return own + self.shape.routing.outputs * hidden * self.dtype.itemsize


Call = dict[str, Any]
STREAM = ("rows", "scaled", "squares")
NOT_STACKED = (*STREAM, "live", "arrivals")


Run = Callable[[int], list[Any]]
"""Makes all calls so many times, and gives what the first of them has made."""


class Timed(NamedTuple):
    """Microseconds of a call and of its kernels, and what the first call has given."""

    block_us: float
    alone_us: dict[str, float]
    found: list[torch.Tensor]


class Runner:
    """The kernels of one language, called as the backend of its framework would."""

    def __init__(self, side: Side) -> None:
        self.side, language = side, LANGUAGES[side.name]
        names = ("router", "experts")
        self._of = {name: import_module(f"kernels.{language}.{name}") for name in names}
        self.tables = Tiles.load(language, side.device if side.is_gpu else MEASURED)
        self._is_jax = side.name == "jax"

    def calls(self, block: Block, count: int) -> list[Call]:
        """Arguments of some calls, each of rows and counters of its own."""
        arrivals = arrivals_of_experts(count, block.shape.hidden)
        return [self._call(block, count, number, arrivals) for number in range(CALLS)]

    def _call(self, block: Block, count: int, number: int, arrivals: int) -> Call:
        layer, weights = number % LAYERS, block.weights
        if not self._is_jax:
            weights = {k: v if v is None else v[layer] for k, v in weights.items()}
        given: Call = weights | block.rows(count, number)
        ints = {"device": given["rows"].device, "dtype": torch.int32}
        given["live"] = torch.full((1,), count, **ints)
        given["arrivals"] = torch.zeros(arrivals, **ints)
        if self._is_jax:
            jax = import_module("jax")
            if self.side.is_gpu:
                torch.cuda.synchronize()
            given = {k: v if v is None else jax.dlpack.from_dlpack(v) for k, v in given.items()}
            given["layer"] = given["norm_layer"] = jax.numpy.int32(layer)
            jax.block_until_ready(given)
        return given

    def block(self, shape: Shape, tiles: ExpertsTiles, given: Call) -> tuple[Any, ...]:
        """The new rows, and in JAX the counters."""
        how = {"eps": EPS, "routing": shape.routing, "tiles": tiles}
        how |= {"order": ROUTER, "squares_order": SQUARES} | self._interpreted
        found = self._of["experts"].experts(**given, **how)
        return (*found[0], found[1]) if self._is_jax else tuple(found)

    @property
    def _interpreted(self) -> dict[str, bool]:
        return {"interpret": not self.side.is_gpu} if self._is_jax else {}

    def ids(self, shape: Shape, tiles: ExpertsTiles, given: Call) -> np.ndarray:
        """Which experts the rows of a call choose."""
        names = ("scaled", "squares", "router", "bias", "live", "arrivals")
        how = {"eps": EPS, "routing": shape.routing, "tiles": tiles} | self._interpreted
        how |= {"order": ROUTER, "squares_order": SQUARES}
        how |= {"layer": given["layer"]} if self._is_jax else {}
        found = self._of["router"].route(**{name: given[name] for name in names}, **how)
        return np.asarray(found[0].ids if self._is_jax else found.ids.cpu())

    def timed(self, call: Callable[[Call], Any], calls: list[Call]) -> Timed:
        """Times calls, one after the other."""
        run = self._program(call, calls) if self._is_jax else self._graph(call, calls)
        for _ in range(3):  # in JAX plain, then recorded as a command buffer, then replayed
            found = run(1)
        rounds = max(1, round(ROUND_S / max(_seconds(run, 1), 1e-6)))
        block = statistics.median(_seconds(run, rounds) for _ in range(5)) / rounds / len(calls)
        each: dict[str, float] = {}
        if self.side.is_gpu:

            def again() -> None:
                run(rounds)

            ran = traced(self.side.name, again).by_name
            each = {_short(name): 1e3 * ms / x for name, (x, ms) in ran.items() if x >= rounds}
        if self._is_jax:
            found = [torch.from_dlpack(x) for x in found]
        return Timed(block * 1e6, each, [x.cpu() for x in found])

    def _graph(self, call: Callable[[Call], Any], calls: list[Call]) -> Run:
        """Calls in one captured graph."""

        def once() -> list[Any]:
            return [call(given) for given in calls]

        found = once()
        if not self.side.is_gpu:
            return lambda rounds: [once() for _ in range(rounds)][-1][0]
        cuda, graph = torch.cuda, torch.cuda.CUDAGraph()
        cuda.synchronize()
        with cuda.graph(graph, capture_error_mode="thread_local"):
            found = once()

        def run(rounds: int) -> list[Any]:
            for _ in range(rounds):
                graph.replay()
            cuda.synchronize()
            return found[0]

        return run

    def _program(self, call: Callable[[Call], Any], calls: list[Call]) -> Run:
        """Calls in one program, which gives back the counters that it was given."""
        jax = import_module("jax")
        rest = [{k: v for k, v in given.items() if k != "arrivals"} for given in calls]
        counters = [jax.numpy.copy(given["arrivals"]) for given in calls]
        traced_once = jax.jit(call)

        def once(counters: list[Any], rest: list[Call]) -> list[Any]:
            pairs = zip(counters, rest, strict=True)
            return [traced_once(given | {"arrivals": own}) for own, given in pairs]

        program = jax.jit(once, donate_argnums=0)

        def run(rounds: int) -> list[Any]:
            for _ in range(rounds):
                found = program(counters, rest)
                counters[:] = [one[-1] for one in found]
            return list(jax.block_until_ready(found[0][: len(STREAM)]))

        return run


def _seconds(run: Run, rounds: int) -> float:
    begin = time.perf_counter()
    run(rounds)
    return time.perf_counter() - begin


def _short(name: str) -> str:
    return name.split(" [")[0].removeprefix("_").removesuffix("_kernel")


class Report:
    """What is found, printed and written as it comes."""

    def __init__(self, command: str, out: Path | None, seconds: float) -> None:
        self.found: dict[str, Any] = {"command": command, "results": [], "failed": []}
        self._out, self._until = out, time.monotonic() + seconds

    @property
    def has_time(self) -> bool:
        return time.monotonic() < self._until

    def say(self, line: str) -> None:
        print(line, flush=True)
        if self._out:
            text = json.dumps(self.found, indent=1)
            self._out.write_text(text + "\n", encoding="utf-8")

    def add(self, line: dict[str, Any]) -> None:
        self.found["results"].append(line)
        alone = "  ".join(f"{name} {us:.1f}" for name, us in line["alone_us"].items())
        checks = [name for name in ("as_alone", "as_the_first") if line[name] is False]
        tiles = "".join(f"  {name} {value}" for name, value in line["changed"].items())
        self.say(
            f"{line['shape']:12}{line['weights']:6}{line['rows']:5}{line['experts']:8}"
            f"{line['limit_us']:9.1f}  {line['side']:7}{line['block_us']:9.1f}"
            f"{line['limit_us'] / line['block_us']:7.0%}   {alone}{tiles}"
            + "".join(f"  NOT {name}" for name in checks)
        )

    def fail(self, what: str, error: Exception) -> None:
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        self.found["failed"].append(f"{what}: {told}")
        self.say(f"FAILED {what}: {told}")


HEADER = f"{'shape':12}{'':6}{'rows':>5}{'experts':>8}{'limit':>9}  {'side':7}{'block us':>9}"
HEADER += f"{'share':>7}   alone, us"


def measure(
    report: Report, runners: list[Runner], block: Block, options: argparse.Namespace, name: str
) -> None:
    """All rows of one block."""
    shape, weights = block.shape, "FP8" if block.item_bytes == 1 else str(block.dtype)[6:]
    weights = {"bfloat16": "bf16", "float32": "f32"}.get(weights, weights)
    first_row: list[torch.Tensor] | None = None
    for count in options.rows:
        first: list[torch.Tensor] | None = None
        for runner in runners:
            what = f"{name}, {weights}, {count} rows, {runner.side.name}"
            if not report.has_time:
                report.say(f"left out: {what}")
                continue
            try:
                calls = runner.calls(block, count)
                sizes = {"item_bytes": block.item_bytes, "rows": count, "inner": shape.inner}
                usual = runner.tables.experts.of(**sizes)
                for changed in options.tiles:
                    tiles = replace(usual, **changed)
                    timed = runner.timed(_bound(runner, shape, tiles), calls)
                    own = [x[:1] for x in timed.found]
                    first, first_row = first or timed.found, first_row or own
                    ids = runner.ids(shape, tiles, calls[0])
                    num_bytes = block.bytes_of(ids)
                    report.add(
                        {
                            "shape": name,
                            "weights": weights,
                            "rows": count,
                            "experts": len(np.unique(ids)),
                            "limit_us": num_bytes / options.copy_rate * 1e6,
                            "side": runner.side.name,
                            "changed": changed,
                            "block_us": timed.block_us,
                            "alone_us": timed.alone_us,
                            "as_alone": _are_equal(own, first_row),
                            "as_the_first": _are_equal(timed.found, first),
                        }
                    )
            except Exception as error:  # of whatever kind: the others are still to be timed
                report.fail(what, error)


def _bound(runner: Runner, shape: Shape, tiles: ExpertsTiles) -> Callable[[Call], Any]:
    return lambda given: runner.block(shape, tiles, given)


def _are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def options() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--weights", nargs="+", choices=("fp8", "bf16"), default=["fp8", "bf16"])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    changes = "JSON: tiles that replace those of the GPU's file"
    parser.add_argument("--tiles", nargs="+", type=json.loads, default=[{}], help=changes)
    parser.add_argument("--seconds", type=float, default=300, help="begin nothing after that long")
    return parser


def main() -> int:
    """Prints and writes the table; the exit code is 1 where a part fails or bits differ."""
    given = options().parse_args()
    # Both frameworks share the memory: the weights are torch's, and JAX is handed them.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    command = shlex.join(["python", "-m", "bench.kernels.experts", *sys.argv[1:]])
    report = Report(command, given.out, given.seconds)
    runners = [Runner(SIDES[name]()) for name in SIDES if name in given.sides]
    is_gpu = torch.cuda.is_available()
    given.copy_rate = runners[0].side.copy_rate()
    device = runners[0].side.device
    report.found |= {"device": device, "copy_gigabytes_per_s": given.copy_rate / 1e9}
    report.say(f"{device}, copies {given.copy_rate / 1e9:.0f} GB/s\n{HEADER}")
    shapes = {name: SHAPES[name] for name in given.shapes} if is_gpu else SMALL
    for name, shape in shapes.items():
        for weights in given.weights:
            if not report.has_time:
                report.say(f"left out: {name}, {weights}")
                continue
            block = Block(shape, weights == "fp8", "cuda" if is_gpu else "cpu")
            measure(report, runners, block, given, name)
            del block
            if is_gpu:
                torch.cuda.empty_cache()
    wrong = [x for x in report.found["results"] if not (x["as_alone"] and x["as_the_first"])]
    return 1 if wrong or report.found["failed"] or not report.found["results"] else 0


if __name__ == "__main__":
    sys.exit(main())
