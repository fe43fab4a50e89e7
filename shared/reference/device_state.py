"""State of the reference backend between steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int32

from shared.boundary.backend import BackendLimits
from shared.models.config import ModelConfig
from shared.spec import cache_pools, ngram, vision_encoder
from shared.spec.cache_pools import Pools
from shared.spec.recurrent_state import RecurrentState


@dataclass
class DeviceState:
    """All memory that outlives a step, except the drafter's.

    Slot, page and snapshot 0 are reserved for padding.

    Attributes:
      lengths: Committed tokens of each slot, with KV in the pages.
      newest: Token after them, which has no KV yet.
      seen: Twice a token's count in the output, plus 1 if it is in the prompt.
      draft_from: First position of each slot with complete draft KV, after a cache hit.
      kv: Page pools of all attention layers.
      delta, snapshots: Recurrent states by slot and by snapshot.
      pool: Encoder cache; without rows for a text-only model.
      begun: Image between two blocks of the vision encoder; None if there is none.
      turn_deltas: M-RoPE position delta of each slot: rotary minus sequence position of later
        tokens.
      texts: N-gram state; None if no program drafts from it.
    """

    lengths: Int32[np.ndarray, " slots"]
    newest: Int32[np.ndarray, " slots"]
    seen: Int32[np.ndarray, "slots vocab"]
    draft_from: Int32[np.ndarray, " slots"]
    kv: Pools
    delta: RecurrentState
    snapshots: RecurrentState
    pool: Float32[np.ndarray, "rows hidden"]
    begun: vision_encoder.EncoderState | None
    turn_deltas: Int32[np.ndarray, " slots"]
    texts: ngram.NgramState | None


def allocate(config: ModelConfig, capacity: BackendLimits) -> DeviceState:
    """Allocates zeroed memory for all slots, pages and snapshots."""
    num_slots, images = capacity.num_slots, capacity.images
    return DeviceState(
        lengths=np.zeros(num_slots, np.int32),
        newest=np.zeros(num_slots, np.int32),
        seen=np.zeros((num_slots, capacity.vocab), np.int32),
        draft_from=np.zeros(num_slots, np.int32),
        kv=tuple(
            cache_pools.new_kv(
                pool.mixer, len(pool), capacity.num_pages_of(pool.window), capacity.page_size
            )
            for pool in config.kv_pools
        ),
        delta=cache_pools.new_state(config, num_slots),
        snapshots=cache_pools.new_state(config, capacity.num_snapshots),
        pool=np.zeros((images.num_rows if images else 0, config.hidden), np.float32),
        begun=None,
        turn_deltas=np.zeros(num_slots, np.int32),
        texts=_new_texts(capacity),
    )


def _new_texts(capacity: BackendLimits) -> ngram.NgramState | None:
    if capacity.texts is None:
        return None
    tails = np.zeros((capacity.num_slots, ngram.WINDOW), np.int32)
    return ngram.NgramState(tails, ngram.NgramTable.empty(capacity.texts.groups))
