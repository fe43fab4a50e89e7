"""What a step leaves in the numbers of a slot, in one Pallas kernel: a program per request."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Int


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
    """As `shared.spec.slots.commit`; every slot but the sink has one row at most."""
    changed = [lengths, newest, seen, *([] if draft_from is None else [draft_from])]
    found = pl.pallas_call(
        _commit_kernel,
        grid=(len(tokens),),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in changed],
        input_output_aliases={number: number for number in range(len(changed))},
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="commit",
    )(*changed, slots, before, tokens, counts, prompt_length)
    return (*found, None) if draft_from is None else tuple(found)


def _commit_kernel(*refs):
    """One program per request, whose tokens are its lanes."""
    num_changed = (len(refs) - 5) // 2
    slots_ref, before_ref, tokens_ref, counts_ref, prompt_ref = refs[num_changed:-num_changed]
    lengths_ref, newest_ref, seen_ref, *draft_ref = refs[-num_changed:]
    row, (width, vocab) = pl.program_id(0), (tokens_ref.shape[1], seen_ref.shape[1])
    slot, before = slots_ref[row], before_ref[row]
    count, prompt = counts_ref[row], prompt_ref[row]
    place = lax.iota(jnp.int32, pl.next_power_of_2(width))
    is_counted = (place < count) & (place < width)
    at = jnp.minimum(place, width - 1)
    token = pltriton.load(tokens_ref.at[row, at], mask=is_counted, other=-1)
    is_output = before + 1 + place >= prompt
    # A token that is repeated is written once, by the first of its lanes.
    same = (token[:, None] == token[None, :]) & is_counted[None, :]
    earlier = (same & (place[None, :] < place[:, None])).astype(jnp.int32).sum(axis=1)
    outputs = (same & is_output[None, :]).astype(jnp.int32).sum(axis=1)
    is_mark = (same & ~is_output[None, :]).astype(jnp.int32).max(axis=1)
    is_first = is_counted & (earlier == 0)
    at = jnp.where(is_first, token, vocab)  # outside, for the interpreter
    known = pltriton.load(seen_ref.at[slot, at], mask=is_first, other=0)
    pltriton.store(seen_ref.at[slot, at], (known + 2 * outputs) | is_mark, mask=is_first)

    @pl.when(count > 0)
    def _():
        newest_ref[slot] = jnp.sum(jnp.where(place == count - 1, token, 0))

    for ref in (lengths_ref, *draft_ref):
        ref[slot] = before + count
