"""Detection of out-of-bounds accesses of interpreted Triton kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch


class Addresses:
    """Addresses of the tensors of the current launch, in ascending order."""

    _begins: np.ndarray
    _ends: np.ndarray  # of all that begin before a place, the furthest

    def launch(self, arguments: Sequence[Any]) -> None:
        """Takes the tensors of a launch.

        Raises:
          AssertionError: A kernel would read one in an order that it does not have.
        """
        spans: list[list[int]] = []
        for tensor in _tensors(arguments):
            assert tensor.is_contiguous(), f"of shape {tensor.shape} with strides {tensor.stride()}"
            begin, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
            spans.append([begin, begin + size])
        self._begins, ends = np.array(sorted(spans), np.uint64).reshape(-1, 2).T
        # Views of one tensor may overlap.
        self._ends = np.append(np.uint64(0), np.maximum.accumulate(ends))

    def check(self, pointers: Any, mask: Any) -> None:
        """Holds the addresses that a kernel touches against its tensors.

        Raises:
          AssertionError: Some are outside all of them.
        """
        at = np.asarray(pointers.data).astype(np.uint64)
        at = at[np.broadcast_to(np.asarray(mask.data, bool), at.shape)]
        before = np.searchsorted(self._begins, at, side="right")
        inside = (before > 0) & (at < self._ends[before])
        assert inside.all(), f"{(~inside).sum()} of {inside.size} addresses are in no tensor"


def _tensors(arguments: Sequence[Any]) -> Iterator[torch.Tensor]:
    for argument in arguments:
        inner = getattr(argument, "base", argument)  # of what a tensor descriptor describes
        if isinstance(inner, tuple):
            yield from _tensors(inner)
        elif isinstance(inner, torch.Tensor) and inner.numel():
            yield inner


def watch(patch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter check every launch."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    addresses, builder = Addresses(), interpreter.InterpreterBuilder
    prepare = interpreter.GridExecutor._init_args_hst

    def prepared(self: Any, arguments: Any, named: Any) -> Any:
        found = prepare(self, arguments, named)
        addresses.launch([*found[0], *found[1].values()])
        return found

    def checked(access: Callable, pointer: int, mask: int) -> Callable:
        def call(self: Any, *given: Any, **named: Any) -> Any:
            addresses.check(given[pointer], given[mask])
            return access(self, *given, **named)

        return call

    patch.setattr(interpreter.GridExecutor, "_init_args_hst", prepared)
    for name, pointer, mask in (
        ("create_masked_load", 0, 1),
        ("create_masked_store", 0, 2),
        ("create_atomic_rmw", 1, 3),
    ):
        patch.setattr(builder, name, checked(getattr(builder, name), pointer, mask))
