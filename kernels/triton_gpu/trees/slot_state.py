"""Slot state: commits accepted tokens, restores slots for new requests (Triton)."""

import triton
import triton.language as tl
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

_PART = 4096
"""Elements of a state that a program copies."""


def commit(
    lengths: Int[Tensor, " slots"],
    newest: Int[Tensor, " slots"],
    seen: Int[Tensor, "slots vocab"],
    draft_from: Int[Tensor, " slots"] | None,
    slots: Int[Tensor, " B"],
    before: Int[Tensor, " B"],
    tokens: Int[Tensor, "B W"],
    counts: Int[Tensor, " B"],
    prompt_length: Int[Tensor, " B"],
) -> None:
    """Implements `shared.spec.slot_state.commit` in place.

    A slot has at most one row, except slot 0, which is for padding.
    """
    B, W = tokens.shape
    rows = (x.contiguous() for x in (slots, before, tokens, counts, prompt_length))
    _commit_kernel[(B,)](
        *(lengths, newest, seen, lengths if draft_from is None else draft_from, *rows),
        vocab=seen.shape[1],
        width=W,
        lanes=triton.next_power_of_2(W),
        feeds=draft_from is None,
        num_warps=1,
    )


@triton.jit
def _commit_kernel(
    lengths_at,
    newest_at,
    seen_at,
    draft_at,
    slots_at,
    before_at,
    tokens_at,
    counts_at,
    prompt_at,
    vocab: tl.constexpr,
    width: tl.constexpr,
    lanes: tl.constexpr,
    feeds: tl.constexpr,
):
    """One program per request; tokens are its lanes."""
    row = tl.program_id(0)
    slot, before = tl.load(slots_at + row).to(tl.int64), tl.load(before_at + row)
    count, prompt = tl.load(counts_at + row), tl.load(prompt_at + row)
    place = tl.arange(0, lanes)
    is_counted = (place < count) & (place < width)
    token = tl.load(tokens_at + row * width + place, mask=is_counted, other=-1)
    is_output = before + 1 + place >= prompt
    # A repeated token is stored once, by the first of its lanes.
    same = (token[:, None] == token[None, :]) & is_counted[None, :]
    earlier = tl.sum((same & (place[None, :] < place[:, None])).to(tl.int32), axis=1)
    outputs = tl.sum((same & is_output[None, :]).to(tl.int32), axis=1)
    is_mark = tl.max((same & (is_output[None, :] == 0)).to(tl.int32), axis=1)
    is_first = is_counted & (earlier == 0)
    at = seen_at + slot * vocab + token
    known = tl.load(at, mask=is_first, other=0)
    tl.store(at, (known + 2 * outputs) | is_mark, mask=is_first)
    if count > 0:
        tl.store(newest_at + slot, tl.sum(tl.where(place == count - 1, token, 0)))
    tl.store(lengths_at + slot, before + count)
    if not feeds:
        tl.store(draft_at + slot, before + count)


def restore(
    memory: Shaped[Tensor, "L slots *state"],
    saved: Shaped[Tensor, "L snapshots *state"],
    slots: Int[Tensor, " B"],
    sources: Int[Tensor, " B"],
    starts: Bool[Tensor, " B"],
) -> None:
    """Implements `shared.spec.slot_state.restore` in place; rows that do not start cost nothing.

    Raises:
      ValueError: The states are not contiguous.
    """
    if not (memory.is_contiguous() and saved.is_contiguous()):
        raise ValueError("states must be contiguous")
    size = memory[0, 0].numel()
    part = min(_PART, triton.next_power_of_2(size))
    rows = (x.contiguous() for x in (slots, sources, starts))
    _restore_kernel[(triton.cdiv(size, part), len(memory), len(slots))](
        *(memory, saved, *rows, memory.shape[1], saved.shape[1]),
        size=size,
        part=part,
        num_warps=8,
    )


@triton.jit
def _restore_kernel(
    memory_at,
    saved_at,
    slots_at,
    sources_at,
    starts_at,
    num_slots,
    num_saved,
    size: tl.constexpr,
    part: tl.constexpr,
):
    """One program per part of a state, layer and row."""
    layer, row = tl.program_id(1).to(tl.int64), tl.program_id(2)
    if tl.load(starts_at + row).to(tl.int32) == 0:
        return
    slot, source = tl.load(slots_at + row), tl.load(sources_at + row)
    at = tl.program_id(0) * part + tl.arange(0, part)
    from_at = saved_at + (layer * num_saved + source) * size + at
    state = tl.load(from_at, mask=at < tl.where(source != 0, size, 0), other=0)
    tl.store(memory_at + (layer * num_slots + slot) * size + at, state, mask=at < size)
