"""State of a slot between steps on every backend: snapshots, resumed requests, drafts, draft KV.

Same as in `test_backend_contract`, each test compares two ways to the same output on one backend.
"""

from __future__ import annotations

import numpy as np
import pytest

from shared.boundary.backend import CountPromptTokens, DraftOnly
from shared.boundary.program import StepKind
from shared.engine.rows import Chunk
from shared.spec.draft_tree import TreeShape
from tests.support.contract_host import (
    CHAIN,
    PAGE_SIZE,
    PLAIN,
    POISON,
    SAMPLED,
    Host,
    either_sampling,
    either_shape,
    emitted,
    prompt,
)
from tests.support.mutations import prover

# Snapshots and resumed requests


@pytest.mark.parametrize(
    ("save_at", "is_saved"), [(64, 1), (70, 1), (63, 0), (65, 0), (71, 0), (0, 0)]
)
def test_prefill_saves_snapshot_at_whole_chunks(host, save_at, is_saved):
    request = host.request(prompt(20, 70))
    plan = host.prefill_plan(request)
    plan.snapshots.save[0], plan.snapshots.save_at[0] = 2, save_at
    assert host.run(plan).snapshot_saved.tolist() == [is_saved, 0, 0, 0]


@pytest.mark.parametrize(("save_at", "is_saved"), [(30, 0), (64, 1), (94, 0), (100, 1)])
def test_later_chunk_saves_snapshot_at_own_chunks(host, save_at, is_saved):
    request = host.request(prompt(20, 100))
    saved = 0
    for first, end in ((0, 64), (64, 100)):
        plan = host.prefill_plan(Chunk(request, first, end))
        plan.snapshots.save[0], plan.snapshots.save_at[0] = 2, save_at
        saved += int(host.run(plan).snapshot_saved[0])
    assert saved == is_saved


@either_shape
@pytest.mark.parametrize("field", ["starts", "restore"])
def test_submit_rejects_decode_that_starts_rows(host, shape, field):
    """Such a plan raises, and the row continues as if it had not been submitted."""
    tokens = prompt(1, 20)
    request = host.request(tokens)
    text = emitted(host.prefill(request), 0)
    plan = host.decode_plan(request, shape=shape)
    {"starts": plan.starts, "restore": plan.snapshots.restore}[field][0] = 1
    with pytest.raises(ValueError, match="rows must start in a prefill or a count, got decode"):
        host.backend.submit(plan)
    text += host.go_on(request, 6, shape)
    assert text == host.alone(tokens, len(text))


def test_decode_ignores_draft_from(host):
    tokens = prompt(1, 20)
    sizes = []
    for draft_from in (0, 15):
        request = host.request(tokens)
        host.prefill(request)
        plan = host.decode_plan(request, shape=CHAIN)
        plan.draft_from[0] = draft_from
        results = [host.run(plan), *(host.decode(request, shape=CHAIN) for _ in range(3))]
        sizes.append([result.drafts[0].tolist() for result in results])
    assert sizes[0] == sizes[1]


@either_shape
def test_decode_saves_snapshot_exactly_when_passing_position(host, shape):
    """Several steps in flight target one snapshot; the step that passes the position saves it."""
    tokens = prompt(21, 30)
    save_at = place_to_save(host, tokens, shape)
    request = host.request(tokens, **SAMPLED)
    plans = [host.prefill_plan(request)]
    plans += [host.decode_plan(request, shape=shape) for _ in range(14)]
    for plan in plans:
        plan.snapshots.save[0], plan.snapshots.save_at[0] = 3, save_at
    results = [future.result() for future in [host.backend.submit(plan) for plan in plans]]
    after = len(tokens) - 1 + np.cumsum([result.counts[0] for result in results])
    before = np.append(0, after[:-1])
    passes = (before < save_at) & (save_at <= after)
    assert [bool(result.snapshot_saved[0]) for result in results] == passes.tolist()
    text = [token for result in results for token in emitted(result, 0)]
    num_known = save_at + 1 - len(tokens) + 1  # the restored row prefills one token
    asked = {**SAMPLED, "logprobs": 3}
    heir = host.request(tokens, output=text[:num_known], **asked)
    host.share(request, heir, save_at)
    host.run(host.restored_plan(heir, save_at, 3))
    whole = host.request(tokens, output=text[:num_known], **asked)
    host.prefill(whole)
    values = [host.decode(row, shape=PLAIN).logprobs.top_values[0, 0] for row in (heir, whole)]
    # The states come from the sequential and from the chunked rule; logits differ by at most 6e-5
    # between orders of a sum, and by tenths if the state is of another position.
    np.testing.assert_allclose(values[0], values[1], atol=1e-3)


def place_to_save(host: Host, tokens: tuple[int, ...], shape: TreeShape) -> int:
    """Returns a page boundary that a step passes; a plain step can only end there."""
    scout = host.request(tokens, **SAMPLED)
    counts = [f.result().counts[0] for f in host.submit_text(scout, 14, shape)]
    host.allocator.free(scout.slot)
    ends = set((len(tokens) - 1 + np.cumsum(counts)).tolist())
    places = range(32, max(ends), PAGE_SIZE)
    return next(place for place in places if shape is PLAIN or place not in ends)


@pytest.mark.parametrize("draft_from", [0, 64], ids=["complete", "gap"])
def test_restored_row_ignores_draft_kv_before_draft_from(host, draft_from):
    """Garbage in the draft KV before `draft_from` changes no draft."""
    tokens = prompt(22, 80)
    first = host.request(tokens)
    plan = host.prefill_plan(first)
    plan.snapshots.save[0], plan.snapshots.save_at[0] = 1, 64
    host.run(plan)
    drafts = []
    for _ in range(2):
        request = host.request(tokens)
        host.share(first, request, 64)
        plan = host.restored_plan(request, 64, 1)
        plan.draft_from[0] = draft_from
        result = host.run(plan)
        steps = [host.decode(request, shape=CHAIN) for _ in range(6)]
        text = [*emitted(result, 0), *(t for step in steps for t in emitted(step, 0))]
        assert text == host.alone(tokens, len(text))
        drafts.append([step.drafts[0].tolist() for step in steps])
        if draft_from:
            spoil_draft_memory(host, first)
    assert drafts[0] == drafts[1]
    if not draft_from:
        unbroken = host.request(tokens)
        host.prefill(unbroken)
        steps = [host.decode(unbroken, shape=CHAIN) for _ in range(6)]
        assert drafts[0] == [step.drafts[0].tolist() for step in steps]


def spoil_draft_memory(host: Host, owner) -> None:
    """Overwrites the first pages of an owner with another prompt, then restores its target KV."""
    other = host.request((POISON,) * 64)
    host.share(owner, other, 64)
    host.prefill(other)
    saved = owner.context.copy()
    plan = host.prefill_plan(owner)
    host.run(plan)
    np.testing.assert_array_equal(owner.context, saved)


@either_sampling
@either_shape
def test_resumed_request_output_equals_uninterrupted(host, shape, how):
    """Output and acceptance equal those of a request without preemption."""
    tokens = prompt(23, 60)
    request = host.request(tokens, **how)
    text = host.text(request, 9, shape)
    resumed = host.request(tokens, output=text, **how)
    first = host.prefill(Chunk(resumed, 0, 64))
    last = host.prefill(Chunk(resumed, 64, resumed.prefill_length))
    assert first.counts[0] == last.counts[0] == 0
    text += host.go_on(resumed, 10, shape)
    assert text == host.alone(tokens, len(text), **how)


def test_resumed_request_drafts_equal_uninterrupted(host):
    tokens = prompt(2, 20)
    request = host.request(tokens, **SAMPLED)
    text = emitted(host.prefill(request), 0)
    for _ in range(4):
        text += emitted(host.decode(request, shape=CHAIN), 0)
    resumed = host.request(tokens, output=text, **SAMPLED)
    host.prefill(resumed)
    for _ in range(5):
        went_on, came_back = (host.decode(r, shape=CHAIN) for r in (request, resumed))
        np.testing.assert_array_equal(went_on.drafts[0], came_back.drafts[0])
        assert emitted(went_on, 0) == emitted(came_back, 0)


def test_count_step_restores_penalties_after_cache_hit(host):
    """Penalties after a cache hit equal those after a whole prefill."""
    how = SAMPLED | {"repetition_penalty": 1.9, "logit_bias": {}}
    tokens = prompt(27, 90)
    first = host.request(tokens, **how)
    plan = host.prefill_plan(first)
    plan.snapshots.save[0], plan.snapshots.save_at[0] = 1, 64
    host.run(plan)
    texts = []
    for counted in (65, 0):
        request = host.request(tokens, **how)
        host.share(first, request, 64)
        text = emitted(host.run(host.restored_plan(request, 64, 1)), 0)
        plan = host.plan(StepKind.COUNT, PLAIN, request, host_draft=False)
        assert isinstance(plan.work, CountPromptTokens)
        plan.work.tokens[:counted] = tokens[:counted]
        plan.work.row_starts[1:] = counted
        host.run(plan)
        texts.append([*text, *host.go_on(request, 25, CHAIN)])
    whole = host.alone(tokens, 26, **how)
    assert texts[0][1:] == whole[1:]
    assert texts[1][1:] != whole[1:], "the penalties have no effect, so nothing was tested"


def test_count_steps_distinguish_prompt_from_output(host):
    """A resumed request with a cache hit has output tokens outside its prefill."""
    how = {"temperature": 0.0, "frequency_penalty": -1.0}
    tokens = prompt(28, 40)
    whole = host.alone(tokens, 60, **how)
    first = host.request(tokens, output=whole[:40], **how)
    plan = host.prefill_plan(first)
    plan.snapshots.save[0], plan.snapshots.save_at[0] = 1, 64
    host.run(plan)
    request = host.request(tokens, output=whole[:40], **how)
    host.share(first, request, 64)
    for begin, end in ((0, 50), (50, 65)):
        plan = host.plan(StepKind.COUNT, PLAIN, request, host_draft=False)
        assert isinstance(plan.work, CountPromptTokens)
        plan.work.tokens[: end - begin] = request.context[begin:end]
        plan.work.row_starts[1:], plan.work.first_positions[0] = end - begin, begin
        plan.starts[0], plan.snapshots.restore[0] = begin == 0, begin == 0
        host.run(plan)
    plan = host.prefill_plan(Chunk(request, 64, request.prefill_length))
    assert not plan.starts[0]
    host.run(plan)
    assert host.go_on(request, 20, CHAIN) == whole[40:]


# Drafts


@pytest.mark.parametrize("max_drafts", [0, 1, 2])
def test_row_drafts_limited_by_max_draft_tokens(host, max_drafts):
    tokens = prompt(1, 20)
    request = host.request(tokens, max_draft_tokens=max_drafts)
    free = host.request(prompt(2, 20))
    text = emitted(host.prefill(request, free), 0)
    for _ in range(8):
        result = host.decode(request, free, shape=CHAIN)
        assert result.num_nodes[:2].tolist() == [1 + max_drafts, CHAIN.nodes]
        assert 1 <= result.counts[0] <= 1 + max_drafts
        text += emitted(result, 0)
    assert text == host.alone(tokens, len(text))


def test_plain_step_cools_drafter_for_one_step(host):
    tokens = prompt(1, 20)
    request = host.request(tokens)
    text = emitted(host.prefill(request), 0)
    sizes = []
    for shape in (CHAIN, PLAIN, PLAIN, CHAIN, CHAIN, CHAIN):
        result = host.decode(request, shape=shape)
        sizes.append(int(result.num_nodes[0]))
        text += emitted(result, 0)
    assert sizes == [4, 1, 1, 1, 4, 4]
    assert text == host.alone(tokens, len(text))


def test_gaps_in_draft_kv_are_never_read(host):
    """Trap: plain steps leave gaps in the draft KV, and drafts depended on stale page content."""
    drafts = []
    for before in (prompt(30, 90), (POISON,) * 90):
        request = host.request(before, positions=92)
        host.prefill(request)
        request = host.heir(request, prompt(1, 20), positions=92)
        host.text(request, 8, PLAIN)
        steps = [host.decode(request, shape=CHAIN) for _ in range(5)]
        drafts.append([step.drafts[0].tolist() for step in steps])
        host.allocator.free(request.slot)
    assert drafts[0] == drafts[1]


@either_sampling
def test_draft_only_step_equals_fused_drafts_without_commit(host, how):
    tokens = prompt(1, 20)
    request = host.request(tokens, **how)
    text = emitted(host.prefill(request), 0)
    for _ in range(5):
        plan = host.plan(StepKind.DRAFT, CHAIN, request, host_draft=False)
        assert isinstance(plan.work, DraftOnly)
        drafted, again = host.run(plan), host.run(plan)
        fused = host.decode(request, shape=CHAIN)
        assert drafted.counts[0] == 0
        for result in (drafted, again):
            np.testing.assert_array_equal(result.drafts[0], fused.drafts[0])
            np.testing.assert_array_equal(result.parents[0], fused.parents[0])
            assert result.num_nodes[0] == fused.num_nodes[0]
        text += emitted(fused, 0)
    assert text == host.alone(tokens, len(text), **how)


@either_sampling
@pytest.mark.parametrize("right", [1, 2], ids=["first branch", "second branch"])
def test_host_tree_output_equals_plain(host, how, right):
    """The correct branch is accepted, and the other leaves no trace."""
    tokens = prompt(2, 20)
    whole = host.alone(tokens, 30, **how)
    request = host.request(tokens, **how)
    text = emitted(host.prefill(request), 0)
    while len(text) < 24:
        good, after = whole[len(text)], whole[len(text) + 1]
        wrong = (good + 1) % 200 + POISON + 1
        nodes = [good, wrong, after] if right == 1 else [wrong, good, after]
        result = host.run(host.tree_plan(request, nodes, [0, 0, right]))
        assert result.counts[0] == 3
        text += emitted(result, 0)
    text += host.go_on(request, 4, CHAIN)
    assert text[:30] == whole[: len(text)]


def test_wrong_host_tree_preserves_output(host):
    tokens = prompt(1, 20)
    request = host.request(tokens)
    text = emitted(host.prefill(request), 0)
    for step in range(6):
        result = host.run(host.tree_plan(request, [10 + step, 11 + step, 12], [0, 0, 1]))
        text += emitted(result, 0)
    text += host.go_on(request, 6, CHAIN)
    assert text == host.alone(tokens, len(text))


def test_forced_chain_restores_output_tokens(host):
    """Forced tokens are accepted for any target output; the last one becomes the newest token."""
    tokens, forced = prompt(35, 21), prompt(36, 5)
    request = host.request(tokens, output=forced[:1])
    host.prefill(request)
    for start in (1, 3):
        plan = host.tree_plan(request, forced[start : start + 2], [0, 1], forced=True)
        result = host.run(plan)
        assert emitted(result, 0) == list(forced[start : start + 2])
    prefilled = host.request(tokens, output=forced)
    host.prefill(prefilled)
    assert host.go_on(request, 10, CHAIN) == host.go_on(prefilled, 10, CHAIN)


test_planted_fault_is_detected = prover("boundary/test_backend_contract_memory", globals())
