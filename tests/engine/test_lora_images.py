"""Prompts with images and LoRA adapters of the language model of a VLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from shared.engine.engine import Engine
from shared.engine.request import Request
from shared.models.families import config_from_folder
from shared.models.parameters import parameters
from tests.support import lora_engine
from tests.support.lora_engine import GREEDY, NEXTN, SAMPLED, TREE, cells, lora_flags, texts
from tests.support.lora_files import module_names, write_adapter, write_merged
from tests.support.run_engine import drive
from tests.support.serve_reference import platform_of
from tests.support.vlm import Prompt, pixels, words, write_seeing

NAMES = ("first", "second")
PROMPT = Prompt(words(20, 1), pixels(4, 8, 1), words(20, 1), pixels(6, 5, 2), words(9, 2))
OTHER = Prompt(words(20, 1), pixels(4, 8, 3), words(20, 1), pixels(6, 5, 2), words(9, 2))
"""Two prompts that differ by the pixels of their first image only."""

DRAFTERS = {"plain": (), "NEXTN": NEXTN, "NEXTN tree": (*NEXTN, *TREE)}
QUICK = (("reference", "NEXTN tree", True), ("torch", "NEXTN", False))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A VLM, two adapters of its language model, and the checkpoints with them merged."""
    folder = tmp_path_factory.mktemp("images")
    base = write_seeing(folder / "base")
    modules = module_names(base, parameters(config_from_folder(base), True))
    found = {"": base}
    for seed, name in enumerate(NAMES):
        found[name] = write_adapter(folder / name, base, modules, seed=seed, rank=3 + seed)
        found[f"merged {name}"] = write_merged(folder / f"m{name}", base, found[name])
    return found


def engine_of(framework: str, folder: Path, flags: Sequence[str] = ()) -> Engine:
    platform = platform_of(framework)
    flags = (*flags, "--chunked-prefill-size", "64")
    return lora_engine.engine_of(folder, flags, platform=platform, has_images=True)


def request(number: int, prompt: Prompt, name: str = "", sampled: bool = False) -> Request:
    made = prompt.request(number)
    how = SAMPLED if sampled else GREEDY
    return replace(made, sampling=replace(made.sampling, lora=name, **how))


@cache
def plain_text(framework: str, folder: Path, prompt: Prompt, sampled: bool) -> list[int]:
    """The text of a whole checkpoint, by plain decoding."""
    return texts(engine_of(framework, folder), [request(0, prompt, "", sampled)])[0]


@pytest.mark.parametrize(
    ("framework", "drafter", "sampled"), [*cells(("reference", "torch", "jax"), [*DRAFTERS], QUICK)]
)
def test_adapted_image_text_equals_merged_model(
    framework: str, drafter: str, sampled: bool, folders: dict[str, Path]
) -> None:
    """Image prompts of two adapters and of the base model decode in one batch."""
    engine = engine_of(framework, folders[""], (*lora_flags(folders), *DRAFTERS[drafter]))
    cases = [("", PROMPT), ("first", PROMPT), ("second", PROMPT), ("first", OTHER)]
    got = texts(
        engine, [request(i, prompt, name, sampled) for i, (name, prompt) in enumerate(cases)]
    )
    want = [
        plain_text(framework, folders[f"merged {name}" if name else ""], prompt, sampled)
        for name, prompt in cases
    ]
    assert got == want
    assert len({tuple(text) for text in want[:3]}) == 3
    if drafter != "plain":
        assert engine.metrics.snapshot()["spec_decode_num_drafts_total"] > 0


def test_prefix_cache_isolates_adapters_with_images(folders: dict[str, Path]) -> None:
    """Adapters share no prefix of an image prompt, but the embeddings of its images."""
    engine = engine_of("torch", folders[""], (*lora_flags(folders), *NEXTN))
    cases = [("first", PROMPT), ("second", PROMPT), ("", PROMPT), ("first", OTHER)]
    for has_prefix in (False, True):
        for number, (name, prompt) in enumerate(cases):
            each = request(number, prompt, name)
            folder = folders[f"merged {name}" if name else ""]
            got = drive(engine, [each])[number].tokens
            assert got == plain_text("torch", folder, prompt, False)
            if has_prefix:
                assert each.cached_tokens is not None
                assert each.cached_tokens >= prompt.images[0].end
            else:
                assert not each.cached_tokens
        assert engine.images is not None
        assert engine.images.num_encoded == 3
