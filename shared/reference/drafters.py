"""Drafters of the reference backend, each with its own state of all slots and pages."""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from jaxtyping import Float, Int

from shared.boundary.backend import BackendLimits, BackendSpec
from shared.drafts.config import DraftHead
from shared.drafts.kinds import DFLASH2, DSPARK
from shared.models.config import ModelConfig
from shared.reference.head_drafters import HeadDrafter, TargetKVDrafter, chunk_rows
from shared.reference.rows import Batch, ExtendRows, PenaltyRanking, Trees, put, take
from shared.spec import (
    assistant,
    cache_pools,
    dflash,
    dflash2,
    dspark,
    eagle,
    standalone,
)
from shared.spec.draft_tree import TreeShape
from shared.spec.gated_delta import CHUNK
from shared.spec.lora import AdapterWeights
from shared.spec.model import Weights
from shared.spec.recurrent_state import RecurrentState
from shared.spec.standalone import SmallModel
from shared.spec.tree_growth import DraftRequests, Rank


class ReferenceDrafter(Protocol):
    """Interface of a drafter.

    `draft_from` is the first position of each row with complete draft KV.
    """

    @property
    def kv_pools(self) -> cache_pools.Pools:
        """Page pools of the draft KV."""
        ...

    @property
    def snapshots(self) -> RecurrentState | None:
        """Recurrent states by snapshot; None without recurrent states."""
        ...

    def start(self, batch: Batch) -> None:
        """Resets the slots of starting rows, and restores the snapshots that the plan names."""
        ...

    def prefill(
        self,
        batch: Batch,
        fed: list[ExtendRows],
        draft_from: Int[np.ndarray, " B"],
        rank: Rank,
    ) -> None:
        """Extends the drafter over each row's prompt chunk.

        Args:
          batch: Rows of the plan.
          fed: Chunk of each row.
          draft_from: First position with complete draft KV.
          rank: Ranks the token after each row's newest.
        """
        ...

    def draft(
        self,
        batch: Batch,
        requests: DraftRequests,
        shape: TreeShape,
        rank: PenaltyRanking,
    ) -> Trees:
        """Drafts a tree for each row; only the root without draft KV."""
        ...

    def extend(
        self,
        batch: Batch,
        fed: ExtendRows,
        lengths: Int[np.ndarray, " B"],
        counts: Int[np.ndarray, " B"],
        draft_from: Int[np.ndarray, " B"],
        rank: Rank,
    ) -> None:
        """Draft extend: runs the drafter over accepted paths of W rows each.

        Args:
          batch: Rows of the plan.
          fed: B * W rows.
          lengths: Lengths before the step.
          counts: Number of real rows of each path.
          draft_from: First position with complete draft KV.
          rank: Ranks the token after each row's newest.
        """
        ...


CHAINS = {DSPARK.name: dspark.chain, DFLASH2.name: dflash2.chain}
LISTS = {DSPARK.name: dspark.lists, DFLASH2.name: dflash2.lists}
"""Selections of draft tokens one after the other, by kind; other kinds select all at once."""


class BlockDrafter:
    """Drafter for block heads."""

    def __init__(self, drafter: dflash.BlockHeadDrafter, capacity: BackendLimits) -> None:
        self._drafter, layer = drafter, drafter.layer
        self._kv = cache_pools.new_kv(
            layer.attention, layer.num_layers, capacity.num_pages, capacity.page_size
        )

    @property
    def kv_pools(self) -> cache_pools.Pools:
        """Same as `ReferenceDrafter.kv_pools`."""
        return (self._kv,)

    @property
    def snapshots(self) -> None:
        """No recurrent states."""

    def start(self, batch: Batch) -> None:
        """Does nothing: KV of an earlier owner is before every row's context."""

    def prefill(
        self,
        batch: Batch,
        fed: list[ExtendRows],
        draft_from: Int[np.ndarray, " B"],
        rank: Rank,
    ) -> None:
        """Same as `ReferenceDrafter.prefill`."""
        for b, chunk in enumerate(fed):
            rows = chunk_rows(batch, b, chunk, draft_from)
            self._kv = self._drafter.extend(rows, self._drafter.reads(chunk.passed), self._kv)

    def draft(
        self,
        batch: Batch,
        requests: DraftRequests,
        shape: TreeShape,
        rank: PenaltyRanking,
    ) -> Trees:
        """Same as `ReferenceDrafter.draft`."""
        config, weights = self._drafter.head.config, self._drafter.head.weights
        chain, lists = CHAINS.get(config.kind), LISTS.get(config.kind)

        def slots(
            hidden: Float[np.ndarray, "B size hidden"], scored: Float[np.ndarray, "B S vocab"]
        ) -> dflash.Candidates:
            if lists is not None:
                return lists(config, weights, requests.newest, hidden, scored, rank.lists)
            ids, edges = rank.block(scored)
            return ids[:, :, None], edges[:, :, None], None

        def choose(
            hidden: Float[np.ndarray, "B size hidden"], scored: Float[np.ndarray, "B S vocab"]
        ) -> dflash.Chain:
            if chain is not None:
                return chain(config, weights, requests.newest, hidden, scored, rank)
            ids, edges = rank.block(scored)
            return ids[:, :, 0], edges[:, :, 0]

        if shape.width > 1:
            known = rank.sampling.branch_calibration
            return Trees.drafted_as(self._drafter.grow(self._kv, requests, shape, slots, known))
        return Trees.drafted_as(self._drafter.draft(self._kv, requests, shape.depth, choose))

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
        depth = len(fed.tokens) // len(counts) - 1
        rows = eagle.extend_rows(lengths, counts, draft_from, batch.page_table, depth=depth)
        self._kv = self._drafter.extend(rows, self._drafter.reads(fed.passed), self._kv)


class StandaloneDrafter:
    """Drafter for STANDALONE."""

    def __init__(self, small: SmallModel, capacity: BackendLimits) -> None:
        config: ModelConfig = small.config
        self._small, self._width = small, capacity.max_width
        self._kv = cache_pools.new_pools(config, capacity.num_pages, capacity.page_size)
        self._state = cache_pools.new_state(config, capacity.num_slots)
        self.snapshots = cache_pools.new_state(config, capacity.num_snapshots)

    @property
    def kv_pools(self) -> cache_pools.Pools:
        """Same as `ReferenceDrafter.kv_pools`."""
        return self._kv

    def start(self, batch: Batch) -> None:
        """Same as `ReferenceDrafter.start`."""
        self._state = batch.restored(self._state, self.snapshots)

    def prefill(
        self,
        batch: Batch,
        fed: list[ExtendRows],
        draft_from: Int[np.ndarray, " B"],
        rank: Rank,
    ) -> None:
        """Same as `ReferenceDrafter.prefill`."""
        for b, chunk in enumerate(fed):
            first, save_after = chunk.first, int(batch.snapshots.save_at[b] - chunk.first)
            for piece in cut(chunk.tokens, save_after):
                self._prefill_piece(batch, b, piece, first, draft_from[b : b + 1])
                first += len(piece)
                if batch.snapshots.save[b] and first == batch.snapshots.save_at[b]:
                    save, slot = batch.snapshots.save[b : b + 1], batch.slots[b : b + 1]
                    put(self.snapshots, save, take(self._state, slot))

    def _prefill_piece(
        self,
        batch: Batch,
        b: int,
        tokens: Int[np.ndarray, " T"],
        first: int,
        draft_from: Int[np.ndarray, " one"],
    ) -> None:
        slot, table = batch.slots[b : b + 1], batch.page_table[b : b + 1]
        state = take(self._state, slot)
        self._kv, state = standalone.prefill(
            self._small, self._kv, state, tokens, first, draft_from, table
        )
        put(self._state, slot, state)

    def draft(
        self,
        batch: Batch,
        requests: DraftRequests,
        shape: TreeShape,
        rank: PenaltyRanking,
    ) -> Trees:
        """Same as `ReferenceDrafter.draft`."""
        state = take(self._state, batch.slots)
        tree, self._kv = standalone.draft(self._small, self._kv, state, requests, shape, rank)
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
        tokens = fed.tokens.reshape(len(counts), -1)
        save_after = batch.snapshots.save_at - lengths
        state = take(self._state, batch.slots)
        self._kv, state, saved, passed = standalone.extend(
            self._small,
            self._kv,
            state,
            tokens,
            lengths,
            counts,
            draft_from,
            batch.page_table,
            save_after,
        )
        passed &= batch.snapshots.save != 0
        put(self._state, batch.slots, state)
        put(self.snapshots, batch.snapshots.save[passed], take(saved, passed))


def takes_snapshot(save_after: int, length: int) -> bool:
    """Returns True if a prefill of `length` tokens can save the state after `save_after` of
    them.
    """
    is_border = save_after % CHUNK == 0 or save_after == length
    return 0 < save_after <= length and is_border


def cut(chunk: Int[np.ndarray, " T"], save_after: int) -> list[Int[np.ndarray, " piece"]]:
    """Splits a chunk in two if a snapshot is taken within it."""
    is_within = takes_snapshot(save_after, len(chunk)) and save_after < len(chunk)
    return np.split(chunk, [save_after]) if is_within else [chunk]


def drafter_of(
    blueprint: BackendSpec,
    weights: Weights,
    draft_weights: Weights | None,
    target_kv: Callable[[], cache_pools.Pools],
    adapters: Mapping[str, AdapterWeights],
) -> ReferenceDrafter | None:
    """Returns the drafter with its weights and the target's; None without a drafter.

    Args:
      blueprint: The backend.
      weights, draft_weights: Weights of the target, and of a draft head or draft model.
      target_kv: Returns the pools of the target.
      adapters: Adapter slots, which an MTP layer reads.
    """
    drafts, capacity, config = blueprint.drafts, blueprint.capacity, blueprint.config
    if drafts.model is not None:
        return StandaloneDrafter(
            SmallModel(drafts.model, draft_weights or {}, config.vocab), capacity
        )
    if drafts.head is None:
        made = eagle.EagleHeadDrafter.nextn(config, weights) if drafts.with_mtp else None
        return HeadDrafter(made, capacity, adapters) if made else None
    head = DraftHead(drafts.head, draft_weights or {})
    if drafts.head.traits.reads_target_kv:
        own = assistant.Assistant(head, config, weights)
        return TargetKVDrafter(own, capacity, target_kv)
    if drafts.block is not None:
        return BlockDrafter(dflash.BlockHeadDrafter(head, weights), capacity)
    return HeadDrafter(eagle.EagleHeadDrafter.of_head(head, weights), capacity, adapters)
