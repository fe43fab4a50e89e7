"""Renaming of imports for packages that move into `tandem`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

RELEASE = Path(__file__).resolve().parents[2] / ".ci" / "wheel"


@pytest.fixture(scope="module")
def inside_tandem():
    sys.path.insert(0, str(RELEASE))
    try:
        import inside_tandem
    finally:
        sys.path.remove(str(RELEASE))
    return inside_tandem


MOVED = [
    ("from shared.text import marks", "from tandem.shared.text import marks"),
    ("from   kernels import tiles", "from   tandem.kernels import tiles"),
    ("def f():\n    from bench import x", "def f():\n    from tandem.bench import x"),
    ("import numpy, shared.text as t", "import numpy, tandem.shared.text as t"),
    ("'é'; load('shared.text.worker')", "'é'; load('tandem.shared.text.worker')"),
    (
        'load(f"kernels.{a}.attention.attention_layer")',
        'load(f"tandem.kernels.{a}.attention.attention_layer")',
    ),
    ('load(f"{a.b}_impl.serve")', 'load(f"tandem.{a.b}_impl.serve")'),
    ('"""See `bench.serving`."""', '"""See `tandem.bench.serving`."""'),
    ("f('a' 'python -m models.fp8')", "f('a' 'python -m tandem.models.fp8')"),
]
SAME = [
    "from .shared import x",
    "from shared_things import x",
    "import kernel_list",
    "kernels.mix(kernels.tiles)",
    'f"{kernels.mix} {shared.text}"',
    'open("models/demo/shared.txt"); url = "http://x/kernels.html"',
    'names = ("shared", "kernels")',
    "a = 'my.shared.thing'",
]
FAULTS = [
    "import shared.text",
    "import shared",
    'import_module("kernels")',
    'importlib.import_module("shared")',
]


@pytest.mark.parametrize(("source", "moved"), MOVED)
def test_inside_prefixes_own_module_names(inside_tandem, source: str, moved: str) -> None:
    assert inside_tandem.inside(source.encode()).decode() == moved
    assert not [*inside_tandem.faults(moved.encode())]


@pytest.mark.parametrize("source", SAME)
def test_inside_preserves_other_names(inside_tandem, source: str) -> None:
    assert inside_tandem.inside(source.encode()).decode() == source
    assert not [*inside_tandem.faults(source.encode())]


@pytest.mark.parametrize("source", [source for source, _ in MOVED] + FAULTS)
def test_faults_report_names_without_prefix(inside_tandem, source: str) -> None:
    assert [*inside_tandem.faults(source.encode())]


@pytest.mark.parametrize("source", FAULTS)
def test_check_rejects_import_that_cannot_move(inside_tandem, source: str, tmp_path) -> None:
    (tmp_path / "module.py").write_text(source)
    inside_tandem.move(tmp_path)
    with pytest.raises(ValueError, match=r"^module\.py:1: "):
        inside_tandem.check(tmp_path)
