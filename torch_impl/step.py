"""One step on the device: draft, verify, accept, commit and draft-extend, or a prefill.

Everything is written in place into the slots' memory, and nothing is read back: which work runs
follows from the program alone, so a whole decode step can be captured as one CUDA graph.
"""

from jaxtyping import Int
from torch import Tensor

from shared.boundary.program import Program, Work
from torch_impl.decode import decode, draft
from torch_impl.device_state import Fields, pack, read_plan
from torch_impl.encode_image import encode
from torch_impl.prefill import count_tokens, prefill
from torch_impl.step_context import Machine

WORK = {
    Work.PREFILL: prefill,
    Work.DECODE: decode,
    Work.DRAFT: draft,
    Work.COUNT: count_tokens,
    Work.ENCODE: encode,
}


def step(machine: Machine, words: Int[Tensor, " words"], program: Program) -> Int[Tensor, " out"]:
    """Runs one plan, given as its words; returns the words of its result."""
    exchange = machine.model.group.on_device  # of several ranks with a GPU each
    if exchange is not None:
        exchange.begin()
    plan = read_plan(words, program, machine.capacity)
    result = _end(machine, WORK[program.work](machine, plan, program), program)
    if exchange is not None:
        exchange.end()
    return result


def _end(machine: Machine, fields: Fields, program: Program) -> Int[Tensor, " out"]:
    """What every step does last; returns the words of its result."""
    machine.state.lengths[:1].zero_()  # the sink would grow by every padded row
    return pack(fields, program, machine.capacity)
