"""State of one choice: its text, stop strings and acceptance counts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from shared.engine.request import Event, FinishReason
from shared.server.completions.logprobs import PromptText, ScoredToken
from shared.server.parsing.delta import Delta, OutputParser
from shared.text.tokenizer import Detokenizer


@dataclass(frozen=True)
class ChoiceUpdate:
    """Update of a choice by one engine event.

    Attributes:
      delta: What it says anew; may lag behind the tokens.
      tokens: New tokens, no further than the one with which the text ends.
      logprobs: Of these tokens; empty where the request did not ask.
      finish_reason: "stop", "length" or "tool_calls" in the last piece.
      texts: What each token added, whatever of it is said; all add up to the whole text.
      step: The step in JSON, where the request asked for its trace.
      prompt: Of the prompt's tokens, in the first piece of a choice that asked; else none.
    """

    delta: Delta
    tokens: list[int]
    logprobs: list[ScoredToken]
    finish_reason: str | None
    texts: list[str] = field(default_factory=list)
    step: dict[str, Any] | None = None
    prompt: list[ScoredToken] = field(default_factory=list)


@dataclass
class Speculation:
    """Counts over verify steps: how many drafts each accepted.

    Attributes:
      histogram: Entry i counts the steps that accepted i drafts; S + 1 entries.
    """

    histogram: list[int]

    @classmethod
    def empty(cls, max_depth: int) -> Speculation:
        """No steps, each of which may accept `max_depth` drafts."""
        return cls([0] * (max_depth + 1))

    def add(self, other: Speculation) -> None:
        """Adds the counts of another choice."""
        self.histogram = [a + b for a, b in zip(self.histogram, other.histogram, strict=True)]

    @property
    def verify_steps(self) -> int:
        """Steps that verified, plain ones too."""
        return sum(self.histogram)

    @property
    def accept_length(self) -> float:
        """Tokens of a step on average, with the bonus token; 1 where there was none."""
        tokens = sum((i + 1) * count for i, count in enumerate(self.histogram))
        return tokens / self.verify_steps if tokens else 1.0

    def to_json(self) -> dict[str, object]:
        """The `speculative` object of a response."""
        return {
            "verify_steps": self.verify_steps,
            "accept_length": self.accept_length,
            "accept_length_histogram": self.histogram,
        }


class StopStringMatcher:
    """Finds stop strings in a text that arrives in pieces, whatever the borders.

    The string whose end comes first wins, so the outcome does not depend on how the text was cut.
    Per string, `_lengths` is how much of its beginning the text now ends with (Knuth, Morris and
    Pratt 1977); the longest of them is held back.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._lengths = [0] * len(stops)
        self._held = ""

    def push(self, text: str, armed: bool) -> tuple[str, bool]:
        """Adds text.

        Args:
          text: The next characters.
          armed: Whether a stop string that ends here ends the text.

        Returns:
          Characters that are certain to belong to the text, and whether it ends with them.
        """
        if not self._stops:
            return text, False
        self._held += text
        for position, char in enumerate(text, start=len(self._held) - len(text)):
            matched = self._advance(char)
            if matched and armed:
                return self._held[: position + 1 - matched], True
        end = len(self._held) - max(self._lengths)
        given, self._held = self._held[:end], self._held[end:]
        return given, False

    def flush(self) -> str:
        """Returns the text that was held back for a possible stop string."""
        given, self._held = self._held, ""
        return given

    def _advance(self, char: str) -> int:
        """Length of the longest stop string that ends with `char`, or 0."""
        longest = 0
        for i, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            length = self._lengths[i]
            while length and stop[length] != char:
                length = borders[length - 1]
            length += stop[length] == char
            if length == len(stop):
                longest = max(longest, length)
                length = borders[length - 1]
            self._lengths[i] = length
        return longest


def _borders(stop: str) -> list[int]:
    """Entry i: the longest proper beginning of `stop[: i + 1]` that is also its end."""
    borders = [0]
    for char in stop[1:]:
        length = borders[-1]
        while length and stop[length] != char:
            length = borders[length - 1]
        borders.append(length + (stop[length] == char))
    return borders


@dataclass
class Choice:
    """Follows the events of one choice.

    Attributes:
      detokenizer: None where the checkpoint has no tokenizer: the text is empty then.
      stops: Finds the request's stop strings.
      parser: Tells what the text up to a stop string is.
      min_tokens: A stop string that ends before is part of the text.
      speculation: Verify steps up to and with the one in which the text ends.
      echo: What it says before its own text; "" once it has.
      stop_ids: Tokens that end the text and are none of it.
      prompt_text: What is told of the prompt's tokens; None where nothing is.
      prompt: Their logprobs, as soon as they are there.
      tokens: All tokens so far.
      logprobs: Of all of them; empty where the request did not ask.
      finish_reason: Set at the end.
      cached_tokens: Tokens of its prompt that the prefix cache had.
    """

    detokenizer: Detokenizer | None
    stops: StopStringMatcher
    parser: OutputParser
    min_tokens: int
    speculation: Speculation
    echo: str
    stop_ids: Collection[int]
    prompt_text: PromptText | None = None
    prompt: list[ScoredToken] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[ScoredToken] = field(default_factory=list)
    finish_reason: str | None = None
    cached_tokens: int = 0
    _num_characters: int = 0
    _texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._num_characters = len(self.echo)

    def take(self, event: Event) -> ChoiceUpdate:
        """Adds an event; the text may end within it.

        Tokens, logprobs and text are cut at the same place: after the token that completes a stop
        string.
        """
        self.cached_tokens = event.cached_tokens
        if event.accepted is not None:
            self.speculation.histogram[event.accepted] += 1
        begin, text = len(self.tokens), ""
        if self.prompt_text is not None and not begin:
            self.prompt = self.prompt_text.entries(event.scores)
        self._texts = []
        for index, token in enumerate(event.tokens):
            self._note(event, index)
            is_last = index == len(event.tokens) - 1 and event.finish_reason is FinishReason.STOP
            # Where a grammar has come to its end, the last token is of the text.
            given, ended = self._read(token, is_last and token in self.stop_ids)
            text += given
            if ended:
                self.finish_reason = "stop"
                return self._piece(text, begin)
        if event.finish_reason:
            text += self._flush()
            self.finish_reason = event.finish_reason.value
        return self._piece(text, begin)

    def _piece(self, text: str, begin: int) -> ChoiceUpdate:
        """Returns the update from token number `begin`."""
        delta = Delta(self.echo) + self.parser.push(text)
        self.echo = ""
        if self.finish_reason:
            delta += self.parser.flush(was_cut=self.finish_reason == "length")
        if self.finish_reason == "stop" and self.parser.has_whole_calls:
            self.finish_reason = "tool_calls"
        new = self.tokens[begin:], self.logprobs[begin:]
        piece = ChoiceUpdate(delta, *new, self.finish_reason, self._texts)
        return piece if begin else replace(piece, prompt=self.prompt)

    def _note(self, event: Event, index: int) -> None:
        token = event.tokens[index]
        self.tokens.append(token)
        if event.logprobs is not None:
            logprob, best = event.logprobs[index]
            self.logprobs.append(ScoredToken(token, logprob, best, self._num_characters))

    def _read(self, token: int, is_stop_token: bool) -> tuple[str, bool]:
        if self.detokenizer is None or is_stop_token:
            self._texts.append("")
            return "", False
        armed = len(self.tokens) >= self.min_tokens
        text = self.detokenizer.push(token)
        self._texts.append(text)
        self._num_characters += len(text)
        return self.stops.push(text, armed)

    def _flush(self) -> str:
        rest = self.detokenizer.flush() if self.detokenizer else ""
        if rest:
            self._texts[-1] += rest
        text, _ = self.stops.push(rest, armed=False)
        return text + self.stops.flush()
