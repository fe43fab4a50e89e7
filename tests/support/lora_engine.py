"""Engines with LoRA adapters in the test process, and their requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from shared.engine.engine import Engine
from shared.engine.request import Request, SamplingParams
from shared.options.command_line import parse
from shared.process.engines import make_engine
from shared.process.start import Platform, prepare
from tests.support.run_engine import drive
from tests.support.serve_reference import PLATFORM

PROMPT = tuple(range(5, 75))
GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 0.8, "seed32": 7}
NEXTN = ("--speculative-algorithm", "NEXTN")
TREE = (
    *("--speculative-eagle-topk", "2", "--speculative-num-steps", "3"),
    *("--speculative-num-draft-tokens", "6"),
)


def lora_flags(
    folders: Mapping[str, Path], names: Sequence[str] = ("first", "second")
) -> list[str]:
    """Returns the flags that serve some adapters."""
    return ["--lora-paths", *(f"{name}={folders[name]}" for name in names)]


def cells(
    frameworks: Sequence[str], drafters: Iterable[str], quick: Sequence[tuple[str, str, bool]]
) -> Iterator[object]:
    """Yields frameworks, drafters and whether tokens are sampled; all but `quick` in the matrix."""
    for framework in frameworks:
        for drafter in drafters:
            for sampled in (False, True):
                marks = () if (framework, drafter, sampled) in quick else pytest.mark.matrix
                name = f"{framework} {drafter} {'sampled' if sampled else 'greedy'}"
                yield pytest.param(framework, drafter, sampled, id=name, marks=marks)


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
