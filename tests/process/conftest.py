"""A local Hugging Face hub with a tiny model, for download tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.models import hub_files
from tests.support.hub import Hub, running_hub
from tests.support.hub_models import ID, UNUSED
from tests.support.tiny_models import write_tiny

FORGOTTEN = ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HUGGINGFACE_HUB_CACHE")


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    for name in FORGOTTEN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub_files.time, "sleep", lambda seconds: None)
    monkeypatch.chdir(tmp_path)
    with running_hub() as made:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        yield made


@pytest.fixture
def model(tmp_path, hub) -> Path:
    """The source folder of the model `ID` of the hub."""
    folder = tmp_path / "source"
    write_tiny(folder, "qwen3", 0)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    hub.add(ID, folder, **UNUSED)
    return folder
