"""Startup with LoRA adapters: memory plan, programs and rejections."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from shared.boundary.checks import ADAPTED
from shared.boundary.program import ProgramFeature
from shared.models.weight_files import CheckpointError
from shared.options.command_line import parse
from shared.options.flags import ConfigError
from shared.process.device import Device
from shared.process.engines import adapter_slots
from shared.process.start import ValidatedStartup, prepare
from tests.support.lora_files import adapter_stacks, write_adapter
from tests.support.serve_reference import PLATFORM

GOLDEN = Path(__file__).parents[1] / "golden"
BASE = GOLDEN / "qwen3"
LORA, PART = (
    f"{name}={GOLDEN / folder}"
    for name, folder in (("all", "qwen3_lora"), ("part", "qwen3_lora_part"))
)


def started(words: Sequence[str] = (), *, on_gpu: bool = False) -> ValidatedStartup:
    options = parse(["--model-path", str(BASE), "--context-length", "512", *words])
    device = replace(Device.cpu(), kind="gpu", name="H200") if on_gpu else Device.cpu()
    return prepare(options, replace(PLATFORM, find_device=lambda: device))


@pytest.mark.parametrize("count", [1, 2])
def test_memory_plan_has_line_of_adapters(count: int) -> None:
    start = started(["--lora-paths", LORA, PART, "--tp-size", str(count)])
    (line,) = [each for each in start.memory.lines if each.name == "adapters"]
    assert line.detail == "2 x rank 16"
    stacks = adapter_stacks([GOLDEN / "qwen3_lora", GOLDEN / "qwen3_lora_part"], BASE, 0, count)
    arrays = [getattr(x, name) for x in stacks.values() for name in ("a", "b", "scales", "factors")]
    assert line.num_bytes == sum(array.nbytes for array in arrays)


def test_programs_with_adapters_double_others() -> None:
    programs = started(["--lora-paths", LORA]).memory.capacity.programs
    adapted = {p for p in programs if p.has(ProgramFeature.LORA)}
    plain = {p for p in programs if p.work in ADAPTED} - adapted
    assert {p.with_features({ProgramFeature.LORA: False}) for p in adapted} == plain
    assert started().memory.capacity.programs == tuple(p for p in programs if p not in adapted)


def test_adapter_slots_follow_order_of_names() -> None:
    slots = adapter_slots(started(["--lora-paths", PART, LORA]).memory.blueprint.adapters)
    assert [(x.name, x.slot) for x in slots.values()] == [("part", 1), ("all", 2)]
    assert slots["part"].version != slots["all"].version
    assert adapter_slots(None) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--load-format", "dummy"), "--lora-paths requires a Hugging Face checkpoint"),
        (("--served-model-name", "all"), "names an adapter all, as the model"),
    ],
)
def test_unsupported_options_with_adapters_raise(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        started(["--lora-paths", LORA, *words])


def test_adapters_on_gpu_raise() -> None:
    with pytest.raises(ConfigError, match="--lora-paths is not supported on the H200"):
        started(["--lora-paths", LORA], on_gpu=True)


def test_adapter_of_other_model_raises(tmp_path: Path) -> None:
    module = "model.layers.0.linear_attn.out_proj"
    base = GOLDEN / "qwen3_next"
    folder = write_adapter(tmp_path, base, [module])
    with pytest.raises(CheckpointError, match=f"has {module}, which is not an adaptable module"):
        started(["--lora-paths", f"other={folder}"])
