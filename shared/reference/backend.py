"""Reference backend: runs step plans in numpy with the specifications, on one worker thread."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from shared.boundary.adapter_pool import LoadAdapter
from shared.boundary.backend import (
    BackendLimits,
    BackendSpec,
    CountPromptTokens,
    Decode,
    DraftOnly,
    Prefill,
    StepPlan,
    StepResult,
)
from shared.boundary.buffers import SCORES, read_result, result_layout
from shared.boundary.checks import check_capacity, check_plan, to_prepare
from shared.boundary.grammar_bitmask import GrammarBitmask
from shared.boundary.images import EncodeImage
from shared.boundary.program import LaunchMode, Program, ProgramFeature
from shared.boundary.transfer_spec import ExportKV, ImportKV
from shared.drafts.drafter_spec import DrafterSpec
from shared.models.config import ModelConfig
from shared.reference import ngram
from shared.reference.adapters import load_adapter, new_adapters
from shared.reference.commit import commit
from shared.reference.device_state import allocate
from shared.reference.drafters import cut, drafter_of, takes_snapshot
from shared.reference.images import ImageContext, encode
from shared.reference.kv_transfer import ReferenceTransfer
from shared.reference.rows import (
    Batch,
    ExtendRows,
    PenaltyRanking,
    Trees,
    allowed_of,
    logprob_fields,
    put,
    roots,
    score_fields,
    take,
    tree_fields,
)
from shared.reference.sampling import chosen
from shared.reference.workspace import workspace
from shared.spec import acceptance, draft_tree, model, sampling, slot_state
from shared.spec.draft_tree import TreeShape
from shared.spec.merge_drafts import NgramTrees
from shared.spec.model import Weights
from shared.spec.tree_growth import DraftRequests

Fields = dict[str, np.ndarray]
"""Fields of a result by name."""


class ReferenceBackend:
    """Implementation of `shared.boundary.backend.Backend` without a device."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        capacity: BackendLimits,
        drafts: DrafterSpec,
        draft_weights: Weights | None,
        tower_weights: Weights | None = None,
    ) -> None:
        """Allocates the pools of `capacity`.

        Args:
          config, weights, capacity, drafts: The target, the limits of the backend, and its drafter.
          draft_weights: Weights of a draft head or draft model; else None.
          tower_weights: Weights of the vision encoder, by the names of
            `shared.models.vision_parameters`.

        Raises:
          ValueError: See `shared.boundary.checks.check_capacity`.
        """
        check_capacity(capacity, drafts, "mtp.fc" in weights, tower_weights is not None)
        self.capacity = capacity
        self._blueprint = BackendSpec(
            config=config, drafts=drafts, capacity=capacity, dtype="float32", on_gpu=False
        )
        self._config, self._weights, self._ready = config, weights, set[Program]()
        self._tower = tower_weights
        self._adapters = new_adapters(capacity.adapters)
        self._drafter = drafter_of(
            self._blueprint, weights, draft_weights, lambda: self.state.kv, self._adapters
        )
        self._columns = (draft_weights or {}).get("draft_ids")
        if drafts.token_map is not None:
            self._columns = np.array(drafts.token_map)
        self._worker = ThreadPoolExecutor(max_workers=1)
        self.state = allocate(config, capacity)

    def workspace(self, program: Program) -> int:
        """Returns the bytes that a step of the program needs beyond weights and pools."""
        return workspace(program, self._blueprint)

    def prepare(self, programs: Sequence[Program], progress: Callable[[Program], None]) -> None:
        """Marks programs as ready; there is nothing to compile.

        Raises:
          ValueError: `capacity` does not list a program.
        """
        for program in to_prepare(programs, self.capacity, self._ready):
            progress(program)
            self._ready.add(program)

    def launch(self, program: Program) -> LaunchMode:
        """Returns the launch mode of a step of the program."""
        return LaunchMode.EAGER

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Queues one step and returns at once.

        Raises:
          ValueError: See `shared.boundary.checks.check_plan`.
        """
        check_plan(plan, self._ready)
        return self._worker.submit(self._run, plan)

    def close(self) -> None:
        """Waits for the steps in flight and ends the worker thread."""
        self._worker.shutdown()

    def _run(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        words = np.zeros(result_layout(plan.program, self.capacity).size, np.int32)
        sees = self.capacity.images is not None
        deltas = self.state.turn_deltas if sees else None
        batch = Batch.of(plan, deltas, self.capacity.window_pools)
        if isinstance(plan.work, EncodeImage):
            encode(plan.work, plan.program.blocks, self.capacity.images, self._tower, self.state)
        elif isinstance(plan.work, ExportKV | ImportKV):
            step = ReferenceTransfer.of(plan, self.capacity, self.state, self._drafter)
            for name, values in step.run().items():
                result_layout(plan.program, self.capacity).fields[name].view(words)[...] = values
        elif isinstance(plan.work, LoadAdapter):
            assert self.capacity.adapters is not None  # otherwise the program does not exist
            load_adapter(self._adapters, self.capacity.adapters, plan)
        elif len(batch.index):
            if isinstance(plan.work, Prefill | CountPromptTokens):
                self._start(batch)
            for name, values in self._step(batch, plan).items():
                at = result_layout(plan.program, self.capacity).fields.get(name)
                if at is not None:  # None for logprobs that the program does not return
                    at.view(words)[... if name in SCORES else batch.index] = values
        return read_result(plan.program, self.capacity, words, time.perf_counter() - began)

    def _step(self, batch: Batch, plan: StepPlan) -> Fields:
        """Runs the step; returns the result's fields by name."""
        match plan.work:
            case Prefill():
                ranks = plan.program.has(ProgramFeature.PROMPT_LOGPROBS)
                return self._prefill(batch, plan.work, ranks)
            case Decode():
                return self._decode(batch, plan.work, plan.mask)
            case DraftOnly():
                return tree_fields(self._draft(batch, plan.work.shape))
            case CountPromptTokens():
                return self._count_prompt(batch, plan.work)
            case _:  # a step without rows
                return {}

    # A row's first step

    def _start(self, batch: Batch) -> None:
        """Resets the slots of starting rows, then restores the snapshots that the plan names."""
        started = batch.slots[batch.starts]
        self.state.lengths[started] = self.state.newest[started] = 0
        self.state.seen[started] = 0
        self.state.draft_from[started] = batch.draft_from[batch.starts]
        self.state.delta = batch.restored(self.state.delta, self.state.snapshots)
        if self._drafter is not None:
            self._drafter.start(batch)

    def _count(self, batch: Batch, b: int, tokens: Int[np.ndarray, " T"], first: int) -> None:
        """Adds row b's tokens from position `first` on to the token counts of its slot."""
        owner = np.full(len(tokens), batch.slots[b])
        is_output = first + np.arange(len(tokens)) >= batch.sampling.prompt_length[b]
        is_counted = np.ones(len(tokens), bool)
        self.state.seen = slot_state.count(self.state.seen, owner, tokens, is_output, is_counted)

    def _count_prompt(self, batch: Batch, work: CountPromptTokens) -> Fields:
        for b, row in enumerate(batch.index):
            tokens = work.tokens[work.row_starts[row] : work.row_starts[row + 1]]
            self._count(batch, b, tokens, int(work.first_positions[row]))
        return {}

    def _logits(self, hidden: model.Hidden) -> Float[np.ndarray, "R vocab"]:
        return model.logits(self._config, self._weights, hidden)

    # Prefill

    def _prefill(self, batch: Batch, work: Prefill, scores: bool) -> Fields:
        spans = [slice(*work.row_starts[i : i + 2]) for i in batch.index]
        chunks = [work.tokens[span] for span in spans]
        seen = [ImageContext.of(work.images, self.state.pool, span) for span in spans]
        if work.images is not None:
            self.state.turn_deltas[batch.slots] = work.images.mrope_position_deltas[batch.index]
        first, ends = work.first_positions[batch.index], work.ends_prompt[batch.index] != 0
        passes = [
            self._prefill_row(batch, b, chunk, first[b], seen[b]) for b, chunk in enumerate(chunks)
        ]
        lengths = first + np.array([len(chunk) for chunk in chunks], np.int32)
        for b, chunk in enumerate(chunks):
            skipped = 0 if batch.starts[b] else 1  # counted by the previous chunk as its next token
            self._count(batch, b, chunk[skipped:], first[b] + skipped)
        logits = self._logits(np.stack([read.hidden[-1] for read, _ in passes]))
        counted = sampling.counts_alone(self.state.seen, batch.slots)
        everyone = np.arange(len(lengths))
        chosen = sampling.choose(logits, counted, lengths, batch.sampling, everyone, None)
        newest = np.where(ends, chosen.ids, work.next_tokens[batch.index]).astype(np.int32)
        self.state.lengths[batch.slots], self.state.newest[batch.slots] = lengths, newest
        for b in range(len(newest)):
            self._count(batch, b, newest[b : b + 1], lengths[b])
        if self._drafter is not None:
            if work.images is not None:
                following = work.images.next_embed_sources[batch.index]
                seen = [each.before(int(x)) for each, x in zip(seen, following, strict=True)]
            self._prefill_prompt(batch, chunks, [read for read, _ in passes], first, newest, seen)
        if self.state.texts is not None:
            self.state.texts = ngram.learn_prompts(self.state.texts, batch, work, newest)
        failed = ~chosen.is_finite
        counts = (ends & ~failed).astype(np.int32)
        tokens = np.where(counts > 0, newest, 0)[:, None]
        saved = np.array([saved for _, saved in passes])
        reported = logprob_fields(
            batch, logits, everyone[:, None], tokens, counts, self.capacity.max_logprobs
        )
        if scores:
            each = [self._logits(read.hidden) for read, _ in passes]
            reported |= score_fields(work, batch.index, each, newest, self.capacity.max_scores)
        fields_of = {"tokens": tokens, "counts": counts, "failed": failed, "snapshot_saved": saved}
        return fields_of | tree_fields(roots(newest)) | reported

    def _prefill_row(
        self, batch: Batch, b: int, chunk: Int[np.ndarray, " T"], first: int, seen: ImageContext
    ) -> tuple[model.Forward, bool]:
        """Runs one row's chunk, split where its snapshot is taken.

        Returns:
          The pass over the chunk, and True if the snapshot was taken.
        """
        save_after = int(batch.snapshots.save_at[b] - first)
        passed = bool(batch.snapshots.save[b] != 0) and takes_snapshot(save_after, len(chunk))
        pieces: list[model.Forward] = []
        for piece in cut(chunk, save_after):
            pieces.append(self._prefill_piece(batch, b, piece, first, seen.part(0, len(piece))))
            first, seen = first + len(piece), seen.part(len(piece), None)
            if passed and len(pieces) == 1:
                at = batch.snapshots.save[b : b + 1]
                put(self.state.snapshots, at, take(self.state.delta, batch.slots[b : b + 1]))
        hidden = np.concatenate([each.hidden for each in pieces])
        streams = np.concatenate([each.streams for each in pieces], axis=1)
        return model.Forward(hidden, streams, self.state.kv), passed

    def _prefill_piece(
        self, batch: Batch, b: int, tokens: Int[np.ndarray, " T"], first: int, seen: ImageContext
    ) -> model.Forward:
        slot, table = batch.slots[b : b + 1], batch.page_table[b : b + 1]
        forward, state = model.prefill(
            self._config,
            self._weights,
            self.state.kv,
            take(self.state.delta, slot),
            tokens,
            np.array([0, len(tokens)], np.int32),
            np.array([first], np.int32),
            table,
            seen.shown,
            seen.turns,
            {size: pages[b : b + 1] for size, pages in batch.window_page_tables.items()},
            lora=batch.lora(self._adapters, slice(b, b + 1)),
        )
        self.state.kv = forward.kv
        put(self.state.delta, slot, state)
        return forward

    def _prefill_prompt(
        self,
        batch: Batch,
        chunks: list[Int[np.ndarray, " T"]],
        passes: list[model.Forward],
        first: Int[np.ndarray, " B"],
        newest: Int[np.ndarray, " B"],
        seen: list[ImageContext],
    ) -> None:
        """Extends the drafter over the chunks: each row with the token after it."""
        assert self._drafter is not None
        fed = [
            ExtendRows(int(first[b]), chunk, np.append(chunk[1:], newest[b]), passes[b], seen[b])
            for b, chunk in enumerate(chunks)
        ]
        draft_from = self.state.draft_from[batch.slots]
        self._drafter.prefill(batch, fed, draft_from, self._rank(batch, self.capacity.max_width))

    def _decode(self, batch: Batch, work: Decode, mask: GrammarBitmask | None) -> Fields:
        trees = self._trees(batch, work)
        lengths = self.state.lengths[batch.slots]
        forward, kept = model.verify(
            self._config,
            self._weights,
            self.state.kv,
            take(self.state.delta, batch.slots),
            trees.tokens,
            trees.parents,
            trees.num_nodes,
            lengths,
            batch.page_table,
            work.shape.rows,
            batch.deltas,
            batch.window_page_tables,
            lora=batch.lora(self._adapters, slice(None)),
        )
        row_starts, *_ = draft_tree.flatten(trees.num_nodes, work.shape.rows)
        row_of = draft_tree.flat_rows(row_starts, trees.num_nodes, work.shape.nodes)
        flat_logits = self._logits(forward.hidden)
        logits = flat_logits[row_of]  # [B, N, vocab]
        allowed = allowed_of(mask, batch.index, logits.shape[2])
        choices = chosen(batch, trees, logits, allowed, self.state, self.capacity.accept_rule)
        choices, walked = trees.accepting(
            choices, self.capacity.accept_rates, batch.sampling.seed, lengths
        )
        accepted = acceptance.follow(
            trees.tokens,
            trees.parents,
            walked,
            choices,
            row_of,
            np.all(np.isfinite(flat_logits), axis=1),
            np.ones(len(walked), bool),
            work.shape.depth,
        )
        path, counts, tokens = accepted.path, accepted.counts, accepted.tokens
        tables = batch.page_tables_of(self._config.kv_pools)
        saved = commit(
            self.state, batch, work.shape, forward.kv, tables, kept, path, counts, tokens
        )
        passed = forward.at(accepted.rows.reshape(-1))
        path_tokens = np.take_along_axis(trees.tokens, path, axis=1).reshape(-1)
        fed = ExtendRows(0, path_tokens, tokens.reshape(-1), passed, ImageContext())
        self._extend(batch, work.shape, lengths, fed, counts)
        failed = accepted.failed
        fields_of = {"tokens": tokens, "counts": counts, "failed": failed, "snapshot_saved": saved}
        K = self.capacity.max_logprobs
        reported = logprob_fields(batch, flat_logits, accepted.rows, tokens, counts, K)
        return fields_of | tree_fields(trees) | reported

    def _trees(self, batch: Batch, work: Decode) -> Trees:
        if work.drafts is not None:
            drafts, index = work.drafts, batch.index
            tokens = drafts.tokens[index]  # a copy, so that the plan does not change
            tokens[:, 0] = self.state.newest[batch.slots]
            forced = drafts.forced[index] != 0
            return Trees(tokens, drafts.parents[index], drafts.num_nodes[index], forced)
        if work.ngram_drafts is None:
            return self._draft(batch, work.shape)
        drafts = vars(work.ngram_drafts)
        given = NgramTrees(**{name: each[batch.index] for name, each in drafts.items()})
        own, newest = work.shape.drafter, self.state.newest[batch.slots]
        weights = np.zeros((len(newest), 1), np.float32)
        alone = replace(roots(newest), weights=weights)
        grown = alone if own.is_plain else self._grown(batch, own)
        return grown.joined(
            given,
            batch.sampling.calibration,
            self.state.lengths[batch.slots],
            batch.sampling.max_drafts,
            work.shape,
            work.shape.rows - batch.num_padding,
        )

    def _draft(self, batch: Batch, shape: TreeShape) -> Trees:
        """Returns the drafter's trees; the root alone for a plain shape."""
        if shape.is_plain:
            return roots(self.state.newest[batch.slots])
        trees = self._grown(batch, shape)
        if self.capacity.accept_rule != "exact":
            return trees
        return trees.shared(batch.sampling.calibration, shape.rows - batch.num_padding)

    def _grown(self, batch: Batch, shape: TreeShape) -> Trees:
        """Returns the drafter's trees before they are pruned to the verify budget."""
        if self.state.texts is not None:
            return ngram.grown(self.state.texts, batch, shape, self.capacity.accept_rule)
        assert self._drafter is not None  # required for a program that drafts
        is_sampled = self.capacity.accept_rule != "exact"
        rank = replace(self._rank(batch, shape.width), kept=[] if is_sampled else None)
        requests = DraftRequests(
            newest=self.state.newest[batch.slots],
            lengths=self.state.lengths[batch.slots],
            draft_from=self.state.draft_from[batch.slots],
            max_drafts=batch.sampling.max_drafts,
            page_table=batch.page_table,
        )
        trees = self._drafter.draft(batch, requests, shape, rank)
        return replace(trees, drafted=rank.drafted) if is_sampled else trees

    def _extend(
        self,
        batch: Batch,
        shape: TreeShape,
        lengths: Int[np.ndarray, " B"],
        fed: ExtendRows,
        counts: Int[np.ndarray, " B"],
    ) -> None:
        """Extends the drafter over the accepted path; a plain step does not."""
        if self._drafter is not None and not shape.is_plain:
            rank = self._rank(batch, self.capacity.max_width)
            draft_from = self.state.draft_from[batch.slots]
            self._drafter.extend(batch, fed, lengths, counts, draft_from, rank)

    def _rank(self, batch: Batch, width: int) -> PenaltyRanking:
        """Returns the drafter's ranking of children, with the noise and the penalties of the
        target.
        """
        return PenaltyRanking(
            sampling=batch.sampling,
            slots=batch.slots,
            lengths=self.state.lengths[batch.slots],
            counts=self.state.seen,
            width=width,
            columns=self._columns,
            kept=None,
        )
