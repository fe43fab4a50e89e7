"""Drafters of the reference backend with a draft input: heads that draft level by level."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from jaxtyping import Int

from shared.boundary.backend import BackendLimits
from shared.reference.rows import Batch, ExtendRows, PenaltyRanking, Trees
from shared.spec import assistant, attention, cache_pools, eagle, model
from shared.spec.attention import AttentionRows
from shared.spec.draft_tree import TreeShape
from shared.spec.layers import ImageEmbeds
from shared.spec.lora import AdapterWeights
from shared.spec.tree_growth import DraftRequests, Logits, Rank, Tokens


def chunk_rows(
    batch: Batch, b: int, chunk: ExtendRows, draft_from: Int[np.ndarray, " B"]
) -> AttentionRows:
    """Returns the rows of the prompt chunk of row `b`."""
    return attention.causal_rows(
        row_starts=np.array([0, len(chunk.tokens)]),
        first_positions=np.array([chunk.first]),
        draft_from=draft_from[b : b + 1],
        page_table=batch.page_table[b : b + 1],
        tokens=len(chunk.tokens),
    )


class CarriesInputs:
    """Draft inputs of the slots, which a drafter carries from step to step."""

    def __init__(self, capacity: BackendLimits, hidden: int) -> None:
        slots, width = capacity.num_slots, capacity.max_width
        self._inputs = eagle.DraftInput(  # by slot
            tokens=np.zeros((slots, width), np.int32),
            weights=np.zeros((slots, width), np.float32),
            hidden=np.zeros((slots, hidden), np.float32),
        )
        self._input_logits = np.zeros((slots, capacity.vocab), np.float32)

    @property
    def snapshots(self) -> None:
        """No recurrent states."""

    def start(self, batch: Batch) -> None:
        """Same as `ReferenceDrafter.start`."""
        slots = batch.slots[batch.starts]
        self._inputs.tokens[slots] = 0
        self._inputs.weights[slots] = 0
        self._inputs.hidden[slots] = 0

    def _relay(self, batch: Batch, rank: PenaltyRanking) -> eagle.DraftInput:
        """Returns the draft inputs of the rows; sampled drafts are sampled again."""
        hidden = self._inputs.hidden[batch.slots]
        if rank.kept is not None:  # the draft input was ranked with the target's noise
            no_path = np.zeros((len(hidden), 1, 0), np.int32)
            ids, weights = rank(self._input_logits[batch.slots][:, None], no_path)
            ids, weights = ids[:, 0], weights[:, 0]
        else:
            ids, weights = self._inputs.tokens[batch.slots], self._inputs.weights[batch.slots]
        return eagle.DraftInput(tokens=ids, weights=weights, hidden=hidden)

    def _store(self, batch: Batch, relay: eagle.DraftInput, logits: Logits) -> None:
        """Stores the draft inputs of the rows, and the logits that they were ranked from."""
        self._input_logits[batch.slots] = logits
        self._inputs.tokens[batch.slots] = relay.tokens
        self._inputs.weights[batch.slots] = relay.weights
        self._inputs.hidden[batch.slots] = relay.hidden


class HeadDrafter(CarriesInputs):
    """Drafter for NEXTN, EAGLE and EAGLE-3."""

    def __init__(
        self,
        drafter: eagle.EagleHeadDrafter,
        capacity: BackendLimits,
        adapters: Mapping[str, AdapterWeights],
    ) -> None:
        super().__init__(capacity, drafter.layer.hidden)
        self._drafter, self._adapters = drafter, adapters
        self._kv = cache_pools.new_kv(
            drafter.layer.attentions[0], drafter.num_layers, capacity.num_pages, capacity.page_size
        )

    @property
    def kv_pools(self) -> cache_pools.Pools:
        """Same as `ReferenceDrafter.kv_pools`."""
        return (self._kv,)

    def prefill(
        self,
        batch: Batch,
        fed: list[ExtendRows],
        draft_from: Int[np.ndarray, " B"],
        rank: Rank,
    ) -> None:
        """Same as `ReferenceDrafter.prefill`."""
        out, logits = [], []
        for b, chunk in enumerate(fed):
            rows = replace(
                chunk_rows(batch, b, chunk, draft_from), mrope_positions=chunk.seen.turns
            )
            reads = self._drafter.reads(chunk.passed)
            run = self._drafter.adapted(batch.lora(self._adapters, slice(b, b + 1)))
            hidden, scores, self._kv = run(rows, chunk.following, chunk.seen.shown, reads, self._kv)
            out.append(hidden[-1])
            logits.append(scores[-1])
        self._carry(batch, np.stack(out), np.stack(logits), np.arange(len(fed)), rank)

    def draft(
        self,
        batch: Batch,
        requests: DraftRequests,
        shape: TreeShape,
        rank: PenaltyRanking,
    ) -> Trees:
        """Same as `ReferenceDrafter.draft`."""
        relay = self._relay(batch, rank)
        head = self._drafter.adapted(batch.lora(self._adapters, slice(None)))

        def run(
            rows: AttentionRows,
            tokens: Tokens,
            shown: ImageEmbeds | None,
            hidden: model.Hidden,
            kv: cache_pools.KV,
        ) -> tuple[model.Hidden, Logits, cache_pools.KV]:
            return head(batch.turned(rows), tokens, shown, hidden, kv)

        tree, self._kv = eagle.draft(run, self._kv, relay, requests, shape, rank)
        return Trees.drafted_as(tree)

    def extend(
        self,
        batch: Batch,
        fed: ExtendRows,
        lengths: Int[np.ndarray, " B"],
        counts: Int[np.ndarray, " B"],
        draft_from: Int[np.ndarray, " B"],
        rank: Rank,
    ) -> None:
        """Same as `ReferenceDrafter.extend`."""
        W = len(fed.tokens) // len(counts)
        rows = eagle.extend_rows(lengths, counts, draft_from, batch.page_table, depth=W - 1)
        rows = batch.turned(rows)
        reads = self._drafter.reads(fed.passed)
        run = self._drafter.adapted(batch.lora(self._adapters, slice(None)))
        out, logits, self._kv = run(rows, fed.following, None, reads, self._kv)
        self._carry(batch, out, logits, _last_rows(fed, counts), rank)

    def _carry(
        self,
        batch: Batch,
        hidden: model.Hidden,
        logits: Logits,
        last: Int[np.ndarray, " B"],
        rank: Rank,
    ) -> None:
        """Stores the slots' draft inputs from each row's last extended row."""
        self._store(batch, eagle.relay_of(hidden, logits, last, rank), logits[last])


class TargetKVDrafter(CarriesInputs):
    """Drafter for ASSISTANT; reads the pools of the target."""

    def __init__(
        self,
        head: assistant.Assistant,
        capacity: BackendLimits,
        target_kv: Callable[[], cache_pools.Pools],
    ) -> None:
        super().__init__(capacity, head.head.config.layer.hidden)
        self._assistant, self._target_kv = head, target_kv

    @property
    def kv_pools(self) -> cache_pools.Pools:
        """No draft KV."""
        return ()

    def prefill(
        self,
        batch: Batch,
        fed: list[ExtendRows],
        draft_from: Int[np.ndarray, " B"],
        rank: Rank,
    ) -> None:
        """Same as `ReferenceDrafter.prefill`."""
        until = np.array([chunk.first + len(chunk.tokens) for chunk in fed])
        newest = np.array([chunk.following[-1] for chunk in fed])
        hidden = np.stack([chunk.passed.hidden[-1] for chunk in fed])
        self._extend(batch, until, newest, hidden, rank)

    def draft(
        self,
        batch: Batch,
        requests: DraftRequests,
        shape: TreeShape,
        rank: PenaltyRanking,
    ) -> Trees:
        """Same as `ReferenceDrafter.draft`."""
        drafted = assistant.draft(
            self._assistant,
            self._target_kv(),
            self._relay(batch, rank),
            requests,
            batch.window_page_tables,
            shape,
            rank,
        )
        return Trees.drafted_as(drafted)

    def extend(
        self,
        batch: Batch,
        fed: ExtendRows,
        lengths: Int[np.ndarray, " B"],
        counts: Int[np.ndarray, " B"],
        draft_from: Int[np.ndarray, " B"],
        rank: Rank,
    ) -> None:
        """Same as `ReferenceDrafter.extend`."""
        last = _last_rows(fed, counts)
        until = np.where(counts > 0, lengths + counts, 0)
        self._extend(batch, until, fed.following[last], fed.passed.hidden[last], rank)

    def _extend(
        self,
        batch: Batch,
        until: Int[np.ndarray, " B"],
        newest: Int[np.ndarray, " B"],
        hidden: model.Hidden,
        rank: Rank,
    ) -> None:
        rows = assistant.reading_rows(until, batch.page_table, batch.window_page_tables, 1)
        kv = self._target_kv()
        relay, logits = assistant.extend(self._assistant, kv, rows, newest, hidden, rank)
        self._store(batch, relay, logits)


def _last_rows(fed: ExtendRows, counts: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
    """Returns the last extended row of each request; its first one if none is extended."""
    W = len(fed.tokens) // len(counts)
    return np.arange(len(counts)) * W + np.maximum(counts - 1, 0)
