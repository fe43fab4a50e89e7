"""Time of one decode step on the CPU by the nodes of its draft tree, beside its matrix products.

    python -m bench.step_by_nodes --backend torch --out bench/results/step_by_nodes_torch.json

A tree of N nodes verifies N rows, so the target's own matrix products (projections, MLP and LM
head, of N rows) are the work that drafting cannot avoid. Drafting and extending have products of
their own, of the drafter's matrices and the LM head. Each line has the time of both kinds alone,
measured in the same framework, and the time of a step: whole, drafting alone, and with a tree of
the host's in the place of the drafting, which leaves verify, acceptance, commit and extend. Growth
is against the step of one node: what a tree adds to it in milliseconds, and how many times as long
it takes. On a machine that others use, `--clock cpu` on one core counts only what this process
computes:

    OMP_NUM_THREADS=1 taskset -c 0 python -m bench.step_by_nodes --backend torch --clock cpu
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np

from bench.machine import versions
from shared.boundary.backend import Backend, Decode, Limits, Program, StepPlan, Work
from shared.boundary.buffers import empty_plan
from shared.drafts.drafts import Drafts
from shared.engine.allocator import Allocator
from shared.engine.planner import Planner
from shared.engine.request import Request, SamplingParams
from shared.engine.rows import Chunk, PrefillRows
from shared.models.checkpoint import parameters
from shared.models.config import ModelConfig
from shared.models.dummy import DummyCheckpoint
from shared.spec.draft_tree import TreeShape

MODEL = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "mtp_num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_type": "default"},
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
"""A hybrid whose matrix products are most of a plain step's work."""

SHAPES = {  # by nodes, for one request
    1: TreeShape.plain(1),
    4: TreeShape.chain(3, 1),
    16: TreeShape(nodes=16, depth=4, width=4, rows=16),
    64: TreeShape(nodes=64, depth=5, width=8, rows=64),
}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
PROMPT = 128
CONTEXT = 512
PAGE_SIZE = 16
WARM_UP = 5
STEPS = 40


Clock = Callable[[], float]


class Bench:
    """One request on a backend, and the plans of single steps for it."""

    def __init__(
        self,
        framework: str,
        config: ModelConfig,
        weights: dict[str, np.ndarray],
        shape: TreeShape,
        clock: Clock,
    ) -> None:
        limits, self._clock = _limits(config, shape), clock
        self._limits, self._shape = limits, shape
        self._backend = make_backend(framework, config, weights, limits)
        allocator = Allocator(limits)
        self._planner = Planner(limits, allocator)
        prompt = np.random.default_rng(1).integers(2, config.vocab, PROMPT)
        self._request = Request(
            request_id=0,
            prompt=tuple(prompt.tolist()),
            sampling=SamplingParams(temperature=0.0, max_tokens=CONTEXT - PROMPT),
        )
        self._request.place(allocator.take_slot())
        allocator.reserve(self._request.slot, limits.max_positions)
        self._planner.bind(self._request)

    def milliseconds(self, work: Work, host_draft: bool) -> float:
        """The time of the fastest step of some, from the submit to the result."""
        chunk = Chunk(self._request, 0, PROMPT)
        self._backend.submit(self._planner.plan(PrefillRows((chunk,)))).result()

        def step() -> None:
            self._backend.submit(self._plan(work, host_draft)).result()

        return fastest(step, self._clock)

    def close(self) -> None:
        self._backend.close()

    def _plan(self, work: Work, host_draft: bool) -> StepPlan:
        program = next(
            p for p in self._limits.programs if (p.work, p.host_draft) == (work, host_draft)
        )
        plan = empty_plan(program, self._limits)
        self._planner.fill_rows(plan, np.array([self._request.slot], np.int32))
        if isinstance(plan.work, Decode) and plan.work.drafts is not None:
            trees, nodes = plan.work.drafts, np.arange(self._shape.nodes)
            trees.tokens[0], trees.num_nodes[0] = nodes, self._shape.nodes
            trees.parents[0] = np.maximum(nodes - 1, 0) // self._shape.width
        return plan


def _limits(config: ModelConfig, shape: TreeShape) -> Limits:
    """The step whole, and in a drafted shape its two parts."""
    limits = limits_for(config, shape)
    if shape.is_plain:
        return limits
    decode = limits.programs[-1]
    parts: tuple[Program, ...] = (
        replace(decode, host_draft=True),
        replace(decode, work=Work.DRAFT),
    )
    return replace(limits, programs=(*limits.programs, *parts))


def limits_for(config: ModelConfig, shape: TreeShape) -> Limits:
    """Limits for one request, with one prefill bucket and one page-table size."""
    positions = CONTEXT + shape.max_tokens + shape.scratch
    pages = -(-positions // PAGE_SIZE)
    common = {"batch": 1, "pages": pages, "host_draft": False, "mask": False, "logprobs": False}
    prefill = Program(work=Work.PREFILL, tokens=PROMPT, shape=TreeShape.plain(1), **common)
    return Limits(
        page_size=PAGE_SIZE,
        num_pages=1 + pages,
        num_slots=2,
        num_snapshots=1,
        programs=(prefill, Program(work=Work.DECODE, tokens=0, shape=shape, **common)),
        overlap=0,
        context_length=CONTEXT,
        vocab=config.vocab,
        max_stop_ids=4,
        max_bias=1,
        max_logprobs=1,
    )


def make_backend(
    framework: str, config: ModelConfig, weights: dict[str, np.ndarray], limits: Limits
) -> Backend:
    """The backend on the CPU; only the framework that is measured is imported."""
    plain = limits.programs[-1].shape.is_plain
    drafts = Drafts.none() if plain else Drafts.of_mtp(config)
    made_from = (config, weights, limits, drafts, None)
    if framework == "torch":
        how = {"dtype": "float32", "device": "cpu", "captured": ()}
        backend = import_module("torch_impl.backend").TorchBackend(*made_from, **how)
    else:
        how = {"dtype": "float32", "device": "cpu", "quick_compile": False}
        backend = import_module("jax_impl.backend").JaxBackend(*made_from, **how)
    backend.prepare(limits.programs, lambda program: None)
    return backend


def fastest(run: Callable[[], None], clock: Clock) -> float:
    """Milliseconds of the fastest of `STEPS` runs: other processes can only add to it."""
    for _ in range(WARM_UP):
        run()
    seconds = []
    for _ in range(STEPS):
        began = clock()
        run()
        seconds.append(clock() - began)
    return 1e3 * min(seconds)


def matrices(
    config: ModelConfig, weights: dict[str, np.ndarray], of_drafter: bool
) -> list[np.ndarray]:
    """The target's matrices or the drafter's, but for the LM head of both, each [out, in]."""
    stacks = [
        weights[p.name].reshape(-1, *p.shape[-2:])
        for p in parameters(config, with_mtp=True)
        if p.name.startswith("mtp.") == of_drafter and _is_matrix(p.name, p.shape)
    ]
    return [matrix for stack in stacks for matrix in stack]


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return (len(shape) == 3 and not name.endswith(".conv")) or name == "mtp.fc"


def products_ms(framework: str, arrays: list[np.ndarray], rows: int, clock: Clock) -> float:
    """The time of the products of `rows` rows with every matrix, as the framework's steps do."""
    rng = np.random.default_rng(2)
    sizes = sorted({matrix.shape[1] for matrix in arrays})
    inputs = {size: rng.standard_normal((rows, size), dtype=np.float32) for size in sizes}
    if framework == "torch":
        return fastest(_torch_products(arrays, inputs), clock)
    return fastest(_jax_products(arrays, inputs), clock)


def _torch_products(arrays: list[np.ndarray], inputs: dict[int, np.ndarray]) -> Callable[[], None]:
    import torch

    from torch_impl.ops.linear import Matrix, product

    weights = [Matrix(torch.from_numpy(matrix)) for matrix in arrays]
    rows = {size: torch.from_numpy(values) for size, values in inputs.items()}

    @torch.inference_mode()
    def run() -> None:
        for weight in weights:
            product(rows[weight.values.shape[1]], weight)

    return run


def _jax_products(arrays: list[np.ndarray], inputs: dict[int, np.ndarray]) -> Callable[[], None]:
    import jax

    from jax_impl.backend import compiler_options
    from jax_impl.ops.linear import Matrix, product

    cpu = jax.devices("cpu")[0]

    def products(matrices: list[jax.Array], rows: dict[int, jax.Array]) -> list[jax.Array]:
        return [product(rows[matrix.shape[1]], Matrix(matrix)) for matrix in matrices]

    compiled = jax.jit(products, compiler_options=compiler_options(cpu, False))
    on_device = jax.device_put((arrays, inputs), cpu)
    return lambda: jax.block_until_ready(compiled(*on_device))


def measure(
    framework: str,
    config: ModelConfig,
    weights: dict[str, np.ndarray],
    nodes: int,
    clock: Clock,
) -> dict[str, float]:
    """One line of the table, without growth."""
    shape = SHAPES[nodes]
    bench = Bench(framework, config, weights, shape, clock)
    line: dict[str, float] = {"nodes": nodes, "depth": shape.depth, "width": shape.width}
    line["step_ms"] = bench.milliseconds(Work.DECODE, host_draft=False)
    if not shape.is_plain:
        line["draft_ms"] = bench.milliseconds(Work.DRAFT, host_draft=False)
        line["without_draft_ms"] = bench.milliseconds(Work.DECODE, host_draft=True)
    bench.close()
    head = [weights.get("lm_head", weights["embed"])]
    target = matrices(config, weights, of_drafter=False) + head
    line["products_ms"] = products_ms(framework, target, nodes, clock)
    if not shape.is_plain:
        layer = matrices(config, weights, of_drafter=True)
        one_level = products_ms(framework, layer + head, shape.width, clock)
        line["draft_products_ms"] = (shape.depth - 1) * one_level
        line["extend_products_ms"] = products_ms(framework, layer, shape.max_tokens, clock)
        line["extend_products_ms"] += products_ms(framework, head, 1, clock)
    return line


def with_growth(line: dict[str, float], plain: dict[str, float]) -> dict[str, float]:
    """The line, and what its tree adds to the plain step and to the plain step's products."""
    verify, extend = line["products_ms"], line.get("extend_products_ms", 0.0)
    both = verify + extend + line.get("draft_products_ms", 0.0)
    grown = {
        "step_adds_ms": line["step_ms"] - plain["step_ms"],
        "products_add_ms": verify - plain["products_ms"],
        "all_products_add_ms": both - plain["products_ms"],
        "step_grows": line["step_ms"] / plain["step_ms"],
        "products_grow": verify / plain["products_ms"],
        "all_products_grow": both / plain["products_ms"],
    }
    if "without_draft_ms" in line:
        grown["without_draft_grows"] = line["without_draft_ms"] / plain["step_ms"]
        grown["verify_and_extend_products_grow"] = (verify + extend) / plain["products_ms"]
    return {name: round(value, 3) for name, value in (line | grown).items()}


def main() -> None:
    """Runs the shapes and prints and writes the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=("torch", "jax"), required=True)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = ModelConfig.from_dict(MODEL)
    checkpoint = DummyCheckpoint.of_model(config)
    weights = {p.name: checkpoint.load(p, np.float32) for p in parameters(config, with_mtp=True)}
    command = f"python -m bench.step_by_nodes --backend {args.backend} --clock {args.clock}"
    cores = len(os.sched_getaffinity(0))
    found = {"command": command} | versions(args.backend, "cpu") | {"cores": cores, "lines": []}
    plain: dict[str, float] = {}
    for nodes in SHAPES:
        line = measure(args.backend, config, weights, nodes, CLOCKS[args.clock])
        plain = plain or line
        found["lines"].append(with_growth(line, plain))
        print(json.dumps(found["lines"][-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
