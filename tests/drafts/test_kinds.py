"""Kinds of drafters: consistency of the records, and code that reads them instead of names."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from shared.drafts import config_formats
from shared.drafts.block_part import BlockPart
from shared.drafts.checkpoint import head_parameters, kind_of
from shared.drafts.config import DraftConfig
from shared.drafts.kinds import FORMATS, HEADS, KINDS, Source
from shared.models.sentence_list import sentence_list
from shared.options.algorithms import algorithm_of
from tests.support.tiny_assistants import tiny_assistant_config
from tests.support.tiny_heads import (
    tiny_block_config,
    tiny_head_config,
    tiny_pair_config,
    tiny_spark_config,
)
from tests.support.tiny_models import tiny_model

ROOT = Path(__file__).parents[2]
PROGRAM = ("shared", "jax_impl", "torch_impl", "tandem")
TARGET, GEMMA4 = tiny_model("llama", 0)[0], tiny_model("gemma4", 0)[0]
CONFIGS = {
    "EAGLE": tiny_head_config(TARGET, "EAGLE"),
    "EAGLE3": tiny_head_config(TARGET, "EAGLE3"),
    "DFLASH": tiny_block_config(TARGET),
    "DSPARK": tiny_spark_config(TARGET),
    "DFLASH2": tiny_pair_config(TARGET),
    "ASSISTANT": tiny_assistant_config(GEMMA4),
}


def config_of(name: str) -> DraftConfig:
    target = GEMMA4 if HEADS[name].reads_target_kv else TARGET
    return DraftConfig.from_dict(CONFIGS[name], target)


@pytest.mark.parametrize("name", HEADS)
def test_kind_is_found_by_own_tensors(name):
    parameters = head_parameters(config_of(name), None)
    assert kind_of({source.name for each in parameters for source in each.sources}) == name


@pytest.mark.parametrize("name", HEADS)
def test_fields_of_config_are_fields_of_kind(name):
    raw = config_formats.read_raw_config(CONFIGS[name])
    assert raw.kind == name
    known = FORMATS[name].fields | FORMATS[name].fixed.keys() | config_formats.NOTHING
    assert {field for field, value in raw.settings.items() if value} <= known
    assert FORMATS[name].defaults.keys() <= FORMATS[name].fields


@pytest.mark.parametrize("name", HEADS)
def test_parts_of_kind_have_tensors(name):
    config = config_of(name)
    parts = config.block.parts if config.block else ()
    assert bool(parts) == (HEADS[name].read_parts is not None) == bool(HEADS[name].parts)
    assert HEADS[name].parts.keys() <= FORMATS[name].fields
    assert all(isinstance(each, BlockPart) for each in parts)
    assert all(each.tensors(config.layer, config.draft_vocab) for each in parts)


def test_formats_and_aliases_name_one_kind():
    names = [each for files in FORMATS.values() for each in files.architectures]
    names += [files.speculators for files in FORMATS.values() if files.speculators]
    names += [alias for kind in KINDS.values() for alias in kind.aliases if alias != "mtp"]
    assert set(Counter(names).values()) == {1}
    for name, kind in KINDS.items():
        assert {algorithm_of(alias) for alias in (name, *kind.aliases)} == {name}
        assert (kind.head is not None) == (kind.source is Source.HEAD)


def test_sentence_list_joins_words():
    assert sentence_list(["A"]) == "A"
    assert sentence_list(["A", "B"]) == "A or B"
    assert sentence_list(["A", "B", "C"], "and") == "A, B and C"


def test_code_compares_no_kind_names():
    """Code reads the records; tables by kind and examples of rules have names."""
    paths = [path for folder in PROGRAM for path in (ROOT / folder).rglob("*.py")]
    compared = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Compare)
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and each.value in (*KINDS, *HEADS)
    ]
    assert len(paths) > 100
    assert not compared


def test_kinds_import_no_numpy():
    code = "import sys, shared.options.command_line; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
