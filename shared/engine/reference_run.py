"""Reference run of one request with plain decoding, compared with its served output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shared.boundary.backend import Backend, BackendLimits, StepResult
from shared.boundary.program import ProgramFeature, StepKind
from shared.engine.adapter_slots import AdapterSlots
from shared.engine.allocator import Allocator
from shared.engine.encoder_cache import EncoderCache
from shared.engine.planner import Planner
from shared.engine.prefix_cache import PrefixCache
from shared.engine.request import Request
from shared.engine.rows import Chunk, ScheduledRows, chunk_end
from shared.spec.draft_tree import TreeShape
from shared.spec.gated_delta import CHUNK

SHOWN = 2
"""Top logprobs of a reference run: the difference of the first two is the margin."""

PLAIN = TreeShape.plain(1)


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """First difference between a served output and plain decoding.

    Attributes:
      request_id: The request.
      position: Index of the token in the output, from 0.
      served: Served token.
      plain: Token of the plain run; None if it had ended or its logits were not finite.
      margin: Difference between the plain run's two best raw logits; None without a token.
    """

    request_id: int
    position: int
    served: int
    plain: int | None
    margin: float | None

    def __str__(self) -> str:
        plain = "no token" if self.plain is None else f"token {self.plain}"
        margin = "" if self.margin is None else f", with a margin of {self.margin:.3g}"
        return (
            f"shadow check: request {self.request_id} has token {self.served} at position "
            f"{self.position} of its output, but plain decoding has {plain}{margin}"
        )


class ReferenceRunner:
    """Runs one request alone with plain decoding, without overlap.

    It uses the smallest steps, because a request that arrives meanwhile waits for the end of one.

    Args:
      backend: The device.
      planner, allocator, cache: Those of the engine. A run neither reads nor fills the prefix
        cache, but may evict from it.
      images: Encoder cache of the engine, for a vision-language model.
      adapters: Adapter slots of the engine.

    Raises:
      ValueError: The backend has no programs for plain steps with logprobs, or acceptance is
        simulated.
    """

    def __init__(
        self,
        backend: Backend,
        planner: Planner,
        allocator: Allocator,
        cache: PrefixCache,
        images: EncoderCache | None,
        adapters: AdapterSlots,
    ) -> None:
        self._backend, self._planner = backend, planner
        self._allocator, self._cache, self._images = allocator, cache, images
        self._adapters = adapters
        self._max_tokens = _check_programs(backend.capacity)
        self._request: Request | None = None

    @property
    def ended(self) -> bool:
        """True if the run has ended; False before the first `start`."""
        return self._request is not None and self._request.finish_reason is not None

    def can_start(self, request: Request) -> bool:
        """Returns False if the adapter of a request is not loaded any more."""
        return request.adapter is None or self._adapters.is_loaded(request.adapter)

    def start(self, request: Request, max_tokens: int) -> None:
        """Starts a run of a request with an output of at most `max_tokens` tokens."""
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
            images=request.images,
            mrope=request.mrope,
            adapter=request.adapter,
        )
        self._adapters.join(replay)
        self._adapters.acquire(replay)
        replay.assign_slot(self._allocator.take_slot())
        self._planner.write_request_row(replay)
        self._request = replay

    def stop(self) -> None:
        """Releases slot and pages."""
        assert self._request is not None
        self._allocator.free(self._request.slot)
        self._adapters.release(self._request)
        self._adapters.leave(self._request)
        self._request = None

    def step(self, served: Sequence[int]) -> Divergence | None:
        """Runs one step; returns the first difference from the served output, if it has one."""
        request = self._request
        assert request is not None
        if (load := self._adapters.next_step()) is not None:
            self._backend.submit(load).result()
            return None
        position, result = len(request.output), self._result(self._next_rows(request))
        if result.failed[0]:
            return _divergence(request, position, served, None, None)
        if not result.counts[0]:
            return None
        token = int(result.tokens[0, 0])
        if token != served[position]:
            return _divergence(request, position, served, token, _margin(result))
        request.append_tokens([token])
        if self.ended and len(request.output) < len(served):
            return _divergence(request, position + 1, served, None, None)
        return None

    def _next_rows(self, request: Request) -> ScheduledRows:
        if request.decodes:
            self._reserve(request, request.length - 1, request.length + PLAIN.scratch)
            return ScheduledRows.decode([request], PLAIN)
        chunk = Chunk(request, request.prefilled, chunk_end(request, self._max_tokens))
        if self._images is not None and request.images:
            found = self._images.chunk_of(request, chunk.end, may_encode=True)
            assert found is not None, "encode steps are allowed"
            chunk = found
        if isinstance(chunk, ScheduledRows):
            return chunk
        self._reserve(request, request.prefilled, chunk.end)
        request.prefill(chunk.end)
        return ScheduledRows.prefill((chunk,))

    def _reserve(self, request: Request, length: int, positions: int) -> None:
        self._allocator.free_outside_window(request.slot, length)
        has_room = self._cache.reserve(request.slot, positions)
        assert has_room, "a served request fits if no other request runs"

    def _result(self, rows: ScheduledRows) -> StepResult:
        return self._backend.submit(self._planner.plan(rows)).result()


def _check_programs(capacity: BackendLimits) -> int:
    """Returns the tokens of the smallest usable prefill program.

    Raises:
      ValueError: See `ReferenceRunner`.
    """
    if capacity.accept_rates is not None:
        raise ValueError("shadow checks are not supported with simulated acceptance")
    unmasked = capacity.unmasked_programs
    usable = [p for p in unmasked if p.extras & ~ProgramFeature.MASK is ProgramFeature.LOGPROBS]
    chunks = [p.tokens for p in usable if p.work is StepKind.PREFILL and p.tokens >= CHUNK]
    has_plain = any(p.work is StepKind.DECODE and p.shape.is_plain for p in usable)
    if not (chunks and has_plain and capacity.max_logprobs >= SHOWN):
        raise ValueError(
            f"shadow checks require programs of plain steps and of prefills with {SHOWN} "
            "logprobs, but the backend has none"
        )
    return min(chunks)


def _margin(result: StepResult) -> float:
    """Returns the difference between the two best logits of the first token of the first row."""
    assert result.logprobs is not None, "a reference run requests logprobs"
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
