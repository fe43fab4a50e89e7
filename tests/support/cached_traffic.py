"""Requests with common prefixes on a toy backend, and a machine of random traffic of them."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from itertools import count

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from shared.boundary.backend import BackendLimits
from shared.boundary.window_pools import WindowPool
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.prefix_cache import PrefixCache
from shared.engine.request import Request, SamplingParams
from shared.spec.draft_tree import TreeShape
from tests.support.random_traffic import TrafficMachine, plain_text
from tests.support.run_engine import Outcome, drive
from tests.support.toy_backend import POISON, ToyBackend, toy_capacity
from tests.support.toy_transfer import with_transfer

UNIT = 64
"""Interval of state snapshots in tokens, with pages of 4 tokens."""

_ON = replace(NO_CACHE, is_on=True)
_HEAD = replace(_ON, key_lookahead=1, may_skip_draft_kv=True)
KINDS = {
    "plain model": (1, _ON, ()),
    "head": (1, _HEAD, ()),
    "small model": (1, replace(_ON, may_skip_draft_kv=True, draft_reads_kv=True), ()),
    "hybrid": (16, replace(_HEAD, track_interval=UNIT), ()),
    "windows": (1, _HEAD, (1, 6, 17)),
    "windowed hybrid": (16, replace(_HEAD, track_interval=UNIT), (9,)),
}
"""Number of device snapshots, cache policy and sliding windows by kind of model and drafter."""

NUMBERS = count()


class AnyShape(StaticController):
    """A controller that switches between a chain and plain steps at random intervals."""

    def __init__(self, capacity: BackendLimits, seed: int) -> None:
        super().__init__(capacity, nodes=4, depth=3, width=1)
        self._rng, self._left, self._depth = random.Random(seed), 0, 3

    def shape_for(self, num_rows: int) -> TreeShape:
        if not self._left:
            self._left, self._depth = self._rng.randrange(1, 9), self._rng.choice((0, 3))
        self._left -= 1
        return TreeShape.chain(self._depth, 2 if num_rows <= 2 else 4)


def make(
    kind: str,
    *,
    num_pages: int = 400,
    window_pages: int | None = None,
    overlap: int = 1,
    any_shape: bool = False,
    step_bytes: int = 160,
    caches_outputs: bool = True,
) -> Engine:
    """An engine on a toy backend; each window pool has `num_pages` pages by default.

    A step of KV transfer has few pages, so that a record takes several.
    """
    num_snapshots, policy, windows = KINDS[kind]
    policy = replace(policy, caches_outputs=caches_outputs)
    capacity = toy_capacity(
        num_pages=num_pages,
        num_slots=5,
        overlap=2,
        num_snapshots=num_snapshots,
        context_length=1024 if num_pages > 200 else 256,
        window_pools=tuple(WindowPool(window, window_pages or num_pages) for window in windows),
    )
    capacity = with_transfer(capacity, step_bytes)
    chain = StaticController(capacity, nodes=4, depth=3, width=1)
    return Engine(
        ToyBackend(capacity, policy.key_lookahead if policy.may_skip_draft_kv else None),
        AnyShape(capacity, overlap) if any_shape else chain,
        overlap=overlap,
        chunked_prefill_size=128,
        cache=policy,
        transfer_fingerprint=kind,
    )


def request(prompt: list[int], **sampling) -> Request:
    tenant = sampling.pop("tenant", "")
    number = next(NUMBERS)
    given = {"seed32": zlib.crc32(str(prompt).encode()), "max_tokens": 20} | sampling
    params = SamplingParams(**given)
    return Request(request_id=number, prompt=tuple(prompt), sampling=params, tenant=tenant)


def tokens(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(POISON) for _ in range(length)]


def serve(engine: Engine, *requests: Request) -> list[list[int]]:
    """The outputs of requests, which must equal plain decoding."""
    outcomes = drive(engine, requests)
    for each in requests:
        assert outcomes[each.request_id].tokens == plain_text(each)
    return [outcomes[each.request_id].tokens for each in requests]


def family(seed: int, number: int) -> list[Request]:
    """Requests with prompts that begin with parts of other prompts and outputs."""
    rng, texts, found = random.Random(seed), [tokens(seed, 90)], []
    for _ in range(number):
        begin = rng.choice(texts)
        prompt = begin[: rng.randrange(1, len(begin) + 1)] + tokens(rng.randrange(99), 9)
        penalty = rng.choice((1.0, 1.0, 1.3))
        longest = rng.randrange(1, 50)
        found.append(request(prompt[:150], max_tokens=longest, repetition_penalty=penalty))
        texts.append([*found[-1].prompt, *plain_text(found[-1])])
    return found


def give_back_all(cache: PrefixCache) -> None:
    """Evicts all entries; each page and each snapshot must be free afterwards."""
    cache.tree.evict(cache.num_pages)
    cache.check([])
    assert all(pool.num_free == pool.size for pool in cache.allocator.pools)
    assert cache.tree.snapshots.num_free == cache.allocator.capacity.num_snapshots - 1
    assert not cache.tree.roots


class CachedTraffic(TrafficMachine):
    """Requests with common prefixes arrive, abort and stop at any time, with few pages."""

    @initialize(
        overlap=st.integers(0, 2),
        kind=st.sampled_from(sorted(KINDS)),
        pages=st.integers(50, 90),
        window_pages=st.integers(40, 90),
        any_shape=st.booleans(),
    )
    def start(self, overlap, kind, pages, window_pages, any_shape):
        engine = make(
            kind,
            num_pages=pages,
            window_pages=window_pages,
            overlap=overlap,
            any_shape=any_shape,
        )
        self.serve_on(engine)
        self.texts = [tokens(1, 100)]

    @rule(
        which=st.integers(0, 100),
        length=st.integers(1, 140),
        more=st.integers(1, 20),
        max_tokens=st.integers(1, 60),
        poisoned=st.integers(0, 9),
        penalty=st.sampled_from((1.0, 1.0, 1.5)),
        priority=st.sampled_from((0, 0, 1)),
        tenant=st.sampled_from(("", "", "other")),
    )
    def add(self, which, length, more, max_tokens, poisoned, penalty, priority, tenant):
        prompt = [*self.texts[which % len(self.texts)][:length], *tokens(which, more)]
        prompt[len(prompt) // 2] = POISON if poisoned == 0 else prompt[len(prompt) // 2]
        new = request(prompt, max_tokens=max_tokens, repetition_penalty=penalty, tenant=tenant)
        new.priority = priority
        try:
            self.engine.add(new)
        except ValueError:
            return
        self.requests[new.request_id], self.outcomes[new.request_id] = new, Outcome()
        if POISON not in prompt:
            self.texts.append([*prompt, *plain_text(new)])

    @rule(steps=st.integers(1, 8))
    def step(self, steps):
        self.go_on(steps)

    @rule(which=st.integers(0, 100), stops=st.booleans())
    def leave(self, which, stops):
        if not self.requests:
            return
        number = list(self.requests)[which % len(self.requests)]
        if stops:
            self.engine.finish(number, max(0, len(self.outcomes[number].tokens) - which % 3))
        else:
            self.engine.abort(number)
        self.end(number)

    def teardown(self):
        if hasattr(self, "engine"):
            self.drain()
            give_back_all(self.engine.cache)
