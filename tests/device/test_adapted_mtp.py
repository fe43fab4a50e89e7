"""Draft tokens of NEXTN with adapters of the MTP layer, against the merged checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from shared.boundary.adapter_pool import AdapterPoolSpec
from shared.boundary.backend import Backend, BackendLimits
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.engine.request import SamplingParams
from shared.engine.rows import ScheduledRows
from shared.models.checkpoint import load_all
from shared.models.families import config_from_folder
from shared.models.parameters import parameters
from shared.spec.draft_tree import TreeShape
from tests.support.adapted_requests import prefilled
from tests.support.backends import make_backend
from tests.support.limits import make_limits
from tests.support.lora_files import (
    adapter_pool,
    host_adapters,
    load_plans,
    module_names,
    write_adapter,
    write_merged,
)

GOLDEN = Path(__file__).parents[1] / "golden"
BASES = ("qwen3_5_dense", "deepseek_v3")
"""Golden folders of hybrid layers and of latent attention."""
BATCH, STEPS = 3, 4
SHAPES = {
    "chain": TreeShape.chain(3, BATCH),
    "tree": TreeShape(nodes=6, depth=3, width=2, rows=6 * BATCH),
}


@pytest.fixture(scope="module")
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Adapters of the MTP layer alone and of all layers, and the checkpoints with them merged."""
    base, folder = GOLDEN / request.param, tmp_path_factory.mktemp("mtp")
    config = config_from_folder(base)
    modules, target = (module_names(base, parameters(config, x)) for x in (True, False))
    chosen = {"mtp": [name for name in modules if name not in target], "all": modules}
    assert 0 < len(chosen["mtp"]) < len(modules)
    found = {"": base}
    for seed, (name, some) in enumerate(chosen.items()):
        found[name] = write_adapter(folder / name, base, some, seed=seed, alpha=9)
        found[f"merged {name}"] = write_merged(folder / f"m{name}", base, found[name])
    return found


def limits(vocab: int, pool: AdapterPoolSpec | None, shape: TreeShape) -> BackendLimits:
    sizes = {"batch": BATCH, "pages": 4, "extras": ProgramFeature.NONE}
    programs = (
        Program(work=StepKind.PREFILL, tokens=64, shape=TreeShape.plain(BATCH), **sizes),
        Program(work=StepKind.DECODE, tokens=0, shape=shape, **sizes),
        Program(work=StepKind.DRAFT, tokens=0, shape=shape, **sizes),
    )
    if pool is not None:
        assert pool.step_kinds == tuple(program.work for program in programs)
        adapted = [program.with_features({ProgramFeature.LORA: True}) for program in programs]
        programs = (*programs, *adapted, *pool.programs)
    return make_limits(
        programs,
        page_size=16,
        overlap=0,
        context_length=64,
        vocab=vocab,
        max_logprobs=0,
        adapters=pool,
    )


def backend_of(
    framework: str, shape: TreeShape, folder: Path, adapters: Mapping[str, Path]
) -> Backend:
    """Returns a backend with NEXTN and with adapters in the slots 1, 2, ..."""
    config = config_from_folder(folder)
    pool = adapter_pool(adapters.values(), folder) if adapters else None
    capacity = limits(config.vocab, pool, shape)
    backend = make_backend(framework, config, load_all(folder, config, True), capacity, "NEXTN")
    if pool is not None:
        for slot, each in enumerate(host_adapters(pool, adapters, folder), start=1):
            for plan in load_plans(capacity, each, slot):
                backend.submit(plan).result()
    return backend


def drafted(backend: Backend, shape: TreeShape, slots: tuple[int, ...]) -> np.ndarray:
    """Returns the trees and output tokens of a prefill, and of draft and decode steps, by row."""
    sampling = SamplingParams(temperature=0.0, max_tokens=24)
    planner, requests, prefill = prefilled(backend.capacity, slots, range(5, 22), sampling, 60)
    plans = [prefill]
    for _ in range(STEPS):
        plans.append(planner.plan(ScheduledRows.draft(requests, shape)))
        plans.append(planner.plan(ScheduledRows.decode(requests, shape)))
    assert all(plan.program.has(ProgramFeature.LORA) == any(slots) for plan in plans)
    results = [backend.submit(plan).result() for plan in plans]
    rows = [
        np.concatenate([x.drafts, x.parents, x.num_nodes[:, None], x.tokens], 1) for x in results
    ]
    return np.concatenate(rows, axis=1)


def cells() -> Iterator[object]:
    """Yields models, frameworks and shapes; JAX compiles the programs of one cell by default."""
    cells = [(x, kind) for x in ("reference", "torch", "jax") for kind in SHAPES]
    for base in BASES:
        for framework, kind in [*cells, ("torch ranks 2", "chain")]:
            is_quick = framework != "jax" or (base, kind) == (BASES[0], "chain")
            marks = () if is_quick else pytest.mark.matrix
            yield pytest.param(base, framework, kind, marks=marks)


@pytest.mark.parametrize(("folders", "framework", "kind"), [*cells()], indirect=["folders"])
def test_adapted_mtp_drafts_equal_merged_checkpoint(
    framework: str, kind: str, folders: dict[str, Path]
) -> None:
    """Every row has the drafts of its own adapter, whatever the other rows have."""
    shape = SHAPES[kind]
    adapters = {name: folders[name] for name in ("mtp", "all")}
    backend = backend_of(framework, shape, folders[""], adapters)
    got = drafted(backend, shape, (0, 1, 2))
    backend.close()
    for row, name in enumerate(("", "merged mtp", "merged all")):
        whole = backend_of("reference", shape, folders[name], {})
        np.testing.assert_array_equal(got[row], drafted(whole, shape, (0, 0, 0))[row], name)
        whole.close()
    assert (got[0] != got[1]).any()
