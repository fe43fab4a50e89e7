"""Requests with LoRA adapters and grammars or penalties, under preemption and with prefix hits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shared.engine.engine import Engine
from shared.engine.request import Request
from shared.models.parameters import parameters
from tests.support import lora_engine
from tests.support.grammars import constrained, text_of, tokenizer
from tests.support.in_process_engine import started
from tests.support.lora_engine import NEXTN, TREE, cells, lora_flags
from tests.support.lora_files import module_names, write_adapter, write_merged
from tests.support.run_engine import Outcome, checked_step, drive
from tests.support.serve_reference import platform_of
from tests.support.tiny_models import write_tiny

DRAFTERS = {
    "plain": (),
    "NEXTN": NEXTN,
    "NEXTN tree": (*NEXTN, *TREE),
    "NGRAM": ("--speculative-algorithm", "NGRAM"),
}
RANKS = "torch ranks 2"
QUICK = (("reference", "NEXTN tree", True), ("torch", "NGRAM", False))
"""Cells of the default run, with different frameworks, drafters and temperatures."""

VOCAB, PROMPT_TOKENS, MAX_TOKENS = 272, 70, 40
Case = tuple[str, str | None, tuple[tuple[str, Any], ...]]
"""Adapter, grammar and penalties."""

PENALTIES = (
    ("presence_penalty", 0.7),
    ("frequency_penalty", 0.4),
    ("repetition_penalty", 1.3),
)
CASES: tuple[Case, ...] = (
    ("second", None, PENALTIES),
    ("first", None, (("logit_bias", {65: 4.0, 66: -2.0}), ("min_p", 0.05))),
    ("first", "lark", PENALTIES),
    ("first", "schema", ()),
    ("second", "call", ()),
    ("", "regex", ()),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A hybrid model with MTP and a tokenizer, two adapters, and the merged checkpoints."""
    folder = tmp_path_factory.mktemp("requests")
    base = folder / "base"
    modules = module_names(base, parameters(write_tiny(base, "qwen3_5", 3), True))
    tokenizer().save(str(base / "tokenizer.json"))
    found = {"": base}
    for seed, name in enumerate(("first", "second")):
        found[name] = write_adapter(folder / name, base, modules, seed=seed, alpha=4)
        found[f"merged {name}"] = write_merged(folder / f"m{name}", base, found[name])
    return found


@contextmanager
def engine_of(framework: str, folder: Path, flags: Sequence[str]) -> Iterator[Engine]:
    """An engine; ranks of torch are processes."""
    if framework == RANKS:
        sizes = ("--context-length", "256", "--page-size", "16", "--max-running-requests", "4")
        sizes += ("--max-total-tokens", "1024", "--tensor-parallel-size", "2")
        model = ("--model-path", str(folder), "--dtype", "float32")
        served = started("torch", (*model, *sizes, *flags), lambda capacity: capacity)
        yield served.engine
        served.engine.close()
        return
    platform = platform_of(framework)
    yield lora_engine.engine_of(folder, flags, platform=platform)


def request(number: int, case: Case, sampled: bool, with_adapter: bool = True) -> Request:
    name, grammar, penalties = case
    how = lora_engine.SAMPLED if sampled else lora_engine.GREEDY
    prompt = tuple(range(5 + number, 5 + number + PROMPT_TOKENS))
    params = {"max_tokens": MAX_TOKENS, **how, **dict(penalties)}
    made = constrained(number, prompt, VOCAB, grammar, **params)
    return replace(made, sampling=replace(made.sampling, lora=name if with_adapter else ""))


@cache
def merged_text(framework: str, folder: Path, number: int, sampled: bool) -> list[int]:
    """The text of a case by plain decoding of the merged checkpoint, alone in its engine."""
    with engine_of(framework.removesuffix(RANKS[5:]), folder, ()) as engine:
        case = CASES[number]
        outcomes = drive(engine, [request(number, case, sampled, with_adapter=False)])
    return outcomes[number].tokens


@pytest.mark.parametrize(
    ("framework", "drafter", "sampled"),
    [*cells(("reference", "torch", RANKS, "jax"), [*DRAFTERS], QUICK)],
)
def test_adapted_requests_equal_merged_model(
    framework: str, drafter: str, sampled: bool, folders: dict[str, Path]
) -> None:
    """Requests are preempted, and those of the second round find their prefixes cached."""
    want = {
        number: merged_text(framework, folders[f"merged {name}" if name else ""], number, sampled)
        for number, (name, *_) in enumerate(CASES)
    }
    with engine_of(framework, folders[""], (*lora_flags(folders), *DRAFTERS[drafter])) as engine:
        for has_prefix in (False, True):
            requests = [request(number, case, sampled) for number, case in enumerate(CASES)]
            outcomes, num_preempted = drive_with_preemption(engine, requests)
            assert {number: each.tokens for number, each in outcomes.items()} == want
            assert num_preempted > 2
            assert not has_prefix or all(each.cached_tokens for each in requests)
            check_grammars(outcomes)
        if drafter != "plain":
            assert engine.metrics.snapshot()["spec_decode_num_accepted_tokens_total"] > 0


def drive_with_preemption(
    engine: Engine, requests: Sequence[Request]
) -> tuple[dict[int, Outcome], int]:
    """Runs requests to their end, and preempts each one in the middle of its text if possible."""
    outcomes, preempted = {each.request_id: Outcome() for each in requests}, set[int]()
    for each in requests:
        engine.add(each)
    while engine.busy:
        for event in checked_step(engine):
            outcomes[event.request_id].take(event)
        for each in [*engine.scheduler.running]:
            is_new = each.request_id not in preempted and len(each.output) > 3
            if is_new and each.has_no_step_in_flight:
                engine.scheduler.preempt(each)
                preempted.add(each.request_id)
    return outcomes, len(preempted)


def check_grammars(outcomes: dict[int, Outcome]) -> None:
    """Checks that grammars constrained the texts."""
    assert text_of(outcomes[3].tokens).startswith('{"a"')
    assert text_of(outcomes[4].tokens).startswith("<tool_call>")
