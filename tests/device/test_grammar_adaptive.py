"""Structured output with adaptive speculation, which chooses the draft shape of each step.

Steps with a grammar use the one shape that has masks. The other steps use all tiers, plain decoding
among them, so every kind of step follows every other.
"""

from __future__ import annotations

import pytest

from shared.boundary.backend import Backend, BackendLimits
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.engine.adaptive.controller import AdaptiveController
from shared.engine.adaptive.policy import PolicyInput
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.grammar_controller import GrammarController
from shared.engine.ngram.index import NgramIndex
from shared.engine.ngram_controllers.adaptive import AdaptiveNgramController
from shared.options.ngram import NgramConfig
from shared.spec.draft_tree import TreeShape
from tests.support.backends import Drafter, make_backend
from tests.support.drafter_cases import drafter_of, model_of
from tests.support.grammars import mixed_requests
from tests.support.limits import make_limits, make_program
from tests.support.run_engine import Outcome, drive

BATCH, PAGE_SIZE, PAGES, CONTEXT, CHUNK = 5, 4, 48, 160, 64
PLAIN = TreeShape.plain(BATCH)
CHAINS = [TreeShape.chain(depth, BATCH) for depth in (1, 3)]
TREE = TreeShape(nodes=8, depth=3, width=3, rows=8 * BATCH)


EVERY = slice(None)


class Turns:
    """A policy that takes every tier in turn, each for some steps."""

    def __init__(self) -> None:
        self._steps = 0

    def choose(self, situation: PolicyInput) -> int:
        self._steps += 1
        return self._steps // 2 % len(situation.expected.tokens)


class Watch:
    """Recorder of the plans of a controller and of the step times that it receives."""

    def __init__(self, inner: AdaptiveController | AdaptiveNgramController) -> None:
        self.planned: list[tuple[int, int]] = []
        self.reported: list[tuple[int, int]] = []
        rows_for, observe = inner.select_rows, inner.costs.observe

        def planning(ready, reserve):
            if (rows := rows_for(ready, reserve)) is not None:
                self.planned.append(inner._planned)
            return rows

        def observing(batch: int, num_rows: int, tier: int, seconds: float | None) -> None:
            if tier != disabled:
                self.reported.append((batch, tier))
            observe(batch, num_rows, tier, seconds)

        inner.select_rows, inner.costs.observe, disabled = planning, observing, None
        if isinstance(inner, AdaptiveNgramController):
            # Times of disabled steps are collected, and reported as the median of several.
            disabled, sleep, stepped = inner._asleep, inner.sleep, inner.sleep.on_step

            def stepping(batch: int, seconds: float | None) -> float | None:
                self.reported.append((batch, disabled))
                return stepped(batch, seconds)

            sleep.on_step = stepping

    def check(self, steps: dict[str, float], reported: slice = EVERY) -> None:
        """Checks that the controller received the times of its own steps only."""
        assert self.reported == self.planned[reported]
        assert sum(steps.values()) == len(self.planned)


def capacity_of(
    family: str, drafter: str, shapes: list[TreeShape], masked: TreeShape
) -> BackendLimits:
    """Programs of all shapes, and those that one of them needs for masks."""

    def program(work: StepKind, shape: TreeShape, *, mask: bool = False) -> Program:
        from_host = work is StepKind.DECODE and shape.nodes > 1 and (mask or drafter == "NGRAM")
        return make_program(
            work,
            shape,
            CHUNK if work is StepKind.PREFILL else 0,
            batch=BATCH,
            pages=PAGES,
            extras=ProgramFeature.NONE if work is StepKind.DRAFT else ProgramFeature.LOGPROBS,
        ).with_features({ProgramFeature.MASK: mask, ProgramFeature.HOST_DRAFT: from_host})

    programs = [program(StepKind.PREFILL, PLAIN), *(program(StepKind.DECODE, s) for s in shapes)]
    programs.append(program(StepKind.DECODE, masked, mask=True))
    if drafter == "NGRAM":
        programs.append(program(StepKind.DECODE, PLAIN, mask=True))
    elif masked.nodes > 1:
        programs.append(program(StepKind.DRAFT, masked))
    return make_limits(
        programs,
        page_size=PAGE_SIZE,
        context_length=CONTEXT,
        vocab=model_of(family, drafter)[0].vocab,
        max_logprobs=2,
    )


def backend_of(
    framework: str, family: str, drafter: str, shapes: list[TreeShape], masked: TreeShape
) -> Backend:
    own: Drafter = "none" if masked.nodes == 1 else drafter_of(family, drafter)
    capacity = capacity_of(family, drafter if masked.nodes > 1 else "none", shapes, masked)
    return make_backend(framework, *model_of(family, drafter), capacity, own)


def served(backend: Backend, controller: GrammarController) -> tuple[Engine, dict[int, Outcome]]:
    engine = Engine(backend, controller, overlap=2, chunked_prefill_size=CHUNK, cache=NO_CACHE)
    return engine, drive(engine, mixed_requests(backend.capacity.vocab, 130))


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, bool], dict[int, Outcome]]:
    return {}


def plain_texts(
    found: dict[tuple[str, bool], dict[int, Outcome]], family: str, drafter: str
) -> dict[int, Outcome]:
    """Returns the outputs of a backend without a drafter: each step has one node."""
    key = (family, drafter == "DFLASH")
    if key not in found:
        backend = backend_of("torch", family, drafter, [PLAIN], PLAIN)
        inner = StaticController(backend.capacity, nodes=1, depth=0, width=0)
        controller = GrammarController(backend.capacity, inner, None)
        found[key] = served(backend, controller)[1]
        backend.close()
    return found[key]


BLOCK_TREE = TreeShape(nodes=8, depth=3, width=3, rows=8 * BATCH, block=4)
CASES = [
    ("qwen3_5", "NEXTN", [PLAIN, *CHAINS, TREE], CHAINS[1]),
    ("llama", "EAGLE3", [PLAIN, *CHAINS, TREE], TREE),
    ("qwen3_5", "STANDALONE", [PLAIN, *CHAINS], CHAINS[0]),
    ("llama", "DFLASH", [PLAIN, CHAINS[1], BLOCK_TREE], BLOCK_TREE),
]
RUNS = [
    pytest.param(framework, *case, id=f"{framework}-{case[0]}-{case[1]}", marks=marks)
    for framework in ("torch", "jax", "reference")
    for case in CASES
    for marks in ([] if (framework, case[1]) == ("torch", "NEXTN") else [pytest.mark.matrix],)
]


@pytest.mark.parametrize(("framework", "family", "drafter", "shapes", "masked"), RUNS)
def test_grammar_with_adaptive_tiers_preserves_plain_output(
    framework, family, drafter, shapes, masked, plain
):
    backend = backend_of(framework, family, drafter, shapes, masked)
    inner = AdaptiveController(backend.capacity, Turns(), {}, has_experts=False)
    watch = Watch(inner)
    engine, outcomes = served(backend, GrammarController(backend.capacity, inner, None))
    check(outcomes, plain_texts(plain, family, drafter))
    steps = tier_steps(engine)
    watch.check(steps)
    assert len(steps) == len(shapes)
    assert all(steps.values()), "a tier had no step"
    backend.close()


SHARED = TreeShape(nodes=4, depth=3, width=1, rows=2 * BATCH)
SECONDS = {"enabled": [1.0, 1.0, 1.1, 1.2], "disabled": [1.0, 9.0, 9.9, 0.9]}
"""Seconds of tiers without overlap, and last of plain steps with overlap."""
REPORTED = {"enabled": slice(-1), "disabled": slice(1, None)}
"""Steps whose time is reported: it arrives after the next step, or at once if the host had waited.
"""


@pytest.mark.parametrize("state", SECONDS)
def test_grammar_with_adaptive_ngram_preserves_plain_output(state, plain):
    """A tier with a verify budget has one row per node if there are masks."""
    backend = backend_of("torch", "qwen3_5", "NGRAM", [PLAIN, CHAINS[0], SHARED], CHAINS[1])
    capacity = backend.capacity
    sizes = {"nodes": CHAINS[1].nodes, "depth": CHAINS[1].depth, "vocab": capacity.vocab}
    index = NgramIndex(NgramConfig(), **sizes, chain=False)
    inner = AdaptiveNgramController(capacity, index, {BATCH: SECONDS[state]})
    watch = Watch(inner)
    engine, outcomes = served(backend, GrammarController(capacity, inner, index))
    check(outcomes, plain_texts(plain, "qwen3_5", "NGRAM"))
    steps = tier_steps(engine)
    watch.check(steps, REPORTED[state])
    assert bool(steps["disabled"]) is (state == "disabled")
    backend.close()


def tier_steps(engine: Engine) -> dict[str, float]:
    """Returns the number of steps without a grammar, by tier."""
    name = "spec_decode_adaptive_steps_total"
    found = engine.metrics.snapshot().items()
    return {key.split('"')[1]: count for key, count in found if key.startswith(name)}


def check(outcomes: dict[int, Outcome], plain: dict[int, Outcome]) -> None:
    for number, outcome in outcomes.items():
        assert outcome.error is None
        assert outcome.tokens == plain[number].tokens, number
        assert outcome.finish_reason is plain[number].finish_reason
    drafted = [sum(outcomes[number].accepted) for number in (2, 3, 4)]
    assert sum(drafted) > 0, "no draft of a text with a grammar was ever accepted"
