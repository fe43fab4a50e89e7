"""Startup with LoRA adapters: memory plan, programs and rejections."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.boundary.program import ProgramFeature, StepKind
from shared.engine.adapter_slots import AdapterSlots
from shared.models.weight_files import CheckpointError
from shared.options.command_line import parse
from shared.options.flags import ConfigError
from shared.process.adapter_loads import AdapterHandler
from shared.process.device import Device
from shared.process.start import ValidatedStartup, prepare
from shared.process.startup_report import start_notes
from tests.support.lora_files import adapter_weights, write_adapter
from tests.support.polling import wait_until
from tests.support.serve_reference import PLATFORM

DUMMY = "--load-format", "dummy"
GOLDEN = Path(__file__).parents[1] / "golden"
BASE = GOLDEN / "qwen3"
DOWN_PROJ = "model.language_model.layers.0.mlp.down_proj"
LORA, PART = (
    f"{name}={GOLDEN / folder}"
    for name, folder in (("all", "qwen3_lora"), ("part", "qwen3_lora_part"))
)


def started(
    words: Sequence[str] = (), *, on_gpu: bool = False, base: Path = BASE
) -> ValidatedStartup:
    options = parse(["--model-path", str(base), "--context-length", "512", *words])
    device = replace(Device.cpu(), kind="gpu", name="H200") if on_gpu else Device.cpu()
    return prepare(options, replace(PLATFORM, find_device=lambda: device))


@pytest.mark.parametrize("count", [1, 2])
def test_memory_plan_has_line_of_adapters(count: int) -> None:
    start = started(["--lora-paths", LORA, PART, "--tp-size", str(count)])
    (line,) = [each for each in start.memory.lines if each.name == "adapters"]
    assert line.detail == "2 x rank 16"
    weights = adapter_weights([GOLDEN / "qwen3_lora", GOLDEN / "qwen3_lora_part"], BASE, 0, count)
    names = ("a", "b", "scales", "factors")
    arrays = [getattr(x, name) for x in weights.values() for name in names]
    assert line.num_bytes == sum(array.nbytes for array in arrays)
    (host,) = [each for each in start.memory.lines if each.name == "host adapters"]
    copies = [words.nbytes for adapter in start.read_adapters() for words in adapter.words]
    assert host.num_bytes == sum(copies)


def test_programs_with_adapters_double_others() -> None:
    capacity = started(["--lora-paths", LORA]).memory.capacity
    programs, kinds = capacity.programs, capacity.adapters.step_kinds
    adapted = {p for p in programs if p.has(ProgramFeature.LORA)}
    plain = {p for p in programs if p.work in kinds} - adapted
    assert {p.with_features({ProgramFeature.LORA: False}) for p in adapted} == plain
    assert sum(p.work is StepKind.LOAD_ADAPTER for p in programs) == 1
    others = {p for p in adapted if p.work in kinds}
    loads = {p for p in programs if p.work is StepKind.LOAD_ADAPTER}
    assert started().memory.capacity.programs == tuple(
        p for p in programs if p not in others | loads
    )


@pytest.mark.parametrize("drafter", ["NEXTN", "NGRAM"])
def test_adapters_of_mtp_layer_follow_nextn(drafter: str, tmp_path: Path) -> None:
    base = GOLDEN / "qwen3_5_dense"
    folder = write_adapter(tmp_path, base, ["mtp.layers.0.mlp.down_proj", DOWN_PROJ])
    words = ["--lora-paths", f"both={folder}", "--speculative-algorithm", drafter]
    words.append("--language-model-only")
    start = started(words, base=base)
    capacity, is_nextn = start.memory.capacity, drafter == "NEXTN"
    names = {each.parameter.name for each in capacity.adapters.shapes}
    assert names == {"mlp.down", *(["mtp.layer.mlp.down"] if is_nextn else [])}
    assert (StepKind.DRAFT in capacity.adapters.step_kinds) is is_nextn
    replies: list[Any] = []
    notes = [note for note in start_notes(start) if "changes the MTP layer" in note]
    assert [note.split(",")[0] for note in notes] == (
        [] if is_nextn else ["adapter both changes the MTP layer"]
    )
    handler = AdapterHandler(AdapterSlots(capacity), start.adapter_reader)
    handler.load(7, "both", str(folder))
    assert wait_until(lambda: bool(replies.extend(handler.answers()) or replies))
    found = {"folders": {"both": str(folder)}, "notes": notes}
    assert replies == [["reply", 7, found, None, None]]


def test_reader_versions_follow_files() -> None:
    reader = started(["--lora-paths", PART, LORA]).adapter_reader
    found = {x.adapter.name: x.adapter.version for x in reader.read_all()}
    assert list(found) == ["part", "all"]
    assert found["part"] != found["all"]
    assert reader.read("part", str(GOLDEN / "qwen3_lora")).adapter.version == found["all"]
    assert started().adapter_reader is None


def test_adapter_slots_are_limited() -> None:
    def slots(*words: str) -> int:
        return started(["--lora-paths", LORA, PART, *words]).memory.capacity.adapters.num_slots

    assert [slots(), slots("--max-loras-per-batch", "1")] == [2, 1]


def test_pool_of_target_modules_holds_other_adapters() -> None:
    small = ["--lora-paths", PART]
    reader = started(small).adapter_reader
    with pytest.raises(CheckpointError, match="start it with --lora-target-modules all"):
        reader.read("all", str(GOLDEN / "qwen3_lora"))
    wide = [*small, "--lora-target-modules", "all"]
    start = started(wide)
    assert start.memory.capacity.adapters.num_slots == 8
    assert start.adapter_reader.read("all", str(GOLDEN / "qwen3_lora")).words
    alone = started(["--max-lora-rank", "3", "--lora-target-modules", "all"])
    with pytest.raises(CheckpointError, match="has rank 4, and --max-lora-rank is 3"):
        alone.adapter_reader.read("all", str(GOLDEN / "qwen3_lora"))
    assert alone.read_adapters() == []


def test_adapter_with_name_of_model_raises() -> None:
    with pytest.raises(ConfigError, match="names an adapter all, as the model"):
        started(["--lora-paths", LORA, "--served-model-name", "all"])


def test_dummy_base_serves_adapters() -> None:
    (stored,) = started(["--lora-paths", LORA]).read_adapters()
    (named,) = started(["--lora-paths", LORA, *DUMMY]).read_adapters()
    np.testing.assert_array_equal(named.words, stored.words)
    start = started([*DUMMY, "--max-lora-rank", "16", "--lora-target-modules", "all"])
    assert start.memory.capacity.adapters.num_slots == 8
    assert start.read_adapters() == []
    loaded = start.adapter_reader.read("all", str(GOLDEN / "qwen3_lora"))
    assert loaded.adapter == named.adapter


def test_dora_with_dummy_base_raises() -> None:
    with pytest.raises(CheckpointError, match="uses DoRA, which requires the tensors"):
        started(["--lora-paths", f"dora={GOLDEN / 'qwen3_lora_dora'}", *DUMMY])


@pytest.mark.parametrize("base", ["qwen3", "qwen3_moe"])
def test_gpu_serves_adapters_of_all_layers(base: str) -> None:
    words = ["--lora-paths", f"own={GOLDEN / base}_lora"]
    adapters = started(words, on_gpu=True, base=GOLDEN / base).memory.capacity.adapters
    assert adapters.num_slots == 1
    names = {x.parameter.name for x in adapters.shapes}
    assert ("experts.gate_up" in names) == (base == "qwen3_moe")


def test_adapter_of_other_model_raises(tmp_path: Path) -> None:
    module = "model.layers.0.linear_attn.out_proj"
    base = GOLDEN / "qwen3_next"
    folder = write_adapter(tmp_path, base, [module])
    with pytest.raises(CheckpointError, match=f"has {module}, which is not an adaptable module"):
        started(["--lora-paths", f"other={folder}"])


def test_words_of_bfloat16_are_rounded_values() -> None:
    reader = started(["--lora-paths", LORA, "--dtype", "bfloat16"]).adapter_reader
    (adapter,) = reader.read_all()
    (whole,) = started(["--lora-paths", LORA, "--dtype", "float32"]).read_adapters()
    (program,) = reader.pool.programs
    first, span = next(reader.pool.arrays(program))
    assert first.dtype == "bfloat16"
    got = adapter.words[0][span].view("bfloat16")
    want = whole.words[0][: got.size].view(np.float32)
    np.testing.assert_array_equal(got, want.astype("bfloat16"))
