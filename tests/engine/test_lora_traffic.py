"""Many requests over more adapters than slots: every text, and nothing lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shared.engine.engine import Engine
from shared.engine.request import FinishReason, Request
from shared.models.families import config_from_folder
from shared.models.parameters import parameters
from shared.process.start import Platform
from tests.support.lora_engine import GREEDY, SAMPLED, engine_of, request, texts
from tests.support.lora_files import module_names, write_adapter, write_merged
from tests.support.run_engine import checked_step
from tests.support.serve_reference import platform_of

BASE = Path(__file__).parents[1] / "golden" / "qwen3"
PROMPTS = tuple(tuple(range(first, first + size)) for first, size in ((5, 20), (9, 70), (40, 33)))
NUM_TOKENS = 10
Case = tuple[str, int, bool]
"""Adapter, prompt, and True for a sampled request."""


def adapters_in(folder: Path, count: int) -> dict[str, Path]:
    modules = module_names(BASE, parameters(config_from_folder(BASE), False))
    ranks = (3, 4, 8)
    return {
        f"a{i}": write_adapter(folder / f"a{i}", BASE, modules, seed=i, rank=ranks[i % 3], alpha=9)
        for i in range(count)
    }


def made(number: int, case: Case) -> Request:
    name, prompt, is_sampled = case
    how = SAMPLED if is_sampled else GREEDY
    return request(number, name, PROMPTS[prompt], max_tokens=NUM_TOKENS, **how)


def merged_texts(
    folder: Path, adapters: dict[str, Path], platform: Platform
) -> dict[Case, list[int]]:
    """Returns the text of each case by plain decoding with the adapter merged."""
    found: dict[Case, list[int]] = {}
    for name, adapter in ({"": None} | adapters).items():
        model = BASE if adapter is None else write_merged(folder / f"m{name}", BASE, adapter)
        cases = [(name, i, sampled) for i in range(len(PROMPTS)) for sampled in (False, True)]
        rows = [made(i, ("", *case[1:])) for i, case in enumerate(cases)]
        found |= dict(zip(cases, texts(engine_of(model, platform=platform), rows), strict=True))
    return found


class Traffic:
    """Requests in random order, with aborts, removals and loads between steps."""

    def __init__(self, engine: Engine, names: list[str], total: int) -> None:
        self._engine, self._names, self._left = engine, names, total
        self._random = np.random.default_rng(1)
        self._host = {x: engine.adapters.host_copy(engine.adapters.find(x)) for x in names}
        self.cases: dict[int, Case] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, FinishReason] = {}
        self.num_removed = 0

    def run(self) -> None:
        while self._left or self._engine.busy:
            self._arrive()
            self._abort()
            self._change_adapters()
            for event in checked_step(self._engine):
                self.tokens[event.request_id] += event.tokens
                if event.finish_reason is not None:
                    self.ended[event.request_id] = event.finish_reason

    def _arrive(self) -> None:
        for _ in range(min(self._left, int(self._random.integers(0, 4)))):
            self._left -= 1
            served = ["", *self._engine.adapters.folders]
            number, name = len(self.cases), served[self._random.integers(len(served))]
            case = name, int(self._random.integers(len(PROMPTS))), bool(self._random.integers(2))
            self.cases[number], self.tokens[number] = case, []
            self._engine.add(made(number, case))

    def _abort(self) -> None:
        is_open = [number for number in self.cases if number not in self.ended]
        if is_open and not self._random.integers(12):
            number = is_open[self._random.integers(len(is_open))]
            self._engine.abort(number)
            self.ended[number] = FinishReason.ABORT

    def _change_adapters(self) -> None:
        held = self._engine.adapters
        gone = [x for x in self._names if x not in held.folders and held.is_removed(x)]
        if gone and not self._random.integers(4):
            held.add(self._host[gone[0]])
        elif len(held.folders) > 1 and not self._random.integers(8):
            held.remove(list(held.folders)[self._random.integers(len(held.folders))])
            self.num_removed += 1


@pytest.mark.parametrize(
    ("framework", "total", "count", "num_slots"),
    [
        ("reference", 60, 5, 2),
        pytest.param("torch", 500, 40, 8, marks=pytest.mark.matrix),
    ],
)
def test_adapter_traffic_preserves_every_text(
    framework: str, total: int, count: int, num_slots: int, tmp_path: Path
) -> None:
    adapters, platform = adapters_in(tmp_path, count), platform_of(framework)
    want = merged_texts(tmp_path, adapters, platform)
    assert len({tuple(text) for text in want.values()}) > count
    words = ["--lora-paths", *(f"{name}={folder}" for name, folder in adapters.items())]
    words += ["--max-loras-per-batch", str(num_slots)]
    engine = engine_of(BASE, words, platform=platform, slots=12, total=2048)
    traffic = Traffic(engine, [*adapters], total)
    traffic.run()
    ended = [x for x, reason in traffic.ended.items() if reason is FinishReason.LENGTH]
    assert len(traffic.ended) == total
    assert len(ended) > 0.7 * total
    wrong = [x for x in ended if traffic.tokens[x] != want[traffic.cases[x]]]
    assert not wrong, [traffic.cases[x] for x in wrong]
    assert engine.adapters.num_loads > 2 * num_slots
    assert traffic.num_removed > 3
    assert engine.adapters.num_held == 0
