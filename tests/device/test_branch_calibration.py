"""The host's calibration of branches in all steps that grow a tree over a block on the device.

Two requests without a grammar outlive three with one. The first steps therefore draft for bitmasks,
and the later ones verify fixed trees, or trees that are merged with n-gram drafts.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest

from shared.boundary.backend import Backend, BackendLimits
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.engine.branch_calibration import BranchCalibrationController, with_branch_calibration
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import Controller, StaticController
from shared.engine.engine import Engine
from shared.engine.grammar_controller import GrammarController
from shared.engine.ngram.corpus import SEPARATOR, Corpus
from shared.engine.ngram.index import NgramIndex
from shared.engine.ngram_controllers.merged_drafts import MergedDraftController
from shared.options.ngram import NgramConfig
from shared.spec.draft_tree import TreeShape
from tests.support.backends import make_backend
from tests.support.block_tree_cells import CalibrationRecorder
from tests.support.drafter_cases import drafter_of, model_of
from tests.support.grammars import mixed_requests
from tests.support.limits import make_limits, make_program
from tests.support.run_engine import Outcome, drive

BATCH, CHUNK, COPIES = 5, 64, 4
PLAIN = TreeShape.plain(BATCH)
TREE = TreeShape(nodes=10, depth=3, width=3, rows=10 * BATCH, block=4)
MERGED = TreeShape(
    nodes=TREE.nodes + COPIES,
    depth=COPIES,
    width=TREE.width,
    rows=12 * BATCH,
    grown=TREE,
    copied=1 + 2 * (COPIES + 1) + 2 * COPIES,
)
COPIED = replace(MERGED, nodes=1 + COPIES, width=1, grown=PLAIN)
DECODES = {"static": (TREE,), "merged": (TREE, MERGED, COPIED)}


def capacity_of(decodes: tuple[TreeShape, ...], masked: TreeShape) -> BackendLimits:
    def program(work: StepKind, shape: TreeShape, *, mask: bool = False) -> Program:
        made = make_program(
            work, shape, CHUNK if work is StepKind.PREFILL else 0, batch=BATCH, pages=48
        )
        from_host = mask and not shape.is_plain
        return made.with_features(
            {
                ProgramFeature.MASK: mask,
                ProgramFeature.HOST_DRAFT: from_host,
                ProgramFeature.NGRAM_DRAFTS: shape.copied > 0,
            }
        )

    programs = [program(StepKind.PREFILL, PLAIN), program(StepKind.DECODE, masked, mask=True)]
    programs += [program(StepKind.DECODE, shape) for shape in decodes]
    programs += [] if masked.is_plain else [program(StepKind.DRAFT, masked)]
    return make_limits(
        programs,
        page_size=4,
        context_length=160,
        vocab=model_of("llama", "DFLASH")[0].vocab,
    )


def inner_of(stack: str, capacity: BackendLimits, plain: dict[int, Outcome]) -> Controller:
    """Returns the controller of steps without a grammar.

    A corpus has the outputs with some wrong tokens, and every other step merges drafts from it.
    """
    if stack == "static":
        return StaticController(capacity, nodes=TREE.nodes, depth=TREE.depth, width=TREE.width)
    index = NgramIndex(
        NgramConfig(speculative_ngram_external_sam_budget=COPIES),
        nodes=MERGED.copied,
        depth=MERGED.copied - 1,
        vocab=capacity.vocab,
        chain=False,
        ahead=2 * (COPIES + 1),
        path=3 * COPIES + 2,
    )
    tokens = [[*outcome.tokens, SEPARATOR] for outcome in plain.values()]
    words = [20 if place % 7 == 6 else token for each in tokens for place, token in enumerate(each)]
    index.corpora.add("outputs", Corpus.build(np.array(words, np.int32)))
    controller, kinds = MergedDraftController(capacity, index, 0.2, {}), cycle(("model", "merged"))
    vars(controller)["kind_of"] = lambda tokens, num_requests: next(kinds)
    return controller


def backend_of(framework: str, capacity: BackendLimits) -> Backend:
    config, weights = model_of("llama", "DFLASH")
    return make_backend(framework, config, weights, capacity, drafter_of("llama", "DFLASH"))


def serve(backend: Backend, controller: Controller) -> dict[int, Outcome]:
    engine = Engine(backend, controller, overlap=2, chunked_prefill_size=CHUNK, cache=NO_CACHE)
    return drive(engine, mixed_requests(backend.capacity.vocab, 80, max_draft_tokens=4))


@pytest.fixture(scope="module")
def plain() -> dict[int, Outcome]:
    """Outputs without drafts."""
    capacity = capacity_of((PLAIN,), PLAIN)
    backend = make_backend("torch", *model_of("llama", "DFLASH"), capacity, "none")
    inner = StaticController(capacity, nodes=1, depth=0, width=0)
    return serve(backend, GrammarController(capacity, inner, None))


KINDS = {"static": {"grammar", "drafter"}, "merged": {"grammar", "drafter", "merged"}}
RUNS = [
    pytest.param(framework, stack, marks=() if framework == "torch" else pytest.mark.matrix)
    for framework in ("torch", "reference", "jax")
    for stack in DECODES
]


@pytest.mark.parametrize(("framework", "stack"), RUNS)
def test_branch_calibration_reaches_every_grown_tree(framework, stack, plain):
    capacity = capacity_of(DECODES[stack], TREE)
    backend = backend_of(framework, capacity)
    for known, expected in ((0.0, True), (-np.inf, False)):
        inner = GrammarController(capacity, inner_of(stack, capacity, plain), None)
        controller = CalibrationRecorder(inner, capacity, known)
        outcomes = serve(backend, controller)
        assert controller.branches == dict.fromkeys(KINDS[stack], expected)
        for number, outcome in outcomes.items():
            assert outcome.error is None
            assert outcome.tokens == plain[number].tokens
    backend.close()


@pytest.mark.parametrize("stack", DECODES)
def test_branch_rates_learn_from_every_step(stack, plain, monkeypatch):
    capacity = capacity_of(DECODES[stack], TREE)
    backend = backend_of("torch", capacity)
    inner = GrammarController(capacity, inner_of(stack, capacity, plain), None)
    controller = with_branch_calibration(inner, capacity)
    assert isinstance(controller, BranchCalibrationController)
    rates, learn = controller.rates, controller.rates.learn
    offered: dict[str, float] = {}

    def learning(parents, drafts, num_nodes, copied, tokens, accepted):
        before = rates.offered.sum()
        learn(parents, drafts, num_nodes, copied, tokens, accepted)
        kind = "static" if copied is None else "merged"
        offered[kind] = offered.get(kind, 0.0) + float(rates.offered.sum() - 0.999 * before)

    monkeypatch.setattr(rates, "learn", learning)
    outcomes = serve(backend, controller)
    assert offered.keys() == ({"static", "merged"} if stack == "merged" else {"static"})
    assert all(count > 2 for count in offered.values()), offered
    assert {n: o.tokens for n, o in outcomes.items()} == {n: o.tokens for n, o in plain.items()}
    backend.close()
