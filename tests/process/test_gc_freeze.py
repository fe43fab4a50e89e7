"""Frozen garbage collection: startup objects are excluded from full collections."""

import asyncio
import gc
import socket
import weakref
from collections.abc import Iterator

import pytest

from shared.engine.checks import RequestLimits
from shared.process import gc_freeze, launch, serving
from shared.process.address import Listeners
from shared.process.ipc_messages import pack
from shared.server.api import service
from tests.support.engine_info import facts_of
from tests.support.http_fixtures import save_tokenizer
from tests.support.serve_reference import PLATFORM
from tests.support.tiny_models import write_tiny


@pytest.fixture(autouse=True, scope="module")
def uncollected() -> Iterator[None]:
    """Freezes the objects of other tests while these tests run collections."""
    gc.freeze()
    yield
    gc.freeze()


class Cycle:
    """An object in a reference cycle, freed only by the garbage collector."""

    def __init__(self) -> None:
        self.own = self


def test_freeze_gc_excludes_startup_objects_only():
    start = Cycle()
    held = weakref.ref(start)
    gc_freeze.freeze_gc()
    del start
    left = weakref.ref(Cycle())
    gc.collect()
    assert held() is not None
    assert left() is None


def test_engine_process_freezes_gc_before_serving(tmp_path, monkeypatch):
    write_tiny(tmp_path / "model", "qwen3", 0, with_mtp=False)
    made = [Cycle()]
    held = weakref.ref(made[0])

    def run(*_: object) -> int:
        made.clear()
        gc.collect()
        return 0 if held() else 1

    monkeypatch.setattr(serving.loop, "run", run)
    line = ["--port", "0", "--model-path", str(tmp_path / "model")]
    assert launch.launch(line, lambda: PLATFORM) == 0


def test_http_process_freezes_gc_before_serving(tmp_path, monkeypatch):
    save_tokenizer(tmp_path)
    limits = RequestLimits(
        context_length=8,
        max_request_tokens=8,
        vocab_size=300,
        max_stop_token_ids=1,
        max_logit_bias_entries=1,
        max_logprobs=1,
    )
    facts = facts_of(limits, model_folder=str(tmp_path))
    made = [Cycle()]
    held = weakref.ref(made[0])
    kept: list[bool] = []

    async def run(_: service.Service) -> None:
        made.clear()
        gc.collect()
        kept.append(held() is not None)
        raise EOFError

    monkeypatch.setattr(service.Service, "run", run)
    ours, theirs = socket.socketpair()
    ours.send(pack(facts.to_message()))
    with socket.create_server(("127.0.0.1", 0)) as listener, ours, pytest.raises(EOFError):
        asyncio.run(service.serve(theirs, ours, Listeners([listener], []), 0))
    assert kept == [True]


def test_unfreeze_gc_releases_previous_startup():
    start = Cycle()
    held = weakref.ref(start)
    gc_freeze.freeze_gc()
    del start
    gc_freeze.unfreeze_gc()
    assert held() is None
