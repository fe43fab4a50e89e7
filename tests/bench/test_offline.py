"""Offline benchmark: timing, counts, and comparison of outputs."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.common.draft_config import Draft, folders_of
from bench.common.session import Round
from bench.steps import compare, decode_steps
from bench.steps.decode_steps import with_lot
from bench.steps.report import Report, compared, kernels_of
from tests.support.gpu_activity import Activity, spans_of_chrome, spans_of_planes
from tests.support.in_process_engine import Served
from tests.support.tiny_heads import (
    tiny_block_config,
    tiny_head_config,
    tiny_pair_config,
    tiny_spark_config,
)
from tests.support.tiny_models import tiny_config, tiny_model

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["--input", "10", "--output", "40", "--steps", "4", "--dtype", "float32"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config.json, next to the folders of its heads."""
    folder, target = tmp_path_factory.mktemp("shapes"), tiny_model("qwen3_5", 0)[0]
    given = {
        "tiny": tiny_config("qwen3_5", nested=False, with_mtp=True, tied=False),
        "tiny-eagle3": tiny_head_config(target, "EAGLE3"),
        "dflash": tiny_block_config(target),
        "dspark": tiny_spark_config(target),
        "dflash2": tiny_pair_config(target),
    }
    for name, config in given.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder / "tiny"


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.support.op_sides.CPU_COPY_FLOATS", 2**16)
        yield


def run(model: Path, *more: str) -> Report:
    line = ["--model", str(model), *SHORT, "--rounds", "2", *more]
    [report] = decode_steps.run(decode_steps.options().parse_args(line), ["python", *line])
    return report


@pytest.fixture(scope="module")
def both(model: Path, quick_jax: None) -> Report:
    line = ["--backend", "jax", "torch", "--batch", "1", "--drafts", "none"]
    return run(model, *line, "--flags", "--chunked-prefill-size 64")


def test_report_lines_are_timed_printed_and_written(model, tmp_path, capsys):
    out = tmp_path / "found.json"
    drafts = ["none", "EAGLE3:S=2", "NGRAM:N=3", "EAGLE:S=1"]
    line = ["--backend", "torch", "--batch", "2", "--temperature", "0", "0.8", "--output", "24"]
    report = run(model, *line, "--top-p", "0.9", "--drafts", *drafts, "--out", str(out))
    found = json.loads(out.read_text())
    assert json.loads(json.dumps(report.found)).items() <= found.items()
    assert {"revision", "date"} == found.keys() - report.found.keys()
    assert len(found["lines"]) == 3 * 2
    for each in found["lines"]:
        assert 0 < each["ms_low"] <= each["ms"] <= each["ms_high"]
        assert each["share_of_limit"] == pytest.approx(each["limit_ms"] / each["ms"], abs=1e-3)
        both = each["limit_ms"] + each["products_ms"]
        assert each["share_of_both"] == pytest.approx(both / each["ms"], abs=1e-3)
        assert each["card"] == {}
        assert each["top_p"] == (0.9 if each["temperature"] else 1.0)
        assert each["accept_length"] >= 1
        assert each["tokens_per_s"] > 0
        assert each["rounds_are_equal"]
        assert each["programs_made_while_timed"] == 0
        assert each["planned_bytes"] > 0 < each["peak_bytes"]
        assert each["trace"] is None  # a CPU has no kernels
        assert each["texts"] is None or each["texts"]["equal"]
        assert each["simulated_accept_length"] is None
        if each["temperature"]:
            greedy = next(x for x in found["lines"] if x["drafts"] == each["drafts"])
            assert each["over_greedy"] == pytest.approx(each["ms"] / greedy["ms"] - 1, abs=1e-4)
    assert {each["drafts"] for each in found["refused"]} == {"EAGLE S=1"}
    plain, remembering = (
        [each["accept_length"] for each in found["lines"] if each["drafts"] == name]
        for name in ("none", "NGRAM N=3")
    )
    assert set(plain) == {1}
    assert min(remembering) > 1.2  # it has seen the text in the round before
    printed = capsys.readouterr().out
    assert printed.count("equal") == 4
    assert printed.count("over greedy") == 3
    assert "unsupported: torch, EAGLE S=1" in printed


@pytest.mark.parametrize(
    ("at_once", "backends"),
    [("1", ["torch"]), pytest.param("4", ["torch", "jax"], marks=pytest.mark.matrix)],
)
def test_adapters_compared_with_base(at_once, backends, model, capsys):
    line = ["--backend", *backends, "--batch", "2", "--drafts", "none", "--at-once", at_once]
    report = run(model, *line, "--adapters", "0", "1", "8", "--lora-rank", "16", "32")
    assert not report.found["refused"]
    lines, printed = report.found["lines"], capsys.readouterr().out
    found = [(each["lora_rank"], each["backend"], each["adapters"]) for each in lines]
    assert found == [*product((16, 32), backends, (0, 1, 2))]
    for first in range(0, len(lines), 3):
        base, *adapted = lines[first : first + 3]
        assert "over_base" not in base
        for each in adapted:
            assert each["over_base"] == pytest.approx(each["ms"] / base["ms"] - 1, abs=1e-3)
            assert each["limit_ms"] > base["limit_ms"]
    assert printed.count("over base") == 4 * len(backends)
    assert printed.count("2 adapters of rank 32") == len(backends)
    # Five texts are different: the base model's, and one for each rank and number of adapters.
    assert sum(each["texts"] is not None for each in lines) == len(lines) - 5
    assert not report.has_other_texts


@pytest.mark.matrix
def test_simulate_accept_length_recorded_in_line(model, capsys):
    drafts = ["none", "EAGLE3:S=3,L=1", "EAGLE3:S=3"]
    line = ["--backend", "torch", "--batch", "2", "--accept-length", "2.5", "--output", "64"]
    lines = run(model, *line, "--drafts", *drafts).found["lines"]
    assert [each["simulated_accept_length"] for each in lines] == [None, 1, 2.5]
    assert lines[0]["accept_length"] == lines[1]["accept_length"] == 1
    assert 2 < lines[2]["accept_length"] <= 3
    assert lines[1]["texts"]["equal"]  # as plain
    assert lines[2]["texts"] is None
    assert "simulated 2.5" in capsys.readouterr().out


def test_backends_outputs_compared(both):
    assert [each["backend"] for each in both.found["lines"]] == ["torch", "jax"]
    assert both.found["lines"][1]["texts"] == {
        "equal": True,
        "texts_that_differ": 0,
        "tokens": 40,
        "tokens_before_a_difference": 40,
    }
    assert not both.has_other_texts


def test_parallel_starts_equal_sequential_starts(model, capsys):
    line = ["--backend", "torch", "--batch", "1", "--drafts", "none", "NEXTN:S=1", "EAGLE:S=1"]
    alone, report = run(model, *line), run(model, *line, "--at-once", "3")
    told = [
        [(each["drafts"], each["texts"], each["planned_bytes"]) for each in found["lines"]]
        for found in (alone.found, report.found)
    ]
    assert told[0] == told[1]
    assert [x[1] is None or x[1]["equal"] for x in told[1]] == [True, True]
    assert report.found["refused"] == alone.found["refused"]
    assert len(report.found["refused"]) == 1
    assert report.found["sides"]["torch"]["kernels"] == alone.found["sides"]["torch"]["kernels"]


def test_several_models_write_own_files(model, tmp_path, capsys):
    other = tmp_path / "other-0.1"
    shutil.copytree(model, other)
    line = ["--model", str(model), str(other), *SHORT, "--rounds", "1", "--backend", "torch"]
    line += ["--batch", "1", "--drafts", "none", "--at-once", "2", "--out"]

    def served(out: Path) -> list[Report]:
        words = [*line, str(out)]
        return decode_steps.run(decode_steps.options().parse_args(words), ["python", *words])

    with pytest.raises(ValueError, match=r"--out contains \{model\}"):
        served(tmp_path / "both.json")
    reports = served(tmp_path / "of_{model}.json")
    for name, own, foreign, report in zip(
        ("tiny", "other_0_1"), (model, other), (other, model), reports, strict=True
    ):
        out = tmp_path / f"of_{name}.json"
        found = json.loads(out.read_text())
        assert found["lines"] == report.found["lines"]
        assert len(found["lines"]) == 1
        assert not found["refused"]
        words = found["command"].split()
        assert words[words.index("--model") + 1 :][:2] == [str(own), SHORT[0]]
        assert words[-1] == str(out)
        assert str(foreign) not in words
    printed = capsys.readouterr().out
    assert "tiny: torch none" in printed
    assert "other-0.1: torch none" in printed


def test_report_detects_unequal_outputs(both):
    report, line = Report("", None), dict(both.found["lines"][0])
    report.add(line, [[1, 2, 3]], True)
    report.add(line | {"drafts": "NEXTN"}, [[1, 2, 3]], True)
    assert not report.has_other_texts
    report.add(line | {"drafts": "EAGLE3 L=2"}, [[9, 9, 9]], False)  # may differ from plain
    assert not report.has_other_texts
    report.add(line | {"drafts": "EAGLE3 L=2", "backend": "jax"}, [[9, 8, 9]], False)
    assert report.has_other_texts
    assert compared([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == {
        "equal": False,
        "texts_that_differ": 1,
        "tokens": 4,
        "tokens_before_a_difference": 3,
    }


def test_too_few_output_steps_raise_error(model):
    report = run(model, "--backend", "torch", "--batch", "1", "--steps", "50")
    assert "raise --output" in report.found["refused"][0]["error"]


@pytest.mark.matrix
def test_compare_alternates_sides_and_reports_ratio(model, tmp_path):
    line = ["--model", str(model), *SHORT, "--turns", "3", "--batch", "2", "--accept-length", "2"]
    sides = ["--a", "torch none", "--b", "torch EAGLE3:S=2 --overlap-depth 0"]
    found = compare.run(compare.options().parse_args([*line, *sides]))
    assert [found[name]["side"] for name in "ab"] == [
        "torch none",
        "torch EAGLE3:S=2 --overlap-depth 0",
    ]
    assert [found[name]["overlap"] for name in "ab"] == [1, 0]
    assert [found[name]["simulated_accept_length"] for name in "ab"] == [None, 2]
    assert found["b"]["accept_length"] == 2
    ratio = found["b_to_a"]["ms"]
    turns = [b["ms"] / a["ms"] for a, b in zip(*(found[n]["turns"] for n in "ab"), strict=True)]
    assert len(turns) == 3
    assert (ratio["low"], ratio["high"]) == (min(turns), max(turns))
    assert ratio["low"] <= ratio["median"] <= ratio["high"]
    assert "simulated 2" in compare.table_of(found)
    json.dumps(found)


@pytest.mark.parametrize("side", ["", "torch", "cuda none"])
def test_compare_rejects_side_without_backend_or_drafter(side, model):
    line = ["--model", str(model), "--a", side, "--b", "torch none"]
    with pytest.raises(ValueError, match="--a is BACKEND DRAFTS"):
        compare.run(compare.options().parse_args(line))


def test_simulated_acceptance_added_only_without_own_setting():
    assert with_lot(Draft.parse("none"), "2") == Draft.parse("none")
    assert with_lot(Draft.parse("NEXTN:L=3"), "2") == Draft.parse("NEXTN:L=3")
    lot = ["--speculative-simulate-accept-length", "0.9,0.5"]
    assert with_lot(Draft.parse("NEXTN"), "0.9,0.5").flags({})[-2:] == lot


def test_folders_of_finds_heads_by_model_name(model):
    named = Path("elsewhere")
    folders = folders_of(model, {"STANDALONE": named})
    assert folders["EAGLE3"] == model.parent / "tiny-eagle3"
    assert folders["DFLASH"] == model.parent / "dflash"
    assert folders["DSPARK"] == model.parent / "dspark"
    assert folders["STANDALONE"] == named


def test_blocks_ignore_incomplete_remainder():
    served = Round([], 0.0, [0.001, 0.003, 0.002, 0.002, 9.0], 5)
    assert served.blocks(2) == pytest.approx([2.0, 2.0])


# Traces


def test_activity_of_overlapping_kernels_counts_once():
    few = Activity.of([("gemm", 0.0, 2.0), ("norm", 1.0, 3.0), ("Memcpy HtoD", 5.0, 6.0)])
    by_name = {"gemm": (1, 2.0), "norm": (1, 1.0), "Memcpy HtoD": (1, 1.0)}
    assert few == Activity(2, 1, 4.0, by_name)
    many = Activity.of([("gemm", i, i + 0.5) for i in range(12)])
    step = many.per_step(few, 5)
    assert step == Activity(2.0, -0.2, 0.4, {"gemm": (2.2, 0.8)})


def test_activity_longest_sorts_by_total_time():
    spans = [("short", 0.0, 0.1), ("long", 1.0, 3.0), ("often", 4.0, 4.5), ("often", 5.0, 5.5)]
    found = Activity.of(spans)
    assert list(found.longest(2)) == ["long", "often"]
    longest = found.longest(2)
    assert kernels_of(longest) == [
        "      2000.0 us     1.0 x  long",
        "      1000.0 us     2.0 x  often",
    ]
    assert kernels_of({}) == []


def test_spans_include_device_events_only():
    events = [
        {"name": "k", "cat": "kernel", "ts": 1000, "dur": 500, "args": {"grid": [8, 2, 1]}},
        {"name": "Memset", "cat": "gpu_memset", "ts": 3000, "dur": 100},
        {"name": "cudaGraphLaunch", "cat": "cuda_runtime", "ts": 0, "dur": 9000},
        {"name": "process_name", "ph": "M"},
    ]
    assert spans_of_chrome({"traceEvents": events}) == [
        ("k [8 2 1]", 1, 1.5),
        ("Memset", 3, 3.1),
    ]

    def line(name: str) -> SimpleNamespace:
        stats = [("stream", 13), ("kernel_details", "regs:9 grid:8,2,1 block:128,1,1")]
        event = SimpleNamespace(name="k", start_ns=1e6, duration_ns=5e5, stats=stats)
        return SimpleNamespace(name=name, events=[event])

    planes = [
        SimpleNamespace(name="/device:GPU:0", lines=[line("Stream #13(Compute)"), line("XLA Ops")]),
        SimpleNamespace(name="/host:CPU", lines=[line("Stream of thoughts")]),
    ]
    assert spans_of_planes(planes) == [("k [8 2 1]", 1.0, 1.5)]


NOT_THERE = (
    "fastapi",
    "starlette",
    "uvicorn",
    "pydantic",
    "pydantic_core",
    "msgspec",
    "beartype",
    "httpx",
    "lark",
    "llguidance",
)


def test_benches_import_without_server_libraries():
    program = f"""
import sys

class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {NOT_THERE}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Nowhere())
import bench.kernels.aot_target, bench.kernels.gpu_starts, bench.steps.compare
import bench.steps.adapter_load, bench.steps.decode_steps, bench.steps.kv_transfer
import torch_impl.platform, jax_impl.platform
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("rule", "rates", "greedy", "sampled"),
    [
        ("exact", None, True, True),
        ("exact", (0.0,), True, True),
        ("exact", (0.5,), False, False),
        ("rejection", None, True, False),
    ],
)
def test_text_comparison_skipped_for_simulated_acceptance(rule, rates, greedy, sampled):
    capacity = SimpleNamespace(accept_rule=rule, accept_rates=rates)
    served = SimpleNamespace(backend=SimpleNamespace(capacity=capacity))
    kept = [Served.keeps_text_at(served, temperature) for temperature in (0.0, 0.8)]
    assert kept == [greedy, sampled]
