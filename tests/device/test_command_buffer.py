"""JAX decode steps lower without branches, loops and sorts, so that a GPU runs one command buffer.

The test needs no GPU: it lowers the step for one and reads its operations.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jax_impl import ops
from jax_impl.backend import JaxBackend
from jax_impl.ops.gemm import linear
from jax_impl.ops.trees import slot_state
from jax_impl.symmetric_memory import AllGather
from jax_impl.weights import Loaded, from_arrays
from kernels.peer_buffers import BLOCK_BYTES, BufferLayout
from shared.boundary.backend import BackendLimits
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.boundary.tp_group import TPGroup
from shared.spec.draft_tree import TreeShape
from tests.support.backends import drafts_of
from tests.support.limits import make_limits, make_program
from tests.support.lowered import BROKEN_BY, operations
from tests.support.op_case import table
from tests.support.random_serving import drafter_of, target_of

FAMILY, BATCH, PAGES = "qwen3_5", 2, 8
PLAIN, CHAIN = TreeShape.plain(BATCH), TreeShape.chain(3, BATCH)
TREE = TreeShape(nodes=8, depth=3, width=3, rows=8 * BATCH)
SHORT = TreeShape(nodes=3, depth=2, width=1, rows=4, block=4)


def decode_of(shape: TreeShape, host_draft: bool) -> Program:
    return make_program(StepKind.DECODE, shape, batch=BATCH, pages=PAGES).with_features(
        {ProgramFeature.HOST_DRAFT: host_draft}
    )


def capacity_of(program: Program, vocab: int, rule: str) -> BackendLimits:
    return make_limits(
        (program,),
        page_size=4,
        num_snapshots=2,
        overlap=0,
        context_length=16,
        vocab=vocab,
        max_stop_ids=2,
        max_bias=2,
        max_logprobs=2,
        accept_rule=rule,
    )


def lowered(drafter: str, shape: TreeShape, host_draft: bool, rule: str, platform: str) -> str:
    """A decode step of a small hybrid, as StableHLO for a platform."""
    program, (config, weights) = decode_of(shape, host_draft), target_of(FAMILY, drafter)
    capacity = capacity_of(program, config.vocab, rule)
    backend = JaxBackend(
        config,
        weights,
        capacity,
        *drafts_of(drafter_of(FAMILY, drafter), config),
        dtype="float32",
        device="cpu",
        quick_compile=True,
    )
    return backend.traced(program).lower(lowering_platforms=(platform,)).as_text()


CASES = {
    "plain": ("none", PLAIN, False, "exact"),
    "trees of the host": ("none", TREE, True, "exact"),
    "NEXTN, trees": ("NEXTN", TREE, False, "exact"),
    "EAGLE3, trees": ("EAGLE3", TREE, False, "exact"),
    "STANDALONE, trees": ("STANDALONE", TREE, False, "exact"),
    "STANDALONE, a chain": ("STANDALONE", CHAIN, False, "block"),
    "DFLASH, a chain": ("DFLASH", CHAIN, False, "exact"),
    "DFLASH, a sampled chain": ("DFLASH", CHAIN, False, "rejection"),
    "DSPARK, a sampled chain": ("DSPARK", CHAIN, False, "rejection"),
    "NEXTN, trees in fewer rows": ("NEXTN", replace(TREE, rows=9), False, "exact"),
    "DFLASH, a short chain in fewer rows": ("DFLASH", SHORT, False, "exact"),
    "DSPARK, a short chain in fewer rows": ("DSPARK", SHORT, False, "exact"),
    "DFLASH2, a sampled chain": ("DFLASH2", CHAIN, False, "rejection"),
    "DFLASH2, a short chain in fewer rows": ("DFLASH2", SHORT, False, "exact"),
}


LIKE_OTHERS = (
    "STANDALONE, trees",
    "DFLASH, a chain",
    "DFLASH, a sampled chain",
    "DSPARK, a short chain in fewer rows",
    "DFLASH2, a sampled chain",
)
"""Cases of the matrix: other cases cover their drafter, shape and rule separately."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=pytest.mark.matrix if x in LIKE_OTHERS else ()) for x in CASES],
)
def test_decode_step_on_gpu_lowers_to_command_buffer(case):
    found = operations(lowered(*CASES[case], "cuda"))
    assert "dot_general" in found  # it is a step
    assert not found & BROKEN_BY


def test_decode_step_on_cpu_has_case_and_while():
    """So the test above looks at something: here the branches and the loops are there."""
    assert {"case", "while"} <= operations(lowered(*CASES["plain"], "cpu"))


def test_backend_of_shapes_lowers_same_program_as_arrays(monkeypatch) -> None:
    """AOT compilation for an absent GPU uses shapes; only a CPU splits layer stacks and needs
    arrays.
    """
    monkeypatch.setattr("jax_impl.mesh._leaf", lambda path, array, device: array)
    device, program = jax.devices("cpu")[0], decode_of(CHAIN, False)
    config, arrays = target_of(FAMILY, "NEXTN")
    capacity, (drafts, _) = capacity_of(program, config.vocab, "exact"), drafts_of("NEXTN", config)

    def text(weights: Loaded) -> str:
        how = {"dtype": "float32", "device": device, "quick_compile": True}
        backend = JaxBackend(config, weights, capacity, drafts, None, **how)
        return backend.traced(program).lower().as_text()

    loaded = partial(from_arrays, arrays, config, jnp.dtype("float32"), device)
    assert text(jax.eval_shape(loaded)) == text(loaded())


def test_compiled_for_selects_gpu_kernels() -> None:
    case = next(case for case in table("slot_state") if not case.is_large)
    given = {name: x if x is None else jnp.asarray(x) for name, x in case.arguments(0).items()}

    def text() -> str:
        call = jax.jit(lambda given: slot_state.commit(**given))
        return call.trace(given).lower(lowering_platforms=("cuda",)).as_text()

    assert "xla.gpu.triton" not in text()
    with ops.compiled_for("NVIDIA H200"):
        assert ops.kernel_names()
        assert "xla.gpu.triton" in text()
    assert not ops.kernel_names()


@pytest.mark.parametrize(("hidden", "keeps"), [(256, 128), (96, 96)])
def test_jax_residual_stream_gathered_by_kernels(hidden: int, keeps: int) -> None:
    """A rank keeps its columns where their squares are of whole chunks; XLA knows of no rank."""
    kernels, boxes = ops.Kernels.of("NVIDIA H200"), BufferLayout(2, BLOCK_BYTES)
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    given = {
        "rows": shape((4, hidden)),
        "norm": jax.ShapeDtypeStruct((3, hidden), jnp.float32),
        "out": shape((3, hidden // 2, 64)),
        "gate_up": shape((3, 2 * 32, hidden)),
        "place": jax.ShapeDtypeStruct((6,), jnp.int32),
    }

    def layer(given: dict[str, jax.Array]) -> tuple[linear.NormedStream, jax.Array, jax.Array]:
        modules = (kernels.all_gather, kernels.vocab_parallel)
        group = TPGroup(0, 2, None).on(AllGather(given["place"], *modules, boxes))
        norm = ops.Scale(given["norm"], 1)
        stream = linear.stream(given["rows"], norm, None, group)
        x = jnp.ones((4, 64), jnp.bfloat16)
        stream = linear.linear_add(x, linear.Matrix.plain(given["out"], 1), stream, 1.0, norm)
        inner = linear.act_and_mul_linear(stream, 1e-6, linear.Matrix.plain(given["gate_up"], 1))
        return stream, stream.whole, inner

    with ops.compiled_for("NVIDIA H200"):
        traced = jax.jit(layer).trace(given)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    stream, whole, inner = traced.out_info
    assert (stream.rows.shape, whole.shape, inner.shape) == ((4, keeps), (4, hidden), (4, 64))
    assert (stream.scaled.shape, stream.squares.shape) == ((4, hidden), (4, -(-hidden // 64)))
    assert "partition_id" not in text
    assert "stablehlo.all_gather" not in text
    assert text.count('name = "all_gather"') >= 1
