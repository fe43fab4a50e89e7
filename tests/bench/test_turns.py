"""Works that are prepared concurrently and run one at a time."""

import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

from bench.common.staggered_processes import in_turns
from tests.support import child_process
from tests.support.waiting import noted


def test_in_turns_prepares_batch_before_first_turn(tmp_path: Path) -> None:
    log = tmp_path / "log"
    found = list(in_turns(noted, [(log, name) for name in "abc"], at_once=2))
    expected = [(i, f"{name} {part}") for i, name in enumerate("abc") for part in ("one", "two")]
    assert found == expected
    notes = log.read_text().splitlines()
    assert sorted(notes[:2]) == ["ready a", "ready b"]
    assert notes[2:] == ["begin a", "end a", "begin b", "end b", "ready c", "begin c", "end c"]


def test_in_turns_failed_work_does_not_stop_others(tmp_path: Path, monkeypatch) -> None:
    """The time limit of the last work passes as soon as the other four have sent a message."""
    calls = count()
    faults = {"a": "refused", "b": "ended", "c": "refused then", "d": "", "e": "late"}
    works = [(tmp_path / "log", name, fault) for name, fault in faults.items()]

    def monotonic() -> float:
        return time.monotonic() + 60 * (next(calls) >= 4)

    monkeypatch.setattr(child_process, "time", SimpleNamespace(monotonic=monotonic))
    found = list(in_turns(noted, works, at_once=5, ready_s=60))
    expected = {i: [str(value) for number, value in found if number == i] for i in range(5)}
    assert expected == {
        0: ["a is too large"],
        1: ["b one", "it has ended with code 3"],
        2: ["c one", "KeyError: 'c'"],
        3: ["d one", "d two"],
        4: ["it sent nothing for too long"],
    }
    kinds = [type(value) for _, value in found if isinstance(value, Exception)]
    assert kinds == [ValueError, RuntimeError, RuntimeError, TimeoutError]
