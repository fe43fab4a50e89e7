"""The reference backend: equal outputs for chunks, chains, trees, forced rows and snapshots."""

import itertools
from concurrent.futures import Future
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from shared.boundary.backend import (
    BackendLimits,
    CountPromptTokens,
    Decode,
    GrammarBitmask,
    HostDraft,
    Prefill,
    StepPlan,
    StepResult,
)
from shared.boundary.buffers import empty_plan
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.engine.request import SamplingParams
from shared.spec.draft_tree import TreeShape
from tests.support.backends import Drafter, make_backend
from tests.support.equality import Oracle
from tests.support.limits import make_limits, make_program
from tests.support.tiny_heads import tiny_head
from tests.support.tiny_models import tiny_model

VOCAB = 272
CHAIN, TREE = TreeShape.chain(3, 2), TreeShape(nodes=6, depth=3, width=2, rows=12)
SAMPLED = {
    "temperature": 0.8,
    "seed": 7,
    "top_p": 0.95,
    "top_k": 40,
    "min_p": 0.01,
    "repetition": 1.1,
    "presence": 0.2,
    "frequency": 0.1,
}
GREEDY: dict[str, float] = {}


def capacity(vocab: int, drafts: bool) -> BackendLimits:
    def program(
        work: StepKind, shape: TreeShape, host_draft: bool = False, mask: bool = False
    ) -> Program:
        tokens = {StepKind.PREFILL: 256, StepKind.COUNT: 64}.get(work, 0)
        return make_program(
            work, shape, tokens, batch=2, pages=32, extras=ProgramFeature.LOGPROBS
        ).with_features({ProgramFeature.HOST_DRAFT: host_draft, ProgramFeature.MASK: mask})

    plain = TreeShape.plain(2)
    programs = [
        program(work, plain) for work in (StepKind.PREFILL, StepKind.COUNT, StepKind.DECODE)
    ]
    programs.append(program(StepKind.DECODE, plain, mask=True))
    for shape in (CHAIN, TREE):
        programs.append(program(StepKind.DECODE, shape, host_draft=True))
        programs += [program(work, shape) for work in (StepKind.DECODE, StepKind.DRAFT) if drafts]
    return make_limits(
        programs,
        page_size=16,
        num_pages=65,
        num_slots=3,
        num_snapshots=3,
        overlap=1,
        context_length=400,
        vocab=vocab,
        max_stop_ids=2,
        max_bias=2,
        max_logprobs=3,
    )


class Device:
    """Submits plans with one real row in slot 1 with its own pages."""

    def __init__(self, family: str, drafter: Drafter | str, how: dict[str, float]) -> None:
        """Creates the backend, with a tiny head for the drafters EAGLE and EAGLE3."""
        config, weights = tiny_model(family, seed=3)
        if isinstance(drafter, str) and drafter in ("EAGLE", "EAGLE3"):
            drafter = tiny_head(config, weights, drafter, seed=4)
        asked = capacity(config.vocab, drafter != "none")
        self.backend = make_backend("reference", config, weights, asked, drafter)
        self.how = how
        self.prompt_length = 0

    def plan(self, work: StepKind, shape: TreeShape, **kind: bool) -> StepPlan:
        kind = {"host_draft": False, "mask": False} | kind
        program = next(
            p
            for p in self.backend.capacity.programs
            if (p.work, p.shape) == (work, shape)
            and {"host_draft": p.has(ProgramFeature.HOST_DRAFT), "mask": p.has(ProgramFeature.MASK)}
            == kind
        )
        plan = empty_plan(program, self.backend.capacity)
        plan.slots[0], plan.page_table[0] = 1, np.arange(1, 33)[::-1]
        plan.sampling.prompt_length[0] = self.prompt_length
        plan.sampling.max_drafts[0] = 9
        plan.reports[0] = 1
        for name, value in self.how.items():
            getattr(plan.sampling, name)[0] = value
        return plan

    def chunk(
        self, tokens: list[int], first: int, next_token: int | None, **changes: int
    ) -> Future[StepResult]:
        """Prefills tokens from position `first`; without a next token one is sampled."""
        plan = self.plan(StepKind.PREFILL, TreeShape.plain(2))
        assert isinstance(plan.work, Prefill)
        plan.work.tokens[: len(tokens)] = tokens
        plan.work.row_starts[1:] = len(tokens)
        plan.work.first_positions[0] = first
        plan.work.ends_prompt[0] = next_token is None
        plan.work.next_tokens[0] = next_token or 0
        plan.starts[0] = changes.get("starts", first == 0)
        plan.draft_from[0] = changes.get("draft_from", 0)
        for name in ("restore", "save", "save_at"):
            getattr(plan.snapshots, name)[0] = changes.get(name, 0)
        return self.backend.submit(plan)

    def prefill(self, prompt: list[int], *cuts: int) -> list[int]:
        """Prefills the prompt in chunks that end at `cuts`; returns the first token."""
        self.prompt_length = len(prompt)
        edges = [0, *cuts, len(prompt)]
        for start, stop in itertools.pairwise(edges):
            following = prompt[stop] if stop < len(prompt) else None
            result = self.chunk(prompt[start:stop], start, following).result()
            assert result.counts[0] == (following is None)
        return result.tokens[0].tolist()

    def decode(self, shape: TreeShape, num_tokens: int) -> tuple[list[int], list[int]]:
        """Runs steps until there are enough tokens; returns them and the count of each step."""
        tokens, counts = [], []
        while len(tokens) < num_tokens:
            result = self.backend.submit(self.plan(StepKind.DECODE, shape)).result()
            counts.append(int(result.counts[0]))
            tokens += result.tokens[0, : counts[-1]].tolist()
        return tokens[:num_tokens], counts

    def host_draft(
        self, shape: TreeShape, tokens: list[int], parents: list[int], forced: bool
    ) -> StepResult:
        plan = self.plan(StepKind.DECODE, shape, host_draft=True)
        assert isinstance(plan.work, Decode)
        drafts = plan.work.drafts
        assert isinstance(drafts, HostDraft)
        drafts.tokens[0, 1 : 1 + len(tokens)], drafts.parents[0, 1 : 1 + len(tokens)] = (
            tokens,
            parents,
        )
        drafts.num_nodes[0], drafts.forced[0] = 1 + len(tokens), forced
        return self.backend.submit(plan).result()


PROMPT = np.random.default_rng(5).integers(2, VOCAB, 150).tolist()
SHORT = PROMPT[:20]


@pytest.fixture(params=["greedy", "sampled"])
def how(request: pytest.FixtureRequest) -> dict[str, float]:
    return {"greedy": GREEDY, "sampled": SAMPLED}[request.param]


def plain_text(family: str, prompt: list[int], how: dict[str, float], num_tokens: int) -> list[int]:
    """The first token and `num_tokens` more, decoded without drafts."""
    return list(_plain_text(family, tuple(prompt), tuple(how.items()))[: num_tokens + 1])


@cache
def _plain_text(
    family: str, prompt: tuple[int, ...], how: tuple[tuple[str, float], ...]
) -> list[int]:
    device = Device(family, "none", dict(how))
    return device.prefill(list(prompt)) + device.decode(TreeShape.plain(2), 30)[0]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_output_matches_full_forward_pass(family: str, how: dict[str, float]) -> None:
    # The backend has pages, states, counts and noise; the oracle has none of them.
    params = SamplingParams(
        temperature=how.get("temperature", 0.0),
        top_p=how.get("top_p", 1.0),
        top_k=None if "top_k" not in how else int(how["top_k"]),
        min_p=how.get("min_p", 0.0),
        presence_penalty=how.get("presence", 0.0),
        frequency_penalty=how.get("frequency", 0.0),
        repetition_penalty=how.get("repetition", 1.0),
        seed32=int(how.get("seed", 0)),
    )
    text = plain_text(family, SHORT, how, 30)
    assert Oracle(*tiny_model(family, seed=3)).check(SHORT, text, params) == []


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_output_independent_of_prefill_chunks(family: str, how: dict[str, float]) -> None:
    want = plain_text(family, PROMPT, how, 12)
    assert len(set(want)) > 4  # varied enough to reveal a fault
    device = Device(family, "none", how)
    assert device.prefill(PROMPT, 64, 128) + device.decode(TreeShape.plain(2), 12)[0] == want


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(
    ("family", "drafter"),
    [("qwen3_5", "NEXTN"), ("qwen3_5", "EAGLE3"), ("llama", "EAGLE"), ("llama", "EAGLE3")],
)
def test_draft_tree_output_equals_plain_and_accepts(
    family: str, drafter: str, shape: TreeShape, how: dict[str, float]
) -> None:
    want = plain_text(family, SHORT, how, 30)
    device = Device(family, drafter, how)
    got = device.prefill(SHORT)
    tokens, counts = device.decode(shape, 30)
    assert got + tokens == want
    assert max(counts) > 1
    assert min(counts) == 1  # also covers steps without an accepted draft


@pytest.mark.parametrize("drafter", ["EAGLE", "EAGLE3"])
def test_head_drafts_independent_of_chunks_and_snapshots(drafter: str) -> None:
    drafted = []
    for cuts in ((), (64, 128)):
        device = Device("qwen3_5", drafter, GREEDY)
        device.prompt_length = len(PROMPT)
        for start, stop in itertools.pairwise([0, *cuts, len(PROMPT)]):
            following = PROMPT[stop] if stop < len(PROMPT) else None
            save_at = start + 32 if cuts else 0  # a snapshot inside the chunk
            device.chunk(PROMPT[start:stop], start, following, save=1, save_at=save_at).result()
        drafted.append(device.backend.submit(device.plan(StepKind.DRAFT, TREE)).result())
    np.testing.assert_array_equal(drafted[0].drafts, drafted[1].drafts)
    np.testing.assert_array_equal(drafted[0].parents, drafted[1].parents)
    assert drafted[0].num_nodes[0] == TREE.nodes


def test_drafter_uses_noise_of_target() -> None:
    # At this temperature noise dominates: other noise gives 1.0 tokens per step.
    device = Device("qwen3_5", "NEXTN", {"temperature": 4.0, "seed": 7})
    device.prefill(SHORT)
    _, counts = device.decode(CHAIN, 60)
    assert sum(counts) / len(counts) > 1.7


def test_output_independent_of_shape_changes(how: dict[str, float]) -> None:
    want = plain_text("qwen3_5", SHORT, how, 30)
    device = Device("qwen3_5", "NEXTN", how)
    got = device.prefill(SHORT)
    for shape in [CHAIN, TreeShape.plain(2), TREE, TREE, TreeShape.plain(2), CHAIN, CHAIN] * 3:
        result = device.backend.submit(device.plan(StepKind.DECODE, shape)).result()
        got += result.tokens[0, : result.counts[0]].tolist()
        after_plain = result.num_nodes[0] == 1 and not shape.is_plain
        assert not after_plain or result.counts[0] == 1
    shared_length = min(len(got), len(want))
    assert got[:shared_length] == want[:shared_length]


def test_plain_step_cools_drafter_for_one_step() -> None:
    device = Device("qwen3_5", "NEXTN", GREEDY)
    device.prefill(SHORT)
    shapes = [CHAIN, TreeShape.plain(2), CHAIN, CHAIN]
    results = [device.backend.submit(device.plan(StepKind.DECODE, shape)) for shape in shapes]
    assert [int(r.result().num_nodes[0]) for r in results] == [4, 1, 1, 4]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_host_tree_output_equals_plain(family: str, how: dict[str, float]) -> None:
    want = plain_text(family, SHORT, how, 9)
    device = Device(family, "none", how)
    got = device.prefill(SHORT)
    # The correct path: the second child of the root, its first child, a wrong
    # sibling, and a third level.
    tokens = [want[1] ^ 1, want[1], want[2], want[2] ^ 1, want[3]]
    result = device.host_draft(TREE, tokens, [0, 0, 2, 2, 3], forced=False)
    got += result.tokens[0, : result.counts[0]].tolist()
    assert result.counts[0] == 4
    result = device.host_draft(TREE, [want[5] ^ 1], [0], forced=False)
    got += result.tokens[0, : result.counts[0]].tolist()
    assert got + device.decode(TreeShape.plain(2), 3)[0] == want[:9]


@pytest.mark.parametrize("drafter", ["none", "NEXTN"])
def test_forced_chain_restores_output_and_continues(
    drafter: Drafter, how: dict[str, float]
) -> None:
    want = plain_text("qwen3_5", SHORT, how, 20)
    device = Device("qwen3_5", drafter, how)
    device.prompt_length = len(SHORT)
    device.chunk(SHORT, 0, want[0]).result()
    first = device.host_draft(CHAIN, want[1:4], [0, 1, 2], forced=True)
    second = device.host_draft(CHAIN, want[4:6], [0, 1], forced=True)
    assert [r.counts[0] for r in (first, second)] == [3, 2]
    assert first.tokens[0, :3].tolist() + second.tokens[0, :2].tolist() == want[1:6]
    shape = CHAIN if drafter == "NEXTN" else TreeShape.plain(2)
    assert device.decode(shape, 10)[0] == want[6:16]


def test_resume_by_prefill_restores_state(how: dict[str, float]) -> None:
    unbroken = Device("qwen3_5", "NEXTN", how)
    want = unbroken.prefill(SHORT) + unbroken.decode(TreeShape.plain(2), 52)[0]
    device = Device("qwen3_5", "NEXTN", how)
    device.prompt_length = len(SHORT)
    fed = SHORT + want[:52]
    # The first chunk ends among the outputs, each of which counts once.
    assert device.chunk(fed[:64], 0, fed[64]).result().counts[0] == 0
    assert device.chunk(fed[64:], 64, want[52]).result().counts[0] == 0
    for name in ("lengths", "newest", "seen"):
        held = [getattr(d.backend.state, name)[1].tolist() for d in (device, unbroken)]
        assert held[0] == held[1]
    assert device.decode(CHAIN, 16)[0] == unbroken.decode(CHAIN, 16)[0]


def test_draft_only_step_equals_fused_without_commit(
    how: dict[str, float],
) -> None:
    device = Device("qwen3_5", "NEXTN", how)
    want = device.prefill(SHORT) + device.decode(TREE, 12)[0]
    device = Device("qwen3_5", "NEXTN", how)
    got = device.prefill(SHORT)
    while len(got) < len(want):
        tree = device.backend.submit(device.plan(StepKind.DRAFT, TREE)).result()
        assert tree.counts[0] == 0
        assert tree.drafts[0, 0] == got[-1]
        nodes = slice(1, tree.num_nodes[0])
        brought = device.host_draft(
            TREE, tree.drafts[0, nodes].tolist(), tree.parents[0, nodes].tolist(), forced=False
        )
        got += brought.tokens[0, : brought.counts[0]].tolist()
    assert got[: len(want)] == want


def test_max_drafts_limits_tree_and_preserves_output() -> None:
    want = plain_text("qwen3_5", SHORT, SAMPLED, 20)
    device = Device("qwen3_5", "NEXTN", SAMPLED | {"max_drafts": 2})
    got = device.prefill(SHORT)
    result = device.backend.submit(device.plan(StepKind.DECODE, TREE)).result()
    assert result.num_nodes[0] == 3
    got += result.tokens[0, : result.counts[0]].tolist()
    got += device.decode(TREE, 21 - len(got))[0]
    assert got == want


class TestSnapshots:
    def test_prefill_saves_mid_chunk_snapshot_for_restore(self, how: dict[str, float]) -> None:
        want = plain_text("qwen3_5", PROMPT, how, 10)
        device = Device("qwen3_5", "NEXTN", how)
        device.prompt_length = len(PROMPT)
        saved = device.chunk(PROMPT, 0, None, save=2, save_at=128).result()
        assert saved.snapshot_saved[0] == 1
        # The hit has pages of 128 tokens without counts; the end of the prompt is prefilled.
        count = device.plan(StepKind.COUNT, TreeShape.plain(2))
        assert isinstance(count.work, CountPromptTokens)
        for start in (0, 64):
            count = device.plan(StepKind.COUNT, TreeShape.plain(2))
            count.starts[0], count.draft_from[0] = start == 0, 127
            count.snapshots.restore[0] = 2 * (start == 0)
            tokens = PROMPT[start : start + 64]
            count.work.tokens[:64], count.work.row_starts[1:] = tokens, 64
            device.backend.submit(count)
        last = device.plan(StepKind.COUNT, TreeShape.plain(2))
        last.work.tokens[0], last.work.row_starts[1:] = PROMPT[128], 1
        device.backend.submit(last)
        got = device.chunk(PROMPT[128:], 128, None, starts=0).result().tokens[0].tolist()
        assert got + device.decode(CHAIN, 10)[0] == want

    def test_decode_saves_snapshot_at_exact_position(self) -> None:
        prompt = PROMPT[:62]
        want = plain_text("qwen3_5", prompt, GREEDY, 12)
        device = Device("qwen3_5", "NEXTN", GREEDY)
        text, saved = device.prefill(prompt), []
        while len(text) < 6:
            plan = device.plan(StepKind.DECODE, CHAIN)
            plan.snapshots.save[0], plan.snapshots.save_at[0] = 1, 64
            result = device.backend.submit(plan).result()
            text += result.tokens[0, : result.counts[0]].tolist()
            saved.append(int(result.snapshot_saved[0]))
        assert sum(saved) == 1
        context = prompt + want[:4]
        device.chunk(context[64:], 64, want[4], starts=1, restore=1, draft_from=64).result()
        assert device.decode(CHAIN, 6)[0] == want[5:11]


class TestResults:
    def test_logprobs_match_emitted_tokens(self) -> None:
        device = Device("qwen3_5", "NEXTN", GREEDY)
        device.prefill(SHORT)
        steps = [
            device.backend.submit(device.plan(StepKind.DECODE, CHAIN)).result() for _ in range(5)
        ]
        for result in steps:
            count, logprobs = result.counts[0], result.logprobs
            assert logprobs is not None
            assert (logprobs.top_ids[0, :count, 0] == result.tokens[0, :count]).all()
            assert (logprobs.chosen[0, :count] == logprobs.top_values[0, :count, 0]).all()
            assert (logprobs.chosen[0, :count] < 0).all()
            assert not logprobs.chosen[0, count:].any()

    def test_grammar_mask_allows_only_its_tokens(self) -> None:
        device = Device("qwen3_5", "none", GREEDY)
        device.prefill(SHORT)
        plan = device.plan(StepKind.DECODE, TreeShape.plain(2), mask=True)
        bits = np.full((2, -(-VOCAB // 32)), -1, np.int32)
        bits[1] = 0
        bits[1, 200 // 32] = 1 << (200 % 32)
        index = np.array([[1], [0]], np.int32)
        plan = replace(plan, mask=GrammarBitmask(bits, index))
        assert device.backend.submit(plan).result().tokens[0, 0] == 200

    @pytest.mark.filterwarnings("ignore:invalid value encountered")
    def test_nan_fails_row_and_leaves_no_trace(self) -> None:
        want = plain_text("qwen3_5", SHORT, GREEDY, 8)
        device = Device("qwen3_5", "NEXTN", GREEDY)
        embed = device.backend._weights["embed"]
        healthy = embed[9].copy()
        embed[9] = np.nan
        # Long enough to leave NaN in rows that the next owner reads past its length.
        poisoned = device.chunk([9] * 60, 0, None).result()
        assert (poisoned.failed[0], poisoned.counts[0]) == (1, 0)
        failed = device.backend.submit(device.plan(StepKind.DECODE, CHAIN)).result()
        assert (failed.failed[0], failed.counts[0]) == (1, 0)
        embed[9] = healthy
        assert device.prefill(SHORT) + device.decode(CHAIN, 8)[0] == want

    def test_submit_rejects_unknown_program(self) -> None:
        device = Device("llama", "none", GREEDY)
        plan = device.plan(StepKind.DECODE, CHAIN, host_draft=True)
        with pytest.raises(ValueError, match="is not prepared"):
            device.backend.submit(replace(plan, program=replace(plan.program, batch=7)))

    def test_make_backend_rejects_nextn_without_mtp_weights(self) -> None:
        config, weights = tiny_model("llama", seed=3)
        with pytest.raises(ValueError, match="NEXTN"):
            make_backend("reference", config, weights, capacity(config.vocab, True), "NEXTN")
