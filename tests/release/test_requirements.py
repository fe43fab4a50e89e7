"""Required packages: listed in `pyproject.toml`, installed by `make`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from shared import VERSION

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OURS = {"bench", "jax_impl", "kernels", "models", "shared", "tandem", "tests", "torch_impl"}
EXTRAS_OF = {
    "shared": ("vision", "otel"),
    "torch_impl": ("torch", "cuda13"),
    "jax_impl": ("jax", "train"),
    "kernels": ("jax", "cuda13"),
    "bench": ("bench", "vision", "jax", "torch", "cuda13"),
    "examples": ("examples", "vision", "train"),
}
BROUGHT_BY = {"pydantic-core": "pydantic", "jaxlib": "jax", "markupsafe": "jinja2"}
"""Distributions with a version that another distribution requires."""


def name_of(requirement: str) -> str:
    """Normalised name of a required distribution."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].replace("_", "-").lower()


def imported(folder: str) -> set[str]:
    """Top-level third-party packages that the files of a folder import."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(str(node.module))
    return {name.partition(".")[0] for name in found} - OURS - set(sys.stdlib_module_names)


def installed_by(*arguments: str) -> list[str]:
    """Requirements that a target installs, by the commands that `make` would run."""
    made = subprocess.check_output(["make", "-Bn", *arguments], cwd=ROOT, text=True)
    (extras,) = re.findall(r"\.ci/requirements (\S+)", made)
    lines = subprocess.check_output([sys.executable, ".ci/requirements", extras], cwd=ROOT)
    return [name_of(line) for line in lines.decode().splitlines()]


def test_version_equals_pyproject():
    assert PROJECT["version"] == VERSION


def test_dependencies_have_upper_bounds():
    unbounded = [line for line in PROJECT["dependencies"] if not re.search(r",<\d", line)]
    assert not unbounded


@pytest.mark.parametrize("folder", EXTRAS_OF)
def test_imported_packages_are_required(folder: str) -> None:
    extras = PROJECT["optional-dependencies"]
    lines = [line for extra in EXTRAS_OF[folder] for line in extras[extra]]
    required = {name_of(line) for line in [*PROJECT["dependencies"], *lines]}
    owners = packages_distributions()
    for name in sorted(imported(folder)):
        found = {name_of(owner) for owner in owners[name]}
        assert required & {BROUGHT_BY.get(each, each) for each in found}, f"{folder} imports {name}"


@pytest.mark.parametrize(
    ("arguments", "framework", "other"),
    [
        (["serve"], "torch", "jax"),
        (["serve", "BACKEND=jax"], "jax", "torch"),
        (["serve", "BACKEND=jax", "EXTRAS=jax-cuda13"], "jax", "torch"),
    ],
)
def test_make_serve_installs_one_backend_and_no_tools(
    arguments: list[str], framework: str, other: str
) -> None:
    names = installed_by(*arguments)
    assert framework in names
    tools = {name_of(line) for line in PROJECT["optional-dependencies"]["dev"]}
    assert not {other, *tools} & {*names} - {"httpx", "pillow", "openai", "anthropic"}


def test_make_serve_installs_given_extras():
    lines = installed_by("serve", "EXTRAS=cuda13")
    assert {"jax", "torch", "triton"} <= {*lines}


def test_make_lint_installs_both_backends_and_tools():
    names = installed_by("lint")
    tools = PROJECT["optional-dependencies"]["dev"]
    assert {"jax", "torch", *map(name_of, tools)} <= {*names}


def test_unknown_extra_exits_with_error():
    command = [sys.executable, ".ci/requirements", "torch,cuda99"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("EXTRAS=cuda99 is no extra of pyproject.toml. Use torch, jax, ")
