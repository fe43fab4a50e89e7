"""Slot state: commits accepted tokens, restores slots for new requests (Pallas, Triton backend)."""

from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Int, Shaped

_PART = 4096
"""Elements of a state that a program copies."""


class Slots(NamedTuple):
    """Arrays updated per slot; `draft_from` is absent if drafters have no lengths of their own."""

    lengths: Any
    newest: Any
    seen: Any
    draft_from: Any


class SlotRows(NamedTuple):
    """Results of a step per request."""

    slots: Any
    before: Any
    tokens: Any
    counts: Any
    prompt_length: Any


def commit(
    lengths: Int[jax.Array, " slots"],
    newest: Int[jax.Array, " slots"],
    seen: Int[jax.Array, "slots vocab"],
    draft_from: Int[jax.Array, " slots"] | None,
    slots: Int[jax.Array, " B"],
    before: Int[jax.Array, " B"],
    tokens: Int[jax.Array, "B W"],
    counts: Int[jax.Array, " B"],
    prompt_length: Int[jax.Array, " B"],
    interpret: bool = False,
) -> tuple[
    Int[jax.Array, " slots"],
    Int[jax.Array, " slots"],
    Int[jax.Array, "slots vocab"],
    Int[jax.Array, " slots"] | None,
]:
    """Implements `shared.spec.slot_state.commit`.

    A slot has at most one row, except slot 0, which is for padding.
    """
    held = Slots(lengths=lengths, newest=newest, seen=seen, draft_from=draft_from)
    rows = SlotRows(
        slots=slots, before=before, tokens=tokens, counts=counts, prompt_length=prompt_length
    )
    changed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), held)
    outputs = pl.pallas_call(
        _commit_kernel,
        grid=(len(tokens),),
        out_shape=changed,
        input_output_aliases={number: number for number in range(len(jax.tree.leaves(held)))},
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="slot_commit",
    )(held, rows)
    return tuple(outputs)


def _commit_kernel(_, rows, lengths_ref, newest_ref, seen_ref, draft_ref):
    """One program per request; tokens are its lanes."""
    row, (width, vocab) = pl.program_id(0), (rows.tokens.shape[1], seen_ref.shape[1])
    slot, before = rows.slots[row], rows.before[row]
    count, prompt = rows.counts[row], rows.prompt_length[row]
    place = lax.iota(jnp.int32, pl.next_power_of_2(width))
    is_counted = (place < count) & (place < width)
    at = jnp.minimum(place, width - 1)
    token = pltriton.load(rows.tokens.at[row, at], mask=is_counted, other=-1)
    is_output = before + 1 + place >= prompt
    # A repeated token is stored once, by the first of its lanes.
    same = (token[:, None] == token[None, :]) & is_counted[None, :]
    earlier = (same & (place[None, :] < place[:, None])).astype(jnp.int32).sum(axis=1)
    outputs = (same & is_output[None, :]).astype(jnp.int32).sum(axis=1)
    is_mark = (same & ~is_output[None, :]).astype(jnp.int32).max(axis=1)
    is_first = is_counted & (earlier == 0)
    at = jnp.where(is_first, token, vocab)  # outside the array, for the interpreter
    known = pltriton.load(seen_ref.at[slot, at], mask=is_first, other=0)
    pltriton.store(seen_ref.at[slot, at], (known + 2 * outputs) | is_mark, mask=is_first)

    @pl.when(count > 0)
    def _():
        newest_ref[slot] = jnp.sum(jnp.where(place == count - 1, token, 0))

    lengths_ref[slot] = before + count
    if draft_ref is not None:
        draft_ref[slot] = before + count


def restore(
    memory: Shaped[jax.Array, "L slots *state"],
    saved: Shaped[jax.Array, "L snapshots *state"],
    slots: Int[jax.Array, " B"],
    sources: Int[jax.Array, " B"],
    starts: Bool[jax.Array, " B"],
    interpret: bool = False,
) -> Shaped[jax.Array, "L slots *state"]:
    """Implements `shared.spec.slot_state.restore`; rows that do not start cost nothing."""
    size = prod(memory.shape[2:])
    part = min(_PART, pl.next_power_of_2(size))
    flat, kept = (x.reshape(*x.shape[:2], size) for x in (memory, saved))
    restored = pl.pallas_call(
        _restore_kernel,
        grid=(pl.cdiv(size, part), len(memory), len(slots)),
        out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        input_output_aliases={0: 0},
        compiler_params=pltriton.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="slot_restore",
    )(flat, kept, slots, sources, starts)
    return restored.reshape(memory.shape)


def _restore_kernel(_, saved_ref, slots_ref, sources_ref, starts_ref, memory_ref):
    """One program per part of a state, layer and row."""
    number, layer, row = (pl.program_id(axis) for axis in range(3))
    size = memory_ref.shape[2]
    part = min(_PART, pl.next_power_of_2(size))

    @pl.when(starts_ref[row])
    def _():
        slot, source = slots_ref[row], sources_ref[row]
        at = number * part + lax.iota(jnp.int32, part)
        at = jnp.where(at < size, at, size)  # outside the array, for the interpreter
        mask = (at < size) & (source != 0)
        state = pltriton.load(saved_ref.at[layer, source, at], mask=mask, other=0)
        pltriton.store(memory_ref.at[layer, slot, at], state, mask=at < size)
