"""Memory that torch's caching allocator would take on a GPU, counted without one.

Tensors are of the device `meta`: they have sizes and no memory. What each operation makes is
allocated, and freed when the last tensor lets go of it, by the rules of torch's allocator; so the
count ends with that of `torch.cuda.max_memory_reserved` on a GPU. What an operation works on inside
is not seen, but for the indices that it widens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MIB = 1 << 20
SMALL = MIB
"""Largest bytes of a small array, which is allocated among small ones."""
INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)

LOADING, EAGER, GRAPHS = "loading", "eager", "graphs"
"""Pools, of which each stream and all graphs have one."""


@dataclass(eq=False)
class Block:
    """A block of memory for one array, with its neighbours in the same segment."""

    address: int
    size: int
    place: tuple[str, bool]
    is_free: bool = False
    before: Block | None = None
    behind: Block | None = None


class Allocator:
    """Memory by pools, each with small and large arrays apart.

    Attributes:
      reserved, most: Bytes taken from the device now, and at most.
      used, max_used: Bytes that arrays have of them.
    """

    def __init__(self) -> None:
        self.reserved = self.most = self.used = self.max_used = self._address = 0
        self._free: dict[tuple[str, bool], list[Block]] = {}

    def allocate(self, num_bytes: int, pool: str) -> Block:
        """The smallest free block that holds an array, cut to its size, or a new one."""
        size = max(512, _rounded(num_bytes, 512))
        place = (pool, size <= SMALL)
        free = self._free.setdefault(place, [])
        fitting = [block for block in free if block.size >= size]
        if fitting:
            block = min(fitting, key=lambda block: (block.size, block.address))
            free.remove(block)
        else:
            block = self._taken(size, place)
        rest = block.size - size
        if rest >= 512 if place[1] else rest > SMALL:
            cut = Block(block.address + size, rest, place, True, block, block.behind)
            if cut.behind is not None:
                cut.behind.before = cut
            block.behind, block.size = cut, size
            free.append(cut)
        block.is_free = False
        self.used += block.size
        self.max_used = max(self.max_used, self.used)
        return block

    def _taken(self, size: int, place: tuple[str, bool]) -> Block:
        taken = _rounded(size, 2 * MIB)
        if SMALL < size < 10 * MIB:
            taken = 20 * MIB
        block = Block(self._address, taken, place)
        self._address += taken
        self.reserved += taken
        self.most = max(self.most, self.reserved)
        return block

    def free(self, block: Block) -> None:
        """Merges a block with its free neighbours."""
        free = self._free[block.place]
        self.used -= block.size
        if block.before is not None and block.before.is_free:
            free.remove(block.before)
            block.size, block.address = block.size + block.before.size, block.before.address
            block.before = block.before.before
            if block.before is not None:
                block.before.behind = block
        if block.behind is not None and block.behind.is_free:
            free.remove(block.behind)
            block.size, block.behind = block.size + block.behind.size, block.behind.behind
            if block.behind is not None:
                block.behind.before = block
        block.is_free = True
        free.append(block)

    def empty(self, pool: str) -> None:
        """Frees the segments of a pool that no array uses."""
        for (name, _), free in self._free.items():
            for block in [b for b in free if name == pool and b.before is b.behind is None]:
                free.remove(block)
                self.reserved -= block.size


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class Memory(TorchDispatchMode):
    """Counts the memory of the operations in its context.

    Attributes:
      allocator: The count.
      pool: From which arrays are allocated now.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocator, self.pool = Allocator(), EAGER
        self._held: dict[int, tuple[StorageWeakRef, Block]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self.free_unused()
        widened = []
        if func.overloadpacket in INDEXING:
            indices = [index for index in args[1] if index is not None and _is_narrow(index)]
            widened = [self.allocator.allocate(8 * x.numel(), self.pool) for x in indices]
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                self._hold(tensor.untyped_storage())
        for block in widened:
            self.allocator.free(block)
        return made

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._held and storage.nbytes():
            block = self.allocator.allocate(storage.nbytes(), self.pool)
            self._held[storage._cdata] = (StorageWeakRef(storage), block)

    def free_unused(self) -> None:
        """Frees the arrays that no tensor has any more."""
        for name in [name for name, (storage, _) in self._held.items() if storage.expired()]:
            self.allocator.free(self._held.pop(name)[1])

    def max_used_by(self, step: Any) -> int:
        """Most bytes of arrays that a step makes, which live at once."""
        self.free_unused()
        before = self.allocator.max_used = self.allocator.used
        step()
        self.free_unused()
        return self.allocator.max_used - before


def _is_narrow(index: torch.Tensor) -> bool:
    return index.device.type == "meta" and index.dtype == torch.int32


@contextmanager
def absent_gpu(memory: Memory) -> Iterator[None]:
    """Streams and graphs of torch that run nothing; captured arrays have a pool of their own."""

    @contextmanager
    def graph(graph: object, **how: object) -> Iterator[None]:
        empty_cache()  # as torch does
        memory.pool = GRAPHS
        yield
        memory.free_unused()
        memory.pool = EAGER

    def empty_cache() -> None:
        memory.free_unused()
        memory.allocator.empty(EAGER)

    class Stream:
        def __init__(self, device: object = None) -> None: ...

        def wait_stream(self, other: object) -> None: ...

        def synchronize(self) -> None: ...

    with patch.multiple(
        torch.cuda,
        Stream=Stream,
        CUDAGraph=object,
        current_stream=Stream,
        stream=lambda stream: nullcontext(),
        graph=graph,
        graph_pool_handle=lambda: GRAPHS,
        empty_cache=empty_cache,
    ):
        yield
