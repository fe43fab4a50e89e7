"""Prepared programs, workspace and errors of every backend before its first step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from shared.boundary.backend import Backend, BackendLimits
from shared.boundary.buffers import empty_plan
from shared.boundary.program import Program, ProgramFeature, StepKind
from tests.support.backends import make_backend
from tests.support.contract_host import contract_capacity, contract_model


def made(framework: str, **changes: object) -> Backend:
    """A backend of the contract model without prepared programs."""
    config, weights = contract_model()
    capacity = replace(contract_capacity(config), **changes)
    return make_backend(framework, config, weights, capacity, "NEXTN").backend


@pytest.fixture
def fresh(framework: str) -> Iterator[Backend]:
    backend = made(framework)
    yield backend
    backend.close()


def test_submit_rejects_every_unprepared_program(fresh):
    for program in fresh.capacity.programs:
        with pytest.raises(ValueError, match=f"{program} is not prepared; call prepare"):
            fresh.submit(empty_plan(program, fresh.capacity))


def test_prepare_rejects_unlisted_program(fresh):
    program = replace(fresh.capacity.programs[0], batch=7)
    with pytest.raises(ValueError, match="prefill of 7 rows.* is not among the programs"):
        fresh.prepare([program], lambda program: None)


def test_prepare_skips_ready_programs(host):
    """Uses the backend of other tests, so that nothing is compiled for this test alone."""
    plan = empty_plan(host.capacity.programs[0], host.capacity)
    host.run(plan)
    named = []
    host.backend.prepare([plan.program, plan.program], named.append)
    assert named == []


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_prepare_reports_each_program_once(name):
    """JAX is excluded because it would compile for this test alone."""
    backend, named = made(name), []
    first, second = backend.capacity.programs[:2]
    backend.prepare([first, second, first], named.append)
    assert named == [first, second]
    backend.close()


def test_workspace_grows_with_nodes_and_batch(fresh):
    capacity: BackendLimits = fresh.capacity
    sizes = {p: fresh.workspace(p) for p in capacity.programs}
    assert all(size > 0 for size in sizes.values())
    plain, chain = (
        next(p for p in capacity.programs if (p.work, p.shape.nodes) == (StepKind.DECODE, nodes))
        for nodes in (1, 4)
    )
    assert sizes[chain] > sizes[plain]
    assert fresh.workspace(replace(plain, batch=8)) > sizes[plain]


def with_rows(rows: int) -> tuple[Program, ...]:
    """The contract programs with another number of verify rows for drafts."""
    config, _ = contract_model()
    return tuple(
        replace(p, shape=replace(p.shape, rows=rows)) if p.shape.nodes > 1 else p
        for p in contract_capacity(config).programs
    )


def test_verify_rows_fewer_than_batch_rows_raise(framework):
    with pytest.raises(
        ValueError, match="one verify row per batch row is required, got 3 in decode of 4 rows"
    ):
        made(framework, programs=with_rows(3))


def test_rejection_sampling_rejects_partial_verify_rows(framework):
    """Otherwise verification of a draft would depend on the sampled token."""
    chains = tuple(p for p in with_rows(15) if not p.has(ProgramFeature.NGRAM_DRAFTS))
    with pytest.raises(ValueError, match="rejection must verify every draft token, but decode"):
        made(framework, programs=chains, accept_rule="rejection")


def test_rejection_sampling_rejects_ngram_shapes(framework):
    with pytest.raises(ValueError, match="rejection requires draft chains"):
        made(framework, accept_rule="rejection")
