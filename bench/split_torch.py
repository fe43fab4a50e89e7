"""A decode step of torch cut in three, as engines run it that draft, verify and extend in turn."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Int
from torch import Tensor

from shared.boundary.backend import Program
from shared.boundary.buffers import empty_plan
from torch_impl import decode
from torch_impl.backend import TorchBackend, _Graph, _Stream
from torch_impl.device_state import read_plan
from torch_impl.machine import Machine
from torch_impl.step import _end


@dataclass(frozen=True)
class InTurn:
    """Graphs that are replayed one after the other."""

    graphs: tuple[torch.cuda.CUDAGraph, ...]

    def replay(self) -> None:
        """Queues all."""
        for graph in self.graphs:
            graph.replay()


def parts(
    machine: Machine, words: Int[Tensor, " words"], program: Program
) -> Iterator[Int[Tensor, " out"] | None]:
    """Draft; verify and commit; draft-extend. The last gives the words of the result."""
    plan = read_plan(words, program, machine.limits)
    lengths = machine.state.lengths[plan.slots]
    trees = decode.grow(machine, plan, program, lengths)
    yield None
    verified = decode.verify(machine, plan, program, trees, lengths)
    saved = decode.commit(machine, plan, program, verified, lengths)
    yield None
    decode.extend(machine, plan, program, trees, verified, lengths)
    fields = decode.told(machine, plan, program, trees, verified, saved)
    yield _end(machine, fields, program)


@torch.inference_mode()
def captured(stream: _Stream, program: Program) -> _Graph:
    """The parts of a step that has run before, a graph of each."""
    padding = empty_plan(program, stream._machine.limits).buffer
    plan = torch.from_numpy(padding).to(stream._device)
    how = {"pool": stream._pool, "stream": stream._compute, "capture_error_mode": "thread_local"}
    running, graphs, result = parts(stream._machine, plan, program), [], None
    while result is None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, **how):
            result = next(running)
        graphs.append(graph)
    # A step asks nothing of a graph but to be replayed.
    return _Graph(cast(torch.cuda.CUDAGraph, InTurn(tuple(graphs))), plan, result)


def swap(backend: TorchBackend, program: Program, other: _Graph | None) -> _Graph:
    """Puts another graph, or the parts, in the place of a program's; gives what was there.

    Raises:
      ValueError: Steps are not captured here.
    """
    if not isinstance(backend._queue, _Stream) or program not in backend._queue._graphs:
        raise ValueError("torch captures steps on a GPU alone")
    graphs = backend._queue._graphs
    before = graphs[program]
    graphs[program] = other or captured(backend._queue, program)
    return before
