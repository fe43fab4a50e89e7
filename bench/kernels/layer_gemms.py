"""Times the GEMMs of layers in the order of a step, with tile configs to compare (torch).

    python -m bench.kernels.layer_gemms --rows 1 8 32 --tiles '{}' '{"stages": 6}' \
        --out bench/results/layer_gemms_h200.json
    python -m bench.kernels.layer_gemms --format FP8 --tiles '{}' '{"down": {"stages": 3}}'

A kernel may load its weight while the previous one ends, so times of single GEMMs do not add up to
those of a step. Here QKV, output, gate and up, and down projections of some layers with the sizes
of Qwen3-8B follow each other in one CUDA graph, with attention to 512 positions between the first
two. Attention's result is not used: the output projection reads columns of the QKV GEMM.

A config replaces fields of the tiles of the GPU's file (`kernels/tiles.py`), for all GEMMs or for
those that it names. Results must have the bits of the first config. A config that cannot run is
printed with its error.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from bench.common.environment import write_results
from kernels.kernel_limits import MOST_SEPARATE_BLOCKS
from kernels.tiles import LinearTiles, Tiles
from kernels.triton_gpu.gemm import linear
from shared.models.formats.fp8_w8a16 import FP8_BLOCK, SCALE_FACTOR
from shared.models.formats.weight_format import PLAIN
from shared.spec.reduction_order import LINEAR, SQUARES
from tests.support.op_case import table
from tests.support.op_sides import SIDES

HIDDEN, INNER = 4096, 12288
GEMMS = {
    "qkv": (HIDDEN, 6144),
    "out": (HIDDEN, HIDDEN),
    "gate_up": (HIDDEN, INNER),
    "down": (INNER, HIDDEN),
}
"""Inputs and outputs, of gate and up each."""
LAYERS = 6
"""Layers of a graph; no cache holds their weights."""
FORMATS = {"BF16": PLAIN, "FP8": "fp8_w8a16", "INT4": "int4_w4a16"}
GROUP = 128
"""Inputs with a scale."""
REPLAYS = 30

Changes = Mapping[str, Any]
"""Replaced fields of tiles, or those of a GEMM by its name."""


class Weight(NamedTuple):
    """Stored numbers or words of a weight, and its scales if it is packed."""

    values: Tensor
    scales: Tensor | None


class Layers:
    """Random layers in a format, and rows.

    Attributes:
      format: Name in `FORMATS`.
      x: The rows.
    """

    def __init__(self, format: str, rows: int, device: str) -> None:
        torch.manual_seed(0)
        self.format, self._device = format, device
        self._weights = [{name: self._weight(name) for name in GEMMS} for _ in range(LAYERS)]
        self._norm = torch.ones(HIDDEN, device=device)
        self.x = torch.randn((rows, HIDDEN), device=device).bfloat16()
        self._arrivals = torch.zeros(MOST_SEPARATE_BLOCKS, dtype=torch.int32, device=device)

    def _weight(self, name: str) -> Weight:
        """Returns a random weight: any bits of packed values, with scales of about a model's."""
        inputs, outputs = GEMMS[name]
        outputs *= 1 + (name == "gate_up")
        if self.format == "BF16":
            values = torch.randn((outputs, inputs), dtype=torch.bfloat16, device=self._device)
            return Weight(values / inputs**0.5, None)
        packed, largest = (8, 0.2) if self.format == "INT4" else (4, SCALE_FACTOR / 128)
        across = outputs if self.format == "INT4" else outputs // FP8_BLOCK
        words = torch.empty((outputs, inputs // packed), dtype=torch.int32, device=self._device)
        words.random_(-(2**31), 2**31 - 1)
        scales = torch.rand((across, inputs // GROUP), device=self._device)
        return Weight(words, (scales * (largest / inputs**0.5)).bfloat16())

    def tiles(self, table: Any, changes: Changes) -> dict[str, LinearTiles]:
        """Returns the tiles of each GEMM: those of a GPU's table with some fields replaced.

        Raises:
          TypeError, ValueError: A field is unknown, or tiles are invalid.
        """
        own = {name: changes.get(name, {}) for name in GEMMS}
        common = {name: value for name, value in changes.items() if name not in GEMMS}
        found = {}
        for name, (_, outputs) in GEMMS.items():
            sizes = {"outputs": outputs, "gated": int(name == "gate_up")}
            sizes |= {"item_bytes": {"BF16": 2, "FP8": 1, "INT4": 0.5}[self.format]}
            sizes |= {"one_segment": int(self._segments(name) == 1)}
            selected = table.of(rows=len(self.x), **sizes)
            found[name] = replace(selected, **(common | own[name]))
        return found

    def _segments(self, name: str) -> int:
        if name not in ("out", "down"):
            return 1
        return LINEAR.segments_of(GEMMS[name][0], is_packed=self.format != "BF16")

    def run(self, tiles: Mapping[str, LinearTiles], attend: Callable[[], Any]) -> list[Tensor]:
        """Computes all layers; returns the residual, the next input and its sums of squares."""
        stream, rows = self.x, len(self.x)
        squares = (stream.float() ** 2).reshape(rows, -1, SQUARES.chunk).sum(-1)
        x = stream
        for weights in self._weights:

            def product(name: str, x: Tensor, weights: Any = weights, **how: Any) -> Any:
                how |= {"format": FORMATS[self.format], "out_type": torch.bfloat16}
                how |= {"segments": self._segments(name), "arrivals": self._arrivals}
                return linear.product(x, *weights[name], order=SQUARES, tiles=tiles[name], **how)

            normed: dict[str, Any] = {"squares": squares, "eps": 1e-6}
            qkv = product("qkv", x, **normed)[0]
            attend()
            heads = qkv.view(-1)[: rows * HIDDEN].view(rows, HIDDEN)
            stream, x, squares, _ = product("out", heads, added=stream, norm=self._norm)
            inner = product("gate_up", x, squares=squares, eps=1e-6, is_gated=True)[0]
            stream, x, squares, _ = product("down", inner, added=stream, norm=self._norm)
        return [stream, x, squares]


def attention_of(rows: int) -> Callable[[], Any]:
    """Returns a call of the attention kernel for requests of a row after 512 positions.

    Raises:
      ValueError: No case of the operation has this number of rows.
    """
    wanted = f"attention_layer, {rows} x 1 rows after 512"
    case = next((case for case in table("attention_layer") if str(case) == wanted), None)
    if case is None:
        raise ValueError(f"there is no attention of {rows} rows; --rows is 1, 8 or 32")
    side = SIDES["torch"]()
    operation, placed = side.operation(case), side.placed(case, case.arguments(seed=0))
    return lambda: operation(*placed)


def microseconds(call: Callable[[], Sequence[Tensor]]) -> tuple[float, list[Tensor]]:
    """Returns the median time of a call in a CUDA graph, and its results."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(REPLAYS):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1e3 * begin.elapsed_time(end))
    return statistics.median(found), [x.clone() for x in results]


def has_equal_bits(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Returns whether all results have equal bits, those of NaN included."""
    return all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(some, others, strict=True)
    )


def measured(
    layers: Layers,
    configs: Sequence[Changes],
    table: Any,
    timed: Callable[[Callable[[], list[Tensor]]], tuple[float, list[Tensor]]],
    attend: Callable[[], Any],
) -> Iterator[dict[str, Any]]:
    """Yields a line for each config: microseconds of a layer, or the error.

    Args:
      table: Tile table of a GPU.
      timed: Returns the microseconds of a call, and its results.
      attend: Runs attention.
    """
    first: list[Tensor] | None = None
    for changes in configs:
        line: dict[str, Any] = {"tiles": dict(changes)}
        try:
            run = partial(layers.run, layers.tiles(table, changes), attend)
            us, results = timed(run)
        except Exception as error:  # of whatever kind: other configs may run
            text = " ".join(str(error).split())
            yield line | {"error": f"{type(error).__name__}: {text}"}
            continue
        first = results if first is None else first
        yield line | {"us": round(us / LAYERS, 2), "bits_equal": has_equal_bits(results, first)}


def line_of(line: Mapping[str, Any]) -> str:
    """Returns a line for a terminal."""
    found = f"{line['us']:8.2f} us" if "us" in line else f"cannot run: {line['error'][:100]}"
    bits = "" if line.get("bits_equal", True) else "  OTHER BITS"
    return f"{line['format']:5}{line['rows']:4} rows {found}{bits}  {json.dumps(line['tiles'])}"


def arguments() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--format", nargs="+", choices=list(FORMATS), default=["BF16"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tiles", nargs="+", type=json.loads, default=[{}], metavar="JSON")
    parser.add_argument("--gpu", default="nvidia_h200", help="file of kernels/gpus")
    parser.add_argument("--out", type=Path, help="JSON file, written after every line")
    return parser


def main(argv: Sequence[str]) -> int:
    """Prints and writes the lines; the exit code is 1 where bits differ or nothing ran."""
    options = arguments().parse_args(argv)
    tiles = Tiles.load("triton_gpu", options.gpu).linear
    lines = list[dict[str, Any]]()
    found: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "bench.kernels.layer_gemms", *argv]),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "sides": {"torch": {"device": torch.cuda.get_device_name()}},
        "lines": lines,
    }
    for format in options.format:
        for rows in options.rows:
            layers, attend = Layers(format, rows, "cuda"), attention_of(rows)
            for line in measured(layers, options.tiles, tiles, microseconds, attend):
                lines.append({"format": format, "rows": rows} | line)
                print(line_of(lines[-1]), flush=True)
                if options.out:
                    write_results(options.out, found)
    has_other_bits = any(not line.get("bits_equal", True) for line in lines)
    return int(has_other_bits or not any("us" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
