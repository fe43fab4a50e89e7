"""Per-slot values and their update by a step; same as `shared.spec.slot_state`.

On a GPU `commit` and `restore` are kernels; see `jax_impl.ops`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int, Shaped

from jax_impl.ops import Kernels, kernel_or_reference

Slots = Int[jax.Array, " slots"]
Counts = Int[jax.Array, "slots vocab"]


def count(
    seen: Counts,
    slots: Int[jax.Array, " R"],
    tokens: Int[jax.Array, " R"],
    is_output: Bool[jax.Array, " R"],
    is_counted: Bool[jax.Array, " R"],
) -> Counts:
    """Adds tokens to the token counts; tokens that are not counted write slot 0."""
    out, marked = is_counted & is_output, is_counted & ~is_output
    places = (jnp.where(marked, slots, 0), jnp.where(marked, tokens, 0))
    seen = seen.at[places].set(seen[places] | 1)  # a repeated token writes the same value
    places = (jnp.where(out, slots, 0), jnp.where(out, tokens, 0))
    return seen.at[places].add(2 * out.astype(seen.dtype))


def plain_commit(
    lengths: Slots,
    newest: Slots,
    seen: Counts,
    draft_from: Slots | None,
    slots: Int[jax.Array, " B"],
    before: Int[jax.Array, " B"],
    tokens: Int[jax.Array, "B W"],
    counts: Int[jax.Array, " B"],
    prompt_length: Int[jax.Array, " B"],
) -> tuple[Slots, Slots, Counts, Slots | None]:
    """Commits a step's tokens to the slots."""
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    is_output = before[:, None] + 1 + place >= prompt_length[:, None]
    owners = jnp.broadcast_to(slots[:, None], tokens.shape)
    seen = count(
        seen=seen,
        slots=owners.reshape(-1),
        tokens=tokens.reshape(-1),
        is_output=is_output.reshape(-1),
        is_counted=(place < counts[:, None]).reshape(-1),
    )
    last = jnp.take_along_axis(tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
    newest = newest.at[slots].set(jnp.where(counts > 0, last, newest[slots]))
    lengths = lengths.at[slots].set(before + counts)
    if draft_from is not None:
        draft_from = draft_from.at[slots].set(before + counts)
    return lengths, newest, seen, draft_from


def kernel_commit(
    kernels: Kernels,
    lengths: Slots,
    newest: Slots,
    seen: Counts,
    draft_from: Slots | None,
    slots: Int[jax.Array, " B"],
    before: Int[jax.Array, " B"],
    tokens: Int[jax.Array, "B W"],
    counts: Int[jax.Array, " B"],
    prompt_length: Int[jax.Array, " B"],
) -> tuple[Slots, Slots, Counts, Slots | None]:
    return kernels.slot_state.commit(
        lengths, newest, seen, draft_from, slots, before, tokens, counts, prompt_length
    )


commit = kernel_or_reference(kernel_commit, plain_commit)


def plain_restore(
    memory: Shaped[jax.Array, "L slots *state"],
    saved: Shaped[jax.Array, "L snapshots *state"],
    slots: Int[jax.Array, " B"],
    sources: Int[jax.Array, " B"],
    starts: Bool[jax.Array, " B"],
) -> Shaped[jax.Array, "L slots *state"]:
    """Sets the slots of starting rows to their snapshots, or to zero."""
    shape = (1, -1, *[1] * (memory.ndim - 2))
    restored = jnp.where((sources != 0).reshape(shape), saved[:, sources], 0)
    return memory.at[:, slots].set(jnp.where(starts.reshape(shape), restored, memory[:, slots]))


def kernel_restore(
    kernels: Kernels,
    memory: Shaped[jax.Array, "L slots *state"],
    saved: Shaped[jax.Array, "L snapshots *state"],
    slots: Int[jax.Array, " B"],
    sources: Int[jax.Array, " B"],
    starts: Bool[jax.Array, " B"],
) -> Shaped[jax.Array, "L slots *state"]:
    return kernels.slot_state.restore(memory, saved, slots, sources, starts)


restore = kernel_or_reference(kernel_restore, plain_restore)
