"""`--speculative-adaptive-config`: its file, and the draft shapes and programs of a start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shared.boundary.program import ProgramFeature, StepKind
from shared.drafts.drafter_spec import DrafterSpec
from shared.engine.adaptive.tiers import Shapes
from shared.options.adaptive import Candidate, read_candidates
from shared.options.command_line import parse
from shared.options.flags import ConfigError
from shared.options.options import Options
from shared.options.rule_context import RuleContext
from shared.options.rules import refusals
from shared.process.buckets import ProgramCosts
from shared.process.device import Device
from shared.process.memory_plan import MemoryPlan, plan
from tests.support.tiny_models import tiny_model

CPU, GPU = Device("cpu", "CPU", 8 << 30), Device("gpu", "GPU", 80 << 30)
MODEL, _ = tiny_model("qwen3_5", 0)


def written(folder: Path, found: object) -> str:
    path = folder / "tiers.json"
    path.write_text(found if isinstance(found, str) else json.dumps(found), encoding="utf-8")
    return str(path)


def test_candidate_steps_are_sorted_unique_chains(tmp_path):
    found = read_candidates(written(tmp_path, {"candidate_steps": [7, 0, 1, 3, 3]}))
    assert found == (Candidate.chain(1), Candidate.chain(3), Candidate.chain(7))


def test_candidates_read_shapes_and_row_fractions(tmp_path):
    entries = [{"steps": 5, "topk": 4, "draft_tokens": 16, "rows": 0.5}, {"steps": 2}]
    found = read_candidates(written(tmp_path, {"candidates": entries, "candidate_steps": [2]}))
    assert found == (Candidate.chain(2), Candidate(5, 4, 16, 0.5))


REFUSED = {
    "{": "is not a JSON file",
    "[1, 3]": "must contain an object",
    '{"candidate_steps": []}': "must contain 1 to 8 draft shapes, got 0",
    '{"candidate_steps": [1,2,3,4,5,6,7,8,9]}': "must contain 1 to 8 draft shapes, got 9",
    '{"candidate_steps": 3}': "candidate_steps must be a list",
    '{"candidate_steps": [17]}': "candidate_steps must be an integer from 0 to 16, got 17",
    '{"candidate_steps": [true]}': "candidate_steps must be an integer from 0 to 16, got True",
    '{"candidate_steps": ["3"]}': "candidate_steps must be an integer from 0 to 16, got '3'",
    '{"ema_alpha": 0.2}': "ema_alpha is a parameter of SGLang without effect here",
    '{"8": {"candidate_steps": [1]}}': '"8" lists shapes for a batch size',
    '{"steps": [3]}': "unknown key steps; known are candidate_steps, candidates",
    '{"candidates": {"steps": 3}}': "candidates must be a list",
    '{"candidates": [3]}': "candidates must contain objects",
    '{"candidates": [{"topk": 2}]}': "a candidate requires steps",
    '{"candidates": [{"steps": 3, "depth": 2}]}': "unknown key depth of a candidate",
    '{"candidates": [{"steps": 3, "topk": 2}]}': "a candidate with topk 2 requires draft_tokens",
    '{"candidates": [{"steps": 3, "draft_tokens": 5}]}': "draft_tokens must be 4 to 4 with steps 3",
    '{"candidates": [{"steps": 2, "topk": 2, "draft_tokens": 8}]}': "must be 3 to 7 with steps 2",
    '{"candidates": [{"steps": 3, "rows": 0}]}': "rows must be above 0 and at most 1, got 0",
    '{"candidates": [{"steps": 3, "rows": "half"}]}': "rows must be above 0 and at most 1",
}


@pytest.mark.parametrize("text", REFUSED)
def test_adaptive_config_rejects_invalid_file(text, tmp_path):
    with pytest.raises(ConfigError) as refused:
        read_candidates(written(tmp_path, text))
    assert REFUSED[text] in str(refused.value)
    assert str(refused.value).startswith("--speculative-adaptive-config")
    assert "\n" not in str(refused.value)


def test_adaptive_config_rejects_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_candidates(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("algorithm", "candidate", "is_refused"),
    [
        ("NEXTN", Candidate(5, 4, 16), False),
        ("NGRAM", Candidate(5, 4, 16), True),
        ("NGRAM", Candidate.chain(7), False),
        ("NAIVE_EAGLE", Candidate.chain(1), False),
        ("NAIVE_EAGLE", Candidate.chain(2), True),
    ],
)
def test_adaptive_config_rejects_shapes_unsupported_by_drafter(algorithm, candidate, is_refused):
    options = replace(adaptive(algorithm), candidates=(candidate,))
    setup = RuleContext(options=options, model=MODEL, has_mtp=True, head_kind=None)
    matching = [sentence for sentence in refusals(setup) if "contains shapes that" in sentence]
    assert len(matching) == is_refused


def adaptive(algorithm: str, *flags: str) -> Options:
    return parse(["--speculative-algorithm", algorithm, "--speculative-adaptive", *flags])


def planned(options: Options, device: Device, are_compiled: bool) -> MemoryPlan:
    drafts = DrafterSpec.none() if options.speculative.drafts_on_host else DrafterSpec.of_mtp(MODEL)
    costs = ProgramCosts(workspace=lambda program, blueprint: 0, are_compiled=are_compiled)
    return plan(options, MODEL, drafts, device, costs)


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("are_compiled", [False, True], ids=["torch", "jax"])
@pytest.mark.parametrize("algorithm", ["NEXTN", "NAIVE_EAGLE", "NGRAM"])
def test_adaptive_programs_cover_all_batches_and_tiers(algorithm, device, are_compiled):
    capacity = planned(adaptive(algorithm), device, are_compiled).capacity
    shapes = Shapes.of(capacity, host_draft=algorithm == "NGRAM")
    assert shapes.tiers[0].is_off
    reached = capacity.num_pages_for(capacity.max_positions)
    assert max(p.pages for p in capacity.programs) == reached
    assert capacity.scratch == max(shape.scratch for shape in shapes.by_size.values())
    for tier in range(len(shapes.tiers)):
        widest = shapes.by_size[shapes.batches[-1], tier]
        matching = [p for p in capacity.programs if p.shape == widest and p.work is StepKind.DECODE]
        assert any(p.has(ProgramFeature.LOGPROBS) for p in matching)


def test_tiers_share_rows_in_small_batch():
    few = tuple(Candidate(3, 1, 4, share) for share in (0.5, 0.6, 0.9, 1.0))
    options = replace(adaptive("NEXTN", "--max-running-requests", "4"), candidates=few)
    shapes = Shapes.of(planned(options, CPU, False).capacity, host_draft=False)
    assert [str(tier) for tier in shapes.tiers[:2]] == ["none", "S3R0.5"]
    rows = {batch: [shapes.by_size[batch, tier].rows for tier in range(5)] for batch in (1, 4)}
    assert rows == {1: [1, 2, 2, 4, 4], 4: [4, 8, 10, 14, 16]}


def names(algorithm: str, device: Device, are_compiled: bool) -> list[str]:
    capacity = planned(adaptive(algorithm), device, are_compiled).capacity
    return [str(tier) for tier in Shapes.of(capacity, host_draft=algorithm == "NGRAM").tiers]


def test_default_tiers_by_device_and_compilation():
    assert names("NEXTN", GPU, True) == ["none", "S1", "S3", "S7", "S5k4N16"]
    assert names("NEXTN", CPU, True) == ["none", "S1", "S3"]
    assert names("NAIVE_EAGLE", GPU, False) == ["none", "S1"]
    assert names("NGRAM", CPU, True) == ["none", "S3", "S11"]


def test_adaptive_candidates_equal_program_shapes(tmp_path):
    options = replace(adaptive("NEXTN"), candidates=(Candidate.chain(2), Candidate(3, 2, 6)))
    capacity = planned(options, CPU, False).capacity
    assert {p.shape.tree for p in capacity.programs} == {(1, 0, 0), (3, 2, 1), (6, 3, 2)}
    assert (capacity.max_depth, capacity.max_width) == (3, 2)
