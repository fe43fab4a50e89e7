"""Times of the GEMMs that write the residual stream, with one and with two segments along K.

    python -m bench.kernels.reduction_segments --out bench/results/reduction_segments_h200.json

`o` and `down` of one TP rank have few outputs, so their programs are too few for the memory
bandwidth. Two segments of the inputs, each one chain from zero, double the programs; the last
program of a block adds the segments in order. Decision rule: adopt two segments if a layer of
Qwen3-32B at TP 4 gains at least 10 us at one row, and o and down of no cell on one GPU lose so much
that its step loses more than 0.5 %. On one GPU both segments run in one program. The kernel belongs
to this bench alone. Weights of several layers rotate, more than a cache holds. One GPU suffices.
"""

# Pointers in kernels have no types, and Triton's functions are untyped.
# pyright: reportMissingParameterType=false, reportGeneralTypeIssues=false

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench.common.environment import write_results

LEAST_GAIN_US = 10.0
"""Gain of a layer of Qwen3-32B at TP 4 and one row from which two segments pay."""
MOST_LOSS = 0.005
"""Largest loss of a step on one GPU."""
CACHE_BYTES = 256 << 20
"""Bytes of weights that rotate."""
REPLAYS = 30


class Layer(NamedTuple):
    """The two GEMMs of a layer: inputs and outputs of a rank.

    Attributes:
      count: Layers of the model.
      gemms: Inputs and outputs of o and of down.
      rows: Rows to time.
      separate: Whether each segment has a program of its own.
      step_ms: Milliseconds of a plain step on an H200 by rows, for the loss of a step.
    """

    count: int
    gemms: dict[str, tuple[int, int]]
    rows: tuple[int, ...]
    separate: bool
    step_ms: dict[int, float]


LAYERS = {
    "qwen3-32b, TP 4": Layer(64, {"o": (8192, 1280), "down": (25600, 1280)}, (1, 8, 32), True, {}),
    "qwen3-8b, one GPU": Layer(
        36,
        {"o": (4096, 4096), "down": (12288, 4096)},
        (1, 8, 32),
        False,
        {1: 4.25, 8: 4.47, 32: 5.13},
    ),
}
TILES = [
    {"outputs": outputs, "depth": depth, "stages": stages, "num_warps": warps}
    for outputs, warps in ((16, 4), (32, 4), (64, 4))
    for depth, stages in ((128, 6), (256, 4))
]


@triton.jit(do_not_specialize=["num_rows"])
def segmented_linear(
    x_at,
    weight_at,
    out_at,
    parts_at,
    arrivals_at,
    num_rows,
    inputs: tl.constexpr,
    num_outputs: tl.constexpr,
    segments: tl.constexpr,
    separate: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    depth: tl.constexpr,
    stages: tl.constexpr,
):
    """Multiplies all rows with a block of outputs; see `linear_of`."""
    block, number = tl.program_id(0), tl.program_id(1)
    length: tl.constexpr = inputs // segments
    row, column = tl.arange(0, rows), block * outputs + tl.arange(0, outputs)
    lane, is_row = tl.arange(0, depth), (tl.arange(0, rows) < num_rows)[None, :]
    total = tl.zeros((outputs, rows), tl.float32)
    acc = tl.zeros((outputs, rows), tl.float32)
    first = number * length
    for at in tl.range(first, first + (length if separate else inputs), depth, num_stages=stages):
        weight = tl.load(weight_at + column[:, None] * inputs + at + lane[None, :])
        x = tl.load(x_at + row[None, :] * inputs + at + lane[:, None], mask=is_row, other=0.0)
        acc = tl.dot(weight, x, acc)
        if not separate and segments > 1:  # noqa: SIM102 - a compile-time condition
            if (at + depth) % length == 0:
                total += acc
                acc = tl.zeros((outputs, rows), tl.float32)
    place = row[None, :] * num_outputs + column[:, None]
    if separate and segments > 1:
        tl.store(parts_at + number * rows * num_outputs + place, acc)
        tl.debug_barrier()
        if tl.atomic_add(arrivals_at + block, 1) == segments - 1:
            tl.debug_barrier()
            for segment in tl.static_range(segments):
                total += tl.load(parts_at + segment * rows * num_outputs + place, volatile=True)
            tl.store(out_at + place, total.to(tl.bfloat16), mask=is_row)
            tl.store(arrivals_at + block, 0)
    else:
        total += acc
        tl.store(out_at + place, total.to(tl.bfloat16), mask=is_row)


class Buffers(NamedTuple):
    """Result and intermediate sums of a GEMM; `arrivals` are zero between two calls."""

    out: Tensor
    parts: Tensor
    arrivals: Tensor

    @classmethod
    def of(cls, x: Tensor, num_outputs: int, segments: int) -> "Buffers":
        """Allocates the buffers of a GEMM of these rows."""
        out = torch.empty((len(x), num_outputs), dtype=torch.bfloat16, device=x.device)
        shape = segments, _padded(x), num_outputs
        parts = torch.empty(shape, dtype=torch.float32, device=x.device)
        return cls(out, parts, torch.zeros(num_outputs, dtype=torch.int32, device=x.device))


def _padded(x: Tensor) -> int:
    """Rows of a tensor core at least."""
    return max(16, triton.next_power_of_2(len(x)))


def linear_of(
    x: Tensor,
    weight: Tensor,
    buffers: Buffers,
    *,
    segments: int,
    separate: bool,
    tile: dict[str, int],
) -> Tensor:
    """Returns x weight^T in bfloat16, with the inputs in equal segments that are added in order.

    Args:
      x: `[rows, inputs]`.
      weight: `[outputs, inputs]`.
      buffers: Buffers of this shape and number of segments; the result is one of them.
      segments: Number of segments along the inputs.
      separate: Whether each segment has a program of its own.
      tile: Tile config, one of `TILES`.

    Raises:
      ValueError: The sizes are no multiples of the tile.
    """
    (num_rows, inputs), num_outputs = x.shape, len(weight)
    if inputs % (segments * tile["depth"]) or num_outputs % tile["outputs"]:
        raise ValueError(f"{inputs} x {num_outputs} is no multiple of the tile {tile}")
    kernel: Any = segmented_linear
    kernel[(num_outputs // tile["outputs"], segments if separate else 1)](
        x,
        weight,
        buffers.out,
        buffers.parts,
        buffers.arrivals,
        num_rows,
        inputs=inputs,
        num_outputs=num_outputs,
        segments=segments,
        separate=separate,
        rows=_padded(x),
        **tile,
    )
    return buffers.out


def measured(layer: Layer, num_rows: int, segments: int) -> Iterator[dict[str, Any]]:
    """Yields the fastest tile config of each GEMM and its microseconds."""
    for name, (inputs, outputs) in layer.gemms.items():
        copies = max(2, CACHE_BYTES // (2 * inputs * outputs))
        weights = [
            torch.randn((outputs, inputs), device="cuda", dtype=torch.bfloat16) / inputs**0.5
            for _ in range(copies)
        ]
        x = torch.randn((num_rows, inputs), device="cuda", dtype=torch.bfloat16)
        buffers = Buffers.of(x, outputs, segments)
        bits, times = [], []
        for tile in TILES:
            how = {"segments": segments, "separate": layer.separate, "tile": tile}
            try:
                bits.append(linear_of(x, weights[0], buffers, **how).clone())
                times.append((_microseconds(x, weights, buffers, how), tile))
            except (ValueError, triton.CompilationError, triton.OutOfResources):
                continue  # the shape or the shared memory does not fit
        us, tile = min(times, key=lambda each: each[0])
        same = all(torch.equal(each, bits[0]) for each in bits)
        yield {"gemm": name, "us": round(us, 2), "tile": tile, "tiles_have_equal_bits": same}


def _microseconds(
    x: Tensor, weights: Sequence[Tensor], buffers: Buffers, how: dict[str, Any]
) -> float:
    """Returns the median of a GEMM's time in a CUDA graph that uses all weights in turn."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            linear_of(x, weight, buffers, **how)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(REPLAYS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1e3 * start.elapsed_time(end) / len(weights))
    return statistics.median(found)


def layer_us(lines: Sequence[dict[str, Any]], name: str, rows: int, segments: int) -> float:
    """Returns the microseconds of a layer's o and down."""
    wanted = name, rows, segments
    return sum(x["us"] for x in lines if (x["layer"], x["rows"], x["segments"]) == wanted)


def decision(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Applies the rule: the gain on a TP rank, the largest loss of a step, and the result."""
    tp, alone = LAYERS
    gain = layer_us(lines, tp, 1, 1) - layer_us(lines, tp, 1, 2)
    layer = LAYERS[alone]
    losses = [
        layer.count
        * (layer_us(lines, alone, rows, 2) - layer_us(lines, alone, rows, 1))
        / (1e3 * layer.step_ms[rows])
        for rows in layer.rows
    ]
    adopts = gain >= LEAST_GAIN_US and max(losses) <= MOST_LOSS
    return {"gain_us": round(gain, 2), "largest_loss": round(max(losses), 4), "adopts": adopts}


def main(argv: Sequence[str]) -> None:
    """Times both layers and prints the decision."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file, written after every line")
    options = parser.parse_args(argv)
    lines: list[dict[str, Any]] = []
    command = shlex.join(["python", "-m", "bench.kernels.reduction_segments", *argv])
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    sides = {"torch": {"device": torch.cuda.get_device_name()}}
    found: dict[str, Any] = {"command": command, "versions": versions, "sides": sides}
    found["lines"] = lines

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        if options.out:
            write_results(options.out, found)

    for name, layer in LAYERS.items():
        for rows in layer.rows:
            for segments in (1, 2):
                for gemm in measured(layer, rows, segments):
                    lines.append({"layer": name, "rows": rows, "segments": segments} | gemm)
                    say(lines[-1])
    found["decision"] = decision(lines)
    say(found["decision"])


if __name__ == "__main__":
    main(sys.argv[1:])
