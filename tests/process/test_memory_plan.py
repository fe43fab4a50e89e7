"""Memory plans of real models on simulated GPUs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from jax_impl import serve
from kernels.peer_buffers import BLOCK_BYTES, symmetric_buffer_bytes
from shared.boundary.backend import HostDraft
from shared.boundary.program import ProgramFeature, StepKind
from shared.boundary.shm_allgather import ShmAllGather
from shared.boundary.tp_group import TPGroup
from shared.boundary.workspace import MOST_PARTS
from shared.drafts.drafter_spec import DrafterSpec
from shared.engine.controller import shapes_by_batch, smallest_that_holds
from shared.engine.rows import Chunk, ScheduledRows
from shared.models.dummy_weights import DummyCheckpoint
from shared.models.families import (
    config_from_dict,
    config_from_folder,
    model_config,
    stated_encoding,
)
from shared.models.formats.fp8 import Granularity
from shared.models.formats.fp8_w8a16 import FP8W8A16
from shared.models.model_folder import ModelFolder
from shared.models.parameters import parameters
from shared.options.command_line import parse
from shared.options.flags import ConfigError
from shared.process.caching import cache_policy
from shared.process.device import Device, cgroup_free_bytes
from shared.process.memory_plan import plan
from shared.process.start import prepare
from shared.process.startup_report import rank_notes
from shared.spec.reduction_order import ATTENTION
from tests.support.planned import GB, PLATFORMS, QWEN3_8B, planned
from tests.support.scheduled_requests import House
from tests.support.tensors import tensor_bytes
from tests.support.weight_formats import w8a16_of
from torch_impl import platform as torch_platform
from torch_impl.weights import load

ROOT = Path(__file__).resolve().parents[2]
STATE = (
    "KV",
    "draft KV",
    "state",
    "snapshots",
    "draft state",
    "draft snapshots",
    "token counts",
    "draft inputs",
)


def prompt_workspace(lines: dict[str, int]) -> int:
    """Bytes of the prefill workspace, or of the workspace of CUDA graphs."""
    return lines.get("prompt workspace", lines.get("graph workspace", 0))


@pytest.mark.parametrize("framework", PLATFORMS)
@pytest.mark.parametrize(("free_bytes", "positions"), [(140 * GB, 440_000), (80 * GB, 150_000)])
def test_memory_plan_gives_kv_max_of_gpu(framework, free_bytes, positions):
    memory = planned(framework, free_bytes)
    assert (memory.capacity.num_pages - 1) * memory.capacity.page_size >= positions
    assert memory.max_request_tokens == QWEN3_8B.context_length
    assert memory.total_bytes <= 0.9 * free_bytes


def test_jax_gpu_share_preserves_max_kv_pages():
    """JAX preallocates its share of the memory; the rest is unusable for the plan."""
    share = float(serve.GPU_SHARE)
    whole, jaxs = planned("torch", 140 * GB), planned("jax", int(share * 140 * GB))
    assert jaxs.capacity.num_pages > 0.9 * whole.capacity.num_pages


@pytest.mark.parametrize("framework", PLATFORMS)
def test_prefill_and_decode_workspace_match_backend_costs(framework):
    memory = planned(framework, 140 * GB)
    sizes = {line.name: line.num_bytes for line in memory.lines}
    workspace = PLATFORMS[framework].costs.workspace
    asked = {p: workspace(p, memory.blueprint) for p in memory.capacity.programs}
    by_name = {"prompt workspace": StepKind.PREFILL, "decode workspace": StepKind.DECODE}
    widest = {x: max(size for p, size in asked.items() if p.work is y) for x, y in by_name.items()}
    if framework == "torch":  # CUDA graphs share a memory pool, other steps have another
        counts = [size for p, size in asked.items() if p.work is StepKind.COUNT]
        widest = {"graph workspace": max(widest.values()), "eager workspace": max(counts)}
    assert {name: sizes[name] for name in sizes if "workspace" in name} == widest


def test_uncaptured_steps_have_eager_workspace():
    flags = "--disable-piecewise-cuda-graph --max-running-requests 64"
    for more, captured in (("", {StepKind.DECODE}), (" --disable-cuda-graph", set())):
        memory = planned("torch", 140 * GB, flags + more)
        workspace, widest = PLATFORMS["torch"].costs.workspace, {True: 0, False: 0}
        for program in memory.capacity.programs:
            size, is_captured = workspace(program, memory.blueprint), program.work in captured
            widest[is_captured] = max(widest[is_captured], size)
        sizes = {line.name: line.num_bytes for line in memory.lines}
        assert (sizes["graph workspace"], sizes["eager workspace"]) == (widest[True], widest[False])


def test_workspace_counts_partials_on_gpu_scores_on_cpu():
    memory = planned("torch", 140 * GB)
    workspace = PLATFORMS["torch"].costs.workspace
    heads, size = QWEN3_8B.attention.num_heads, QWEN3_8B.attention.head_size
    widest = max(memory.capacity.programs, key=lambda p: p.tokens)
    positions = widest.pages * memory.capacity.page_size
    scores = widest.batch * heads * widest.tokens * positions * 4
    # Prefill rows are accumulated in place, without partial results in memory.
    queries = widest.tokens * heads * size * 2
    rest = 20 * widest.tokens * (QWEN3_8B.hidden + QWEN3_8B.dense.intermediate)
    assert queries < workspace(widest, memory.blueprint) < queries + rest + QWEN3_8B.vocab * 64
    decode = max(memory.capacity.programs, key=lambda p: p.batch * (p.work is StepKind.DECODE))
    assert positions > MOST_PARTS * ATTENTION.split  # the limit of partial results applies
    sums = MOST_PARTS * decode.batch * heads * size * 4
    assert (
        sums < workspace(decode, memory.blueprint) < 1.1 * sums + QWEN3_8B.vocab * 64 * decode.batch
    )
    on_cpu = planned("torch", 140 * GB, "--chunked-prefill-size 256", kind="cpu")
    widest = max(on_cpu.capacity.programs, key=lambda p: (p.tokens, p.batch, p.pages))
    positions = widest.pages * on_cpu.capacity.page_size
    scores = widest.batch * heads * widest.tokens * positions * 4
    assert PLATFORMS["torch"].costs.workspace(widest, on_cpu.blueprint) > scores


def test_moe_workspace_counts_chosen_experts_weights_all():
    moe = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 1024,
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    }

    def sized(**fields):
        config, drafts = config_from_dict(moe | fields), DrafterSpec.none()
        device, costs = Device("gpu", "one", 140 * GB), PLATFORMS["torch"].costs
        memory = plan(parse([]), config, drafts, device, costs)
        widest = max(memory.capacity.programs, key=lambda p: p.tokens)
        (weights,) = (line for line in memory.lines if line.name == "weights")
        return weights.num_bytes, costs.workspace(widest, memory.blueprint) / widest.tokens

    weights, row = sized()
    assert weights > 2 * 4 * 128 * 3 * 768 * 2048
    twice, row_of_two = sized(num_experts_per_tok=16)
    assert twice == weights
    # Gate, up and their product have two bytes each, an output four.
    assert row_of_two - row == pytest.approx(8 * (3 * 768 * 2 + 4 * 2048), rel=0.01)
    more, row_of_more = sized(num_experts=256)
    assert more > 1.9 * weights
    assert row_of_more - row == pytest.approx(4 * 128, rel=0.01)  # only the logits
    with_dense, row_of_dense = sized(mlp_only_layers=[0], intermediate_size=65536)
    assert row_of_dense - row > 2 * 65536  # the widest layer of any kind
    assert with_dense != weights


SHAPES = Path(__file__).resolve().parents[2] / "bench" / "shapes"


@pytest.mark.parametrize("framework", PLATFORMS)
@pytest.mark.parametrize("drafter", ["", "--speculative-algorithm NEXTN"])
def test_fp8_experts_leave_80gb_gpu_kv_memory(drafter, framework):
    def planned_for(name, free_bytes):
        folder = ModelFolder(SHAPES / name)
        config = model_config(folder)
        checkpoint = DummyCheckpoint.of_model(config, stated_encoding(folder.config))
        drafts = DrafterSpec.of_mtp(config) if drafter else DrafterSpec.none()
        formats = w8a16_of(checkpoint, parameters(config, drafts.with_mtp))
        device, costs = Device("gpu", "one", free_bytes), PLATFORMS[framework].costs
        return plan(parse(drafter.split()), config, drafts, device, costs, lambda dtype: formats)

    memory = planned_for("qwen3.5-35b-a3b-fp8", int(0.95 * 80 * GB))
    assert (memory.capacity.num_pages - 1) * memory.capacity.page_size >= 300_000
    with pytest.raises(ConfigError, match="for weights .* give a smaller --model-path"):
        planned_for("qwen3.5-35b-a3b", 80 * GB)
    wide = planned_for("qwen3.5-35b-a3b", 140 * GB)
    sizes = [
        next(x.num_bytes for x in each.lines if x.name == "weights") for each in (memory, wide)
    ]
    assert sizes[0] < 0.55 * sizes[1]


@pytest.mark.parametrize("framework", PLATFORMS)
def test_dense_fp8_weight_workspace_includes_dequantized_copy(framework):
    """Trap: prefill steps dequantise it in memory, layer by layer."""
    config = config_from_folder(SHAPES / "qwen3-8b-fp8")
    device, costs = Device("gpu", "one", 80 * GB), PLATFORMS[framework].costs
    flags = parse(["--max-total-tokens", "65536"])
    lines = []
    for formats in ({}, {"mlp.gate_up": FP8W8A16(Granularity.BLOCK)}):
        memory = plan(flags, config, DrafterSpec.none(), device, costs, lambda dtype, x=formats: x)
        lines.append({line.name: line.num_bytes for line in memory.lines})
    wide, narrow = lines
    matrix = 2 * config.dense.intermediate * config.hidden
    assert prompt_workspace(narrow) - prompt_workspace(wide) == 2 * matrix
    assert wide["weights"] - narrow["weights"] == 36 * (matrix - 2 * matrix // 128**2)


@pytest.mark.parametrize("framework", PLATFORMS)
@pytest.mark.parametrize("ranks", [1, 8])
def test_mamba2_states_have_computed_size(ranks, framework):
    """23 layers of 64 heads with 64 x 128 numbers, and three inputs of each convolution."""
    config = config_from_folder(ROOT / "bench" / "shapes" / "nemotron-3-nano")
    device, costs = Device("gpu", "one", 140 * GB), PLATFORMS[framework].costs
    options = parse(["--tp-size", str(ranks), "--max-running-requests", "32"])
    memory = plan(options, config, DrafterSpec.of_mtp(config), device, costs)
    request = 23 * (64 * 64 * 128 * 4 + 3 * (4096 + 2 * 8 * 128) * 2) // ranks
    assert request == 49_082_368 // ranks
    lines, capacity = {line.name: line for line in memory.lines}, memory.capacity
    assert lines["state"].num_bytes == 33 * request
    assert lines["snapshots"].num_bytes == capacity.num_snapshots * request
    assert lines["state"].detail.startswith(f"32 x {request:,} bytes")
    assert "draft state" not in lines


def test_mamba_track_interval_sets_policy_of_mamba2_hybrid():
    config = config_from_folder(ROOT / "bench" / "shapes" / "nemotron-3-nano")
    device, costs = Device("gpu", "one", 140 * GB), PLATFORMS["torch"].costs

    def interval(*flags: str) -> int:
        memory = plan(parse(flags), config, DrafterSpec.of_mtp(config), device, costs)
        return cache_policy(memory).track_interval

    assert interval() == 64
    assert interval("--mamba-track-interval", "256") == 256
    with pytest.raises(ConfigError, match="--mamba-track-interval does not fit: .*multiple of 64"):
        interval("--mamba-track-interval", "100")


def test_plan_rings_have_entry_per_in_flight_step():
    memory = planned("torch", 140 * GB, "--overlap-depth 2")
    (line,) = (line for line in memory.lines if line.name == "plans and results")
    assert line.detail == "4 plans, 4 results"


def test_cpu_memory_plan_includes_ngrams_and_corpora():
    flags = "--speculative-algorithm NGRAM --speculative-ngram-capacity 4096 "
    flags += "--speculative-ngram-external-sam-budget 2 "
    flags += "--speculative-ngram-external-corpus-max-tokens 1000"
    sizes = {x.name: x.num_bytes for x in planned("torch", 140 * GB, flags, kind="cpu").lines}
    assert (sizes["n-grams"], sizes["corpora"]) == (4096 * 48, 1000 * 100)


def test_compiling_cpu_backend_has_few_programs():
    """Five: single prompts in two lengths, decode of one row or all, and a count."""
    few, many = (planned(name, 140 * GB, kind="cpu").capacity for name in ("jax", "torch"))
    assert (len(few.programs), len(many.programs)) == (5, 71)
    for work in (StepKind.PREFILL, StepKind.DECODE):
        sizes = {p: (p.batch, p.pages, p.tokens) for p in few.programs if p.work is work}
        (with_logprobs,) = (p for p in sizes if p.has(ProgramFeature.LOGPROBS))
        assert sizes[with_logprobs] == max(sizes.values())


@pytest.mark.parametrize(("name", "kind"), [("jax", "cpu"), ("torch", "cpu"), ("jax", "gpu")])
def test_shadow_verify_adds_missing_plain_program(name, kind):
    """Nothing compiles while serving, so the list contains the programs of replays."""
    chain = "--speculative-algorithm NEXTN"
    for flags, num_more in ((chain, 1), ("", 0), (f"{chain} --speculative-adaptive", 0)):
        without = planned(name, 140 * GB, flags, kind=kind).capacity.programs
        with_checks = planned(
            name, 140 * GB, f"{flags} --shadow-verify-rate 0.1", kind=kind
        ).capacity
        more = set(with_checks.programs) - set(without)
        assert len(more) == num_more
        plain = [p for p in with_checks.programs if p.work is StepKind.DECODE and p.shape.is_plain]
        table = max(p.pages for p in with_checks.programs)
        assert any(p.has(ProgramFeature.LOGPROBS) and p.pages == table for p in plain)
        assert all((p.batch, p.pages) == (1, table) for p in more)


def test_gpu_prefill_buckets_are_powers_of_two():
    """Trap: a prompt of 300 tokens in a program for 2,048 of them."""
    programs = planned("torch", 140 * GB).capacity.programs
    sizes = sorted({(p.batch, p.tokens) for p in programs if p.work is StepKind.PREFILL})
    alone = [(1, 64 << power) for power in range(6)]
    assert sizes == [*alone, (8, 512), (8, 1024), (8, 2048)]


def test_cuda_graph_flags_set_captured_step_kinds():
    all_, some, none = (
        planned("torch", 140 * GB, flags).blueprint.captured
        for flags in ("", "--disable-piecewise-cuda-graph", "--disable-cuda-graph")
    )
    decoding = (StepKind.DECODE, StepKind.DRAFT)
    assert (all_, some, none) == ((*decoding, StepKind.PREFILL, StepKind.ENCODE), decoding, ())


SCORES = "--max-prompt-logprobs 5 "


@pytest.mark.parametrize("copies", [4, 12])
def test_merged_shapes_combine_chain_and_ngram_nodes(copies):
    flags = "--speculative-algorithm NEXTN+NGRAM --speculative-num-steps 6 "
    flags += f"--speculative-ngram-num-draft-tokens {copies}"
    programs = planned("torch", 140 * GB, flags).capacity.programs
    joined = {p.shape for p in programs if p.has(ProgramFeature.NGRAM_DRAFTS)}
    assert {(x.nodes, x.depth) for x in joined} == {
        (7 + copies, max(6, copies)),  # the chain with n-gram nodes
        (1 + copies, copies),  # n-gram nodes alone
    }
    assert len({x.copied for x in joined}) == 1  # one n-gram tree serves both


@pytest.mark.parametrize("framework", PLATFORMS)
@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_prompt_logprobs_add_few_counted_programs(framework, kind):
    """Only with `--max-prompt-logprobs`; all other programs stay the same."""
    flags = "--max-total-tokens 65536"
    made = [planned(framework, 140 * GB, more + flags, kind=kind) for more in ("", SCORES)]
    without, scoring = made
    added = [p for p in scoring.capacity.programs if p not in without.capacity.programs]
    assert set(scoring.capacity.programs) - set(added) == set(without.capacity.programs)
    assert not without.capacity.max_scores
    assert all(
        program.has(ProgramFeature.PROMPT_LOGPROBS) and program.work is StepKind.PREFILL
        for program in added
    )
    prefills = [p for p in without.capacity.programs if p.work is StepKind.PREFILL]
    widest = [max((p.batch, p.pages, p.tokens) for p in some) for some in (prefills, added)]
    assert widest[0] == widest[1], "they hold the widest step of the scheduler"
    if (framework, kind) != ("torch", "cpu"):
        assert len(added) == 2
    vocab, tokens = scoring.capacity.vocab, widest[0][2]
    lines = [{line.name: line.num_bytes for line in memory.lines} for memory in made]
    assert prompt_workspace(lines[1]) - prompt_workspace(lines[0]) > 128 * vocab * 4
    words = tokens * (2 + 2 * scoring.capacity.max_scores)
    assert lines[1]["plans and results"] >= 3 * 4 * words


@pytest.mark.parametrize("nodes", [1, 8], ids=["plain", "trees"])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_every_step_fits_reduced_program_list(nodes, logprobs):
    """Trap: a request with logprobs decoded alone, and only the widest batch had them."""
    flags = "--context-length 256 --max-running-requests 4 --chunked-prefill-size 128"
    if nodes > 1:
        flags += f" --speculative-algorithm NGRAM --speculative-num-draft-tokens {nodes}"
        flags += " --speculative-ngram-backend host"
    capacity = planned("jax", 140 * GB, flags, kind="cpu").capacity
    assert len(capacity.programs) == (5 if nodes == 1 else 7)
    house, on_host = House(capacity), nodes > 1
    shapes = shapes_by_batch(capacity, host_draft=on_host, is_wanted=lambda s: s.nodes == nodes)
    requests = [house.request(100, 150, logprobs=logprobs) for _ in range(4)]
    for count in range(1, 5):
        rows = ScheduledRows.decode(requests[:count], smallest_that_holds(shapes, count))
        rows = replace(rows, drafts=_roots(count, nodes)) if on_host else rows
        program = house.planner.plan(rows).program
        assert program.batch == (1 if count == 1 and logprobs is None else 4)
    for end in (10, 100):
        chunk = Chunk(requests[0], 0, end)
        assert house.planner.plan(ScheduledRows.prefill((chunk,))).program.tokens >= end


def _roots(rows: int, nodes: int) -> HostDraft:
    tokens = np.zeros((rows, nodes), np.int32)
    return HostDraft(tokens, tokens, np.ones(rows, np.int32), np.zeros(rows, np.int32))


GROUP = "0::/box\n3:memory:/box\n2:cpu:/box\n"


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_cgroup_free_bytes_reads_container_limit(tmp_path):
    stat = "anon 5\ninactive_file 30\ntotal_inactive_file 40\n"
    write(tmp_path / "box", memory__max="1000\n", memory__current="200\n", memory__stat=stat)
    first = {"memory__limit_in_bytes": "700\n", "memory__usage_in_bytes": "100\n"}
    write(tmp_path / "memory", **first, memory__stat=stat)
    assert list(cgroup_free_bytes(tmp_path, GROUP)) == [830, 640]


def test_cgroup_free_bytes_without_limit_returns_nothing(tmp_path):
    write(tmp_path / "box", memory__max="max\n", memory__current="200\n", memory__stat="")
    assert list(cgroup_free_bytes(tmp_path, GROUP)) == []
    assert list(cgroup_free_bytes(tmp_path / "none", "")) == []


@pytest.mark.parametrize("drafter", ["", "--speculative-algorithm NEXTN"])
def test_tp_rank_memory_equals_plan(drafter):
    flags = ["--model-path", str(ROOT / "models" / "random"), "--max-total-tokens", "2048"]
    flags += ["--context-length", "256", "--tp-size", "2", *drafter.split()]
    cpu = replace(torch_platform.PLATFORM, find_device=lambda: Device("cpu", "CPU", GB))
    start = prepare(parse(flags), cpu)
    bytes_of = {line.name: line.num_bytes for line in start.memory.lines}
    kept = sum(n for name, n in bytes_of.items() if name in STATE)
    shm_all_gather = ShmAllGather.create(2)
    for rank in range(2):
        of_rank = start.of_rank(TPGroup(rank, 2, shm_all_gather))
        taken = tensor_bytes(of_rank.load(cpu, lambda num_bytes: None).state)
        unused = 0 if drafter else 4 * start.memory.capacity.num_slots  # start of draft KV
        assert taken == kept - unused
        blueprint = of_rank.memory.blueprint
        how = (blueprint.dtype, torch.device("cpu"), lambda num_bytes: None)
        model, with_mtp = blueprint.config, blueprint.drafts.with_mtp
        loaded = load(of_rank.opened.checkpoint, model, with_mtp, *how, {}, group=blueprint.ranks)
        assert tensor_bytes(loaded) == bytes_of["weights"]
    shm_all_gather.remove()


@pytest.mark.parametrize("name", PLATFORMS)
def test_tp_memory_plan_includes_symmetric_buffers(name):
    gpu = replace(
        PLATFORMS[name],
        find_device=lambda: Device("gpu", "NVIDIA H200", 4 * GB),
        take_devices=lambda count: None,
    )
    flags = ["--model-path", str(ROOT / "models" / "random"), "--tp-size", "2"]
    start = prepare(parse(flags), gpu)
    (line,) = (line for line in start.memory.lines if line.name == "all-gather buffers")
    assert line.num_bytes == symmetric_buffer_bytes(2) > 2 * 2 * BLOCK_BYTES
    (note,) = rank_notes(start.memory)
    assert "each layer reads only 0 MB of weights" in note
    shape = ["--model-path", str(SHAPES / "qwen3-8b"), "--load-format", "dummy", "--tp-size", "2"]
    large = replace(gpu, find_device=lambda: Device("gpu", "NVIDIA H200", 100 * GB))
    assert list(rank_notes(prepare(parse(shape), large).memory)) == []
    with pytest.raises(ValueError, match="ranks on GPUs must be 2, 4 or 8, got 16"):
        symmetric_buffer_bytes(16)
