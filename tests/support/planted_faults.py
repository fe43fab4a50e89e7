"""Faults that can be planted in the reference backend, its specifications or the host engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shared.boundary.backend import Decode, StepPlan, StepResult
from shared.engine import planner
from shared.engine.allocator import Allocator
from shared.engine.engine import Engine
from shared.engine.grammar import GrammarState
from shared.engine.planner import Planner
from shared.engine.request import Request
from shared.engine.rows import Chunk, ScheduledRows
from shared.reference import backend as reference
from shared.reference.backend import Batch, ReferenceBackend
from shared.reference.device_state import DeviceState
from shared.spec import (
    acceptance,
    attention,
    draft_tree,
    gated_delta,
    grammar_bitmask,
    kv_transfer,
    recurrent_mixer,
    recurrent_state,
    sampling,
    slot_state,
    verify_budget,
)
from shared.text.grammar import TextMatcher

Patch = pytest.MonkeyPatch


def after(patch: Patch, owner: Any, name: str, spoil: Callable[..., Any]) -> None:
    """Lets `spoil(result, *arguments)` replace the result of a function."""
    healthy = getattr(owner, name)

    def faulty(*arguments: Any, **named: Any) -> Any:
        return spoil(healthy(*arguments, **named), *arguments, **named)

    patch.setattr(owner, name, faulty)


# Order and continuation


class _LateFuture:
    def __init__(self, run: Callable[[], StepResult]) -> None:
        self._run, self._result = run, None

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
    healthy = reference.commit

    def commit(state: DeviceState, batch: Batch, *arguments: Any) -> Any:
        before = state.newest.copy()
        passed = healthy(state, batch, *arguments)
        state.newest[:] = before
        return passed

    patch.setattr(reference, "commit", commit)


def length_off_by_one(patch: Patch) -> None:
    def spoil(result: Any, backend: ReferenceBackend, batch: Batch, *rest: Any) -> Any:
        backend.state.lengths[batch.slots] += 1
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
    patch.setattr(Engine, "is_stale", staticmethod(lambda request: False))


def preemption_ignores_steps_in_flight(patch: Patch) -> None:
    patch.setattr(Request, "has_no_step_in_flight", property(lambda request: True))


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

    after(patch, recurrent_state, "replay", spoil)


def full_page_rewritten(patch: Patch) -> None:
    def spoil(result: Any, state: DeviceState, batch: Batch, *rest: Any) -> Any:
        state.kv[0][:, 1, batch.page_table[:, 2]] *= np.float32(0.5)
        return result

    after(patch, reference, "commit", spoil)


def scratch_of_a_step_too_small(patch: Patch) -> None:
    patch.setattr(draft_tree.TreeShape, "scratch", property(lambda shape: shape.depth))


def accepted_branch_not_moved(patch: Patch) -> None:
    patch.setattr(attention, "compact_accepted_kv", lambda pages, *rest, **named: pages)


def snapshot_taken_at_the_end_of_the_step(patch: Patch) -> None:
    def spoil(found: Any, *rest: Any) -> Any:
        new, _, passed = found
        return new, new, passed

    after(patch, recurrent_state, "replay", spoil)


def holes_in_draft_memory_read(patch: Patch) -> None:
    def spoil(result: Any, backend: ReferenceBackend, batch: Batch, *rest: Any) -> Any:
        backend.state.draft_from[batch.slots] = 0
        return result

    after(patch, ReferenceBackend, "_extend", spoil)


def leaked_page(patch: Patch) -> None:
    def spoil(result: None, allocator: Allocator, slot: int) -> None:
        allocator.pages.num_free -= 1

    after(patch, Allocator, "free", spoil)


def sink_grows(patch: Patch) -> None:
    def spoil(result: Any, backend: ReferenceBackend, plan: StepPlan) -> Any:
        backend.state.lengths[0] += 1
        return result

    after(patch, ReferenceBackend, "_run", spoil)


# Independence and isolation


def pages_of_a_neighbour(patch: Patch) -> None:
    def spoil(batch: Batch, *given: Any) -> Batch:
        return replace(batch, page_table=np.roll(batch.page_table, 1, axis=0))

    after(patch, Batch, "of", spoil)


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
    healthy = slot_state.count

    def count(seen: Any, owners: Any, tokens: Any, is_output: Any, is_counted: Any) -> Any:
        last = {owners[i]: i for i in np.flatnonzero(is_counted)}
        is_last = np.isin(np.arange(len(tokens)), list(last.values()))
        return healthy(seen, owners, tokens, is_output, is_last)

    patch.setattr(slot_state, "count", count)


def counts_of_the_last_owner(patch: Patch) -> None:
    healthy = ReferenceBackend._start

    def start(backend: ReferenceBackend, batch: Batch) -> None:
        before = backend.state.seen.copy()
        healthy(backend, batch)
        backend.state.seen[:] = before

    patch.setattr(ReferenceBackend, "_start", start)


def nan_left_in_a_page(patch: Patch) -> None:
    patch.setattr(attention, "np", _KeepsMaskedValues())


class _KeepsMaskedValues:
    """numpy, except for the `where` that replaces invisible positions by 0."""

    def where(self, condition: Any, kept: Any, otherwise: Any) -> Any:
        is_mask_of_values = np.ndim(kept) == 4 and np.isscalar(otherwise) and otherwise == 0
        return kept if is_mask_of_values else np.where(condition, kept, otherwise)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def state_reset_by_a_product(patch: Patch) -> None:
    healthy = ReferenceBackend._start

    def start(backend: ReferenceBackend, batch: Batch) -> None:
        slots = batch.slots[batch.starts]
        before = backend.state.delta.recurrent[:, slots].copy()
        healthy(backend, batch)
        backend.state.delta.recurrent[:, slots] += 0 * before

    patch.setattr(ReferenceBackend, "_start", start)


def nan_fails_the_whole_step(patch: Patch) -> None:
    def spoil(failed: Any, *rest: Any) -> Any:
        return np.repeat(failed.any(), len(failed))

    after(patch, acceptance, "failed", spoil)


# Trees


def mask_row_of_another_node(patch: Patch) -> None:
    after(patch, draft_tree, "ancestors", lambda sees, parents: np.roll(sees, 1, axis=1))


def sibling_visible(patch: Patch) -> None:
    def spoil(sees: Any, parents: Any) -> Any:
        is_draft = np.arange(parents.shape[1]) > 0
        are_siblings = (parents[:, :, None] == parents[:, None, :]) & is_draft & is_draft[:, None]
        return sees | are_siblings

    after(patch, draft_tree, "ancestors", spoil)


def depth_taken_for_the_node_number(patch: Patch) -> None:
    after(
        patch,
        draft_tree,
        "depths",
        lambda depths, parents: np.broadcast_to(np.arange(parents.shape[1]), parents.shape),
    )


def penalties_in_a_tree_see_the_node_only(patch: Patch) -> None:
    def spoil(seen: Any, *trees: Any) -> Any:
        node = trees[-1][:, None]
        is_node = np.arange(seen.path.shape[1]) == node
        return replace(seen, on_path=is_node & (node > 0))

    after(patch, sampling, "counts_in_trees", spoil)


def recurrent_state_of_the_root(patch: Patch) -> None:
    healthy = gated_delta.verify

    def verify(*arguments: Any) -> Any:
        *tokens, parents = arguments
        return healthy(*tokens, np.zeros_like(parents))

    patch.setattr(gated_delta, "verify", verify)


def conv_window_of_the_root(patch: Patch) -> None:
    healthy = recurrent_state.tree_windows
    patch.setattr(
        recurrent_mixer,
        "tree_windows",
        lambda window, inputs, parents: healthy(window, inputs, np.zeros_like(parents)),
    )


def scratch_of_the_nodes_alone(patch: Patch) -> None:
    patch.setattr(draft_tree.TreeShape, "scratch", property(lambda shape: shape.nodes))


# Shared verify rows


def deeper_drafts_go_before_their_parents(patch: Patch) -> None:
    def rank_weights(parents: Any, weights: Any, calibration: Any) -> Any:
        depth = draft_tree.depths(parents)
        known = np.take_along_axis(calibration, np.maximum(depth - 1, 0), axis=1)
        return np.where(depth > 0, weights + known, 0)

    patch.setattr(verify_budget, "log_acceptance", rank_weights)


def padding_has_no_verify_row(patch: Patch) -> None:
    after(patch, Batch, "of", lambda batch, *rest: replace(batch, num_padding=0))


def failed_rows_rank_as_their_roots(patch: Patch) -> None:
    def spoil(ranked: Any, *rest: Any) -> Any:
        return np.where(ranked == -np.inf, 0, ranked)

    after(patch, verify_budget, "log_acceptance", spoil)


# The faults and their proofs


# Grammars


def masks_of_the_root_alone(patch: Patch) -> None:
    """Every node chooses by the mask of its tree's root."""
    healthy = ScheduledRows.fill

    def fill(rows: ScheduledRows, plan: StepPlan) -> None:
        healthy(rows, plan)
        if plan.mask is not None:
            plan.mask.index[:] = plan.mask.index[:, :1]

    patch.setattr(ScheduledRows, "fill", fill)


def masks_of_the_step_before(patch: Patch) -> None:
    """A matcher that is one token late."""
    healthy = GrammarState.take

    def take(held: GrammarState, token: int) -> bool:
        before, held._late = getattr(held, "_late", None), token
        return before is None or healthy(held, before)

    patch.setattr(GrammarState, "take", take)


def masks_left_out(patch: Patch) -> None:
    """A device that chooses as if there were none."""
    patch.setattr(
        grammar_bitmask, "allowed", lambda bits, index, vocab: np.ones((len(index), vocab), bool)
    )


def masks_by_the_row_before(patch: Patch) -> None:
    """Bits that are shifted by one word."""
    after(patch, grammar_bitmask, "allowed", lambda found, *given: np.roll(found, 32, axis=1))


def matcher_left_at_a_draft(patch: Patch) -> None:
    """A walk over a tree that does not come back."""
    patch.setattr(TextMatcher, "rollback", lambda matcher: None)


# KV transfer


def import_writes_next_pages(patch: Patch) -> None:
    healthy = kv_transfer.with_pages
    patch.setattr(kv_transfer, "with_pages", lambda kv, pages, words: healthy(kv, pages + 1, words))


def export_reads_first_snapshot(patch: Patch) -> None:
    healthy = kv_transfer.layer_words
    patch.setattr(kv_transfer, "layer_words", lambda states, snapshot: healthy(states, 1))


def import_leaves_out_states(patch: Patch) -> None:
    patch.setattr(kv_transfer, "with_layers", lambda states, snapshot, words: states)
