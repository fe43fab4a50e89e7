"""PEP 517 build backend: a wheel with all packages of the checkout inside the package `tandem`.

The checkout has several top-level packages, of names that other projects use too. A copy in a
temporary folder gets `tandem.` before these names (`inside_tandem`), and setuptools builds the
copy. Nothing is written into the checkout.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from setuptools import build_meta

sys.path.insert(0, str(Path(__file__).parent))  # of an isolated build

from inside_tandem import PACKAGES, check, move

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "tandem"
BUILD = Path(".ci") / "wheel"
FILES = ("LICENSE", "README.md", "pyproject.toml")
SHARED_BY_BENCHES = Path("tests") / "support"
LEFT_OUT = shutil.ignore_patterns(
    "__pycache__", "*.png", "build.sh", "results", "performance.py", "pages"
)
"""Files that only the repository uses: figures, measured results and the page made of them."""

Settings = dict[str, Any] | None


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Builds the wheel; returns its file name."""
    with _building() as folder:
        (folder / PACKAGE / "tests").mkdir(parents=True)
        for name in _sources():
            _copy(name, folder / PACKAGE / name if str(name) != PACKAGE else folder / PACKAGE)
        move(folder / PACKAGE)
        check(folder / PACKAGE)
        return build_meta.build_wheel(wheel_directory, config_settings)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """Builds the source distribution, from which this backend builds the wheel."""
    with _building() as folder:
        for name in (*_sources(), BUILD):
            _copy(name, folder / name)
        (folder / "MANIFEST.in").write_text("graft .\nglobal-exclude *.pyc\n")
        return build_meta.build_sdist(sdist_directory, config_settings)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Builds a wheel that puts the checkout itself on the import path."""
    settings = {**(config_settings or {}), "editable_mode": "compat"}
    return build_meta.build_editable(wheel_directory, settings, metadata_directory)


def _sources() -> list[Path]:
    tops = [Path(name) for name in (*PACKAGES, PACKAGE) if name != "tests"]
    return [*tops, SHARED_BY_BENCHES]


def _copy(name: Path, target: Path) -> None:
    shutil.copytree(ROOT / name, target, ignore=LEFT_OUT, dirs_exist_ok=True)


@contextmanager
def _building() -> Iterator[Path]:
    """A temporary folder with the project's own files, which is the working folder meanwhile."""
    before = os.getcwd()
    with TemporaryDirectory() as name:
        for file in FILES:
            shutil.copy(ROOT / file, name)
        os.chdir(name)
        try:
            yield Path(name)
        finally:
            os.chdir(before)
