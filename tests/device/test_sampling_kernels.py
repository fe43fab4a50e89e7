"""Sampling kernels against the specification: on a GPU, or interpreted.

And that `ops` takes them on a GPU, and nowhere else.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch

import jax_impl.ops.sampling.sampling
import torch_impl.ops.sampling.sampling
from kernels.pallas_gpu.sampling import sampling as pallas
from kernels.tiles import MEASURED, SamplingTiles, Tiles
from shared.options.adaptive import MOST_WIDTH
from shared.spec import sampling as spec
from shared.spec.gumbel_noise import TARGET_STREAM
from shared.spec.sampling import DRAFT_TAU, TokenCounts
from tests.support.cases.sampling.sampling import (
    TABLE,
    asked,
    f32,
    i32,
    large_arguments,
    mixed_arguments,
)
from tests.support.implementations import to_jax, to_torch
from tests.support.kernels import (
    INTERPRET,
    KERNELS,
    ON_GPU,
    OPTIONS,
    bind_kernels,
    in_languages,
)
from tests.support.op_records import mapped

pytestmark = pytest.mark.usefixtures("interpreted")

each_language = pytest.mark.parametrize("language", KERNELS)
CASES = {str(case): case for case in TABLE if not case.is_large}


def tiles(**changed: int) -> SamplingTiles:
    usual = {"groups": 2, "warps": 4, "programs": 2, "row_programs": 2, "at_once": 2}
    usual |= {"row_warps": 4, "sampled": 64, "listed": 64}
    return SamplingTiles(**usual | changed)


# An uninformative sample, and lists that overflow.
FEW = {"at_once": 4, "sampled": 8, "listed": 8}
OTHER = tiles(groups=8, warps=8, programs=1, row_programs=1, row_warps=2, **FEW)

# A score may be the difference of a logit and a penalty that nearly cancel: there a product that is
# fused with its sum, as a GPU's compiler does, differs by a rounding of the logit.
CANCELLED = 5e-7


def run(language: str, arguments: dict[str, Any], cut: SamplingTiles | None = None) -> list:
    """Returns the result of the kernel of `choose` or `rank`, selected by the arguments."""
    return run_named("rank" if "width" in arguments else "choose", language, arguments, cut)


def run_named(
    name: str, language: str, given: dict[str, Any], cut: SamplingTiles | None = None
) -> list:
    how = {"tau": DRAFT_TAU} if name == "rank" else {"stream": TARGET_STREAM}
    how |= {"tiles": cut or tiles()}
    if language == "triton":
        device = "cuda" if ON_GPU else "cpu"

        def leaf(x: Any) -> Any:
            return to_torch(x).to(device) if isinstance(x, np.ndarray) else x

        on_device = {k: mapped(v, leaf, torch_impl.ops.sampling.sampling) for k, v in given.items()}
        found = getattr(KERNELS["triton"]["sampling"], name)(**on_device, **how)
        return [x.cpu().numpy() for x in found if x is not None]
    on_device = {k: mapped(v, to_jax, jax_impl.ops.sampling.sampling) for k, v in given.items()}
    fixed = {k: v for k, v in on_device.items() if isinstance(v, int) or v is None}
    arrays = {k: v for k, v in on_device.items() if k not in fixed}
    program = pallas_program(name, tuple((fixed | how).items()))
    return [np.asarray(x) for x in program(**arrays) if x is not None]


@cache
def pallas_program(name: str, fixed: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    function = partial(getattr(pallas, name), **dict(fixed), interpret=INTERPRET)
    return jax.jit(function, compiler_options=OPTIONS)


# All tests have arrays of the same sizes: a kernel is compiled for each.
R, VOCAB, PATH = 8, 301, 5


def alone(logits: np.ndarray, sampling: spec.Sampling) -> dict[str, Any]:
    """Arguments of `choose` for one row a request, before which nothing was seen."""
    everyone, path = np.arange(len(logits), dtype=np.int32), np.zeros((len(logits), PATH), np.int32)
    return {
        "logits": logits,
        "seen": TokenCounts(np.zeros(logits.shape, np.int32), everyone, path, path > 0),
        "positions": everyone + 3,
        "sampling": sampling,
        "request": everyone,
        "allowed": None,
    }


# Of Pallas: a choice and a ranking, which have all that the others have; another has the widest.
COMPILED = ("choose, any rows, masked", "rank, sampled, draft vocabulary")


@pytest.mark.parametrize(("language", "name"), in_languages(CASES, COMPILED))
def test_choose_and_rank_kernels_match_spec(name, language) -> None:
    case = CASES[name]
    arguments = case.arguments(seed=3)
    want = case.specified(arguments, None)
    got = run(language, arguments)
    np.testing.assert_array_equal(got[0], want[0])
    # Weights: one rounding for each of some products and sums, and logarithms of two libraries.
    np.testing.assert_allclose(got[1], want[1], rtol=2e-5, atol=2e-5)
    assert len(got) == len(want)
    for scores, wanted in zip(got[2:], want[2:], strict=True):
        np.testing.assert_allclose(scores, wanted, rtol=1e-6, atol=CANCELLED)


@pytest.mark.parametrize(
    ("language", "name"), in_languages(["choose, any rows", "choose, any rows, masked"], COMPILED)
)
def test_score_kernel_matches_spec(name: str, language: str) -> None:
    arguments = CASES[name].arguments(seed=5)
    want, given = spec.choose(**arguments), dict(arguments)
    cuts = (tiles(), OTHER) if language == "triton" or not INTERPRET else (OTHER,)
    for cut in cuts:
        ids, is_finite, scores = run_named("score", language, arguments, cut)
        np.testing.assert_array_equal(ids, want.ids)
        np.testing.assert_array_equal(is_finite, want.is_finite)
        np.testing.assert_allclose(scores, spec.processed(**given), rtol=1e-6, atol=CANCELLED)


# Powers of two and others: lists have room for the next power. Of Pallas the widest.
USUAL = {"pallas": (MOST_WIDTH,), "triton": (1, 3, MOST_WIDTH)}
SELDOM = pytest.mark.matrix if INTERPRET else ()
WIDTHS = [
    pytest.param(language, width, marks=() if width in USUAL[language] else SELDOM)
    for language in KERNELS
    for width in range(1, MOST_WIDTH + 1)
]


@pytest.mark.parametrize(("language", "width"), WIDTHS)
def test_rank_kernel_every_width_matches_spec(width: int, language: str) -> None:
    arguments = CASES["rank, draft vocabulary"].arguments(seed=7) | {"width": width}
    arguments["logits"][:, 0, 20:60] = arguments["logits"][:, 0, 19:20]  # ties in the ranking
    arguments["logits"][5, 1, 11] = np.nan  # of which the row is the first token, and means nothing
    want = spec.rank(**arguments)
    ids, weights = run(language, arguments)
    is_number = np.ones(ids.shape[:2], bool)
    is_number[5, 1] = False
    np.testing.assert_array_equal(ids[is_number], want.ids[is_number])
    np.testing.assert_allclose(weights[is_number], want.weights[is_number], rtol=2e-5, atol=2e-5)
    vocab = arguments["seen"].counts.shape[1]
    assert ((ids >= 0) & (ids < vocab)).all()


@pytest.mark.parametrize(
    "language", [pytest.param(each, marks=SELDOM if each == "pallas" else ()) for each in KERNELS]
)
def test_tied_token_zero_passes_top_p(language: str) -> None:
    """With a tiny top-p the first of tied tokens remains, and no other."""
    arguments = CASES["rank, as the target"].arguments(seed=8)
    arguments["logits"][7, :, [0, 5]] = 30
    ids, weights = run(language, arguments)
    np.testing.assert_array_equal(ids[7, :, 0], 0)
    np.testing.assert_array_equal(weights[7, :, 0], 0)


@each_language
def test_sampling_results_independent_of_tile_config(language) -> None:
    mixed = CASES["choose, any rows"].arguments(seed=4)
    flat = mixed["logits"] * np.float32(0.1)
    for arguments in (mixed, mixed | {"logits": flat}):
        want = run(language, arguments)
        for w, g in zip(want, run(language, arguments, OTHER), strict=True):
            np.testing.assert_array_equal(g, w)


# Ids that the sample is made of: a run of 8 out of each 40 where `tiles` take 64 of `VOCAB`.
IN_SAMPLE = np.arange(VOCAB) % 40 < 8


@each_language
def test_rank_kernel_near_uniform_logits_match_spec(language) -> None:
    """The sample represents the rest of the first node, and not of the others.

    Weights show the support, which they are summed over.
    """
    arguments = CASES["rank, as the target"].arguments(seed=9)
    logits = arguments["logits"] * np.float32(0.1)
    gap = np.where(IN_SAMPLE, 0.0, -0.6).astype(np.float32)
    logits[::2, 1], logits[1::2, 1] = logits[::2, 1] + gap, logits[1::2, 1] - gap
    arguments["logits"] = logits
    arguments["sampling"] = asked(
        *(R, VOCAB),
        temperature=np.ones(R, np.float32),
        top_p=f32(0.5, 0.5, 0.95, 0.95, 1, 1, 0.05, 0.7),
        top_k=i32(VOCAB, VOCAB, VOCAB, 200, 200, 40, VOCAB, 150),
        min_p=f32(0, 0, 0.3, 0, 0.2, 0, 0, 0),
    )
    want = spec.rank(**arguments)
    ids, weights = run(language, arguments)
    np.testing.assert_array_equal(ids, want.ids)
    np.testing.assert_allclose(weights, want.weights, rtol=2e-5, atol=2e-5)


@each_language
def test_choose_kernel_equal_logits_keep_id_order(language) -> None:
    logits = np.full((R, VOCAB), -2.5, np.float32)
    logits[1::2, 5] = -2
    logits[4:6, 3:] = -np.inf  # but for three
    how = asked(
        *(R, VOCAB),
        temperature=np.full(R, 0.8, np.float32),
        top_k=i32(1, VOCAB, 77, VOCAB, 20, 2, VOCAB, 300),
        top_p=f32(1, 0.3, 1, 1e-6, 0.95, 1, 0.9, 0.9),
        min_p=f32(0, 0, 0, 0.1, 0, 0, 0.5, 0),
    )
    arguments = alone(logits, how)
    want = spec.choose(**arguments).ids
    np.testing.assert_array_equal(run(language, arguments)[0], want)
    np.testing.assert_array_equal(run(language, arguments, OTHER)[0], want)
    assert want[0] == 0
    assert want[3] == 5


@each_language
def test_choose_kernel_row_is_batch_invariant(language) -> None:
    arguments = mixed_arguments(5, vocab=VOCAB, is_masked=False)
    together, seen = run(language, arguments), arguments["seen"]
    # XLA compiles an interpreted kernel for each number of rows: there all rows are the same one.
    rows = R if language == "pallas" and INTERPRET else 1
    for row in (1, 4):
        only = np.full(rows, row)
        mine = TokenCounts(seen.counts, seen.slots[only], seen.path[only], seen.on_path[only])
        parts = {name: arguments[name][only] for name in ("logits", "positions", "request")}
        got = run(language, arguments | parts | {"seen": mine})
        assert got[0][0] == together[0][row]


@each_language
def test_choose_kernel_penalises_draft_tokens_on_path(language) -> None:
    logits = np.zeros((R, VOCAB), np.float32)
    logits[:, 7], logits[:, 8] = 3, 2
    arguments = alone(logits, asked(R, VOCAB, frequency=np.full(R, 0.75, np.float32)))
    # Token 7 loses if it occurred twice before.
    path, on_path = np.full((R, PATH), 7, np.int32), np.zeros((R, PATH), bool)
    on_path[0, :2] = on_path[1, :1] = True
    arguments["seen"] = replace(arguments["seen"], path=path, on_path=on_path)
    ids, _ = run(language, arguments)
    np.testing.assert_array_equal(ids, [8] + 7 * [7])


@each_language
def test_choose_kernel_ties_prefer_lower_id(language) -> None:
    logits = np.zeros((R, VOCAB), np.float32)
    logits[1, ::7] = -0.0  # equal to 0
    logits[2, 150:] = 1
    logits[3, [7, 70, 190]] = 5
    how = asked(
        *(R, VOCAB),
        temperature=f32(0, 0, 1, 1, 1, 1, 0, 0),
        top_k=i32(VOCAB, VOCAB, 3, 2, VOCAB, 130, VOCAB, VOCAB),
        top_p=f32(1, 1, 1, 1, 0.1, 0.3, 1, 1),
    )
    arguments = alone(logits, how)
    want = spec.choose(**arguments).ids
    np.testing.assert_array_equal(run(language, arguments)[0], want)
    assert want[0] == want[1] == 0
    assert want[2] in (150, 151, 152)
    assert want[3] in (7, 70)
    assert want[4] < 31


@each_language
def test_choose_kernel_nonfinite_row_spoils_only_itself(language) -> None:
    arguments = mixed_arguments(6, vocab=VOCAB, is_masked=False)
    arguments |= {"request": np.arange(8, dtype=np.int32)}
    want, logits = run(language, arguments), arguments["logits"].copy()
    assert want[1].all()
    for row, (place, bad) in {
        0: (5, np.nan),
        1: (VOCAB - 1, np.inf),
        2: (64, -np.inf),
        5: (77, np.nan),
    }.items():
        logits[row, place] = bad
    ids, is_finite = run(language, arguments | {"logits": logits})
    np.testing.assert_array_equal(is_finite, [False, False, False, True, True, False, True, True])
    np.testing.assert_array_equal(ids[is_finite], want[0][is_finite])
    assert ((ids >= 0) & (ids < VOCAB)).all()
    assert ids[0] == 5  # the first that is no number, as the specification has it


@each_language
def test_rank_kernel_fills_width_with_excluded_tokens(language) -> None:
    arguments = CASES["rank, as the target"].arguments(seed=8)
    ones = np.ones(R, np.float32)
    arguments["sampling"] = asked(R, VOCAB, temperature=ones, top_k=i32(1, 2, *(R - 2) * [VOCAB]))
    want = spec.rank(**arguments)
    ids, weights = run(language, arguments)
    np.testing.assert_array_equal(ids, want.ids)
    np.testing.assert_allclose(weights, want.weights, rtol=2e-5, atol=2e-5)
    assert np.isneginf(weights[0, :, 1:]).all()
    assert np.isneginf(weights[1, :, 2:]).all()


def test_sampling_kernels_same_signature() -> None:
    for name in ("choose", "rank", "score"):
        ours = [p for p in inspect.signature(getattr(pallas, name)).parameters if p != "interpret"]
        for modules in KERNELS.values():
            signature = inspect.signature(getattr(modules["sampling"], name))
            assert [p for p in signature.parameters if p != "interpret"] == ours
    for modules in KERNELS.values():
        assert modules["sampling"].GROUP == pallas.GROUP


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@pytest.mark.parametrize(
    ("module", "name"),
    [
        *(
            ("logits_processing", name)
            for name in ("SamplingInputs", "SamplingSizes", "RowSampling")
        ),
        *(("topk_topp", name) for name in ("ScoreSource", "RowScratch", "Bounds", "CandidateList")),
        ("topk", "Support"),
    ],
)
def test_sampling_records_same_fields(module: str, name: str) -> None:
    names = {
        language: getattr(sys.modules[f"kernels.{language}_gpu.sampling.{module}"], name)._fields
        for language in ("pallas", "triton")
    }
    # Triton accepts no constants in named tuples: `ScoreSource` and `RowScratch` have none.
    constants = {"ScoreSource": ("sizes", "interpret"), "RowScratch": ("at_once",)}.get(name, ())
    assert names["pallas"] == names["triton"] + constants


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("choose", {}),
        ("rank", {}),
        ("rank", {"width": MOST_WIDTH}),
        ("rank", {"width": 1, "is_sampled": True}),
    ],
    ids=["choose", "rank", "widest rank", "sampled rank"],
)
def test_jax_sampling_kernels_lowered_for_gpu_only(name, changed, monkeypatch) -> None:
    bind_kernels(monkeypatch, jax_impl.ops, KERNELS["pallas"])
    module = jax_impl.ops.sampling.sampling
    op = jax_impl.ops.kernel_or_reference(
        getattr(module, f"kernel_{name}"), getattr(module, f"plain_{name}")
    )
    arguments = large_arguments(0, R=2, vocab=9000, temperature=0.8, peak=22.0)
    if name == "rank":
        arguments = CASES["rank, as the target"].arguments(seed=0) | changed
    given = [mapped(value, to_jax, module) for value in arguments.values()]
    fixed = {i: x for i, x in enumerate(given) if isinstance(x, int) or x is None}

    def call(*arrays: Any) -> Any:
        rest = iter(arrays)
        return op(*(fixed[i] if i in fixed else next(rest) for i in range(len(given))))

    traced = jax.jit(call).trace(*(x for i, x in enumerate(given) if i not in fixed))
    texts = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "cuda")
    }
    counts = {platform: text.count("xla.gpu.triton") for platform, text in texts.items()}
    assert counts == {"cpu": 0, "cuda": 3}
    assert "stablehlo.sort" not in texts["cuda"]
    assert "top_k" not in texts["cuda"]


@pytest.mark.parametrize("ops", [jax_impl.ops, torch_impl.ops], ids=["jax", "torch"])
def test_kernel_rank_forwards_arguments_to_kernel(ops, monkeypatch) -> None:
    asked_for = []

    def rank(*given: Any, **how: Any) -> tuple[str, str, str]:
        asked_for.append(given[-3:])
        return "ids", "weights", "scores"

    bind_kernels(monkeypatch, ops, {"sampling": SimpleNamespace(rank=rank)})
    logits = np.zeros((1, 2, 16), np.float32)
    seen = SimpleNamespace(counts=np.zeros((1, 16), np.int32))
    given = (logits, seen, *(None,) * 4)
    call: Callable = partial(ops.sampling.sampling.kernel_rank, ops.KERNELS, *given)
    assert call(MOST_WIDTH, False, "columns").ids == "ids"
    assert call(1, True, None).processed == "scores"
    assert asked_for == [(MOST_WIDTH, False, "columns"), (1, True, None)]


def test_torch_choose_on_gpu_calls_kernel(monkeypatch) -> None:
    recorder = SimpleNamespace(choose=lambda *given, **how: (given[0], how))
    bind_kernels(monkeypatch, torch_impl.ops, {"sampling": recorder})
    module = torch_impl.ops.sampling.sampling
    op = torch_impl.ops.kernel_or_reference(module.kernel_choose, module.plain_choose)

    class Rows(torch.Tensor):
        """A tensor that claims to be on a GPU."""

        device = torch.device("cuda")

    logits = torch.zeros(3, 10).as_subclass(Rows)
    found = op(logits, *(None,) * 5)
    assert found.ids is logits
    rows = Tiles.load("pallas_gpu", MEASURED).sampling.of(rows=3)
    assert found.is_finite == {"stream": TARGET_STREAM, "tiles": rows}
