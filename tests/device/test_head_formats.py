"""Heads in the formats of all publishers: a correct reading drafts well, a wrong one badly."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_impl import weights
from shared.drafts.aux_hidden_states import LayerIdMeaning
from shared.drafts.checkpoint import load_head, open_head
from shared.drafts.config import DraftConfig, DraftHead
from shared.drafts.dspark_config import MARKOV_TYPES
from shared.drafts.infer_from_tensors import infer_from_tensors
from shared.spec.draft_tree import TreeShape
from tests.support.backends import make_backend
from tests.support.golden_blocks import GOLDEN
from tests.support.golden_models import load_golden_head
from tests.support.head_formats import FORMATS, LAYERS, made_head, still_target, write_format
from tests.support.run_engine import Outcome
from tests.support.small_drafting import BATCH, small_capacity, small_outcomes, small_requests
from tests.support.tiny_heads import tiny_spark_head

FRAMEWORKS = ("reference", "torch", pytest.param("jax", marks=pytest.mark.matrix))


target_of = lru_cache(still_target)


def read(folder: Path, name: str, told: LayerIdMeaning | None) -> DraftHead:
    """Reads a head like a start of the server."""
    files, (target, _) = open_head(folder), target_of(name)
    config = infer_from_tensors(DraftConfig.from_folder(folder, target, told), files, None)
    return load_head(files, config, np.float32)


def first_drafts(framework: str, name: str, head: DraftHead) -> float:
    """Returns the acceptance rate of the first draft token."""
    outcomes = served(framework, name, head, "exact", {"temperature": 0.0})
    steps = [count for outcome in outcomes.values() for count in outcome.accepted]
    return sum(count > 0 for count in steps) / len(steps)


def served(framework: str, name: str, head: DraftHead, rule: str, how: dict) -> dict[int, Outcome]:
    """Returns the outcomes of two requests."""
    target, target_weights = target_of(name)
    shape = TreeShape.chain(3, BATCH)
    capacity = small_capacity(target.vocab, shape, rule)
    backend = make_backend(framework, target, target_weights, capacity, head)
    outcomes = small_outcomes(backend, capacity, shape, small_requests(max_tokens=24, **how))
    backend.close()
    return outcomes


@pytest.mark.parametrize("name", FORMATS)
def test_head_format_loads_written_head(name, tmp_path):
    want = write_format(tmp_path / "head", name, *target_of(name))
    got = read(tmp_path / "head", name, None)
    assert got.config == want.config
    assert got.config.aux_streams[:3] == (1, 2, 3)
    assert got.weights.keys() == want.weights.keys()
    for key, array in want.weights.items():
        np.testing.assert_array_equal(got.weights[key], array, err_msg=key)


@pytest.mark.parametrize(
    "framework", [pytest.param("reference", marks=pytest.mark.matrix), *FRAMEWORKS[1:]]
)
@pytest.mark.parametrize("name", FORMATS)
def test_head_format_misread_lowers_acceptance(name, framework, tmp_path):
    write_format(tmp_path / "head", name, *target_of(name))
    right = first_drafts(framework, name, read(tmp_path / "head", name, None))
    assert right > 0.5
    other = LayerIdMeaning.OUTPUTS if "speculators" in name else LayerIdMeaning.INPUTS
    if LAYERS in FORMATS[name].config(target_of(name)[0]).get(
        "eagle_aux_hidden_state_layer_ids", ()
    ):
        with pytest.raises(ValueError, match="whose outputs are read"):
            read(tmp_path / "head", name, LayerIdMeaning.OUTPUTS)
        return
    if switch := FORMATS[name].switch:
        path = tmp_path / "head" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {switch: False}))
        other = None
    wrong = first_drafts(framework, name, read(tmp_path / "head", name, other))
    assert wrong < right / 3


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_block_head_wrong_slots_lower_acceptance(framework, tmp_path):
    name = "speculators DSpark"
    write_format(tmp_path / "head", name, *target_of(name))
    right = first_drafts(framework, name, read(tmp_path / "head", name, None))
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sample_from_anchor": False}))
    wrong = first_drafts(framework, name, read(tmp_path / "head", name, None))
    assert wrong < right / 3


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("kind", MARKOV_TYPES)
def test_markov_head_conditions_on_previous_token(kind, framework):
    """The head knows successors of tokens only; here its table is wrong."""
    target, target_weights = target_of("speculators DSpark")
    head = tiny_spark_head(target, target_weights, 3, markov_head_type=kind)
    right = all_drafts(framework, head)
    shifted = {"markov.embed": np.roll(head.weights["markov.embed"], 1, axis=0)}
    wrong = all_drafts(framework, DraftHead(head.config, {**head.weights, **shifted}))
    assert wrong < right / 3
    assert right > 1.5


def all_drafts(framework: str, head: DraftHead) -> float:
    """Returns the mean number of accepted draft tokens per step, of three."""
    outcomes = served(framework, "speculators DSpark", head, "exact", {"temperature": 0.0})
    return float(np.mean([count for outcome in outcomes.values() for count in outcome.accepted]))


@pytest.mark.parametrize(
    "name", ["speculators", "speculators DFlash", "speculators DSpark", "speculators DFlash2"]
)
def test_draft_head_ranks_preserve_output(name, tmp_path):
    """Heads with several layers and a block with a draft vocabulary are covered."""
    write_format(tmp_path / "head", name, *target_of(name))
    assert first_drafts("torch ranks 2", name, read(tmp_path / "head", name, None)) > 0.5


def test_stacked_head_norms_indexed_by_later_layer():
    """A kernel takes a layer's of a stack by its place in the pools, which counts the first too."""
    head = load_golden_head(GOLDEN / "eagle3_sliding", GOLDEN / "qwen3")
    loaded = weights.head_from_arrays(head, np.float32, jax.devices("cpu")[0])
    layers = weights.head_of(head.config, loaded, True).layers
    for place, layer in enumerate(layers[1:]):
        for mine, name in ((layer.mixer.q_norm, "q_norm"), (layer.mixer.k_norm, "k_norm")):
            np.testing.assert_array_equal(mine, head.weights[f"later.attention.{name}"][place])


SAMPLED = {"temperature": 0.9, "repetition_penalty": 1.2, "top_k": 40, "logit_bias": {5: 2.0}}


@pytest.mark.parametrize("framework", FRAMEWORKS[1:])
@pytest.mark.parametrize("rule", ["exact", "rejection"])
@pytest.mark.parametrize("name", ["speculators DFlash", "speculators DSpark"])
def test_block_draft_vocabulary_matches_spec(name, rule, framework):
    head = made_head(name, *target_of(name))
    want, got = (served(each, name, head, rule, SAMPLED) for each in ("reference", framework))
    assert {key: each.tokens for key, each in got.items()} == {
        key: each.tokens for key, each in want.items()
    }
    counts = [count for key in want for count in want[key].accepted]
    assert counts == [count for key in got for count in got[key].accepted]
    assert {0, 1} <= {*counts}
