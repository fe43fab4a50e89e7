"""Rejection-sampling kernels for sampled drafts: on a GPU, or interpreted."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest

import jax_impl.ops.sampling.acceptance
import torch_impl.ops.sampling.acceptance
from kernels.pallas_gpu.sampling import rejection as pallas
from shared.spec import acceptance as spec
from shared.spec import sampling
from shared.spec.gumbel_noise import ACCEPT_STREAM, RESIDUAL_STREAM
from tests.support.cases.sampling.acceptance import TABLE, judge_arguments
from tests.support.implementations import to_jax, to_torch
from tests.support.kernels import (
    AS_ROUNDED,
    INTERPRET,
    KERNELS,
    ON_GPU,
    bind_kernels,
    in_languages,
    share_arithmetic,
)
from tests.support.op_records import mapped

pytestmark = pytest.mark.usefixtures("interpreted")

CASES = {
    str(case): case for case in TABLE if case.function == "rejection_sample" and not case.is_large
}
# Of Pallas: of either rule the longer chains.
COMPILED = [name for name in CASES if "5 chains" in name]
RULES = ["rejection", "block"]
each_language = pytest.mark.parametrize("language", KERNELS)
each_rule = pytest.mark.parametrize("rule", RULES)
# More tokens than a part has, so that parts are joined.
LARGER = {"B": 3, "S": 3, "vocab": 9000, "is_large": False, "last_drafts": 1}


def scored(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the kernels: logits, and the target's own choices."""
    how, row_of = arguments["sampling"], arguments["row_of"]
    names = ("logits", "seen", "positions", "sampling", "request", "allowed")
    given = {name: arguments[name] for name in names}
    own = sampling.choose(**given).ids
    return {
        **{name: arguments[name] for name in ("tokens", "num_nodes", "row_of", "lengths")},
        "choices": own[row_of],
        "scores": sampling.processed(**given),
        "drafted": arguments["drafted"],
        "temperature": how.temperature,
        "seeds": how.seed,
    }


def run(language: str, arguments: dict[str, Any]) -> np.ndarray:
    """The choices by a rule's kernels."""
    given, is_block = scored(arguments), arguments["rule"] == "block"
    if language == "pallas":
        program = pallas_program(is_block)
        return np.asarray(program(**{name: to_jax(x) for name, x in given.items()}))
    device = "cuda" if ON_GPU else "cpu"
    placed = {name: to_torch(x).to(device) for name, x in given.items()}
    streams = {"accept_stream": ACCEPT_STREAM, "residual_stream": RESIDUAL_STREAM}
    judge = KERNELS["triton"]["rejection"].rejection_sample
    return judge(**placed, is_block=is_block, **streams).cpu().numpy()


@cache
def pallas_program(is_block: bool) -> Callable[..., Any]:
    how = {"accept_stream": ACCEPT_STREAM, "residual_stream": RESIDUAL_STREAM}
    function = partial(pallas.rejection_sample, is_block=is_block, **how, interpret=INTERPRET)
    return jax.jit(function, compiler_options=AS_ROUNDED)


@pytest.mark.parametrize(("language", "name"), in_languages(CASES, COMPILED))
def test_rejection_sample_kernel_matches_spec(name: str, language: str) -> None:
    accepted, rejected = 0, 0
    for seed in range(6):
        arguments = CASES[name].arguments(seed)
        want, _ = spec.rejection_sample(**arguments)
        np.testing.assert_array_equal(run(language, arguments), want)
        is_draft = want[:, :-1] == arguments["tokens"][:, 1:]
        accepted, rejected = accepted + int(is_draft.sum()), rejected + int((~is_draft).sum())
    if "5 chains" in name:
        assert accepted > 20
        assert rejected > 20


@each_language
@each_rule
def test_rejection_sample_merges_vocabulary_parts(rule: str, language: str) -> None:
    for seed in range(2):
        arguments = judge_arguments(seed, **LARGER, rule=rule)
        np.testing.assert_array_equal(
            run(language, arguments), spec.rejection_sample(**arguments)[0]
        )


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@each_rule
def test_rejection_sample_kernels_bitwise_equal(rule: str, monkeypatch) -> None:
    share_arithmetic(monkeypatch)
    for seed in range(4, 7):
        arguments = judge_arguments(seed, **LARGER, rule=rule)
        found = [run(language, arguments) for language in ("pallas", "triton")]
        np.testing.assert_array_equal(*found)


@each_language
@each_rule
def test_rejection_sample_accepts_drafts_from_target_distribution(rule: str, language: str) -> None:
    arguments = judge_arguments(2, **LARGER, rule=rule)
    arguments["drafted"] = arguments["logits"][arguments["row_of"][:, :-1]]
    judged = np.arange(3) + 1 < arguments["num_nodes"][:, None]
    judged &= arguments["sampling"].temperature[:, None] > 0
    got, drafts = run(language, arguments)[:, :-1], arguments["tokens"][:, 1:]
    np.testing.assert_array_equal(got[judged], drafts[judged])


@each_language
def test_rejection_sample_nan_row_spoils_only_itself(language: str) -> None:
    arguments = judge_arguments(3, **LARGER, rule="rejection")
    want, logits = run(language, arguments), arguments["logits"].copy()
    logits[arguments["row_of"][0, 1], 5] = np.nan
    got = run(language, arguments | {"logits": logits})
    is_same = np.ones(got.shape, bool)
    is_same[0, 1] = False
    np.testing.assert_array_equal(got[is_same], want[is_same])
    assert ((got >= 0) & (got < LARGER["vocab"])).all()


def test_rejection_sample_kernels_same_signature() -> None:
    ours = [p for p in inspect.signature(pallas.rejection_sample).parameters if p != "interpret"]
    for modules in KERNELS.values():
        assert (
            list(inspect.signature(modules["rejection"].rejection_sample).parameters)[: len(ours)]
            == ours
        )
        for name in ("Chains", "Distributions", "ResidualSamples"):
            got = getattr(modules["rejection"], name)._fields
            assert got == getattr(pallas, name)._fields
        assert modules["rejection"].PART_GROUPS == pallas.PART_GROUPS


@each_rule
def test_jax_rejection_kernels_lowered_for_gpu_only(rule: str, monkeypatch) -> None:
    bind_kernels(monkeypatch, jax_impl.ops, KERNELS["pallas"])
    ops = jax_impl.ops.sampling.acceptance
    judge = jax_impl.ops.kernel_or_reference(
        ops.kernel_rejection_sample, ops.plain_rejection_sample
    )
    arguments = judge_arguments(0, **LARGER, rule=rule)
    given = {name: mapped(x, to_jax, ops) for name, x in arguments.items()}
    fixed = {name: given.pop(name) for name in ("allowed", "rule")}

    def call(given: dict[str, Any]) -> Any:
        first = {"logits": given["logits"]}
        return judge(**first | given | fixed)

    traced = jax.jit(call).trace(given)
    texts = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "cuda")
    }
    counts = {platform: text.count("xla.gpu.triton") for platform, text in texts.items()}
    assert counts == {"cpu": 0, "cuda": 7}
    assert "stablehlo.sort" not in texts["cuda"]


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@each_rule
def test_torch_rejection_kernels_match_spec(rule: str, monkeypatch) -> None:
    bind_kernels(monkeypatch, torch_impl.ops, KERNELS["triton"])
    arguments = judge_arguments(1, **LARGER | {"vocab": 301}, rule=rule)
    arguments["sampling"] = replace(arguments["sampling"], top_p=np.full(3, 0.9, np.float32))
    device = "cuda" if ON_GPU else "cpu"

    def leaf(x: Any) -> Any:
        return to_torch(x).to(device) if isinstance(x, np.ndarray) else x

    ops = torch_impl.ops.sampling.acceptance
    given = {name: mapped(x, leaf, ops) for name, x in arguments.items()}
    choices, is_finite = ops.kernel_rejection_sample(torch_impl.ops.KERNELS, **given)
    want = spec.rejection_sample(**arguments)
    np.testing.assert_array_equal(choices.cpu().numpy(), want[0])
    np.testing.assert_array_equal(is_finite.cpu().numpy(), want[1])
