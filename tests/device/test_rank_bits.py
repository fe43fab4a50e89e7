"""Two and four tensor-parallel ranks on a CPU: bitwise equal to one rank in every result field.

Each step runs on one rank and on each of several, and is compared there (`tests/support/ranks.py`):
tokens, trees, logprobs, scores and snapshots. The traffic has prefix hits, preemption, chunks,
early ends, penalties, biases and filters, and alternates the shapes of trees.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Container, Iterable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from shared.boundary.shm_allgather import ShmAllGather
from shared.boundary.tp_group import SINGLE_RANK, TPGroup
from shared.engine.request import SamplingParams
from tests.support.backends import drafts_of
from tests.support.closing_fixture import closing_fixture
from tests.support.contract_host import (
    CHAIN,
    SAMPLED,
    Host,
    contract_capacity,
    contract_model,
    prompt,
)
from tests.support.equality import TALLY
from tests.support.jax_ranks import check_ranks
from tests.support.random_requests import DRAFTERS, Asked, Server, prompt_of
from tests.support.random_serving import Backends, serve
from tests.support.rank_steps_on_gpus import BACKENDS, MODELS, run_part
from tests.support.ranks import steps_of_rank
from tests.support.tiny_models import DENSE, DIVIDED, LATENT, MAMBA2, WITH_MTP
from torch_impl.backend import TorchBackend

HYBRID = DIVIDED["qwen3_5"]
TWO, FOUR = FRAMEWORKS = ("torch ranks 2", "torch ranks 4")
"""Four are more than heads of keys, and take more than twice the time: two families have them."""


def every(names: Iterable[str], of_two: Container[str], of_four: Container[str]) -> list:
    """Frameworks and names; those that a default run leaves out are of the matrix."""
    chosen = {TWO: of_two, FOUR: of_four}
    return [
        pytest.param(framework, name, marks=() if name in chosen[framework] else pytest.mark.matrix)
        for framework, name in product(FRAMEWORKS, names)
    ]


GREEDY = SamplingParams(temperature=0.0, max_tokens=13, logprobs=2, prompt_logprobs=2)
LOOSE = SamplingParams(
    temperature=0.9, max_tokens=11, repetition_penalty=1.2, frequency_penalty=0.4, logprobs=3
)
TIGHT = SamplingParams(
    temperature=1.3,
    max_tokens=11,
    top_p=0.9,
    top_k=40,
    min_p=0.02,
    min_tokens=9,
    stop_token_ids=(20, 21),
    logit_bias={30: 6.0, 31: -100.0},
)


backends = closing_fixture(Backends)


def asked(length: int, sampling: SamplingParams, arrives: int = 0, choices: int = 1) -> Asked:
    """Prompts begin alike, so that later ones find pages of earlier ones."""
    return Asked(
        prompt=prompt_of(0, length, 8),
        sampling=sampling,
        seed=length,
        choices=choices,
        tenant="",
        arrives=arrives,
        leaves=None,
        late=None,
    )


TRAFFIC = [
    asked(70, GREEDY),
    asked(33, LOOSE, choices=2),
    asked(41, TIGHT),
    asked(75, TIGHT, arrives=6),
]
FEW = [asked(37, replace(GREEDY, max_tokens=10)), asked(20, replace(TIGHT, max_tokens=11))]
DENSE_FAMILIES = ("llama", *DENSE)
LIKE_LLAMA = {"llama", "mistral", "ministral3", "smollm3"}
"""Families that differ in undivided parts only: sliding windows and RoPE."""
EXPERTS = ("glm4_moe", "gpt_oss", "qwen3_moe", *LATENT, DIVIDED["qwen3_5_moe"])
COPYING = {each for each in DRAFTERS if "+" in each} - {"NEXTN+NGRAM"}
OF_HYBRID = [each for each in DRAFTERS if not each.startswith("ASSISTANT")]
"""Drafters that a hybrid can have."""
ELSEWHERE = {"EAGLE", "DFLASH", "DSPARK", "NEXTN", "none"}
"""Drafters of other tests:

EAGLE of each dense family, blocks by the formats of their heads
(`tests/device/test_head_formats.py`) and with rules of acceptance.
"""


def serve_on(
    backends: Backends, framework: str, family: str, drafter: str, rule: str, traffic: list[Asked]
) -> None:
    server = Server(
        framework=framework,
        family=family,
        drafter=drafter,
        shape=None,
        rule=rule,
        page_size=4,
        overlap=1,
        spare=0.0,
        scope="request",
        match_type="BFS",
        caches=True,
    )
    serve(server, traffic, backends)


@pytest.mark.parametrize(
    ("framework", "drafter"), every(OF_HYBRID, {*OF_HYBRID} - COPYING - ELSEWHERE, ())
)
def test_tp_every_drafter_bitwise_equal(drafter, framework, backends):
    begun = TALLY.preemptions
    serve_on(backends, framework, HYBRID, drafter, "exact", TRAFFIC)
    assert TALLY.preemptions > begun or drafter != "none", "pages were never short"


@pytest.mark.parametrize("rule", ["exact", "rejection"])
def test_tp_assistant_bitwise_equal(rule, backends):
    """Heads, `fc`, the LM head and its clusters are sharded, with K = V in one KV head."""
    serve_on(backends, TWO, "gemma4", "ASSISTANT", rule, FEW)


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [("NEXTN", "rejection"), ("EAGLE3", "block"), ("DFLASH", "rejection"), ("STANDALONE", "block")],
)
def test_tp_every_accept_rule_bitwise_equal(drafter, rule, backends):
    family = HYBRID if drafter == "NEXTN" else "llama"
    serve_on(backends, TWO, family, drafter, rule, FEW)


@pytest.mark.parametrize(
    ("framework", "family"),
    every(DENSE_FAMILIES, {*DENSE_FAMILIES} - LIKE_LLAMA - {"olmo3"}, {"olmo3"}),
)
def test_tp_every_dense_family_bitwise_equal(family, framework, backends):
    """Biases, factors, norms of all heads and after layers, sliding windows, fused tensors."""
    serve_on(backends, framework, family, "EAGLE", "exact", FEW)


@pytest.mark.parametrize(
    ("framework", "family"),
    [
        *every(EXPERTS, EXPERTS[:4], EXPERTS[4:]),
        (TWO, "nemotron_h"),
        *every(("gemma4_moe",), (), ()),
        *(
            pytest.param(TWO, family, marks=pytest.mark.matrix)
            for family in ("granitemoehybrid", "minimax_m2", "qwen3_next")
        ),
    ],
)
def test_tp_every_moe_family_bitwise_equal(family, framework, backends):
    drafter = "NEXTN" if family in WITH_MTP else "EAGLE3"
    serve_on(backends, framework, family, drafter, "exact", FEW)


@pytest.mark.parametrize(
    ("framework", "family"), every(("gemma4", "gemma4_moe", "gpt_oss"), ("gemma4",), ())
)
def test_tp_windowed_targets_of_blocks_bitwise_equal(family, framework, backends):
    serve_on(backends, framework, family, "DFLASH", "exact", FEW)


@pytest.mark.matrix
@pytest.mark.parametrize("family", [*MAMBA2, "minimax_m2", "qwen3_next"])
def test_tp_ngram_trees_bitwise_equal(family, backends):
    serve_on(backends, TWO, family, "NGRAM", "exact", TRAFFIC)


def test_tp_torch_processes_bitwise_equal():
    """The ranks are torch processes that share memory by name, instead of threads."""
    config, weights = contract_model()
    made_from = (config, weights, contract_capacity(config), *drafts_of("NEXTN", config))
    host = Host(TorchBackend(*made_from, dtype="float32", device="cpu"), {})
    request = host.request(prompt(1, 20), **SAMPLED)
    plans = [host.prefill_plan(request)]
    plans += [host.decode_plan(request, shape=CHAIN) for _ in range(4)]
    stored = [(plan.program, plan.buffer.copy()) for plan in plans]
    want = steps_of_rank(made_from, stored, SINGLE_RANK)
    shm_all_gather = ShmAllGather.create(2, wait_s=60.0)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        other = pool.apply_async(steps_of_rank, (made_from, stored, TPGroup(1, 2, shm_all_gather)))
        mine = steps_of_rank(made_from, stored, TPGroup(0, 2, shm_all_gather))
        theirs = other.get(120)
    shm_all_gather.remove()
    for got in (mine, theirs):
        for step, alone in zip(got, want, strict=True):
            for name, array in step.items():
                np.testing.assert_array_equal(array.view(np.int32), alone[name].view(np.int32))
    assert sum(int(step["counts"][0]) for step in want) > len(want), "nothing was accepted"


@pytest.mark.parametrize("count", ["2", pytest.param("4", marks=pytest.mark.matrix)])
def test_tp_jax_devices_prefill_bitwise_equal(count):
    """JAX prefill with prompt logprobs, the draft extend, and KV transfer are covered."""
    check_ranks(HYBRID, "NEXTN", count, "prefill,transfer")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        (HYBRID, "NEXTN"),
        (HYBRID, "STANDALONE"),
        (DIVIDED["qwen3_5_moe"], "NEXTN"),
        ("llama", "EAGLE3"),
        ("llama", "EAGLE"),
        ("qwen3", "DFLASH"),
        ("qwen3", "DSPARK"),
        ("qwen3", "DFLASH2"),
        ("olmo3", "EAGLE3"),
        ("phi3", "EAGLE3"),
        ("glm4_moe", "EAGLE3"),
        ("glm4_moe", "NEXTN"),
        ("deepseek_v3", "NEXTN"),
        ("glm4_moe_lite", "EAGLE3"),
        ("qwen3_moe", "EAGLE3"),
        ("gpt_oss", "EAGLE3"),
        ("gpt_oss", "DFLASH"),
        ("gemma4", "DFLASH"),
        ("gemma4_moe", "EAGLE3"),
        ("gemma2", "EAGLE"),
        ("gemma3", "EAGLE3"),
        ("gemma4", "ASSISTANT"),
        ("falcon_h1", "EAGLE3"),
        ("nemotron_h", "NEXTN"),
    ],
)
def test_tp_jax_devices_decode_bitwise_equal(family, drafter):
    check_ranks(family, drafter, "2,4", "plain,chain")


@pytest.mark.matrix
@pytest.mark.parametrize("drafter", ["DFLASH2", "DSPARK"])
def test_tp_jax_devices_block_trees_bitwise_equal(drafter: str) -> None:
    check_ranks("qwen3", drafter, "2", "tree")


@pytest.mark.skipif(torch.cuda.is_available(), reason="of CPUs; GPUs are as many as there are")
@pytest.mark.matrix
@pytest.mark.parametrize(("name", "backend"), list(product(MODELS, BACKENDS)))
def test_tp_eight_ranks_bitwise_equal(name, backend):
    """There are fewer KV heads than ranks, and ranks without tokens of the vocabulary.

    A default run has both in four ranks of torch.
    """
    said = run_part(backend, name, 8)
    assert said[0].isdigit(), said
