"""Serves random traffic on a random server, and holds each text against plain decoding.

What is compared with is plain decoding of each request alone, as the specification does it on each
of the text's own prefixes (`tests/support/equality.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from shared.boundary.backend import Backend, BackendLimits, StepFuture, StepPlan
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.drafts.kinds import BLOCK_KINDS
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import Controller, StaticController
from shared.engine.engine import Engine
from shared.engine.ngram.index import NgramIndex
from shared.engine.ngram_controllers.controller import NgramController
from shared.engine.ngram_controllers.merged_drafts import KINDS, MergedDraftController
from shared.engine.request import FinishReason, Request, SamplingParams
from shared.models.checkpoint import Weights
from shared.models.config import ModelConfig
from shared.options.ngram import NgramConfig
from shared.spec.draft_tree import TreeShape
from shared.spec.gumbel_noise import derive_seed
from tests.support import tiny_heads as heads_of
from tests.support.backends import Mapped, make_backend
from tests.support.cache_policies import policy_of
from tests.support.cells import MODEL_SEEDS
from tests.support.equality import TALLY, Oracle
from tests.support.limits import make_limits, make_program
from tests.support.random_requests import (
    BATCH,
    CHUNK,
    CONTEXT,
    COPIES,
    OVERLAP,
    PLAIN,
    Asked,
    Server,
)
from tests.support.ranks import MAKERS
from tests.support.run_engine import Outcome, checked_step
from tests.support.tiny_assistants import tiny_assistant
from tests.support.tiny_models import DELTA, HYBRIDS, tiny_model
from tests.support.tiny_small import small_model
from tests.support.traces import check_trace, refused_child
from tests.support.window_capacity import with_fewer_pages, with_window_pools

SNAPSHOTS = 7
"""Fewer than four running requests would have, and a sink."""

MOST_STEPS = 2000
"""Step limit, far above the need of any traffic: reaching it means that traffic does not end."""

DIVIDED_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
DIVIDED_DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
"""Fields of drafters that several ranks divide; KV heads are replicated on two of four ranks."""

LOGPROB_TOLERANCE = 2e-4
"""Logits of one row move by 6e-5 with the order of sums, and so does their log-sum."""


@dataclass
class Visit:
    """One request on its way through a server; `cut` once it was ended from outside."""

    asked: Asked
    request: Request
    outcome: Outcome
    cut: bool = False


def visits_of(traffic: list[Asked]) -> list[Visit]:
    """Every choice of every prompt as a request."""
    pairs = [(each, choice) for each in traffic for choice in range(each.choices)]
    return [
        Visit(each, _request(number, each, choice), Outcome())
        for number, (each, choice) in enumerate(pairs)
    ]


def _request(number: int, asked: Asked, choice: int) -> Request:
    sampling = replace(asked.sampling, seed32=derive_seed(asked.seed, choice), traces=True)
    return Request(request_id=number, prompt=asked.prompt, sampling=sampling, tenant=asked.tenant)


@lru_cache
def target_of(family: str, drafter: str) -> tuple[ModelConfig, Weights]:
    """The model; a block head can follow one with embeddings on a circle."""
    config, weights = tiny_model(family, MODEL_SEEDS[family])
    return config, heads_of.cyclic(config, weights) if drafter in BLOCK_KINDS else weights


@lru_cache
def oracle_of(family: str, drafter: str) -> Oracle:
    return Oracle(*target_of(family, drafter))


@lru_cache
def drafter_of(family: str, drafter: str):
    """Returns the drafter argument of a backend's constructor."""
    return _drafter(family, drafter, {}, {})


@lru_cache
def divided_drafter_of(family: str, drafter: str):
    """Same as `drafter_of`, with a number of heads that four ranks divide."""
    delta = DIVIDED_DELTA if family in DELTA else {}
    return _drafter(family, drafter, DIVIDED_HEADS, DIVIDED_HEADS | delta)


def _drafter(family: str, drafter: str, heads: dict[str, int], small: dict[str, int]):
    target = target_of(family, drafter)
    made: dict[str, Callable] = {
        "EAGLE": lambda: heads_of.tiny_head(*target, "EAGLE", 5, **heads),
        "EAGLE3": lambda: heads_of.tiny_head(*target, "EAGLE3", 5, **heads),
        "STANDALONE": lambda: small_model(*target, family, 4, **small),
        "DFLASH": lambda: heads_of.tiny_block_head(target[0], 4),
        "DSPARK": lambda: heads_of.tiny_spark_head(*target, 4),
        "DFLASH2": lambda: heads_of.tiny_pair_head(target[0], 4),
        "NEXTN": lambda: "NEXTN",
        "ASSISTANT": lambda: tiny_assistant(target[0], target[1], 4),
    }
    return made[drafter]() if drafter in made else "none"


def capacity_of(server: Server) -> BackendLimits:
    """One prefill, plain steps where NGRAM finds nothing, and one program per shape."""
    model, _ = target_of(server.family, server.own_drafter)
    bare = make_limits(
        _programs(server, 1),
        page_size=server.page_size,
        num_pages=1,
        num_snapshots=SNAPSHOTS if server.family in HYBRIDS and server.caches else 1,
        overlap=OVERLAP,
        context_length=CONTEXT,
        vocab=model.vocab,
        max_stop_ids=2,
        max_bias=2,
        max_logprobs=3,
        max_scores=3,
        accept_rule=server.rule,
    )
    pages = bare.num_pages_for(bare.max_positions)
    programs = _programs(server, pages)
    return with_window_pools(replace(bare, num_pages=1 + BATCH * pages, programs=programs), model)


def _programs(server: Server, pages: int) -> tuple[Program, ...]:
    def program(work: StepKind, shape: TreeShape, tokens: int) -> Program:
        from_host = server.drafts_on_host and work is StepKind.DECODE and not shape.is_plain
        return make_program(
            work, shape, tokens, batch=BATCH, pages=pages, extras=ProgramFeature.LOGPROBS
        ).with_features(
            {
                ProgramFeature.HOST_DRAFT: from_host,
                ProgramFeature.PROMPT_LOGPROBS: work is StepKind.PREFILL,
                ProgramFeature.NGRAM_DRAFTS: shape.copied > 0,
            }
        )

    decodes = [program(StepKind.DECODE, shape, 0) for shape in dict.fromkeys(server.existing)]
    count = replace(
        program(StepKind.COUNT, TreeShape.plain(1), CHUNK), batch=1, extras=ProgramFeature.NONE
    )
    return (program(StepKind.PREFILL, PLAIN, CHUNK), count, *decodes)


class Backends:
    """Backends by their fixed settings; each serves several loads."""

    def __init__(self) -> None:
        self._made: dict[tuple, Backend] = {}

    def get(self, server: Server, token_map: tuple[int, ...] | None = None) -> Backend:
        """The backend of a server, which drafts the tokens of a map alone where there is one."""
        capacity = capacity_of(server)
        key = (server.framework, server.family, server.own_drafter, server.page_size, server.rule)
        key += (capacity.programs, capacity.num_snapshots, token_map)
        if key not in self._made:
            made = (*target_of(server.family, server.own_drafter), capacity)
            maker = divided_drafter_of if server.framework in MAKERS else drafter_of
            head = maker(server.family, server.own_drafter)
            drafter = Mapped(head, token_map) if token_map else head
            self._made[key] = make_backend(server.framework, *made, drafter)
        return self._made[key]

    def close(self) -> None:
        for backend in self._made.values():
            backend.close()


class Watched:
    """A backend that reports fewer pages than it has, and records its plans and results."""

    def __init__(self, backend: Backend, num_pages: int) -> None:
        self.capacity = with_fewer_pages(backend.capacity, num_pages, CHUNK)
        self._backend, self.launch = backend, backend.launch
        self.steps: list[tuple[StepPlan, StepFuture]] = []

    def submit(self, plan: StepPlan) -> StepFuture:
        future = self._backend.submit(plan)
        self.steps.append((plan, future))
        return future

    def close(self) -> None: ...

    def check(self) -> None:
        """Checks that trees and accepted paths are within the request's limit and the shape."""
        for plan, future in self.steps:
            result, rows = future.result(), np.flatnonzero(plan.slots)
            assert not result.failed[rows].any()
            if plan.program.work is not StepKind.DECODE:
                continue
            drafted, shape = result.num_nodes[rows] - 1, plan.program.shape
            assert drafted.sum() <= shape.rows - plan.program.batch, "more nodes than verify rows"
            most = np.minimum(plan.sampling.max_drafts[rows], shape.nodes - 1)
            assert (drafted >= 0).all()
            assert (drafted <= most).all(), "a request got more drafts than it allows"
            accepted = result.counts[rows] - 1
            assert (accepted >= 0).all()
            assert (accepted <= np.minimum(drafted, shape.depth)).all()


class InTurns(StaticController):
    """A controller that takes another shape for every step."""

    def __init__(self, capacity: BackendLimits, shapes: list[TreeShape]) -> None:
        first, self._taken, self._rng = shapes[0], shapes, random.Random(len(shapes))
        super().__init__(capacity, nodes=first.nodes, depth=first.depth, width=first.width)

    def shape_for(self, num_rows: int) -> TreeShape:
        return self._rng.choice(self._taken)


class JoinedInTurns(MergedDraftController):
    """Alternates steps of all kinds, independent of their gain."""

    _number = 0

    def kind_of(self, tokens: Mapping[str, float], num_requests: int) -> str:
        self._number += 1
        return KINDS[self._number % len(KINDS)]


def engine_of(server: Server, backend: Watched) -> Engine:
    kept = policy_of(server.own_drafter, is_hybrid=server.family in HYBRIDS)
    return Engine(
        backend,
        controller_of(server, backend.capacity),
        overlap=server.overlap,
        chunked_prefill_size=CHUNK,
        cache=kept if server.caches else NO_CACHE,
    )


def controller_of(server: Server, capacity: BackendLimits) -> Controller:
    """A controller that alternates the server's shapes, or an n-gram one if the host drafts."""
    # Of one size: an index has trees of N nodes, and a row without a match is plain by itself.
    widest = max(server.taken, key=lambda shape: shape.nodes)
    if server.joins:
        return JoinedInTurns(capacity, joined_index_of(server, widest, capacity.vocab), 0.0, {})
    if not server.drafts_on_host:
        return InTurns(capacity, server.taken)
    if widest == PLAIN:
        return InTurns(capacity, [PLAIN])
    return NgramController(capacity, index_of(server, widest, capacity.vocab))


def index_of(server: Server, shape: TreeShape, vocab: int) -> NgramIndex:
    """An index that holds little, so that it forgets as well."""
    config, is_chain = _remembering(server), server.rule != "exact"
    return NgramIndex(config, nodes=shape.nodes, depth=shape.depth, vocab=vocab, chain=is_chain)


def joined_index_of(server: Server, shape: TreeShape, vocab: int) -> NgramIndex:
    """The same for n-gram drafts of a merged tree."""
    nodes, ahead = shape.copied, shape.copied - 1 - 2 * COPIES
    sizes = {"nodes": nodes, "depth": nodes - 1, "vocab": vocab}
    return NgramIndex(_remembering(server), **sizes, chain=False, ahead=ahead, path=ahead + COPIES)


def _remembering(server: Server) -> NgramConfig:
    return NgramConfig(
        speculative_ngram_scope=server.scope,
        speculative_ngram_match_type=server.match_type,
        speculative_ngram_capacity=1024,
        speculative_ngram_max_trie_depth=6,
    )


def num_pages_of(server: Server, capacity: BackendLimits, visits: list[Visit]) -> int:
    """Pages for the longest request, and the fraction `spare` of the need of the others."""
    growth = server.overlap * (capacity.max_depth + 1)
    needs = sorted(
        capacity.num_pages_for(visit.request.max_length - 1 + growth + capacity.scratch)
        for visit in visits
    )
    return min(capacity.num_pages, 1 + needs[-1] + int(server.spare * sum(needs[:-1])))


def serve(server: Server, traffic: list[Asked], backends: Backends) -> list[Visit]:
    """Serves the traffic to its end, and checks everything that does not depend on outputs."""
    visits, backend = visits_of(traffic), backends.get(server)
    watched = Watched(backend, num_pages_of(server, backend.capacity, visits))
    engine = engine_of(server, watched)
    step, last = 0, max(each.arrives for each in traffic)
    while engine.busy or step <= last:
        for visit in visits:
            if visit.asked.arrives == step:
                engine.add(visit.request)
            if visit.asked.leaves is not None and step == visit.asked.arrives + visit.asked.leaves:
                end(engine, visit)
        for event in checked_step(engine):
            visit = visits[event.request_id]
            assert not visit.cut, "an event after the end"
            visit.outcome.take(event)
        step += 1
        assert step < MOST_STEPS, "the engine does not come to an end"
    nothing_is_left(engine)
    watched.check()
    TALLY.requests += len(visits)
    TALLY.preemptions += engine.scheduler.num_preemptions
    return visits


def end(engine: Engine, visit: Visit) -> None:
    """Ends a request from outside, unless it has ended."""
    if visit.outcome.finish_reason is not None:
        return
    number, late = visit.request.request_id, visit.asked.late
    if late is None:
        engine.abort(number)
    else:
        engine.finish(number, max(0, len(visit.request.output) - late))
    visit.cut = True


def nothing_is_left(engine: Engine) -> None:
    """Every page, slot and text of a request is back."""
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert engine.cache.usage == 0.0, "a page is lost"
    assert engine.allocator.num_free_slots == engine.allocator.capacity.num_slots - 1
    assert not engine.allocator.pages.page_table.any()
    if isinstance(engine.controller, NgramController | MergedDraftController):
        assert not engine.controller.index.texts, "a text is held for nobody"


# What must hold


def check(server: Server, visit: Visit) -> None:
    """Compares the outcome of a request with plain decoding of it alone."""
    outcome, params = visit.outcome, visit.request.sampling
    tokens, stops = outcome.tokens, params.stop_token_ids
    check_end(visit)
    check_trace(outcome, max_rows=BATCH)
    if server.rule == "exact":
        check_bonus(visit)
    assert (params.logprobs is not None) == bool(outcome.logprobs) or not tokens
    if params.logprobs is not None:
        assert len(outcome.logprobs) == len(tokens)
    if tokens and is_text_kept(server, params):
        oracle = oracle_of(server.family, server.own_drafter)
        oracle.check(visit.request.prompt, tokens, params)
        check_logprobs(oracle, visit)
        check_scores(oracle, visit)
    assert not set(tokens[: min(params.min_tokens, len(tokens))]) & set(stops)


def is_text_kept(server: Server, params: SamplingParams) -> bool:
    """Returns whether the accept rule guarantees the output of plain decoding."""
    by_noise = server.drafter != "NGRAM" and server.shape != PLAIN and params.max_draft_tokens != 0
    return server.rule == "exact" or params.temperature == 0 or not by_noise


def check_end(visit: Visit) -> None:
    """Checks that the output ends by its parameters and for their reason, and that counts agree."""
    outcome, params = visit.outcome, visit.request.sampling
    tokens = outcome.tokens
    stopped = bool(tokens) and tokens[-1] in params.stop_token_ids
    assert not set(tokens[:-1]) & set(params.stop_token_ids), "a text went on behind its stop token"
    if visit.cut:
        assert outcome.finish_reason is None
        assert len(tokens) < params.max_tokens
    else:
        assert outcome.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert stopped or len(tokens) == params.max_tokens
    given = bool(tokens) + sum(accepted + 1 for accepted in outcome.accepted)
    if params.max_draft_tokens is not None:
        most = params.max_draft_tokens
        assert all(accepted <= most for accepted in outcome.accepted), "max_drafts was ignored"
    last = outcome.accepted[-1] if outcome.accepted else 0
    assert len(tokens) <= given <= len(tokens) + last


def check_bonus(visit: Visit) -> None:
    """Checks that no draft of the bonus token was rejected at its node."""
    for event in visit.outcome.traced:
        if event.step and len(event.tokens) > len(event.step.path):
            assert not refused_child(event.step, event.tokens[-1])


def check_logprobs(oracle: Oracle, visit: Visit) -> None:
    """Logprobs are those of the raw logits, and the best ones are the best."""
    params, tokens = visit.request.sampling, visit.outcome.tokens
    if params.logprobs is None:
        return
    want = oracle.logprobs(visit.request.prompt, tokens)
    for row, token, (chosen, best) in zip(want, tokens, visit.outcome.logprobs, strict=True):
        np.testing.assert_allclose(chosen, row[token], atol=LOGPROB_TOLERANCE, rtol=0)
        ids, values = [pair[0] for pair in best], [pair[1] for pair in best]
        assert len(set(ids)) == params.logprobs
        np.testing.assert_allclose(values, row[ids], atol=LOGPROB_TOLERANCE, rtol=0)
        highest = np.sort(row)[::-1][: params.logprobs]
        np.testing.assert_allclose(values, highest, atol=LOGPROB_TOLERANCE, rtol=0)


def check_scores(oracle: Oracle, visit: Visit) -> None:
    """Checks that prompt logprobs, from the second token on, equal those of output tokens."""
    prompt, asked = visit.request.prompt, visit.request.sampling.prompt_logprobs
    scores = visit.outcome.scores
    if asked is None or len(prompt) == 1:
        assert scores is None
        return
    assert scores is not None
    want = oracle.logprobs(prompt[:1], prompt[1:])
    own = want[np.arange(len(want)), list(prompt[1:])]
    np.testing.assert_allclose(scores.chosen, own, atol=LOGPROB_TOLERANCE, rtol=0)
    # Tokens that are about as likely may change places.
    close = own[:, None] + 2 * LOGPROB_TOLERANCE * np.array([1, -1])
    fewest, most = (1 + (want > bound[:, None]).sum(axis=1) for bound in close.T)
    assert ((fewest <= scores.ranks) & (scores.ranks <= most)).all()
    assert scores.top_ids.shape == (len(want), asked)
    best = np.take_along_axis(want, scores.top_ids, axis=1)
    np.testing.assert_allclose(scores.top_values, best, atol=LOGPROB_TOLERANCE, rtol=0)
    highest = -np.sort(-want, axis=1)[:, :asked]
    np.testing.assert_allclose(scores.top_values, highest, atol=LOGPROB_TOLERANCE, rtol=0)
