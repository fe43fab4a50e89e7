"""Benchmark of operations: it runs the tests' cases on both sides and reports wrong results."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench.kernels import op
from kernels.tiles import MEASURED, Tiles
from tests.support.kernels import ON_GPU, bind_kernels
from tests.support.op_case import TOLERANCE, OpCase, changed, table, tables
from tests.support.op_sides import SIDES, Side


@pytest.fixture(scope="module")
def side(request: pytest.FixtureRequest) -> Side:
    return SIDES[request.param]()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.op_sides.ROUND_S", 0)
    monkeypatch.setattr("tests.support.op_sides.CPU_COPY_FLOATS", 2**16)


SMALL = [case for name in tables() for case in table(name) if not case.is_large]


def first_of_each() -> list:
    """Returns the first case of each function, with JAX for the first case of each operation only.

    The others are of the matrix where they run no kernel: without a GPU they are plain operations,
    which have tests of their own, and JAX compiles each for a second.
    """
    seen, found = set(), []
    for case in SMALL:
        for side in SIDES:
            first = (side, case.op, case.function if side == "torch" else "")
            is_default = ON_GPU or first not in seen
            seen.add(first)
            found.append(pytest.param(side, case, marks=() if is_default else pytest.mark.matrix))
    return found


@pytest.mark.parametrize(("side", "case"), first_of_each(), ids=str, indirect=["side"])
def test_op_small_cases_match_spec(case: OpCase, side: Side) -> None:
    arguments = case.arguments(seed=0)
    got = side.run(side.operation(case), side.placed(case, arguments))
    assert max(case.errors(arguments, got)) <= TOLERANCE[case.dtype]


def test_op_run_writes_lines_and_versions(
    tmp_path: Path, short: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "op.json"
    line = ["gated_delta", "--sizes", "small", "--out", str(out)]
    found = op.run(op.options().parse_args(line), "the command")
    written = json.loads(out.read_text())
    assert found.found.items() <= written.items()
    assert {"revision", "date"} == written.keys() - found.found.keys()
    assert written["command"] == "the command"
    assert written["versions"].keys() == {"python", "numpy", "torch", "jax"}
    cases = [(side, case.name) for side in SIDES for case in SMALL if case.op == "gated_delta"]
    assert [(line["side"], line["case"]) for line in written["results"]] == cases
    for line in written["results"]:
        rate = written["sides"][line["side"]]["copy_gigabytes_per_s"] * 1e9
        assert line["limit_us"] == pytest.approx(line["bytes"] / rate * 1e6)
        assert line["us"] > 0
        assert line["is_right"]
    assert written["bits_equal"].keys() == {"step, three states", "verify, three trees"}
    assert capsys.readouterr().out.count("three trees") == 3


@pytest.mark.parametrize(("ops", "has_kernels"), [("plain", False), ("bound", True)])
def test_op_run_plain_uses_no_kernels(
    ops: str, has_kernels: bool, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for framework in SIDES:
        bind_kernels(monkeypatch, import_module(f"{framework}_impl.ops"), {})
    line = ["gated_delta", "--cases", "three states", "--sizes", "small", "--ops", ops]
    found = op.run(op.options().parse_args(line), "").found
    assert [bool(side["kernels"]) for side in found["sides"].values()] == [has_kernels] * 2
    assert [line["is_right"] for line in found["results"]] == [True] * 2


def test_copy_rate_measured_warm_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def timer(rounds: int) -> float:
        asked.append(rounds)
        return 5e-4 if len(asked) > 10 else 1e-3  # the clocks rise

    monkeypatch.setattr("tests.support.op_sides._cpu_copies", lambda: timer)
    monkeypatch.setattr("tests.support.op_sides.CPU_COPY_FLOATS", 1000)
    side = SIDES["torch"]()
    monkeypatch.setattr(side, "is_gpu", False)
    assert side.copy_rate() == 2 * 4 * 1000 / 5e-4
    assert set(asked[1:]) == {20}  # 0.02 s of them


@pytest.mark.parametrize("function", ["attend", "step", "attention_layer"])
def test_op_measure_detects_wrong_and_nan_results(
    function: str, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, case = SIDES["torch"](), next(case for case in SMALL if case.function == function)
    rate = side.copy_rate()
    assert op.measure(op.Inputs(side, case), {}, rate)["is_right"]
    right = side.run
    for factor in (np.float32(1 + 1e-3), np.float32(np.nan)):

        def spoiled(*given, by: np.float32 = factor) -> list[np.ndarray]:
            *others, last = right(*given)
            return [*others, last * by]

        monkeypatch.setattr(side, "run", spoiled)
        line = op.measure(op.Inputs(side, case), {}, rate)
        assert not line["is_right"]
        assert op.line_of(line).endswith("WRONG")


def test_op_run_uses_given_tiles(
    short: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bind_kernels(monkeypatch, ops := import_module("jax_impl.ops"), {})
    line = 'attention_layer --sides jax --cases two --tiles {} {"stages":7,"splits":9}'
    options = op.options().parse_args(line.split())
    seen = []

    def run(*given: object) -> list[np.ndarray]:
        tiles = ops.KERNELS.tiles.attention_layer.of(
            item_bytes=4, rows=16, requests=1, head_size=16, nodes=0
        )
        seen.append((tiles.stages, tiles.splits))
        return [np.zeros((1, 1))]

    monkeypatch.setattr(SIDES["jax"], "run", lambda self, *given: run())
    monkeypatch.setattr(op, "_seconds", lambda *given: [1.0])
    monkeypatch.setattr(OpCase, "errors", lambda *given: [0.0])
    monkeypatch.setattr(op, "_hash", lambda *given: "")
    found = op.run(options, "").found["results"]
    assert [each["case"] for each in found] == ["two trees"] * 2
    assert [each["tiles"] for each in found] == [{}, {"stages": 7, "splits": 9}]
    usual = Tiles.load("pallas_gpu", MEASURED).attention_layer.of(
        item_bytes=4, rows=16, requests=1, head_size=16, nodes=0
    )
    assert seen == [(usual.stages, usual.splits), (7, 9)]
    assert "stages 7  splits 9" in capsys.readouterr().out
    monkeypatch.setattr(ops, "KERNELS", None)
    options.tiles = options.tiles[1:]
    with pytest.raises(ValueError, match="attention_layer has no tiles on CPU"):
        op.run(options, "")


def test_recurrent_cases_name_tile_tables() -> None:
    tiles = Tiles.load("triton_gpu", MEASURED)
    recurrent = [each for name in tables() for each in table(name) if each.op == "recurrent_layer"]
    named = {(case.function, case.table_in(tiles)) for case in recurrent}
    layer = {(function, "gdn_layer") for function in ("verify", "decode", "commit")}
    assert named == layer | {("prefill", "gdn_prefill")}


def test_tile_changes_may_not_fit_other_lines() -> None:
    """Eight warps suit no tile of 96 columns, which many rows use."""
    tiles = Tiles.load("pallas_gpu", MEASURED)
    (line,) = (x for x in tiles.linear.lines if x.tiles.columns == 96 and x.tiles.warps == 4)
    linear = changed(tiles, "linear", {"warps": 8}).linear
    sizes = {"item_bytes": 2, "gated": 1, "one_segment": 1} | line.at_most
    assert linear.of(**sizes | {"rows": 1}).warps == 8
    with pytest.raises(ValueError, match="tiles of 96 columns"):
        assert linear.of(**sizes).warps


class _InThisProcess:
    """Pool of processes that works in this one."""

    def __init__(self, count: int, maxtasksperchild: int) -> None:
        self.works = []

    def __enter__(self) -> "_InThisProcess":
        return self

    def __exit__(self, *given: object) -> None:
        pass

    def starmap(self, call: Callable[..., None], works: list[tuple]) -> None:
        for work in works:
            call(*work)


def test_op_tiles_that_cannot_run_are_reported(
    short: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bind_kernels(monkeypatch, ops := import_module("torch_impl.ops"), {})
    line = 'attention_layer --sides torch --cases two --tiles {"stages":9} {"stages":7}'
    options = op.options().parse_args([*line.split(), "--compile-at-once", "2"])
    tried = []

    def run(*given: object) -> list[np.ndarray]:
        tiles = ops.KERNELS.tiles.attention_layer.lines[0].tiles
        tried.append(tiles.stages)
        if tiles.stages == 9:
            raise ValueError("out of resources")
        return [np.zeros((1, 1))]

    monkeypatch.setattr(SIDES["torch"], "run", lambda self, *given: run())
    monkeypatch.setattr(op, "_seconds", lambda *given: [1.0])
    monkeypatch.setattr(OpCase, "errors", lambda *given: [0.0])
    monkeypatch.setattr(op, "_hash", lambda *given: "")
    context = SimpleNamespace(Pool=_InThisProcess)
    monkeypatch.setattr(op.multiprocessing, "get_context", lambda how: context)
    found = op.run(options, "").found
    assert tried == [9, 7, 9, 7]  # first compiled, then timed
    assert [each["tiles"] for each in found["results"]] == [{"stages": 7}]
    assert "ValueError: out of resources" in found["faults"][0]
    assert "cannot run: torch" in capsys.readouterr().out


def test_op_run_stops_at_time_limit(short: None) -> None:
    report = op.run(
        op.options().parse_args(["attention", "--sizes", "small", "--seconds", "0"]), ""
    )
    assert not report.found["results"]
    assert len(report.found["left_out"]) == 2 * sum(case.op == "attention" for case in SMALL)


def test_op_errors_sample_rows_of_large_case(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in table("attention") if case.name == "tree")
    arguments = case.arguments(seed=1)
    rows = case.real_rows(arguments)
    (want,) = case.specified(arguments, rows)
    got = np.concatenate([want, np.zeros_like(arguments["q"][len(want) :])])
    assert case.errors(arguments, [got]) == [0]
    monkeypatch.setattr("tests.support.op_case.MOST_COMPARED", 3)
    large = replace(case, is_large=True)
    assert large.errors(arguments, [got]) == pytest.approx([0], abs=1e-6)
    seen = []
    for row in rows:
        wrong = got.copy()
        wrong[row] += 1
        seen.append(large.errors(arguments, [wrong])[0] > 1e-2)
    assert sum(seen) == 3


def test_op_errors_count_nan_of_one_side() -> None:
    case = next(case for case in SMALL if str(case) == "rank, all stopped")
    arguments = case.arguments(seed=0)
    want = case.specified(arguments, None)
    assert np.isnan(want[1]).any()
    assert case.errors(arguments, want) == [0, 0]
    for value, there in ((0, np.isnan(want[1])), (np.nan, ~np.isnan(want[1]))):
        wrong = np.where(there, np.float32(value), want[1])
        assert max(case.errors(arguments, [want[0], wrong])) == np.inf


def test_bytes_of_counts_moved_bytes() -> None:
    case = next(case for case in table("attention_layer") if case.name == "two trees")
    arguments = case.arguments(seed=0)
    positions, rows = (30 + 7) + (17 + 7), 7 + 4
    assert case.bytes_of(arguments, []) == 16 * 4 * (2 * positions * 2 + 2 * rows * (4 + 2 + 2))
    step = next(case for case in table("gated_delta") if case.function == "step")
    given = step.arguments(seed=0)
    results = [given["state"], given["v"]]
    assert step.bytes_of(given, results) == sum(x.nbytes for x in (*given.values(), *results))


def test_bytes_of_counts_planes_of_weights() -> None:
    case = next(case for case in table("linear") if str(case) == "linear_add, FP8, three rows")
    given = case.arguments(seed=0)
    rows, outputs, inputs = len(given["x"]), given["norm"].size, given["x"].shape[1]
    scales = given["weight"].scales.nbytes
    wide = rows * inputs + rows * outputs + outputs
    assert case.bytes_of(given, []) == outputs * inputs + scales + 4 * wide


def test_half_precision_case_values_are_representable() -> None:
    half = next(case for case in table("attention") if case.dtype == "bfloat16")
    bits = half.arguments(seed=0)["q"].view(np.uint32)
    assert not (bits & 0xFFFF).any()
