"""A minimal host for the contract tests: it plans single steps exactly as a test specifies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from shared.boundary.backend import (
    Backend,
    BackendLimits,
    Decode,
    HostDraft,
    StepFuture,
    StepPlan,
    StepResult,
)
from shared.boundary.buffers import empty_plan
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.boundary.transfer_spec import ImportKV, TransferSpec
from shared.drafts.drafter_spec import DrafterSpec
from shared.engine.allocator import Allocator
from shared.engine.planner import Planner
from shared.engine.request import Request, SamplingParams
from shared.engine.rows import Chunk, ScheduledRows
from shared.models.checkpoint import Weights
from shared.models.config import ModelConfig
from shared.spec.draft_tree import TreeShape
from tests.support.limits import make_limits, make_program
from tests.support.tiny_models import tiny_model

BATCH = 4
PREFILL_TOKENS = 192
PAGE_SIZE = 4
TRANSFER_PAGES = 4
"""Pages of an export or import step."""

PLAIN = TreeShape.plain(BATCH)
CHAIN = TreeShape.chain(3, BATCH)
SHARED = TreeShape(nodes=4, depth=3, width=1, rows=2 * BATCH)
"""The same chain, with verify rows for half of its nodes."""

TREE = TreeShape(nodes=4, depth=2, width=2, rows=4 * BATCH)
JOINED = TreeShape(nodes=7, depth=5, width=1, rows=5 * BATCH, grown=CHAIN, copied=9)
"""The chain of `CHAIN`, merged with n-gram drafts, in fewer verify rows than nodes."""

POISON = 7
"""A token with a NaN embedding: its results are NaN from then on."""


def contract_model() -> tuple[ModelConfig, Weights]:
    """A hybrid with an MTP layer, one token of which is poisoned and all but never chosen."""
    config, weights = tiny_model("qwen3_5", seed=3)
    weights["embed"][POISON] = np.nan
    weights["lm_head"][POISON] = 0
    return config, weights


def contract_capacity(config: ModelConfig, drafts: DrafterSpec | None = None) -> BackendLimits:
    """One bucket of each size, so that few programs are compiled.

    Args:
      config: The target.
      drafts: Its drafter; None for its MTP layer.
    """

    def program(
        work: StepKind,
        shape: TreeShape,
        *,
        tokens: int = 0,
        host_draft: bool = False,
        mask: bool = False,
    ) -> Program:
        return make_program(work, shape, tokens, batch=BATCH, pages=64).with_features(
            {
                ProgramFeature.HOST_DRAFT: host_draft,
                ProgramFeature.MASK: mask,
                ProgramFeature.NGRAM_DRAFTS: shape.copied > 0,
                ProgramFeature.LOGPROBS: work in (StepKind.PREFILL, StepKind.DECODE)
                and not host_draft,
                ProgramFeature.PROMPT_LOGPROBS: work is StepKind.PREFILL,
            }
        )

    transfer = TransferSpec.of(
        config, drafts or DrafterSpec.of_mtp(config), "float32", PAGE_SIZE, ()
    )
    transfer = replace(transfer, step_bytes=TRANSFER_PAGES * transfer.page_bytes)
    return make_limits(
        (
            program(StepKind.PREFILL, PLAIN, tokens=PREFILL_TOKENS),
            program(StepKind.DECODE, PLAIN),
            program(StepKind.DECODE, CHAIN),
            program(StepKind.DECODE, SHARED),
            program(StepKind.DECODE, JOINED),
            program(StepKind.DECODE, TREE, host_draft=True),
            program(StepKind.DECODE, TREE, host_draft=True, mask=True),
            program(StepKind.DRAFT, CHAIN),
            program(StepKind.COUNT, PLAIN, tokens=PREFILL_TOKENS),
            *transfer.programs(),
        ),
        page_size=PAGE_SIZE,
        num_pages=321,
        num_slots=9,
        num_snapshots=4,
        context_length=200,
        vocab=config.vocab,
        max_stop_ids=2,
        max_bias=2,
        max_logprobs=3,
        max_scores=2,
        transfer=transfer,
    )


Texts = dict[tuple[tuple[int, ...], str], list[int]]
"""Plain texts that are known, by prompt and parameters: most tests compare with one of a few."""

SHORTEST_TEXT = 24


GREEDY: dict = {"temperature": 0.0}
SAMPLED: dict = {
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": 60,
    "min_p": 0.01,
    "seed32": 2**31 + 11,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.2,
    "logit_bias": {20: 1.5, 30: -1.5},
    "stop_token_ids": (40, 41),
    "min_tokens": 8,
}

either_sampling = pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
either_shape = pytest.mark.parametrize("shape", [PLAIN, CHAIN], ids=["plain", "chain"])


class Host:
    """Slots and pages for the requests of one test, and its steps.

    Several tests share a backend, each with a host of its own: slots and pages still hold what the
    tests before left there.
    """

    def __init__(self, backend: Backend, texts: Texts) -> None:
        self.backend, self.capacity, self._texts = backend, backend.capacity, texts
        self.allocator = Allocator(self.capacity)
        self.planner = Planner(self.capacity, self.allocator)

    def request(
        self,
        prompt: Iterable[int],
        *,
        output: Iterable[int] = (),
        positions: int = 160,
        **sampling,
    ) -> Request:
        """A request with a slot and pages; with `output` it is to be resumed."""
        params = {"temperature": 0.0, "max_tokens": 100} | sampling
        request = Request(
            request_id=0,
            prompt=tuple(prompt),
            sampling=SamplingParams(**params),
            output=list(output),
        )
        request.assign_slot(self.allocator.take_slot())
        assert self.allocator.reserve(request.slot, positions)
        self.planner.write_request_row(request)
        request.prefill(request.prefill_length)  # a test chooses the steps
        return request

    def heir(self, of: Request, prompt: Iterable[int], **sampling) -> Request:
        """A request that gets the slot and the pages of one that ended."""
        self.allocator.free(of.slot)
        request = self.request(prompt, **sampling)
        assert request.slot == of.slot
        return request

    def share(self, owner: Request, borrower: Request, positions: int) -> None:
        """Makes the full pages of the first positions common."""
        count = positions // PAGE_SIZE
        table = self.allocator.pages.page_table
        table[borrower.slot, :count] = table[owner.slot, :count]

    def prefill_plan(self, *parts: Request | Chunk) -> StepPlan:
        """A plan for whole contexts, or for the chunks that are given."""
        chunks = tuple(
            part if isinstance(part, Chunk) else Chunk(part, 0, part.prefill_length)
            for part in parts
        )
        return self.planner.plan(ScheduledRows.prefill(chunks))

    def restored_plan(self, request: Request, first: int, snapshot: int) -> StepPlan:
        """The first step of a request that finds `first` tokens in shared pages and a snapshot."""
        plan = self.prefill_plan(Chunk(request, first, request.prefill_length))
        plan.starts[0], plan.snapshots.restore[0] = 1, snapshot
        return plan

    def decode_plan(self, *requests: Request, shape: TreeShape) -> StepPlan:
        return self.planner.plan(ScheduledRows.decode(list(requests), shape))

    def plan(
        self,
        work: StepKind,
        shape: TreeShape,
        *requests: Request,
        host_draft: bool,
        mask: bool = False,
    ) -> StepPlan:
        """A plan of a program that the planner does not use yet."""
        program = next(
            p
            for p in self.capacity.programs
            if (p.work, p.shape) == (work, shape)
            and (p.has(ProgramFeature.HOST_DRAFT), p.has(ProgramFeature.MASK)) == (host_draft, mask)
        )
        plan = empty_plan(program, self.capacity)
        self.planner.fill_rows(plan, np.array([r.slot for r in requests], np.int32))
        return plan

    def tree_plan(
        self,
        request: Request,
        tokens: Iterable[int],
        parents: Iterable[int],
        *,
        forced: bool = False,
        mask: bool = False,
    ) -> StepPlan:
        """A decode with a tree of the host's; `tokens` are those of nodes 1 and on."""
        plan = self.plan(StepKind.DECODE, TREE, request, host_draft=True, mask=mask)
        assert isinstance(plan.work, Decode)
        trees = plan.work.drafts
        assert isinstance(trees, HostDraft)
        nodes = [0, *tokens]
        trees.tokens[0, : len(nodes)] = nodes
        trees.parents[0, : len(nodes)] = [0, *parents]
        trees.num_nodes[0], trees.forced[0] = len(nodes), forced
        return plan

    def transfer_plan(self, work: StepKind, pages: Sequence[int], snapshot: int = 0) -> StepPlan:
        """An export or import of pages, or of a snapshot if there are no pages."""
        programs = (p for p in self.capacity.programs if p.work is work)
        plan = empty_plan(next(p for p in programs if bool(p.blocks) != bool(pages)), self.capacity)
        plan.page_table[0, : len(pages)] = pages
        named = plan.snapshots.save if work is StepKind.IMPORT_KV else plan.snapshots.restore
        named[0] = snapshot
        return plan

    def export(self, pages: Sequence[int], snapshot: int = 0) -> np.ndarray:
        """The words of pages, or of the layers of a snapshot."""
        words = self.run(self.transfer_plan(StepKind.EXPORT_KV, pages, snapshot)).words
        assert words is not None
        return words.layers if words.pages is None else words.pages[: len(pages)]

    def import_plan(self, words: np.ndarray, pages: Sequence[int], snapshot: int = 0) -> StepPlan:
        plan = self.transfer_plan(StepKind.IMPORT_KV, pages, snapshot)
        assert isinstance(plan.work, ImportKV)
        into = plan.work.words.pages if pages else plan.work.words.layers
        assert into is not None
        into[: len(words)] = words
        return plan

    def run(self, plan: StepPlan) -> StepResult:
        return self.backend.submit(plan).result()

    def prefill(self, *parts: Request | Chunk) -> StepResult:
        return self.run(self.prefill_plan(*parts))

    def decode(self, *requests: Request, shape: TreeShape) -> StepResult:
        return self.run(self.decode_plan(*requests, shape=shape))

    def submit_text(self, request: Request, steps: int, shape: TreeShape) -> list[StepFuture]:
        """A prefill and some decode steps, none of them waited for."""
        plans = [self.prefill_plan(request)]
        plans += [self.decode_plan(request, shape=shape) for _ in range(steps)]
        return [self.backend.submit(plan) for plan in plans]

    def go_on(self, request: Request, count: int, shape: TreeShape) -> list[int]:
        """The next `count` tokens of a request, decoded alone; a chain may go a little further."""
        tokens: list[int] = []
        while len(tokens) < count:
            tokens += emitted(self.decode(request, shape=shape), 0)
        return tokens[:count]

    def text(self, request: Request, count: int, shape: TreeShape) -> list[int]:
        """The first `count` tokens of a request, prefilled and decoded alone."""
        first = emitted(self.prefill(request), 0)
        return [*first, *self.go_on(request, count - 1, shape)]

    def alone(self, tokens: tuple[int, ...], count: int, **how) -> list[int]:
        """The plain text of a prompt, served alone in a slot and pages of its own."""
        key = (tokens, repr(sorted(how.items())))
        if len(self._texts.get(key, ())) < count:
            request = self.request(tokens, **how)
            self._texts[key] = self.text(request, max(count, SHORTEST_TEXT), PLAIN)
            self.allocator.free(request.slot)
        return self._texts[key][:count]


def emitted(result: StepResult, row: int) -> list[int]:
    """The tokens that a step added to a row's text."""
    return result.tokens[row, : result.counts[row]].tolist()


def joined(futures: Iterable[StepFuture], row: int) -> list[int]:
    """The text of a row over several steps."""
    return [token for future in futures for token in emitted(future.result(), row)]


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """Random tokens, none of them poisoned."""
    drawn = np.random.default_rng(seed).integers(POISON + 1, 270, length)
    return tuple(drawn.tolist())
