"""Paths that are no model folder: errors with the kind of the file and the remedy."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from shared.drafts.checkpoint import open_head
from shared.models.checkpoint import open_checkpoint
from shared.models.families import config_from_folder
from shared.models.safetensors_file import open_file
from tests.support.tiny_models import write_tiny

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"


def zipped(name: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(name, b"")
    return stream.getvalue()


def tarred(mode: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as archive:
        archive.addfile(tarfile.TarInfo("config.json"))
    return stream.getvalue()


FILES = {
    "m.gguf": (b"GGUF\x03\0\0\0", ["GGUF file", "give the checkpoint with safetensors"]),
    "misnamed": (b"GGUF\x03\0\0\0", ["GGUF file", "not supported"]),
    "old.bin": (b"lmgg\0\0\0\0", ["another framework", "safetensors"]),
    "m.pt": (zipped("archive/data.pkl"), ["pickled weights", "can run code"]),
    "m.bin": (b"\x80\x04}\x94.", ["pickled weights", "save_pretrained"]),
    "m.pth": (b"no known beginning", ["pickled weights"]),
    "m.zip": (zipped("config.json"), ["an archive", "unpack"]),
    "m.tar.gz": (tarred("w:gz"), ["an archive", "unpack"]),
    "m.tar": (tarred("w"), ["an archive", "unpack"]),
    "m.tar.xz": (tarred("w:xz"), ["an archive", "unpack"]),
    "m.tar.bz2": (tarred("w:bz2"), ["an archive", "unpack"]),
    "m.tar.zst": (b"\x28\xb5\x2f\xfd\0\0", ["an archive", "unpack"]),
    "model.safetensors": (save({"x": np.zeros(2)}), ["a safetensors file", "config.json"]),
    "pointer": (POINTER, ["Git LFS pointer", "git lfs pull"]),
    "m.h5": (b"\x89HDF\r\n", ["another framework"]),
    "m.onnx": (b"\x08\x07\x12", ["another framework"]),
    "config.json": (b'{"a": 1}', ["a JSON file", "give the folder that has it"]),
    "page.safetensors": (b"<!DOCTYPE html><html>", ["a web page"]),
    "empty": (b"", ["an empty file"]),
    "notes.txt": (b"hello", ["a file,", "Hugging Face checkpoint"]),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("opened", [open_checkpoint, config_from_folder, open_head])
def test_file_in_place_of_folder_named_by_kind(tmp_path, name, opened):
    content, words = FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        opened(tmp_path / name)
    for word in (str(tmp_path / name), "folder is required", *words):
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def in_subfolder(folder: Path) -> None:
    write_json(folder / "Model-8B" / "config.json", {})


def with_broken_config(folder: Path) -> None:
    (folder / "config.json").symlink_to("../../blobs/gone")


WITHOUT_CONFIG: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "empty": (lambda f: None, ["it is empty"]),
    "gguf": (lambda f: (f / "m.Q4_K_M.gguf").touch(), ["m.Q4_K_M.gguf, a GGUF file"]),
    "pickle": (lambda f: (f / "pytorch_model.bin").touch(), ["pytorch_model.bin", "run code"]),
    "adapter": (
        lambda f: write_json(f / "adapter_config.json", {"base_model_name_or_path": "ORG/BASE"}),
        ["an adapter", "of ORG/BASE; give its base model, with the adapter in --lora-paths"],
    ),
    "broken adapter": (lambda f: (f / "adapter_config.json").write_text("["), ["an adapter"]),
    "diffusers": (lambda f: write_json(f / "model_index.json", {}), ["diffusers pipeline"]),
    "mistral": (lambda f: write_json(f / "params.json", {}), ["params.json", "Hugging Face"]),
    "inner": (in_subfolder, ["give ", "Model-8B"]),
    "cache": (lambda f: (f / "models--ORG--NAME").mkdir(), ["cache of", "as ORG/NAME"]),
    "link": (with_broken_config, ["link to a file that is missing", "download the model again"]),
    "other": (lambda f: (f / "README.md").touch(), ["Hugging Face checkpoint"]),
}


@pytest.mark.parametrize("case", WITHOUT_CONFIG)
@pytest.mark.parametrize("opened", [open_checkpoint, config_from_folder, open_head])
def test_folder_without_config_named_by_content(tmp_path, case, opened):
    write, words = WITHOUT_CONFIG[case]
    write(tmp_path)
    with pytest.raises(ValueError) as error:
        opened(tmp_path)
    for word in (f"folder {tmp_path} has no config.json", *words):
        assert word in str(error.value)


def write_index(folder: Path) -> None:
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"x": "a.safetensors"}})


def write_broken_index(folder: Path) -> None:
    write_index(folder)
    (folder / "a.safetensors").symlink_to("gone")


WITHOUT_WEIGHTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "none": (lambda f: None, ["neither", "--load-format dummy"]),
    "pickle": (lambda f: (f / "pytorch_model.bin").touch(), ["pytorch_model.bin", "run code"]),
    "arguments": (lambda f: (f / "training_args.bin").touch(), ["neither", "download its weights"]),
    "meta": (lambda f: (f / "consolidated.00.pth").touch(), ["consolidated.00.pth", "run code"]),
    "gguf": (lambda f: (f / "m.gguf").touch(), ["a GGUF file"]),
    "flax": (lambda f: (f / "flax_model.msgpack").touch(), ["another framework"]),
    "mistral": (lambda f: (f / "consolidated.safetensors").touch(), ["consolidated.safetensors"]),
    "no index": (
        lambda f: (f / "model-00001-of-00002.safetensors").touch(),
        ["shards without the index"],
    ),
    "orbax": (lambda f: (f / "orbax").mkdir(), ["only the JAX backend"]),
    "link": (
        lambda f: (f / "model.safetensors").symlink_to("gone"),
        ["model.safetensors is a link to a file that is missing"],
    ),
    "shard": (write_index, ["the shard a.safetensors is missing", "download it too"]),
    "shard link": (write_broken_index, ["a.safetensors is a link to a file that is missing"]),
    "pointer": (
        lambda f: (f / "model.safetensors").write_bytes(POINTER),
        ["model.safetensors is a Git LFS pointer", "git lfs pull"],
    ),
    "page": (
        lambda f: (f / "model.safetensors").write_bytes(b"<!DOCTYPE html>"),
        ["model.safetensors is a web page"],
    ),
}


@pytest.mark.parametrize("case", WITHOUT_WEIGHTS)
@pytest.mark.parametrize("opened", [open_checkpoint, open_head])
def test_folder_without_weights_named_by_content(tmp_path, case, opened):
    write_json(tmp_path / "config.json", {})
    write, words = WITHOUT_WEIGHTS[case]
    write(tmp_path)
    with pytest.raises(ValueError) as error:
        opened(tmp_path)
    for word in (str(tmp_path), *words):
        assert word in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_config_file_as_lfs_pointer_raises(tmp_path, name):
    write_tiny(tmp_path, "qwen3", 0)
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(ValueError, match=rf"{name} is a Git LFS pointer.*git lfs pull"):
        config_from_folder(tmp_path)


def test_open_checkpoint_ignores_unrelated_files(tmp_path):
    write_tiny(tmp_path, "qwen3", 0)
    save_file({"x": np.zeros(2, np.float32)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "training_args.bin").touch()
    (tmp_path / "m.gguf").touch()
    assert open_checkpoint(tmp_path).files == [tmp_path / "model.safetensors"]


@pytest.mark.parametrize("opened", [open_checkpoint, config_from_folder, open_head])
def test_too_long_path_raises(tmp_path, opened):
    with pytest.raises(ValueError, match="cannot be read: File name too long"):
        opened(tmp_path / ("x" * 300))


def test_unreadable_weights_raise(tmp_path, monkeypatch):
    def denied(*given: object) -> None:
        raise PermissionError(13, "Permission denied")

    write_tiny(tmp_path, "qwen3", 0)
    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(ValueError, match="model.safetensors cannot be read: Permission denied"):
        open_file(tmp_path / "model.safetensors")
