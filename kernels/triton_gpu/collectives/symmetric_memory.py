"""Symmetric memory of a rank that is a process: CUDA IPC buffers (torch)."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from kernels.peer_buffers import BufferLayout, PeerTimeout
from kernels.triton_gpu.collectives.flag_protocol import PeerArgs


class SymmetricBuffer:
    """Symmetric buffer of a rank, with the buffers of the other ranks mapped.

    Attributes:
      boxes: Layout of the buffers.
      handle: CUDA IPC handle, with which processes of other ranks on this host map this buffer.
      mail: Arguments of the kernels, set by `connect`.
    """

    def __init__(self, boxes: BufferLayout, rank: int, device: torch.device) -> None:
        """Allocates a buffer of zeros.

        Raises:
          RuntimeError: Out of memory.
        """
        self.boxes, self._rank, self._device = boxes, rank, device
        self._runtime = _runtime(device)
        pointer = ctypes.c_void_p()
        with torch.cuda.device(device):
            self._call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(boxes.bytes))
            self._call("cudaMemset", pointer, 0, ctypes.c_size_t(boxes.bytes))
            torch.cuda.synchronize(device)
            handle = (ctypes.c_char * _HANDLE_BYTES)()
            self._call("cudaIpcGetMemHandle", ctypes.byref(handle), pointer)
        self._address, self._opened = pointer.value or 0, list[int]()
        self.handle = bytes(handle.raw)

    def connect(self, handles: Sequence[bytes]) -> None:
        """Maps the buffers of other processes, by their handles in rank order.

        Raises:
          RuntimeError: A buffer cannot be mapped: its process has ended, or the GPUs have no peer
            access.
        """
        addresses = []
        with torch.cuda.device(self._device):
            for rank, handle in enumerate(handles):
                if rank == self._rank:
                    addresses.append(self._address)
                    continue
                pointer = ctypes.c_void_p()
                given = _Handle.from_buffer_copy(handle)
                self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), given, 1)
                addresses.append(pointer.value or 0)
                self._opened.append(addresses[-1])
        self.use(addresses)

    def use(self, addresses: Sequence[int]) -> None:
        """Sets the buffers by address, for example of ranks that are streams of one process."""
        place = torch.tensor([*addresses, self._rank, 0], dtype=torch.int64)
        clock, error = torch.zeros(2, 1, dtype=torch.int32, device=self._device)
        self.mail = PeerArgs(place.to(self._device), clock, error)

    @property
    def address(self) -> int:
        """Address of this rank's buffer in this process."""
        return self._address

    def wait(self, max_polls: int) -> None:
        """Sets the maximum polls of later waits; with 0, the initial value, nothing waits."""
        self.mail.place[self.boxes.ranks + 1] = max_polls

    def missing(self) -> PeerTimeout | None:
        """Waits for all launches, and returns the timeout of this rank, if any."""
        word = ctypes.c_int32()
        torch.cuda.synchronize(self._device)
        with torch.cuda.device(self._device):
            source = ctypes.c_void_p(self._address)
            self._call("cudaMemcpy", ctypes.byref(word), source, ctypes.c_size_t(4), 2)
        return PeerTimeout.read(word.value)

    def close(self) -> None:
        """Frees the memory; no rank may store in it any more."""
        with torch.cuda.device(self._device):
            for address in self._opened:
                self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))
            self._call("cudaFree", ctypes.c_void_p(self._address))
        self._opened = []

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._runtime, name)(*arguments)
        if code:
            self._runtime.cudaGetLastError()
            raise RuntimeError(f"symmetric memory: {name} returned CUDA error {code}")


_HANDLE_BYTES = 64


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * _HANDLE_BYTES)]


def _runtime(device: torch.device) -> Any:
    """Returns the CUDA runtime library that torch has loaded."""
    torch.zeros(1, device=device)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        path = next(line.split()[-1] for line in maps if "libcudart" in line)
    return ctypes.CDLL(path)
