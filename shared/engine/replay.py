"""One request run by itself and plainly, and where a served text differs from what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shared.boundary.backend import Backend, Capacity, StepResult
from shared.boundary.program import Extra, Work
from shared.engine.allocator import Allocator
from shared.engine.picture_rows import PictureRows
from shared.engine.planner import Planner
from shared.engine.prefix_cache import PrefixCache
from shared.engine.request import Request
from shared.engine.rows import Chunk, Rows, chunk_end
from shared.spec.draft_tree import TreeShape
from shared.spec.gated_delta import CHUNK

SHOWN = 2
"""Best tokens that a replay asks for: the lead of the first over the second is the margin."""

PLAIN = TreeShape.plain(1)


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where a served text first differs from the plain one.

    Attributes:
      request_id: Whose text.
      position: Number of the token in the output, from 0.
      served: The token there.
      plain: That of the plain run; None where it had ended, or its logits were no finite numbers.
      margin: Units of logits by which the plain run's best token leads the second, before any
        processing; None where there is no token.
    """

    request_id: int
    position: int
    served: int
    plain: int | None
    margin: float | None

    def __str__(self) -> str:
        plain = "no token" if self.plain is None else f"token {self.plain}"
        margin = "" if self.margin is None else f", by a margin of {self.margin:.3g}"
        return (
            f"shadow check: request {self.request_id} has token {self.served} at position "
            f"{self.position} of its output, and plain decoding {plain}{margin}"
        )


class PlainRunner:
    """Runs one request by itself and plainly, with nothing in flight between two of its steps.

    Steps are the shortest that there are, as who arrives meanwhile waits for the end of one.

    Args:
      backend: The device.
      planner, allocator, cache: Of the engine that serves on it. A replay finds nothing in the
        cache and leaves nothing to it; what is cached gives way to it.
      pictures: Of the engine too, where the model sees: a replay's pictures are its request's.

    Raises:
      ValueError: The backend has no programs for plain steps that give logprobs, or its steps give
        texts that are not the model's.
    """

    def __init__(
        self,
        backend: Backend,
        planner: Planner,
        allocator: Allocator,
        cache: PrefixCache,
        pictures: PictureRows | None,
    ) -> None:
        self._backend, self._planner = backend, planner
        self._allocator, self._cache, self._pictures = allocator, cache, pictures
        self._most_tokens = _check_programs(backend.capacity)
        self._request: Request | None = None

    @property
    def ended(self) -> bool:
        """Whether the replayed text has ended; False before the first `start`."""
        return self._request is not None and self._request.finish_reason is not None

    def start(self, request: Request, max_tokens: int) -> None:
        """Places a replay of a request, whose text is to have at most `max_tokens` tokens."""
        asked = request.sampling
        sampling = replace(
            asked,
            max_tokens=max_tokens,
            min_tokens=min(asked.min_tokens, max_tokens),
            logprobs=SHOWN,
            prompt_logprobs=None,
            max_draft_tokens=0,
        )
        replay = Request(
            request_id=request.request_id,
            prompt=request.prompt,
            sampling=sampling,
            tenant=request.tenant,
            pictures=request.pictures,
            sight=request.sight,
        )
        replay.place(self._allocator.take_slot())
        self._planner.bind(replay)
        self._request = replay

    def stop(self) -> None:
        """Gives slot and pages back."""
        assert self._request is not None
        self._allocator.free(self._request.slot)
        self._request = None

    def step(self, served: Sequence[int]) -> Divergence | None:
        """One step, and where a served text first differs by what it gave."""
        request = self._request
        assert request is not None
        position, result = len(request.output), self._result(self._next_rows(request))
        if result.failed[0]:
            return _divergence(request, position, served, None, None)
        if not result.counts[0]:
            return None
        token = int(result.tokens[0, 0])
        if token != served[position]:
            return _divergence(request, position, served, token, _margin(result))
        request.commit([token])
        if self.ended and len(request.output) < len(served):
            return _divergence(request, position + 1, served, None, None)
        return None

    def _next_rows(self, request: Request) -> Rows:
        if request.decodes:
            self._reserve(request, request.length + PLAIN.scratch)
            return Rows.decode([request], PLAIN)
        chunk = Chunk(request, request.prefilled, chunk_end(request, self._most_tokens))
        if self._pictures is not None and request.pictures:
            found = self._pictures.chunk_of(request, chunk.end, may_encode=True)
            assert found is not None, "it may encode"
            chunk = found
        if isinstance(chunk, Rows):
            return chunk
        self._reserve(request, chunk.end)
        request.prefill(chunk.end)
        return Rows.prefill((chunk,))

    def _reserve(self, request: Request, positions: int) -> None:
        has_room = self._cache.reserve(request.slot, positions)
        assert has_room, "a text that was served has room where nobody else runs"

    def _result(self, rows: Rows) -> StepResult:
        return self._backend.submit(self._planner.plan(rows)).result()


def _check_programs(capacity: Capacity) -> int:
    """Tokens of the smallest prefill that may be taken.

    Raises:
      ValueError: See `PlainRunner`.
    """
    if capacity.accept_rates is not None:
        raise ValueError("drafts are accepted by lot, so that no text is the model's")
    unmasked = capacity.unmasked_programs
    usable = [p for p in unmasked if p.extras & ~Extra.MASK is Extra.LOGPROBS]
    chunks = [p.tokens for p in usable if p.work is Work.PREFILL and p.tokens >= CHUNK]
    has_plain = any(p.work is Work.DECODE and p.shape.is_plain for p in usable)
    if not (chunks and has_plain and capacity.max_logprobs >= SHOWN):
        raise ValueError(
            f"plain replays need programs of plain steps and of prompts with {SHOWN} logprobs, and "
            "the backend has none"
        )
    return min(chunks)


def _margin(result: StepResult) -> float:
    """How far apart the best two logits are of the first token of the first row."""
    assert result.logprobs is not None, "a replay asks for logprobs"
    best, second = result.logprobs.top_values[0, 0, :SHOWN].tolist()
    return best - second


def _divergence(
    request: Request, position: int, served: Sequence[int], plain: int | None, margin: float | None
) -> Divergence:
    return Divergence(
        request_id=request.request_id,
        position=position,
        served=served[position],
        plain=plain,
        margin=margin,
    )
