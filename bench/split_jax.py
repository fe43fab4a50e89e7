"""A decode step of JAX cut in three, as engines run it that draft, verify and extend in turn."""

from typing import Any

import jax
import numpy as np

from jax_impl import decode
from jax_impl.backend import Compiled, JaxBackend
from jax_impl.device_state import DeviceState, read_plan
from jax_impl.step import _end
from shared.boundary.backend import Program
from shared.boundary.buffers import plan_layout

Step = tuple[DeviceState, jax.Array]


def parts(backend: JaxBackend, program: Program) -> Compiled:
    """Draft; verify and commit; draft-extend: a program of each, queued one after the other."""
    limits = backend.limits

    def grow(leaves: Any, state: DeviceState, words: jax.Array) -> tuple[DeviceState, Any]:
        plan = read(words)
        lengths = state.lengths[plan.slots]
        trees, state = decode.grow(backend._machine(leaves), state, plan, program, lengths)
        return state, (trees, lengths)

    def verify(
        leaves: Any, state: DeviceState, words: jax.Array, grown: Any
    ) -> tuple[DeviceState, Any, jax.Array]:
        machine, plan, (trees, lengths) = backend._machine(leaves), read(words), grown
        verified = decode.verify(machine, state, plan, program, trees, lengths)
        state, saved = decode.commit(machine, state, plan, program, verified, lengths)
        fields = decode.told(machine, plan, program, trees, verified, saved)
        state, result = _end(machine, state, plan, fields, program)
        # The pools are the state's, and nobody asks for the rest any more.
        passed = verified.passed._replace(kv=())
        return state, verified._replace(passed=passed, logits=(), mixer=None), result

    def extend(
        leaves: Any, state: DeviceState, words: jax.Array, grown: Any, verified: Any
    ) -> DeviceState:
        machine, plan, (trees, lengths) = backend._machine(leaves), read(words), grown
        return decode.extend(machine, state, plan, program, trees, verified, lengths)

    def read(words: jax.Array) -> Any:
        return read_plan(words, program, limits)

    def made(part: Any, *given: Any) -> Any:
        jitted = jax.jit(part, donate_argnums=1, compiler_options=backend._options)
        return jitted.lower(backend._leaves, *given).compile()

    words = jax.device_put(np.zeros(plan_layout(program, limits).size, np.int32), backend._device)
    state, leaves = backend._state, backend._leaves
    first = made(grow, state, words)
    _, grown = jax.eval_shape(grow, leaves, state, words)
    second = made(verify, state, words, grown)
    _, verified, _ = jax.eval_shape(verify, leaves, state, words, grown)
    third = made(extend, state, words, grown, verified)

    def run(leaves: Any, state: DeviceState, words: jax.Array) -> Step:
        state, grown = first(leaves, state, words)
        state, verified, result = second(leaves, state, words, grown)
        return third(leaves, state, words, grown, verified), result

    return run


def swap(backend: JaxBackend, program: Program, other: Compiled | None) -> Compiled:
    """Puts another step, or the parts, in the place of a program's; gives what was there."""
    before = backend._programs[program]
    backend._programs[program] = other or parts(backend, program)
    return before
