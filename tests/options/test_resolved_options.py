"""Memory plan: resolved options, bytes of the real arrays, and the limits of the device."""

import pytest

from shared.boundary.program import ProgramFeature, StepKind
from shared.drafts.drafter_spec import DrafterSpec
from shared.engine.adapter_slots import AdapterSlots
from shared.engine.allocator import Allocator
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.prefix_cache import PrefixCache
from shared.engine.request import Request, SamplingParams
from shared.engine.scheduler import Scheduler
from shared.options.command_line import parse
from shared.options.flags import ConfigError
from shared.process.caching import cache_policy
from shared.process.device import Device
from shared.process.memory_plan import plan
from tests.support.serve_reference import PLATFORM
from tests.support.tiny_heads import tiny_head
from tests.support.tiny_models import tiny_model

CPU = Device("cpu", "CPU", 8 << 30)
GPU = Device("gpu", "GPU", 80 << 30)
NEXTN = ["--speculative-algorithm", "NEXTN"]
COSTS = PLATFORM.costs
MODEL, WEIGHTS = tiny_model("qwen3_5", 0)
DRAFT_HEAD = tiny_head(MODEL, WEIGHTS, "EAGLE3", 0)


EAGLE3 = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "there"]
NGRAM = ["--speculative-algorithm", "NGRAM"]
NODES_6 = ["--speculative-num-draft-tokens", "6"]

LINES = {
    "cpu": ([], CPU),
    "cpu with few pages": (["--max-total-tokens", "512"], CPU),
    "cpu with one-token pages": (["--page-size", "1", "--overlap-depth", "2", *NEXTN], CPU),
    "cpu with draft head": (EAGLE3, CPU),
    "cpu with draft tree": ([*NEXTN, "--speculative-eagle-topk", "2", *NODES_6], CPU),
    "cpu with host drafts": ([*NGRAM, "--speculative-ngram-backend", "host"], CPU),
    "gpu": (NEXTN, GPU),
    "gpu in float32": (["--dtype", "float32", "--max-running-requests", "5"], GPU),
}


def planned(case):
    """Returns the memory plan and the device of a case of `LINES`."""
    line, device = LINES[case]
    drafts = DrafterSpec.of_mtp(MODEL) if "NEXTN" in line else DrafterSpec.none()
    if "EAGLE3" in line:
        drafts = DrafterSpec.of_head(DRAFT_HEAD.config)
    return plan(parse(line), MODEL, drafts, device, COSTS), device


@pytest.mark.parametrize("case", LINES)
def test_memory_plan_equals_array_bytes(case):
    memory, device = planned(case)
    line = LINES[case][0]
    capacity, sizes = memory.capacity, {x.name: x.num_bytes for x in memory.lines}
    item = 4 if memory.settled.dtype == "float32" else 2
    positions = capacity.num_pages * capacity.page_size
    row_bytes = 2 * MODEL.attention.num_kv_heads * MODEL.attention.head_size * item
    assert sizes["KV"] == len(MODEL.kv_pools[0]) * positions * row_bytes
    head = DRAFT_HEAD.config.layer
    head_bytes = 2 * head.attention.num_kv_heads * head.attention.head_size * item
    draft_bytes = {"NEXTN": row_bytes, "EAGLE3": head_bytes}
    expected = sum(size for name, size in draft_bytes.items() if name in line)
    assert sizes.get("draft KV", 0) == expected * positions

    def bytes_of(weights):
        kept = ("a_log", "dt_bias", "norm", "draft_ids")  # float32 for every dtype of the model
        return sum(w.size * (4 if name.endswith(kept) else item) for name, w in weights.items())

    draft_weights = bytes_of(DRAFT_HEAD.weights)
    assert sizes.get("draft weights", 0) == ("EAGLE3" in line) * draft_weights
    relay = (4 + 4) * capacity.max_width + item * MODEL.hidden
    has_relay = "NEXTN" in line or "EAGLE3" in line
    assert sizes["draft inputs"] == capacity.num_slots * (has_relay * relay + 3 * 4)
    assert sizes["token counts"] == capacity.num_slots * MODEL.vocab * 4
    weights = {n: w for n, w in WEIGHTS.items() if "NEXTN" in line or not n.startswith("mtp.")}
    assert sizes["weights"] == bytes_of(weights)
    assert memory.total_bytes == sum(sizes.values()) <= device.free_bytes


@pytest.mark.parametrize("case", LINES)
def test_resolved_config_is_complete_with_all_programs(case):
    memory, _ = planned(case)
    settled, capacity, drafts = memory.settled, memory.capacity, memory.settled.draft.drafts
    assert None not in vars(settled).values()
    assert settled.dtype != "auto"
    assert capacity.num_slots == settled.max_running_requests + 1
    tables = {p.pages for p in capacity.programs}
    for work, batch in ((StepKind.DECODE, capacity.num_slots - 1), (StepKind.PREFILL, 1)):
        assert {p.pages for p in capacity.programs if p.work is work and p.batch == batch} == tables
    reserved = capacity.num_pages_for(capacity.max_positions)
    assert max(tables) == min(reserved, capacity.num_pages - 1)
    assert capacity.max_depth == (settled.draft.num_steps if drafts else 0)
    counts = [program for program in capacity.programs if program.work is StepKind.COUNT]
    assert [(count.batch, count.pages, count.has(ProgramFeature.LOGPROBS)) for count in counts] == [
        (1, max(tables), False)
    ]
    for program in set(capacity.programs) - set(counts):
        other = {ProgramFeature.LOGPROBS: not program.has(ProgramFeature.LOGPROBS)}
        assert program.with_features(other) in capacity.programs
        drafted = program.work is StepKind.DECODE and not program.shape.is_plain
        assert not drafted or program.shape.rows == program.batch * program.shape.nodes
    decodes = {p.shape.nodes for p in capacity.programs if p.work is StepKind.DECODE}
    # A step with host drafts may have no drafts; a device drafter always drafts a tree.
    is_plain = not drafts or settled.draft.drafts_on_host
    trees = {settled.draft.num_draft_tokens} if drafts else set()
    assert decodes == trees | ({1} if is_plain else set())


@pytest.mark.parametrize("case", LINES)
def test_max_request_tokens_equals_scheduler_limit(case):
    memory, _ = planned(case)
    capacity, most = memory.capacity, memory.max_request_tokens
    one = next(p.shape for p in capacity.programs if p.work is StepKind.DECODE)
    drafting = StaticController(capacity, nodes=one.nodes, depth=one.depth, width=one.width)
    chunk = memory.settled.prefill_chunk_size
    allocator = Allocator(capacity)
    cache = PrefixCache(capacity, allocator, NO_CACHE, capacity.overlap)
    scheduler = Scheduler(
        capacity,
        allocator,
        cache,
        drafting,
        None,
        AdapterSlots(capacity),
        overlap=capacity.overlap,
        chunked_prefill_size=chunk,
    )
    longest = Request(request_id=1, prompt=(2,), sampling=SamplingParams(max_tokens=most - 1))
    scheduler.add(longest)
    if most < capacity.context_length:
        longer = Request(request_id=2, prompt=(2,), sampling=SamplingParams(max_tokens=most))
        with pytest.raises(ValueError, match="pages"):
            scheduler.add(longer)


CAPACITY = ["--speculative-ngram-capacity", "268435456"]


@pytest.mark.parametrize(
    ("line", "device", "flag"),
    [
        (["--max-total-tokens", "4"], CPU, "--max-total-tokens 4 is too small"),
        (["--max-total-tokens", str(1 << 30)], CPU, "lower --max-total-tokens"),
        ([], Device("gpu", "GPU", 1000), "lower --max-running-requests"),
        (
            ["--mem-fraction-static", "0.01", "--max-total-tokens", "262144"],
            CPU,
            r"may use 85,899,345 \(--mem-fraction-static 0.01 of the free memory of the CPU\)",
        ),
        (
            [*NGRAM, "--speculative-ngram-backend", "host", *CAPACITY],
            CPU,
            r"for n-grams \(12,884,901,888\).*; lower --speculative-ngram-capacity, or lower",
        ),
        (
            [*NGRAM, *CAPACITY],
            Device("gpu", "GPU", 2 << 30),
            r"for n-grams \(3,221,.*; lower --speculative-ngram-capacity, or lower",
        ),
    ],
)
def test_memory_plan_too_large_raises_with_hint(line, device, flag):
    with pytest.raises(ConfigError, match=flag):
        plan(parse(line), MODEL, DrafterSpec.none(), device, COSTS)


def test_memory_plan_fits_free_gpu_memory():
    small = Device("gpu", "GPU", 300 << 20)
    memory = plan(parse(["--context-length", "2048"]), MODEL, DrafterSpec.none(), small, COSTS)
    assert memory.total_bytes <= small.free_bytes
    assert memory.total_bytes > small.free_bytes // 2


@pytest.mark.parametrize(("copies", "interval"), [(31, 64), (32, 128)])
def test_track_interval_covers_ngram_draft_tokens(copies, interval):
    """Two steps may add 33 tokens each, because one path may consist of n-gram drafts alone."""
    line = ["--speculative-algorithm", "NEXTN+NGRAM"]
    line += ["--speculative-ngram-num-draft-tokens", str(copies)]
    planned = plan(parse(line), MODEL, DrafterSpec.of_mtp(MODEL), CPU, COSTS)
    assert cache_policy(planned).track_interval == interval
