"""The guarantees of `shared.boundary.backend`, each on every backend.

Each test compares two ways to the same output on one backend; correct outputs are tested
elsewhere. The model has a poisoned token, so that prompts can cause NaN.
"""

from __future__ import annotations

import numpy as np
import pytest

from shared.boundary.backend import Decode, Prefill, StepPlan
from shared.engine.rows import Chunk
from tests.support.contract_host import (
    BATCH,
    CHAIN,
    PAGE_SIZE,
    PLAIN,
    POISON,
    SAMPLED,
    either_sampling,
    either_shape,
    emitted,
    joined,
    prompt,
)
from tests.support.mutations import prover

# Speculation, order and continuation


@either_sampling
@pytest.mark.parametrize("seed", [1, 2])
def test_chain_output_equals_plain_and_accepts_drafts(host, seed, how):
    tokens = prompt(seed, 20)
    request = host.request(tokens, **how)
    futures = host.submit_text(request, 12, CHAIN)
    text = joined(futures, 0)
    assert text == host.alone(tokens, len(text), **how)
    counts = [int(future.result().counts[0]) for future in futures]
    assert all(1 <= count <= CHAIN.max_tokens for count in counts)
    assert sum(counts) > len(counts), "no draft was accepted, so nothing was tested"


@either_shape
def test_steps_take_effect_in_submission_order(host, shape):
    """The slot and pages of the first request are reused while its steps are in flight."""
    first_prompt, second_prompt = prompt(1, 20), prompt(2, 20)
    first = host.request(first_prompt, positions=120)
    first_futures = host.submit_text(first, 6, shape)
    second = host.heir(first, second_prompt, positions=120)
    second_futures = host.submit_text(second, 6, shape)
    host.allocator.free(second.slot)
    for futures, tokens in ((first_futures, first_prompt), (second_futures, second_prompt)):
        text = joined(futures, 0)
        assert text == host.alone(tokens, len(text))


@either_sampling
def test_decode_continues_from_device_state_across_shapes(host, how):
    """Steps run without waiting and shapes alternate: the device state keeps the length."""
    tokens = prompt(1, 20)
    request = host.request(tokens, **how)
    shapes = [CHAIN, PLAIN, CHAIN, CHAIN, PLAIN, PLAIN, CHAIN, CHAIN, CHAIN]
    plans = [host.prefill_plan(request)]
    plans += [host.decode_plan(request, shape=shape) for shape in shapes]
    text = joined([host.backend.submit(plan) for plan in plans], 0)
    assert text == host.alone(tokens, len(text), **how)


def test_prefill_output_independent_of_chunk_boundaries(host):
    tokens = prompt(4, 150)
    request = host.request(tokens)
    first = host.prefill(Chunk(request, 0, 64))
    assert first.counts[0] == 0
    rest = host.prefill(Chunk(request, 64, 150))
    text = [*emitted(rest, 0), *host.go_on(request, 8, CHAIN)]
    other = host.request(tokens)
    host.prefill(Chunk(other, 0, 128))
    last = host.prefill(Chunk(other, 128, 150))
    assert text == [*emitted(last, 0), *host.go_on(other, 8, PLAIN)]


def test_decode_allowed_after_partial_prefill(host):
    """It continues from `next_tokens`, which the device stores as the newest token."""
    tokens = prompt(5, 41)
    request = host.request(tokens)
    result = host.prefill(Chunk(request, 0, 40))
    assert result.counts[0] == 0
    assert not result.failed[0]
    drafted = host.decode(request, shape=CHAIN)
    assert drafted.num_nodes[0] == CHAIN.nodes, "the draft input of a partial prompt is missing"
    text = [*emitted(drafted, 0), *host.go_on(request, 8, CHAIN)]
    assert text == host.alone(tokens, len(text))


# Other slots and page reservations


@either_shape
def test_step_leaves_other_slots_unchanged(host, shape):
    tokens = prompt(6, 33)
    request = host.request(tokens, **SAMPLED)
    text = host.text(request, 5, PLAIN)
    for seed in range(3):
        busy = host.request(prompt(100 + seed, 60 + seed), **SAMPLED)
        host.text(busy, 6, shape)
    text += host.go_on(request, 10, shape)
    assert text == host.alone(tokens, len(text), **SAMPLED)


def test_shared_full_pages_are_never_written(host):
    """Rows with a common prefix, one of them from a snapshot, decode in one batch."""
    common = prompt(7, 64)
    first_prompt, second_prompt = (*common, *prompt(8, 9)), (*common, *prompt(9, 14))
    first = host.request(first_prompt)
    plan = host.prefill_plan(first)
    plan.snapshots.save[0], plan.snapshots.save_at[0] = 1, 64
    result = host.run(plan)
    assert result.snapshot_saved[0]
    texts = [emitted(result, 0), []]
    second = host.request(second_prompt)
    host.share(first, second, 64)
    texts[1] += emitted(host.run(host.restored_plan(second, 64, 1)), 0)
    for _ in range(6):
        result = host.decode(first, second, shape=CHAIN)
        texts = [[*text, *emitted(result, row)] for row, text in enumerate(texts)]
    third = host.request(second_prompt)
    host.share(first, third, 64)
    texts.append(emitted(host.run(host.restored_plan(third, 64, 1)), 0))
    texts[2] += host.go_on(third, 8, CHAIN)
    for text, tokens in zip(texts, (first_prompt, second_prompt, second_prompt), strict=True):
        assert text == host.alone(tokens, len(text))


@either_shape
@pytest.mark.parametrize("length", [20, 21, 22, 23])
def test_step_stays_within_page_reservation(host, shape, length):
    """The table continues with pages of a neighbour, and the neighbour's output must not change."""
    neighbour_prompt, tokens = prompt(10, 40), prompt(length, length)
    neighbour = host.request(neighbour_prompt)
    neighbours_text = host.text(neighbour, 2, PLAIN)
    request = host.request(tokens, positions=length)
    text = emitted(host.prefill(request), 0)
    while len(text) < 12:
        reserved = length + len(text) - 1 + shape.scratch
        host.allocator.reserve(request.slot, reserved)
        plan = host.decode_plan(request, shape=shape)
        held = -(-reserved // PAGE_SIZE)
        plan.page_table[0, held : held + 10] = host.allocator.pages.page_table[neighbour.slot, :10]
        text += emitted(host.run(plan), 0)
    assert text == host.alone(tokens, len(text))
    neighbours_text += host.go_on(neighbour, 8, shape)
    assert neighbours_text == host.alone(neighbour_prompt, len(neighbours_text))


# Independence and isolation


@either_sampling
@either_shape
def test_output_and_counts_independent_of_neighbours(host, shape, how):
    tokens = prompt(1, 20)
    lonely = host.request(tokens, **how)
    lonely_futures = host.submit_text(lonely, 8, shape)
    others = [host.request(prompt(20 + n, 5 + 11 * n), **(SAMPLED | {"seed32": n})) for n in (1, 2)]
    crowded = host.request(tokens, **how)
    rows = [*others, crowded]
    plans = [host.prefill_plan(*rows)]
    plans += [host.decode_plan(*rows, shape=shape) for _ in range(8)]
    crowded_futures = [host.backend.submit(plan) for plan in plans]
    assert joined(crowded_futures, 2) == joined(lonely_futures, 0)
    for lonely_future, crowded_future in zip(lonely_futures, crowded_futures, strict=True):
        assert crowded_future.result().counts[2] == lonely_future.result().counts[0]
        assert lonely_future.result().counts[1:].sum() == 0, "padding rows have tokens"


def test_output_independent_of_batch_composition(host):
    """Trap: the batch shrank under CUDA graphs, and rows past it read foreign pages."""
    prompts = [prompt(30 + n, 10 + n) for n in range(BATCH)]
    requests = [host.request(tokens) for tokens in prompts]
    result = host.prefill(*requests)
    texts = [emitted(result, row) for row in range(BATCH)]
    for rows in ([0, 1, 2, 3], [3], [2, 0], [1], [3, 2, 1, 0], [0], [1, 3], [2, 1, 0]):
        result = host.decode(*(requests[row] for row in rows), shape=CHAIN)
        for place, row in enumerate(rows):
            texts[row] += emitted(result, place)
    for text, tokens in zip(texts, prompts, strict=True):
        assert text == host.alone(tokens, len(text))


@either_shape
def test_nan_fails_only_its_row(host, shape):
    tokens = prompt(1, 20)
    poisoned = host.request((*prompt(13, 10), POISON, *prompt(14, 10)))
    healthy = host.request(tokens)
    result = host.prefill(poisoned, healthy)
    assert result.failed.tolist()[:2] == [1, 0]
    assert result.counts.tolist()[:2] == [0, 1]
    text = emitted(result, 1)
    for _ in range(5):  # stale rows of the failed request, as with steps in flight
        result = host.decode(poisoned, healthy, shape=shape)
        assert result.failed.tolist()[:2] == [1, 0]
        assert result.counts[0] == 0
        text += emitted(result, 1)
    assert text == host.alone(tokens, len(text))


@either_shape
def test_nan_in_freed_slot_harms_no_new_owner(host, shape):
    """A longer neighbour makes the batch read positions that the new owner has not written."""
    tokens = prompt(1, 20)
    poisoned = host.request((POISON,) * 100)
    host.prefill(poisoned)
    host.decode(poisoned, shape=shape)
    heir, neighbour = host.heir(poisoned, tokens), host.request(prompt(5, 100))
    results = [host.prefill(heir, neighbour)]
    results += [host.decode(heir, neighbour, shape=shape) for _ in range(8)]
    assert not any(result.failed.any() for result in results)
    text = [token for result in results for token in emitted(result, 0)]
    assert text == host.alone(tokens, len(text))


def test_nan_in_scratch_page_harms_no_request(host):
    poisoned = host.request((POISON,) * 20)
    plan = host.prefill_plan(poisoned)
    plan.page_table[:] = 0
    host.run(plan)
    tokens = prompt(1, 20)
    request = host.request(tokens, positions=40)
    text = joined(host.submit_text(request, 5, CHAIN), 0)
    assert len(text) >= 6
    assert text == host.alone(tokens, len(text))


def test_new_slot_owner_starts_from_clean_state(host):
    """Trap: state, counts and draft KV of the last owner of a slot (SGLang 19415)."""
    tokens = prompt(1, 20)
    how = SAMPLED | {"repetition_penalty": 1.8, "frequency_penalty": 1.5}
    first = host.request(prompt(18, 90), **how)
    host.text(first, 40, CHAIN)
    heir = host.heir(first, tokens, **how)
    futures = host.submit_text(heir, 8, CHAIN)
    fresh_futures = host.submit_text(host.request(tokens, **how), 8, CHAIN)
    for future, fresh in zip(futures, fresh_futures, strict=True):
        assert emitted(future.result(), 0) == emitted(fresh.result(), 0)
        np.testing.assert_array_equal(future.result().drafts[0], fresh.result().drafts[0])


@pytest.mark.parametrize("work", ["prefill", "plain", "chain"])
def test_scratch_slot_length_stays_zero(host, sink_length, work):
    """Trap: the length of the padding slot grew by one per step and slowed the batch."""
    request = host.request(prompt(19, 10))
    host.prefill(request)
    for _ in range(3):
        if work == "prefill":
            host.prefill(request)
        else:
            host.decode(request, shape=PLAIN if work == "plain" else CHAIN)
        assert sink_length() == 0


@either_shape
def test_stale_rows_stay_within_their_pages(host, shape):
    """A request ends with a step in flight, and its slot and pages go to another request."""
    first = host.request(prompt(1, 20), positions=100)
    host.text(first, 4, shape)
    late = [host.backend.submit(host.decode_plan(first, shape=shape)) for _ in range(2)]
    tokens = prompt(1, 20)
    heir = host.heir(first, tokens, positions=100)
    futures = host.submit_text(heir, 6, shape)
    assert all(future.result().counts[0] >= 1 for future in late)
    text = joined(futures, 0)
    assert text == host.alone(tokens, len(text))


# Results and plans


@either_shape
def test_logprobs_match_emitted_tokens(host, shape):
    tokens = prompt(1, 20)
    request = host.request(tokens, logprobs=3)
    for result in [host.prefill(request), *(host.decode(request, shape=shape) for _ in range(5))]:
        assert result.logprobs is not None
        count = int(result.counts[0])
        best = result.logprobs.top_ids[0, :count, 0]
        assert best.tolist() == emitted(result, 0)  # greedy, without penalties
        np.testing.assert_array_equal(
            result.logprobs.chosen[0, :count], result.logprobs.top_values[0, :count, 0]
        )
        values = result.logprobs.top_values[0, :count]
        assert (values <= 0).all()
        assert (np.diff(values, axis=1) <= 0).all()


@either_shape
def test_row_logprobs_independent_of_neighbours(host, shape):
    """Neighbours without logprobs have zeros."""
    tokens, asked = prompt(1, 20), {**SAMPLED, "logprobs": 2}
    lonely, silent = host.request(tokens, **asked), host.request(prompt(21, 30), **SAMPLED)
    crowded, other = host.request(tokens, **asked), host.request(prompt(22, 7))
    packed = (silent, crowded, other)
    steps = [(host.prefill(lonely), host.prefill(*packed))]
    steps += [
        (host.decode(lonely, shape=shape), host.decode(*packed, shape=shape)) for _ in range(5)
    ]
    for alone, together in steps:
        assert emitted(together, 1) == emitted(alone, 0)
        for name in ("chosen", "top_ids", "top_values"):
            got, want = getattr(together.logprobs, name), getattr(alone.logprobs, name)
            # Float32 on both sides, rows in another order of sums.
            np.testing.assert_allclose(got[1], want[0], atol=2e-4)
            assert want[0].any()
            assert not got[[0, 2, 3]].any(), f"{name} of a row that does not report"


@either_shape
def test_logprobs_zero_unless_row_requests_them(host, shape):
    request, with_logprobs = host.request(prompt(1, 20)), host.request(prompt(1, 20), logprobs=0)
    steps = [(host.prefill(row), host.decode(row, shape=shape)) for row in (request, with_logprobs)]
    for silent, reported in zip(*steps, strict=True):
        assert emitted(silent, 0) == emitted(reported, 0)
        assert reported.logprobs.chosen.any()
        assert not any(part.any() for part in vars(silent.logprobs).values())


def test_prompt_logprobs_equal_decode_logprobs(host):
    """Covers a neighbour prompt, and a chunk with its next token in the next chunk."""
    tokens = prompt(1, 90)
    request = host.request(tokens, logprobs=2)
    steps = [host.prefill(request), *(host.decode(request, shape=CHAIN) for _ in range(12))]
    text = [token for step in steps for token in emitted(step, 0)]
    reported = [(step.logprobs, w) for step in steps for w in range(step.counts[0])]
    both, other = host.request([*tokens, *text], logprobs=2), host.request(prompt(22, 7))
    beside = host.prefill(other, Chunk(both, 0, 17)).scores
    ending = host.prefill(Chunk(both, 17, len(both.prompt)))
    pairs = zip(beside, ending.scores, strict=True)
    found = [np.concatenate([one[7 : 7 + 17], two[: len(both.prompt) - 17]]) for one, two in pairs]
    whole = host.prefill(host.request(both.prompt)).scores
    chosen, ranks, ids, values = found
    assert (ranks[89:-1] == 1).all(), "the text was greedy"
    assert ids[89:-1, 0].tolist() == text
    close = {"atol": 2e-4}  # float32 on both sides, rows in another order of sums
    for row, (logprobs, w) in enumerate([*reported, (ending.logprobs, 0)], start=89):
        np.testing.assert_allclose(chosen[row], logprobs.chosen[0, w], **close)
        np.testing.assert_allclose(values[row], logprobs.top_values[0, w, :2], **close)
    np.testing.assert_allclose(chosen, whole.chosen[: len(chosen)], **close)
    assert len(set(ranks[:89].tolist())) > 40, "random tokens have low ranks"
    assert all(part[: 7 + 17].any() for part in beside)
    assert not any(part[7 + 17 :].any() for part in beside), "padding has zeros"


def test_result_outlives_steps_in_flight(host):
    """Results have separate buffers for the maximum number of steps in flight."""
    request = host.request(prompt(1, 20))
    host.prefill(request)
    in_flight = host.capacity.overlap + 1
    futures = [
        host.backend.submit(host.decode_plan(request, shape=CHAIN)) for _ in range(in_flight)
    ]
    result = futures[0].result()
    kept = result.tokens.copy(), result.drafts.copy()
    for future in futures[1:]:
        future.result()
    np.testing.assert_array_equal(result.tokens, kept[0])
    np.testing.assert_array_equal(result.drafts, kept[1])


def test_plan_buffer_not_written_by_device(host):
    request = host.request(prompt(1, 20))
    for plan in (host.prefill_plan(request), host.decode_plan(request, shape=CHAIN)):
        before = plan.buffer.copy()
        host.run(plan)
        np.testing.assert_array_equal(plan.buffer, before)


def test_submit_rejects_unprepared_program(host):
    request = host.request(prompt(1, 20))
    plan = host.decode_plan(request, shape=PLAIN)
    assert isinstance(plan.work, Decode)
    smaller = StepPlan(
        **{**vars(plan), "program": type(plan.program)(**{**vars(plan.program), "batch": 2})}
    )
    with pytest.raises(ValueError, match="decode of 2 rows.* is not prepared; call prepare first"):
        host.backend.submit(smaller)


def test_prefill_ignores_padding_tokens(host):
    tokens = prompt(1, 20)
    request = host.request(tokens)
    plan = host.prefill_plan(request)
    assert isinstance(plan.work, Prefill)
    plan.work.tokens[20:] = POISON
    result = host.run(plan)
    assert not result.failed[0]
    text = [*emitted(result, 0), *host.go_on(request, 6, CHAIN)]
    assert text == host.alone(tokens, len(text))


test_planted_fault_is_detected = prover("boundary/test_backend_contract", globals())
