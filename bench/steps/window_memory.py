"""KV memory of models with sliding windows, next to that of full attention in all their layers.

    python -m bench.steps.window_memory --shape bench/shapes/gpt-oss-20b --context-length 131072

The bytes are those of the memory plan for one H200 and requests of the whole context, without and
with the prefix cache, which keeps further windows. Weights are not read, and no GPU is required.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.common.markdown import table
from shared.options.command_line import parse
from shared.process.device import Device
from shared.process.start import prepare

DEVICE = Device("gpu", "NVIDIA H200", 139 << 30)
GIB = 1 << 30
NO_CACHE = "--disable-radix-cache"
TITLES = [
    "model",
    "context",
    "requests",
    "full layers, GiB",
    "windows",
    "windows with prefix cache",
]
TITLES += ["full attention in all layers", "ratio", "ratio with prefix cache"]


def kv_bytes(folder: Path, context_length: int, requests: int, *more: str) -> tuple[int, int]:
    """Returns the bytes of the KV pages of full attention, and of those of sliding windows.

    Args:
      folder: Folder with a config.json.
      context_length: Positions of a request.
      requests: Running requests, each of the whole context.
      more: Further flags of the server.

    Raises:
      ValueError: The model or its context length is unsupported; one sentence.
    """
    flags = ["--model-path", str(folder), "--load-format", "dummy"]
    flags += ["--context-length", str(context_length), "--max-running-requests", str(requests)]
    flags += ["--max-total-tokens", str(requests * context_length), *more]
    platform = import_module("torch_impl.platform").PLATFORM
    begun = prepare(parse(flags), replace(platform, find_device=lambda: DEVICE))
    lines = [line for line in begun.memory.lines if line.name.startswith("KV")]
    windows = sum(line.num_bytes for line in lines if line.name != "KV")
    return sum(line.num_bytes for line in lines) - windows, windows


def without_windows(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the contents of a config.json with full attention in all layers."""
    text = config.get("text_config", config)
    full = text | {"layer_types": ["full_attention"] * text["num_hidden_layers"]}
    return config | {"text_config": full} if "text_config" in config else full


def compared(folder: Path, context_length: int, requests: int) -> list[str]:
    """Returns the row of a model."""
    full, windows = kv_bytes(folder, context_length, requests, NO_CACHE)
    _, cached = kv_bytes(folder, context_length, requests)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with TemporaryDirectory() as other:
        text = json.dumps(without_windows(config))
        (Path(other) / "config.json").write_text(text, encoding="utf-8")
        whole, _ = kv_bytes(Path(other), context_length, requests, NO_CACHE)
    sizes = [f"{each / GIB:.2f}" for each in (full, windows, cached, whole)]
    ratios = f"{(full + windows) / whole:.2f}", f"{(full + cached) / whole:.2f}"
    return [folder.name, f"{context_length:,}", str(requests), *sizes, *ratios]


def main(argv: Sequence[str]) -> int:
    """Prints one row for each model."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--shape", type=Path, nargs="+", required=True)
    parser.add_argument("--context-length", type=int, default=131072)
    parser.add_argument("--requests", type=int, default=1)
    options = parser.parse_args(argv)
    try:
        rows = [compared(x, options.context_length, options.requests) for x in options.shape]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(table([TITLES, *rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
