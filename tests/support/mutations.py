"""Planted faults: for each promise one that breaks it, and the test that must see it.

A fault is planted in the reference backend, the specification it runs, or the host engine. What a
fault of a device program would look like is the same: the tests know backends only by the boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tests.boundary import test_backend_contract as contract
from tests.boundary import test_backend_contract_memory as memory
from tests.boundary import test_grammar_masks as grammar_masks
from tests.boundary import test_shared_rows as shared_rows
from tests.device import test_grammar as grammar_texts
from tests.device import test_tree_behaviour as trees
from tests.engine import test_engine, test_grammar, test_planner, test_scheduler
from tests.support.contract_host import CHAIN, GREEDY, PLAIN, SAMPLED, Host
from tests.support.faults import (
    Patch,
    accepted_branch_not_moved,
    conv_window_of_the_root,
    counts_of_the_last_owner,
    deeper_drafts_go_before_their_parents,
    depth_taken_for_the_node_number,
    failed_rows_rank_as_their_roots,
    full_page_rewritten,
    holes_in_draft_memory_read,
    late_row_kept,
    leaked_page,
    length_off_by_one,
    mask_row_of_another_node,
    masks_by_the_row_before,
    masks_left_out,
    masks_of_the_root_alone,
    masks_of_the_step_before,
    matcher_left_at_a_draft,
    nan_fails_the_whole_step,
    nan_left_in_a_page,
    newest_token_lags,
    old_pages_in_table_rows_past_the_batch,
    padding_has_no_verify_row,
    pages_of_a_neighbour,
    penalties_in_a_tree_see_the_node_only,
    penalties_see_the_last_token_only,
    plan_buffer_refilled_too_early,
    preemption_ignores_steps_in_flight,
    prefills_overtake_decodes,
    recurrent_state_of_the_root,
    resume_chooses_again,
    reused_noise,
    scratch_of_a_step_too_small,
    scratch_of_the_nodes_alone,
    sibling_visible,
    sink_grows,
    snapshot_taken_at_the_end_of_the_step,
    stale_state_after_zero_accepts,
    state_reset_by_a_product,
)
from tests.support.grammar_cases import Backends
from tests.support.house import House
from tests.support.toy_backend import toy_limits
from tests.support.tree_subjects import TREE, Served

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


def _on_the_toy(test: Callable[..., None], **given: Any) -> Proof:
    return lambda host: test(**given)


def _of_the_planner(test: Callable[..., None]) -> Proof:
    limits = toy_limits(num_pages=300, num_slots=6, overlap=1)
    return lambda host: test(House(limits))


def _of_the_sink(host: Host) -> None:
    backend: Any = host.backend  # a reference, whose lengths nothing at the boundary shows
    contract.test_the_sink_does_not_grow(host, lambda: int(backend.state.lengths[0]), "chain")


def _grown(test: Callable[..., None], **given: Any) -> Proof:
    """On a host of its own, whose backend grows trees of every shape."""
    served = Served()
    return lambda host: test(Host(served.backend("reference", "NEXTN"), {}), **given)


def _at_every_node(how: dict) -> Proof:
    test = trees.test_every_node_draws_what_plain_decoding_draws_after_its_path

    def proof(host: Host) -> None:
        with pytest.MonkeyPatch.context() as patch:
            given = {"shape": TREE, "how": how, "monkeypatch": patch}
            _grown(test, drafted="NEXTN", **given)(host)

    return proof


def _texts_with_grammars(host: Host) -> None:
    """On a backend of its own, whose drafter is the hybrid's."""
    backends = Backends()
    grammar_texts.test_texts_come_to_the_end_of_their_grammars(backends)
    backends.close()


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
grown_tree = _grown(
    trees.test_a_grown_tree_gives_the_plain_text_and_accepts_some, shape=TREE, how=GREEDY
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
    "trees: the mask row of another node": Mutation(
        mask_row_of_another_node, _at_every_node(SAMPLED)
    ),
    "trees: a sibling is visible": Mutation(sibling_visible, _at_every_node(SAMPLED)),
    "trees: the window is not committed": Mutation(accepted_branch_not_moved, grown_tree),
    "trees: positions and noise go by the node's number": Mutation(
        depth_taken_for_the_node_number, _at_every_node(SAMPLED)
    ),
    "trees: penalties see a node's own token only": Mutation(
        penalties_in_a_tree_see_the_node_only, _at_every_node(trees.TAKING_TURNS)
    ),
    "trees: the parent's recurrent state is not used": Mutation(
        recurrent_state_of_the_root, _at_every_node(SAMPLED)
    ),
    "trees: the parent's window is not used": Mutation(
        conv_window_of_the_root, _at_every_node(SAMPLED)
    ),
    "trees: draft scratch of N only": Mutation(
        scratch_of_the_nodes_alone, _grown(trees.test_drafting_writes_within_its_scratch)
    ),
    "verify rows: a draft goes before its parent": Mutation(
        deeper_drafts_go_before_their_parents,
        shared_rows.test_a_depth_that_is_seldom_reached_is_not_verified,
    ),
    "verify rows: padding has none": Mutation(
        padding_has_no_verify_row,
        shared_rows.test_a_batch_that_shares_rows_gives_the_plain_texts_and_uses_them_all,
    ),
    "verify rows: a failed row takes its neighbours'": Mutation(
        failed_rows_rank_as_their_roots,
        shared_rows.test_isolation_a_failed_row_takes_no_verify_rows_from_its_neighbours,
    ),
    "grammars: masks are left out": Mutation(
        masks_left_out,
        partial(grammar_masks.test_every_node_chooses_by_the_mask_of_its_own, how=SAMPLED),
    ),
    "grammars: bits lie a word away": Mutation(
        masks_by_the_row_before,
        partial(grammar_masks.test_every_node_chooses_by_the_mask_of_its_own, how=GREEDY),
    ),
    "grammars: nodes have the mask of their root": Mutation(
        masks_of_the_root_alone, _texts_with_grammars
    ),
    "grammars: the matcher is a token behind": Mutation(
        masks_of_the_step_before, _texts_with_grammars
    ),
    "grammars: the matcher stays at a draft": Mutation(
        matcher_left_at_a_draft,
        _on_the_toy(test_grammar.test_every_node_that_can_be_reached_has_the_mask_of_its_path),
    ),
}
