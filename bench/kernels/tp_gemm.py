"""Tensor-parallel GEMMs of a layer with all-gathers, for `bench.kernels.tp_all_gather`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from kernels.peer_buffers import MOST_JOINED_ROWS, BufferLayout
from kernels.tiles import Tiles
from shared.models.formats.weight_format import PLAIN
from shared.spec.reduction_order import SQUARES
from tests.support.gpu_ranks import LOOKS, Rank

FEW_ROWS = 128
LAYERS = 8
HIDDEN, QKV, INNER = 4096, 6144, 12288
EPS = 1e-6

Line = dict[str, Any]


def note(found: list[Line], line: Line, rank: Rank) -> None:
    """Takes a line over, and prints it once."""
    found.append(line)
    if rank.rank == 0:
        named = [f"{name} {x}" for name, x in line.items() if name not in ("part", "language")]
        print(f"{line['part']:8}{line['language']:6} " + "  ".join(named), flush=True)


@dataclass(frozen=True)
class Timed:
    """Timing of a step of several gathers.

    Attributes:
      rank: Rank of the process.
      symmetric_buffer: Symmetric buffer of the rank.
    """

    rank: Rank
    symmetric_buffer: Any

    def us(self, step: Callable[[], object], count: int, is_alone: bool = False) -> float:
        """Returns the microseconds of each of the operations of a step, in a CUDA graph.

        With `is_alone` no other rank takes part.
        """
        meet = (lambda: None) if is_alone else self.rank.meet
        self.symmetric_buffer.wait(0)
        step()  # no rank waits for one that still compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        torch.cuda.synchronize()
        meet()
        self.symmetric_buffer.wait(LOOKS)
        torch.cuda.synchronize()
        meet()
        found = []
        for _ in range(4):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            meet()
            begin.record()
            for _ in range(20):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) / 20 / count * 1e3)
        meet()
        return min(found[1:])


def buffer_of(rank: Rank, size: int) -> Any:
    symmetric_memory = import_module("kernels.triton_gpu.collectives.symmetric_memory")
    device = torch.device("cuda", rank.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    made = symmetric_memory.SymmetricBuffer(BufferLayout(rank.count, size), rank.rank, device)
    made.connect(rank.meet(made.handle))
    return made


def block_bytes(ranks: int, rows: int) -> int:
    """Enough for the widest gather."""
    return max(rows * INNER * 2 // ranks + (1 << 16), 1 << 20) // 256 * 256


def randoms(device: torch.device, seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, device=device, generator=generator)


@dataclass(frozen=True)
class Product:
    """One of a layer's, as `linear.product` takes it."""

    inputs: int
    outputs: int
    is_gated: bool
    is_added: bool


PRODUCTS = {
    "qkv": Product(HIDDEN, QKV, False, False),
    "o": Product(HIDDEN, HIDDEN, False, True),
    "gate_up": Product(HIDDEN, INNER, True, False),
    "down": Product(INNER, HIDDEN, False, True),
}
GATHERED = ("o", "gate_up", "down")
"""GEMMs with an all-gather of their result, same as attention."""


class Layers:
    """Weights of some layers and what runs them, for one rank of several or for one GPU."""

    def __init__(self, rank: Rank, ranks: int, symmetric_buffer: Any, R: int) -> None:
        self._linear = import_module("kernels.triton_gpu.gemm.linear")
        self._ranks = import_module("kernels.triton_gpu.collectives.all_gather")
        self._symmetric_buffer, self._count, self._R = symmetric_buffer, ranks, R
        self._device = symmetric_buffer.mail.place.device
        own = rank.rank if ranks > 1 else 0
        self._weights = {
            name: [self._weight(name, layer, own) for layer in range(LAYERS)] for name in PRODUCTS
        }
        share = HIDDEN // ranks
        mine = slice(own * share, (own + 1) * share)
        self._stream = randoms(self._device, 5, R, HIDDEN).bfloat16()[:, mine].contiguous()
        self._scaled = randoms(self._device, 6, R, HIDDEN).bfloat16()
        self._attended = randoms(self._device, 7, R, HIDDEN).bfloat16()[:, mine].contiguous()
        self._norm = torch.ones(share, device=self._device)
        self._sums = torch.ones(R, HIDDEN // SQUARES.chunk, device=self._device)
        self.tiles = Tiles.load("triton_gpu", torch.cuda.get_device_name()).linear

    def _weight(self, name: str, layer: int, own: int) -> torch.Tensor:
        product = PRODUCTS[name]
        halves = 2 if product.is_gated else 1
        seed = 1000 * list(PRODUCTS).index(name) + layer
        whole = randoms(self._device, seed, halves, product.outputs, product.inputs) / 64
        return whole.bfloat16().chunk(self._count, 1)[own].reshape(-1, product.inputs).contiguous()

    def _gather(self, values: Any, sums: Any, call: int) -> tuple[Any, Any]:
        if self._count == 1:
            return values, sums
        return self._ranks.all_gather(
            values, sums, self._symmetric_buffer.mail, call, boxes=self._symmetric_buffer.boxes
        )

    def _multiply(self, name: str, layer: int, x: Any, sums: Any, call: int, way: str) -> Any:
        """The stream of a rank, what is read next, and its sums."""
        product, weight = PRODUCTS[name], self._weights[name][layer]
        outputs = product.outputs // self._count
        tiles = self.tiles.of(
            item_bytes=2,
            rows=self._R,
            outputs=outputs,
            gated=int(product.is_gated),
            one_segment=1,
        )
        gather = None
        if way == "joined" and name in GATHERED:
            gather = self._ranks.Gather(
                self._symmetric_buffer.mail, call, self._symmetric_buffer.boxes
            )
        out, scaled, sums, _ = self._linear.product(
            x,
            weight,
            None,
            format=PLAIN,
            out_type=torch.bfloat16,
            squares=None if product.is_added else sums,
            eps=EPS,
            is_gated=product.is_gated,
            bias=None,
            factor=1.0,
            added=self._stream if product.is_added else None,
            norm=self._norm if product.is_added else None,
            order=SQUARES,
            tiles=tiles,
            gather=gather,
        )
        if name == "qkv":
            return out, None, None
        if way == "apart":
            read, sums = self._gather(scaled if product.is_added else out, sums, call)
            return out, read, sums
        return out, scaled if product.is_added else out, sums

    def run(self, way: str, only: str | None = None) -> torch.Tensor:
        """All layers; what is read after them. Of one product alone, that of each layer."""
        scaled, sums = self._scaled, self._sums
        read = torch.zeros(self._R, INNER, dtype=torch.bfloat16, device=self._device)
        for layer in range(LAYERS):
            multiply, call = partial(self._multiply, layer=layer, way=way), 4 * layer
            if only is not None:
                x = read if only == "down" else self._scaled
                _, got, _ = multiply(only, x=x, sums=self._sums, call=layer)
                scaled = scaled if got is None else got
                continue
            multiply("qkv", x=scaled, sums=sums, call=0)
            attended = self._gather(self._attended, None, call)[0]
            _, scaled, sums = multiply("o", x=attended, sums=None, call=call + 1)
            _, inner, _ = multiply("gate_up", x=scaled, sums=sums, call=call + 2)
            _, scaled, sums = multiply("down", x=inner, sums=None, call=call + 3)
        if self._count > 1:
            self._ranks.advance_sequence(
                self._symmetric_buffer.mail, LAYERS if only else 4 * LAYERS
            )
        return scaled


def layer_in_torch(rank: Rank, rows: tuple[int, ...]) -> list[Line]:
    """Microseconds of a layer's products, and of each with its gather."""
    found: list[Line] = []
    symmetric_buffer = buffer_of(rank, block_bytes(rank.count, max(rows)))
    timed = Timed(rank, symmetric_buffer)
    for R in rows:
        ways = ["alone", "apart", *(["joined"] if R <= MOST_JOINED_ROWS else [])]
        results: dict[str, torch.Tensor] = {}
        for way in ways:
            count = 1 if way == "alone" else rank.count
            is_idle = way == "alone" and rank.rank > 0
            layers = None if is_idle else Layers(rank, count, symmetric_buffer, R)
            line: Line = {"part": "layer", "language": "torch", "ranks": count, "rows": R}
            line["way"] = way
            if layers is not None:
                step = partial(layers.run, way)
                line["us"] = round(timed.us(step, LAYERS, way == "alone"), 2)
                results[way] = layers.run(way)
                torch.cuda.synchronize()
                for name in PRODUCTS:
                    step = partial(layers.run, way, name)
                    line[name] = round(timed.us(step, LAYERS, way == "alone"), 2)
            rank.meet()
            if way != "alone" and rank.rank == 0:
                line["is_right"] = torch.equal(results[way], results["alone"])
            note(found, line, rank)
            del layers
            torch.cuda.empty_cache()
    missing = symmetric_buffer.missing()
    assert missing is None, f"rank {rank.rank} missed {missing}"
    return found


CANDIDATES = tuple(
    {"columns": columns, "depth": depth, "stages": stages, "swapped": swapped, "rows": rows}
    for rows, columns, depth, stages, swapped in (
        (16, 16, 256, 6, False),
        (16, 16, 512, 3, False),
        (16, 32, 128, 8, False),
        (16, 32, 256, 4, False),
        (16, 64, 128, 8, True),
        (16, 64, 256, 4, True),
        (16, 128, 128, 5, True),
    )
)
"""Tiles for few rows at the widths of ranks. A GEMM with a sum of squares needs 64 columns or
more.
"""


def tiles_in_torch(rank: Rank, rows: tuple[int, ...], counts: tuple[int, ...]) -> list[Line]:
    """Returns the microseconds of each GEMM of one rank with other tiles, by number of ranks."""
    linear = import_module("kernels.triton_gpu.gemm.linear")
    symmetric_buffer, jobs = buffer_of(rank, 1 << 20), list[tuple[Any, ...]]()
    table = Tiles.load("triton_gpu", torch.cuda.get_device_name()).linear
    timed, device = Timed(rank, symmetric_buffer), symmetric_buffer.mail.place.device
    for name, product in PRODUCTS.items():
        for count in counts:
            for R in rows:
                sizes = {"outputs": product.outputs // count, "one_segment": 1}
                usual = table.of(item_bytes=2, rows=R, gated=int(product.is_gated), **sizes)
                least = max(16, min(1 << (R - 1).bit_length(), 32))
                jobs += [(name, count, R, usual, {})]
                jobs += [
                    (name, count, R, usual, change | {"rows": least})
                    for change in CANDIDATES
                    if not (product.is_gated and change["columns"] > 64)
                ]
    found = []
    for name, count, R, usual, change in jobs[rank.rank :: rank.count]:
        product = PRODUCTS[name]
        outputs = product.outputs // count * (2 if product.is_gated else 1)
        size = outputs * product.inputs * 2
        copies = max(2, (100 << 20) // size + 1)
        x = randoms(device, 1, R, product.inputs).bfloat16()
        sums = torch.ones(R, product.inputs // SQUARES.chunk, device=device)
        weights = torch.zeros(copies, outputs, product.inputs, dtype=torch.bfloat16, device=device)
        line: Line = {"part": "tiles", "language": "torch", "product": name, "ranks": count}
        line |= {"rows": R, "outputs": product.outputs // count, **change}

        cut = replace(usual, **change)

        def step(
            x: Any = x,
            weights: Any = weights,
            sums: Any = sums,
            tiles: Any = cut,
            is_gated: bool = product.is_gated,
        ) -> None:
            for weight in weights:
                linear.product(
                    x,
                    weight,
                    None,
                    format=PLAIN,
                    out_type=torch.bfloat16,
                    squares=sums,
                    eps=EPS,
                    is_gated=is_gated,
                    bias=None,
                    factor=1.0,
                    added=None,
                    norm=None,
                    order=SQUARES,
                    tiles=tiles,
                )

        try:
            line["us"] = round(timed.us(step, copies, True), 2)
            line["gigabytes_per_s"] = round(size / line["us"] / 1e3)
        except Exception as error:  # of whatever kind: others may be taken
            line["failed"] = repr(error)[:80]
        note(found, line, rank)
        del weights
    return [line for each in rank.meet(found) for line in each]
