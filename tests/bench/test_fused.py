"""A step in three parts: it gives the text of the step in one."""

import json
from argparse import Namespace

import pytest
from torch import Tensor

from bench import fused, split_torch
from bench.drafting import Draft
from bench.offline import begun
from bench.session import Load
from shared.boundary.backend import Program, Work
from tests.support.tiny_heads import tiny_head_config
from tests.support.tiny_models import tiny_config, tiny_model
from torch_impl.machine import Machine
from torch_impl.step import step

LOAD = Load(batch=2, prompt=10, output=24, temperature=0, top_p=1)
DRAFT = Draft.parse("EAGLE3:S=2,L=2")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Namespace:
    """Options of the bench, for a small model with a head beside it."""
    folder, target = tmp_path_factory.mktemp("shapes"), tiny_model("qwen3", 0)[0]
    configs = {
        "tiny": tiny_config("qwen3", nested=False, with_mtp=False, tied=False),
        "tiny-eagle3": tiny_head_config(target, "EAGLE3"),
    }
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    line = ["--model", str(folder / "tiny"), "--drafts", "none", "--turns", "1", "--steps", "2"]
    return fused.options().parse_args([*line, "--dtype", "float32"])


@pytest.mark.matrix
def test_three_programs_of_jax_give_the_text_of_one(given: Namespace):
    line = fused.measure("jax", DRAFT, LOAD, given)
    assert line["texts_are_equal"]
    assert line["simulated_accept_length"] == 2
    assert line["split_requests_per_s"] > 0
    assert "equal texts" in fused.told(line | {"none_requests_per_s": 1.0})


def test_three_parts_of_torch_give_the_text_of_one(
    given: Namespace, monkeypatch: pytest.MonkeyPatch
):
    def in_parts(machine: Machine, words: Tensor, program: Program) -> Tensor | None:
        if program.work is not Work.DECODE:
            return step(machine, words, program)
        *first, result = split_torch.parts(machine, words, program)
        assert first == [None, None]
        return result

    with begun("torch", DRAFT, LOAD, given, None) as session:
        whole = session.round(LOAD).texts
        monkeypatch.setattr("torch_impl.backend.step", in_parts)
        assert session.round(LOAD).texts == whole


def test_what_has_no_parts_is_refused(given: Namespace):
    with pytest.raises(ValueError, match="captures steps on a GPU alone"):
        fused.measure("torch", DRAFT, LOAD, given)
    with pytest.raises(ValueError, match="drafts nothing on the device"):
        fused.measure("torch", Draft.parse("none"), LOAD, given)
