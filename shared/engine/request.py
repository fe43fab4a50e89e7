"""Request: prompt, sampling parameters, output, slot, and steps in flight."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from shared.engine.grammar import GrammarState
from shared.engine.image_inputs import MropePositions, PromptImage
from shared.spec.logprobs import PromptLogprobs
from shared.text.grammar_errors import OF_THE_REQUEST


class FinishReason(Enum):
    """Reason why a request ended, with OpenAI's value if it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REFUSED = "refused"
    """The request is unsupported, found after it was accepted."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Attributes:
      seed32: Seed of the noise (`shared.spec.gumbel_noise.derive_seed` of the request's seed).
      max_tokens: Maximum tokens of the output; 0 to only prefill the prompt.
      min_tokens: Tokens of the output before a stop token is allowed.
      stop_token_ids: Tokens that end the output; the stop token is emitted as the last.
      logit_bias: Added to the logits, by token.
      logprobs: Number of top logprobs per output token; None for no logprobs.
      prompt_logprobs: Number of top logprobs per prompt token except the first; None for no prompt
        logprobs.
      max_draft_tokens: Maximum draft nodes per step; None for the shape's limit.
      traces: True to add a step trace to its events.
      grammar: Grammar of the output, see `shared.text.grammar`; None without one.
      lora: Name of the LoRA adapter; empty for the base model.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed32: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_draft_tokens: int | None = None
    traces: bool = False
    grammar: str | None = None
    lora: str = ""

    @property
    def has_penalties(self) -> bool:
        """True if token counts affect its sampling."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


class CacheNamespace(NamedTuple):
    """Namespace of cached prefixes, which requests of other namespaces never find.

    Attributes:
      tenant: Tenant.
      adapter, version: Name and version of the LoRA adapter; empty for the base model.
    """

    tenant: str
    adapter: str = ""
    version: str = ""


class AdapterVersion(NamedTuple):
    """A LoRA adapter: its name, and the digest of its files."""

    name: str
    version: str


class StepTrace(NamedTuple):
    """Trace of one step for one request. Node 0 of a draft tree, its root, is the newest token.

    Attributes:
      number: Number of the step since the engine's start, shared by the requests of a step.
      source: Source of its tokens, one of `SOURCES`.
      num_rows: Requests in the step.
      at_ms: Time of its result since the engine received the request.
      host_ms: Time from submission to result; with overlap it includes the previous step.
      device_ms: Device time; None if unknown.
      drafts: Tokens of nodes 1, 2, ... of the verified tree; empty without one.
      parents: Parent of each node.
      path: Accepted nodes, from the root on; the output may end earlier.
      origins: Source of each node: `DRAFT`, `NGRAM` or `CORPUS`. A node of the drafter counts as
        `DRAFT`, whether or not n-gram drafts contain it too.
    """

    number: int
    source: str
    num_rows: int
    at_ms: float
    host_ms: float
    device_ms: float | None
    drafts: list[int]
    parents: list[int]
    path: list[int]
    origins: list[str]


PREFILL, PLAIN, DRAFT, NGRAM, MERGED = SOURCES = ("prefill", "plain", "draft", "ngram", "merged")
"""Source of a step's tokens: a prefill, a plain step, the device's drafter, n-grams, or both."""

CORPUS = "corpus"
"""Source of a node from an external corpus."""


class Event(NamedTuple):
    """Result of one step for one request.

    Attributes:
      request_id: The request.
      tokens: New tokens, truncated at the end of the output.
      accepted: Accepted draft tokens of the decode step before truncation (0 for a plain step);
        None if it is not a decode step (the prefill's token, a failed row).
      finish_reason: Set in the request's last event.
      error: One sentence; set with `FinishReason.ERROR` and `FinishReason.REFUSED`.
      logprobs: Per token: its logprob and the top (id, logprob) pairs; None unless requested.
      cached_tokens: Prompt tokens found in the prefix cache.
      step: Step trace; None unless requested.
      scores: Prompt logprobs from the second token on, in the first event with tokens or the last;
        None unless requested.
    """

    request_id: int
    tokens: list[int]
    accepted: int | None
    finish_reason: FinishReason | None
    error: str | None
    logprobs: list[tuple[float, list[tuple[int, float]]]] | None
    cached_tokens: int = 0
    step: StepTrace | None = None
    scores: PromptLogprobs | None = None


@dataclass(eq=False, kw_only=True)
class Request:
    """One choice of one prompt in the engine.

    Only its own methods change its output, slot and finish reason; engine, scheduler and
    controllers read them. Three counters summarise the steps in flight, so that the host can plan
    ahead before results are known.

    Attributes:
      request_id: Name of the request, unique in the engine.
      prompt: Prompt tokens.
      sampling: Sampling parameters.
      tenant: Tenant, which isolates its cached prefixes and n-grams from other tenants.
      priority: Lower values receive a slot first and are preempted last.
      constraint: Grammar state; None without a grammar.
      images: Images of the prompt, in order; each has an image token per row of its embeddings.
      mrope: M-RoPE positions of its prompt; None without images.
      adapter: LoRA adapter; None for the base model.
      adapter_slot: Adapter slot that it holds; 0 for none.
      num_overtaken: Requests that overtook it while it waits for an adapter slot.
      arrival: Number in the order of arrival.
      began: Time of creation, by the monotonic clock.
      output: Tokens committed so far.
      slot: Slot on the device; 0 if it has none.
      context: Tokens of prompt and output when it received its slot.
      prefill_length: Tokens to prefill: the context without a last token that is already the
        newest.
      first_position: Start of its first chunk: the length of its cached prefix.
      draft_from: First position of the cached prefix with complete draft KV.
      restores: Snapshot of the recurrent state at `first_position`; 0 for none.
      num_counted: Tokens up to and including the first of its prefill that are in the token counts.
      cached_tokens: Cached tokens when it first received a slot; None before that.
      num_scored: Prompt tokens, from the second on, whose logprobs it has received.
      prefilled: Tokens of the context that are on the device or submitted.
      in_flight: Submitted steps with a row of it whose results are not processed.
      max_in_flight_tokens, min_in_flight_tokens: Maximum and minimum tokens that these steps add.
      finish_reason: Set when it ended; its rows in flight are stale then.
    """

    request_id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    tenant: str = ""
    priority: int = 0
    constraint: GrammarState | None = None
    images: tuple[PromptImage, ...] = ()
    mrope: MropePositions | None = None
    adapter: AdapterVersion | None = None
    adapter_slot: int = 0
    num_overtaken: int = 0
    arrival: int = 0
    began: float = field(default_factory=time.monotonic)
    output: list[int] = field(default_factory=list)
    slot: int = 0
    context: Int32[np.ndarray, " T"] = field(default_factory=lambda: np.zeros(0, np.int32))
    prefill_length: int = 0
    first_position: int = 0
    draft_from: int = 0
    restores: int = 0
    num_counted: int = 0
    cached_tokens: int | None = None
    num_scored: int = 0
    prefilled: int = 0
    in_flight: int = 0
    max_in_flight_tokens: int = 0
    min_in_flight_tokens: int = 0
    finish_reason: FinishReason | None = None
    _scores: list[PromptLogprobs] = field(default_factory=list)

    @property
    def namespace(self) -> CacheNamespace:
        """Namespace of its cached prefixes."""
        if self.adapter is None:
            return CacheNamespace(self.tenant)
        return CacheNamespace(self.tenant, self.adapter.name, self.adapter.version)

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def max_length(self) -> int:
        """Maximum tokens of prompt and output."""
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def max_reserved_length(self) -> int:
        """Maximum length once all steps in flight have ended."""
        return self.length + self.max_in_flight_tokens

    @property
    def ends_in_newest(self) -> bool:
        """True if the last token of prompt and output is the device's newest token from the start.

        A decode step then samples the next token, not the prefill: the prefill would sample an
        output token again, and it takes no masks for the first token of a structured output.
        """
        return bool(self.output) or self.constraint is not None

    @property
    def wants_scores(self) -> bool:
        """True if requested prompt logprobs are still missing."""
        return self.sampling.prompt_logprobs is not None and self.num_scored < len(self.prompt) - 1

    @property
    def max_cached_tokens(self) -> int:
        """Maximum tokens of a cached prefix.

        At least one token is prefilled, because the next one is sampled from its row. A prompt
        token's logprob comes from the row before it, so that row must be prefilled if logprobs are
        requested.
        """
        most = self.length - self.ends_in_newest - 1
        return min(most, self.num_scored) if self.wants_scores else most

    @property
    def decodes(self) -> bool:
        """True if its prefill was submitted entirely."""
        return self.slot > 0 and self.prefilled == self.prefill_length

    @property
    def wants_step(self) -> bool:
        """True if it may need more tokens than the steps in flight are certain to add."""
        return len(self.output) + self.min_in_flight_tokens < self.sampling.max_tokens

    @property
    def has_no_step_in_flight(self) -> bool:
        """True if no step is in flight, so that its tokens are known."""
        return not self.in_flight

    @property
    def fault(self) -> str | None:
        """Reason why its grammar cannot continue; None if it can, or without a grammar."""
        return None if self.constraint is None else self.constraint.fault

    @property
    def count_length(self) -> int:
        """Tokens that must be counted before its prefill, which counts from its second token on."""
        return self.first_position + 1 if self.first_position and self.sampling.has_penalties else 0

    def tokens(self) -> Int32[np.ndarray, " T"]:
        """Returns prompt and output so far."""
        if not len(self.context):
            self.context = np.array(self.prompt, np.int32)
        later = self.output[len(self.context) - len(self.prompt) :]
        if not later:
            return self.context
        return np.concatenate([self.context, np.array(later, np.int32)])

    def assign_slot(
        self, slot: int, first_position: int = 0, draft_from: int = 0, restores: int = 0
    ) -> None:
        """Assigns a slot, in which the prefill starts.

        Args:
          slot: The slot.
          first_position: Cached tokens in the slot's pages.
          draft_from, restores: See `Request`.

        Raises:
          ValueError: Nothing would remain to prefill; a request starts with its first chunk.
        """
        self.slot = slot
        self.context = self.tokens()
        self.prefill_length = len(self.context) - self.ends_in_newest
        if not 0 <= first_position < self.prefill_length:
            raise ValueError(
                f"first_position must be in 0..{self.prefill_length - 1}, got {first_position}"
            )
        self.first_position = self.prefilled = first_position
        self.draft_from, self.restores, self.num_counted = draft_from, restores, 0
        if self.cached_tokens is None:
            self.cached_tokens = first_position

    def prefill(self, end: int) -> None:
        """Records that the context up to position `finish` is submitted."""
        self.prefilled = end

    def score(self, first: int, scores: PromptLogprobs) -> bool:
        """Stores the logprobs of the tokens after positions `first` and following.

        After a preemption some of them arrive again.

        Returns:
          False if new ones are not finite.
        """
        assert first <= self.num_scored, "prompt logprobs have a gap"
        new = slice(self.num_scored - first, len(self.prompt) - 1 - first)
        chosen, ranks, *best = (part[new] for part in scores)
        new_scores = PromptLogprobs(
            chosen, ranks, *(part[:, : self.sampling.prompt_logprobs] for part in best)
        )
        self._scores.append(new_scores)
        self.num_scored += len(new_scores.chosen)
        return bool(np.isfinite(new_scores.chosen).all())

    def take_scores(self) -> PromptLogprobs | None:
        """Returns and clears all stored prompt logprobs."""
        parts, self._scores = self._scores, []
        return PromptLogprobs(*map(np.concatenate, zip(*parts, strict=True))) if parts else None

    def preempt(self) -> None:
        """Removes its slot (preemption); the output stays."""
        self.slot = 0

    def step_submitted(self, max_tokens: int) -> None:
        """Records a submitted step that adds 1..`max_tokens` tokens, or none if that is 0."""
        self.in_flight += 1
        self.max_in_flight_tokens += max_tokens
        self.min_in_flight_tokens += min(max_tokens, 1)

    def step_finished(self, max_tokens: int) -> None:
        """Reverts `step_submitted` for the oldest step in flight."""
        self.in_flight -= 1
        self.max_in_flight_tokens -= max_tokens
        self.min_in_flight_tokens -= min(max_tokens, 1)

    def append_tokens(self, tokens: list[int]) -> int:
        """Appends tokens up to the end of the output, and sets the finish reason there.

        Returns:
          The number of tokens that belong to the output.
        """
        if not self.sampling.max_tokens:
            self.finish(FinishReason.LENGTH)
            return 0
        for count, token in enumerate(tokens, start=1):
            is_stop = token in self.sampling.stop_token_ids
            if not (is_stop or self.constraint is None or self.constraint.take(token)):
                is_refused = self.constraint.fault in OF_THE_REQUEST
                self.finish(FinishReason.REFUSED if is_refused else FinishReason.ERROR)
                return count - 1
            self.output.append(token)
            if is_stop or (self.constraint is not None and self.constraint.is_terminated):
                self.finish(FinishReason.STOP)
            elif len(self.output) == self.sampling.max_tokens:
                self.finish(FinishReason.LENGTH)
            if self.finish_reason is not None:
                return count
        return len(tokens)

    def truncate(self, num_tokens: int) -> list[int]:
        """Truncates its output to `num_tokens` tokens, and returns the rest."""
        late = self.output[num_tokens:]
        del self.output[num_tokens:]
        return late

    def finish(self, reason: FinishReason) -> None:
        """Sets the finish reason, exactly once."""
        assert self.finish_reason is None, f"request {self.request_id} ended as {reason} too"
        self.finish_reason = reason


class InvalidRequestError(ValueError):
    """A request is invalid or unsupported; the message names the field.

    Attributes:
      field: Field at fault, as named in the message.
      code: Error code for programs, or None.
    """

    def __init__(self, field: str, reason: str, code: str | None = None) -> None:
        super().__init__(reason)
        self.field = field
        self.code = code
