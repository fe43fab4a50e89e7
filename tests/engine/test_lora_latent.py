"""Requests with LoRA adapters of latent attention, among them adapters of `kv_b_proj` alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shared.engine.engine import Engine
from shared.models.checkpoint import load_all
from shared.models.families import config_from_folder
from shared.models.parameters import parameters
from tests.support.lora_engine import (
    GREEDY,
    NEXTN,
    PROMPT,
    SAMPLED,
    TREE,
    cells,
    engine_of,
    lora_flags,
    request,
    texts,
)
from tests.support.lora_files import module_names, write_adapter, write_merged
from tests.support.run_engine import drive
from tests.support.serve_reference import platform_of
from tests.support.tiny_heads import write_tiny_head

BASE = Path(__file__).parents[1] / "golden" / "deepseek_v3"
NAMES = ("first", "second")
DRAFTERS = {
    "plain": (),
    "NEXTN": NEXTN,
    "NEXTN tree": (*NEXTN, *TREE),
    "NGRAM": ("--speculative-algorithm", "NGRAM"),
    "EAGLE": ("--speculative-algorithm", "EAGLE"),
}
QUICK = (
    *(("reference", drafter, False) for drafter in ("plain", "NGRAM", "EAGLE")),
    *(("reference", "NEXTN tree", True), ("torch", "NEXTN", False)),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An adapter of `kv_b_proj`, one of all modules, the checkpoints with them merged, a head."""
    folder, config = tmp_path_factory.mktemp("latent"), config_from_folder(BASE)
    modules = module_names(BASE, parameters(config, True))
    chosen = [name for name in modules if name.endswith("kv_b_proj")]
    assert len(chosen) == config.num_layers + 1
    write_tiny_head(folder / "EAGLE", config, load_all(BASE, config, False), "EAGLE", 1)
    found = {"": BASE, "EAGLE": folder / "EAGLE"}
    for seed, (name, some) in enumerate(zip(NAMES, (chosen, modules), strict=True)):
        how = {"seed": seed, "rank": 3 + seed, "alpha": 9}
        found[name] = write_adapter(folder / name, BASE, some, **how)
        found[f"merged {name}"] = write_merged(folder / f"m{name}", BASE, found[name])
    return found


@cache
def plain_text(framework: str, folder: Path, sampled: bool) -> list[int]:
    """The text of a whole checkpoint, by plain decoding."""
    how = SAMPLED if sampled else GREEDY
    return texts(engine_of(folder, platform=platform_of(framework)), [request(0, **how)])[0]


@pytest.mark.parametrize(
    ("framework", "drafter", "sampled"),
    [*cells(("reference", "torch"), DRAFTERS, QUICK), *cells(("jax",), ("NEXTN tree",), ())],
)
def test_adapted_latent_text_equals_merged_model(
    framework: str, drafter: str, sampled: bool, folders: dict[str, Path]
) -> None:
    """Requests of both adapters and of the base model decode in one batch."""
    words = [*lora_flags(folders, NAMES), *DRAFTERS[drafter]]
    if drafter == "EAGLE":
        words += ["--speculative-draft-model-path", str(folders["EAGLE"])]
    engine = engine_of(BASE, words, platform=platform_of(framework))
    how = SAMPLED if sampled else GREEDY
    got = texts(engine, [request(i, name, **how) for i, name in enumerate(("", *NAMES, ""))])
    whole = ("", *(f"merged {name}" for name in NAMES))
    base, *merged = (plain_text(framework, folders[name], sampled) for name in whole)
    assert got == [base, *merged, base]
    assert base not in merged
    assert merged[0] != merged[1]


def test_base_rows_keep_bits_next_to_latent_adapters(folders: dict[str, Path]) -> None:
    """A row without an adapter has the bits of a server without adapters.

    The prompts share no prefix, so that both servers run the same steps.
    """
    platform, prompts = platform_of("torch"), (PROMPT, PROMPT[3:])
    engine = engine_of(BASE, lora_flags(folders, NAMES), platform=platform)
    alone = engine_of(BASE, platform=platform)

    def logprobs(engine: Engine, names: Sequence[str]) -> list[Any]:
        rows = [request(i, x, prompts[i], logprobs=2) for i, x in enumerate(names)]
        return [outcome.logprobs for _, outcome in sorted(drive(engine, rows).items())]

    (base, adapted), plain = logprobs(engine, ("", NAMES[0])), logprobs(alone, ("", ""))
    assert len(base) == 16
    assert base == plain[0]
    assert adapted != plain[1]
