"""Transfer of cached KV between servers: the arrays of a record, and the export and import steps.

A record has the arrays that the cache pools declare, of the target and of the drafter, with all
heads, for whatever number of TP ranks. Its entries are pages, and layers of one state snapshot. A
step exports or imports a fixed number of entries of one unit: pages, or layers of one pool of
states. Entries travel as int32 words, bit-cast: a result has those of an export, a plan those of an
import.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from jaxtyping import Int32

from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.drafts.drafter_spec import DrafterSpec
from shared.models.cache_spec import ITEM_BYTES, CacheArraySpec, CacheUnit, ColumnSection
from shared.models.config import ModelConfig
from shared.models.groups import CachePool, pools_with
from shared.spec.draft_tree import TreeShape

STEP_BYTES = 1 << 24
"""Maximum bytes of a step with more than one entry. The host copies them twice on the engine's
thread, which takes about 3 ms at 10 GB/s, and other requests wait for one step."""

MAX_STEP_PAGES = 64
"""Maximum pages of a step."""

TRANSFERS = (StepKind.EXPORT_KV, StepKind.IMPORT_KV)
"""Kinds of steps that transfer entries."""

WORD_BYTES = 4


@dataclass(frozen=True)
class TransferArray:
    """One array of an entry.

    Attributes:
      name: Names of the cache arrays that it holds.
      pool: Name of the cache pool.
      dtype: Stored dtype.
      lead: Axes before those of `entry`: layers, cache arrays and positions of a page; none in a
        layer of a snapshot.
      entry: Cache array of a position or of a slot, for the whole model.
      of_drafter: True for an array of the drafter.
      index: Index of the pool among those of the target, or of the drafter, with the same unit.
    """

    name: str
    pool: str
    dtype: str
    lead: tuple[int, ...]
    entry: CacheArraySpec
    of_drafter: bool
    index: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in an entry."""
        return (*self.lead, *self.entry.shape)

    @property
    def sections(self) -> tuple[ColumnSection, ...]:
        """Sections of its columns; see `ColumnSection`."""
        return self.entry.sections

    @property
    def columns(self) -> int:
        """Number of its columns, those of all ranks."""
        return sum(section.size for section in self.sections)

    @property
    def rows(self) -> int:
        """Number of its rows in an entry."""
        return prod(self.shape) // self.columns

    @property
    def words(self) -> int:
        """Number of int32 words in an entry."""
        return prod(self.shape) * ITEM_BYTES.get(self.dtype, WORD_BYTES) // WORD_BYTES


Arrays = tuple[TransferArray, ...]
"""Arrays of an entry, in the order in which they are concatenated."""


def entry_words(arrays: Arrays) -> int:
    """Returns the int32 words of an entry."""
    return sum(array.words for array in arrays)


def word_spans(arrays: Arrays) -> Iterator[tuple[TransferArray, slice]]:
    """Yields each array of an entry, and the range of its words."""
    first = 0
    for array in arrays:
        yield array, slice(first, first + array.words)
        first += array.words


@dataclass(frozen=True)
class StatePool:
    """States of some layers.

    Attributes:
      arrays: Arrays of a layer.
      layers: Layers, counted over all pools of states of the target and then of the drafter.
    """

    arrays: Arrays
    layers: range


@dataclass(frozen=True)
class TransferSpec:
    """Entries of the records of a server.

    Attributes:
      pages: Arrays of a page.
      windows: Arrays of a page in each window pool, in the order of `BackendLimits.window_pools`.
      states: Layers of a snapshot by pool; empty for a model without recurrent states.
      step_bytes: See `STEP_BYTES`.
    """

    pages: Arrays
    windows: tuple[Arrays, ...]
    states: tuple[StatePool, ...]
    step_bytes: int = STEP_BYTES

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        drafts: DrafterSpec,
        dtype: str,
        page_size: int,
        windows: Sequence[int],
    ) -> TransferSpec:
        """Returns the entries of a model and its drafter.

        Args:
          config, drafts: The whole model and its drafter, not a shard of them.
          dtype: Dtype of the model.
          page_size: Tokens of a page.
          windows: Sliding windows that have a page pool of their own.

        Raises:
          ValueError: An array of an entry is not a multiple of 4 bytes.
        """
        pages, of_windows = (
            list[TransferArray](),
            {window: list[TransferArray]() for window in windows},
        )
        for index, pool in enumerate(config.kv_pools):
            owner = of_windows.get(pool.window, pages) if pool.window is not None else pages
            owner.append(_page_array(pool, index, dtype, page_size, of_drafter=False))
        drafted = () if drafts.sizes is None else drafts.sizes.pools
        for index, pool in enumerate(pools_with(drafted, CacheUnit.POSITION)):
            pages.append(_page_array(pool, index, dtype, page_size, of_drafter=True))
        by_window = tuple(map(tuple, of_windows.values()))
        spec = cls(tuple(pages), by_window, tuple(_states(config.cache_pools, drafted, dtype)))
        spec._check()
        return spec

    def _check(self) -> None:
        states = (pool.arrays for pool in self.states)
        for array in (each for arrays in (self.pages, *self.windows, *states) for each in arrays):
            if prod(array.shape) * ITEM_BYTES.get(array.dtype, WORD_BYTES) % WORD_BYTES:
                raise ValueError(
                    f"KV transfer requires entries of whole 4-byte words, but {array.name} of "
                    f"{array.pool} has the shape {array.shape} in {array.dtype}; use a larger "
                    "--page-size"
                )

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all pools."""
        return WORD_BYTES * sum(map(entry_words, (self.pages, *self.windows)))

    @property
    def step_pages(self) -> int:
        """Pages of a step."""
        return max(1, min(MAX_STEP_PAGES, self.step_bytes // max(1, self.page_bytes)))

    def arrays_of(self, layers: range) -> Arrays:
        """Returns the arrays of a layer in a range of layers, which lies in one pool of states."""
        return next(pool.arrays for pool in self.states if layers.start in pool.layers)

    def local_layers(self, layers: range) -> slice:
        """Returns the range of layers in the arrays of its pool."""
        first = next(pool.layers.start for pool in self.states if layers.start in pool.layers)
        return slice(layers.start - first, layers.stop - first)

    def section_of(self, layers: range) -> int:
        """Returns the section of a record's body that has these layers."""
        pools = (i for i, pool in enumerate(self.states) if layers.start in pool.layers)
        return 1 + len(self.windows) + next(pools)

    def programs(self) -> Iterator[Program]:
        """Yields the export and import programs: one of pages, and one of each range of layers."""
        for work in TRANSFERS:
            yield _program(work, self.step_pages, range(0))
            for pool in self.states:
                size = max(1, self.step_bytes // (WORD_BYTES * entry_words(pool.arrays)))
                for first in range(pool.layers.start, pool.layers.stop, size):
                    yield _program(work, 0, range(first, min(first + size, pool.layers.stop)))

    def arrays_by_field(self, program: Program) -> dict[str, Arrays]:
        """Returns the arrays of each field of words; fields of pages are in the order of the page
        tables.
        """
        if program.blocks:
            return {"kv_layers": self.arrays_of(program.blocks)}
        windows = {f"kv_window_pages_{i}": arrays for i, arrays in enumerate(self.windows)}
        return {"kv_pages": self.pages, **windows}

    def fields(self, program: Program) -> list[tuple[str, tuple[int, ...]]]:
        """Returns the fields of words in an import's plan and in an export's result."""
        count = len(program.blocks) or program.pages
        each = self.arrays_by_field(program).items()
        return [(name, (count, entry_words(arrays))) for name, arrays in each]


@dataclass(frozen=True)
class TransferWords:
    """Entries of a step, in the order of its page table or of its layers.

    Attributes:
      pages: Pages; None in a step of layers.
      windows: Pages in each window pool.
      layers: Layers of a snapshot; None in a step of pages.
    """

    pages: Int32[np.ndarray, "n words"] | None
    windows: tuple[Int32[np.ndarray, "n words"], ...]
    layers: Int32[np.ndarray, "n words"] | None

    @property
    def all_pages(self) -> list[Int32[np.ndarray, "n words"]]:
        """Pages of each pool, in the order of the page tables; empty in a step of layers."""
        return [] if self.pages is None else [self.pages, *self.windows]

    @classmethod
    def of(cls, at: dict[str, np.ndarray]) -> TransferWords:
        """Takes the arrays of `TransferSpec.fields` out of the fields of a buffer."""
        windows = [name for name in at if name.startswith("kv_window_pages_")]
        pages, layers = at.pop("kv_pages", None), at.pop("kv_layers", None)
        return cls(pages, tuple(map(at.pop, windows)), layers)


@dataclass(frozen=True)
class ExportKV:
    """Copies entries into the result, and changes nothing.

    The pages are those of row 0 of the page tables. The layers are those of snapshot
    `snapshots.restore[0]`. Page 0 is padding, and its words are undefined.
    """


@dataclass(frozen=True)
class ImportKV:
    """Writes entries into the pages of row 0 of the page tables, or into snapshot
    `snapshots.save[0]`.

    No page occurs twice in a table, except page 0, which is padding.

    Attributes:
      words: The entries.
    """

    words: TransferWords


def _program(work: StepKind, pages: int, layers: range) -> Program:
    return Program(
        work=work,
        batch=1,
        pages=pages,
        tokens=0,
        shape=TreeShape.plain(1),
        extras=ProgramFeature.NONE,
        blocks=layers,
    )


def _page_array(
    pool: CachePool, index: int, dtype: str, page_size: int, *, of_drafter: bool
) -> TransferArray:
    specs = pool.mixer.cache_specs
    return TransferArray(
        name="+".join(spec.name for spec in specs),
        pool=f"{_owner(of_drafter)} pages {index}",
        dtype=dtype,
        lead=(len(pool), len(specs), page_size),
        entry=specs[0],
        of_drafter=of_drafter,
        index=index,
    )


def _states(
    target: Sequence[CachePool], drafted: Sequence[CachePool], dtype: str
) -> Iterator[StatePool]:
    first = 0
    for of_drafter, pools in ((False, target), (True, drafted)):
        for index, pool in enumerate(pools_with(pools, CacheUnit.SLOT)):
            arrays = tuple(
                TransferArray(
                    name=spec.name,
                    pool=f"{_owner(of_drafter)} states {index}",
                    dtype="float32" if spec.float32 else dtype,
                    lead=(),
                    entry=spec,
                    of_drafter=of_drafter,
                    index=index,
                )
                for spec in pool.mixer.cache_specs
                if spec.per is CacheUnit.SLOT
            )
            yield StatePool(arrays, range(first, first + len(pool)))
            first += len(pool)


def _owner(of_drafter: bool) -> str:
    return "draft" if of_drafter else "target"
