"""KV transfer at startup: programs and buffers of the memory plan, and fingerprints of servers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from shared.boundary.buffers import plan_layout, result_layout
from shared.boundary.program import StepKind
from shared.boundary.transfer_spec import TRANSFERS
from shared.options.command_line import parse
from shared.process.device import Device
from shared.process.serving import transfer_fingerprint
from shared.process.start import prepare
from tests.support import serve_reference
from tests.support.planned import GB, PLATFORMS, planned

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "random"
SIZES = {"context-length": 256, "max-running-requests": 4, "max-total-tokens": 2048}
SIZES |= {"disaggregation-mode": "prefill"}


def flags_of(**more: object) -> list[str]:
    named = SIZES | {name.replace("_", "-"): value for name, value in more.items()}
    return [word for name, value in named.items() for word in (f"--{name}", str(value))]


@pytest.mark.parametrize("framework", PLATFORMS)
def test_plan_without_transfer_has_no_programs(framework):
    memory = planned(framework, 140 * GB)
    assert memory.capacity.transfer is None
    assert not [p for p in memory.capacity.programs if p.work in TRANSFERS]


@pytest.mark.parametrize("framework", PLATFORMS)
def test_plan_counts_buffers_of_transfer_steps(framework):
    memory = planned(framework, 140 * GB, "--disaggregation-mode prefill")
    capacity = memory.capacity
    transfers = [p for p in capacity.programs if p.work in TRANSFERS]
    results = [result_layout(p, capacity).size for p in transfers]
    plans = [plan_layout(p, capacity).size for p in transfers if p.work is StepKind.IMPORT_KV]
    sizes = {line.name: line.num_bytes for line in memory.lines}
    counted = 4 * (capacity.overlap + 2) * (max(results) + max(plans))
    assert capacity.transfer is not None
    assert sizes["plans and results"] == counted > 2 * capacity.transfer.page_bytes
    workspace = PLATFORMS[framework].costs.workspace
    needed = max(workspace(program, memory.blueprint) for program in transfers)
    assert needed <= sizes["eager workspace" if framework == "torch" else "prompt workspace"]


def fingerprint(model: Path = MODEL, **flags: object) -> str:
    options = parse(["--model-path", str(model), *flags_of(**flags)])
    return transfer_fingerprint(prepare(options, serve_reference.PLATFORM))


SAME = [
    {"max_running_requests": 2, "max_total_tokens": 4096},
    {"tp_size": 2},
    {"chunked_prefill_size": 128, "overlap_depth": 0},
    {"context_length": 512},
]
DIFFERENT = [{"page_size": 32}, {"dtype": "bfloat16"}, {"speculative_algorithm": "NEXTN"}]


@pytest.mark.parametrize("flags", SAME, ids=str)
def test_fingerprint_ignores_sizes_of_server(flags):
    assert fingerprint(**flags) == fingerprint()


@pytest.mark.parametrize("flags", DIFFERENT, ids=str)
def test_fingerprint_depends_on_bits_and_layout(flags):
    assert fingerprint(**flags) != fingerprint()


def test_fingerprint_depends_on_weights_not_folder(tmp_path):
    other = shutil.copytree(MODEL, tmp_path / "other")
    assert fingerprint(model=other) == fingerprint()
    file = other / "model.safetensors"
    tensors = load_file(file)
    last = max(tensors)
    save_file({**tensors, last: (tensors[last] * 2).astype(tensors[last].dtype)}, file)
    assert fingerprint(model=other) != fingerprint()


def test_fingerprint_is_equal_for_both_backends():
    found = set()
    for platform in PLATFORMS.values():
        options = parse(["--model-path", str(MODEL), *flags_of()])
        on_cpu = replace(platform, find_device=Device.cpu)
        found.add(transfer_fingerprint(prepare(options, on_cpu)))
    assert len(found) == 1
