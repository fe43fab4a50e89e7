"""Export and import steps: copy pages, or layers of a snapshot, between the pools and words.

Same results as `shared.spec.kv_transfer`. Words have the columns of all TP ranks: an export gathers
them, and an import takes those of its rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Int, Int32, Shaped
from torch import Tensor

from shared.boundary.program import Program, StepKind
from shared.boundary.tp_group import TPGroup
from shared.boundary.transfer_spec import Arrays, TransferArray, TransferSpec, word_spans
from torch_impl.device_state import DeviceState, Fields, Plan
from torch_impl.ops.collectives.all_gather import all_gather_kv_heads, own_keys
from torch_impl.step_context import StepContext
from torch_impl.weights import DTYPES


@dataclass(frozen=True)
class _PoolPages:
    """Pages of one pool: layers, cache arrays and positions of each page."""

    pool: Shaped[Tensor, "L arrays P page ..."]
    pages: Int[Tensor, " n"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `read`."""
        layers, arrays, _, *entry = self.pool.shape
        return (len(self.pages), layers, arrays, *entry)

    def read(self) -> Shaped[Tensor, "n ..."]:
        """Returns the pages, one after another."""
        return self.pool[:, :, self.pages].movedim(2, 0)

    def write(self, entries: Shaped[Tensor, "n ..."]) -> None:
        """Replaces the pages."""
        self.pool[:, :, self.pages] = entries.movedim(0, 2)


@dataclass(frozen=True)
class _SnapshotLayers:
    """One snapshot in some layers."""

    states: Shaped[Tensor, "n snapshots ..."]
    snapshot: Int[Tensor, " 1"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `read`."""
        layers, _, *entry = self.states.shape
        return (layers, *entry)

    def read(self) -> Shaped[Tensor, "n ..."]:
        """Returns the layers, one after another."""
        return self.states.index_select(1, self.snapshot).squeeze(1)

    def write(self, entries: Shaped[Tensor, "n ..."]) -> None:
        """Replaces the layers."""
        self.states.index_copy_(1, self.snapshot, entries.unsqueeze(1))


def transfer(context: StepContext, plan: Plan, program: Program) -> Fields:
    """Runs an export, which returns words, or an import, which reads those of the plan."""
    spec, ranks, state = context.capacity.transfer, context.model.group, context.state
    assert spec is not None  # otherwise the program does not exist
    fields: Fields = {"counts": torch.zeros_like(plan.save_at)}
    for place, (name, arrays) in enumerate(spec.arrays_by_field(program).items()):
        entries = _entries(state, spec, plan, program, place, arrays)
        if program.work is StepKind.EXPORT_KV:
            words = [_words(ranks, array, held.read()) for array, _, held in entries]
            fields[name] = torch.cat(words, dim=1)
            continue
        for array, span, held in entries:
            held.write(_own(ranks, array, plan.kv[name][:, span], held.shape))
    return fields


def _entries(
    state: DeviceState,
    spec: TransferSpec,
    plan: Plan,
    program: Program,
    place: int,
    arrays: Arrays,
) -> Iterator[tuple[TransferArray, slice, _PoolPages | _SnapshotLayers]]:
    """Yields each array with the range of its words and its entries in the state; pages are those
    of the page table at `place`.
    """
    is_import = program.work is StepKind.IMPORT_KV
    for array, span in word_spans(arrays):
        owner = state.draft if array.of_drafter else state
        assert owner is not None  # it has a pool
        if program.blocks:
            states = getattr(owner.snapshots, array.name)[spec.local_layers(program.blocks)]
            yield array, span, _SnapshotLayers(states, plan.save if is_import else plan.restore)
        else:
            windows = plan.window_page_tables.values()
            table = [plan.page_table, *windows][place]
            yield array, span, _PoolPages(owner.kv[array.index], table[0])


def _words(
    ranks: TPGroup, array: TransferArray, entries: Shaped[Tensor, "n ..."]
) -> Int32[Tensor, "n words"]:
    """Returns the words of entries, with the columns of all ranks."""
    local = entries.reshape(len(entries), array.rows, -1)
    parts = local.split([each.share(ranks.count) for each in array.sections], dim=-1)
    whole = [
        all_gather_kv_heads(ranks, part, each.copies(ranks.count)) if each.units else part
        for part, each in zip(parts, array.sections, strict=True)
    ]
    joined = torch.cat(whole, dim=-1) if len(whole) > 1 else whole[0]
    return joined.reshape(len(entries), -1).contiguous().view(torch.int32)


def _own(
    ranks: TPGroup, array: TransferArray, words: Int32[Tensor, "n words"], shape: tuple[int, ...]
) -> Shaped[Tensor, "n ..."]:
    """Returns the entries of words, with the columns of the rank, in the given shape."""
    whole = words.contiguous().view(DTYPES[array.dtype]).view(len(words), array.rows, -1)
    parts = whole.split([each.size for each in array.sections], dim=-1)
    own = [
        own_keys(ranks, part, each.copies(ranks.count)) if each.units else part
        for part, each in zip(parts, array.sections, strict=True)
    ]
    return torch.cat(own, dim=-1).view(shape)
