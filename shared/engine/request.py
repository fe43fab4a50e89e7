"""A request: what was asked, what it has, and where it stands."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from shared.engine.grammar import Constraint
from shared.engine.pictures import Picture, Sight
from shared.spec.logprobs import Scores
from shared.text.grammar_faults import OF_THE_REQUEST


class FinishReason(Enum):
    """Why a request ended, in OpenAI's words where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REFUSED = "refused"
    """What it asks turned out to be more than is served."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Attributes:
      seed32: Seed of the noise (`shared.spec.noise.derive_seed` of the request's seed).
      max_tokens: Most tokens of the output; 0: the prompt is read, and that is all.
      min_tokens: No stop token is chosen before.
      stop_token_ids: Tokens that end the text; the token itself is emitted as the last.
      logit_bias: Added to the logits, by token.
      logprobs: How many of the best tokens come with each token, or None for no logprobs.
      prompt_logprobs: How many of the best tokens come with each token of the prompt but its first,
        or None for no logprobs of the prompt.
      max_draft_tokens: Most drafted nodes per step, or None for all that the step has.
      traces: Whether its events tell of the steps that made them.
      grammar: What the text must follow, as `shared.text.grammar` reads it; None: nothing.
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

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens of its text so far count."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


class StepTrace(NamedTuple):
    """What one step did for one request. Node 0 of a draft tree, its root, is the newest token.

    Attributes:
      number: Of the step, counted from the engine's start; requests of one step share it.
      source: Where its tokens come from, one of `SOURCES`.
      num_rows: Requests in the step.
      at_ms: When its result was there, since the engine has had the request.
      host_ms: From its submission to that; with overlap the step before is part of it.
      device_ms: Time on the device; None where it is unknown.
      drafts: Tokens of nodes 1, 2, ... of the tree that was verified; none where nothing was.
      parents: The node above each of them.
      path: The nodes that were accepted, from the root on; the text may end before.
      origins: Where each of them comes from: `DRAFT`, `NGRAM` or `CORPUS`. What the drafter grew is
        its own, whether copies of seen text have it too or not.
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
"""Of a step's tokens: a prompt, a step that drafts nothing, the device's drafter, n-grams, both."""

CORPUS = "corpus"
"""Of a node that comes from an external corpus."""


class Event(NamedTuple):
    """What one step gave one request.

    Attributes:
      request_id: The request.
      tokens: New tokens, trimmed to where the text ends.
      accepted: Drafts that the decode step accepted, before trimming (a plain step accepts 0); None
        for what is no decode step (the prefill's token, a failed row).
      finish_reason: Set in the request's last event.
      error: One sentence; set with `FinishReason.ERROR` and `FinishReason.REFUSED`.
      logprobs: Per token: its logprob and the best (id, logprob) pairs; None unless asked for.
      cached_tokens: Tokens of the prompt that the prefix cache had.
      step: What the step did; None unless asked for.
      scores: Of the tokens of the prompt from the second on, in the first event with tokens or the
        last; None unless asked for.
    """

    request_id: int
    tokens: list[int]
    accepted: int | None
    finish_reason: FinishReason | None
    error: str | None
    logprobs: list[tuple[float, list[tuple[int, float]]]] | None
    cached_tokens: int = 0
    step: StepTrace | None = None
    scores: Scores | None = None


@dataclass(eq=False, kw_only=True)
class Request:
    """One choice of one prompt, alive in the engine.

    Its output, slot and end change by its own methods only: the engine, the scheduler and what
    drafts read them.

    The steps in flight are counted in three numbers, so that the host can plan on before it knows
    what they gave.

    Attributes:
      request_id: Name of the request, unique in the engine.
      prompt: Prompt tokens.
      pictures: Those of the prompt, in their order; each has an image token for each of its rows.
      sampling: How its tokens are chosen.
      tenant: Whom it belongs to; what is kept of its text, to draft from or as a cached prefix, no
        other tenant reads.
      priority: Lower ones get a slot first, and give way last.
      constraint: What its grammar allows; None without one.
      sight: How the rows of its prompt turn; None without pictures.
      arrival: Its number in the order of arrival.
      began: When it was made, by the monotonic clock.
      output: Tokens committed so far.
      slot: Slot on the device; 0 while it has none.
      context: Tokens of prompt and output at the time it got its slot.
      prefill_length: Tokens to prefill: the context, but for a last one that is its newest token.
      first_position: Where its first chunk since then begins: behind what it found in the prefix
        cache.
      draft_from: From where on draft KV before that is whole.
      restores: Snapshot of the recurrent state at `first_position`; 0: there is none to restore.
      num_counted: Tokens before that which penalties know of, and the first of the chunk itself.
      cached_tokens: Tokens that it found when it got a slot for the first time; None: it had none.
      num_scored: Tokens of the prompt, from the second on, of which it has had the scores.
      prefilled: Tokens of the context that the device has or was handed since then.
      in_flight: Steps submitted with a row of it and not yet retired.
      most_growth, least_growth: Tokens that these steps may add at most, and add at least.
      finish_reason: Set once it ended; rows of it still in flight are late.
    """

    request_id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    tenant: str = ""
    priority: int = 0
    constraint: Constraint | None = None
    pictures: tuple[Picture, ...] = ()
    sight: Sight | None = None
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
    most_growth: int = 0
    least_growth: int = 0
    finish_reason: FinishReason | None = None
    _scores: list[Scores] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and output that it may reach."""
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def ceiling(self) -> int:
        """Most tokens that it can have by the time every step in flight has ended."""
        return self.length + self.most_growth

    @property
    def ends_in_newest(self) -> bool:
        """Whether the last token of prompt and output is the newest for the device from the start.

        Then a decode chooses the next token, and no prefill: it would choose an output once more,
        and it has no masks for the first token of a text with a grammar.
        """
        return bool(self.output) or self.constraint is not None

    @property
    def wants_scores(self) -> bool:
        """Whether there are tokens of its prompt whose scores it wants and has not had."""
        return self.sampling.prompt_logprobs is not None and self.num_scored < len(self.prompt) - 1

    @property
    def most_found(self) -> int:
        """Most tokens of its context that a slot's pages may hold already when it gets the slot.

        One is left to prefill at least, so that there is a row to choose the next from. A token is
        scored by the row before it, so where scores are wanted that row must be fed.
        """
        most = self.length - self.ends_in_newest - 1
        return min(most, self.num_scored) if self.wants_scores else most

    @property
    def decodes(self) -> bool:
        """Whether its prefill was handed over whole."""
        return self.slot > 0 and self.prefilled == self.prefill_length

    @property
    def wants_step(self) -> bool:
        """Whether it may need more tokens than the steps in flight surely add."""
        return len(self.output) + self.least_growth < self.sampling.max_tokens

    @property
    def is_settled(self) -> bool:
        """Whether all its steps have been retired, so that its tokens are known."""
        return not self.in_flight

    @property
    def fault(self) -> str | None:
        """Why its grammar cannot be followed any further; None: it can, or there is none."""
        return None if self.constraint is None else self.constraint.fault

    @property
    def count_length(self) -> int:
        """Tokens that must be counted before its prefill, which counts from its second token on."""
        return self.first_position + 1 if self.first_position and self.sampling.has_penalties else 0

    def tokens(self) -> Int32[np.ndarray, " T"]:
        """Prompt and output so far."""
        if not len(self.context):
            self.context = np.array(self.prompt, np.int32)
        later = self.output[len(self.context) - len(self.prompt) :]
        if not later:
            return self.context
        return np.concatenate([self.context, np.array(later, np.int32)])

    def place(
        self, slot: int, first_position: int = 0, draft_from: int = 0, restores: int = 0
    ) -> None:
        """Gives it a slot, in which the prefill starts anew.

        Args:
          slot: The slot.
          first_position: Tokens that the slot's pages hold already.
          draft_from, restores: See `Request`.

        Raises:
          ValueError: Nothing would be left to prefill, and a request starts with its first chunk.
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
        """Notes that the context up to position `end` is handed to the device."""
        self.prefilled = end

    def score(self, first: int, scores: Scores) -> bool:
        """Takes the scores of the tokens behind those at position `first` and on.

        A prefill that begins anew gives some of them again.

        Returns:
          Whether those that are new are finite numbers.
        """
        assert first <= self.num_scored, "tokens between are not scored"
        new = slice(self.num_scored - first, len(self.prompt) - 1 - first)
        chosen, ranks, *best = (part[new] for part in scores)
        new_scores = Scores(
            chosen, ranks, *(part[:, : self.sampling.prompt_logprobs] for part in best)
        )
        self._scores.append(new_scores)
        self.num_scored += len(new_scores.chosen)
        return bool(np.isfinite(new_scores.chosen).all())

    def take_scores(self) -> Scores | None:
        """All scores that it has had, once."""
        parts, self._scores = self._scores, []
        return Scores(*map(np.concatenate, zip(*parts, strict=True))) if parts else None

    def displace(self) -> None:
        """Takes its slot away; what it has stays."""
        self.slot = 0

    def launch(self, most_tokens: int) -> None:
        """Notes a step in flight that adds 1..`most_tokens`, or none where that is 0."""
        self.in_flight += 1
        self.most_growth += most_tokens
        self.least_growth += min(most_tokens, 1)

    def land(self, most_tokens: int) -> None:
        """Takes back what `launch` noted for the oldest step in flight."""
        self.in_flight -= 1
        self.most_growth -= most_tokens
        self.least_growth -= min(most_tokens, 1)

    def commit(self, tokens: list[int]) -> int:
        """Appends tokens up to where the text ends, and notes the end.

        Returns:
          How many of the tokens belong to the text.
        """
        if not self.sampling.max_tokens:
            self.end(FinishReason.LENGTH)
            return 0
        for count, token in enumerate(tokens, start=1):
            is_stop = token in self.sampling.stop_token_ids
            if not (is_stop or self.constraint is None or self.constraint.take(token)):
                is_refused = self.constraint.fault in OF_THE_REQUEST
                self.end(FinishReason.REFUSED if is_refused else FinishReason.ERROR)
                return count - 1
            self.output.append(token)
            if is_stop or (self.constraint is not None and self.constraint.is_over):
                self.end(FinishReason.STOP)
            elif len(self.output) == self.sampling.max_tokens:
                self.end(FinishReason.LENGTH)
            if self.finish_reason is not None:
                return count
        return len(tokens)

    def cut(self, num_tokens: int) -> list[int]:
        """Keeps the first `num_tokens` tokens of its output, and returns the others."""
        late = self.output[num_tokens:]
        del self.output[num_tokens:]
        return late

    def end(self, reason: FinishReason) -> None:
        """Notes why it ended; it ends once."""
        assert self.finish_reason is None, f"request {self.request_id} ended as {reason} too"
        self.finish_reason = reason


class Refusal(ValueError):
    """A request that cannot be served; the message is one sentence that names the field.

    Attributes:
      field: The field at fault, as the sentence names it.
      code: A word for programs, or None.
    """

    def __init__(self, field: str, reason: str, code: str | None = None) -> None:
        super().__init__(reason)
        self.field = field
        self.code = code
