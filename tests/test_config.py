"""Flags are known, refused by name, or settled by the memory plan; none is silently ignored."""

import dataclasses

import pytest

from shared.backend import Work
from shared.capabilities import Setup, refusals
from shared.config import NOT_SUPPORTED, PARTS, ConfigError, parse, spelling
from shared.engine.allocator import Allocator
from shared.engine.controller import StaticController
from shared.engine.request import Request, SamplingParams
from shared.engine.scheduler import Scheduler
from shared.memory_plan import Device, plan
from tests.tiny_models import tiny_model

CPU = Device("cpu", "CPU", 8 << 30)
GPU = Device("gpu", "GPU", 80 << 30)
NEXTN = ["--speculative-algorithm", "NEXTN"]
MODEL, WEIGHTS = tiny_model("qwen3_5", 0)

REFUSED = {
    "--tp-size 2": "--tp-size is not supported",
    "--tp=2": "--tp is not supported",
    "--mem-fraction-static 0.8": "--mem-fraction-static",
    "--reasoning-parser qwen3": "--reasoning-parser",
    "--speculative-ngram-min-bfs-breadth 1": "--speculative-ngram-min-bfs-breadth",
    "--pagesize 16": "did you mean --page-size?",
    "--page 16": "--page is no flag",  # no abbreviations
    "stray": "stray belongs to no flag",
    "--port": "--port needs a value",
    "--port x": "--port must be a whole number, got x",
    "--port 1.5": "--port must be a whole number",
    "--port -1": "--port must be 0 to 65535, got -1",
    "--port 65536": "--port must be 0 to 65535",
    "--port 1 --port 2": "--port is given twice",
    "--host=": "--host is empty",
    "--page-size 0": "--page-size must be 1 to 1024",
    "--page-size 24": "--page-size must be a power of two",
    "--max-total-tokens 0": "--max-total-tokens must be 1",
    "--max-running-requests 0": "--max-running-requests must be 1",
    "--chunked-prefill-size 100": "--chunked-prefill-size must be a multiple of 64",
    "--chunked-prefill-size -1": "--chunked-prefill-size must be 64",
    "--context-length 1": "--context-length must be 2",
    "--dtype float16": "--dtype must be one of auto, float32, bfloat16",
    "--overlap 3": "--overlap must be 0 to 2",
    "--overlap 1 --disable-overlap-schedule": "--disable-overlap-schedule contradicts --overlap 1",
    "--speculative-num-steps 3": "--speculative-num-steps needs a drafter",
    "--speculative-draft-model-path x": "--speculative-draft-model-path needs a drafter",
    "--speculative-algo EAGLE3": "--speculative-algorithm EAGLE3 is not supported",
    "--speculative-algorithm NGRAM": "--speculative-algorithm NGRAM is not supported",
    "--speculative-algorithm nope": "--speculative-algorithm must be one of NEXTN",
    "--speculative-algo NEXTN --speculative-algorithm EAGLE": "is given twice",
    "--speculative-algo NEXTN --speculative-draft-model-path x": "--speculative-draft-model-path",
    "--speculative-algo NEXTN --speculative-num-steps 0": "--speculative-num-steps must be 1 to 16",
    "--speculative-algo NEXTN --speculative-num-steps 3 --speculative-num-draft-tokens 6": (
        "--speculative-num-draft-tokens 6 must be --speculative-num-steps + 1 = 4"
    ),
    "--speculative-algo NEXTN --speculative-eagle-topk 2 --speculative-num-draft-tokens 64": (
        "--speculative-num-draft-tokens must be 4 to 11"
    ),
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_wrong_command_line_is_refused_by_name_in_one_sentence(line):
    with pytest.raises(ConfigError) as refused:
        parse(line.split())
    assert REFUSED[line] in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", NOT_SUPPORTED)
def test_a_flag_of_sglang_is_refused_with_its_reason(name):
    with pytest.raises(ConfigError, match="is not supported: ") as refused:
        parse([name, "1"])
    assert str(refused.value).startswith(name)


def test_no_flag_is_both_known_and_not_supported():
    fields = {f for part in PARTS.values() for f in dataclasses.fields(part)}
    known = {spelling(f.name) for f in fields}
    known |= {alias for f in fields for alias in f.metadata.get("aliases", ())}
    assert not known & NOT_SUPPORTED.keys()


def test_every_flag_arrives_in_the_field_of_its_name():
    given = {
        "model_path": "here",
        "dtype": "bfloat16",
        "context_length": 100,
        "host": "::1",
        "port": 0,
        "served_model_name": "it",
        "page_size": 32,
        "max_total_tokens": 512,
        "max_running_requests": 3,
        "chunked_prefill_size": 128,
        "overlap": 2,
        "speculative_algorithm": "NEXTN",
        "speculative_num_steps": 5,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 6,
    }
    options = parse([word for name, v in given.items() for word in (spelling(name), str(v))])
    found = {k: v for part in PARTS for k, v in vars(getattr(options, part)).items()}
    absent = {"disable_overlap_schedule": False, "speculative_draft_model_path": None}
    assert found == given | absent


@pytest.mark.parametrize(
    ("line", "depth"),
    [("", 1), ("--overlap 0", 0), ("--overlap 2", 2), ("--disable-overlap-schedule", 0)]
    + [("--overlap 0 --disable-overlap-schedule", 0)],
)
def test_the_sync_switch_is_overlap_0(line, depth):
    assert parse(line.split()).engine.overlap_depth == depth


@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        ([], (3, 1, 4)),
        (["--speculative-num-steps", "5"], (5, 1, 6)),
        (["--speculative-num-draft-tokens", "2"], (1, 1, 2)),
    ],
)
def test_a_chain_is_known_by_its_steps_or_its_nodes(flags, shape):
    draft = parse(NEXTN + flags).speculative
    assert (draft.num_steps, draft.topk, draft.num_draft_tokens) == shape


def setup(line: list[str], model=MODEL, has_mtp: bool = True) -> Setup:
    return Setup(options=parse(line), model=model, has_mtp=has_mtp)


def test_nextn_needs_the_tensors_of_an_mtp_layer():
    plain, _ = tiny_model("qwen3", 0, with_mtp=False)
    assert refusals(setup(NEXTN)) == []
    assert "NEXTN" in refusals(setup(NEXTN, has_mtp=False))[0]
    assert "qwen3 checkpoint has none" in refusals(setup(NEXTN, model=plain, has_mtp=False))[0]


def test_all_that_blocks_a_setup_is_reported_together():
    line = [*NEXTN, "--speculative-eagle-topk", "2", "--context-length", "999999"]
    found = refusals(setup(line, has_mtp=False))
    for flag, sentence in zip(
        ("--speculative-algorithm", "--speculative-eagle-topk 2", "--context-length 999999"),
        found,
        strict=True,
    ):
        assert flag in sentence


LINES = {
    "cpu": ([], CPU),
    "cpu with few pages": (["--max-total-tokens", "512"], CPU),
    "cpu, pages of one token": (["--page-size", "1", "--overlap", "2", *NEXTN], CPU),
    "gpu": (NEXTN, GPU),
    "gpu in float32": (["--dtype", "float32", "--max-running-requests", "5"], GPU),
}


@pytest.mark.parametrize("case", LINES)
def test_the_memory_plan_counts_the_real_arrays(case):
    line, device = LINES[case]
    memory = plan(parse(line), MODEL, device)
    limits, sizes = memory.limits, {x.name: x.num_bytes for x in memory.lines}
    item = 4 if memory.options.model.dtype == "float32" else 2
    positions = limits.num_pages * limits.page_size
    row_bytes = 2 * MODEL.num_kv_heads * MODEL.head_size * item
    assert sizes["KV"] == MODEL.num_attention_layers * positions * row_bytes
    assert sizes.get("draft KV", 0) == ("NEXTN" in line) * positions * row_bytes
    assert sizes["seen"] == limits.num_slots * MODEL.vocab * 4
    weights = {n: w for n, w in WEIGHTS.items() if "NEXTN" in line or not n.startswith("mtp.")}
    kept = ("gated_delta.a_log", "gated_delta.dt_bias")
    assert sizes["weights"] == sum(
        w.size * (4 if name in kept else item) for name, w in weights.items()
    )
    assert memory.total_bytes == sum(sizes.values()) <= device.free_bytes


@pytest.mark.parametrize("case", LINES)
def test_nothing_is_left_open_and_every_row_has_its_program(case):
    line, device = LINES[case]
    memory = plan(parse(line), MODEL, device)
    options, limits = memory.options, memory.limits
    assert None not in vars(options.engine).values()
    assert options.model.dtype != "auto"
    assert limits.num_slots == options.engine.max_running_requests + 1
    tables = {p.pages for p in limits.programs}
    for work, batch in ((Work.DECODE, limits.num_slots - 1), (Work.PREFILL, 1)):
        assert {p.pages for p in limits.programs if p.work is work and p.batch == batch} == tables
    reserved = limits.num_pages_for(limits.max_positions)
    assert max(tables) == min(reserved, limits.num_pages - 1)
    assert limits.max_depth == (3 if "NEXTN" in line else 0)


@pytest.mark.parametrize("case", LINES)
def test_the_longest_request_of_the_plan_is_the_longest_that_the_scheduler_takes(case):
    line, device = LINES[case]
    memory = plan(parse(line), MODEL, device)
    limits, most = memory.limits, memory.max_request_tokens
    plain = StaticController(limits, nodes=1, depth=0, width=0)
    chunk = memory.options.engine.chunked_prefill_size
    scheduler = Scheduler(
        limits, Allocator(limits), plain, overlap=limits.overlap, chunked_prefill_size=chunk
    )
    longest = Request(request_id=1, prompt=(2,), sampling=SamplingParams(max_tokens=most - 1))
    scheduler.add(longest)
    if most < limits.context_length:
        longer = Request(request_id=2, prompt=(2,), sampling=SamplingParams(max_tokens=most))
        with pytest.raises(ValueError, match="pages"):
            scheduler.add(longer)


@pytest.mark.parametrize(
    ("line", "device", "flag"),
    [
        (["--max-total-tokens", "4"], CPU, "--max-total-tokens 4 has no room"),
        (["--max-total-tokens", str(1 << 30)], CPU, "lower --max-total-tokens"),
        ([], Device("gpu", "GPU", 1000), "--max-running-requests"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_the_way_out(line, device, flag):
    with pytest.raises(ConfigError, match=flag):
        plan(parse(line), MODEL, device)


def test_a_gpu_takes_what_is_free_and_no_more():
    small = Device("gpu", "GPU", 300 << 20)
    memory = plan(parse(["--context-length", "2048"]), MODEL, small)
    assert memory.total_bytes <= small.free_bytes
    assert memory.total_bytes > small.free_bytes // 2
