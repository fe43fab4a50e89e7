"""A JAX step ends on a CPU with any number of threads.

XLA runs what is independent at once on a pool of one thread for each core. An operation that waits
on a thread of the pool for tasks of the pool may therefore wait for ever, and does so where all
threads wait. A process of its own has a pool of the size that the test asks for.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240
"""Many times the duration of the program; only a hanging one reaches it."""

INDEPENDENT_PROMPTS = """
import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.ops.recurrent import gated_delta

PASSES, REQUESTS, TOKENS, HEADS, SIZE = 4, 8, 16, 4, 32
rng = np.random.default_rng(0)

def drawn(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)

def inputs():
    shape = (REQUESTS * TOKENS, HEADS)
    gates = (-jnp.abs(drawn(*shape)), jax.nn.sigmoid(drawn(*shape)))
    qkv = (drawn(*shape, SIZE) / SIZE for _ in range(3))
    return drawn(REQUESTS, HEADS, SIZE, SIZE), *qkv, *gates

starts = jnp.arange(REQUESTS + 1, dtype=jnp.int32) * TOKENS
passes = [inputs() for _ in range(PASSES)]

def outputs(passes):
    return [gated_delta.chunked(*one, starts, starts[1:])[1] for one in passes]

run = jax.jit(outputs, compiler_options={"xla_backend_optimization_level": 0})
for _ in range(20):
    assert all(jnp.isfinite(out).all() for out in run(passes))
"""


SELDOM = [pytest.param(threads, marks=pytest.mark.matrix) for threads in (1, 2)]


@pytest.mark.parametrize("threads", [*SELDOM, 4])
def test_jax_standalone_prefill_completes_with_any_threads(threads: int) -> None:
    """A target and the small model that drafts for it read a prompt in one program."""
    environment = {**os.environ, "NPROC": str(threads), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", INDEPENDENT_PROMPTS]
    subprocess.run(command, check=True, timeout=LIMIT_S, cwd=ROOT, env=environment)
