"""Engines that exchange KV transfer records: a case per model, drafter and page size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from shared.boundary.backend import Backend, BackendLimits
from shared.boundary.buffers import empty_plan
from shared.boundary.kv_transfer import TransferHeader, TransferRecord
from shared.boundary.program import StepKind
from shared.boundary.transfer_spec import ImportKV, TransferSpec
from shared.boundary.window_pools import WindowPool
from shared.drafts.kinds import BLOCK_KINDS
from shared.engine.engine import Engine
from shared.engine.request import Request, SamplingParams
from shared.models.config import ModelConfig
from shared.spec.draft_tree import TreeShape
from shared.spec.gumbel_noise import derive_seed
from tests.support.backends import Drafter, drafts_of, make_backend
from tests.support.cache_policies import policy_of
from tests.support.cells import MODEL_SEEDS
from tests.support.drafter_cases import controller_of, programs_of
from tests.support.limits import make_limits
from tests.support.run_engine import Outcome, checked_step
from tests.support.tiny_heads import cyclic, tiny_block_head, tiny_head
from tests.support.tiny_models import HYBRIDS, tiny_model
from tests.support.tiny_small import small_model

BATCH, CONTEXT, CHUNK = 3, 320, 64
PROMPT, TOKENS = 150, 32
CHAIN, PLAIN = TreeShape.chain(3, BATCH), TreeShape.plain(BATCH)
TREE = TreeShape(nodes=8, depth=3, width=3, rows=8 * BATCH)
TRANSFERRED = 128
"""Tokens that every record of a prompt of 150 has: a snapshot is at a multiple of 64.

Records of hybrids have no more.
"""

SAMPLINGS: dict[str, dict] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_p": 0.9},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
}


@dataclass(frozen=True)
class Case:
    """A model with a drafter; `window_pages` is the size of a pool for its sliding windows."""

    family: str
    drafter: str
    shape: TreeShape
    page_size: int
    window_pages: int = 0

    def __str__(self) -> str:
        return f"{self.family}-{self.drafter}-N{self.shape.nodes}-page{self.page_size}"


@lru_cache
def model_of(family: str, drafter: str):
    config, weights = tiny_model(family, MODEL_SEEDS[family])
    return config, cyclic(config, weights) if drafter in BLOCK_KINDS else weights


def drafter_of(family: str, drafter: str) -> Drafter:
    config, weights = model_of(family, drafter)
    match drafter:
        case "NEXTN":
            return "NEXTN"
        case "EAGLE" | "EAGLE3":
            return tiny_head(config, weights, drafter, 5)
        case "STANDALONE":
            return small_model(config, weights, family, 4)
        case "DFLASH":
            return tiny_block_head(config, 4)
    return "none"


def with_transfer(
    capacity: BackendLimits, config: ModelConfig, drafter: Drafter, step_pages: int = 3
) -> BackendLimits:
    """Returns a capacity with export and import programs in float32."""
    windows = [pool.window for pool in capacity.window_pools]
    drafts, _ = drafts_of(drafter, config)
    spec = TransferSpec.of(config, drafts, "float32", capacity.page_size, windows)
    spec = replace(spec, step_bytes=step_pages * spec.page_bytes)
    return replace(capacity, transfer=spec, programs=(*capacity.programs, *spec.programs()))


def capacity_of(case: Case) -> BackendLimits:
    pages = -(-(CONTEXT + 40) // case.page_size)
    config, _ = model_of(case.family, case.drafter)
    windows = sorted({pool.window for pool in config.kv_pools if pool.window is not None})
    pools = tuple(WindowPool(window, case.window_pages) for window in windows)
    capacity = make_limits(
        programs_of(case.drafter, case.shape, batch=BATCH, pages=pages, chunk=CHUNK),
        page_size=case.page_size,
        num_snapshots=13 if case.family in HYBRIDS else 1,
        context_length=CONTEXT,
        vocab=config.vocab,
        window_pools=pools if case.window_pages else (),
    )
    return with_transfer(capacity, config, drafter_of(case.family, case.drafter))


MADE: dict[tuple[str, Case], Backend] = {}


def backend_of(framework: str, case: Case) -> Backend:
    if (framework, case) not in MADE:
        config, weights = model_of(case.family, case.drafter)
        drafter = drafter_of(case.family, case.drafter)
        MADE[framework, case] = make_backend(framework, config, weights, capacity_of(case), drafter)
    return MADE[framework, case]


def engine_of(framework: str, case: Case) -> Engine:
    backend = backend_of(framework, case)
    return Engine(
        backend,
        controller_of(backend.capacity, case.drafter, case.shape),
        overlap=2,
        chunked_prefill_size=CHUNK,
        cache=policy_of(case.drafter, is_hybrid=case.family in HYBRIDS),
        transfer_fingerprint="tests",
    )


def requests(vocab: int, *, max_tokens: int = TOKENS, length: int = PROMPT) -> list[Request]:
    """One request for each way to sample, with prompts that share nothing."""
    rng = np.random.default_rng(5)
    return [
        Request(
            request_id=number,
            prompt=tuple(rng.integers(2, min(vocab, 250), length).tolist()),
            sampling=SamplingParams(max_tokens=max_tokens, seed32=derive_seed(7, number), **how),
        )
        for number, how in enumerate(SAMPLINGS.values())
    ]


def served(engine: Engine, asked: list[Request]) -> dict[int, Outcome]:
    """Serves requests at once."""
    outcomes = {}
    for each in asked:
        engine.add(each)
        outcomes[each.request_id] = Outcome()
    while engine.busy:
        for event in checked_step(engine):
            outcomes[event.request_id].take(event)
    return outcomes


def finish(engine: Engine) -> None:
    while engine.busy:
        checked_step(engine)


def exported(engine: Engine, request: Request) -> TransferRecord:
    """The record of a prompt, after a transfer of its bytes."""
    job = engine.transfer.begin_export(request.prompt, request.namespace, request.images)
    assert job is not None, "nothing is cached, so nothing is tested"
    finish(engine)
    record = job.record
    header = TransferHeader.from_fields(record.header.to_fields())
    return TransferRecord.checked(header, b"".join(record.parts()), record.checksum())


def wipe(engine: Engine) -> None:
    """Writes NaN to all pages and snapshots of the engine's backend, by import steps.

    A prefix that was not transferred is then not found in memory by chance.
    """
    capacity = engine.backend.capacity
    sizes = [capacity.num_pages, *(pool.num_pages for pool in capacity.window_pools)]
    for program in [p for p in capacity.programs if p.work is StepKind.IMPORT_KV]:
        count = capacity.num_snapshots if program.blocks else max(sizes)
        for first in range(1, count, max(1, program.pages)):
            plan = empty_plan(program, capacity)
            assert isinstance(plan.work, ImportKV)
            layers, pages = plan.work.words.layers, plan.work.words.all_pages
            for words in pages if layers is None else [layers]:
                words[:] = np.float32(np.nan).view(np.int32)
            plan.snapshots.save[0] = first if program.blocks else 0
            for table, size in zip(plan.page_tables, sizes, strict=True):
                named = range(first, min(first + program.pages, size))
                table[0, : len(named)] = named
            engine.backend.submit(plan).result()
