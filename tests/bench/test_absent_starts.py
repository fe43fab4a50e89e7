"""Starts for absent GPUs: the selection of starts, truncated models, and worker processes."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.kernels import workers
from bench.kernels.aot_calls import calls_of
from bench.kernels.random_configs import SEED, random_starts
from bench.kernels.starts import (
    DEMO,
    SHAPES,
    UNSUPPORTED_RANKS,
    Start,
    chosen,
    shipped,
    with_layers,
)
from bench.kernels.workers import Bounded, shared_out
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.options.command_line import parse
from shared.process.device import Device
from shared.process.start import prepare
from shared.spec.draft_tree import TreeShape
from tests.support.serve_reference import platform_of
from tests.support.worked import worked


def test_shipped_starts_cover_every_model_and_drafter(tmp_path: Path) -> None:
    starts = list(shipped())
    named = {flag for start in starts for flag in start.all_flags(tmp_path)}
    read = {Path(path).name for path in named if path.startswith("/")}
    folders = [*SHAPES.iterdir(), *(path for path in DEMO.iterdir() if path.is_dir())]
    for folder in (folder for folder in folders if (folder / "config.json").is_file()):
        assert any(folder.name in name for name in read), folder
    assert {start.ranks for start in starts} == {1, 2, 4, 8}


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize(("model", "ranks"), sorted(UNSUPPORTED_RANKS))
def test_unsupported_ranks_raise_at_startup(model, ranks, backend, tmp_path: Path) -> None:
    h200 = Device("gpu", "NVIDIA H200", 110 << 30)
    platform = replace(platform_of(backend), find_device=lambda: h200)
    platform = replace(platform, take_devices=lambda count: None)
    flags = Start(SHAPES / model, ranks=ranks).all_flags(tmp_path)
    message = (
        r"expert widths that are multiples of 16 on each rank, got \d+ on 8 ranks, \d+ on each"
    )
    with pytest.raises(ValueError, match=f"{message}; use a smaller --tp-size"):
        prepare(parse(flags), platform)
    prepare(parse([*flags[:-1], str(ranks // 2)]), platform)


def test_with_layers_truncates_model_and_head(tmp_path: Path) -> None:
    model = with_layers(SHAPES / "qwen3.5-9b", 4, tmp_path)
    assert json.loads((model / "config.json").read_text())["num_hidden_layers"] == 4
    assert with_layers(model, 4, tmp_path) == model
    model = with_layers(SHAPES / "nemotron-3-nano", 4, tmp_path)
    assert json.loads((model / "config.json").read_text())["hybrid_override_pattern"] == "MEM*"
    head = json.loads((with_layers(DEMO / "dflash", 8, tmp_path) / "config.json").read_text())
    assert head["num_target_layers"] == 8
    assert head["dflash_config"]["target_layer_ids"] == [1, 2, 3]
    assert (with_layers(DEMO / "dflash", 8, tmp_path) / "model.safetensors").is_file()


def test_with_layers_shows_only_complete_folders(tmp_path: Path) -> None:
    def read(scratch: Path) -> int:
        config = (with_layers(SHAPES / "qwen3.5-9b", 4, scratch) / "config.json").read_text()
        return json.loads(config)["num_hidden_layers"]

    scratches = [tmp_path / str(number) for number in range(100)]
    for scratch in scratches:
        scratch.mkdir()
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(read, [scratch for scratch in scratches for _ in range(8)])) == {4}


def test_chosen_programs_have_smallest_and_largest_batches() -> None:
    def decode(batch: int, *extras: ProgramFeature) -> Program:
        shape = TreeShape.plain(batch)
        extra = ProgramFeature.LOGPROBS if extras else ProgramFeature.NONE
        return Program(
            work=StepKind.DECODE, batch=batch, pages=1, tokens=0, shape=shape, extras=extra
        )

    programs = [decode(batch) for batch in (1, 2, 4, 8, 16)] + [decode(16, ProgramFeature.LOGPROBS)]
    assert [p.batch for p in chosen(programs, is_brief=False)] == [1, 4, 16, 16]
    assert [p.batch for p in chosen(programs, is_brief=True)] == [16]


def test_random_starts_are_reproducible_per_seed(tmp_path: Path) -> None:
    def texts(folder: Path) -> list[str]:
        starts = list(random_starts(6, SEED, folder, "torch"))
        return [(start.model / "config.json").read_text() for start in starts]

    one, other = texts(tmp_path / "one"), texts(tmp_path / "other")
    assert one == other
    assert len(set(one)) == 6


CALL = """\
  %4:2 = stablehlo.custom_call @__gpu$xla.gpu.triton(%1, %arg2) {mhlo.backend_config = {name = \
"norm"}} : (tensor<2x4xbf16>, tensor<4xf32>) -> (tensor<2x4xbf16>, tensor<f32>)
"""


def test_calls_of_returns_each_kernel_once() -> None:
    other = CALL.replace("%1", "%7").replace("%4", "%9")
    (call,) = calls_of(f"{CALL}  %5 = stablehlo.custom_call @Other() : () -> tensor<f32>\n{other}")
    assert call.name == "norm"
    assert call.operands == ("tensor<2x4xbf16>", "tensor<4xf32>")
    assert call.line(0, 3).startswith("%0:2 = stablehlo.custom_call @__gpu$xla.gpu.triton(%arg3, %")
    with pytest.raises(ValueError, match="a call of a kernel has another form"):
        list(calls_of(CALL.replace(" : (", " of (")))


def test_shared_out_failed_item_does_not_stop_others(monkeypatch) -> None:
    """The time limit passes as soon as the other items have ended."""
    items = ["one", "raises", "ends", "stays", "two"]
    all_done = shared_out(worked, items, jobs=2, limit_s=60)
    found = {done.item: done for done in islice(all_done, 4)}
    assert "stays" not in found
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 60)
    monkeypatch.setattr(workers, "time", later)
    found |= {done.item: done for done in all_done}
    assert set(found) == set(items)
    assert found["two"].value.startswith("two by ")
    assert found["raises"].error == "ValueError: wrong"
    assert found["ends"].error == "its process has ended with code 3"
    assert found["stays"].error == "it has not ended within 60 s"


def test_bounded_starts_no_item_after_total_time() -> None:
    late = Bounded(["one", "two"], total_s=-1)
    assert list(late) == []
    assert late.left == 2
    bounded = Bounded(["one", "two"], total_s=60)
    assert list(bounded) == ["one", "two"]
    assert bounded.left == 0
