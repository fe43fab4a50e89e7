"""Starts with models of a local hub, as far as their files are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shared.options.command_line import parse
from shared.options.options import Options
from shared.process.model_files import local_models
from shared.process.model_places import find_models
from tests.support.hub import Hub

ID = "ORG/tiny-qwen3"
WEIGHTS = "model.safetensors"
UNUSED = {
    "README.md": b"#",
    "pytorch_model.bin": b"\x80",
    "model.gguf": b"GGUF",
    "consolidated.safetensors": b"x",
    "original/consolidated.00.pth": b"\x80",
    "onnx/model.onnx": b"\x08",
    "training_args.bin": b"\x80",
    "../outside.json": b"{}",
}
"""Files of a repository that no start reads."""


def started(*flags: str) -> Options:
    options = parse(flags)
    return local_models(options, find_models(options), Console(quiet=True))


def refused(*flags: str) -> str:
    with pytest.raises(ValueError) as error:
        started(*flags)
    assert "\n" not in str(error.value)
    return str(error.value)


def found(options: Options) -> Path:
    return Path(options.model.model_path)


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def edit_config(hub: Hub, **fields: Any) -> None:
    files = hub.repositories[ID].files
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | fields).encode()
