"""A request with NaN logits fails alone, with every drafter, also with captured graphs.

The embedding of one token is NaN. A prompt with it fails at once. Another request is made to choose
it and fails in the next step, while the rest of the batch decodes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shared.boundary.backend import Backend, BackendLimits
from shared.boundary.program import ProgramFeature, StepKind
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.ngram.index import NgramIndex
from shared.engine.ngram_controllers.controller import NgramController
from shared.engine.request import FinishReason, Request, SamplingParams
from shared.models.checkpoint import Weights
from shared.models.config import ModelConfig
from shared.options.ngram import NgramConfig
from shared.spec.draft_tree import TreeShape
from tests.support import block_cells as blocks
from tests.support.backends import Drafter, make_backend, make_gpu_backend
from tests.support.cells import BATCH, PLAIN, capacity_of, model_of
from tests.support.run_engine import drive
from tests.support.tree_cells import TREES, head_of

POISON = 7
TOKENS = 24
CHAIN = TreeShape.chain(3, BATCH)
CASES = [
    ("qwen3", "none", PLAIN),
    *(("qwen3_5", "NEXTN", shape) for shape in (CHAIN, TREES[1])),
    *(("llama", "EAGLE", shape) for shape in (CHAIN, TREES[1])),
    *(("qwen3_5", "EAGLE3", shape) for shape in (CHAIN, TREES[1])),
    *(("qwen3_5", "STANDALONE", shape) for shape in (CHAIN, TREES[1])),
    ("qwen3_5", "DFLASH", blocks.CHAIN),
    ("qwen3_5", "NGRAM", TREES[1]),
]
FRAMEWORKS = [
    "torch",
    *(pytest.param(name, marks=pytest.mark.gpu) for name in ("torch graphs", "jax")),
]


def poisoned(config: ModelConfig, weights: Weights) -> tuple[ModelConfig, Weights]:
    """The model with a token that is NaN, and that nothing but a bias chooses."""
    changed = {name: np.array(weights[name]) for name in ("embed", "lm_head")}
    changed["embed"][POISON], changed["lm_head"][POISON] = np.nan, 0
    return config, weights | changed


def made(
    family: str, drafter: str, shape: TreeShape
) -> tuple[ModelConfig, Weights, BackendLimits, Drafter]:
    if drafter == "DFLASH":
        capacity = capacity_of(family, 16, (shape,))
        return *poisoned(*blocks.model_of(family)), capacity, blocks.head_of(family)
    capacity, model = capacity_of(family, 16, (PLAIN, shape)), poisoned(*model_of(family))
    if drafter != "NGRAM":
        return *model, capacity, "none" if drafter == "none" else head_of(family, drafter)
    programs = (
        program.with_features(
            {ProgramFeature.HOST_DRAFT: program.work is StepKind.DECODE and program.shape == shape}
        )
        for program in capacity.programs
    )
    return *model, replace(capacity, programs=tuple(programs)), "none"


def engine_of(backend: Backend, drafter: str, shape: TreeShape) -> Engine:
    capacity = backend.capacity
    sizes = {"nodes": shape.nodes, "depth": shape.depth}
    if drafter == "NGRAM":
        index = NgramIndex(NgramConfig(), **sizes, vocab=capacity.vocab, chain=False)
        controller = NgramController(capacity, index)
    else:
        controller = StaticController(capacity, **sizes, width=shape.width)
    return Engine(backend, controller, overlap=1, chunked_prefill_size=64, cache=NO_CACHE)


def request(number: int, *tokens: int, **how: object) -> Request:
    rng = np.random.default_rng(number)
    prompt = (*rng.integers(20, 250, 12).tolist(), *tokens) * 2
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, **how)
    return Request(request_id=number, prompt=prompt, sampling=sampling)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("family", "drafter", "shape"), CASES, ids=lambda x: getattr(x, "nodes", x)
)
def test_nan_request_fails_alone_with_every_drafter(framework, family, drafter, shape):
    make = make_backend if framework == "torch" else make_gpu_backend
    backend = make(framework, *made(family, drafter, shape))
    healthy = drive(engine_of(backend, drafter, shape), [request(0), request(1)])
    chooses = {"logit_bias": {POISON: 100.0}}
    beside = [request(2, POISON), request(0), request(3, **chooses), request(1)]
    found = drive(engine_of(backend, drafter, shape), beside)
    backend.close()
    for number in (2, 3):
        assert found[number].finish_reason is FinishReason.ERROR
        assert "are not finite" in found[number].error
    assert found[2].tokens == []
    assert found[3].tokens == [POISON]
    for number in (0, 1):
        assert len(healthy[number].tokens) == TOKENS
        assert found[number].tokens == healthy[number].tokens
