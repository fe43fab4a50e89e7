"""The boundary in numpy: runs step plans with the specifications, on one worker thread.

It is the oracle that the device backends are compared with, so it is written to be read. Padding
rows are left out before a step begins; everything else follows `shared.boundary.backend` to the
letter.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
from jaxtyping import Bool, Float, Int, Int32

from shared.boundary.backend import (
    Blueprint,
    Count,
    Decode,
    Draft,
    Limits,
    Mask,
    Prefill,
    Program,
    StepPlan,
    StepResult,
)
from shared.boundary.buffers import read_result, result_layout
from shared.boundary.checks import check_limits, check_plan, to_prepare
from shared.drafts.drafts import Drafts
from shared.models.config import ModelConfig
from shared.reference.drafters import cut, drafter_of, takes_snapshot
from shared.reference.rows import (
    Batch,
    Fed,
    Ranking,
    Trees,
    allowed_of,
    judged,
    noise_of,
    put,
    roots,
    take,
    tree_fields,
)
from shared.reference.workspace import workspace
from shared.spec import acceptance, attention, draft_tree, mamba_state, model, sampling
from shared.spec.draft_tree import TreeShape
from shared.spec.model import KV, Weights
from shared.spec.sampling import Sampling


class ReferenceBackend:
    """A `shared.boundary.backend.Backend` without a device."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        limits: Limits,
        drafts: Drafts,
        draft_weights: Weights | None,
    ) -> None:
        """Allocates the pools of `limits`.

        Args:
          drafts: What drafts.
          draft_weights: Of a head or a small model; None of the other kinds.

        Raises:
          ValueError: See `shared.boundary.checks.check_limits`.
        """
        check_limits(limits, drafts, "mtp.fc" in weights)
        self.limits = limits
        self._blueprint = Blueprint(
            config=config, drafts=drafts, limits=limits, dtype="float32", on_gpu=False
        )
        self._config, self._weights, self._ready = config, weights, set[Program]()
        self._drafter = drafter_of(self._blueprint, weights, draft_weights)
        self._worker = ThreadPoolExecutor(max_workers=1)
        self._allocate(config, limits)

    def _allocate(self, config: ModelConfig, limits: Limits) -> None:
        slots, pool = limits.num_slots, (limits.num_pages, limits.page_size)
        self._kv = model.new_kv(config, config.num_attention_layers, *pool)
        self._state = model.new_state(config, slots)
        self._snapshots = model.new_state(config, limits.num_snapshots)
        self._lengths = np.zeros(slots, np.int32)
        self._newest = np.zeros(slots, np.int32)
        self._draft_from = np.zeros(slots, np.int32)
        self._seen = np.zeros((slots, limits.vocab), np.int32)

    def workspace(self, program: Program) -> int:
        """Bytes that a step of the program needs beyond weights and pools."""
        return workspace(program, self._blueprint)

    def prepare(self, programs: Sequence[Program], progress: Callable[[Program], None]) -> None:
        """Notes that programs may run; there is nothing to compile.

        Raises:
          ValueError: `limits` does not list a program.
        """
        for program in to_prepare(programs, self.limits, self._ready):
            progress(program)
            self._ready.add(program)

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Queues one step and returns at once.

        Raises:
          ValueError: See `shared.boundary.checks.check_plan`.
        """
        check_plan(plan, self._ready)
        return self._worker.submit(self._run, plan)

    def close(self) -> None:
        """Waits for the steps in flight and ends the worker."""
        self._worker.shutdown()

    def _run(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        words = np.zeros(result_layout(plan.program, self.limits).size, np.int32)
        batch = Batch.of(plan)
        if len(batch.index):
            if isinstance(plan.work, Prefill | Count):
                self._start(batch)
            for name, values in self._step(batch, plan).items():
                at = result_layout(plan.program, self.limits).fields.get(name)
                if at is not None:  # logprobs, where the program has none
                    at.view(words)[batch.index] = values
        return read_result(plan.program, self.limits, words, time.perf_counter() - began)

    def _step(self, batch: Batch, plan: StepPlan) -> dict[str, np.ndarray]:
        """Does the work; returns the result's fields by name."""
        match plan.work:
            case Prefill():
                return self._prefill(batch, plan.work, plan.mask)
            case Decode():
                return self._decode(batch, plan.work, plan.mask)
            case Draft():
                trees = self._draft(batch, plan.work.shape)
                return tree_fields(trees)
            case Count():
                return self._count_prompt(batch, plan.work)

    # A row's first step

    def _start(self, batch: Batch) -> None:
        """Resets the slots of starting rows, then restores what the plan names."""
        slots, restore = batch.slots[batch.starts], batch.snapshots.restore[batch.starts]
        self._lengths[slots] = self._newest[slots] = 0
        self._seen[slots] = 0
        self._draft_from[slots] = batch.draft_from[batch.starts]
        put(self._state, slots, batch.restored(self._snapshots, restore))
        if self._drafter is not None:
            self._drafter.start(batch)

    def _count(self, slot: int, tokens: np.ndarray, first: int, prompt_length: int) -> None:
        """Adds tokens at positions `first` and on to a slot's `seen`."""
        is_output = first + np.arange(len(tokens)) >= prompt_length
        self._seen[slot, tokens[~is_output]] |= 1
        np.add.at(self._seen[slot], tokens[is_output], 2)

    def _count_prompt(self, batch: Batch, work: Count) -> dict[str, np.ndarray]:
        for slot, row, prompt_length in zip(
            batch.slots, batch.index, batch.sampling.prompt_length, strict=True
        ):
            tokens = work.tokens[work.row_starts[row] : work.row_starts[row + 1]]
            self._count(slot, tokens, 0, prompt_length)
        return {}

    # Prefill

    def _prefill(self, batch: Batch, work: Prefill, mask: Mask | None) -> dict[str, np.ndarray]:
        chunks = [work.tokens[work.row_starts[i] : work.row_starts[i + 1]] for i in batch.index]
        first, ends = work.first_positions[batch.index], work.ends_prompt[batch.index] != 0
        passes = [self._prefill_row(batch, b, chunk, first[b]) for b, chunk in enumerate(chunks)]
        lengths = first + np.array([len(chunk) for chunk in chunks], np.int32)
        for b, (slot, chunk) in enumerate(zip(batch.slots, chunks, strict=True)):
            skipped = 0 if batch.starts[b] else 1  # the token before said that it would be next
            prompt_length = batch.sampling.prompt_length[b]
            self._count(slot, chunk[skipped:], first[b] + skipped, prompt_length)
        logits = model.logits(self._weights, np.stack([read.hidden[-1] for read, _ in passes]))
        allowed = allowed_of(mask, batch.index, self.limits.vocab)
        allowed = None if allowed is None else allowed[:, 0]
        chosen = self._choose(logits, self._seen[batch.slots], lengths, batch.sampling, allowed)
        newest = np.where(ends, chosen, work.next_tokens[batch.index]).astype(np.int32)
        self._lengths[batch.slots], self._newest[batch.slots] = lengths, newest
        for b, slot in enumerate(batch.slots):
            self._count(slot, newest[b : b + 1], lengths[b], batch.sampling.prompt_length[b])
        if self._drafter is not None:
            self._feed_prompt(batch, chunks, [read for read, _ in passes], first, newest)
        failed = np.any(~np.isfinite(logits), axis=1)
        counts = (ends & ~failed).astype(np.int32)
        tokens = np.where(counts > 0, newest, 0)[:, None]
        saved = np.array([saved for _, saved in passes])
        logprobs = self._logprob_fields(logits[:, None], tokens, counts)
        fields_of = {"tokens": tokens, "counts": counts, "failed": failed, "saved": saved}
        return fields_of | tree_fields(roots(newest)) | logprobs

    def _prefill_row(
        self, batch: Batch, b: int, chunk: Int[np.ndarray, " T"], first: int
    ) -> tuple[model.Forward, bool]:
        """Runs one row's chunk, cut where its snapshot is taken.

        Returns:
          The pass over the chunk, and whether the snapshot was taken.
        """
        save_after = int(batch.snapshots.save_at[b] - first)
        passed = bool(batch.snapshots.save[b] != 0) and takes_snapshot(save_after, len(chunk))
        found: list[model.Forward] = []
        for piece in cut(chunk, save_after):
            found.append(self._prefill_piece(batch, b, piece, first))
            first += len(piece)
            if passed and len(found) == 1:
                at = batch.snapshots.save[b : b + 1]
                put(self._snapshots, at, take(self._state, batch.slots[b : b + 1]))
        hidden = np.concatenate([each.hidden for each in found])
        streams = np.concatenate([each.streams for each in found], axis=1)
        return model.Forward(hidden, streams, self._kv), passed

    def _prefill_piece(
        self, batch: Batch, b: int, tokens: Int[np.ndarray, " T"], first: int
    ) -> model.Forward:
        slot, table = batch.slots[b : b + 1], batch.page_table[b : b + 1]
        forward, state = model.prefill(
            self._config,
            self._weights,
            self._kv,
            take(self._state, slot),
            tokens,
            np.array([0, len(tokens)], np.int32),
            np.array([first], np.int32),
            table,
        )
        self._kv = forward.kv
        put(self._state, slot, state)
        return forward

    def _feed_prompt(
        self,
        batch: Batch,
        chunks: list[Int[np.ndarray, " T"]],
        passes: list[model.Forward],
        first: Int[np.ndarray, " B"],
        newest: Int[np.ndarray, " B"],
    ) -> None:
        """Extends the drafter over the chunks: each row with the token after it."""
        assert self._drafter is not None
        fed = [
            Fed(int(first[b]), chunk, np.append(chunk[1:], newest[b]), passes[b])
            for b, chunk in enumerate(chunks)
        ]
        draft_from = self._draft_from[batch.slots]
        self._drafter.prefill(batch, fed, draft_from, self._rank(batch, self.limits.max_width))

    # Decode

    def _decode(self, batch: Batch, work: Decode, mask: Mask | None) -> dict[str, np.ndarray]:
        trees = self._trees(batch, work)
        lengths = self._lengths[batch.slots]
        forward, kept = model.verify(
            self._config,
            self._weights,
            self._kv,
            take(self._state, batch.slots),
            trees.tokens,
            trees.parents,
            trees.num_nodes,
            lengths,
            batch.page_table,
            work.shape.rows,
        )
        row_starts, *_ = draft_tree.flatten(trees.num_nodes, work.shape.rows)
        row_of = draft_tree.flat_rows(row_starts, trees.num_nodes, work.shape.nodes)
        logits = model.logits(self._weights, forward.hidden)[row_of]  # [B, N, vocab]
        choices = self._choose_nodes(
            batch, trees, logits, allowed_of(mask, batch.index, logits.shape[2])
        )
        choices, walked = trees.forced_choices(choices)
        path, counts = acceptance.walk(
            trees.tokens, trees.parents, walked, choices, work.shape.depth
        )
        failed = acceptance.failed(np.any(~np.isfinite(logits), axis=2), path)
        counts = np.where(failed, 0, counts).astype(np.int32)
        tokens = acceptance.emitted(choices, path, counts)
        saved = self._commit(batch, forward.kv, kept, path, counts, tokens)
        passed = forward.at(np.take_along_axis(row_of, path, axis=1).reshape(-1))
        own = np.take_along_axis(trees.tokens, path, axis=1).reshape(-1)
        fed = Fed(0, own, tokens.reshape(-1), passed)
        self._extend(batch, work.shape, lengths, fed, counts)
        on_path = np.take_along_axis(logits, path[:, :, None], axis=1)
        fields_of = {"tokens": tokens, "counts": counts, "failed": failed, "saved": saved}
        return fields_of | tree_fields(trees) | self._logprob_fields(on_path, tokens, counts)

    def _trees(self, batch: Batch, work: Decode) -> Trees:
        if work.drafts is not None:
            drafts, index = work.drafts, batch.index
            tokens = drafts.tokens[index]  # a copy: the plan stays as it is
            tokens[:, 0] = self._newest[batch.slots]
            forced = drafts.forced[index] != 0
            return Trees(tokens, drafts.parents[index], drafts.num_nodes[index], forced)
        return self._draft(batch, work.shape)

    def _draft(self, batch: Batch, shape: TreeShape) -> Trees:
        """The trees that the drafter grows; the root alone for a plain shape."""
        newest = self._newest[batch.slots]
        if shape.is_plain:
            return roots(newest)
        assert self._drafter is not None  # a program that drafts has one
        slots, rank = batch.slots, self._rank(batch, shape.width)
        bounds = (self._lengths[slots], self._draft_from[slots])
        if self.limits.accept_rule == "match":
            return self._drafter.draft(batch, newest, *bounds, shape, rank)
        rank = replace(rank, kept=[])
        trees = self._drafter.draft(batch, newest, *bounds, shape, rank)
        return replace(trees, drafted=rank.drafted)

    def _commit(
        self,
        batch: Batch,
        kv: KV,
        kept: mamba_state.Kept,
        path: Int[np.ndarray, "B W"],
        counts: Int[np.ndarray, " B"],
        tokens: Int[np.ndarray, "B W"],
    ) -> Bool[np.ndarray, " B"]:
        """Makes the accepted path the slots' past; returns which snapshots were taken."""
        slots, lengths = batch.slots, self._lengths[batch.slots]
        move = partial(
            attention.commit_window,
            page_table=batch.page_table,
            lengths=lengths,
            path=path,
            counts=counts,
        )
        self._kv = KV(*(np.stack([move(layer) for layer in pool]) for pool in (kv.k, kv.v)))
        state, snapshots, passed = mamba_state.replay(
            take(self._state, slots), kept, path, counts, batch.snapshots.save_at - lengths
        )
        passed &= batch.snapshots.save != 0
        put(self._state, slots, state)
        put(self._snapshots, batch.snapshots.save[passed], take(snapshots, passed))
        for b, slot in enumerate(slots):
            emitted = tokens[b, : counts[b]]
            self._count(slot, emitted, lengths[b] + 1, batch.sampling.prompt_length[b])
            if len(emitted):
                self._newest[slot] = emitted[-1]
        self._lengths[slots] += counts
        return passed

    def _extend(
        self,
        batch: Batch,
        shape: TreeShape,
        lengths: Int[np.ndarray, " B"],
        fed: Fed,
        counts: Int[np.ndarray, " B"],
    ) -> None:
        """Feeds the accepted path to the drafter; a plain step leaves a hole in its KV instead."""
        if shape.is_plain:
            self._draft_from[batch.slots] = self._lengths[batch.slots]
        elif self._drafter is not None:
            draft_from, rank = (
                self._draft_from[batch.slots],
                self._rank(batch, self.limits.max_width),
            )
            self._drafter.extend(batch, fed, lengths, counts, draft_from, rank)

    # Choosing

    def _choose(
        self,
        logits: Float[np.ndarray, "R vocab"],
        seen: Int[np.ndarray, "R vocab"],
        positions: Int[np.ndarray, " R"],
        how: Sampling,
        allowed: Bool[np.ndarray, "R vocab"] | None,
    ) -> Int32[np.ndarray, " R"]:
        scores = sampling.processed(logits, seen, positions, how, allowed)
        return sampling.choose(scores, noise_of(scores, positions, how), how.temperature)

    def _choose_nodes(
        self,
        batch: Batch,
        trees: Trees,
        logits: Float[np.ndarray, "B N vocab"],
        allowed: Bool[np.ndarray, "B N vocab"] | None,
    ) -> Int32[np.ndarray, "B N"]:
        """The target's token after each node."""
        B, N, vocab = logits.shape
        seen = sampling.path_seen(self._seen[batch.slots], trees.tokens, trees.parents)
        positions = self._lengths[batch.slots, None] + draft_tree.depths(trees.parents) + 1
        flat_logits, flat_seen = logits.reshape(B * N, vocab), seen.reshape(B * N, vocab)
        how = batch.sampling.rows(np.repeat(np.arange(B), N))
        mask = None if allowed is None else allowed.reshape(B * N, vocab)
        flat_positions = positions.reshape(-1)
        chosen = self._choose(flat_logits, flat_seen, flat_positions, how, mask).reshape(B, N)
        if trees.drafted is None:
            return chosen
        scores = sampling.processed(flat_logits, flat_seen, flat_positions, how, mask)
        lengths, rule = self._lengths[batch.slots], self.limits.accept_rule
        return judged(rule, batch, lengths, trees, scores.reshape(B, N, vocab), chosen)

    def _rank(self, batch: Batch, width: int) -> Ranking:
        """The drafter's choice of children, with the noise and the penalties of the target."""
        slots = batch.slots
        return Ranking(batch.sampling, self._lengths[slots], self._seen[slots], width, None)

    def _logprob_fields(
        self,
        logits: Float[np.ndarray, "B W vocab"],
        tokens: Int[np.ndarray, "B W"],
        counts: Int[np.ndarray, " B"],
    ) -> dict[str, np.ndarray]:
        """Logprobs of the emitted tokens and the best ones; 0 past the counts."""
        B, W, vocab = logits.shape
        flat, K = logits.reshape(B * W, vocab), self.limits.max_logprobs
        is_emitted = np.arange(W) < counts[:, None]
        chosen = sampling.logprobs(flat, tokens.reshape(-1)).reshape(B, W)
        ids, values = (top.reshape(B, W, K) for top in sampling.top_logprobs(flat, K))
        return {
            "chosen": np.where(is_emitted, chosen, 0),
            "top_ids": np.where(is_emitted[:, :, None], ids, 0),
            "top_values": np.where(is_emitted[:, :, None], values, 0),
        }
