"""Requests with grammars, engines with each drafter, and checks of the outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

import numpy as np

from shared.boundary.backend import Backend, BackendLimits
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.drafts.kinds import BLOCK_KINDS
from shared.engine.cache_policy import NO_CACHE, CachePolicy
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.grammar_controller import GrammarController
from shared.engine.ngram.index import NgramIndex
from shared.engine.ngram_controllers.controller import NgramController
from shared.engine.request import FinishReason, Request
from shared.options.ngram import NgramConfig
from shared.spec.draft_tree import TreeShape
from shared.text.delimiters import CALL, CALL_END, THINK_END
from tests.support.backends import make_backend
from tests.support.drafter_cases import drafter_of, model_of
from tests.support.grammars import GRAMMARS, THINK_END_ID, constrained, text_of
from tests.support.limits import make_limits, make_program
from tests.support.run_engine import Outcome, drive

BATCH, PAGE_SIZE, PAGES, CONTEXT, CHUNK = 3, 4, 48, 160, 64
Case = tuple[str, str, TreeShape]


def capacity_of(family: str, drafter: str, shape: TreeShape) -> BackendLimits:
    """Programs with masks and without, and those that draft for the first."""

    def program(
        work: StepKind, shape: TreeShape, *, tokens: int = 0, mask: bool = False
    ) -> Program:
        is_tree = work is StepKind.DECODE and not shape.is_plain
        from_host = is_tree and (mask or drafter == "NGRAM")
        return make_program(
            work,
            shape,
            tokens,
            batch=BATCH,
            pages=PAGES,
            extras=ProgramFeature.LOGPROBS
            if work in (StepKind.PREFILL, StepKind.DECODE)
            else ProgramFeature.NONE,
        ).with_features({ProgramFeature.MASK: mask, ProgramFeature.HOST_DRAFT: from_host})

    plain = TreeShape.plain(BATCH)
    shapes = [plain] if drafter == "none" else [shape]
    if drafter == "NGRAM":
        shapes = [plain, shape]
    programs = [program(StepKind.PREFILL, plain, tokens=CHUNK)]
    programs += [
        program(StepKind.DECODE, each, mask=mask) for each in shapes for mask in (False, True)
    ]
    if drafter not in ("none", "NGRAM"):
        programs.append(program(StepKind.DRAFT, shape))
    return make_limits(
        programs,
        page_size=PAGE_SIZE,
        num_snapshots=13 if family == "qwen3_5" else 1,
        context_length=CONTEXT,
        vocab=model_of(family, drafter)[0].vocab,
        max_logprobs=2,
    )


def requests_of(vocab: int) -> list[Request]:
    """Six with grammars and two without; the longest prompt has two chunks."""
    rng = np.random.default_rng(21)
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    asked = [
        ("schema", {"temperature": 0.0, "logprobs": 1}),
        (None, {"temperature": 0.0}),
        ("regex", {"temperature": 0.9, "top_p": 0.9, "min_p": 0.01}),
        ("lark", {"temperature": 1.0, "min_tokens": 20, **penalties}),
        (None, {"temperature": 0.8, "top_k": 40, "logprobs": 0}),
        ("schema", {"temperature": 1.0, "max_draft_tokens": 1}),
        ("call", {"temperature": 0.0}),
        ("thought", {"temperature": 1.0, "logit_bias": {THINK_END_ID: 4.0}}),
    ]
    lengths = (20, 33, 5, 70, 18, 2, 9, 12)
    return [
        constrained(
            number,
            tuple(rng.integers(2, 250, length).tolist()),
            vocab,
            grammar,
            max_tokens=60 if grammar else 30,
            seed32=900 + number,
            **how,
        )
        for number, ((grammar, how), length) in enumerate(zip(asked, lengths, strict=True))
    ]


def engine_of(
    backend: Backend, case: Case, cache: CachePolicy, overlap: int, made: type[Engine] = Engine
) -> Engine:
    _, drafter, shape = case
    capacity, index = backend.capacity, None
    sizes = {"nodes": shape.nodes, "depth": shape.depth}
    if drafter == "NGRAM":
        index = NgramIndex(NgramConfig(), **sizes, vocab=capacity.vocab, chain=False)
        inner = NgramController(capacity, index)
    else:
        inner = StaticController(capacity, **sizes, width=shape.width)
    controller = GrammarController(capacity, inner, index)
    return made(backend, controller, overlap=overlap, chunked_prefill_size=CHUNK, cache=cache)


class Backends:
    """Backends by framework and case, and the plain texts of their targets."""

    def __init__(self, make: Callable[..., Backend] = make_backend) -> None:
        self._make = make
        self._made: dict[tuple, Backend] = {}
        self._plain: dict[tuple[str, bool], dict[int, Outcome]] = {}

    def get(self, framework: str, case: Case) -> Backend:
        key = (framework, *case)
        if key not in self._made:
            family, drafter, shape = case
            model = model_of(family, drafter)
            capacity = capacity_of(family, drafter, shape)
            made = self._make(framework, *model, capacity, drafter_of(family, drafter))
            self._made[key] = made
        return self._made[key]

    def plain(self, framework: str, family: str, drafter: str) -> dict[int, Outcome]:
        key = (family, drafter in BLOCK_KINDS)
        if key not in self._plain:
            model = model_of(family, drafter)
            shape = TreeShape.plain(BATCH)
            capacity = capacity_of(family, "none", shape)
            backend = self._make(framework, *model, capacity, "none")
            engine = engine_of(backend, (family, "none", shape), NO_CACHE, 0)
            self._plain[key] = drive(engine, requests_of(capacity.vocab))
            backend.close()
        return self._plain[key]

    def close(self) -> None:
        for backend in self._made.values():
            backend.close()


def check_texts(requests: Sequence[Request], outcomes: dict[int, Outcome], vocab: int) -> None:
    """A text that has come to its end is one of its grammar's."""
    for request in requests:
        outcome = outcomes[request.request_id]
        assert outcome.error is None
        if request.sampling.logprobs is not None:
            assert len(outcome.logprobs) == len(outcome.tokens)
        if outcome.finish_reason is FinishReason.STOP and request.sampling.grammar is not None:
            (name,) = (name for name, g in GRAMMARS.items() if g == request.sampling.grammar)
            assert is_of(name, text_of(outcome.tokens))
            assert len(outcome.tokens) >= request.sampling.min_tokens


def is_of(name: str, text: str) -> bool:
    if name == "schema":
        found = json.loads(text)
        is_long = len(found["a"]) <= 12 and 2 <= len(found["b"]) <= 4
        return found.keys() == {"a", "b"} and is_long
    if name == "call":
        found = json.loads(text.removeprefix(CALL).removesuffix(CALL_END))
        return found["name"] == "weather" and len(found["arguments"]["city"]) <= 8
    if name == "thought":
        return re.fullmatch(r"\s{0,4}[a-c]{9}", text.partition(THINK_END)[2]) is not None
    pattern = {"regex": "[a-f]{2,9}( [a-cx-z]{3,7}){2,5}", "lark": r"(c*[ab]+ )*c*[ab]+"}[name]
    return re.fullmatch(pattern, text) is not None
