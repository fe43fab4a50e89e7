"""Lines, comparison and table of `bench.speculation.lora_acceptance`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from bench.speculation import lora_acceptance
from bench.speculation.lora_acceptance import TARGET_ONLY, WHOLE, main, without_mtp
from models.make_random import ROOT
from shared.models.families import config_from_folder
from shared.models.lora import ADAPTER_WEIGHTS
from shared.models.parameters import parameters
from tests.support.lora_files import module_names, write_adapter

MODEL = ROOT / "random"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of all modules of the random model."""
    modules = module_names(MODEL, parameters(config_from_folder(MODEL), True))
    return write_adapter(tmp_path_factory.mktemp("adapter") / "whole", MODEL, modules)


def test_lora_acceptance_measures_every_line(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_acceptance, "MAX_TOKENS", 8)
    out, page = tmp_path / "result.json", tmp_path / "page.md"
    words = ["--model", str(MODEL), "--adapter", str(adapter), "--backend", "torch"]
    words += ["--drafts", "none", "NEXTN:S=2", "--temperature", "0", "--count", "2"]
    assert main([*words, "--batch", "2", "--out", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    lines = [("", "problems"), ("", "sql"), (TARGET_ONLY, "sql"), (WHOLE, "sql")]
    for algorithm in ("none", "NEXTN S=2"):
        rows = [row for row in found["rows"] if row["algorithm"] == algorithm]
        assert [(row["adapter"], row["kind"]) for row in rows] == lines
        assert (rows[0]["accept_length"] > 1) == (algorithm != "none")
    assert found["changed"] == 0
    assert found["tokens"] > 0

    page.write_text("a\n<!-- lora_acceptance -->\n<!-- /lora_acceptance -->\n", encoding="utf-8")
    assert main(["--table", str(out), "--into", str(page)]) == 0
    assert f"| {WHOLE}: sql |" in page.read_text(encoding="utf-8")
    found["changed"] = 1
    out.write_text(json.dumps(found), encoding="utf-8")
    assert main(["--table", str(out)]) == 1


def test_without_mtp_drops_only_mtp_tensors(adapter: Path, tmp_path: Path) -> None:
    target_only = without_mtp(adapter, tmp_path / "target")
    whole, kept = (load_file(x / ADAPTER_WEIGHTS) for x in (adapter, target_only))
    dropped = whole.keys() - kept.keys()
    assert 0 < len(dropped) < len(whole)
    assert all(".mtp." in name for name in dropped)
    with pytest.raises(ValueError, match="no tensors of an MTP layer"):
        without_mtp(target_only, tmp_path / "again")
