"""External corpora of NGRAM in the engine process, built on a background thread."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Int32

from shared.engine.ngram.corpus import Corpus
from shared.engine.ngram.index import NgramIndex
from shared.engine.request import InvalidRequestError

Orders = SimpleQueue[tuple[Future[Corpus], Int32[np.ndarray, " words"]]]
NO_INDEX = (
    "external corpora require --speculative-algorithm NGRAM and "
    "--speculative-ngram-external-sam-budget"
)


class CorpusHandler:
    """Handles the corpus messages of the admin routes.

    A corpus is built on its own thread, whose compiled loops release the GIL, and is added to the
    index between two steps. Each reply has the ticket of its request. The thread is a daemon, so
    the end of the process does not wait for a corpus.

    Args:
      index: N-gram index that drafts from corpora; None with another drafter.
    """

    def __init__(self, index: NgramIndex | None) -> None:
        self._index = index
        self._orders: Orders = SimpleQueue()
        threading.Thread(target=_build, args=[self._orders], daemon=True).start()
        self._building: list[tuple[int, str, Future[Corpus]]] = []
        self._answers: list[list[Any]] = []

    def add(self, ticket: int, name: str, tokens: bytes) -> None:
        """Starts to build a corpus from int32 documents, each followed by a separator."""
        words = np.frombuffer(tokens, np.int32)
        try:
            self._given().corpora.check(name, words)
        except InvalidRequestError as refusal:
            self._refuse(ticket, refusal)
            return
        built: Future[Corpus] = Future()
        self._building.append((ticket, name, built))
        self._orders.put((built, words))

    def remove(self, ticket: int, name: str) -> None:
        """Removes a corpus."""
        try:
            self._given().corpora.remove(name)
        except InvalidRequestError as refusal:
            self._refuse(ticket, refusal)
        else:
            self._list(ticket)

    def list(self, ticket: int) -> None:
        """Replies with the corpora."""
        self._list(ticket)

    @property
    def busy(self) -> bool:
        """True while a corpus is being built."""
        return bool(self._building)

    def answers(self) -> list[list[Any]]:
        """Adds finished corpora to the index, and returns the pending replies."""
        waiting = []
        for ticket, name, built in self._building:
            if not built.done():
                waiting.append((ticket, name, built))
                continue
            try:
                self._given().corpora.add(name, built.result())
            except InvalidRequestError as refusal:  # another corpus was added meanwhile
                self._refuse(ticket, refusal)
            else:
                self._list(ticket)
        self._building = waiting
        due, self._answers = self._answers, []
        return due

    def _given(self) -> NgramIndex:
        if self._index is None:
            raise InvalidRequestError("corpus_id", NO_INDEX)
        return self._index

    def _list(self, ticket: int) -> None:
        held = {} if self._index is None else self._index.corpora.sizes
        self._answers.append(["reply", ticket, held, None, None])

    def _refuse(self, ticket: int, refusal: InvalidRequestError) -> None:
        self._answers.append(["reply", ticket, {}, str(refusal), refusal.field])


def _build(orders: Orders) -> NoReturn:
    """Builds corpora one after the other, forever."""
    while True:
        built, words = orders.get()
        try:
            built.set_result(Corpus.build(words))
        except Exception as error:  # raised in the engine's thread when it reads the result
            built.set_exception(error)
