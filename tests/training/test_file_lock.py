"""Files that training runs share are written by one run at a time."""

import threading
from pathlib import Path

from jax_impl.training.examples import read_rows
from jax_impl.training.file_lock import locked
from models.make_random import ROOT

LINE = '{"prompt": "one two", "answer": "three"}\n'


def test_locked_file_makes_second_run_wait(tmp_path: Path):
    path, events = tmp_path / "new" / "outputs.jsonl", []

    def second() -> None:
        with locked(path):
            events.append("second")

    with locked(path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        events.append("first")
    thread.join(10)
    assert events == ["first", "second"]


def test_concurrent_runs_read_equal_rows(tmp_path: Path):
    data, rows = tmp_path / "data.jsonl", []
    data.write_text(LINE * 50, encoding="utf-8")
    cache = data.with_name("data.jsonl.tokens.npz")

    def read() -> None:
        rows.append(read_rows([data], ROOT / "random", 64))

    with locked(cache):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join(1)
        assert thread.is_alive()
        assert not cache.exists()
    thread.join(30)
    read()
    assert [each.tokens.tolist() for each in rows] == [rows[0].tokens.tolist()] * 2
