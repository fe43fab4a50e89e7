"""Symmetric memory of a rank that is a process: CUDA IPC buffers (torch)."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from kernels.peer_buffers import BufferLayout, PeerTimeout
from kernels.triton_gpu.collectives.all_gather import PeerArgs


class SymmetricBuffer:
    """The mailbox of a rank, and those of the others, in which it writes.

    Attributes:
      boxes: Their sizes.
      handle: By which processes of other ranks on this host reach this one.
      mail: What the kernels are given, once `connect` was called.
    """

    def __init__(self, boxes: BufferLayout, rank: int, device: torch.device) -> None:
        """Takes the memory, which is zero.

        Raises:
          RuntimeError: There is not enough.
        """
        self.boxes, self._rank, self._device = boxes, rank, device
        self._runtime = _runtime(device)
        pointer = ctypes.c_void_p()
        with torch.cuda.device(device):
            self._ask("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(boxes.bytes))
            self._ask("cudaMemset", pointer, 0, ctypes.c_size_t(boxes.bytes))
            torch.cuda.synchronize(device)
            handle = (ctypes.c_char * _HANDLE_BYTES)()
            self._ask("cudaIpcGetMemHandle", ctypes.byref(handle), pointer)
        self._address, self._opened = pointer.value or 0, list[int]()
        self.handle = bytes(handle.raw)

    def connect(self, handles: Sequence[bytes]) -> None:
        """Opens the mailboxes of other processes, by their handles in the order of ranks.

        Raises:
          RuntimeError: One cannot be opened: its process has ended, or its GPU cannot be reached.
        """
        addresses = []
        with torch.cuda.device(self._device):
            for rank, handle in enumerate(handles):
                if rank == self._rank:
                    addresses.append(self._address)
                    continue
                pointer = ctypes.c_void_p()
                given = _Handle.from_buffer_copy(handle)
                self._ask("cudaIpcOpenMemHandle", ctypes.byref(pointer), given, 1)
                addresses.append(pointer.value or 0)
                self._opened.append(addresses[-1])
        self.use(addresses)

    def use(self, addresses: Sequence[int]) -> None:
        """Takes mailboxes by their addresses, as those of ranks that are streams of one process."""
        place = torch.tensor([*addresses, self._rank, 0], dtype=torch.int64)
        clock, error = torch.zeros(2, 1, dtype=torch.int32, device=self._device)
        self.mail = PeerArgs(place.to(self._device), clock, error)

    @property
    def address(self) -> int:
        """Address of this rank's mailbox in this process."""
        return self._address

    def wait(self, looks: int) -> None:
        """From now on each wait ends after so many looks; 0 waits for nothing, as at first."""
        self.mail.place[self.boxes.ranks + 1] = looks

    def missing(self) -> PeerTimeout | None:
        """Returns the rank that sent nothing in time, if any; waits for all launches."""
        word = ctypes.c_int32()
        torch.cuda.synchronize(self._device)
        with torch.cuda.device(self._device):
            source = ctypes.c_void_p(self._address)
            self._ask("cudaMemcpy", ctypes.byref(word), source, ctypes.c_size_t(4), 2)
        return PeerTimeout.read(word.value)

    def close(self) -> None:
        """Gives the memory back, when no rank writes in it any more."""
        with torch.cuda.device(self._device):
            for address in self._opened:
                self._ask("cudaIpcCloseMemHandle", ctypes.c_void_p(address))
            self._ask("cudaFree", ctypes.c_void_p(self._address))
        self._opened = []

    def _ask(self, name: str, *arguments: Any) -> None:
        code = getattr(self._runtime, name)(*arguments)
        if code:
            self._runtime.cudaGetLastError()
            raise RuntimeError(f"mailboxes of ranks: {name} gives error {code} of CUDA")


_HANDLE_BYTES = 64


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * _HANDLE_BYTES)]


def _runtime(device: torch.device) -> Any:
    """CUDA's runtime, which torch has loaded."""
    torch.zeros(1, device=device)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        path = next(line.split()[-1] for line in maps if "libcudart" in line)
    return ctypes.CDLL(path)
