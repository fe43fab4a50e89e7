"""Workspace of torch steps, above all of images: allocated once and within the memory plan.

Memory is counted without a GPU by `tests.support.torch_memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jaxtyping import Int
from torch import Tensor

from shared.boundary.backend import BackendSpec
from shared.boundary.buffers import plan_layout
from shared.boundary.images import EncoderCacheSpec
from shared.boundary.program import Program, StepKind
from shared.boundary.tp_group import SINGLE_RANK
from shared.drafts.drafter_spec import DrafterSpec
from shared.models.dummy_weights import DummyCheckpoint
from shared.models.families import config_from_folder
from shared.models.formats.fp8 import Granularity
from shared.models.formats.fp8_encoding import FP8Encoding
from shared.models.formats.fp8_w8a8 import FP8W8A8
from shared.models.stacks import stack
from shared.models.vision_parameters import vision_encoder_parameters
from shared.process import image_startup
from tests.support.counting import NO_TRITON
from tests.support.golden_images import MODEL, image_config
from tests.support.kernels import KERNELS, ON_GPU, bind_kernels
from tests.support.torch_memory import EAGER, LOADING, Memory, absent_gpu
from tests.support.vision_shapes import QWEN3_5
from tests.support.vlm import capacity_of
from torch_impl import cuda_graphs, ops
from torch_impl.device_state import allocate
from torch_impl.formats.registry import read
from torch_impl.ops.attention import attention
from torch_impl.ops.gemm import layers, linear
from torch_impl.step import step
from torch_impl.step_context import StepContext
from torch_impl.weights import load_vision_encoder
from torch_impl.workspace import workspace

VISION = replace(QWEN3_5, depth=4)
TOKENS = 4096
"""Tokens of the largest image, which is the largest one of a start without flags."""


pytestmark = pytest.mark.skipif(ON_GPU, reason="kernels that run nothing are the interpreter's")

OPERATIONS = {
    attention: ("bidirectional_attention",),
    layers: ("bilinear_pos_embed", "gelu", "gelu_tanh", "layer_norm"),
    linear: ("product",),
}


@dataclass(frozen=True)
class Tower:
    """A vision encoder with arrays without memory, and its encode programs."""

    context: StepContext
    blueprint: BackendSpec
    memory: Memory

    def workspace(self, program: Program) -> int:
        return workspace(program, self.blueprint)

    def plan(self, program: Program) -> Int[Tensor, " words"]:
        size = plan_layout(program, self.blueprint.capacity).size
        return torch.empty(size, dtype=torch.int32, device="meta")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the encoder's operations by kernels that allocate their results and run nothing."""
    if "triton" not in KERNELS:
        pytest.skip(NO_TRITON)
    bind_kernels(monkeypatch, ops, KERNELS["triton"])
    for module, names in OPERATIONS.items():
        for name in names:
            kernel = partial(getattr(module, f"kernel_{name}"), ops.KERNELS)
            monkeypatch.setattr(module, name, kernel)
    grid = import_module("triton.runtime.interpreter").GridExecutor
    monkeypatch.setattr(grid, "__call__", lambda *given, **how: None)


@pytest.fixture
def tower(kernels: None) -> Iterator[Tower]:
    processor = replace(image_config(), multiple=32, min_pixels=1 << 16, max_pixels=TOKENS * 32**2)
    pool = EncoderCacheSpec(VISION, processor, 1 + TOKENS)
    programs = tuple(image_startup.encode_programs(pool, are_few=False)[-3:])  # of two sizes
    capacity = replace(capacity_of("none", 2, 2), programs=programs, images=pool)
    config = config_from_folder(MODEL)
    blueprint = BackendSpec(
        config=config, drafts=DrafterSpec.none(), capacity=capacity, dtype="bfloat16", on_gpu=True
    )
    meta, memory = torch.device("meta"), Memory()
    checkpoint = DummyCheckpoint(vision_encoder_parameters(VISION), {}, None)
    with memory, torch.inference_mode():
        memory.pool = LOADING
        weights = load_vision_encoder(checkpoint, VISION, "bfloat16", meta, lambda num_bytes: None)
        state = allocate(config, capacity, None, torch.bfloat16, meta, 1)
        memory.free_unused()
        memory.pool = EAGER
        model: Any = SimpleNamespace(group=SINGLE_RANK)
        yield Tower(StepContext(model, None, weights, capacity, state), blueprint, memory)


def test_encode_memory_within_planned_workspace(tower: Tower) -> None:
    """Each block of the encoder frees its arrays before the next one allocates."""
    for program in tower.blueprint.capacity.programs:
        plan, planned = tower.plan(program), tower.workspace(program)
        used = tower.memory.max_used_by(partial(step, tower.context, plan, program))
        assert 0.75 * planned < used <= planned, program


@pytest.mark.parametrize("captured", [(), (StepKind.ENCODE,)], ids=["eager", "captured"])
def test_programs_share_workspace_of_largest(
    tower: Tower, monkeypatch: pytest.MonkeyPatch, captured: tuple[StepKind, ...]
) -> None:
    """Beside it plans that graphs read, and 2 MB at a time of what is small."""
    monkeypatch.setattr(cuda_graphs, "compile_kernels", lambda steps, ranks: steps())
    allocator, programs = tower.memory.allocator, tower.blueprint.capacity.programs
    widest = max(map(tower.workspace, programs))
    before = allocator.most = allocator.reserved
    with absent_gpu(tower.memory):
        given = (tower.context, torch.device("meta"), torch.cuda.Stream(), captured)
        made = cuda_graphs.CapturedGraphs(*given, tower.workspace)
        made.prepare(sorted(programs, key=tower.workspace, reverse=True), lambda program: None)
        assert len(made.captured) == len(captured and programs)
        for program in programs if not captured else ():
            step(tower.context, tower.plan(program), program)
    assert widest < allocator.most - before < 1.15 * widest


def test_dummy_w8a8_uses_memory_of_one_copy():
    """The FP8 values of a stack replace its packed words, layer by layer."""
    layers, shape = 64, (4096, 4096)
    parameter = stack("codes", [f"{i}" for i in range(layers)], {"weight": shape})
    checkpoint = DummyCheckpoint([parameter], {}, FP8Encoding(Granularity.BLOCK))
    where, memory = (torch.device("meta"), lambda num_bytes: None), Memory()
    with memory:
        read(checkpoint, parameter, FP8W8A8(by_output=False), *where)
    assert memory.allocator.most < 1.5 * layers * shape[0] * shape[1]
