"""The grammar queue: one compilation per grammar, none for dropped requests."""

import threading

import pytest

from shared.engine.request import Request, SamplingParams
from shared.process.grammars import GrammarQueue

PATIENCE_S = 10


class Compiled:
    """A compiled grammar that is not used."""

    def matcher(self):
        return None


class Compiler:
    """Compiles after a release of its semaphore, and records the grammars."""

    def __init__(self):
        self.begun, self.let, self.runs = [], threading.Semaphore(0), threading.Event()

    def compile(self, text):
        self.begun.append(text)
        self.runs.set()
        assert self.let.acquire(timeout=PATIENCE_S)
        return Compiled()


@pytest.fixture
def compiler():
    return Compiler()


@pytest.fixture
def grammars(compiler):
    made = GrammarQueue(compiler.compile, 16)
    yield made
    compiler.let.release(PATIENCE_S)
    made.close()


def request_grammar(grammars, number, text):
    sampling = SamplingParams(max_tokens=1, grammar=text)
    grammars.ask(Request(request_id=number, prompt=(1,), sampling=sampling))


def next_ready(grammars, count):
    """Sorted ids of the next requests with a compiled grammar."""
    found = []
    while len(found) < count:
        found += [request.request_id for request, refusal in grammars.ready() if refusal is None]
    return sorted(found)


def test_requests_with_same_grammar_share_compilation(grammars, compiler):
    for number in range(5):
        request_grammar(grammars, number, "a")
    compiler.let.release(2)
    assert next_ready(grammars, 5) == [0, 1, 2, 3, 4]
    request_grammar(grammars, 5, "b")
    assert next_ready(grammars, 1) == [5]
    assert compiler.begun == ["a", "b"]


def test_dropped_grammar_compilation_is_skipped(grammars, compiler):
    for number, text in enumerate(["runs", "left", "left", "half left", "half left", "wanted"]):
        request_grammar(grammars, number, text)
    assert compiler.runs.wait(PATIENCE_S)
    for number in (0, 1, 2, 3):
        assert grammars.drop(number)
    assert not grammars.drop(0)
    compiler.let.release(3)
    assert next_ready(grammars, 2) == [4, 5]
    assert compiler.begun == ["runs", "half left", "wanted"]
    assert not grammars.busy


def test_dropped_grammar_can_be_requested_again(grammars, compiler):
    request_grammar(grammars, 0, "runs")
    request_grammar(grammars, 1, "a")
    grammars.drop(1)
    request_grammar(grammars, 2, "a")
    compiler.let.release(2)
    assert next_ready(grammars, 2) == [0, 2]
    assert compiler.begun == ["runs", "a"]
