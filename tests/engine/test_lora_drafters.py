"""Requests with LoRA adapters in one slot, with every draft head and a draft model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.models.checkpoint import load_all
from shared.models.families import config_from_folder
from shared.models.parameters import parameters
from tests.support.lora_engine import GREEDY, SAMPLED, TREE, engine_of, lora_flags, request, texts
from tests.support.lora_files import module_names, write_adapter, write_merged
from tests.support.tiny_heads import write_tiny_block, write_tiny_head

BASE = Path(__file__).parents[1] / "golden" / "qwen3"
NAMES = ("first", "second")
CELLS = [
    (kind, is_tree, sampled)
    for kind in ("EAGLE3", "DFLASH", "STANDALONE")
    for is_tree in (False, True)
    for sampled in (False, True)
]
QUICK = ("EAGLE3", True, False)
"""The cell of the default run: a head that reads hidden states of the adapted target."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters, the checkpoints with them merged, and drafters of the base model."""
    folder = tmp_path_factory.mktemp("drafters")
    config = config_from_folder(BASE)
    weights, modules = load_all(BASE, config, False), module_names(BASE, parameters(config, False))
    write_tiny_head(folder / "EAGLE3", config, weights, "EAGLE3", 1)
    write_tiny_block(folder / "DFLASH", config, 1)
    found = {"": BASE, "STANDALONE": BASE}
    found |= {kind: folder / kind for kind in ("EAGLE3", "DFLASH")}
    for seed, name in enumerate(NAMES):
        found[name] = write_adapter(folder / name, BASE, modules, seed=seed, alpha=9)
        found[f"merged {name}"] = write_merged(folder / f"m{name}", BASE, found[name])
    return found


def cells() -> Iterator[object]:
    for cell in CELLS:
        marks = () if cell == QUICK else pytest.mark.matrix
        name = f"{cell[0]} {'tree' if cell[1] else 'chain'} {'sampled' if cell[2] else 'greedy'}"
        yield pytest.param(cell, id=name, marks=marks)


@pytest.mark.parametrize("cell", [*cells()])
def test_adapted_drafts_preserve_merged_text(
    cell: tuple[str, bool, bool], folders: dict[str, Path]
) -> None:
    """Two adapters share one slot, so that the second is loaded once the first has ended."""
    kind, is_tree, sampled = cell
    how = SAMPLED if sampled else GREEDY
    words = [*lora_flags(folders), "--max-loras-per-batch", "1", "--speculative-algorithm", kind]
    words += ["--speculative-draft-model-path", str(folders[kind]), *(TREE if is_tree else ())]
    engine = engine_of(BASE, words)
    got = texts(engine, [request(i, name, **how) for i, name in enumerate(("", *NAMES, NAMES[0]))])
    merged = ["", *(f"merged {name}" for name in NAMES)]
    want = [texts(engine_of(folders[name]), [request(0, **how)])[0] for name in merged]
    assert got == [*want, want[1]]
    assert len({tuple(text) for text in want}) == 3
    assert engine.metrics.snapshot()["spec_decode_num_drafts_total"] > 0
    assert engine.adapters.num_loads == 2
