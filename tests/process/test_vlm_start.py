"""Startup of a VLM: memory, programs, errors and an output."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jax_impl import platform as jax_platform
from shared.boundary.program import StepKind
from shared.engine.encoder_cache import min_rows
from shared.models.dummy_weights import DummyCheckpoint
from shared.models.families import config_from_folder
from shared.options.command_line import parse
from shared.options.flags import ConfigError
from shared.process import engines, image_startup
from shared.process.device import Device
from shared.process.start import ValidatedStartup, prepare
from tests.support import serve_reference
from tests.support.run_engine import drive
from tests.support.tensors import tensor_bytes
from tests.support.vlm import Prompt, pixels, words, write_seeing
from torch_impl import platform as torch_platform
from torch_impl.weights import load_vision_encoder

GB = 10**9
PLATFORMS = {
    "reference": serve_reference.PLATFORM,
    "torch": torch_platform.PLATFORM,
    "jax": jax_platform.PLATFORM,
}
FLAGS = "--context-length 256 --max-running-requests 2 --max-total-tokens 1024"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_seeing(tmp_path_factory.mktemp("seeing") / "model")


def started(
    folder: Path, flags: str = "", name: str = "torch", kind: str = "cpu"
) -> ValidatedStartup:
    platform = replace(
        PLATFORMS[name],
        find_device=lambda: Device(kind, "one", GB),
        take_devices=lambda count: None,
    )
    return prepare(parse(["--model-path", str(folder), *FLAGS.split(), *flags.split()]), platform)


def sizes(start: ValidatedStartup) -> dict[str, int]:
    return {line.name: line.num_bytes for line in start.memory.lines}


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_vlm_startup_serves_images(folder, name):
    start = started(folder, "--speculative-algorithm NEXTN", name)
    backend = start.load(PLATFORMS[name], lambda num_bytes: None)
    backend.prepare(start.memory.capacity.programs, lambda program: None)
    engine = engines.make_engine(backend, start.memory)
    prompt = Prompt(words(100, 1), pixels(4, 8, 1), words(40, 1))
    assert drive(engine, [prompt.request()])[0].tokens == prompt.text()
    engine.close()


def test_vision_encoder_memory_equals_plan(folder):
    """Exact on a CPU: weights, rows of the encoder cache and a position delta per slot."""
    start = started(folder)
    without = started(folder, "--language-model-only")
    assert start.num_bytes > without.num_bytes
    read = []
    backend = start.load(PLATFORMS["torch"], read.append)
    assert sum(read) == start.num_bytes, "the progress ends with the last byte"
    planned, other = sizes(start), sizes(without)
    assert planned.keys() - other.keys() == {"vision encoder", "encoder cache"}
    assert tensor_bytes(backend.state.images) == planned["encoder cache"]
    assert vision_encoder_bytes(start) == planned["vision encoder"]
    same = {"KV", "state", "weights", "token counts", "draft inputs", "decode workspace"}
    assert all(planned[line] == other[line] for line in same)
    assert planned["plans and results"] > other["plans and results"]
    backend.close()


def vision_encoder_bytes(start: ValidatedStartup) -> int:
    """Bytes of the vision encoder in torch."""
    vision, where = start.memory.capacity.images.vision, ("float32", torch.device("cpu"))
    return tensor_bytes(
        load_vision_encoder(start.opened.checkpoint, vision, *where, lambda num_bytes: None)
    )


def test_every_rank_holds_whole_vision_encoder(folder):
    alone, shared = sizes(started(folder)), sizes(started(folder, "--tp-size 2"))
    assert shared["weights"] < alone["weights"]
    assert all(shared[line] == alone[line] for line in ("vision encoder", "encoder cache"))


@pytest.mark.parametrize(("name", "kind"), [("torch", "gpu"), ("torch", "cpu"), ("jax", "cpu")])
def test_encode_buckets_double_in_size(folder, name, kind):
    capacity = started(folder, name=name, kind=kind).memory.capacity
    patches = [p.tokens for p in capacity.programs if p.work is StepKind.ENCODE]
    assert patches == [4 * 8, 4 * 32] if name == "jax" else [4 * 8, 4 * 16, 4 * 32]
    assert capacity.max_image_tokens == 32
    assert capacity.images.num_rows == 1 + max(4 * 32, min_rows(32))


def test_memory_plan_covers_partially_encoded_image(folder, monkeypatch):
    monkeypatch.setattr(image_startup, "MOST_PRODUCTS", 1)
    start = started(folder)
    backend = start.load(PLATFORMS["torch"], lambda num_bytes: None)
    assert backend.state.images.begun is not None
    assert tensor_bytes(backend.state.images) == sizes(start)["encoder cache"]
    backend.close()


def test_image_flags_bound_images_and_encoder_cache(folder):
    images = started(folder, "--max-image-tokens 20").memory.capacity.images
    assert images.processor.smart_resize(600, 600)[0] ** 2 <= 20 * 64
    below = started(folder, "--max-image-tokens 7").memory.capacity  # below the minimum of the file
    assert below.max_image_tokens == 7
    assert below.images.processor.smart_resize(600, 600) == (16, 16)
    pool = started(folder, "--mm-encoder-cache-tokens 500").memory.capacity.images
    assert pool.num_rows == 501
    more = sizes(started(folder, "--mm-encoder-cache-tokens 500"))["encoder cache"]
    less = sizes(started(folder, "--mm-encoder-cache-tokens 400"))["encoder cache"]
    assert more - less == 100 * 64 * 4


REFUSED = {
    "--mm-encoder-cache-tokens 100": "needs 128; increase it, or lower --max-image-tokens",
    "--language-model-only --max-image-tokens 30": "only the text model is served; remove the flag",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_image_flags_without_room_raise(folder, flags):
    with pytest.raises(ConfigError, match=REFUSED[flags]):
        started(folder, flags)


def test_missing_processor_config_requires_language_model_only(folder, tmp_path):
    blind = write_seeing(tmp_path / "model")
    (blind / "preprocessor_config.json").unlink()
    fault = (
        r"no image processor settings; add preprocessor_config.json, .*--language-model-only serves"
    )
    with pytest.raises(ConfigError, match=fault):
        started(blind)
    assert started(blind, "--language-model-only").memory.capacity.images is None


def test_missing_vision_extra_requires_language_model_only(folder, monkeypatch):
    monkeypatch.setattr(image_startup, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"install the extra vision; --language-model-only serves"
    ):
        started(folder)
    assert started(folder, "--language-model-only").memory.capacity.images is None


@pytest.mark.parametrize("flags", ["", "--load-format dummy"])
def test_unsupported_vision_encoder_requires_language_model_only(tmp_path, flags):
    other = write_seeing(tmp_path / "model")
    config = json.loads((other / "config.json").read_text(encoding="utf-8"))
    config["vision_config"]["deepstack_visual_indexes"] = [1]
    (other / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"deepstack_visual_indexes.*--language-model-only serves"
    ):
        started(other, flags)
    assert started(other, f"{flags} --language-model-only").memory.capacity.images is None


def test_dummy_checkpoint_has_vision_encoder_by_config(folder):
    start = started(folder, "--load-format dummy")
    assert isinstance(start.opened.checkpoint, DummyCheckpoint)
    assert start.opened.checkpoint.has_vision_encoder
    assert not DummyCheckpoint.of_model(config_from_folder(folder), None).has_vision_encoder
    start.load(PLATFORMS["torch"], lambda num_bytes: None).close()
    assert vision_encoder_bytes(start) == sizes(start)["vision encoder"]
