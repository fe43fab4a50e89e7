"""Checks and times the attention kernels of both frameworks on a GPU.

    python -m bench.attention results.json

Each kernel is compared with a reference in float64, then timed over inputs that rotate, so that no
call finds its keys and values in the cache. Beside the time stands the bytes limit: what a call
must read and write, at the rate that a large copy reaches on the same GPU. Every line is printed,
and the file written, as soon as it is known, and past `--seconds` no further case is begun.
"""

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import jax
import numpy as np
import torch
from torch import Tensor

from kernels.pallas_gpu import attention as pallas
from kernels.triton_gpu import attention as triton

# More than the cache of any GPU so far (50 MiB on an H200).
ROTATED_BYTES = 100 * 2**20


@dataclass(frozen=True)
class Shape:
    """Trees of `nodes` for `batch` requests of equal length; heads and pages of an 8B model."""

    batch: int
    nodes: int
    context: int = 4096
    q_heads: int = 32
    k_heads: int = 8
    D: int = 128
    page: int = 64
    dtype: str = "bfloat16"

    @property
    def bytes(self) -> int:
        """Of one call: keys and values once, queries and results."""
        size = getattr(torch, self.dtype).itemsize
        read = 2 * (self.context + self.nodes) * self.k_heads
        return self.batch * self.D * size * (read + 2 * self.nodes * self.q_heads)

    @property
    def sets(self) -> int:
        """Inputs to rotate."""
        return max(2, -(-ROTATED_BYTES // self.bytes))


def inputs(shape: Shape, is_chain: bool, seed: int) -> list[list[Tensor]]:
    """The arguments of `attend`, one list for each set; the sets share the pools."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator("cuda").manual_seed(seed)
    B, N, dtype = shape.batch, shape.nodes, getattr(torch, shape.dtype)
    columns = -(-(shape.context + N) // shape.page)
    num_pages = 1 + shape.sets * B * columns
    tables = 1 + rng.permutation(num_pages - 1).reshape(shape.sets, B, columns)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda").to(dtype)

    def ints(x: np.ndarray) -> Tensor:
        return torch.tensor(x, dtype=torch.int32, device="cuda")

    pools = [random(num_pages, shape.page, shape.k_heads, shape.D) for _ in range(2)]
    node = np.tile(np.arange(N), B)
    if is_chain:
        until, window = shape.context + node + 1, np.zeros((B * N, 0), bool)
    else:
        until, window = np.full(B * N, shape.context), ancestors(rng, B, N)
    rows = [ints(np.arange(B + 1) * N), ints(0 * until), ints(until), torch.tensor(window).cuda()]
    return [[random(B * N, shape.q_heads, shape.D), *pools, ints(table), *rows] for table in tables]


def ancestors(rng: np.random.Generator, B: int, N: int) -> np.ndarray:
    """The window masks [B N, N] of random trees."""
    mask = np.tile(np.eye(N, dtype=bool), (B, 1, 1))
    for request in mask:
        for node in range(1, N):
            request[node] |= request[rng.integers(max(0, node - 8), node)]
    return mask.reshape(B * N, N)


def reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    row_starts: Tensor,
    first: Tensor,
    until: Tensor,
    window: Tensor,
) -> Tensor:
    """As `shared.spec.attention.attend`, in float64, request by request."""
    out = torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[1] // k_pages.shape[2]
    for pages, start, stop in zip(page_table, row_starts[:-1], row_starts[1:], strict=True):
        rows = slice(int(start), int(stop))
        k, v = (x[pages.long()].flatten(0, 1).double() for x in (k_pages, v_pages))
        k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
        position = torch.arange(k.shape[1], device=q.device)
        seen = (position >= first[rows, None]) & (position < until[rows, None])
        if window.shape[1]:
            place = position - until[rows, None]
            inside = (place >= 0) & (place < window.shape[1])
            seen |= inside & window[rows].gather(1, place.clamp(0, window.shape[1] - 1).long())
        scores = q[rows].double().transpose(0, 1) @ k.transpose(1, 2) * q.shape[2] ** -0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        out[rows] = (weights @ v).transpose(0, 1)
    return out


Timer = Callable[[int], float]
"""Seconds of one call, from a number of rounds over all sets."""


class TritonKernel:
    """Runs the Triton kernel: by itself, or each set once in a CUDA graph."""

    name = "triton"

    def run(self, arguments: list[Tensor], max_rows: int) -> Tensor:
        return triton.attend(*arguments, max_rows=max_rows)

    def timer(self, sets: list[list[Tensor]], max_rows: int) -> Timer:
        for arguments in sets:
            self.run(arguments, max_rows)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [self.run(arguments, max_rows) for arguments in sets]
        graph.replay()
        assert all(x.isfinite().all() for x in outs)

        def seconds(repeats: int) -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(repeats):
                graph.replay()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1e3 / repeats / len(sets)

        return seconds


class PallasKernel:
    """Runs the Pallas kernel: by itself, or each set once in one program."""

    name = "pallas"

    def __init__(self) -> None:
        self.attend = jax.jit(pallas.attend, static_argnames="max_rows")

    def run(self, arguments: list[Tensor], max_rows: int) -> Tensor:
        out = self.attend(*map(as_jax, arguments), max_rows=max_rows)
        return torch.from_dlpack(jax.block_until_ready(out))

    def timer(self, sets: list[list[Tensor]], max_rows: int) -> Timer:
        attend = partial(self.attend, max_rows=max_rows)
        program = jax.jit(lambda sets: [attend(*arguments) for arguments in sets])
        arrays = jax.tree.map(as_jax, sets)
        for _ in range(3):  # plain, then recorded as a command buffer, then replayed
            jax.block_until_ready(program(arrays))

        def seconds(repeats: int) -> float:
            begin = time.perf_counter()
            for _ in range(repeats):
                outs = program(arrays)
            jax.block_until_ready(outs)
            return (time.perf_counter() - begin) / repeats / len(sets)

        return seconds


def as_jax(x: Tensor) -> jax.Array:
    """The tensor's memory as an array; a part that XLA cannot align or that is empty is copied."""
    x = x.clone() if x.data_ptr() % 16 else x
    torch.cuda.synchronize()
    return jax.dlpack.from_dlpack(x) if x.numel() else jax.numpy.zeros(x.shape, bool)


Kernel = TritonKernel | PallasKernel


def error(out: Tensor, want: Tensor) -> float:
    """Length of the difference over the length of what is wanted; NaN stays NaN."""
    return float((out.double() - want).norm() / want.norm())


def check(kernel: Kernel) -> dict[str, float | bool]:
    """What must hold besides the timed shapes: float32, and bits that depend on a row alone."""
    small = Shape(3, 16, context=1000, D=64, page=16, dtype="float32")
    arguments = inputs(small, False, seed=1)[0]
    found = {"float32": error(kernel.run(arguments, 16), reference(*arguments))}
    shape = Shape(4, 16, context=3000)
    arguments = inputs(shape, True, seed=2)[0]
    together = kernel.run(arguments, 16)
    q, k_pages, v_pages, table, _, first, until, window = arguments
    for rows_of_request in (1, 4, 16):
        starts = torch.tensor([0, rows_of_request], dtype=torch.int32, device="cuda")
        equal = True
        for row in range(0, 64, rows_of_request):
            rows, one = slice(row, row + rows_of_request), slice(row // 16, row // 16 + 1)
            alone = [q[rows], k_pages, v_pages, table[one], starts, first[rows], until[rows]]
            out = kernel.run([*alone, window[rows]], rows_of_request)
            equal &= torch.equal(out, together[rows])
        found[f"bits equal, {rows_of_request} of 64 rows"] = equal
    return found


def measure(kernel: Kernel, shape: Shape, copy_rate: float) -> dict:
    """Checks one shape and times it: the median of seven rounds, and their spread."""
    sets = inputs(shape, False, seed=0)
    found = error(kernel.run(sets[0], shape.nodes), reference(*sets[0]))
    timer, repeats = kernel.timer(sets, shape.nodes), max(3, 60 // len(sets))
    seconds = sorted(timer(repeats) for _ in range(7))
    median = statistics.median(seconds)
    return {
        "kernel": kernel.name,
        **asdict(shape),
        "error": found,
        "us": median * 1e6,
        "us_spread": (seconds[-1] - seconds[0]) * 1e6,
        "limit_us": shape.bytes / copy_rate * 1e6,
        "gigabytes_per_s": shape.bytes / median / 1e9,
    }


def copy_rate() -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    rounds = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / statistics.median(rounds)


def bits_equal(kernels: Sequence[Kernel], shape: Shape) -> bool:
    """Whether the kernels give the same bits."""
    arguments = inputs(shape, False, seed=3)[0]
    return torch.equal(*(kernel.run(arguments, shape.nodes) for kernel in kernels))


HEADER = f"{'kernel':8}{'B':>4}{'N':>4}{'error':>10}{'us':>9}{'limit':>9}{'GB/s':>8}"


def rate_line(found: dict) -> str:
    """One shape and kernel under `HEADER`."""
    times = f"{found['us']:9.1f}{found['limit_us']:9.1f}{found['gigabytes_per_s']:8.0f}"
    cells = f"{found['kernel']:8}{found['batch']:4}{found['nodes']:4}{found['error']:10.1e}"
    return cells + times


class Report:
    """What is found, printed and written as it comes.

    Attributes:
      found: All of it, as the file has it.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self.found: dict = {"results": [], "bits_equal": {}, "left_out": []}
        self._path, self._until = path, time.monotonic() + seconds

    def add(self, line: str, **found: object) -> None:
        """Takes over some entries."""
        self.found |= found
        self._path.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
        print(line, flush=True)

    def may_begin(self, case: str) -> bool:
        """Whether there is time for another case; the report says what was left out."""
        if time.monotonic() < self._until:
            return True
        self.add(f"left out: {case}", left_out=[*self.found["left_out"], case])
        return False


def run(report: Report, shapes: list[Shape]) -> None:
    """Checks and times both kernels, Triton's first: torch may not capture once JAX is live."""
    report.add(f"copy: {(rate := copy_rate()) / 1e9:.0f} GB/s", copy_gigabytes_per_s=rate / 1e9)
    kernels = (TritonKernel(), PallasKernel())
    for kernel in kernels:
        checked = check(kernel)
        report.add(f"{kernel.name}: {checked}\n{HEADER}", **{kernel.name: checked})
        for shape in shapes:
            if report.may_begin(f"{kernel.name} {shape.batch} {shape.nodes}"):
                line = measure(kernel, shape, rate)
                report.add(rate_line(line), results=[*report.found["results"], line])
    for shape in shapes:
        name = f"{shape.batch} {shape.nodes}"
        if report.may_begin(f"bits {name}"):
            equal = report.found["bits_equal"] | {name: bits_equal(kernels, shape)}
            report.add(f"bits equal, B and N {name}: {equal[name]}", bits_equal=equal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="the JSON file to write")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--split", type=int, default=triton.SPLIT, help="positions of a split")
    parser.add_argument("--seconds", type=float, default=75, help="begin no case after that long")
    arguments = parser.parse_args()
    triton.SPLIT = pallas.SPLIT = arguments.split
    report = Report(arguments.results, arguments.seconds)
    gpu = torch.cuda.get_device_name()
    made = {"command": shlex.join(["python", "-m", "bench.attention", *sys.argv[1:]])}
    made |= {"python": platform.python_version(), "torch": torch.__version__}
    made |= {"jax": jax.__version__, "gpu": gpu, "split": arguments.split}
    report.add(f"{gpu}, splits of {arguments.split}", **made)
    run(report, [Shape(B, N) for B, N in product(arguments.batch, arguments.nodes)])
    # bfloat16 has 8 bits, weights and results are rounded to it once; NaN fails too.
    assert all(r["error"] < 1e-2 for r in report.found["results"])
    assert all(report.found[name]["float32"] < 1e-5 for name in ("triton", "pallas"))


if __name__ == "__main__":
    main()
