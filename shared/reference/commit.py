"""Commit of a step's accepted tokens to the slots: KV, GDN states, lengths and token counts."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from jaxtyping import Bool, Int

from shared.reference import ngram
from shared.reference.device_state import DeviceState
from shared.reference.rows import Batch, put, take
from shared.spec import attention, recurrent_state, slot_state
from shared.spec.cache_pools import Pools
from shared.spec.draft_tree import TreeShape


def commit(
    state: DeviceState,
    batch: Batch,
    shape: TreeShape,
    kv: Pools,
    page_tables: Sequence[Int[np.ndarray, "B table"]],
    kept: recurrent_state.ReplayInputs,
    path: Int[np.ndarray, "B W"],
    counts: Int[np.ndarray, " B"],
    tokens: Int[np.ndarray, "B W"],
) -> Bool[np.ndarray, " B"]:
    """Commits the accepted path to the slots.

    Args:
      state: State of all slots, which changes.
      batch: Rows of the step.
      shape: Shape of the step's trees; after a plain step the draft KV has a gap.
      kv, page_tables: Pools after the forward pass, and the page table of each.
      kept: Replay inputs of the nodes.
      path, counts: Accepted path of each row, and its number of nodes.
      tokens: Output tokens of each row.

    Returns:
      True for rows with a snapshot taken.
    """
    lengths = state.lengths[batch.slots]
    move = partial(
        attention.compact_accepted_kv,
        lengths=lengths,
        path=path,
        counts=counts,
    )
    state.kv = tuple(
        move(pool, page_table=table) for pool, table in zip(kv, page_tables, strict=True)
    )
    after, snapshots, passed = recurrent_state.replay(
        take(state.delta, batch.slots),
        kept,
        path,
        counts,
        batch.snapshots.save_at - lengths,
    )
    passed &= batch.snapshots.save != 0
    put(state.delta, batch.slots, after)
    put(state.snapshots, batch.snapshots.save[passed], take(snapshots, passed))
    state.lengths, state.newest, state.seen, draft_from = slot_state.commit(
        lengths=state.lengths,
        newest=state.newest,
        seen=state.seen,
        draft_from=state.draft_from if shape.is_plain else None,
        slots=batch.slots,
        before=lengths,
        tokens=tokens,
        counts=counts,
        prompt_length=batch.sampling.prompt_length,
    )
    if draft_from is not None:  # no draft extend in this step: a gap in the draft KV
        state.draft_from = draft_from
    if state.texts is not None:
        state.texts = ngram.learn_outputs(state.texts, batch, tokens, counts)
    return passed
