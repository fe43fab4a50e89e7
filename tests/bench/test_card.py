"""Clock and power of GPUs, as reported by `nvidia-smi`."""

import time
from pathlib import Path

import pytest

from bench.common.gpu_clock import HEADER, format_card, medians, watched

TOLD = "0, 1980, 350.25\n1, 1700, 690\n0, 1785, 701.5\n0, 1800, 699.5\n1, [N/A], 1\n0, 17"


def test_medians_per_card_ignore_non_numbers():
    assert medians(TOLD) == {"sm_mhz": [1800, 1700], "watts": [700, 690]}
    assert medians("No devices were found\n") == {}


def test_format_card_shows_slowest_clock_and_total_power():
    assert format_card(medians(TOLD)).split() == ["1700", "1390"]
    assert len(format_card(medians(TOLD))) == len(format_card({})) == len(HEADER)


def test_watched_samples_until_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nwhile echo 0, 1980, 500; do sleep 0.01; done\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with watched(True) as found:
        assert found == {}
        time.sleep(0.5)
    assert found == {"sm_mhz": [1980], "watts": [500]}
    with watched(False) as found:
        pass
    assert found == {}


def test_watched_without_nvidia_smi_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with watched(True) as found:
        pass
    assert found == {}
