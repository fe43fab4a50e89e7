"""Planted faults by test file: one fault for each guarantee, and the test that must detect it.

A fault is planted in the reference backend, its specification, or the host engine. Tests reach
backends only through the boundary, so a fault of a device program looks the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.backends import make_backend
from tests.support.contract_host import (
    CHAIN,
    GREEDY,
    PLAIN,
    SAMPLED,
    Host,
    Texts,
    contract_capacity,
    contract_model,
)
from tests.support.grammar_cases import Backends
from tests.support.planted_faults import (
    Patch,
    accepted_branch_not_moved,
    conv_window_of_the_root,
    counts_of_the_last_owner,
    deeper_drafts_go_before_their_parents,
    depth_taken_for_the_node_number,
    export_reads_first_snapshot,
    failed_rows_rank_as_their_roots,
    full_page_rewritten,
    holes_in_draft_memory_read,
    import_leaves_out_states,
    import_writes_next_pages,
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
from tests.support.scheduled_requests import House
from tests.support.toy_backend import toy_capacity
from tests.support.tree_subjects import TAKING_TURNS, TREE, Served

Test = Callable[..., None]
Call = Callable[[Test, Texts], None]
"""Calls a test; plain texts are kept for the next one."""

_TEXTS: Texts = {}
"""Filled before any fault is planted; a planted fault must not change the reference."""


@dataclass(frozen=True)
class Mutation:
    """A fault and its proof.

    Attributes:
      plant: Puts the fault in; undone by the patch's end.
      test: Of the file; passes without the fault and must fail with it.
      call: Calls it.
    """

    plant: Callable[[Patch], None]
    test: str
    call: Call


def prover(file: str, names: dict[str, Any]) -> Test:
    """A test that each fault of a file is seen by the test that names it.

    Args:
      file: Of `MUTATIONS`.
      names: The file's, among them its tests.
    """

    @pytest.mark.parametrize("fault", MUTATIONS[file])
    def test(fault: str, monkeypatch: Patch) -> None:
        _prove(MUTATIONS[file][fault], names, monkeypatch)

    return test


def _prove(mutation: Mutation, names: dict[str, Any], patch: Patch) -> None:
    """The test passes, and fails once the fault is planted."""
    test = names[mutation.test]
    mutation.call(test, _TEXTS)
    mutation.plant(patch)
    # A kept stale row ends its request twice, which the engine's own checks reject.
    with pytest.raises((AssertionError, KeyError)):
        mutation.call(test, dict(_TEXTS))


def _new_host(texts: Texts) -> Host:
    config, weights = contract_model()
    return Host(
        make_backend("reference", config, weights, contract_capacity(config), "NEXTN"), texts
    )


def _on_a_host(**given: Any) -> Call:
    return lambda test, texts: test(_new_host(texts), **given)


def _on_the_toy(**given: Any) -> Call:
    return lambda test, texts: test(**given)


def _of_the_planner(test: Test, texts: Texts) -> None:
    test(House(toy_capacity(num_pages=300, num_slots=6, overlap=1)))


def _of_the_sink(test: Test, texts: Texts) -> None:
    host = _new_host(texts)
    backend: Any = host.backend  # a reference backend: the boundary does not expose lengths
    test(host, lambda: int(backend.state.lengths[0]), "chain")


def _grown(**given: Any) -> Call:
    """Runs on a host of its own, with a backend that grows trees of every shape."""
    served = Served()
    return lambda test, texts: test(Host(served.backend("reference", "NEXTN"), {}), **given)


def _at_every_node(how: dict) -> Call:
    def call(test: Test, texts: Texts) -> None:
        with pytest.MonkeyPatch.context() as patch:
            given = {"shape": TREE, "how": how, "monkeypatch": patch}
            _grown(drafted="NEXTN", **given)(test, texts)

    return call


def _texts_with_grammars(test: Test, texts: Texts) -> None:
    """Runs on a backend of its own, with the hybrid's drafter."""
    backends = Backends()
    test(backends)
    backends.close()


_CHAIN_TEXT = "test_chain_output_equals_plain_and_accepts_drafts"
_CONTINUATION = "test_decode_continues_from_device_state_across_shapes"
_NAN_HEIR = "test_nan_in_freed_slot_harms_no_new_owner"
_CROWDED = (
    "test_output_equals_plain_for_overlap_drafts_and_pages",
    _on_the_toy(overlap=2, depth=3, num_pages=38),
)
_EVERY_NODE = "test_every_tree_node_samples_as_plain_decoding"
_OWN_MASK = "test_every_node_chooses_by_own_mask"
_GRAMMAR_TEXTS = ("test_grammar_output_reaches_stop", _texts_with_grammars)

MUTATIONS: dict[str, dict[str, Mutation]] = {
    "boundary/test_backend_contract": {
        "order: prefills overtake decodes": Mutation(
            prefills_overtake_decodes,
            "test_steps_take_effect_in_submission_order",
            _on_a_host(shape=PLAIN),
        ),
        "continuation: the newest token lags": Mutation(
            newest_token_lags, _CONTINUATION, _on_a_host(how=GREEDY)
        ),
        "continuation: length off by one": Mutation(
            length_off_by_one, _CONTINUATION, _on_a_host(how=SAMPLED)
        ),
        "reach: stale state after zero accepts": Mutation(
            stale_state_after_zero_accepts, _CHAIN_TEXT, _on_a_host(seed=1, how=GREEDY)
        ),
        "reach: a full page is rewritten": Mutation(
            full_page_rewritten,
            "test_shared_full_pages_are_never_written",
            _on_a_host(),
        ),
        "bound: the scratch of a step is too small": Mutation(
            scratch_of_a_step_too_small,
            "test_step_stays_within_page_reservation",
            _on_a_host(shape=CHAIN, length=21),
        ),
        "a sink that grows": Mutation(
            sink_grows, "test_scratch_slot_length_stays_zero", _of_the_sink
        ),
        "independence: a neighbour's pages": Mutation(
            pages_of_a_neighbour, "test_output_independent_of_batch_composition", _on_a_host()
        ),
        "independence: reused noise": Mutation(
            reused_noise, _CHAIN_TEXT, _on_a_host(seed=1, how=SAMPLED)
        ),
        "independence: penalties see the last token only": Mutation(
            penalties_see_the_last_token_only, _CHAIN_TEXT, _on_a_host(seed=1, how=SAMPLED)
        ),
        "isolation: counts of the last owner": Mutation(
            counts_of_the_last_owner, "test_new_slot_owner_starts_from_clean_state", _on_a_host()
        ),
        "isolation: NaN left in a page": Mutation(
            nan_left_in_a_page, _NAN_HEIR, _on_a_host(shape=PLAIN)
        ),
        "isolation: state reset by a product": Mutation(
            state_reset_by_a_product, _NAN_HEIR, _on_a_host(shape=PLAIN)
        ),
        "isolation: NaN fails the whole step": Mutation(
            nan_fails_the_whole_step,
            "test_nan_fails_only_its_row",
            _on_a_host(shape=PLAIN),
        ),
    },
    "boundary/test_backend_contract_memory": {
        "reach: an accepted branch is not moved": Mutation(
            accepted_branch_not_moved,
            "test_host_tree_output_equals_plain",
            _on_a_host(how=GREEDY, right=2),
        ),
        "reach: a snapshot is taken at the end of the step": Mutation(
            snapshot_taken_at_the_end_of_the_step,
            "test_decode_saves_snapshot_exactly_when_passing_position",
            _on_a_host(shape=CHAIN),
        ),
        "reach: holes in draft memory are read": Mutation(
            holes_in_draft_memory_read, "test_gaps_in_draft_kv_are_never_read", _on_a_host()
        ),
    },
    "boundary/test_transfer_contract": {
        "transfer: an import writes the next pages": Mutation(
            import_writes_next_pages, "test_import_writes_only_named_pages", _on_a_host()
        ),
        "transfer: an export reads the first snapshot": Mutation(
            export_reads_first_snapshot, "test_export_reads_no_unnamed_snapshot", _on_a_host()
        ),
        "transfer: an import leaves out states": Mutation(
            import_leaves_out_states,
            "test_imported_prefix_continues_as_original",
            _on_a_host(shape=CHAIN),
        ),
    },
    "engine/test_engine": {
        "continuation: plan buffer refilled too early": Mutation(
            plan_buffer_refilled_too_early, *_CROWDED
        ),
        "continuation: a resume chooses its newest token again": Mutation(
            resume_chooses_again, *_CROWDED
        ),
        "a leaked page": Mutation(leaked_page, *_CROWDED),
        "late row kept": Mutation(late_row_kept, "test_stale_rows_are_dropped", _on_the_toy()),
    },
    "engine/test_scheduler": {
        "preemption does not wait for steps in flight": Mutation(
            preemption_ignores_steps_in_flight,
            "test_youngest_request_preempted_after_in_flight_steps",
            _on_the_toy(),
        ),
    },
    "engine/test_planner": {
        "independence: old pages in table rows past the batch": Mutation(
            old_pages_in_table_rows_past_the_batch,
            "test_plan_page_table_pads_with_scratch_page",
            _of_the_planner,
        ),
    },
    "device/test_tree_behaviour": {
        "trees: the mask row of another node": Mutation(
            mask_row_of_another_node, _EVERY_NODE, _at_every_node(SAMPLED)
        ),
        "trees: a sibling is visible": Mutation(
            sibling_visible, _EVERY_NODE, _at_every_node(SAMPLED)
        ),
        "trees: the window is not committed": Mutation(
            accepted_branch_not_moved,
            "test_grown_tree_preserves_output_and_accepts_branches",
            _grown(shape=TREE, how=GREEDY),
        ),
        "trees: positions and noise go by the node's number": Mutation(
            depth_taken_for_the_node_number, _EVERY_NODE, _at_every_node(SAMPLED)
        ),
        "trees: penalties see a node's own token only": Mutation(
            penalties_in_a_tree_see_the_node_only, _EVERY_NODE, _at_every_node(TAKING_TURNS)
        ),
        "trees: the parent's recurrent state is not used": Mutation(
            recurrent_state_of_the_root, _EVERY_NODE, _at_every_node(SAMPLED)
        ),
        "trees: the parent's window is not used": Mutation(
            conv_window_of_the_root, _EVERY_NODE, _at_every_node(SAMPLED)
        ),
        "trees: draft scratch of N only": Mutation(
            scratch_of_the_nodes_alone, "test_tree_drafting_writes_within_scratch", _grown()
        ),
    },
    "boundary/test_shared_rows": {
        "verify rows: a draft goes before its parent": Mutation(
            deeper_drafts_go_before_their_parents,
            "test_verify_budget_skips_unlikely_depths",
            _on_a_host(),
        ),
        "verify rows: padding has none": Mutation(
            padding_has_no_verify_row,
            "test_verify_budget_preserves_output_and_uses_all_rows",
            _on_a_host(),
        ),
        "verify rows: a failed row takes its neighbours'": Mutation(
            failed_rows_rank_as_their_roots,
            "test_failed_row_takes_no_verify_budget",
            _on_a_host(),
        ),
    },
    "boundary/test_grammar_bitmask": {
        "grammars: masks are left out": Mutation(
            masks_left_out, _OWN_MASK, _on_a_host(how=SAMPLED)
        ),
        "grammars: bits lie a word away": Mutation(
            masks_by_the_row_before, _OWN_MASK, _on_a_host(how=GREEDY)
        ),
    },
    "device/test_grammar": {
        "grammars: nodes have the mask of their root": Mutation(
            masks_of_the_root_alone, *_GRAMMAR_TEXTS
        ),
        "grammars: the matcher is a token behind": Mutation(
            masks_of_the_step_before, *_GRAMMAR_TEXTS
        ),
    },
    "engine/test_grammar": {
        "grammars: the matcher stays at a draft": Mutation(
            matcher_left_at_a_draft,
            "test_grammar_masks_cover_reachable_tree_nodes",
            _on_the_toy(),
        ),
    },
}
"""By test file under `tests`, and by name."""
