"""Files of a startup: each is parsed at most once, for every drafter, image input and weights."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared.models import safetensors_file
from shared.models.families import config_from_folder
from shared.options.command_line import parse
from shared.process.start import prepare
from shared.process.startup_report import start_notes
from shared.text import tokenizer_files
from tests.support import serve_reference
from tests.support.tiny_heads import tiny_pair_config, tiny_spark_config

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
DRAFT_MODELS = {
    "EAGLE": "eagle",
    "EAGLE3": "eagle3",
    "DFLASH": "dflash",
    "STANDALONE": "standalone",
}
ALGORITHMS = ("none", "auto", "NGRAM", "NEXTN", *DRAFT_MODELS)
SETTINGS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
DUMMY = ("--load-format", "dummy")


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Counter[Path]:
    """Number of times that each file was read as a whole, or opened by a library."""
    counts: Counter[Path] = Counter()

    def counted(read: Any) -> Any:
        def read_file(path: str | Path, **settings: Any) -> Any:
            counts[Path(path)] += 1
            return read(path, **settings)

        return read_file

    of_file = counted(tokenizer_files.FastTokenizer.from_file)
    monkeypatch.setattr(tokenizer_files, "FastTokenizer", SimpleNamespace(from_file=of_file))
    monkeypatch.setattr(safetensors_file, "safe_open", counted(safetensors_file.safe_open))
    monkeypatch.setattr(Path, "read_text", counted(Path.read_text))
    return counts


def check(parsed: Counter[Path], target: Path, draft: Path | None, flags: Sequence[str]) -> None:
    """Starts a model and checks that each file of its folders was parsed once."""
    line = ["--model-path", str(target), "--context-length", "256", *flags]
    if draft is not None:
        line += ["--speculative-draft-model-path", str(draft)]
    [*start_notes(prepare(parse(line), serve_reference.PLATFORM))]
    of_models = {path: count for path, count in parsed.items() if path.parent in (target, draft)}
    assert {target / name for name in SETTINGS} <= of_models.keys()
    assert draft is None or draft / "config.json" in of_models
    assert {*of_models.values()} == {1}


@pytest.mark.parametrize("weights", [(), DUMMY], ids=["files", "dummy"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_startup_parses_each_file_once(parsed: Counter[Path], algorithm: str, weights: tuple[str]):
    draft = DEMO / DRAFT_MODELS[algorithm] if algorithm in DRAFT_MODELS else None
    check(parsed, DEMO / "target", draft, ["--speculative-algorithm", algorithm, *weights])
    assert weights or parsed[DEMO / "target" / "model.safetensors"] == 1


@pytest.mark.parametrize("folder", DRAFT_MODELS.values())
def test_detected_draft_model_parsed_once(parsed: Counter[Path], folder: str):
    check(parsed, DEMO / "target", DEMO / folder, ["--speculative-algorithm", "auto"])


@pytest.mark.parametrize("algorithm", ["DSPARK", "DFLASH2"])
def test_dummy_block_head_parsed_once(parsed: Counter[Path], tmp_path: Path, algorithm: str):
    make = {"DSPARK": tiny_spark_config, "DFLASH2": tiny_pair_config}[algorithm]
    config = make(config_from_folder(DEMO / "target"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    parsed.clear()
    check(parsed, DEMO / "target", tmp_path, ["--speculative-algorithm", algorithm, *DUMMY])


@pytest.mark.parametrize("weights", [(), DUMMY], ids=["files", "dummy"])
def test_vlm_startup_parses_each_file_once(parsed: Counter[Path], weights: tuple[str]):
    check(parsed, DEMO / "vlm", None, weights)
    assert parsed[DEMO / "vlm" / "preprocessor_config.json"] == 1
    assert weights or parsed[DEMO / "vlm" / "model.safetensors.index.json"] == 1
