"""Engines with LoRA adapters in the test process, and their requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.engine.engine import Engine
from shared.engine.request import Request, SamplingParams
from shared.options.command_line import parse
from shared.process.engines import make_engine
from shared.process.start import Platform, prepare
from tests.support.run_engine import drive
from tests.support.serve_reference import PLATFORM

PROMPT = tuple(range(5, 75))
GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 0.8, "seed32": 7}


def engine_of(
    folder: Path,
    words: Sequence[str] = (),
    *,
    total: int = 1024,
    platform: Platform = PLATFORM,
    slots: int = 4,
    has_images: bool = False,
) -> Engine:
    """Returns the engine of a checkpoint with adapters, on the numpy reference by default."""
    options = parse(
        [
            *("--model-path", str(folder), "--context-length", "256", "--page-size", "16"),
            *(
                "--max-running-requests",
                str(slots),
                "--max-total-tokens",
                str(total),
                "--log-level",
                "error",
            ),
            *(() if has_images else ("--language-model-only",)),
            *words,
        ]
    )
    start = prepare(options, platform)
    backend = start.load(platform, lambda num_bytes: None)
    backend.prepare(backend.capacity.programs, lambda program: None)
    return make_engine(backend, start.memory, adapters=start.read_adapters())


def request(
    number: int, name: str = "", prompt: Sequence[int] = PROMPT, **sampling: Any
) -> Request:
    """Returns a request of an adapter, or of the base model."""
    params = {"max_tokens": 16, "lora": name, **GREEDY, **sampling}
    return Request(request_id=number, prompt=tuple(prompt), sampling=SamplingParams(**params))


def texts(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Returns the tokens of requests that run together."""
    outcomes = drive(engine, requests)
    return [outcomes[each.request_id].tokens for each in requests]
