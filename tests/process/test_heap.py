"""A full collection stops every stream, so what a start leaves behind is out of its sight."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from shared.process import heap, launch
from tests.support.reference_serve import PLATFORM
from tests.support.tiny_models import write_tiny


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    heap.unsettle()


class Cycle:
    """Only the collector can tell that nobody holds it."""

    def __init__(self) -> None:
        self.own = self


def test_what_a_start_made_is_not_collected_and_what_requests_leave_is():
    start = Cycle()
    held = weakref.ref(start)
    heap.settle()
    del start
    left = weakref.ref(Cycle())
    gc.collect()
    assert held() is not None
    assert left() is None


def test_a_start_that_follows_lets_go_of_the_one_before():
    start = Cycle()
    held = weakref.ref(start)
    heap.settle()
    del start
    heap.unsettle()
    assert held() is None


def test_a_server_has_settled_before_it_serves(tmp_path, monkeypatch):
    write_tiny(tmp_path / "model", "qwen3", 0, with_mtp=False)
    frozen = []
    monkeypatch.setattr(launch.loop, "run", lambda *_: frozen.append(gc.get_freeze_count()) or 0)
    assert (
        launch.launch(["--port", "0", "--model-path", str(tmp_path / "model")], lambda: PLATFORM)
        == 0
    )
    assert frozen[0] > 10_000
