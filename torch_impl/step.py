"""A step on the device: draft, verify, accept, commit and draft extend, or a prefill.

All state is written in place and no value is read back to the host. The program alone determines
the operations of a step, so a whole decode step can be captured as one CUDA graph.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from shared.boundary.adapter_pool import WORDS
from shared.boundary.program import Program, StepKind
from shared.boundary.transfer_spec import TRANSFERS
from torch_impl.adapters import load
from torch_impl.decode import decode
from torch_impl.device_state import Fields, Plan, pack, read_plan
from torch_impl.draft import draft
from torch_impl.encode_image import encode
from torch_impl.kv_transfer import transfer
from torch_impl.prefill import count_tokens, prefill
from torch_impl.step_context import Step, StepContext

WORK = {
    StepKind.PREFILL: prefill,
    StepKind.DECODE: decode,
    StepKind.DRAFT: draft,
    StepKind.COUNT: count_tokens,
}
"""Functions of the step kinds that have rows."""


def step(
    context: StepContext, words: Int[Tensor, " words"], program: Program
) -> Int[Tensor, " out"]:
    """Runs the plan in an int32 buffer; returns the result buffer."""
    exchange = context.model.group.on_device  # set if each rank has a GPU
    if exchange is not None:
        exchange.begin()
    plan = read_plan(words, program, context.capacity)
    if program.work is StepKind.ENCODE:
        fields = encode(context, plan, program)
    elif program.work in TRANSFERS:
        fields = transfer(context, plan, program)
    elif program.work is StepKind.LOAD_ADAPTER:
        fields = _load(context, plan, program)
    else:
        fields = WORK[program.work](Step.of(context, plan, program))
    result = _end(context, fields, program)
    if exchange is not None:
        exchange.end()
    return result


def _load(context: StepContext, plan: Plan, program: Program) -> Fields:
    """Writes layers of an adapter."""
    pool, group = context.capacity.adapters, context.model.group
    assert pool is not None  # otherwise the program does not exist
    assert plan.adapters is not None
    load(context.state.adapters, pool, group, program, plan.adapters, plan.kv[WORDS])
    return {"counts": torch.zeros_like(plan.save_at)}


def _end(context: StepContext, fields: Fields, program: Program) -> Int[Tensor, " out"]:
    """Finishes a step of any kind; returns the result buffer."""
    context.state.lengths[:1].zero_()  # padded rows would grow slot 0 without bound
    return pack(fields, program, context.capacity)
