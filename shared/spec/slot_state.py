"""Slot state: length, newest token and token counts of a request, their update after a step, and
their reset for a new request.

`lengths` is the number of committed positions. The newest token is the one after them and has no KV
yet. `seen` counts the request's tokens for penalties, including the newest.
"""

import numpy as np
from jaxtyping import Bool, Int, Int32, Shaped


def count(
    seen: Int32[np.ndarray, "slots vocab"],
    slots: Int[np.ndarray, " R"],
    tokens: Int[np.ndarray, " R"],
    is_output: Bool[np.ndarray, " R"],
    is_counted: Bool[np.ndarray, " R"],
) -> Int32[np.ndarray, "slots vocab"]:
    """Adds tokens to the counts: 2 for each output token, and bit 0 for any prompt token.

    Args:
      seen: Twice a token's count in the output, plus 1 if it is in the prompt.
      slots: Slot of each token.
      tokens: The tokens.
      is_output: True for output tokens, False for prompt tokens.
      is_counted: False for padding.
    """
    seen = seen.copy()
    out, marked = is_counted & is_output, is_counted & ~is_output
    np.add.at(seen, (slots[out], tokens[out]), 2)
    seen[slots[marked], tokens[marked]] |= 1
    return seen


def commit(
    lengths: Int32[np.ndarray, " slots"],
    newest: Int32[np.ndarray, " slots"],
    seen: Int32[np.ndarray, "slots vocab"],
    draft_from: Int32[np.ndarray, " slots"] | None,
    slots: Int[np.ndarray, " B"],
    before: Int[np.ndarray, " B"],
    tokens: Int[np.ndarray, "B W"],
    counts: Int[np.ndarray, " B"],
    prompt_length: Int[np.ndarray, " B"],
) -> tuple[
    Int32[np.ndarray, " slots"],
    Int32[np.ndarray, " slots"],
    Int32[np.ndarray, "slots vocab"],
    Int32[np.ndarray, " slots"] | None,
]:
    """Commits a step's output tokens to the slots.

    Args:
      lengths, newest, seen: State of all slots.
      draft_from: First position of each slot with complete draft KV, which moves to the new length
        if the step does not run draft extend; None if it does, or without a drafter.
      slots: Slot of each row.
      before: Lengths before the step; row b's first token has position `before[b] + 1`.
      tokens, counts: Output tokens of each row; a row with count 0 is unchanged.
      prompt_length: Position of each row's first output token.

    Returns:
      The state of all slots after the step.
    """
    lengths, newest = lengths.copy(), newest.copy()
    place = np.arange(tokens.shape[1])
    is_output = before[:, None] + 1 + place >= prompt_length[:, None]
    is_counted = place < counts[:, None]
    owners = np.broadcast_to(slots[:, None], tokens.shape)
    seen = count(
        seen, owners.reshape(-1), tokens.reshape(-1), is_output.reshape(-1), is_counted.reshape(-1)
    )
    last = np.take_along_axis(tokens, np.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
    newest[slots] = np.where(counts > 0, last, newest[slots])
    lengths[slots] = before + counts
    if draft_from is not None:
        draft_from = draft_from.copy()
        draft_from[slots] = before + counts
    return lengths, newest, seen, draft_from


def restore(
    memory: Shaped[np.ndarray, "L slots *state"],
    saved: Shaped[np.ndarray, "L snapshots *state"],
    slots: Int[np.ndarray, " B"],
    sources: Int[np.ndarray, " B"],
    starts: Bool[np.ndarray, " B"],
) -> Shaped[np.ndarray, "L slots *state"]:
    """Resets the slots of starting rows to the states of their snapshots, or to zeros.

    Args:
      memory, saved: States of all slots and of all snapshots, by layer.
      slots: Slot of each row.
      sources: Snapshot of each row; 0 for none.
      starts: True if a row's slot has a new owner. Its contents are replaced, because they may
        contain NaN.
    """
    memory = memory.copy()
    memory[:, slots[starts]] = saved[:, sources[starts]]
    memory[:, slots[starts & (sources == 0)]] = 0
    return memory
