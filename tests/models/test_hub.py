"""Hub models in the local cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.models.hub import HubError, cached_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached(cache: Path, *names: str, commit: str = COMMIT, ref: str = "main") -> Path:
    """Writes a snapshot of ORG/NAME in the layout of huggingface_hub."""
    folder = cache / "models--ORG--NAME"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / ref).write_text(commit)
    for name in names:
        (snapshot / name).write_text("{}")
    return snapshot


def test_cached_folder_complete_snapshot_found(tmp_path):
    snapshot = cached(tmp_path, "config.json", "model.safetensors")
    assert cached_folder("ORG/NAME", download_dir=tmp_path) == snapshot
    assert cached_folder("ORG/NAME", COMMIT, tmp_path) == snapshot
    assert cached_folder("ORG/NAME", "v2", tmp_path) is None
    assert cached_folder("ORG/OTHER", None, tmp_path) is None


def test_cached_folder_branch_with_slash_found(tmp_path):
    snapshot = cached(tmp_path, "config.json", "model.safetensors", ref="refs/pr/1")
    assert cached_folder("ORG/NAME", "refs/pr/1", tmp_path) == snapshot
    assert cached_folder("ORG/NAME", "pr/1", tmp_path) is None


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "shard", "link"])
def test_cached_folder_incomplete_snapshot_returns_none(tmp_path, missing):
    names = {"config.json", "model.safetensors", "b.safetensors"} - {missing}
    snapshot = cached(tmp_path, *names)
    if missing == "shard":
        (snapshot / "model.safetensors").unlink()
        index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
        (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    if missing == "link":
        (snapshot / "config.json").unlink()
        (snapshot / "config.json").symlink_to("../../blobs/gone")
    assert cached_folder("ORG/NAME", download_dir=tmp_path) is None


def test_cached_folder_reads_cache_from_environment(tmp_path, monkeypatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    snapshot = cached(tmp_path / "home" / "hub", "config.json", "model.safetensors")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert cached_folder("ORG/NAME") == snapshot
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    assert cached_folder("ORG/NAME") is None


@pytest.mark.parametrize("given", ["NAME", "ORG/NAME/MORE", "../NAME", "ORG/..", "a--b/c", "/a/b"])
def test_cached_folder_invalid_id_raises(given, tmp_path):
    with pytest.raises(HubError, match="give ORG/NAME"):
        cached_folder(given, None, tmp_path)


@pytest.mark.parametrize("given", ["../../x", "a//b", "/etc", "a b"])
def test_cached_folder_invalid_revision_raises(given, tmp_path):
    with pytest.raises(HubError, match="give a branch"):
        cached_folder("ORG/NAME", given, tmp_path)
