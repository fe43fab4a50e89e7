"""Export and import steps: copy pages, or layers of a snapshot, between the pools and words.

Same results as `shared.spec.kv_transfer`. Words have the columns of all TP ranks: an export gathers
them, and an import takes those of its rank.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Int, Int32, Shaped

from jax_impl.device_state import DeviceState, DraftState, Fields, Plan
from jax_impl.ops.collectives.all_gather import all_gather_kv_heads, own_keys
from jax_impl.step_context import StepContext
from shared.boundary.program import Program, StepKind
from shared.boundary.tp_group import TPGroup
from shared.boundary.transfer_spec import Arrays, TransferArray, TransferSpec, word_spans

_Owner = DeviceState | DraftState
_AnyOwner = TypeVar("_AnyOwner", DeviceState, DraftState)
"""The target's state, or the drafter's, which have pools and snapshots under the same names."""


class _PoolPages(NamedTuple):
    """Pages of one pool: layers, cache arrays and positions of each page."""

    index: int
    pages: Int[jax.Array, " n"]

    def read(self, owner: _Owner) -> Shaped[jax.Array, "n ..."]:
        """Returns the pages, one after another."""
        return jnp.moveaxis(owner.kv[self.index][:, :, self.pages], 2, 0)

    def write(self, owner: _AnyOwner, entries: Shaped[jax.Array, "n ..."]) -> _AnyOwner:
        """Returns the state with the pages replaced."""
        pool = owner.kv[self.index].at[:, :, self.pages].set(jnp.moveaxis(entries, 0, 2))
        return owner._replace(kv=(*owner.kv[: self.index], pool, *owner.kv[self.index + 1 :]))


class _SnapshotLayers(NamedTuple):
    """One snapshot in some layers."""

    name: str
    layers: slice
    snapshot: Int[jax.Array, ""]

    def read(self, owner: _Owner) -> Shaped[jax.Array, "n ..."]:
        """Returns the layers, one after another."""
        states = getattr(owner.snapshots, self.name)[self.layers]
        return lax.dynamic_index_in_dim(states, self.snapshot, axis=1, keepdims=False)

    def write(self, owner: _AnyOwner, entries: Shaped[jax.Array, "n ..."]) -> _AnyOwner:
        """Returns the state with the layers replaced."""
        assert owner.snapshots is not None  # it has states
        states = getattr(owner.snapshots, self.name)
        states = states.at[self.layers, self.snapshot].set(entries)
        return owner._replace(snapshots=owner.snapshots._replace(**{self.name: states}))


def transfer(
    context: StepContext, state: DeviceState, plan: Plan, program: Program
) -> tuple[DeviceState, Fields]:
    """Runs an export, which returns words, or an import, which reads those of the plan."""
    spec, ranks = context.capacity.transfer, context.model.group
    assert spec is not None  # otherwise the program does not exist
    fields: Fields = {}
    for place, (name, arrays) in enumerate(spec.arrays_by_field(program).items()):
        entries = _entries(spec, plan, program, place, arrays)
        if program.work is StepKind.EXPORT_KV:
            words = [_words(ranks, x, held.read(_owner(state, x))) for x, _, held in entries]
            fields[name] = jnp.concatenate(words, axis=1)
            continue
        for array, span, held in entries:
            words = plan.kv[name][:, span]
            if array.of_drafter:
                assert state.draft is not None  # it has a pool
                state = state._replace(draft=_imported(ranks, array, words, held, state.draft))
            else:
                state = _imported(ranks, array, words, held, state)
    return state, fields


def _imported(
    ranks: TPGroup,
    array: TransferArray,
    words: Int32[jax.Array, "n words"],
    held: _PoolPages | _SnapshotLayers,
    owner: _AnyOwner,
) -> _AnyOwner:
    shape = jax.eval_shape(held.read, owner).shape
    return held.write(owner, _own(ranks, array, words, shape))


def _owner(state: DeviceState, array: TransferArray) -> _Owner:
    if not array.of_drafter:
        return state
    assert state.draft is not None  # it has a pool
    return state.draft


def _entries(
    spec: TransferSpec, plan: Plan, program: Program, place: int, arrays: Arrays
) -> Iterator[tuple[TransferArray, slice, _PoolPages | _SnapshotLayers]]:
    """Yields each array with the range of its words and its entries in the state; pages are those
    of the page table at `place`.
    """
    named = plan.save if program.work is StepKind.IMPORT_KV else plan.restore
    for array, span in word_spans(arrays):
        if program.blocks:
            layers = spec.local_layers(program.blocks)
            yield array, span, _SnapshotLayers(array.name, layers, named[0])
        else:
            windows = plan.window_page_tables.values()
            table = [plan.page_table, *windows][place]
            yield array, span, _PoolPages(array.index, table[0])


def _words(
    ranks: TPGroup, array: TransferArray, entries: Shaped[jax.Array, "n ..."]
) -> Int32[jax.Array, "n words"]:
    """Returns the words of entries, with the columns of all ranks."""
    local, first, whole = entries.reshape(len(entries), array.rows, -1), 0, []
    for each in array.sections:
        part = local[..., first : first + each.share(ranks.count)]
        gathered = all_gather_kv_heads(ranks, part, each.copies(ranks.count))
        whole.append(gathered if each.units else part)
        first += each.share(ranks.count)
    joined = jnp.concatenate(whole, axis=-1).reshape(len(entries), array.words, -1)
    words = lax.bitcast_convert_type(joined, jnp.int32)
    return words.reshape(len(entries), array.words)


def _own(
    ranks: TPGroup, array: TransferArray, words: Int32[jax.Array, "n words"], shape: tuple[int, ...]
) -> Shaped[jax.Array, "n ..."]:
    """Returns the entries of words, with the columns of the rank, in the given shape."""
    whole = lax.bitcast_convert_type(words, jnp.dtype(array.dtype))
    whole, first, own = whole.reshape(len(words), array.rows, -1), 0, []
    for each in array.sections:
        part = whole[..., first : first + each.size]
        own.append(own_keys(ranks, part, each.copies(ranks.count)) if each.units else part)
        first += each.size
    return jnp.concatenate(own, axis=-1).reshape(shape)
