"""The boundary in numpy: runs step plans with the specifications, on one worker thread.

It is the oracle that the device backends are compared with, so it is written to be read. Padding
rows are left out before a step begins; everything else follows `shared.backend` to the letter.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int, Int32

from shared.backend import (
    Count,
    Decode,
    Draft,
    Limits,
    Mask,
    Prefill,
    StepPlan,
    StepResult,
)
from shared.buffers import read_result, result_layout
from shared.draft_config import DraftHead
from shared.model_config import ModelConfig
from shared.reference_rows import Batch, Trees, allowed_of, noise_of, put, roots, take, tree_fields
from shared.spec import acceptance, attention, draft_tree, eagle, mamba_state, model, sampling
from shared.spec.draft_tree import TreeShape
from shared.spec.model import KV, Weights
from shared.spec.sampling import Sampling

Drafter = Literal["none", "NEXTN"] | DraftHead


class ReferenceBackend:
    """A `shared.backend.Backend` without a device."""

    def __init__(
        self, config: ModelConfig, weights: Weights, limits: Limits, drafter: Drafter
    ) -> None:
        """Allocates the pools of `limits`.

        Args:
          drafter: Nothing, the model's own MTP layer, or a head.

        Raises:
          ValueError: A drafter is asked for that the weights do not hold.
        """
        if drafter == "NEXTN" and "mtp.fc" not in weights:
            raise ValueError("the drafter NEXTN needs a checkpoint with mtp.* tensors")
        self.limits = limits
        self._config, self._weights = config, weights
        self._has_drafter = drafter != "none"
        self._drafter = eagle.Drafter.nextn(config, weights)  # without one its KV has no layer
        if isinstance(drafter, DraftHead):
            self._drafter = eagle.Drafter.of_head(drafter, weights)
        self._worker = ThreadPoolExecutor(max_workers=1)
        self._allocate(config, limits)

    def _allocate(self, config: ModelConfig, limits: Limits) -> None:
        slots, pool = limits.num_slots, (limits.num_pages, limits.page_size)
        self._kv = model.new_kv(config, config.num_attention_layers, *pool)
        self._draft_kv = model.new_kv(self._drafter.layer, int(self._has_drafter), *pool)
        self._state = model.new_state(config, slots)
        self._snapshots = model.new_state(config, limits.num_snapshots)
        self._lengths = np.zeros(slots, np.int32)
        self._newest = np.zeros(slots, np.int32)
        self._draft_from = np.zeros(slots, np.int32)
        self._seen = np.zeros((slots, limits.vocab), np.int32)
        self._relay_arrays = (  # of `eagle.Relay`, by slot
            np.zeros((slots, limits.max_width), np.int32),
            np.zeros((slots, limits.max_width), np.float32),
            np.zeros((slots, self._drafter.layer.hidden), np.float32),
        )

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Queues one step and returns at once.

        Raises:
          ValueError: The plan asks for a program that `limits` does not list.
        """
        if plan.program not in self.limits.programs:
            raise ValueError(f"there is no program {plan.program}")
        return self._worker.submit(self._run, plan)

    def close(self) -> None:
        """Waits for the steps in flight and ends the worker."""
        self._worker.shutdown()

    def _run(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        words = np.zeros(result_layout(plan.program, self.limits).size, np.int32)
        batch = Batch.of(plan)
        if len(batch.index):
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
        for array in self._relay_arrays:
            array[slots] = 0
        saved = take(self._snapshots, restore)
        is_none = restore == 0
        for array in (saved.recurrent, saved.window):
            array[:, is_none] = 0
        put(self._state, slots, saved)

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
        logits = model.logits(self._weights, np.stack([hidden[-1] for hidden, _, _ in passes]))
        allowed = allowed_of(mask, batch.index, self.limits.vocab)
        allowed = None if allowed is None else allowed[:, 0]
        chosen = self._choose(logits, self._seen[batch.slots], lengths, batch.sampling, allowed)
        newest = np.where(ends, chosen, work.next_tokens[batch.index]).astype(np.int32)
        self._lengths[batch.slots], self._newest[batch.slots] = lengths, newest
        for b, slot in enumerate(batch.slots):
            self._count(slot, newest[b : b + 1], lengths[b], batch.sampling.prompt_length[b])
        if self._has_drafter:
            self._feed_prompt(batch, chunks, [reads for _, reads, _ in passes], first, newest)
        failed = np.any(~np.isfinite(logits), axis=1)
        counts = (ends & ~failed).astype(np.int32)
        tokens = np.where(counts > 0, newest, 0)[:, None]
        saved = np.array([saved for _, _, saved in passes])
        logprobs = self._logprob_fields(logits[:, None], tokens, counts)
        fields_of = {"tokens": tokens, "counts": counts, "failed": failed, "saved": saved}
        return fields_of | tree_fields(roots(newest)) | logprobs

    def _prefill_row(
        self, batch: Batch, b: int, chunk: Int[np.ndarray, " T"], first: int
    ) -> tuple[Float[np.ndarray, "T hidden"], Float[np.ndarray, "T reads"], bool]:
        """Runs one row's chunk, cut where its snapshot is taken.

        Returns:
          Hidden states, what the drafter reads of them, and whether the snapshot was taken.
        """
        save_after = int(batch.snapshots.save_at[b] - first)
        passed = batch.snapshots.save[b] != 0 and 0 < save_after <= len(chunk)
        hidden, reads = [], []
        pieces = np.split(chunk, [save_after]) if 0 < save_after < len(chunk) else [chunk]
        for piece in pieces:
            forward = self._prefill_piece(batch, b, piece, first)
            first += len(piece)
            hidden.append(forward.hidden)
            reads.append(self._drafter.reads(forward))
            if passed and len(hidden) == 1:
                at = batch.snapshots.save[b : b + 1]
                put(self._snapshots, at, take(self._state, batch.slots[b : b + 1]))
        return np.concatenate(hidden), np.concatenate(reads), passed

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
        reads: list[Float[np.ndarray, "T reads"]],
        first: Int[np.ndarray, " B"],
        newest: Int[np.ndarray, " B"],
    ) -> None:
        """Extends the drafter over the chunks: each row with the token after it."""
        out, logits = [], []
        for b, (chunk, hidden) in enumerate(zip(chunks, reads, strict=True)):
            where = attention.causal_rows(
                np.array([0, len(chunk)]),
                first[b : b + 1],
                self._draft_from[batch.slots[b : b + 1]],
                batch.page_table[b : b + 1],
                len(chunk),
            )
            following = np.append(chunk[1:], newest[b])
            row_out, row_logits, self._draft_kv = self._drafter.run(
                where, following, hidden, self._draft_kv
            )
            out.append(row_out[-1])
            logits.append(row_logits[-1])
        self._carry(batch, np.stack(out), np.stack(logits), np.arange(len(chunks)))

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
        reads = self._drafter.reads(forward)[np.take_along_axis(row_of, path, axis=1)]
        self._extend(batch, work.shape, lengths, reads, counts, tokens)
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
        tokens, parents, num_nodes, self._draft_kv = eagle.draft(
            self._drafter.run,
            self._draft_kv,
            eagle.Relay(*(array[batch.slots] for array in self._relay_arrays)),
            newest,
            self._lengths[batch.slots],
            self._draft_from[batch.slots],
            batch.sampling.max_drafts,
            batch.page_table,
            shape,
            self._rank(batch, shape.width),
        )
        return Trees(tokens, parents, num_nodes, np.zeros(len(newest), bool))

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
        reads: Float[np.ndarray, "B W reads"],
        counts: Int[np.ndarray, " B"],
        tokens: Int[np.ndarray, "B W"],
    ) -> None:
        """Feeds the accepted path to the drafter; a plain step leaves a hole in its KV instead."""
        if shape.is_plain:
            self._draft_from[batch.slots] = self._lengths[batch.slots]
        elif self._has_drafter:
            where = eagle.extend_rows(
                lengths, counts, self._draft_from[batch.slots], batch.page_table, shape.depth
            )
            flat_reads = reads.reshape(-1, reads.shape[2])
            out, logits, self._draft_kv = self._drafter.run(
                where, tokens.reshape(-1), flat_reads, self._draft_kv
            )
            last = np.arange(len(counts)) * shape.max_tokens + np.maximum(counts - 1, 0)
            self._carry(batch, out, logits, last)

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
        chosen = self._choose(flat_logits, flat_seen, positions.reshape(-1), how, mask)
        return chosen.reshape(B, N)

    def _rank(self, batch: Batch, width: int) -> eagle.Rank:
        """The drafter's choice of children, with the noise and the penalties of the target."""
        lengths, seen = self._lengths[batch.slots], self._seen[batch.slots]

        def rank(
            logits: Float[np.ndarray, "B k vocab"], paths: Int[np.ndarray, "B k path"]
        ) -> tuple[Int[np.ndarray, "B k width"], Float[np.ndarray, "B k width"]]:
            B, k, vocab = logits.shape
            on_path = np.repeat(seen, k, axis=0)
            flat_paths = paths.reshape(B * k, -1)
            np.add.at(on_path, (np.arange(B * k)[:, None], flat_paths), 2)
            positions = np.repeat(lengths, k) + paths.shape[2] + 1
            how = batch.sampling.rows(np.repeat(np.arange(B), k))
            flat = logits.reshape(B * k, vocab)
            scores = sampling.processed(flat, on_path, positions, how, None)
            scores = sampling.perturbed(scores, noise_of(scores, positions, how), how.temperature)
            ids = sampling.top_candidates(scores, width)
            weights = sampling.draft_weights(scores, how.temperature, sampling.DRAFT_TAU)
            weights = np.take_along_axis(weights, ids, axis=1)
            return ids.reshape(B, k, width), weights.reshape(B, k, width)

        return rank

    def _carry(
        self,
        batch: Batch,
        hidden: Float[np.ndarray, "R hidden"],
        logits: Float[np.ndarray, "R vocab"],
        last: Int[np.ndarray, " B"],
    ) -> None:
        """Sets the slots' relays from each row's last extended row."""
        relay = eagle.relay_of(hidden, logits, last, self._rank(batch, self.limits.max_width))
        for array, values in zip(
            self._relay_arrays, (relay.tokens, relay.weights, relay.hidden), strict=True
        ):
            array[batch.slots] = values

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
