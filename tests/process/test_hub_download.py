"""Downloads from the hub: interrupted, damaged, without room or network, gated, by a token."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from models import token_map
from shared.models import hub_files
from shared.models.hub_files import Snapshot
from shared.offline.llm import LLM
from shared.offline.params import SamplingParams
from tests.support import serve_reference
from tests.support.hub import TOKEN
from tests.support.hub_models import ID, WEIGHTS, found, names_in, refused, started


def test_interrupted_download_resumes(hub, model):
    hub.cut_after = 120_000
    assert (model / WEIGHTS).stat().st_size > 2 * hub.cut_after, "otherwise it breaks at most once"
    folder = found(started("--model-path", ID))
    assert (folder / WEIGHTS).read_bytes() == (model / WEIGHTS).read_bytes()
    begun = [x.range for x in hub.requests if x.path.startswith("/lfs/") and x.range]
    assert f"bytes={hub.cut_after}-" in begun


def test_interrupted_header_download_retries(hub, model):
    hub.cut_after, hub.cuts = 50_000, 1
    assert names_in(found(started("--model-path", ID))) == names_in(model)


def test_missing_tokenizer_downloaded_into_cached_model(hub, model, monkeypatch):
    """Another program may have cached the weights without the tokenizer."""
    hub.repositories[ID].files["tokenizer.json"] = b"{}"
    monkeypatch.setattr("shared.process.model_files._check_headers", lambda *given: None)
    folder = found(started("--model-path", ID))
    (folder / "tokenizer.json").unlink()
    assert (found(started("--model-path", ID)) / "tokenizer.json").read_bytes() == b"{}"


@pytest.mark.parametrize("has_ranges", [True, False])
def test_killed_download_resumes_at_next_start(hub, model, has_ranges, monkeypatch):
    def killed(self: Snapshot, progress: Any) -> None:
        raise KeyboardInterrupt

    whole = Snapshot.download_weights
    monkeypatch.setattr(Snapshot, "download_weights", killed)
    with pytest.raises(KeyboardInterrupt):
        started("--model-path", ID)
    content = (model / WEIGHTS).read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    blobs = Path(os.environ["HF_HUB_CACHE"]) / "models--ORG--tiny-qwen3" / "blobs"
    (blobs / f"{digest}.incomplete").write_bytes(content[:100_000])
    monkeypatch.setattr(Snapshot, "download_weights", whole)
    hub.requests.clear()
    hub.has_ranges = has_ranges
    folder = found(started("--model-path", ID))
    assert (folder / WEIGHTS).read_bytes() == content
    assert not list(blobs.glob("*.incomplete"))
    assert "bytes=100000-" in [request.range for request in hub.requests]


def test_permanently_broken_download_raises(hub, model):
    hub.cut_after = 0
    sentence = refused("--model-path", ID)
    assert "cannot be reached" in sentence
    assert "an interrupted download is resumed" in sentence


def test_damaged_download_raises_and_restarts(hub, model, monkeypatch):
    write_headers = Snapshot.write_headers

    def damaged_after(self: Snapshot, folder: Path) -> None:
        write_headers(self, folder)
        hub.damages = True

    monkeypatch.setattr(Snapshot, "write_headers", damaged_after)
    assert "has the wrong SHA-256" in refused("--model-path", ID)
    monkeypatch.setattr(Snapshot, "write_headers", write_headers)
    hub.damages = False
    folder = found(started("--model-path", ID))
    assert (folder / WEIGHTS).read_bytes() == (model / WEIGHTS).read_bytes()


def test_insufficient_disk_space_raises_before_weight_download(hub, model, monkeypatch):
    monkeypatch.setattr(
        hub_files.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 8, 1)
    )
    assert "free some space, or give another folder as --download-dir" in refused(
        "--model-path", ID
    )
    assert hub.paths().count(WEIGHTS) == 1


def test_hub_without_file_sizes_is_supported(hub, model):
    """Some mirrors list names only; sizes and ETags come from HEAD requests."""
    hub.lists_sizes = False
    folder = found(started("--model-path", ID))
    assert names_in(folder) == names_in(model)
    assert WEIGHTS in hub.paths("HEAD")


def test_load_format_dummy_downloads_no_weights(hub, model, monkeypatch):
    folder = found(started("--model-path", ID, "--load-format", "dummy"))
    assert names_in(folder) == names_in(model) - {WEIGHTS}
    assert WEIGHTS not in hub.paths()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert found(started("--model-path", ID, "--load-format", "dummy")) == folder
    assert "no complete copy" in refused("--model-path", ID)


def test_download_dir_is_written_and_reused(hub, model, tmp_path):
    options = started("--model-path", ID, "--download-dir", str(tmp_path / "other"))
    assert options.model.download_dir == str(tmp_path / "other"), "draft heads are searched there"
    folder = found(options)
    assert tmp_path / "other" in folder.parents
    hub.requests.clear()
    assert found(started("--model-path", ID, "--download-dir", "other")) == folder
    assert not hub.requests
    assert not (tmp_path / "cache").exists()


def test_unwritable_download_dir_raises(hub, model, tmp_path):
    (tmp_path / "file").touch()
    sentence = refused("--model-path", ID, "--download-dir", str(tmp_path / "file" / "cache"))
    assert "cannot be written" in sentence
    assert "--download-dir" in sentence


def test_gated_model_requires_valid_token(hub, model, monkeypatch):
    hub.repositories[ID].needs = "gated"
    assert "is gated; accept its conditions" in refused("--model-path", ID)
    monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    assert "is gated" in refused("--model-path", ID)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    folder = found(started("--model-path", ID))
    assert names_in(folder) == names_in(model)
    large = [request for request in hub.requests if request.path.startswith("/lfs/")]
    assert large
    assert not any(request.has_token for request in large), "another host must not get the token"


def test_private_or_absent_model_raises(hub, model, monkeypatch):
    hub.repositories[ID].needs = "private"
    for given in (ID, "ORG/absent"):
        sentence = refused("--model-path", given)
        assert f"there is no folder {given} here, and {hub.url} has no model of this id" in sentence
        assert "HF_TOKEN" in sentence
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert names_in(found(started("--model-path", ID))) == names_in(model)


def test_absent_revision_raises(hub, model):
    assert f"{ID} on {hub.url} has no revision v9; give a branch" in refused(
        "--model-path", f"{ID}@v9"
    )


@pytest.mark.parametrize("status", [429, 500, 503])
def test_hub_error_status_raises(hub, model, status):
    hub.status = status
    assert f"returned status {status} for {ID}; try again later" in refused("--model-path", ID)


def test_unreachable_hub_raises(hub, model, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    sentence = refused("--model-path", ID)
    assert "http://127.0.0.1:1 cannot be reached" in sentence
    assert "check the network, HTTPS_PROXY and HF_ENDPOINT" in sentence


def test_offline_mode_without_complete_copy_raises(hub, model, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "yes")
    sentence = refused("--model-path", ID)
    assert "HF_HUB_OFFLINE is set" in sentence
    assert f"hf download {ID}" in sentence
    assert not hub.requests


class ReferenceLLM(LLM):
    PLATFORM = serve_reference.PLATFORM
    RANK_MODULE = None


def test_llm_hub_id_output_equals_local_folder(hub, model):
    prompt, sampling = [1, 2, 3], SamplingParams(max_tokens=2, temperature=0)
    answers = []
    for given in (f"{ID}@main", str(model)):
        with ReferenceLLM(given, context_length=64, max_running_requests=1) as llm:
            (answer,) = llm.generate(prompt, sampling)
            answers.append(answer.outputs[0].token_ids)
    assert answers[0] == answers[1] != []
    with pytest.raises(ValueError, match="download_dir requires a model given by its hub id"):
        ReferenceLLM(str(model), download_dir="x")


def test_token_map_hub_id_downloads_no_weights(hub, model, tmp_path, monkeypatch):
    texts, out = tmp_path / "texts.jsonl", tmp_path / "map.json"
    texts.write_text("[3, 3, 4]\n")
    words = ["token_map", ID, "--texts", str(texts), "--size", "4", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    token_map.main()
    assert {3, 4} <= {*json.loads(out.read_text())}
    assert WEIGHTS not in hub.paths()
