"""Step plans: all fields of all rows, the smallest program, a separate buffer."""

import time
from dataclasses import replace

import numpy as np
import pytest

from shared.boundary.backend import Decode, Prefill
from shared.boundary.program import ProgramFeature
from shared.engine.planner import Planner
from shared.engine.request import Request, SamplingParams
from shared.engine.rows import Chunk, ScheduledRows
from shared.spec.draft_tree import TreeShape
from tests.support.mutations import prover
from tests.support.scheduled_requests import House
from tests.support.toy_backend import VOCAB, toy_capacity

CHAIN = TreeShape.chain(3, 4)


@pytest.fixture
def house() -> House:
    return House(toy_capacity(num_pages=300, num_slots=6, overlap=1))


def test_decode_plan_contains_all_row_fields(house):
    first = house.request(
        5,
        20,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed32=2**32 - 1,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        min_tokens=4,
        stop_token_ids=(11,),
        logit_bias={3: -100.0},
        logprobs=2,
        max_draft_tokens=1,
    )
    second = house.request(3, 9)
    plan = house.planner.plan(ScheduledRows.decode([first, second], TreeShape.chain(3, 4)))
    assert isinstance(plan.work, Decode)
    assert plan.program.batch == 4  # the rows of the shape belong to this batch
    assert plan.slots.tolist() == [first.slot, second.slot, 0, 0]
    assert plan.starts.tolist() == [0, 0, 0, 0]
    sampling = plan.sampling
    assert sampling.temperature.tolist() == [0.5, 1, 0, 0]
    np.testing.assert_array_equal(sampling.top_p, np.float32([0.9, 1, 1, 1]))
    assert sampling.top_k.tolist() == [7, VOCAB, VOCAB, VOCAB]
    np.testing.assert_array_equal(sampling.min_p, np.float32([0.1, 0, 0, 0]))
    assert sampling.seed.tolist() == [2**32 - 1, 0, 0, 0]
    assert sampling.presence.tolist() == [0.25, 0, 0, 0]
    assert sampling.frequency.tolist() == [-0.5, 0, 0, 0]
    assert sampling.repetition.tolist() == [1.5, 1, 1, 1]
    assert sampling.prompt_length.tolist() == [5, 3, 0, 0]
    assert sampling.min_length.tolist() == [9, 0, 0, 0]
    assert sampling.max_drafts.tolist() == [1, 3, 0, 0]
    assert sampling.stop_ids.tolist() == [[11, 11], [0, 0], [0, 0], [0, 0]]
    assert sampling.bias_ids.tolist() == [[3], [0], [0], [0]]
    assert sampling.bias_values.tolist() == [[-100.0], [0], [0], [0]]
    for calibration in (sampling.calibration, sampling.branch_calibration):
        assert not calibration.any()
        assert calibration.shape == (4, 3)
    assert plan.reports.tolist() == [1, 0, 0, 0]
    for field in (plan.snapshots.restore, plan.snapshots.save, plan.draft_from):
        assert not field.any()


def test_plan_calibration_applies_to_one_step_only(house):
    known = np.array([[-0.5, -1, -2], [0, -0.25, -np.inf]], np.float32)
    off_path = np.array([0, -1, -3], np.float32)
    requests = [house.request(5, 20), house.request(3, 9)]
    rows = ScheduledRows.decode(requests, CHAIN, calibration=known)
    rows = replace(rows, branch_calibration=off_path)
    sampling = house.planner.plan(rows).sampling
    np.testing.assert_array_equal(sampling.calibration[:2], known)
    np.testing.assert_array_equal(sampling.branch_calibration[:2], [off_path] * 2)
    assert not sampling.calibration[2:].any()
    assert not sampling.branch_calibration[2:].any()
    sampling = house.planner.plan(ScheduledRows.decode(requests, CHAIN)).sampling
    assert not sampling.calibration.any()
    assert not sampling.branch_calibration.any()


@pytest.mark.parametrize("is_ahead", [False, True], ids=["on demand", "prepared"])
def test_incremental_plan_equals_fresh_plan(house, is_ahead: bool):
    def is_as_anew(rows: ScheduledRows) -> bool:
        anew = Planner(house.capacity, house.allocator)
        for request in rows.requests:
            anew.write_request_row(request)
        got, want = house.planner.plan(rows), anew.plan(rows)
        if is_ahead:
            house.planner.prepare_next(got.program)
        is_same = bool((got.buffer == want.buffer).all())
        got.buffer[:] = -1  # the backend owns it from here on
        return is_same

    first, second = house.request(5, 4, temperature=0.5), house.request(3, 9, seed32=7)
    rows = ScheduledRows.decode([first, second], CHAIN)
    assert is_as_anew(rows)
    assert is_as_anew(rows)
    assert house.allocator.reserve(first.slot, 12)  # new pages
    assert is_as_anew(rows)
    assert is_as_anew(ScheduledRows.decode([second, first], CHAIN))
    house.allocator.free(second.slot)
    assert (third := house.request(6, 9, top_p=0.5)).slot == second.slot
    assert is_as_anew(ScheduledRows.decode([third, first], CHAIN))


def test_planner_selects_logprobs_program_only_when_requested():
    capacity = toy_capacity(num_pages=300, num_slots=6, overlap=1)
    plain = tuple(
        program.with_features({ProgramFeature.LOGPROBS: False}) for program in capacity.programs
    )
    house = House(replace(capacity, programs=(*capacity.programs, *plain)))
    with_logprobs, other = house.request(5, 20, logprobs=0), house.request(5, 20)
    for requests in ([other], [with_logprobs, other]):
        decode = house.planner.plan(ScheduledRows.decode(requests, TreeShape.chain(3, 4)))
        chunks = tuple(Chunk(request, 0, 5) for request in requests)
        prefill = house.planner.plan(ScheduledRows.prefill(chunks))
        for plan in (decode, prefill):
            assert plan.program.has(ProgramFeature.LOGPROBS) is (with_logprobs in requests)
        for plan in (decode, prefill):
            assert plan.reports[: len(requests)].tolist() == [
                int(r is with_logprobs) for r in requests
            ]


def test_planner_uses_logprobs_program_when_only_fit():
    """A step without logprobs uses it only if no other program is wide enough."""
    capacity = toy_capacity(num_pages=300, num_slots=6, overlap=1)
    programs = [p.with_features({ProgramFeature.LOGPROBS: p.batch == 4}) for p in capacity.programs]
    house = House(replace(capacity, programs=tuple(programs)))
    requests = [house.request(5, 20) for _ in range(4)]
    with_logprobs = house.request(5, 20, logprobs=0)
    for rows, batch in ((requests[:2], 2), (requests, 4), ([with_logprobs], 4)):
        for depth in (0, 3):
            plan = house.planner.plan(ScheduledRows.decode(rows, TreeShape.chain(depth, len(rows))))
            assert (plan.program.batch, plan.program.has(ProgramFeature.LOGPROBS)) == (
                batch,
                batch == 4,
            )
            assert plan.reports[: len(rows)].tolist() == [int(row is with_logprobs) for row in rows]
            assert not plan.reports[len(rows) :].any()


def test_plan_page_table_pads_with_scratch_page(house):
    """Trap: draft page table rows past the batch kept old ids (TokenSpeed 955)."""
    first, second = house.request(5, 20), house.request(3, 9)
    plan = house.planner.plan(ScheduledRows.decode([second, first], CHAIN))
    held = house.allocator.pages.page_table
    assert plan.program.pages == 16
    np.testing.assert_array_equal(plan.page_table[0, :3], held[second.slot, :3])
    np.testing.assert_array_equal(plan.page_table[1, :5], held[first.slot, :5])
    assert not plan.page_table[0, 3:].any()
    assert not plan.page_table[1, 5:].any()
    assert not plan.page_table[2:].any()


def test_plan_page_table_width_fits_longest_reservation(house):
    short, long = house.request(3, 9), house.request(3, 65)
    assert house.planner.plan(ScheduledRows.decode([short], CHAIN)).program.pages == 16
    assert house.planner.plan(ScheduledRows.decode([short, long], CHAIN)).program.pages == 128


def test_reused_slot_gets_new_sampling_parameters(house):
    how = {"stop_token_ids": (4, 5), "min_tokens": 2, "logit_bias": {1: 2.0}, "logprobs": 1}
    first = house.request(5, 8, **how)
    house.allocator.free(first.slot)
    second = house.request(2, 8)
    assert first.slot == second.slot
    plan = house.planner.plan(ScheduledRows.decode([second], CHAIN))
    sampling = plan.sampling
    assert plan.reports[0] == 0
    assert sampling.min_length[0] == 0
    assert sampling.stop_ids[0].tolist() == [0, 0]
    assert sampling.bias_values[0].tolist() == [0.0]


def test_prefill_plan_packs_chunks_contiguously(house):
    first, second = house.request(70, 70), house.request(3, 3)
    rows = ScheduledRows.prefill((Chunk(first, 64, 70), Chunk(second, 0, 3)))
    plan = house.planner.plan(rows)
    work = plan.work
    assert isinstance(work, Prefill)
    assert (plan.program.tokens, plan.program.batch) == (64, 2)
    assert work.row_starts.tolist() == [0, 6, 9]
    assert work.tokens[:9].tolist() == [65, 66, 67, 68, 69, 70, 1, 2, 3]
    assert not work.tokens[9:].any()
    assert work.first_positions.tolist() == [64, 0]
    assert work.ends_prompt.tolist() == [1, 1]
    assert plan.starts.tolist() == [0, 1]


def test_partial_chunk_plan_sets_next_token(house):
    request = house.request(70, 70)
    work = house.planner.plan(ScheduledRows.prefill((Chunk(request, 0, 64),))).work
    assert (work.ends_prompt[0], work.next_tokens[0]) == (0, 65)
    assert work.row_starts.tolist() == [0, 64, 64]


@pytest.mark.parametrize("output", [[], [9, 10]], ids=["admitted", "resumed"])
def test_plan_starts_set_only_for_first_chunk(house, output):
    prompt = tuple(range(140))
    request = Request(request_id=0, prompt=prompt, sampling=SamplingParams(), output=output)
    house.place(request, 150, first_position=64)
    other = house.request(70, 70)
    first = ScheduledRows.prefill((Chunk(request, 64, 128), Chunk(other, 64, 70)))
    assert house.planner.plan(first).starts.tolist() == [1, 0]
    rest = ScheduledRows.prefill((Chunk(request, 128, 140),))
    assert house.planner.plan(rest).starts.tolist() == [0, 0]


def test_resumed_prefill_excludes_last_output_token(house):
    request = Request(request_id=0, prompt=(7, 8), sampling=SamplingParams(), output=[9, 10, 11])
    house.place(request, 8)
    assert request.prefill_length == 4
    chunk = Chunk(request, 0, 4)
    plan = house.planner.plan(ScheduledRows.prefill((chunk,)))
    assert plan.work.tokens[:4].tolist() == [7, 8, 9, 10]
    assert (plan.work.ends_prompt[0], plan.work.next_tokens[0], plan.starts[0]) == (0, 11, 1)
    assert ScheduledRows.prefill((chunk,)).max_tokens == [0]


def test_select_program_returns_smallest_fit(house):
    pick, requests = house.planner.select_program, [house.request(65, 65) for _ in range(3)]
    short = [house.request(1, 4), house.request(1, 4)]
    assert pick(ScheduledRows.prefill((Chunk(short[0], 0, 65),))).tokens == 128
    assert pick(ScheduledRows.prefill((Chunk(short[0], 0, 64),))).tokens == 64
    one_each = ScheduledRows.prefill(tuple(Chunk(request, 0, 1) for request in requests))
    assert (pick(one_each).pages, pick(one_each).batch) == (128, 4)  # 17 pages each
    assert pick(ScheduledRows.decode(short, TreeShape.chain(3, 2))).batch == 2
    assert pick(ScheduledRows.decode(short, TreeShape.chain(3, 2))).pages == 16
    assert pick(ScheduledRows.decode(short[:1], TreeShape.chain(0, 4))).shape.is_plain


def test_plan_without_fitting_program_raises(house):
    rows = ScheduledRows.decode([house.request(1, 4) for _ in range(5)], CHAIN)
    with pytest.raises(LookupError, match="no decode program holds"):
        house.planner.plan(rows)


def test_decode_plan_rejects_unfinished_prefill(house):
    """The same holds for a row with a partly prefilled prompt."""
    request = house.request(70, 70)
    for prefilled in (0, 64):
        request.prefill(prefilled)
        with pytest.raises(ValueError, match=f"request 0 has {prefilled} of 70 tokens prefilled"):
            house.planner.plan(ScheduledRows.decode([request], CHAIN))
    request.prefill(70)
    assert not house.planner.plan(ScheduledRows.decode([request], CHAIN)).starts.any()


def test_plan_buffers_do_not_share_memory(house):
    """JAX on a CPU reads the caller's memory after dispatch, so a reused buffer is an error."""
    rows = ScheduledRows.decode([house.request(5, 20)], CHAIN)
    plans = [house.planner.plan(rows) for _ in range(4)]
    for index, plan in enumerate(plans):
        assert np.shares_memory(plan.slots, plan.buffer)
        assert np.shares_memory(plan.page_table, plan.buffer)
        assert np.shares_memory(plan.sampling.seed, plan.buffer)
        others = [*(each.buffer for each in plans[:index]), house.allocator.pages.page_table]
        for memory in others:
            assert not np.shares_memory(plan.buffer, memory)


def test_decode_plan_of_32_rows_under_one_millisecond():
    capacity = toy_capacity(
        num_pages=3000, num_slots=33, overlap=1, context_length=400, batch_sizes=(32,)
    )
    house = House(capacity)
    rows = ScheduledRows.decode([house.request(5, 300) for _ in range(32)], TreeShape.chain(3, 32))
    times_s = []
    for _ in range(50):
        start = time.perf_counter()
        house.planner.plan(rows)
        times_s.append(time.perf_counter() - start)
    # About 70 us on an idle core; the limit allows for a loaded machine.
    assert min(times_s) < 1e-3


test_planted_fault_is_detected = prover("engine/test_planner", globals())
