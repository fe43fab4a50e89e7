"""A full collection stops every stream, so what a start leaves behind is out of its sight."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from shared.process import heap, launch
from tests.support.reference_serve import PLATFORM
from tests.support.tiny_models import write_tiny


@pytest.fixture(autouse=True, scope="module")
def uncollected() -> Iterator[None]:
    """In place of the other tests' fixture: what they left is out of sight while these collect."""
    gc.freeze()
    yield
    gc.freeze()


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


def test_a_server_has_settled_before_it_serves(tmp_path, monkeypatch):
    write_tiny(tmp_path / "model", "qwen3", 0, with_mtp=False)
    made = [Cycle()]
    held = weakref.ref(made[0])

    def run(*_: object) -> int:
        made.clear()
        gc.collect()
        return 0 if held() else 1

    monkeypatch.setattr(launch.loop, "run", run)
    line = ["--port", "0", "--model-path", str(tmp_path / "model")]
    assert launch.launch(line, lambda: PLATFORM) == 0


def test_a_start_that_follows_lets_go_of_the_one_before():
    start = Cycle()
    held = weakref.ref(start)
    heap.settle()
    del start
    heap.unsettle()
    assert held() is None
