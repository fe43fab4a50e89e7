"""The packages that the project requires, as `pyproject.toml` names them."""

from __future__ import annotations

import tomllib
from pathlib import Path

from shared import VERSION

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_version_equals_pyproject():
    assert PROJECT["version"] == VERSION
