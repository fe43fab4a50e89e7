"""Models by path and by hub id: lookup, checks before the weights, errors."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support.hub import Hub
from tests.support.hub_models import (
    ID,
    UNUSED,
    WEIGHTS,
    edit_config,
    found,
    names_in,
    refused,
    started,
)
from tests.support.tiny_heads import write_tiny_head
from tests.support.tiny_models import tiny_model, write_tiny

HEAD_ID = "ORG/tiny-EAGLE3"


def test_hub_id_downloaded_then_found_without_network(hub, model, monkeypatch):
    options = started("--model-path", ID)
    folder = found(options)
    assert folder.parent.parent.name == "models--ORG--tiny-qwen3"
    assert names_in(folder) == names_in(model), "only the files that the startup reads"
    for name in names_in(model):
        assert (folder / name).read_bytes() == (model / name).read_bytes()
    assert options.server.served_model_name == ID
    hub.requests.clear()
    assert started("--model-path", ID) == options
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert started("--model-path", ID) == options
    assert not hub.requests, "a complete snapshot needs no request"


def test_hub_cache_layout_matches_huggingface_hub(hub, model, monkeypatch, tmp_path):
    """The cache layout equals that of huggingface_hub, in both directions."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    folder = found(started("--model-path", ID))
    for name in names_in(folder):
        where = {"cache_dir": tmp_path / "cache", "local_files_only": True}
        assert huggingface_hub.hf_hub_download(ID, name, **where) == str(folder / name)


def test_served_model_name_flag_overrides_hub_id(hub, model):
    named = started("--model-path", ID, "--served-model-name", "mine")
    assert named.server.served_model_name == "mine"


def test_local_folder_precedes_hub_id(hub, model, tmp_path):
    shutil.copytree(model, tmp_path / ID)
    options = started("--model-path", ID)
    assert found(options) == tmp_path / ID
    assert options.server.served_model_name is None
    assert not hub.requests


@pytest.mark.parametrize("kind", ["branch", "tag", "commit", "at", "both", "slash"])
def test_revision_accepts_branch_tag_and_commit(hub, model, kind):
    repository = hub.repositories[ID]
    files = repository.files
    old = json.dumps(json.loads(files["config.json"]) | {"rope_theta": 5e5}).encode()
    commit = repository.commit(files | {"config.json": old}, "v1", "old/one")
    flags = {
        "branch": [ID, "--revision", "v1"],
        "tag": [ID, "--revision", "v1"],
        "slash": [ID, "--revision", "old/one"],
        "commit": [ID, "--revision", commit],
        "at": [f"{ID}@v1"],
        "both": [f"{ID}@v1", "--revision", "v1"],
    }[kind]
    folder = found(started("--model-path", *flags))
    assert folder.name == commit
    assert (folder / "config.json").read_bytes() == old
    assert found(started("--model-path", *flags)) == folder
    assert found(started("--model-path", ID)).name == repository.refs["main"]


def test_weights_downloaded_last_and_headers_by_range(hub, model):
    started("--model-path", ID)
    paths = hub.paths()
    assert paths[0] == "list"
    assert paths[1] != WEIGHTS
    assert paths[-2:] == [WEIGHTS, WEIGHTS], "its header, then the whole file"
    ranges = [x.range for x in hub.requests if x.method == "GET" and x.path.endswith(WEIGHTS)]
    assert ranges == ["bytes=0-99999", None]


def unsupported(hub: Hub) -> None:
    edit_config(hub, architectures=["GPTBigCodeForCausalLM"])


def quantized(hub: Hub) -> None:
    edit_config(hub, quantization_config={"quant_method": "aqlm", "bits": 4})


def other_sizes(hub: Hub) -> None:
    edit_config(hub, intermediate_size=160)


def more_layers(hub: Hub) -> None:
    files = hub.repositories[ID].files
    layers = json.loads(files["config.json"])["num_hidden_layers"] + 1
    edit_config(hub, num_hidden_layers=layers, layer_types=None)


def broken_tokenizer(hub: Hub) -> None:
    hub.repositories[ID].files["tokenizer.json"] = b"{"


FAULTS = {
    "family": (unsupported, (), "GPTBigCodeForCausalLM, which is not supported", 0),
    "quantization": (quantized, (), "aqlm", 0),
    "context": (lambda hub: None, ("--context-length", "9999999"), "--context-length", 1),
    "shape": (other_sizes, (), "has shape", 1),
    "tensor": (more_layers, (), "has no tensor", 1),
    "tokenizer": (broken_tokenizer, (), f"{ID}/tokenizer.json cannot be read", 1),
    "drafter": (lambda hub: None, ("--speculative-algorithm", "NEXTN"), "MTP layer", 1),
    "ranks": (lambda hub: None, ("--tp-size", "7"), "--tp-size 7 does not fit", 1),
}


@pytest.mark.parametrize("case", FAULTS)
def test_model_fault_raises_before_weight_download(hub, model, case):
    change, flags, reason, headers = FAULTS[case]
    change(hub)
    assert reason in refused("--model-path", ID, *flags)
    assert hub.paths().count(WEIGHTS) == headers, "at most the header"
    assert hub.sent_bytes < 150_000


def test_sharded_model_downloaded_by_index(hub, tmp_path):
    write_tiny(tmp_path / "source", "llama", 0, num_shards=3)
    hub.add(ID, tmp_path / "source", **UNUSED)
    folder = found(started("--model-path", ID))
    assert names_in(folder) == names_in(tmp_path / "source")


def test_missing_shard_raises(hub, tmp_path):
    write_tiny(tmp_path / "source", "llama", 0, num_shards=3)
    (tmp_path / "source" / "model-00002-of-00003.safetensors").unlink()
    hub.add(ID, tmp_path / "source")
    assert "shard model-00002-of-00003.safetensors is missing" in refused("--model-path", ID)


def write_models(folder: Path) -> None:
    """Writes a target, and a head with a draft vocabulary."""
    write_tiny(folder / "source", "llama", 0)
    write_tiny_head(folder / "head", *tiny_model("llama", 0), "EAGLE3", 1, draft_vocab_size=64)


def test_draft_head_downloaded_by_id_and_revision(hub, tmp_path):
    write_models(tmp_path)
    hub.add(ID, tmp_path / "source")
    head = hub.add(HEAD_ID, tmp_path / "head")
    head.refs["v2"] = head.refs.pop("main")
    flags = ("--model-path", ID, "--speculative-algorithm", "EAGLE3")
    at = (*flags, "--speculative-draft-model-path", f"{HEAD_ID}@v2")
    drafter = started(*at).speculative
    draft = Path(str(drafter.speculative_draft_model_path))
    assert draft.name == head.refs["v2"]
    assert names_in(draft) == names_in(tmp_path / "head")
    named = (*flags, "--speculative-draft-model-path", HEAD_ID)
    assert started(*named, "--speculative-draft-model-revision", "v2").speculative == drafter
    assert "has no revision main" in refused(*named)


def test_draft_vocabulary_map_checked_before_weight_download(hub, tmp_path):
    """The map of a draft vocabulary is tensor content, which a header does not contain."""
    write_models(tmp_path)
    hub.add(HEAD_ID, tmp_path / "head")
    flags = ["--model-path", str(tmp_path / "source"), "--speculative-algorithm", "EAGLE3"]
    hub.damages = True  # the first bytes of a header are its length
    assert "not a valid safetensors file" in refused(
        *flags, "--speculative-draft-model-path", HEAD_ID
    )


OTHER_FORMATS = {
    "gguf": ({"m.gguf": b"GGUF"}, ["has no config.json", "m.gguf, a GGUF file"]),
    "pickle": (
        {"config.json": b"{}", "pytorch_model.bin": b"\x80"},
        ["neither", "pickled weights", "can run code"],
    ),
    "adapter": ({"adapter_config.json": b"{}"}, ["an adapter"]),
    "diffusers": ({"model_index.json": b"{}"}, ["diffusers pipeline"]),
    "mistral": ({"params.json": b"{}", "consolidated.safetensors": b""}, ["params.json"]),
    "nothing": ({"README.md": b""}, ["has no config.json", "it is not a supported model"]),
}


@pytest.mark.parametrize("case", OTHER_FORMATS)
def test_unsupported_repository_format_raises(hub, tmp_path, case):
    files, words = OTHER_FORMATS[case]
    hub.add(ID, tmp_path / "nothing", **files)
    if "config.json" in files:
        write_tiny(tmp_path / "source", "qwen3", 0)
        hub.repositories[ID].files["config.json"] = (
            tmp_path / "source" / "config.json"
        ).read_bytes()
    sentence = refused("--model-path", ID)
    for word in (ID, hub.url, *words):
        assert word in sentence


def test_cached_model_root_folder_is_served(hub, model, tmp_path):
    folder = found(started("--model-path", ID))
    root = str(tmp_path / "cache" / "models--ORG--tiny-qwen3")
    for given in (root, f"{root}/", os.path.relpath(root), str(folder)):
        options = started("--model-path", given)
        assert found(options) == folder
        assert options.server.served_model_name == ID
    shutil.rmtree(tmp_path / "cache" / "models--ORG--tiny-qwen3" / "refs")
    assert found(started("--model-path", root)) == folder
    assert "has no revision v9" in refused("--model-path", root, "--revision", "v9")


PLAIN = {
    "missing": (["--model-path", "nowhere"], "nowhere does not exist; give a folder, or a hub id"),
    "deep": (["--model-path", "a/b/c"], "a/b/c does not exist"),
    "address": (
        ["--model-path", "https://hub.example/ORG/NAME/tree/main"],
        "is a URL; give a folder, or the hub id ORG/NAME",
    ),
    "scheme": (["--model-path", "hf://ORG/NAME"], "the hub id ORG/NAME"),
    "two revisions": (["--model-path", f"{ID}@v1", "--revision", "v2"], "give one of them"),
    "no revision": (["--model-path", f"{ID}@"], "no revision after @"),
    "bad revision": (["--model-path", f"{ID}@../x"], "is invalid; give a branch"),
    "revision of a folder": (["--model-path", "source", "--revision", "v1"], "is a folder"),
    "revision of the default": (["--revision", "v1"], "is a folder"),
    "draft revision alone": (
        ["--speculative-algorithm", "NEXTN", "--speculative-draft-model-revision", "v1"],
        "--speculative-draft-model-revision requires a hub id",
    ),
    "cache of folders": (["--model-path", "source", "--download-dir", "x"], "remove the flag"),
    "draft": (
        ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "nowhere"],
        "the draft model folder",
    ),
}


@pytest.mark.parametrize("case", PLAIN)
def test_invalid_model_option_raises_without_network(hub, model, case):
    flags, reason = PLAIN[case]
    assert reason in refused(*flags)
    assert not hub.requests
