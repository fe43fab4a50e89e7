"""Work with given acceptance rates in simulated time: the effect of draft choices on any device.

Step costs come from a measured table. Acceptance rates of a drafter differ between requests and
change within them. An oracle that knows them takes the best tier of each step. NGRAM drafts for
texts that repeat parts of their prompts, so its acceptance is its own.

Requests are always waiting, as in a busy server. A phase is timed until its last request has begun,
so that the slowest request does not decide the result. Lengths of requests vary from half to one
and a half of the requested number, so that plain decoding does not serve them in lockstep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from shared.boundary.backend import BackendLimits
from shared.engine.adaptive.controller import AdaptiveController
from shared.engine.adaptive.policy import ExpectedValuePolicy, Policy, PolicyInput, Static
from shared.engine.adaptive.tiers import Tier
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import Controller, StaticController
from shared.engine.engine import Engine
from shared.engine.ngram.index import NgramIndex
from shared.engine.ngram_controllers.adaptive import AdaptiveNgramController
from shared.engine.ngram_controllers.controller import NgramController
from shared.engine.request import Request, SamplingParams
from shared.options.ngram import NgramConfig
from tests.support.simulation.device import (
    RealTimeBackend,
    SimulatedBackend,
    TextBackend,
    simulated_capacity,
    with_host_drafts,
)
from tests.support.simulation.phases import Imposed, Phase, Served, imposed, serve
from tests.support.simulation.policies import Greedy, Probe

LOWEST, HIGHEST, PART = 0.2, 0.95, 100
"""Range of imposed rates, and the number of tokens for which a request keeps one."""

LEAST_REQUESTS = 20
"""Minimum number of requests of a phase with imposed rates: with fewer, their differences dominate.
"""

PROMPT, VOCAB = 200, 4096
SHARES = {"copying": 0.85, "half and half": 0.4, "free": 0.03}
"""Share of the pieces of a text that its prompt contains too."""

DISABLED = "disabled"
"""Plain steps that do not wait for each other, beside those of NGRAM's tiers that do."""

Table = Mapping[int, Sequence[float]]
"""Seconds of a step by batch bucket: of each tier, and last of a disabled step of NGRAM."""

Runs = dict[str, list[Served]]


def rated_work(batches: Sequence[int], tokens: int, seed: int) -> tuple[list[Phase], Imposed]:
    """Phases with rates that are high, low, or different between requests and within them."""

    def changing(rng: np.random.Generator) -> list[float]:
        return rng.uniform(LOWEST, HIGHEST, max(1, tokens // PART)).tolist()

    kinds = {
        "0.95": lambda rng: (HIGHEST,),
        "0.2": lambda rng: (LOWEST,),
        "by request": lambda rng: (float(rng.uniform(LOWEST, HIGHEST)),),
        "by part": changing,
    }
    plan = [
        (f"{name}, batch {batch}", batch, max(LEAST_REQUESTS, 5 * batch), tokens, rates)
        for batch, (name, rates) in product(batches, kinds.items())
    ]
    phases, law = imposed(plan, part=PART, seed=seed)
    rng, found = np.random.default_rng(seed + 1), list[Phase]()
    for phase in phases:
        requests = [
            replace(r, sampling=replace(r.sampling, max_tokens=_length(rng, tokens)))
            for r in phase.requests
        ]
        found.append(replace(phase, requests=requests, goes_on=True))
    return found, law


def _length(rng: np.random.Generator, tokens: int) -> int:
    """Returns the length of a request's output."""
    return int(rng.integers(tokens // 2, tokens * 3 // 2))


def written_work(
    batches: Sequence[int], tokens: int, seed: int
) -> tuple[list[Phase], dict[int, list[int]]]:
    """Phases of each kind of `SHARES`, and the texts that are written in them, by seed."""
    rng, phases, texts = np.random.default_rng(seed), list[Phase](), dict[int, list[int]]()
    for batch, (kind, share) in product(batches, SHARES.items()):
        requests = []
        for _ in range(max(6, 5 * batch)):
            prompt, key = rng.integers(1, VOCAB, PROMPT).tolist(), 1 + len(texts)
            length = _length(rng, tokens)
            texts[key] = _written(rng, prompt, share, length)
            sampling = SamplingParams(temperature=0.0, seed32=key, max_tokens=length)
            requests.append(Request(request_id=key, prompt=tuple(prompt), sampling=sampling))
        phases.append(Phase(f"{kind}, batch {batch}", batch, requests, goes_on=True))
    return phases, texts


def _written(rng: np.random.Generator, prompt: list[int], share: float, tokens: int) -> list[int]:
    """Pieces of a prompt, and of words of its own from a common few, which repeat by chance."""
    found: list[int] = []
    while len(found) < tokens:
        length = int(rng.integers(3, 30))
        if rng.random() < share:
            start = int(rng.integers(0, len(prompt) - length))
            found += prompt[start : start + length]
        else:
            found += rng.geometric(0.03, length).tolist()
    return found[:tokens]


class KnowsRates(AdaptiveController):
    """The oracle: an adaptive controller with the imposed rates."""

    law: Imposed

    def situation(self, ready: Sequence[Request]) -> tuple[PolicyInput, np.ndarray]:
        """Returns the policy input before a step, with true rates in place of estimated ones."""
        known, _ = super().situation(ready)
        seeds = np.array([r.sampling.seed32 for r in ready], np.uint32)
        rates = self.law(seeds, np.array([len(r.output) for r in ready]))
        chains = np.cumprod(rates, axis=1)
        tokens = []
        for tier in self.shapes.tiers:
            hits = 1 - (1 - rates[:, : tier.depth]) ** tier.independent_candidates
            best = np.sort(np.cumprod(hits, axis=1), axis=None)[::-1]
            budget = tier.shape(self.shapes.bucket(len(ready))).rows - len(ready)
            total = best[:budget] if tier.width <= 1 else best
            tokens.append(len(ready) + float(total.sum()))
        imposed = replace(known, expected=known.expected._replace(tokens=np.array(tokens)))
        return imposed, chains[:, : max(tier.depth for tier in self.shapes.tiers)]


def rated_runs(
    tiers: Sequence[Tier], table: Table, work: tuple[list[Phase], Imposed], overlap: int
) -> Runs:
    """Every tier, the adaptive choice, simpler ones and the oracle, with imposed acceptance."""
    phases, law = work
    capacity = simulated_capacity(tiers, list(table), overlap=overlap)

    def run(controller: Controller) -> list[Served]:
        backend = SimulatedBackend(capacity, lambda b, tier: table[b][tiers.index(tier)], law)
        return _served(backend, controller, phases, lambda: backend.clock)

    def static(number: int) -> Controller:
        if _shares_rows(tiers):  # which ranks drafts by estimates
            return AdaptiveController(capacity, Static(number), table, has_experts=False)
        nodes, depth, width = tiers[number].tree
        return StaticController(capacity, nodes=nodes, depth=depth, width=width)

    KnowsRates.law = law
    found = {str(tier): run(static(number)) for number, tier in enumerate(tiers)}
    policies: dict[str, Policy] = {
        "greedy": Greedy(),
        "probe": Probe(),
        "adaptive": ExpectedValuePolicy(),
    }
    for name, policy in policies.items():
        found[name] = run(AdaptiveController(capacity, policy, table, has_experts=False))
    return found | {"oracle": run(KnowsRates(capacity, Greedy(), table, has_experts=False))}


def _shares_rows(tiers: Sequence[Tier]) -> bool:
    return any(tier.share < 1 for tier in tiers)


def merged(runs: Sequence[Runs]) -> Runs:
    """Runs of the same phases, with other requests each, as one."""
    return {
        name: [_sum(each) for each in zip(*(r[name] for r in runs), strict=True)]
        for name in runs[0]
    }


def _sum(served: Sequence[Served]) -> Served:
    tokens, seconds, steps = (
        sum(getattr(each, name) for each in served) for name in ("tokens", "seconds", "steps")
    )
    return Served(served[0].name, tokens, seconds, steps)


def written_runs(
    tiers: Sequence[Tier],
    table: Table,
    work: tuple[list[Phase], Mapping[int, Sequence[int]]],
    overlap: int,
    noise: float = 0.0,
) -> Runs:
    """Every tier of NGRAM, off without waiting, and the adaptive choice, of texts that are given.

    Args:
      noise: Standard deviation of a step's time, as a share of it.
    """
    phases, texts = work
    capacity = simulated_capacity(tiers, list(table), overlap=overlap)
    capacity = with_host_drafts(capacity, VOCAB)

    def run(tier: Tier | None) -> list[Served]:
        def clock() -> float:
            return backend.clock

        def seconds(batch: int, planned: Tier) -> float:
            follows = planned.is_off and not backend.is_idle
            return table[batch][-1 if follows else tiers.index(planned)]

        backend = TextBackend(capacity, seconds, texts, noise=noise)
        return _served(backend, _ngram(capacity, tiers, tier, table, clock), phases, clock)

    found = {str(tier): run(tier) for tier in tiers}
    return found | {"adaptive": run(None)}


def real_time_runs(
    tiers: Sequence[Tier],
    table: Table,
    work: tuple[list[Phase], Mapping[int, Sequence[int]]],
    submit_s: float,
) -> Runs:
    """Same as `written_runs`, in real time: this machine's host with a device of measured costs.

    A step without overlap takes the host's time of a disabled step, and then the device's time.

    Args:
      submit_s: Seconds that submitting a step takes on the host, out of those of a disabled step.
    """
    phases, texts = work
    capacity = with_host_drafts(simulated_capacity(tiers, list(table), overlap=1), VOCAB)

    def seconds(batch: int, tier: Tier) -> float:
        return table[batch][tiers.index(tier)] - table[batch][-1]

    def run(tier: Tier | None) -> list[Served]:
        backend = RealTimeBackend(capacity, seconds, texts, submit_s=submit_s)
        controller = _ngram(capacity, tiers, tier, table, time.perf_counter)
        if isinstance(controller, AdaptiveNgramController | NgramController):
            controller.index.warm_up()
        return _served(backend, controller, phases, time.perf_counter)

    return {str(tier): run(tier) for tier in tiers} | {"adaptive": run(None)}


def _ngram(
    capacity: BackendLimits,
    tiers: Sequence[Tier],
    tier: Tier | None,
    table: Table,
    clock: Callable[[], float],
) -> Controller:
    """With an index of its own; no tier: the adaptive one."""
    if tier is not None and tier.is_off:
        return StaticController(capacity, nodes=1, depth=0, width=0)
    widest = tiers[-1] if tier is None else tier
    sizes = {"nodes": widest.nodes, "depth": widest.depth, "vocab": VOCAB}
    index = NgramIndex(NgramConfig(), **sizes, chain=False)
    if tier is None:
        return AdaptiveNgramController(capacity, index, table, clock)
    return NgramController(capacity, index)


def _served(
    backend: SimulatedBackend | TextBackend,
    controller: Controller,
    phases: Sequence[Phase],
    clock: Callable[[], float],
) -> list[Served]:
    how = {"overlap": backend.capacity.overlap, "chunked_prefill_size": 2048, "cache": NO_CACHE}
    return serve(Engine(backend, controller, **how), phases, clock)
