"""Output of one request: its choices, token counts and step trace."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field, replace

from shared.engine.request import Event
from shared.server.completions.choice import Choice, ChoiceUpdate, Speculation
from shared.server.completions.logprobs import TokenNames
from shared.server.completions.traces import TraceRecorder, Traces, step_json


@dataclass
class GenerationOutput:
    """Output of all choices of a request, the same for every API.

    Attributes:
      id_prefix: Start of the response id.
      model: Served name of the model.
      num_prompt_tokens: Tokens of all prompts, each counted once.
      num_image_tokens: Image tokens among them.
      choices: All choices, prompt by prompt.
      choices_of_prompt: Number of choices per prompt.
      names: Text of single tokens in logprobs.
      ignored: Request fields without effect.
      trace: Step trace of the request; None if not requested.
      created: Unix time in seconds.
    """

    id_prefix: str
    model: str
    num_prompt_tokens: int
    num_image_tokens: int
    choices: list[Choice]
    choices_of_prompt: int
    names: TokenNames
    ignored: tuple[str, ...] = ()
    trace: TraceRecorder | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    _id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _num_ended: int = 0

    @property
    def name(self) -> str:
        """The `id` of the response."""
        return self.id_prefix + self._id

    @property
    def ended(self) -> bool:
        """True if every choice has ended."""
        return self._num_ended == len(self.choices)

    def take(self, index: int, event: Event) -> ChoiceUpdate:
        """Adds an event to a choice that has not ended."""
        piece = self.choices[index].take(event)
        self._num_ended += piece.finish_reason is not None
        if self.trace is None or event.step is None:
            return piece
        step = step_json(event.step, piece.tokens, piece.texts, self.names)
        self.trace.add(index, step, piece.finish_reason)
        return replace(piece, step=step)

    def close(self, reason: str) -> None:
        """Sets the finish reason of unfinished choices in the trace."""
        if self.trace is not None:
            self.trace.end(reason)

    def follow(self, traces: Traces, drafter: str | None) -> None:
        """Starts the step trace of the request in the store."""
        head = {
            "created": self.created,
            "model": self.model,
            "speculative_algorithm": drafter,
        }
        self.trace = traces.open(self.name, head, len(self.choices))

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(len(choice.tokens) for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Cached tokens of all prompts; of a prompt with several choices, those of the first."""
        return sum(choice.cached_tokens for choice in self.choices[:: self.choices_of_prompt])

    @property
    def speculation(self) -> Speculation:
        """Acceptance counts of all choices."""
        total = Speculation.empty(len(self.choices[0].speculation.histogram) - 1)
        for choice in self.choices:
            total.add(choice.speculation)
        return total
