"""Times of GEMMs with one, two, four and eight segments along K, for each weight format.

    python -m bench.kernels.reduction_segments --out bench/results/reduction_segments_h200.json
    python -m bench.kernels.reduction_segments --only "INT4 down, 1 rows" "FP8 down" --seconds 60

Few outputs are few programs, and each of them is one long chain of tensor-core instructions, with
dequantisation for packed weights. S segments of the inputs, each one chain from zero, multiply the
programs by S; the last program of a block adds the segments in order. Every line has the fastest
tile config of a GEMM and a number of segments. Bits must be equal for all tiles and all numbers of
rows; values are compared with a sum of segments in float32.

Decision rule for two segments in bfloat16: adopt them if a layer of Qwen3-32B at TP 4 gains at
least 10 us at one row, and o and down of no cell on one GPU lose so much that its step loses more
than 0.5 %. The kernel belongs to this bench alone (`segmented_linear`). Weights of several layers
rotate, more than a cache holds. One GPU suffices. `--compile-at-once 14` compiles the kernels for
an H200 in 14 processes, ahead of the measurements.
"""

import argparse
import hashlib
import json
import multiprocessing
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from bench.common.environment import write_results
from bench.kernels.segmented_linear import Buffers, Tile, Weight, compiled_of, linear_of, padded
from kernels.triton_gpu.gemm.dequantize import dequantize
from kernels.triton_gpu.gemm.linear import launching
from shared.models.formats.fp8_w8a16 import FP8_BLOCK, SCALE_FACTOR
from shared.models.formats.weight_format import PLAIN
from tests.support.op_case import TOLERANCE
from tests.support.triton_driver import Driver

LEAST_GAIN_US = 10.0
"""Gain of a layer of Qwen3-32B at TP 4 and one row from which two segments pay."""
MOST_LOSS = 0.005
"""Largest loss of a step on one GPU."""
CACHE_BYTES = 256 << 20
"""Bytes of weights that rotate."""
REPLAYS = 30
SEGMENTS = (1, 2, 4, 8)
MOST_ROWS = 64
FORMATS = {"BF16": PLAIN, "FP8": "fp8_w8a16", "INT4": "int4_w4a16"}
GROUP = 128
"""Inputs with a scale in INT4."""
ALONE, SHARDED = "qwen3-8b", "qwen3-32b, TP 4"
SHAPES = {
    ALONE: {
        "o": (4096, 4096),
        "down": (12288, 4096),
        "qkv": (4096, 6144),
        "gate and up": (4096, 24576),
    },
    SHARDED: {"o": (8192, 1280), "down": (25600, 1280)},
}
"""Inputs and outputs of the GEMMs of a rank."""
NUM_LAYERS = 36
STEP_MS = {1: 4.25, 8: 4.47, 32: 5.13}
"""Layers of Qwen3-8B, and milliseconds of a plain step on an H200 by rows, for the loss of a
step."""

Line = dict[str, Any]


class Case(NamedTuple):
    """GEMM of a model with a number of rows; `format` is a name in `FORMATS`."""

    model: str
    format: str
    gemm: str
    rows: int

    def __str__(self) -> str:
        return f"{self.model} {self.format} {self.gemm}, {self.rows} rows"

    @property
    def shape(self) -> tuple[int, int]:
        """Returns the inputs and outputs."""
        return SHAPES[self.model][self.gemm]

    def tiles(self, segments: int) -> list[Tile]:
        """Returns the tile configs to time.

        On one GPU the segments of bfloat16 weights may also be in one program.
        """
        return [
            tile._replace(separate=separate)
            for tile in self.kernels
            for separate in (True, False)
            if separate or segments == 2 and (self.model, self.format) == (ALONE, "BF16")
        ]

    @property
    def kernels(self) -> list[Tile]:
        """Returns the tile configs with different code."""
        shapes = [(32, 4, False), (64, 4, False), (64, 8, False), (64, 4, True)]
        stages = (3,)
        if self.rows <= 32:  # fewer outputs read more rows too often, or spill registers
            shapes += [(16, 1, False), (32, 2, False), (16, 1, True), (32, 2, True)]
            stages = (6, 4) if self.format == "BF16" else (4,)
        return [
            Tile(
                outputs=outputs,
                depth=128,
                swapped=swapped,
                separate=True,
                warps=warps,
                stages=count,
            )
            for outputs, warps, swapped in shapes
            for count in stages
        ]


_PACKED = [
    (ALONE, "INT4", "down"),
    (ALONE, "INT4", "o"),
    (ALONE, "FP8", "down"),
    (ALONE, "INT4", "qkv"),
    (ALONE, "INT4", "gate and up"),
    (ALONE, "FP8", "o"),
    (ALONE, "FP8", "qkv"),
    (ALONE, "FP8", "gate and up"),
]
_PLAIN = [(model, "BF16", gemm) for model in SHAPES for gemm in ("down", "o")]
CASES = [
    Case(model, format, gemm, rows)
    for numbers in ((1, 8, 32), (MOST_ROWS,))
    for gemms in (_PACKED, _PLAIN)
    for rows in numbers
    for model, format, gemm in gemms
]
"""Cases in the order of their value."""


def weight_of(case: Case, device: str) -> Weight:
    """Returns a random weight: any bits of packed values, with scales of about a model's."""
    inputs, outputs = case.shape
    if case.format == "BF16":
        values = torch.randn((outputs, inputs), dtype=torch.bfloat16, device=device)
        return Weight(values / inputs**0.5, None, PLAIN)
    if case.format == "INT4":
        packed, shape, largest = 8, (outputs, inputs // GROUP), 0.2
    else:
        packed, largest = 4, SCALE_FACTOR / 128
        shape = outputs // FP8_BLOCK, inputs // FP8_BLOCK
    words = torch.empty((outputs, inputs // packed), dtype=torch.int32, device=device)
    scales = torch.rand(shape, device=device) * (largest / inputs**0.5)
    words.random_(-(2**31), 2**31 - 1)
    return Weight(words, scales.bfloat16(), FORMATS[case.format])


def expected_of(x: Tensor, weight: Weight, segments: int) -> Tensor:
    """Returns the sum of the segments in order, each a product in float32."""
    wide = weight.values
    if weight.scales is not None:
        inputs = x.shape[1]
        wide = dequantize(wide, weight.scales, weight.format, inputs, **launching(x))
    total = x.new_zeros((len(x), len(wide)), dtype=torch.float32)
    for part, of_part in zip(x.chunk(segments, 1), wide.chunk(segments, 1), strict=True):
        total += part.float() @ of_part.float().T
    return total


def measured(case: Case, segments: Sequence[int]) -> Iterator[Line]:
    """Yields the fastest tile config and its microseconds for each number of segments."""
    inputs, outputs = case.shape
    torch.manual_seed(0)  # the same first row and weight for any number of rows
    x = torch.randn((MOST_ROWS, inputs), device="cuda", dtype=torch.bfloat16)[: case.rows]
    first = weight_of(case, "cuda")
    num_bytes = sum(each.nbytes for each in first[:2] if each is not None)
    copies = max(2, CACHE_BYTES // num_bytes)
    weights = [first, *(weight_of(case, "cuda") for _ in range(copies - 1))]
    for count in segments:
        want = expected_of(x, first, count)
        buffers = Buffers.of(x, outputs, count)
        found: list[tuple[float, Tile, Tensor]] = []
        for tile in case.tiles(count):
            with suppress(ValueError, triton.CompilationError, triton.OutOfResources):
                # The shape or the shared memory may not fit.
                bits = linear_of(x, first, buffers, segments=count, tile=tile).clone()
                found.append((_microseconds(x, weights, buffers, count, tile), tile, bits))
        if not found:
            continue
        us, tile, bits = min(found, key=lambda each: each[0])
        error = ((bits.float() - want).abs().max() / want.abs().max()).item()
        yield case._asdict() | {
            "segments": count,
            "us": round(us, 2),
            "us_by_outputs": {
                outputs: round(min(each[0] for each in found if each[1].outputs == outputs), 2)
                for outputs in sorted({each[1].outputs for each in found})
            },
            "gigabytes_per_s": round(num_bytes / us / 1e3),
            "tile": tile._asdict(),
            "tiles": len(found),
            "tiles_have_equal_bits": all(torch.equal(each[2], bits) for each in found),
            "error": error,
            "is_right": error <= TOLERANCE["bfloat16"],
            "bits_of_first_row": digest_of(bits[0]),
        }


def digest_of(row: Tensor) -> str:
    """Returns a digest of the bits of a row."""
    return hashlib.sha256(row.view(torch.int16).cpu().numpy().tobytes()).hexdigest()[:16]


def _microseconds(
    x: Tensor, weights: Sequence[Weight], buffers: Buffers, segments: int, tile: Tile
) -> float:
    """Returns the median of a GEMM's time in a CUDA graph that uses all weights in turn."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            linear_of(x, weight, buffers, segments=segments, tile=tile)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(REPLAYS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1e3 * start.elapsed_time(end) / len(weights))
    return statistics.median(found)


def compile_kernel(case: Case, tile: Tile) -> Any:
    """Compiles a kernel for an H200 into Triton's cache on the disk; needs no GPU."""
    driver: Any = Driver()
    triton.runtime.driver.set_active(driver)
    x = torch.empty((case.rows, case.shape[0]), dtype=torch.bfloat16, device="meta")
    return compiled_of(x, weight_of(case, "meta"), tile=tile)


def _compile(case: Case, tile: Tile) -> None:
    """Same as `compile_kernel`; a kernel that cannot be compiled is no fault."""
    with suppress(Exception):
        compile_kernel(case, tile)


def _compiling(pool: Any, cases: Sequence[Case], until: float) -> Callable[[Case], None]:
    """Compiles the kernels of all cases in the pool, in their order.

    Returns:
      Function that waits for the kernels of a case, or until the time.
    """
    wanted = {case: case._replace(rows=padded(case.rows)) for case in cases}
    pending = dict.fromkeys((wanted[case], tile) for case in cases for tile in case.kernels)
    results = {each: pool.apply_async(_compile, each) for each in pending}

    def wait(case: Case) -> None:
        for tile in case.kernels:
            results[wanted[case], tile].wait(max(0.0, until - time.monotonic()))

    return wait


def layer_us(lines: Sequence[Line], model: str, rows: int, segments: int) -> float:
    """Returns the microseconds of a layer's o and down in bfloat16.

    Raises:
      KeyError: One of them was not timed.
    """
    wanted = model, "BF16", rows, segments
    found = {
        line["gemm"]: line["us"]
        for line in lines
        if (line["model"], line["format"], line["rows"], line["segments"]) == wanted
    }
    return found["o"] + found["down"]


def decision(lines: Sequence[Line]) -> dict[str, Any]:
    """Applies the rule: the gain on a TP rank, the largest loss of a step, and the result."""
    gain = layer_us(lines, SHARDED, 1, 1) - layer_us(lines, SHARDED, 1, 2)
    losses = [
        NUM_LAYERS
        * (layer_us(lines, ALONE, rows, 2) - layer_us(lines, ALONE, rows, 1))
        / (1e3 * ms)
        for rows, ms in STEP_MS.items()
    ]
    adopts = gain >= LEAST_GAIN_US and max(losses) <= MOST_LOSS
    return {"gain_us": round(gain, 2), "largest_loss": round(max(losses), 4), "adopts": adopts}


def faults_of(lines: Sequence[Line]) -> list[str]:
    """Returns wrong results, and bits that depend on tiles or on the number of rows."""
    faults, bits = [], dict[tuple[str, ...], str]()
    for line in lines:
        name = ", ".join(f"{key} {line[key]}" for key in (*Case._fields, "segments"))
        if not line["is_right"]:
            faults.append(f"{name}: error {line['error']:.1e}")
        if not line["tiles_have_equal_bits"]:
            faults.append(f"{name}: bits depend on the tiles")
        gemm = line["model"], line["format"], line["gemm"], str(line["segments"])
        if bits.setdefault(gemm, line["bits_of_first_row"]) != line["bits_of_first_row"]:
            faults.append(f"{name}: bits depend on the number of rows")
    return faults


def chosen(texts: Sequence[str]) -> list[Case]:
    """Returns the cases with any of the texts in their names, in the order of the texts."""
    if not texts:
        return CASES
    return list(dict.fromkeys(case for text in texts for case in CASES if text in str(case)))


def row_of(case: Case, lines: Sequence[Line], segments: Sequence[int]) -> str:
    """Returns a line for a terminal: microseconds by number of segments, and the fastest tile."""
    times = {line["segments"]: line["us"] for line in lines}
    cells = "".join(f"{times.get(count, float('nan')):9.2f}" for count in segments)
    best = min(lines, key=lambda line: line["us"], default=None)
    if best is None:
        return f"{case!s:40}{cells}"
    tile = best["tile"]
    what = f"{tile['outputs']} outputs, {tile['warps']} warps" + ", swapped" * tile["swapped"]
    return f"{case!s:40}{cells}  S={best['segments']}, {what}"


def arguments() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file, written after every line")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="cases with a text in their name"
    )
    parser.add_argument("--segments", nargs="+", type=int, default=list(SEGMENTS))
    parser.add_argument("--seconds", type=float, default=300, help="start no case after this time")
    parser.add_argument(
        "--compile-at-once", type=int, default=0, metavar="N", help="processes that compile first"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Times the cases, prints a table and the decision; the exit code is 1 after a fault."""
    options, until = arguments().parse_args(argv), time.monotonic()
    until += options.seconds
    cases, lines, left_out = chosen(options.only), list[Line](), list[str]()
    found: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "bench.kernels.reduction_segments", *argv]),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "sides": {"torch": {"device": torch.cuda.get_device_name()}},
        "lines": lines,
        "left_out": left_out,
    }

    def write() -> None:
        if options.out:
            write_results(options.out, found)

    print(f"{'us':40}" + "".join(f"{f'S={count}':>9}" for count in options.segments), flush=True)
    with ExitStack() as stack:
        wait: Callable[[Case], None] = lambda case: None  # noqa: E731
        if options.compile_at_once:
            spawn = multiprocessing.get_context("spawn")
            pool = stack.enter_context(spawn.Pool(options.compile_at_once))
            wait = _compiling(pool, cases, until)
        for case in cases:
            if time.monotonic() > until:
                left_out.append(str(case))
                continue
            wait(case)
            before = len(lines)
            for line in measured(case, options.segments):
                lines.append(line)
                write()
            print(row_of(case, lines[before:], options.segments), flush=True)
    found["faults"] = faults_of(lines)
    with suppress(KeyError):  # some of its lines were not timed
        found["decision"] = decision(lines)
    write()
    rest = {name: found.get(name) for name in ("decision", "faults", "left_out")}
    print(json.dumps(rest), flush=True)
    return int(bool(found["faults"]) or not lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
