"""Planted faults: for each promise one that breaks it, and the test that must see it.

A fault is planted in the reference backend, the specification it runs, or the host engine. What a
fault of a device program would look like is the same: the tests know backends only by the boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from shared.backend import Decode, StepPlan, StepResult
from shared.engine import planner
from shared.engine.allocator import Allocator
from shared.engine.engine import Engine
from shared.engine.planner import Chunk, Planner
from shared.engine.scheduler import Scheduler
from shared.reference_backend import Batch, ReferenceBackend
from shared.spec import acceptance, attention, draft_tree, mamba_state, sampling
from tests import test_backend_contract as contract
from tests import test_backend_contract_memory as memory
from tests import test_engine, test_planner, test_scheduler
from tests.contract_host import CHAIN, GREEDY, PLAIN, SAMPLED, Host
from tests.toy_backend import toy_limits

Patch = pytest.MonkeyPatch
Proof = Callable[[Host], None]


@dataclass(frozen=True)
class Mutation:
    """A fault and its proof.

    Attributes:
      plant: Puts the fault in; undone by the patch's end.
      proof: The test that passes without the fault and must fail with it.
    """

    plant: Callable[[Patch], None]
    proof: Proof


def after(patch: Patch, owner: Any, name: str, spoil: Callable[..., Any]) -> None:
    """Lets `spoil(result, *arguments)` replace what a function returns."""
    healthy = getattr(owner, name)

    def faulty(*arguments: Any, **named: Any) -> Any:
        return spoil(healthy(*arguments, **named), *arguments, **named)

    patch.setattr(owner, name, faulty)


# Order and continuation


class _LateFuture:
    def __init__(self, run: Callable[[], StepResult]) -> None:
        self._run, self._result = run, None

    def done(self) -> bool:
        return self._result is not None

    def result(self) -> StepResult:
        self._result = self._result or self._run()
        return self._result


def prefills_overtake_decodes(patch: Patch) -> None:
    healthy = ReferenceBackend.submit

    def submit(backend: ReferenceBackend, plan: StepPlan) -> Any:
        if isinstance(plan.work, Decode):
            return _LateFuture(lambda: healthy(backend, plan).result())
        return healthy(backend, plan)

    patch.setattr(ReferenceBackend, "submit", submit)


def newest_token_lags(patch: Patch) -> None:
    healthy = ReferenceBackend._commit

    def commit(backend: ReferenceBackend, batch: Batch, *arguments: Any) -> Any:
        before = backend._newest.copy()
        passed = healthy(backend, batch, *arguments)
        backend._newest[:] = before
        return passed

    patch.setattr(ReferenceBackend, "_commit", commit)


def length_off_by_one(patch: Patch) -> None:
    def spoil(result: Any, backend: ReferenceBackend, batch: Batch, *rest: Any) -> Any:
        backend._lengths[batch.slots] += 1
        return result

    after(patch, ReferenceBackend, "_prefill", spoil)


def plan_buffer_refilled_too_early(patch: Patch) -> None:
    kept: dict[Any, StepPlan] = {}

    def spoil(plan: StepPlan, program: Any, *rest: Any) -> StepPlan:
        used = kept.setdefault(program, plan)
        used.buffer[:] = plan.buffer
        return used

    after(patch, planner, "empty_plan", spoil)


def resume_chooses_again(patch: Patch) -> None:
    patch.setattr(Chunk, "ends_prompt", property(lambda chunk: True))


def late_row_kept(patch: Patch) -> None:
    patch.setattr(Engine, "is_late", staticmethod(lambda request: False))


def preemption_ignores_steps_in_flight(patch: Patch) -> None:
    patch.setattr(Scheduler, "is_settled", staticmethod(lambda request: True))


# Reach and bound


def stale_state_after_zero_accepts(patch: Patch) -> None:
    def spoil(found: Any, state: Any, kept: Any, path: Any, counts: Any, save_after: Any) -> Any:
        new, saved, passed = found
        is_stale = np.equal(counts, 1)[None, :, None, None, None]
        return (
            replace(new, recurrent=np.where(is_stale, state.recurrent, new.recurrent)),
            saved,
            passed,
        )

    after(patch, mamba_state, "replay", spoil)


def full_page_rewritten(patch: Patch) -> None:
    def spoil(result: Any, backend: ReferenceBackend, batch: Batch, *rest: Any) -> Any:
        backend._kv.v[:, batch.page_table[:, 2]] *= np.float32(0.5)
        return result

    after(patch, ReferenceBackend, "_commit", spoil)


def scratch_of_a_step_too_small(patch: Patch) -> None:
    patch.setattr(draft_tree.TreeShape, "scratch", property(lambda shape: shape.depth))


def accepted_branch_not_moved(patch: Patch) -> None:
    patch.setattr(attention, "commit_window", lambda pages, *rest, **named: pages)


def snapshot_taken_at_the_end_of_the_step(patch: Patch) -> None:
    def spoil(found: Any, *rest: Any) -> Any:
        new, _, passed = found
        return new, new, passed

    after(patch, mamba_state, "replay", spoil)


def holes_in_draft_memory_read(patch: Patch) -> None:
    def spoil(result: Any, backend: ReferenceBackend, batch: Batch, *rest: Any) -> Any:
        backend._draft_from[batch.slots] = 0
        return result

    after(patch, ReferenceBackend, "_extend", spoil)


def leaked_page(patch: Patch) -> None:
    def spoil(result: None, allocator: Allocator, slot: int) -> None:
        allocator._num_free_pages -= 1

    after(patch, Allocator, "free", spoil)


def sink_grows(patch: Patch) -> None:
    def spoil(result: Any, backend: ReferenceBackend, plan: StepPlan) -> Any:
        backend._lengths[0] += 1
        return result

    after(patch, ReferenceBackend, "_run", spoil)


# Independence and isolation


def pages_of_a_neighbour(patch: Patch) -> None:
    def spoil(batch: Batch, plan: StepPlan) -> Batch:
        return replace(batch, page_table=np.roll(batch.page_table, 1, axis=0))

    healthy = Batch.of
    patch.setattr(Batch, "of", staticmethod(lambda plan: spoil(healthy(plan), plan)))


def old_pages_in_table_rows_past_the_batch(patch: Patch) -> None:
    def spoil(result: None, planner: Planner, plan: StepPlan, slots: Any) -> None:
        plan.page_table[len(slots) :] = plan.page_table[0]

    after(patch, Planner, "fill_rows", spoil)


def reused_noise(patch: Patch) -> None:
    healthy = sampling.gumbel

    def gumbel(seeds: Any, positions: Any, vocab: int, stream: int) -> Any:
        return healthy(seeds, positions // 2, vocab, stream)

    patch.setattr(sampling, "gumbel", gumbel)


def penalties_see_the_last_token_only(patch: Patch) -> None:
    healthy = ReferenceBackend._count

    def count(backend: ReferenceBackend, slot: int, tokens: Any, first: int, length: int) -> None:
        healthy(backend, slot, tokens[-1:], first + max(0, len(tokens) - 1), length)

    patch.setattr(ReferenceBackend, "_count", count)


def counts_of_the_last_owner(patch: Patch) -> None:
    healthy = ReferenceBackend._start

    def start(backend: ReferenceBackend, batch: Batch) -> None:
        before = backend._seen.copy()
        healthy(backend, batch)
        backend._seen[:] = before

    patch.setattr(ReferenceBackend, "_start", start)


def nan_left_in_a_page(patch: Patch) -> None:
    patch.setattr(attention, "np", _KeepsMaskedValues())


class _KeepsMaskedValues:
    """numpy, but for the `where` that puts 0 in the place of what a row does not see."""

    def where(self, condition: Any, kept: Any, otherwise: Any) -> Any:
        is_mask_of_values = np.ndim(kept) == 4 and np.isscalar(otherwise) and otherwise == 0
        return kept if is_mask_of_values else np.where(condition, kept, otherwise)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def state_reset_by_a_product(patch: Patch) -> None:
    healthy = ReferenceBackend._start

    def start(backend: ReferenceBackend, batch: Batch) -> None:
        slots = batch.slots[batch.starts]
        before = backend._state.recurrent[:, slots].copy()
        healthy(backend, batch)
        backend._state.recurrent[:, slots] += 0 * before

    patch.setattr(ReferenceBackend, "_start", start)


def nan_fails_the_whole_step(patch: Patch) -> None:
    def spoil(failed: Any, *rest: Any) -> Any:
        return np.repeat(failed.any(), len(failed))

    after(patch, acceptance, "failed", spoil)


# The faults and their proofs


def _on_the_toy(test: Callable[..., None], **given: Any) -> Proof:
    return lambda host: test(**given)


def _of_the_planner(test: Callable[..., None]) -> Proof:
    limits = toy_limits(num_pages=300, num_slots=6, overlap=1)
    return lambda host: test(test_planner.House(limits))


def _of_the_sink(host: Host) -> None:
    backend = host.backend
    assert isinstance(backend, ReferenceBackend)
    contract.test_the_sink_does_not_grow(host, lambda: int(backend._lengths[0]), "chain")


crowded = _on_the_toy(
    test_engine.test_text_is_the_plain_one_with_any_overlap_drafts_and_pages,
    overlap=2,
    depth=3,
    num_pages=38,
)
sampled_chain = partial(
    contract.test_a_chain_gives_the_plain_text_and_accepts_some, seed=1, how=SAMPLED
)
greedy_chain = partial(
    contract.test_a_chain_gives_the_plain_text_and_accepts_some, seed=1, how=GREEDY
)
heir_of_nan = partial(
    contract.test_isolation_nan_left_in_slot_and_pages_harms_no_later_owner, shape=PLAIN
)

MUTATIONS = {
    "order: prefills overtake decodes": Mutation(
        prefills_overtake_decodes,
        partial(contract.test_order_steps_take_effect_in_the_order_of_submission, shape=PLAIN),
    ),
    "continuation: the newest token lags": Mutation(
        newest_token_lags,
        partial(
            contract.test_continuation_a_step_goes_on_from_the_device_with_any_shape,
            how=GREEDY,
        ),
    ),
    "continuation: length off by one": Mutation(
        length_off_by_one,
        partial(
            contract.test_continuation_a_step_goes_on_from_the_device_with_any_shape,
            how=SAMPLED,
        ),
    ),
    "continuation: plan buffer refilled too early": Mutation(
        plan_buffer_refilled_too_early, crowded
    ),
    "continuation: a resume chooses its newest token again": Mutation(
        resume_chooses_again, crowded
    ),
    "late row kept": Mutation(late_row_kept, _on_the_toy(test_engine.test_late_rows_are_dropped)),
    "preemption does not wait for steps in flight": Mutation(
        preemption_ignores_steps_in_flight,
        _on_the_toy(test_scheduler.test_the_youngest_gives_way_once_its_steps_have_ended),
    ),
    "reach: stale state after zero accepts": Mutation(stale_state_after_zero_accepts, greedy_chain),
    "reach: a full page is rewritten": Mutation(
        full_page_rewritten, contract.test_reach_full_pages_are_shared_and_never_written
    ),
    "reach: an accepted branch is not moved": Mutation(
        accepted_branch_not_moved,
        partial(
            memory.test_a_tree_of_the_hosts_gives_the_plain_text,
            how=GREEDY,
            right=2,
        ),
    ),
    "reach: a snapshot is taken at the end of the step": Mutation(
        snapshot_taken_at_the_end_of_the_step,
        partial(memory.test_a_decode_step_saves_exactly_where_it_passes, shape=CHAIN),
    ),
    "reach: holes in draft memory are read": Mutation(
        holes_in_draft_memory_read, memory.test_holes_in_draft_memory_are_never_read
    ),
    "bound: the scratch of a step is too small": Mutation(
        scratch_of_a_step_too_small,
        partial(contract.test_bound_a_step_stays_within_its_reservation, shape=CHAIN, length=21),
    ),
    "a leaked page": Mutation(leaked_page, crowded),
    "a sink that grows": Mutation(sink_grows, _of_the_sink),
    "independence: a neighbour's pages": Mutation(
        pages_of_a_neighbour, contract.test_independence_rows_may_come_and_go
    ),
    "independence: old pages in table rows past the batch": Mutation(
        old_pages_in_table_rows_past_the_batch,
        _of_the_planner(test_planner.test_a_page_table_names_its_owners_pages_and_the_sink),
    ),
    "independence: reused noise": Mutation(reused_noise, sampled_chain),
    "independence: penalties see the last token only": Mutation(
        penalties_see_the_last_token_only, sampled_chain
    ),
    "isolation: counts of the last owner": Mutation(
        counts_of_the_last_owner, contract.test_a_new_owner_starts_from_nothing
    ),
    "isolation: NaN left in a page": Mutation(nan_left_in_a_page, heir_of_nan),
    "isolation: state reset by a product": Mutation(state_reset_by_a_product, heir_of_nan),
    "isolation: NaN fails the whole step": Mutation(
        nan_fails_the_whole_step,
        partial(contract.test_isolation_nan_fails_its_row_only, shape=PLAIN),
    ),
}
