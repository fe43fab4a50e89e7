"""Milliseconds to the first token after an image, and of decoding after it, next to text.

    python -m bench.steps.vlm_steps --model bench/shapes/qwen3.5-9b --tokens 256 1024 4096

A model with dummy weights gets a vision encoder of Qwen3.5-9B's shape. One prompt with one image
runs on an idle engine, without HTTP: with a new image, with a cached image, and as a text of the
same length. Then a prompt with a new image arrives next to a stream, and the stream's gaps are
reported. The last line has planned bytes and the peak of the framework.
"""

import argparse
import json
import math
import shlex
import statistics
import sys
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.common import gpu_clock
from bench.common.environment import write_results
from bench.common.session import peak_bytes, reset_peak
from bench.steps.vision_encoder import IMAGES, QWEN3_5
from shared.engine.image_inputs import PromptImage
from shared.engine.request import Request, SamplingParams
from shared.models.image_processor import FILE, PROCESSORS
from shared.process import image_startup
from tests.support.in_process_engine import Served, start
from tests.support.op_sides import SIDES

AROUND = 32
"""Number of words before an image, and after it."""

STEADY = 8
"""Tokens that a stream has before an image comes beside it."""

Line = dict[str, Any]


def write_seeing(model: Path, folder: Path, tokens: int) -> None:
    """Writes a config.json with a vision encoder next to the model's settings, and its processor's.

    The attention heads use M-RoPE with the sections of Qwen3.5's vision-language models.

    Args:
      tokens: Of the smallest image; a start has no programs for smaller ones.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    rotary, size = text["rope_parameters"], QWEN3_5.patch_size
    pairs = round(text["head_dim"] * rotary["partial_rotary_factor"]) // 2
    beside = pairs // 3
    rotary |= {"mrope_interleaved": True, "mrope_section": [pairs - 2 * beside, beside, beside]}
    tower = {
        "depth": QWEN3_5.depth,
        "hidden_size": QWEN3_5.hidden,
        "intermediate_size": QWEN3_5.intermediate,
        "num_heads": QWEN3_5.num_heads,
        "num_position_embeddings": QWEN3_5.table_side**2,
        "out_hidden_size": text["hidden_size"],
        "patch_size": size,
        "spatial_merge_size": QWEN3_5.merge_size,
        "temporal_patch_size": QWEN3_5.frames,
    }
    config |= {"vision_config": tower, "image_token_id": text["vocab_size"] - 1}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    processor = {
        "image_processor_type": PROCESSORS[0],
        "image_mean": IMAGES.mean,
        "image_std": IMAGES.deviation,
        "merge_size": QWEN3_5.merge_size,
        "patch_size": size,
        "temporal_patch_size": QWEN3_5.frames,
        "size": {
            "shortest_edge": tokens * IMAGES.multiple**2,
            "longest_edge": IMAGES.max_pixels,
        },
    }
    (folder / FILE).write_text(json.dumps(processor), encoding="utf-8")


def request_of(served: Served, tokens: int, seed: int, output: int, *, sees: bool) -> Request:
    """Returns a prompt with a square image, or the same number of words; equal for equal seeds."""
    pool = served.backend.capacity.images
    assert pool is not None  # a vision encoder was added
    side, image = math.isqrt(tokens), pool.vision.image_token
    rng = np.random.default_rng(seed)
    words = rng.integers(1, image, 2 * AROUND + side**2).tolist()
    images = ()
    if sees:
        pixels = rng.integers(0, 256, (side * IMAGES.multiple,) * 2 + (3,), dtype=np.uint8)
        images = (PromptImage.of(AROUND, pixels, IMAGES.multiple),)
        words[AROUND : images[0].end] = [image] * images[0].count
    sampling = SamplingParams(temperature=0.0, max_tokens=output)
    return Request(request_id=seed, prompt=tuple(words), images=images, sampling=sampling)


def asked(served: Served, request: Request) -> tuple[float, float]:
    """Milliseconds until the first token, and of each step behind it."""
    began, at = time.perf_counter(), []
    served.engine.add(request)
    while served.engine.busy:
        at += [time.perf_counter() for event in served.engine.step() for _ in event.tokens]
    return 1e3 * (at[0] - began), 1e3 * (at[-1] - at[0]) / (len(at) - 1)


def gaps_beside(served: Served, tokens: int, seed: int, output: int) -> list[float]:
    """Milliseconds between the tokens of a stream until a new image beside it is answered."""
    length = served.memory.max_request_tokens - 2 * AROUND - 1
    stream = request_of(served, 1, 2 * seed, length, sees=False)
    other = request_of(served, tokens, 2 * seed + 1, output, sees=True)
    at: list[float] = []
    served.engine.add(stream)
    while other.finish_reason is None:
        assert stream.finish_reason is None, "the stream outlives the image's answer"
        events = served.engine.step()
        at += [time.perf_counter() for event in events if event.request_id == stream.request_id]
        if len(at) == STEADY and not other.arrival:
            served.engine.add(other)
    served.engine.abort(stream.request_id)
    while served.engine.busy:
        served.engine.step()
    return [1e3 * (later - earlier) for earlier, later in pairwise(at[STEADY - 1 :])]


def measure(served: Served, tokens: int, rounds: int, output: int) -> Line:
    """One size of image: medians."""
    found: dict[str, list[tuple[float, float]]] = {"new": [], "kept": [], "text": []}
    with gpu_clock.watched(served.device == "gpu") as watched:
        for number in range(1 + rounds):
            for name, times in found.items():
                request = request_of(served, tokens, 1 + number, output, sees=name != "text")
                times.append(asked(served, request))
    line: Line = {"tokens": math.isqrt(tokens) ** 2, "card": watched}
    for name, times in found.items():
        first, step = (statistics.median(each) for each in zip(*times[1:], strict=True))
        line |= {f"first_{name}_ms": round(first, 3), f"step_{name}_ms": round(step, 3)}
    gaps = [gaps_beside(served, tokens, 1000 + number, output) for number in range(1 + rounds)][1:]
    line |= {"gap_longest_ms": round(max(map(max, gaps)), 3)}
    line |= {"gap_median_ms": round(statistics.median(gap for each in gaps for gap in each), 3)}
    return line


def format_line(line: Line) -> str:
    """A line for a terminal."""
    first, step = (
        [f"{line[f'{what}_{name}_ms']:.2f}" for name in ("new", "kept", "text")]
        for what in ("first", "step")
    )
    return (
        f"{line['backend']:6}{line['tokens']:6} tokens: first {first[0]} ms, {first[1]} where the "
        f"image is kept, {first[2]} of text; a step {step[0]} ms, {step[1]}, {step[2]}; "
        f"a stream's longest gap {line['gap_longest_ms']:.2f}, median {line['gap_median_ms']:.2f}"
        f"{gpu_clock.format_card(line['card'])}"
    )


def run(options: argparse.Namespace, command: str) -> Line:
    """Serves what the options name.

    Raises:
      ValueError: A start is unsupported; one sentence.
    """
    found: Line = {"command": command, "tower": asdict(QWEN3_5), "sides": {}, "lines": []}
    with TemporaryDirectory() as folder:
        write_seeing(options.model, Path(folder), min(options.tokens))
        for backend in options.backend:
            side = SIDES[backend]()
            found["sides"][backend] = {"device": side.device, "version": side.version}
            side.release()
            reset_peak(backend)
            words = ["--model-path", folder, "--load-format", "dummy", *options.flags.split()]
            words += ["--max-image-tokens", str(max(options.tokens))]
            context = max(options.tokens) + 2 * AROUND + options.output
            # Images come as pixels here: nothing is decoded, so nothing has to be installed.
            with patch.object(image_startup, "find_spec", lambda name: True):
                served = start(backend, words, batch=2, context=context, radix_cache=False)
            for tokens in options.tokens:
                line = {"backend": backend}
                line |= measure(served, tokens, options.rounds, options.output)
                found["lines"].append(line)
                print(format_line(line), flush=True)
                if options.out:
                    write_results(options.out, found)
            planned, peak = served.memory.total_bytes, peak_bytes(backend)
            found["sides"][backend] |= {"planned_bytes": planned, "peak_bytes": peak}
            print(f"planned {planned / 1e9:.2f} GB, at most {peak / 1e9:.2f} were held")
            if options.out:
                write_results(options.out, found)
            served.engine.close()
    return found


def options(words: list[str] | None = None) -> argparse.Namespace:
    """Returns the parser of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with a config.json")
    parser.add_argument("--backend", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 1024, 4096])
    parser.add_argument("--output", type=int, default=64, help="tokens of an output")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flags", default="", help="more server flags, as one quoted word")
    parser.add_argument("--out", type=Path, help="JSON file, written after every line")
    return parser.parse_args(words)


def main() -> int:
    """Prints and writes the lines."""
    run(options(), shlex.join(["python", "-m", "bench.steps.vlm_steps", *sys.argv[1:]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
