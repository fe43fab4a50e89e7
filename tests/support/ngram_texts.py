"""Outputs of n-gram drafting: plain, and drafted from corpora that are mostly right."""

from __future__ import annotations

import numpy as np

from shared.boundary.backend import Backend
from shared.boundary.program import ProgramFeature
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.ngram.corpus import SEPARATOR, Corpus
from shared.engine.ngram.index import NgramIndex
from shared.engine.ngram_controllers.controller import NgramController
from shared.engine.request import Request, SamplingParams
from shared.options.ngram import NgramConfig
from tests.support.contract_host import GREEDY, PREFILL_TOKENS, SAMPLED, prompt
from tests.support.run_engine import Outcome, drive

TOKENS = 20


def requests_of(sampled: bool) -> list[Request]:
    how = SAMPLED | {"stop_token_ids": (), "min_tokens": 0} if sampled else GREEDY
    return [
        Request(
            request_id=number,
            prompt=prompt(20 + number, 10 + 5 * number) * 2,
            sampling=SamplingParams(max_tokens=TOKENS, **how | {"seed32": 50 + number}),
        )
        for number in range(5)
    ]


def plain(backend: Backend, sampled: bool) -> dict[int, list[int]]:
    controller = StaticController(backend.capacity, nodes=1, depth=0, width=0)
    engine = Engine(
        backend, controller, overlap=1, chunked_prefill_size=PREFILL_TOKENS, cache=NO_CACHE
    )
    return {n: outcome.tokens for n, outcome in drive(engine, requests_of(sampled)).items()}


def drafted(
    backend: Backend, sampled: bool, overlap: int, texts: dict[int, list[int]]
) -> dict[int, Outcome]:
    """Served with two corpora of the texts, in which some tokens are others.

    Where both match, their paths make a tree, of which the accepted branch may be the second; every
    tenth token is wrong in both.
    """
    config = NgramConfig(
        speculative_ngram_scope="request",
        speculative_ngram_external_sam_budget=2,
        speculative_ngram_min_bfs_breadth=2,
    )
    vocab = backend.capacity.vocab
    (tree,) = {
        program.shape
        for program in backend.capacity.programs
        if program.has(ProgramFeature.HOST_DRAFT)
    }
    index = NgramIndex(config, nodes=tree.nodes, depth=tree.depth, vocab=vocab, chain=False)
    words = [token for text in texts.values() for token in [*text, SEPARATOR]]
    for at in (5, 2):
        wrong = [
            20 if (p % 6 == at or p % 10 == 9) and w != SEPARATOR else w
            for p, w in enumerate(words)
        ]
        index.corpora.add(str(at), Corpus.build(np.array(wrong, np.int32)))
    controller = NgramController(backend.capacity, index)
    engine = Engine(
        backend, controller, overlap=overlap, chunked_prefill_size=PREFILL_TOKENS, cache=NO_CACHE
    )
    return drive(engine, requests_of(sampled))
