"""TP ranks as processes: joint startup, equal outputs, joint exit with a reason."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load_file, save_file

from shared.models.checkpoint import open_checkpoint
from shared.options.command_line import parse
from shared.options.flags import ConfigError
from shared.options.options import Options
from shared.process.device import Device
from shared.process.model_check import check_worker
from shared.process.start import prepare
from shared.process.tp import startup
from shared.process.tp.digest import digest_of
from shared.process.tp.launchers import gpu_of
from tests.support import serve_reference, serve_tp
from tests.support.http_fixtures import ROOT, Server, serving
from tests.support.tp_server import NAMED_S, OpenStream, ended, ranks_of, steps_of
from torch_impl import serve as torch_serve

MODEL = ROOT / "models" / "random"
LARGER = ROOT / "models" / "demo" / "target"  # divisible by four
SIZES = ["--port", "0", "--context-length", "256"]
SIZES += ["--max-running-requests", "2", "--max-total-tokens", "1024", "--page-size", "64"]
FLAGS = ["--model-path", str(MODEL), *SIZES]
PROMPT = {"prompt": "the cat sat on", "max_tokens": 12, "temperature": 0.8}


@contextmanager
def ranked(count: int, model: Path = MODEL):
    """A server of `count` ranks."""
    flags = ["--model-path", str(model), *SIZES, "--tp-size", str(count)]
    with serving(["-m", "tests.support.serve_tp", *flags]) as server:
        yield server


def texts(server: Server) -> list[str]:
    answers = [server.complete(**{**PROMPT, "seed": seed}) for seed in (1, 2)]
    return [answer["choices"][0]["text"] for answer in answers]


def test_tp_output_equals_single_rank_and_ranks_exit():
    with ranked(1, LARGER) as alone:
        wanted = texts(alone)
        assert not ranks_of(alone)
        assert not any(name.startswith("tandem:tp_") for name in alone.metrics())
    with ranked(4, LARGER) as server:
        assert texts(server) == wanted
        pids = server.pids()
        assert len(ranks_of(server)) == 3
        server.wait_for_metric('tandem:tp_rank_steps_total{rank="3"}', steps_of(server))
        assert server.metrics()["tandem:tp_size"] == 4
        assert httpx.get(server.url + "/capabilities").json()["tp_size"] == 4
        assert httpx.get(server.url + "/v1/models").json()["data"][0]["tp_size"] == 4
        assert any("memory plan per rank (4 ranks)" in line for line in server.lines)
        server.process.send_signal(signal.SIGTERM)
        assert ended(server, pids) == 0
        assert not any("Traceback" in line for line in server.lines)


@pytest.mark.parametrize(
    ("number", "ending"),
    [
        (signal.SIGKILL, "rank 1 was terminated by SIGKILL while serving, last report after step "),
        (
            signal.SIGSTOP,
            "rank 1 is stopped by a signal while serving, last report after step ",
        ),
    ],
    ids=["killed", "stopped"],
)
def test_lost_rank_while_serving_ends_all_ranks(number, ending):
    """The error of open streams and the log name the rank and the signal."""
    with ranked(2) as server:
        pids, stream = server.pids(), OpenStream(server)
        began = time.monotonic()
        os.kill(ranks_of(server)[0], number)
        assert stream.error().startswith(ending)
        assert time.monotonic() - began < NAMED_S
        assert ended(server, pids) == 1
        assert any(ending in line for line in server.lines)


def test_lost_rank_ends_idle_server():
    with ranked(2) as server:
        pids = server.pids()
        os.kill(ranks_of(server)[0], signal.SIGKILL)
        assert ended(server, pids) == 1
        assert any(
            "rank 1 was terminated by SIGKILL while serving" in line for line in server.lines
        )


@pytest.mark.parametrize("others", ["running", "stopped"])
def test_workers_exit_with_rank_0(others):
    with ranked(2) as server:
        pids = server.pids()
        if others == "stopped":
            for pid in ranks_of(server):
                os.kill(pid, signal.SIGSTOP)
        os.kill(server.process.pid, signal.SIGKILL)
        assert ended(server, pids) == -signal.SIGKILL


STEP_FAULTS = {
    "1:step:raises": "rank 1 failed while serving, last report after step 29: MemoryError: ",
    "1:step:sleeps": "rank 1 of 2 did not reach exchange 30 within 10 s (waited on by rank 0)",
    "0:step:raises": "the engine failed: MemoryError: there is no room",
}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(name, marks=pytest.mark.matrix if "sleeps" in name else ())  # ten seconds
        for name in STEP_FAULTS
    ],
)
def test_failed_step_on_rank_ends_all_ranks(fault, monkeypatch):
    """Open streams and the log get the failure, with its rank unless it is rank 0."""
    monkeypatch.setenv(serve_tp.FAULT, fault)
    with ranked(2) as server:
        pids, stream = server.pids(), OpenStream(server)
        assert STEP_FAULTS[fault] in stream.error()
        assert ended(server, pids) == 1
        assert any(STEP_FAULTS[fault] in line for line in server.lines)


START_FAULTS = {
    "1:planning:SIGKILL": (1, "rank 1 was terminated by SIGKILL while planning"),
    "1:planning:refuses": (2, "rank 1: the folder is not there"),
    "1:planning:differs": (2, "rank 1 differs from rank 0 in its model, weights or programs"),
    "1:planning:renamed": (2, "rank 1 has a GPU and rank 0 a CPU; ranks require devices"),
    "1:loading:raises": (1, "rank 1 failed while loading: MemoryError: there is no room for the w"),
    "1:loading:SIGSTOP": (1, "rank 1 is stopped by a signal while loading"),
    "1:preparing:SIGKILL": (1, "rank 1 was terminated by SIGKILL while preparing programs"),
    "0:loading:refuses": (2, "the folder is not there"),
    "0:loading:SIGKILL": (-signal.SIGKILL, ""),
}


@pytest.mark.parametrize("fault", START_FAULTS)
def test_failed_startup_on_rank_ends_all_ranks(fault):
    """The last log line has the failure, with its rank unless it is rank 0."""
    code, sentence = START_FAULTS[fault]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.serve_tp", *FLAGS, "--tp-size", "2"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", serve_tp.FAULT: fault},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:  # it returns when every process that holds the pipe has ended
        _, output = process.communicate(timeout=NAMED_S + 60)
    finally:
        process.kill()
    assert process.returncode == code, output
    assert (output.splitlines() or [""])[-1].startswith(sentence)


def test_digest_of_detects_differing_weight_files(tmp_path):
    def digest(folder: Path) -> str:
        options = parse(["--model-path", str(folder), *SIZES])
        return digest_of(prepare(options, serve_reference.PLATFORM))

    other = shutil.copytree(MODEL, tmp_path / "other")
    assert digest(other) == digest(MODEL), "it depends on the location of the files"
    file = other / "model.safetensors"
    tensors, found = load_file(file), set()
    last = max(tensors)
    for factor in (1, 2):  # the headers of both are equal
        changed = (tensors[last] * factor).astype(tensors[last].dtype)
        save_file({**tensors, last: changed}, file)
        found.add(digest(other))
    assert len(found) == 2


def test_tp_ranks_use_smallest_free_memory(monkeypatch):
    monkeypatch.setenv(serve_tp.FAULT, f"1:planning:{serve_tp.LACKS}")
    with ranked(2) as server:
        least, most = serve_tp.GIB // 2, 4 * serve_tp.GIB
        note = f"rank 1 has {least:,} bytes free and rank 0 {most:,}: every rank uses what fits"
        assert any(note in line for line in server.lines)
        assert any(f"of {least:,} free" in line for line in server.lines)
        assert server.metrics()['tandem:tp_rank_startup_free_bytes{rank="1"}'] == least
        assert httpx.get(server.url + "/health").status_code == 200


def test_rank_without_shared_memory_receives_plans_by_socket(monkeypatch):
    with ranked(1) as alone:
        wanted = texts(alone)
    monkeypatch.setenv(serve_tp.FAULT, f"1:planning:{serve_tp.ELSEWHERE}")
    with ranked(2) as server:
        pids = server.pids()
        assert texts(server) == wanted
        server.wait_for_metric('tandem:tp_rank_steps_total{rank="1"}', steps_of(server))
        server.process.send_signal(signal.SIGTERM)
        assert ended(server, pids) == 0


def test_tp_devices_of_one_process_use_smallest_memory():
    least, most = serve_tp.GIB // 2, 4 * serve_tp.GIB
    platform = replace(
        serve_reference.PLATFORM,
        find_device=lambda: Device("gpu", "one", most),
        free_on_each=lambda count: [most, least, 1][:count],
    )
    options = parse([*FLAGS, "--tp-size", "2"])
    with startup.tp_startup(options, lambda: platform, None, print) as ranked:
        assert ranked.prepare().memory.device.free_bytes == least
    note = (
        f"rank 1 has {least:,} bytes free and rank 0 {most:,}: every rank uses what fits on rank 1"
    )
    assert ranked.notes == [note]


REFUSED = {
    "--tp-size 3": "--tp-size 3 does not fit: num_attention_heads (4) of",
    "--tp-size 2 --chunked-prefill-size 65": "--chunked-prefill-size",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_indivisible_tp_size_raises(flags, capfd):
    assert serve_tp.launch([*FLAGS, *flags.split()], torch_serve.platform, torch_serve.MODULE) == 2
    assert capfd.readouterr().err.splitlines()[-1].startswith(REFUSED[flags])


@pytest.fixture
def sent(monkeypatch) -> dict[str, Any]:
    """Messages to workers that are not started, by kind."""
    messages: dict[str, Any] = {}

    class Workers:
        def __init__(self, launcher, count, rank_module, on_failure):
            pass

        def send(self, kind, values):
            messages[kind] = values

    monkeypatch.setattr(startup, "Workers", Workers)
    return messages


def test_workers_receive_absolute_paths(sent, monkeypatch):
    monkeypatch.chdir(MODEL.parent)
    flags = ["--model-path", "demo/target", "--speculative-algorithm", "EAGLE3", "--tp-size", "2"]
    options = parse([*flags, "--speculative-draft-model-path", "demo/eagle3"])
    startup.TPStartup(options, torch_serve.platform, torch_serve.MODULE, print)
    assert sent["options"]["model_path"] == str(MODEL.parent / "demo/target")
    assert sent["options"]["speculative_draft_model_path"] == str(MODEL.parent / "demo/eagle3")


def test_workers_receive_resolved_options_without_tokenizer(sent, tmp_path):
    flags = ["--speculative-algorithm", "auto", "--grammar-backend", "auto", "--tp-size", "2"]
    folder = shutil.copytree(MODEL.parent / "demo" / "target", tmp_path / "target")
    options = parse(["--model-path", str(folder), *flags])
    startup.TPStartup(options, torch_serve.platform, torch_serve.MODULE, print)
    (folder / "tokenizer.json").unlink()
    checked = check_worker(Options.from_values(sent["options"]), open_checkpoint)
    assert checked.options.speculative.speculative_algorithm == "NEXTN"
    assert checked.options.engine.grammar_backend == "llguidance"
    assert checked.grammars is None


def test_gpu_of_assigns_one_named_gpu_per_rank():
    named = {"CUDA_VISIBLE_DEVICES": "3,GPU-8f"}
    assert [gpu_of(named, 8, rank) for rank in range(2)] == ["3", "GPU-8f"]
    assert [gpu_of({}, 2, rank) for rank in range(2)] == ["0", "1"]
    assert gpu_of({}, 0, 1) is None
    assert gpu_of({"CUDA_VISIBLE_DEVICES": ""}, 4, 1) is None
    with pytest.raises(ConfigError, match="requires one GPU per rank, and 2 are available"):
        gpu_of(named, 8, 2)
