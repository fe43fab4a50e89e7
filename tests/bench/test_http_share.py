"""HTTP throughput as a share of engine throughput: alternating sides, and the median."""

import os
import time
from pathlib import Path

import pytest

from bench.serving import http_overhead
from bench.serving.http_overhead import Clocks, cpu_s, rounds, summary, waited_s
from bench.serving.with_tokenizer import worded
from shared.models.families import config_from_folder
from shared.text.tokenizer import Tokenizer

SHAPE = Path("bench/shapes/qwen3-8b")


def sides(offline: list[float], http: list[float]):
    """Two sides with given speeds, and the order of their runs."""
    asked = list[str]()

    def side(name: str, speeds: list[float]):
        left = iter(speeds)

        def round() -> dict[str, float]:
            asked.append(name)
            speed = next(left)
            return {"tokens": 100, "tokens_per_s": speed, "seconds": 100 / speed, "steps": speed}

        return round

    return side("offline", offline), side("http", http), asked


def test_rounds_alternate_sides_and_discard_first(capsys):
    offline, http, asked = sides([1, 100, 100, 200], [9, 90, 80, 190])
    found = rounds(offline, http, 3)
    assert asked == ["http", "offline", "offline", "http"] * 2
    summarized = summary(found)
    assert (summarized["share"], summarized["low"], summarized["high"]) == (0.9, 0.8, 0.95)
    assert (summarized["best"], summarized["wall"]) == (0.95, 0.9)
    assert (summarized["offline"]["tokens_per_s"], summarized["http"]["tokens_per_s"]) == (100, 90)
    assert "warm-up" in capsys.readouterr().out


def test_clocks_subtract_waiting_time(monkeypatch):
    waits = iter([1.0, 3.0])
    monkeypatch.setattr(http_overhead, "waited_s", lambda pid: next(waits))
    found = Clocks({"engine": os.getpid()}).found(100, 6.0)
    assert (found["waited_s"], found["seconds"], found["tokens_per_s"]) == (2.0, 6.0, 25.0)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs /proc of Linux")
def test_cpu_and_waited_seconds_follow_process():
    before, waited = cpu_s(os.getpid()), waited_s(os.getpid())
    began = time.process_time()
    while time.process_time() < began + 0.2:
        pass
    assert 0.15 < cpu_s(os.getpid()) - before < 1.0  # the clock ticks in hundredths
    assert waited_s(os.getpid()) >= waited


def test_worded_gives_shape_tokenizer_of_model(tmp_path):
    """It has the tokenizer's own tokens, and words for the rest of its vocabulary."""
    folder = worded(SHAPE, http_overhead.DEMO, tmp_path / "shape")
    demo, found = Tokenizer.from_folder(http_overhead.DEMO), Tokenizer.from_folder(folder)
    assert demo is not None
    assert found is not None
    assert found.has_chat_template
    chat = [{"role": "user", "content": "What is 3 + 4?"}]
    assert found.encode_chat(chat) == demo.encode_chat(chat)
    size = config_from_folder(folder).vocab
    assert found.decode([size - 2, size - 1]) == f" w{size - 2} w{size - 1}"
    with pytest.raises(ValueError, match="room for"):
        worded(http_overhead.DEMO, folder, tmp_path / "other")
