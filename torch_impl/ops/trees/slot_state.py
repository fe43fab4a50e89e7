"""Per-slot values and their update by a step, in place; same as `shared.spec.slot_state`.

On a GPU `commit` and `restore` are kernels; see `torch_impl.ops`.
"""

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from torch_impl.ops import Kernels, kernel_or_reference


def count(
    seen: Int[Tensor, "slots vocab"],
    slots: Int[Tensor, " R"],
    tokens: Int[Tensor, " R"],
    is_output: Bool[Tensor, " R"],
    is_counted: Bool[Tensor, " R"],
) -> Int[Tensor, "slots vocab"]:
    vocab, flat = seen.shape[1], seen.view(-1)
    place = torch.where(is_counted, slots * vocab + tokens, 0)  # slot 0 is reserved for padding
    marked = torch.where(is_output, 0, place)
    is_mark = (is_counted & ~is_output).int()
    flat[marked] = flat[marked] | is_mark  # repeated tokens write the same value
    flat.index_add_(0, place, 2 * (is_output & is_counted).int())
    return seen


def plain_commit(
    lengths: Int[Tensor, " slots"],
    newest: Int[Tensor, " slots"],
    seen: Int[Tensor, "slots vocab"],
    draft_from: Int[Tensor, " slots"] | None,
    slots: Int[Tensor, " B"],
    before: Int[Tensor, " B"],
    tokens: Int[Tensor, "B W"],
    counts: Int[Tensor, " B"],
    prompt_length: Int[Tensor, " B"],
) -> tuple[
    Int[Tensor, " slots"],
    Int[Tensor, " slots"],
    Int[Tensor, "slots vocab"],
    Int[Tensor, " slots"] | None,
]:
    place = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    is_output = before[:, None] + 1 + place >= prompt_length[:, None]
    is_counted = place < counts[:, None]
    owners = slots[:, None].expand_as(tokens)
    count(seen, *(x.flatten() for x in (owners, tokens, is_output, is_counted)))
    last = tokens.gather(1, (counts - 1).clamp(min=0).long()[:, None])[:, 0]
    newest[slots] = torch.where(counts > 0, last, newest[slots])
    lengths[slots] = before + counts
    if draft_from is not None:
        draft_from[slots] = before + counts
    return lengths, newest, seen, draft_from


def kernel_commit(
    kernels: Kernels,
    lengths: Int[Tensor, " slots"],
    newest: Int[Tensor, " slots"],
    seen: Int[Tensor, "slots vocab"],
    draft_from: Int[Tensor, " slots"] | None,
    slots: Int[Tensor, " B"],
    before: Int[Tensor, " B"],
    tokens: Int[Tensor, "B W"],
    counts: Int[Tensor, " B"],
    prompt_length: Int[Tensor, " B"],
) -> tuple[
    Int[Tensor, " slots"],
    Int[Tensor, " slots"],
    Int[Tensor, "slots vocab"],
    Int[Tensor, " slots"] | None,
]:
    kernels.slot_state.commit(
        lengths, newest, seen, draft_from, slots, before, tokens, counts, prompt_length
    )
    return lengths, newest, seen, draft_from


commit = kernel_or_reference(kernel_commit, plain_commit)


def plain_restore(
    memory: Shaped[Tensor, "L slots *state"],
    saved: Shaped[Tensor, "L snapshots *state"],
    slots: Int[Tensor, " B"],
    sources: Int[Tensor, " B"],
    starts: Bool[Tensor, " B"],
) -> Shaped[Tensor, "L slots *state"]:
    shape = (1, -1, *[1] * (memory.ndim - 2))
    restored = torch.where((sources != 0).view(shape), saved[:, sources], 0)
    memory[:, slots] = torch.where(starts.view(shape), restored, memory[:, slots])
    return memory


def kernel_restore(
    kernels: Kernels,
    memory: Shaped[Tensor, "L slots *state"],
    saved: Shaped[Tensor, "L snapshots *state"],
    slots: Int[Tensor, " B"],
    sources: Int[Tensor, " B"],
    starts: Bool[Tensor, " B"],
) -> Shaped[Tensor, "L slots *state"]:
    kernels.slot_state.restore(memory, saved, slots, sources, starts)
    return memory


restore = kernel_or_reference(kernel_restore, plain_restore)
