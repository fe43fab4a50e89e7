"""The benches' own ways to draft and to judge: rules, plain candidates, and a corpus of outputs."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import accept_rules
from bench.accept_rules import ALL, MATCH, PERTURBED_TREE, REJECTION, WAYS, draft_of
from bench.drafting import Draft
from bench.measuring import Measurement, verdict
from bench.options import Settings
from bench.plain_candidates import PlainCandidates
from shared.engine.request import SamplingParams
from shared.options.options import parse
from shared.spec.sampling import log_softmax
from tests.bench.test_accuracy import settings
from tests.support.equality import spec_sampling
from tests.support.started import start
from torch_impl.drafters import Ranking
from torch_impl.ops.sampling import Sampling as TorchSampling

DRAFTS = (
    "none",
    "NEXTN:S=2,rule=rejection",
    "NEXTN:S=2,most=1",
    "NEXTN:S=2,k=2,N=6,candidates=plain",
    "NGRAM:N=8,sam=7,corpus=own",
)


def few(**changes) -> Settings:
    """Three warm texts of a random model."""
    chosen: dict = {"drafts": [Draft.parse(text) for text in DRAFTS], "kinds": ["problems"]}
    chosen |= {"temperatures": [1.0], "count": 3, "batch": 3, "repeat": 1, "max_tokens": 16}
    return settings(**chosen | changes)


@pytest.fixture(scope="module")
def measurement() -> Measurement:
    found = Measurement(few(), lambda so_far: None)
    found.run()
    return found


@pytest.mark.matrix
def test_the_match_rule_keeps_the_text_and_the_rejection_rule_is_not_asked_to(measurement):
    plain, rejected, *matched = measurement.rows
    assert verdict(measurement) == 0
    assert [row["keeps_text"] for row in measurement.rows] == [True, False, True, True, True]
    assert rejected["text_hash"] != plain["text_hash"]
    assert {row["text_hash"] for row in matched} == {plain["text_hash"]}


def test_a_request_gets_no_more_drafts_than_the_setting_most(measurement):
    one = next(row for row in measurement.rows if "most=1" in row["algorithm"])
    assert one["accepted_histogram"][2] == 0
    assert one["accepted_histogram"][0]


def test_a_corpus_of_outputs_comes_from_another_run_and_is_drafted_from(measurement):
    (outputs,) = measurement._other_outputs.values()
    assert len(outputs) == 3
    row = next(row for row in measurement.rows if "corpus=own" in row["algorithm"])
    assert row["accept_length"] > 1


class Asked:
    """A drafter that only notes what it is to rank with."""

    def __init__(self) -> None:
        self.ranks: list[Ranking] = []

    def prefill(self, *given) -> None:
        self.ranks.append(given[-1])

    extend = draft = prefill


def test_plain_candidates_are_the_likeliest_tokens_at_the_temperature():
    """With noise other tokens come first, and the weights are softer."""
    params = spec_sampling(SamplingParams(temperature=0.7, seed32=5), 3, 50, 2)
    given = {f.name: torch.from_numpy(getattr(params, f.name)) for f in fields(TorchSampling)}
    how = TorchSampling(**given | {"seed": given["seed"].view(torch.int32)})
    logits = np.random.default_rng(3).normal(0, 1.5, (2, 1, 50)).astype(np.float32)
    lengths, no_path = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1, 0, dtype=torch.int32)
    counts, slots = torch.zeros(2, 50, dtype=torch.int32), torch.arange(2)
    rank = Ranking(how, counts, slots, lengths, width=4, is_sampled=False)
    asked = Asked()
    for step in (PlainCandidates(asked).prefill, PlainCandidates(asked).draft):
        step(*[None] * 4, *[None] * (step.__name__ == "draft"), rank)
    PlainCandidates(asked).extend(*[None] * 5, rank)
    want = log_softmax(logits[:, 0] / np.float32(0.7))
    for plain in asked.ranks:
        ranked = plain(torch.from_numpy(logits), no_path, 0)
        likeliest = np.argsort(-want, axis=1)[:, :4]
        np.testing.assert_array_equal(ranked.ids[:, 0], likeliest)
        # Float32 on both sides: only the order of the sums over the vocabulary differs.
        np.testing.assert_allclose(
            ranked.weights[:, 0], np.take_along_axis(want, likeliest, axis=1), rtol=1e-5, atol=1e-5
        )
    assert len(asked.ranks) == 3
    noisy = rank(torch.from_numpy(logits), no_path, 0)
    assert (noisy.ids[:, 0].numpy() != likeliest).any()


def test_only_torch_ranks_without_noise():
    found = Measurement(
        few(backends=["torch"], drafts=[Draft.parse("none:candidates=plain")]), lambda so_far: None
    )
    found.run()
    assert found.refusals[0]["refused"] == "candidates=plain needs a drafter on the device"
    with pytest.raises(ValueError, match="by torch alone, not by jax"):
        start("jax", [], batch=1, context=64, plain_candidates=True, radix_cache=False)


@pytest.mark.parametrize("text", ["NEXTN:rule=none", "NEXTN:candidates=other", "NEXTN:most=few"])
def test_a_setting_that_cannot_be_is_refused(text):
    with pytest.raises(ValueError, match="NEXTN"):
        Draft.parse(text)


@pytest.mark.parametrize("text", [text for text in accept_rules.specs() if text != "none"])
def test_every_line_of_the_table_is_one_that_the_server_takes(text):
    draft = Draft.parse(text)
    folders = dict.fromkeys(("EAGLE", "EAGLE3", "STANDALONE", "DFLASH"), Path("head"))
    options = parse(draft.flags(folders)).speculative
    wanted = dict(draft.settings).get("rule", "match")
    assert options.verification == wanted
    assert draft.is_plain_ranked == ("plain" in text)


def row_of(drafter: str, way: str, histogram: list[int], **changes) -> dict:
    draft = draft_of(drafter, way)
    row = {
        "algorithm": str(draft),
        "temperature": 1.0,
        "kind": "problems",
        "keeps_text": True,
        "text_hash": "a",
    }
    return row | {"accepted_histogram": histogram, "count": 2, "excused": 0} | changes


def test_the_table_joins_tasks_and_says_what_was_not_as_expected():
    rows = [
        row_of("NEXTN", MATCH, [50, 0, 0, 50]),
        row_of("NEXTN", MATCH, [0, 0, 0, 100], kind="copying"),
        row_of("NEXTN", REJECTION, [0, 0, 0, 200]),
        row_of("NEXTN", PERTURBED_TREE, [100, 0, 0, 100]),
        row_of("DFLASH", MATCH, [0, 0, 0, 10, 0, 0, 0, 0]),
        row_of("DFLASH", REJECTION, [0, 0, 0, 10, 0, 0, 0, 0]),
    ]
    cells = accept_rules.cells_of(rows)
    assert cells["NEXTN", MATCH, 1.0, ALL] == [50, 0, 0, 150]
    bad, good = accept_rules.expectations(cells)
    assert bad["match_of_rejection"] == 3.25 / 4
    assert (bad["is_near"], bad["tree_is_above"]) == (False, False)
    assert good["is_near"]
    assert "tree_is_above" not in good
    file = {"rows": rows, "refusals": [], "command": "c", "dtype": "float32", "model": "m"}
    text = accept_rules.render([file | {"tokens": 5, "excused": 0, "wrong": 1}])
    assert "| NEXTN | problems | 2.500 ± 0.150 | 4.000 ± 0.000 | - |" in text
    assert "the matched chain emits 81.2% of the rejected chain's tokens, LESS THAN 92%" in text
    assert "the perturbed tree is BELOW both" in text
    assert "NOT EQUAL" in text
    assert accept_rules.length([0, 4]) == (2.0, 0.0)


def test_every_drafter_has_a_line_in_each_way_but_trees_of_blocks():
    lines = [(drafter, way) for drafter in accept_rules.SHAPES for way in WAYS]
    missing = [line for line in lines if draft_of(*line) is None]
    assert {drafter for drafter, _ in missing} == {"DFLASH"}
    assert len(missing) == 2
    assert len(list(accept_rules.specs())) == 1 + len(lines) - 2
