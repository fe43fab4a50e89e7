"""What a step leaves in a slot: length, newest token, counts; and what a new owner finds there.

A slot stands at `lengths`, the committed positions; its newest token is the one after them and has
no KV yet; `seen` counts the tokens of its text for penalties, the newest included.
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
    """Adds tokens to what was seen: 2 for each in the output, a mark for all in the prompt.

    Args:
      seen: Twice a token's count in the output, plus 1 where the prompt has it.
      slots: Whose text a token stands in.
      is_output: Whether it stands there as output.
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
    """Makes a step's tokens the slots' past.

    Args:
      lengths, newest, seen: Of all slots.
      draft_from: Where each slot's draft KV begins to be whole, which a step that does not feed the
        drafter moves to the new length; None where the drafter is fed, or there is none.
      slots: Slot of each row.
      before: Lengths before the step; row b's first token stands at `before[b] + 1`.
      tokens, counts: What each row emits; a row of 0 tokens stays where it is.
      prompt_length: Position of each row's first output token.

    Returns:
      The arrays of all slots after the step.
    """
    lengths, newest = lengths.copy(), newest.copy()
    place = np.arange(tokens.shape[1])
    is_output = before[:, None] + 1 + place >= prompt_length[:, None]
    is_counted = place < counts[:, None]
    owners = np.broadcast_to(slots[:, None], tokens.shape)
    flat = (x.reshape(-1) for x in (owners, tokens, is_output, is_counted))
    seen = count(seen, *flat)
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
    """Gives the slots of starting rows the states of their snapshots, or zeros.

    Args:
      memory, saved: The states of all slots and of all snapshots, by layer.
      slots: Slot of each row.
      sources: Snapshot of each row; 0: none.
      starts: Whether a row's slot has a new owner. What it holds is replaced: it may be a NaN.
    """
    memory = memory.copy()
    memory[:, slots[starts]] = saved[:, sources[starts]]
    memory[:, slots[starts & (sources == 0)]] = 0
    return memory
