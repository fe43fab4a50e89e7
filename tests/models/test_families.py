"""Model families: only their records contain their names."""

import re
from pathlib import Path

import pytest

from shared.models.architectures import ARCHITECTURES, FAMILIES

ROOT = Path(__file__).parents[2]
PROGRAM = ("shared", "jax_impl", "torch_impl", "kernels")
RECORDS = Path("shared/models/family_records")
ALSO = {
    Path("jax_impl/training/tasks.py"): "writes the config.json of heads",
    Path("shared/drafts/config.py"): "reads the config.json of heads with layers of a family",
    Path("shared/drafts/config_formats.py"): "reads heads with the family of their layers",
    Path("shared/drafts/kinds.py"): "has the family of the layers of heads",
    Path("shared/drafts/mtp.py"): "reads separate MTP layers",
    Path("shared/options/draft_model_rules.py"): "has examples of rejected options",
    Path("shared/options/rules.py"): "the same",
    Path("shared/options/server.py"): "has reasoning parsers with names of models",
    Path("shared/text/reasoning_formats.py"): "has the formats of these parsers",
    Path("shared/text/template_probe.py"): "chooses a reasoning parser by that name",
}
"""Other files with such names, and their reasons."""

CALL_FORMATS = Path("shared/text/call_formats")
"""Folder of tool-call formats, which have names of models as users know them."""


@pytest.mark.parametrize("name", sorted({family.name for family in FAMILIES.values()}))
def test_family_names_occur_only_in_records(name):
    architectures = [each for each, family in FAMILIES.items() if family.name == name]
    types = [kind for kind, each in ARCHITECTURES.items() if each in architectures]
    words = "|".join(map(re.escape, {name, *architectures, *types}))
    named = re.compile(rf"[\"'](?:{words})[\"']")
    files = [path for room in PROGRAM for path in (ROOT / room).rglob("*.py")]
    found = {p.relative_to(ROOT) for p in files if named.search(p.read_text(encoding="utf-8"))}
    assert len([p for p in found if p.parent == RECORDS]) == 1
    assert {p for p in found if p.parent not in (RECORDS, CALL_FORMATS)} <= ALSO.keys()
