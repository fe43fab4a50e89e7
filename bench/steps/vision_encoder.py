"""Milliseconds of the vision encoder, next to its GEMMs, and the share of equal bits.

    python -m bench.steps.vision_encoder --tokens 256 1024 4096 --out bench/results/FILE.json

A vision encoder of Qwen3.5-9B's shape with dummy weights encodes square images one by one in
bfloat16. The limit counts its GEMMs and those of attention at the sustained rate of a large GEMM of
the framework. Values with equal bits in both backends are counted.
"""

import argparse
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from bench.common import gpu_clock
from bench.common.environment import write_results
from shared.models.dummy_weights import DummyCheckpoint
from shared.models.image_processor import ImageProcessorConfig
from shared.models.vision_config import VisionConfig
from shared.models.vision_parameters import vision_encoder_parameters
from shared.spec import vision_encoder
from shared.spec.vision_encoder import Pixels
from tests.support.op_sides import SIDES
from tests.support.vision_shapes import QWEN3_5

IMAGES = ImageProcessorConfig(
    multiple=32, min_pixels=1 << 16, max_pixels=1 << 24, mean=(0.5,) * 3, deviation=(0.5,) * 3
)
SEED = 1

Line = dict[str, Any]
Rows = Float[np.ndarray, "tokens out"]
Encoder = Callable[[], Rows]


def image_of(tokens: int, vision: VisionConfig) -> Pixels:
    """Returns a random image with a square number of tokens."""
    side = math.isqrt(tokens) * vision.patch_size * vision.merge_size
    pixels = np.random.default_rng(SEED).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return vision_encoder.pixels_of(pixels, vision, IMAGES)


def products_of(patches: int, vision: VisionConfig) -> int:
    """Multiplications for one image, with those of every patch's attention to all."""
    outside = [p for p in vision_encoder_parameters(vision) if len(p.shape) == 2 and not p.stacked]
    sizes = {p.name: math.prod(p.shape) for p in outside if p.name != "vision.places"}
    of_merger = sum(size for name, size in sizes.items() if "merger" in name)
    of_patch = sum(sizes.values()) - of_merger
    in_blocks = vision.depth * vision.block_products(patches)
    return in_blocks + patches * (of_patch + of_merger // vision.merged)


def torch_encoder(vision: VisionConfig) -> Callable[[Pixels], Encoder]:
    """Loads the vision encoder in torch; returns a function that encodes an image on the device."""
    torch, of_torch = import_module("torch"), import_module("torch_impl.vision_encoder")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = import_module("torch_impl.weights").load_vision_encoder(
        _dummy(vision), vision, "bfloat16", device, _unseen
    )

    def of(image: Pixels) -> Encoder:
        placed = {name: torch.from_numpy(x).to(device) for name, x in vars(image).items()}
        own = of_torch.Pixels(**placed)

        def encoded() -> Any:
            return of_torch.encoded(vision, weights, of_torch.patches(vision, own)).float()

        launched = _captured(torch, encoded) if device.type == "cuda" else encoded

        def encode() -> Rows:
            with torch.inference_mode():
                return launched().cpu().numpy()

        return encode

    return of


def _captured(torch: Any, encoded: Callable[[], Any]) -> Callable[[], Any]:
    """Captures a CUDA graph, as the backend does; the first run compiles its kernels."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode():
        with torch.cuda.stream(stream):
            encoded()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            rows = encoded()

    def replayed() -> Any:
        graph.replay()
        return rows

    return replayed


def jax_encoder(vision: VisionConfig) -> Callable[[Pixels], Encoder]:
    """Same as `torch_encoder`, in JAX."""
    jax, jnp = import_module("jax"), import_module("jax.numpy")
    of_jax, loading = import_module("jax_impl.vision_encoder"), import_module("jax_impl.weights")
    device = jax.devices()[0]
    loaded = loading.load_vision_encoder(_dummy(vision), vision, jnp.bfloat16, device, _unseen)

    @jax.jit
    def encoded(loaded: Any, image: Any) -> Any:
        patches = of_jax.patches(vision, image)
        return of_jax.encoded(vision, loading.vision_encoder_of(loaded), patches).astype(
            jnp.float32
        )

    def of(image: Pixels) -> Encoder:
        own = of_jax.Pixels(**jax.device_put(vars(image), device))
        return lambda: np.asarray(encoded(loaded, own))

    return of


ENCODERS = {"torch": torch_encoder, "jax": jax_encoder}


def _dummy(vision: VisionConfig) -> DummyCheckpoint:
    return DummyCheckpoint(vision_encoder_parameters(vision), {}, None)


def _unseen(num_bytes: int) -> None:
    pass


def measure(encode: Encoder, rounds: int, on_gpu: bool) -> tuple[Line, Rows]:
    """Times of one image, until its rows are in main memory, and the rows."""
    encode()
    rows, seconds = encode(), []
    with gpu_clock.watched(on_gpu) as watched:
        for _ in range(rounds):
            began = time.perf_counter()
            encode()
            seconds.append(time.perf_counter() - began)
    times = {"ms": statistics.median(seconds), "ms_low": min(seconds), "ms_high": max(seconds)}
    return {name: round(1e3 * x, 3) for name, x in times.items()} | {"card": watched}, rows


def run(options: argparse.Namespace, command: str) -> Line:
    """Encodes the images that the options name on each backend."""
    found: Line = {"command": command, "versions": {}, "sides": {}, "lines": []}
    vision = replace(QWEN3_5, depth=options.depth)
    known: dict[int, Rows] = {}
    for name in options.backend:
        side = SIDES[name]()
        rate = side.product_rate()
        found["versions"][name] = side.version
        found["sides"][name] = {"device": side.device, "teraflops": 2 * rate / 1e12}
        side.release()
        print(f"{name} on {side.device}, products {2 * rate / 1e12:.3g} TFLOP/s")
        encoder = ENCODERS[name](vision)
        for tokens in options.tokens:
            image = image_of(tokens, vision)
            line, rows = measure(encoder(image), options.rounds, side.is_gpu)
            limit = 1e3 * products_of(image.num_patches, vision) / rate
            line |= {"backend": name, "tokens": len(rows), "products_ms": round(limit, 3)}
            first = known.setdefault(tokens, rows)
            line["equal_share"] = None if first is rows else round(float(np.mean(first == rows)), 4)
            found["lines"].append(line)
            print(format_line(line), flush=True)
            if options.out:
                write_results(options.out, found)
    return found


def format_line(line: Line) -> str:
    """A line for a terminal."""
    equal = line["equal_share"]
    return (
        f"{line['backend']:6}{line['tokens']:6} tokens {line['ms']:9.3f} ms "
        f"({line['ms_low']:.3f} to {line['ms_high']:.3f}), products {line['products_ms']:.3f} ms"
        f"{gpu_clock.format_card(line['card'])}" + ("" if equal is None else f", equal {equal:.2%}")
    )


def options(words: list[str] | None = None) -> argparse.Namespace:
    """Returns the parser of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", nargs="+", choices=list(ENCODERS), default=list(ENCODERS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 1024, 4096])
    parser.add_argument(
        "--depth", type=int, default=QWEN3_5.depth, help="blocks of the vision encoder"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON file, written after every line")
    return parser.parse_args(words)


def main() -> int:
    """Prints and writes the lines."""
    run(options(), shlex.join(["python", "-m", "bench.steps.vision_encoder", *sys.argv[1:]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
