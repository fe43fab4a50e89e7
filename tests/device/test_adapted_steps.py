"""Steps with LoRA adapters on both backends and on several ranks, against the specification."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.boundary.adapter_pool import AdapterPoolSpec
from shared.boundary.backend import Backend, BackendLimits
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.boundary.shm_allgather import ShmAllGather
from shared.boundary.tp_group import TPGroup
from shared.drafts.drafter_spec import DrafterSpec
from shared.engine.request import SamplingParams
from shared.engine.rows import ScheduledRows
from shared.models.checkpoint import load_all
from shared.models.families import config_from_folder
from shared.reference.backend import ReferenceBackend
from shared.spec.draft_tree import TreeShape
from tests.support.adapted_requests import prefilled
from tests.support.backends import JAX_BACKENDS
from tests.support.limits import make_limits
from tests.support.lora_files import adapter_pool, host_adapters, load_plans
from tests.support.ranks import WAIT_S, SideBySide

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = {
    "qwen3": [GOLDEN / "qwen3_lora", GOLDEN / "qwen3_lora_dora"],
    "qwen3_moe": [GOLDEN / "qwen3_moe_lora"],
}
BATCH, PAGE_SIZE = 4, 16
SLOTS = (1, 0, 2, 1)
"""Adapter slot of each row."""


def limits(vocab: int, pool: AdapterPoolSpec) -> BackendLimits:
    shape = TreeShape.plain(BATCH)
    sizes = {"batch": BATCH, "pages": 4, "shape": shape, "extras": ProgramFeature.LOGPROBS}
    plain = (
        Program(work=StepKind.PREFILL, tokens=64, **sizes),
        Program(work=StepKind.DECODE, tokens=0, **sizes),
    )
    adapted = tuple(p.with_features({ProgramFeature.LORA: True}) for p in plain)
    return make_limits(
        (*plain, *adapted, *pool.programs),
        page_size=PAGE_SIZE,
        num_pages=17,
        overlap=0,
        context_length=48,
        vocab=vocab,
        max_logprobs=2,
        adapters=pool,
    )


def backend_of(framework: str, base: str) -> Backend:
    folder, adapters = GOLDEN / base, FOLDERS[base]
    config = config_from_folder(folder)
    # Two layers fit into a load step, so that an adapter has several.
    pool = adapter_pool(adapters, folder, step_bytes=1 << 15)
    weights, capacity = load_all(folder, config, False), limits(config.vocab, pool)
    drafts = DrafterSpec.none()
    if framework == "reference":
        return loaded(ReferenceBackend(config, weights, capacity, drafts, None), base)
    how: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
    if framework == "jax":
        from jax_impl.backend import JaxBackend

        backend = JaxBackend(config, weights, capacity, drafts, None, quick_compile=True, **how)
        JAX_BACKENDS.append(backend)
        return loaded(backend, base)
    from torch_impl.backend import TorchBackend

    def of_rank(rank: int, count: int, group: TPGroup) -> Backend:
        return TorchBackend(config, weights, capacity, drafts, None, **how, group=group)

    alone = of_rank(0, 1, TPGroup(0, 1, None))
    if framework == "torch":
        return loaded(alone, base)
    gather = ShmAllGather.create(2, wait_s=WAIT_S)
    ranks = [of_rank(rank, 2, TPGroup(rank, 2, gather)) for rank in range(2)]
    return loaded(SideBySide(alone, ranks, gather.remove), base)


def loaded(backend: Backend, base: str) -> Backend:
    """Loads the adapters of a base model into the slots 1, 2, ..., other values first."""
    capacity, folders = backend.capacity, {str(x): x for x in FOLDERS[base]}
    adapters = host_adapters(capacity.adapters, folders, GOLDEN / base)
    assert len(capacity.adapters.programs) > 1
    backend.prepare(capacity.adapters.programs, lambda program: None)
    for given in (adapters[::-1], adapters):
        for slot, adapter in enumerate(given, start=1):
            for plan in load_plans(capacity, adapter, slot):
                backend.submit(plan).result()
    return backend


def logprobs(backend: Backend, slots: Sequence[int]) -> np.ndarray:
    """Log-probabilities of the tokens of four requests with adapters, of a prefill and 8 steps."""
    sampling = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)
    planner, requests, prefill = prefilled(backend.capacity, slots, range(5, 17), sampling, 40)
    shape, plans = TreeShape.plain(BATCH), [prefill]
    plans += [planner.plan(ScheduledRows.decode(requests, shape)) for _ in range(8)]
    assert all(plan.program.has(ProgramFeature.LORA) == any(slots) for plan in plans)
    programs = list(dict.fromkeys(plan.program for plan in plans))
    backend.prepare(programs, lambda program: None)
    found = []
    for plan in plans:
        result = backend.submit(plan).result()
        assert result.logprobs is not None
        assert (result.counts == 1).all()
        found.append(result.logprobs.chosen[:, 0])
    return np.stack(found)


@pytest.mark.parametrize(
    ("framework", "base"),
    [
        *((framework, base) for framework in ("torch", "torch ranks 2") for base in FOLDERS),
        # Default JAX tests with adapters: `test_adapted_mtp`, with a third of the programs.
        *(pytest.param("jax", base, marks=pytest.mark.matrix) for base in FOLDERS),
    ],
)
def test_adapted_steps_match_reference_and_ignore_neighbours(framework: str, base: str) -> None:
    slots = tuple(min(slot, len(FOLDERS[base])) for slot in SLOTS)
    backend = backend_of(framework, base)
    got, want = logprobs(backend, slots), logprobs(backend_of("reference", base), slots)
    # Float32 on both sides: only the order of the sums differs.
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    assert np.abs(want[:, 0] - want[:, 1]).max() > 0.1
    np.testing.assert_array_equal(got[:, 0], got[:, 3])
    base_rows = logprobs(backend, (0, 0, 0, 0))
    np.testing.assert_array_equal(base_rows[:, 1], got[:, 1])
    other = logprobs(backend, (1, 1, 0, 0))
    np.testing.assert_array_equal(other[:, 0], got[:, 0])
    backend.close()
