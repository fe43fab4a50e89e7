"""The hybrid served under the rejection rules, with any drafter of chains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shared.boundary.backend import Backend
from shared.boundary.program import StepKind
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.request import Request
from tests.support.backends import make_backend
from tests.support.run_engine import Outcome, drive
from tests.support.tiny_heads import tiny_block_head, tiny_head, tiny_pair_head, tiny_spark_head
from tests.support.tiny_small import same_model, small_model
from tests.support.tree_subjects import CHAIN, DRAFTED, request, tree_capacity

PROMPT = (5, 17, 3, 29, 8, 40, 2)
KINDS = {
    "greedy": {},
    "greedy with penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "sampled": {"temperature": 1.0},
    "cold": {"temperature": 0.3},
    "filters": {"temperature": 1.1, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.9, "presence_penalty": 0.6, "repetition_penalty": 1.2},
    "bias": {"temperature": 0.8, "logit_bias": {7: 4.0, 9: -3.0}},
    "one draft": {"temperature": 0.7, "max_draft_tokens": 1},
    "logprobs": {"temperature": 0.7, "logprobs": 3},
}


class Rejecting:
    """Backends of the hybrid, by framework, rule and drafter; one shape, a chain."""

    def __init__(self, make: Callable[..., Backend] = make_backend) -> None:
        self.make = make
        self.config, self.weights = DRAFTED["NEXTN"].model()
        self.backends: dict[tuple[str, str, str], Backend] = {}

    def drafter(self, name: str) -> Any:
        """Returns the drafter argument of a backend's constructor."""
        target = (self.config, self.weights)
        return {
            "NEXTN": lambda: "NEXTN",
            "EAGLE3": lambda: tiny_head(*target, "EAGLE3", 4),
            "DFLASH": lambda: tiny_block_head(self.config, 4, block_size=CHAIN.nodes),
            "DSPARK": lambda: tiny_spark_head(self.config, self.weights, 4, block_size=CHAIN.depth),
            "DFLASH2": lambda: tiny_pair_head(self.config, 4, block_size=CHAIN.nodes),
            "STANDALONE": lambda: small_model(*target, "qwen3", 4),
            "the target itself": lambda: same_model(*target),
        }[name]()

    def engine(self, framework: str, rule: str, overlap: int, drafter: str) -> Engine:
        key = (framework, rule, drafter)
        if key not in self.backends:
            capacity = tree_capacity(self.config.vocab)
            wanted = [
                p for p in capacity.programs if p.work is StepKind.PREFILL or p.shape == CHAIN
            ]
            capacity = replace(capacity, programs=tuple(wanted), accept_rule=rule)
            made = (self.config, self.weights, capacity, self.drafter(drafter))
            self.backends[key] = self.make(framework, *made)
        backend = self.backends[key]
        controller = StaticController(backend.capacity, nodes=4, depth=3, width=1)
        return Engine(
            backend, controller, overlap=overlap, chunked_prefill_size=128, cache=NO_CACHE
        )

    def serve(
        self,
        framework: str,
        rule: str,
        requests: list[Request],
        overlap: int,
        drafter: str = "NEXTN",
    ) -> dict[int, Outcome]:
        return drive(self.engine(framework, rule, overlap, drafter), requests)

    def close(self) -> None:
        for backend in self.backends.values():
            backend.close()


def requests() -> list[Request]:
    """One of each kind, with prompts of their own."""
    return [request(number, (*PROMPT, number), **how) for number, how in enumerate(KINDS.values())]
