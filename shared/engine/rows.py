"""The rows of one step: whose they are, and what they bring to its plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
from jaxtyping import Float32

from shared.boundary.backend import Count, Decode, HostDraft, Prefill, StepPlan, Work
from shared.engine.grammar import Masks
from shared.engine.request import Request
from shared.spec.draft_tree import TreeShape
from shared.spec.gated_delta import CHUNK

_TREE = tuple(field.name for field in fields(HostDraft))


@dataclass(frozen=True)
class Chunk:
    """Positions `first` up to `end` of a request's context, to be prefilled in one step."""

    request: Request
    first: int
    end: int

    @property
    def starts(self) -> bool:
        """Whether it is the request's first step since it was placed."""
        return self.first == self.request.first_position and not self.request.count_length

    @property
    def ends_prompt(self) -> bool:
        """Whether the chunk ends where the next token is to be chosen."""
        return self.end == len(self.request.context)


def chunk_end(request: Request, budget: int) -> int:
    """Where a chunk of at most `budget` tokens ends; at its start if nothing fits.

    Inside a prompt that is a multiple of `CHUNK`, so that the chunked delta rule cuts a prompt the
    same way under any chunking and gives the same bits.
    """
    end = request.prefilled + budget
    if end >= request.prefill_length:
        return request.prefill_length
    return max(request.prefilled, end // CHUNK * CHUNK)


class Rows(Protocol):
    """The rows of a step of any work (`PrefillRows` and `DecodeRows` are such)."""

    @property
    def is_masked(self) -> bool:
        """Whether masks of grammars come with the plan."""
        ...

    @property
    def work(self) -> Work:
        """What the step does."""
        ...

    @property
    def requests(self) -> Sequence[Request]:
        """The request of each row."""
        ...

    @property
    def chunks(self) -> Sequence[Chunk]:
        """The chunk of each row, in a step that feeds prompts; none in any other."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        ...

    @property
    def shape(self) -> TreeShape | None:
        """The draft shape, in a step that decodes."""
        ...

    @property
    def host_draft(self) -> bool:
        """Whether the host's trees come with the plan."""
        ...

    @property
    def most_tokens(self) -> Sequence[int]:
        """Most tokens that the step adds to each row."""
        ...

    def accepted(self, num_tokens: int) -> int | None:
        """Drafts among the tokens that the step gave a row; None where it verifies nothing."""
        ...

    def fill(self, plan: StepPlan) -> None:
        """Writes what the rows bring beside slots, pages and sampling parameters.

        Raises:
          ValueError: A row is at no point at which the step may take it.
        """
        ...


@dataclass(frozen=True)
class PrefillRows:
    """The rows of a prefill step."""

    chunks: tuple[Chunk, ...]

    @property
    def is_masked(self) -> bool:
        """A prefill chooses no token of a text that has a grammar."""
        return False

    @property
    def work(self) -> Work:
        """What the step does."""
        return Work.PREFILL

    @property
    def requests(self) -> list[Request]:
        """The request of each row."""
        return [chunk.request for chunk in self.chunks]

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.end - chunk.first for chunk in self.chunks)

    @property
    def shape(self) -> None:
        """A prefill drafts nothing."""
        return None

    @property
    def host_draft(self) -> bool:
        """No trees come with a prefill."""
        return False

    @property
    def most_tokens(self) -> list[int]:
        """Most tokens that the step adds to each row."""
        return [int(chunk.ends_prompt) for chunk in self.chunks]

    def accepted(self, num_tokens: int) -> None:
        """A prefill verifies nothing."""
        return None

    def fill(self, plan: StepPlan) -> None:
        """Lays the chunks one after the other."""
        work, end = plan.work, 0
        assert isinstance(work, Prefill)
        for row, chunk in enumerate(self.chunks):
            start, end = end, end + chunk.end - chunk.first
            context = chunk.request.context
            work.tokens[start:end] = context[chunk.first : chunk.end]
            work.row_starts[row + 1] = end
            work.first_positions[row] = chunk.first
            work.ends_prompt[row] = chunk.ends_prompt
            # Drafters learn of a chunk's last token together with the one that follows it.
            work.next_tokens[row] = 0 if chunk.ends_prompt else context[chunk.end]
            if chunk.starts:
                _start(plan, row, chunk.request)
        work.row_starts[len(self.chunks) + 1 :] = end


@dataclass(frozen=True)
class CountRows:
    """The row of a step that counts what a prefill will not feed, for penalties.

    Attributes:
      request: Whose tokens.
      first, end: Their positions.
    """

    request: Request
    first: int
    end: int

    @property
    def is_masked(self) -> bool:
        """A count chooses nothing."""
        return False

    @property
    def work(self) -> Work:
        """What the step does."""
        return Work.COUNT

    @property
    def requests(self) -> list[Request]:
        """The request of the row."""
        return [self.request]

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """A count feeds nothing."""
        return ()

    @property
    def num_tokens(self) -> int:
        """Tokens that are counted."""
        return self.end - self.first

    @property
    def shape(self) -> None:
        """A count drafts nothing."""
        return None

    @property
    def host_draft(self) -> bool:
        """No trees come with a count."""
        return False

    @property
    def most_tokens(self) -> list[int]:
        """A count adds no token."""
        return [0]

    def accepted(self, num_tokens: int) -> None:
        """A count verifies nothing."""
        return None

    def fill(self, plan: StepPlan) -> None:
        """Lays the tokens; the first step of a row starts it."""
        work, count = plan.work, self.num_tokens
        assert isinstance(work, Count)
        work.tokens[:count] = self.request.context[self.first : self.end]
        work.row_starts[1:] = count
        work.first_positions[0] = self.first
        if self.first == 0:
            _start(plan, 0, self.request)


def _start(plan: StepPlan, row: int, request: Request) -> None:
    """Resets a row's slot, and gives it what its request found."""
    plan.starts[row], plan.draft_from[row] = 1, request.draft_from
    plan.snapshots.restore[row] = request.restores


@dataclass(frozen=True)
class _SlotRows:
    """Rows that go on from what their slots hold, and the shape of their trees."""

    requests: list[Request]
    shape: TreeShape

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """No prompt is fed."""
        return ()

    @property
    def num_tokens(self) -> int:
        """No prompt is fed."""
        return 0


@dataclass(frozen=True)
class DecodeRows(_SlotRows):
    """The rows of a decode step and its draft shape.

    Attributes:
      drafts: The host's tree of each row; None where the device drafts, or nothing does.
      calibration: How often each row's path is accepted as far as each depth, as
        `shared.spec.sampling.Sampling` says; None: nothing is known of any row.
      corpus_nodes: Of trees of n-grams, gives the nodes of a row's that come from an external
        corpus; None of all other trees.
      masks: What grammars allow at each node; None: no row has one.
    """

    drafts: HostDraft | None = None
    calibration: Float32[np.ndarray, "B S_max"] | None = None
    corpus_nodes: Callable[[int], list[int]] | None = None
    masks: Masks | None = None

    @property
    def is_masked(self) -> bool:
        """Whether masks of grammars come with the plan."""
        return self.masks is not None

    @property
    def work(self) -> Work:
        """What the step does."""
        return Work.DECODE

    @property
    def host_draft(self) -> bool:
        """Whether the host's trees come with the plan."""
        return self.drafts is not None

    @property
    def most_tokens(self) -> list[int]:
        """Most tokens that the step adds to each row."""
        return [self.shape.max_tokens] * len(self.requests)

    def accepted(self, num_tokens: int) -> int:
        """All but the last, which is the target's own."""
        return num_tokens - 1

    def fill(self, plan: StepPlan) -> None:
        """Copies what is known of the rows, and the host's trees.

        Raises:
          ValueError: A request's prefill was not handed over whole: a decode never starts a row.
        """
        _check_prefilled(self.requests)
        if self.calibration is not None:
            plan.sampling.calibration[: len(self.calibration)] = self.calibration
        if self.masks is not None:
            assert plan.mask is not None  # the program was picked for it
            plan.mask.bits[1 : 1 + len(self.masks.bits)] = self.masks.bits
            plan.mask.index[: len(self.masks.index)] = self.masks.index
        work = plan.work
        assert isinstance(work, Decode)
        if work.drafts is None or self.drafts is None:
            return
        for name in _TREE:
            values = getattr(self.drafts, name)
            getattr(work.drafts, name)[: len(values)] = values


@dataclass(frozen=True)
class DraftRows(_SlotRows):
    """The rows of a step that drafts for a decode which brings the trees back, and their shape."""

    @property
    def is_masked(self) -> bool:
        """A drafter knows of no grammar."""
        return False

    @property
    def work(self) -> Work:
        """What the step does."""
        return Work.DRAFT

    @property
    def host_draft(self) -> bool:
        """The device drafts."""
        return False

    @property
    def most_tokens(self) -> list[int]:
        """A draft adds no token."""
        return [0] * len(self.requests)

    def accepted(self, num_tokens: int) -> None:
        """A draft verifies nothing."""
        return None

    def fill(self, plan: StepPlan) -> None:
        """Raises as `DecodeRows.fill`; a draft brings nothing."""
        _check_prefilled(self.requests)


def _check_prefilled(requests: Sequence[Request]) -> None:
    for request in requests:
        if not request.decodes:
            raise ValueError(
                f"request {request.request_id} has {request.prefilled} of "
                f"{request.prefill_length} tokens prefilled, and a decode never starts a row"
            )
