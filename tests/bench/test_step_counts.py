"""Counts of step programs: independent of names, sensitive to operations, data flow and kernels."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from bench.kernels.step_counts import Trace, differences, selected, stablehlo_counts
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.spec.draft_tree import TreeShape


def program(call: Any, *shapes: tuple[int, ...]) -> Trace:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return Trace(jax.jit(call).trace(*arrays).jaxpr)


def with_kernel(name: str, factor: float, rows: int = 4) -> Trace:
    def scale_kernel(source, target):
        target[...] = source[...] * factor

    def scaled(x):
        block = pl.BlockSpec((rows, 8), lambda row: (row, 0))
        shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        grid = {"grid": (8 // rows,), "in_specs": [block], "out_specs": block}
        return pl.pallas_call(scale_kernel, out_shape=shape, name=name, **grid)(x)

    return program(scaled, (8, 8))


def test_digest_ignores_names_and_places() -> None:
    def first(left, right):
        return jnp.tanh(left + right)

    def second(a, b):
        total = a + b
        return jnp.tanh(total)

    assert program(first, (2, 3), (2, 3)).digest == program(second, (2, 3), (2, 3)).digest
    assert with_kernel("one", 2.0).digest == with_kernel("other", 2.0).digest


def test_digest_depends_on_operations_shapes_and_kernels() -> None:
    digests = [
        program(lambda a, b: a - b, (2, 3), (2, 3)).digest,
        program(lambda a, b: b - a, (2, 3), (2, 3)).digest,
        program(lambda a, b: a * b, (2, 3), (2, 3)).digest,
        program(lambda a, b: a - b, (2, 4), (2, 4)).digest,
        program(lambda a: a - 2.0, (2, 3)).digest,
        program(lambda a: a - 3.0, (2, 3)).digest,
        with_kernel("kernel", 2.0).digest,
        with_kernel("kernel", 3.0).digest,
        with_kernel("kernel", 2.0, rows=2).digest,
    ]
    assert len({*digests}) == len(digests)


def test_primitives_of_kernels_and_branches_are_counted() -> None:
    assert with_kernel("kernel", 2.0).counts["mul"] == 1
    branched = program(lambda a: jax.lax.cond(a[0] > 0, jnp.sin, jnp.cos, a), (3,))
    assert (branched.counts["sin"], branched.counts["cos"]) == (1, 1)


def test_stablehlo_operations_and_kernel_calls_are_counted() -> None:
    text = """
    %0 = stablehlo.add %arg0, %arg1 : tensor<2xf32> loc("stablehlo.sine")
    %1 = "stablehlo.case"(%0) ({ stablehlo.return %arg0 : tensor<2xf32> }) : ()
    %2 = stablehlo.custom_call @mosaic_gpu_v2(%0) : (tensor<2xf32>) -> tensor<2xf32>
    """
    assert stablehlo_counts(text) == {
        "operations": {
            **{"stablehlo.add": 1, "stablehlo.case": 1, "stablehlo.custom_call": 1},
            "stablehlo.return": 1,
        },
        "targets": {"mosaic_gpu_v2": 1},
    }


def test_selected_programs_cover_batch_ends_and_logprobs() -> None:
    def decode(batch: int, extras: ProgramFeature = ProgramFeature.NONE) -> Program:
        shape = TreeShape.plain(batch)
        return Program(
            work=StepKind.DECODE, batch=batch, pages=1, tokens=0, shape=shape, extras=extras
        )

    programs = [decode(4), decode(1), decode(2), decode(2, ProgramFeature.LOGPROBS)]
    found = [(each.batch, each.extras) for each in selected(programs)]
    assert found == [
        (1, ProgramFeature.NONE),
        (4, ProgramFeature.NONE),
        (2, ProgramFeature.LOGPROBS),
    ]


def test_differences_name_program_and_change() -> None:
    old = {"program": "a start", "operations": {"add": 2}, "digest": "x", "sequence": ["a", "b"]}
    new = {"program": "a start", "operations": {"add": 3}, "digest": "x", "sequence": ["a", "c"]}
    assert not [*differences([old], [{**old, "program": "another name"}])]
    assert sorted(differences([old], [new])) == [
        "a start: operations differs: add 2 -> 3",
        "a start: sequence differs: from entry 1: ['b'] -> ['c']",
    ]
    assert [*differences([old], [])] == ["1 programs before, 0 after"]
