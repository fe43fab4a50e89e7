"""One backend with plain steps and with each drafter's shape, served through the HTTP routes.

What is compared is the whole answer: the plain one of a request that is alone, without a cache, and
those that drafts and company must not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import Controller, StaticController
from shared.engine.engine import Engine
from shared.engine.ngram_controllers.controller import NgramController
from shared.spec.draft_tree import TreeShape
from shared.text.tokenizer import Tokenizer
from tests.support.cache_policies import policy_of
from tests.support.http_fixtures import CHAT, COMPLETIONS, END, save_tokenizer
from tests.support.in_process import Body, InProcess
from tests.support.random_requests import (
    CHAIN,
    CHUNK,
    HYBRID,
    LONG,
    NAIVE,
    NARROW,
    PLAIN,
    TREE,
    WITH_COPIES,
    Server,
)
from tests.support.random_serving import LOGPROB_TOLERANCE, Backends, controller_of, index_of

DRAFTS: dict[str, tuple[str, str, TreeShape]] = {
    "NEXTN": (HYBRID, "NEXTN", TREE),
    "EAGLE": ("llama", "EAGLE", TREE),
    "EAGLE3": ("llama", "EAGLE3", NARROW),
    "NAIVE_EAGLE": ("llama", "EAGLE3", NAIVE),
    "STANDALONE": (HYBRID, "STANDALONE", CHAIN),
    "DFLASH": ("llama", "DFLASH", CHAIN),
    "DSPARK": ("llama", "DSPARK", CHAIN),
    "DFLASH2": ("llama", "DFLASH2", CHAIN),
    "ASSISTANT": ("gemma4", "ASSISTANT", TREE),
    "NGRAM": (HYBRID, "NGRAM", LONG),
    "NEXTN+NGRAM": (HYBRID, "NEXTN+NGRAM", TREE),
    "EAGLE+NGRAM": ("llama", "EAGLE+NGRAM", TREE),
    "EAGLE3+NGRAM": ("llama", "EAGLE3+NGRAM", CHAIN),
    "STANDALONE+NGRAM": (HYBRID, "STANDALONE+NGRAM", CHAIN),
    "DFLASH+NGRAM": ("llama", "DFLASH+NGRAM", CHAIN),
    "DSPARK+NGRAM": ("llama", "DSPARK+NGRAM", CHAIN),
    "DFLASH2+NGRAM": ("llama", "DFLASH2+NGRAM", CHAIN),
    "ASSISTANT+NGRAM": ("gemma4", "ASSISTANT+NGRAM", CHAIN),
}
"""The model's family, its drafter and the shape, by `--speculative-algorithm`."""


@lru_cache
def tokenizer() -> Tokenizer:
    """Returns the tokenizer of the HTTP tests: token i is byte i."""
    with TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        made = Tokenizer.from_folder(folder)
    assert made is not None
    return made


class House:
    """The servers of one drafter on one framework, created at first use.

    Args:
      token_map: The tokens that are drafted; None: all.
    """

    def __init__(
        self,
        backends: Backends,
        framework: str,
        algorithm: str,
        token_map: tuple[int, ...] | None = None,
    ) -> None:
        family, drafter, self._shape = DRAFTS[algorithm]
        self._server = Server(
            framework=framework,
            family=family,
            drafter=drafter,
            shape=self._shape if drafter.endswith(WITH_COPIES) else None,
            rule="exact",
            page_size=16,
            overlap=1,
            spare=1.0,
            scope="request",
            match_type="BFS",
            caches=True,
        )
        self._backend = backends.get(self._server, token_map)
        self._policy = policy_of(self._server.own_drafter, is_hybrid=family == HYBRID)
        self._plain = self._served(self._static(PLAIN), cached=False)
        self.facts = self._plain.facts
        self.depth = max(shape.depth for shape in self._server.taken)

    def plainly(self, body: Body) -> Body:
        """The answer of plain steps to a request that is alone."""
        return answers(self._plain, [body])[0]

    def drafting(self, *, cached: bool) -> InProcess:
        return self._served(self._drafter(), cached=cached)

    def _drafter(self) -> Controller:
        capacity = self._backend.capacity
        if self._server.joins:
            return controller_of(self._server, capacity)
        if not self._server.drafts_on_host:
            return self._static(self._shape)
        return NgramController(capacity, index_of(self._server, self._shape, capacity.vocab))

    def _static(self, shape: TreeShape) -> StaticController:
        sizes = {"nodes": shape.nodes, "depth": shape.depth, "width": shape.width}
        return StaticController(self._backend.capacity, **sizes)

    def _served(self, controller: Controller, *, cached: bool) -> InProcess:
        engine = Engine(
            self._backend,
            controller,
            overlap=self._server.overlap,
            chunked_prefill_size=CHUNK,
            cache=self._policy if cached else NO_CACHE,
        )
        return InProcess(engine, tokenizer(), (END,))


def answers(server: InProcess, bodies: Sequence[Body]) -> list[Body]:
    """Returns the responses of a server to simultaneous request bodies, by the endpoint of each."""
    paths = {CHAT if "messages" in body else COMPLETIONS for body in bodies}
    assert len(paths) == 1, "bodies of one endpoint come together"
    return server.answers(paths.pop(), bodies)


def accepted(answer: Body) -> list[int]:
    """Drafts that the steps of an answer accepted: entry i counts the steps that accepted i."""
    return answer["speculative"]["accept_length_histogram"]


def said(answer: Body) -> Any:
    """Returns choices and usage of an answer, without the counts of cached tokens."""
    usage = {k: v for k, v in answer["usage"].items() if k != "prompt_tokens_details"}
    return {"choices": answer["choices"], "usage": usage}


def near(value: Any) -> Any:
    """The same to compare with; logprobs may be as far off as the order of sums moves them."""
    if isinstance(value, float):
        return pytest.approx(value, abs=LOGPROB_TOLERANCE)
    if isinstance(value, dict):
        return {key: near(part) for key, part in value.items()}
    return [near(part) for part in value] if isinstance(value, list) else value
