"""Offline benchmark: timing, counts, and comparison of outputs."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.common.draft_config import Draft, folders_of
from bench.common.session import Round
from bench.common.step_bytes import step_bytes, step_products
from bench.steps import compare, decode_steps
from bench.steps.decode_steps import with_lot
from bench.steps.report import Report, compared, kernels_of
from shared.boundary.backend import BackendSpec
from shared.drafts.config import DraftConfig
from shared.drafts.drafter_spec import DrafterSpec
from shared.models.config import ModelConfig
from shared.models.families import config_from_folder
from shared.models.formats.fp8 import Granularity
from shared.models.formats.fp8_w8a16 import FP8W8A16
from shared.models.parameters import parameters
from shared.spec.draft_tree import TreeShape
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
SHAPES = ROOT / "bench" / "shapes"
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
    return decode_steps.run(decode_steps.options().parse_args(line), "the command")


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
    assert {each["drafts"] for each in found["refused"]} == {"EAGLE S=1"}
    plain, remembering = (
        [each["accept_length"] for each in found["lines"] if each["drafts"] == name]
        for name in ("none", "NGRAM N=3")
    )
    assert set(plain) == {1}
    assert min(remembering) > 1.2  # it has seen the text in the round before
    told = capsys.readouterr().out
    assert told.count("equal") == 4
    assert "unsupported: torch, EAGLE S=1" in told


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


# Bytes


def blueprint_of(drafts: DrafterSpec, config: ModelConfig) -> BackendSpec:
    capacity = SimpleNamespace()
    return BackendSpec(
        config=config, drafts=drafts, capacity=capacity, dtype="bfloat16", on_gpu=True
    )


def test_step_bytes_of_qwen3_8b():
    config = config_from_folder(SHAPES / "qwen3-8b")
    plain, chain = TreeShape.plain(8), TreeShape.chain(3, 8)
    found = step_bytes(blueprint_of(DrafterSpec.none(), config), plain, 8, 500)
    kv = 8 * 500 * 36 * 2 * 8 * 128 * 2
    assert found - kv == pytest.approx(2 * 7.568e9, rel=1e-3)  # 8.19 less the embedding
    head = DraftConfig.from_folder(SHAPES / "qwen3-8b-eagle3", config)
    more = step_bytes(blueprint_of(DrafterSpec.of_head(head), config), chain, 8, 500) - found
    layer = 3 * 4096 * 12288 + 4096 * (2 * 6144 + 4096) + 4096 * 3 * 4096
    norms = 4 * 4 * 4096  # in float32
    assert more == 3 * (2 * (layer + 32000 * 4096) + norms + 8 * 500 * 2 * 8 * 128 * 2)


def test_step_bounds_of_latent_rows_per_position():
    config = config_from_folder(SHAPES / "glm-4.7-flash")
    made, plain = blueprint_of(DrafterSpec.none(), config), TreeShape.plain(8)
    more = [of(made, plain, 8, 500) - of(made, plain, 8, 0) for of in (step_bytes, step_products)]
    assert more == [8 * 500 * 47 * 2 * 576, 8 * 500 * 47 * 20 * (576 + 512)]


def test_step_bytes_read_latent_mtp_layer_each_pass():
    config = config_from_folder(SHAPES / "glm-4.7-flash")
    chain, drafters = TreeShape.chain(3, 1), (DrafterSpec.none(), DrafterSpec.of_mtp(config))
    without, found = (step_bytes(blueprint_of(x, config), chain, 1, 500) for x in drafters)
    attention = 1344 * 2048 + 5120 * 768 + 20 * 448 * 512 + 2048 * 5120
    experts = 64 * 2048 + (4 + 1) * 3 * 1536 * 2048
    weights = attention + experts + 2048 * 4096 + 154880 * 2048
    assert found - without == pytest.approx(3 * (2 * weights + 500 * 1152), rel=1e-4)


def test_step_products_of_qwen3_8b():
    config = config_from_folder(SHAPES / "qwen3-8b")
    plain, chain = TreeShape.plain(8), TreeShape.chain(3, 8)
    found = step_products(blueprint_of(DrafterSpec.none(), config), plain, 8, 500)
    attended = 2 * 8 * 500 * 36 * 32 * 128
    assert found - attended == pytest.approx(8 * 7.568e9, rel=1e-3)
    head = DraftConfig.from_folder(SHAPES / "qwen3-8b-eagle3", config)
    more = step_products(blueprint_of(DrafterSpec.of_head(head), config), chain, 8, 500) - 4 * found
    layer = 3 * 4096 * 12288 + 4096 * (2 * 6144 + 4096) + 4096 * 3 * 4096
    assert more == 3 * 8 * (layer + 32000 * 4096 + 2 * 500 * 32 * 128)
    block = DraftConfig.from_folder(SHAPES / "qwen3-8b-dflash", config)
    of_block, rows = blueprint_of(DrafterSpec.of_head(block), config), TreeShape.chain(15, 1)
    more = step_products(of_block, rows, 1, 0) - 16 * step_products(of_block, plain, 1, 0)
    assert more == pytest.approx(16 * (1.05e9 + config.vocab * config.hidden), rel=0.01)


def test_step_products_count_chosen_experts_and_tied_head():
    config = config_from_folder(ROOT / "tests" / "golden" / "glm4_moe")  # 8 of width 8, 3 chosen
    plain = TreeShape.plain(1)
    dense = [p for p in parameters(config, False) if p.shape[p.stacked :][1:]]
    weights = sum(prod(p.shape) for p in dense if p.name != "embed")
    weights -= 2 * 5 * (16 * 32 + 32 * 8)  # the experts that a row does not choose
    assert step_products(blueprint_of(DrafterSpec.none(), config), plain, 7, 0) == 7 * weights
    tied = config_from_folder(SHAPES / "qwen3-0.6b")
    found = step_products(blueprint_of(DrafterSpec.none(), tied), plain, 1, 0)
    assert found == pytest.approx(0.596e9, rel=0.01)


def test_step_bytes_count_expected_distinct_experts():
    config = config_from_folder(ROOT / "tests" / "golden" / "glm4_moe")  # 8 of width 8, 3 chosen
    plain = TreeShape.plain(1)
    one, all_of_them = (
        step_bytes(blueprint_of(DrafterSpec.none(), config), plain, batch, 0) for batch in (1, 1000)
    )
    expert = 2 * 3 * 8 * 32 * 2  # in both sparse layers
    assert all_of_them - one == 5 * expert
    two = step_bytes(blueprint_of(DrafterSpec.none(), config), plain, 2, 0)
    assert two - one == pytest.approx((8 * (1 - (5 / 8) ** 2) - 3) * expert, rel=0.01)


def test_step_bytes_of_w8a16_count_codes_and_scales():
    config = config_from_folder(SHAPES / "qwen3-30b-a3b-fp8")
    wide, plain = blueprint_of(DrafterSpec.none(), config), TreeShape.plain(1)
    format = FP8W8A16(Granularity.BLOCK)
    formats = dict.fromkeys(("experts.gate_up", "experts.down"), format)
    found = [step_bytes(replace(wide, formats=each), plain, 1, 0) for each in ({}, formats)]
    weights = 48 * 8 * 3 * 768 * 2048  # of the experts that a row chooses
    assert found[0] - found[1] == pytest.approx(weights * (1 - 2 / 128**2), rel=1e-6)


def test_step_bytes_of_block_head_read_once():
    config = config_from_folder(SHAPES / "qwen3-8b")
    head = DraftConfig.from_folder(SHAPES / "qwen3-8b-dflash", config)
    of_head = blueprint_of(DrafterSpec.of_head(head), config)
    plain, chain = TreeShape.plain(1), TreeShape.chain(15, 1)
    more = step_bytes(of_head, chain, 1, 0) - step_bytes(of_head, plain, 1, 0)
    assert more == pytest.approx(2 * (1.05e9 + config.vocab * config.hidden), rel=0.01)


def test_step_bytes_of_dspark_scale_with_drafts():
    config = config_from_folder(SHAPES / "qwen3-8b")
    heads = (
        DraftConfig.from_folder(SHAPES / f"qwen3-8b-{x}", config) for x in ("dflash", "dspark")
    )
    block, marked = (
        step_bytes(blueprint_of(DrafterSpec.of_head(head), config), TreeShape.chain(7, 1), 1, 0)
        for head in heads
    )
    assert marked - block == pytest.approx(2 * 7 * config.vocab * 256, rel=0.001)


def test_step_bytes_of_replay_move_states_once_more():
    config = config_from_folder(SHAPES / "qwen3.5-0.8b")
    of_mtp = blueprint_of(DrafterSpec.of_mtp(config), config)
    of_host = replace(of_mtp, drafts=DrafterSpec.none())
    plain, chain = TreeShape.plain(4), TreeShape.chain(3, 4)
    state = 4 * 18 * 16 * 128 * 128 * 4
    assert step_bytes(of_host, chain, 4, 0) - step_bytes(of_host, plain, 4, 0) == state
    mtp = step_bytes(of_mtp, chain, 4, 0) - step_bytes(of_host, chain, 4, 0)
    assert mtp > 3 * 2 * config.vocab * config.hidden


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
import bench.steps.decode_steps, bench.steps.kv_transfer, torch_impl.platform, jax_impl.platform
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
