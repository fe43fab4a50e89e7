"""State of one choice: its text, stop strings and acceptance counts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from shared.engine.request import Event, FinishReason
from shared.server.completions.logprobs import PromptText, ScoredToken
from shared.text.parsing.delta import Delta, OutputParser
from shared.text.tokenizer import Detokenizer


@dataclass(frozen=True)
class ChoiceUpdate:
    """Update of a choice by one engine event.

    Attributes:
      delta: Increment of the message; may lag behind the tokens.
      tokens: New tokens, up to the token that ends the text.
      logprobs: Logprobs of the new tokens; empty if not requested.
      finish_reason: "stop", "length" or "tool_calls" in the last update.
      texts: Text that each token added, before stop strings and parsing.
      step: JSON of the step, if a trace is requested.
      prompt: Prompt logprobs in the first update of a choice, if requested.
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
    """Histogram of accepted draft tokens per verify step.

    Attributes:
      histogram: Entry i is the number of steps that accepted i draft tokens; S + 1 entries.
    """

    histogram: list[int]

    @classmethod
    def empty(cls, max_depth: int) -> Speculation:
        """Returns an empty histogram for steps that accept up to `max_depth` draft tokens."""
        return cls([0] * (max_depth + 1))

    def add(self, other: Speculation) -> None:
        """Adds the counts of another choice."""
        self.histogram = [a + b for a, b in zip(self.histogram, other.histogram, strict=True)]

    @property
    def verify_steps(self) -> int:
        """Number of verify steps, including plain steps."""
        return sum(self.histogram)

    @property
    def accept_length(self) -> float:
        """Average tokens per step, including the bonus token; 1 without steps."""
        tokens = sum((i + 1) * count for i, count in enumerate(self.histogram))
        return tokens / self.verify_steps if tokens else 1.0

    def to_json(self) -> dict[str, object]:
        """Returns the `speculative` object of a response."""
        return {
            "verify_steps": self.verify_steps,
            "accept_length": self.accept_length,
            "accept_length_histogram": self.histogram,
        }


class StopStringMatcher:
    """Incremental matcher of stop strings.

    The string that ends first wins, so the result does not depend on chunk borders. `_lengths` has
    for each string the length of its longest prefix that the text ends with (Knuth, Morris and
    Pratt 1977); text of the maximum of these lengths is held back.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._lengths = [0] * len(stops)
        self._held = ""

    def push(self, text: str, armed: bool) -> tuple[str, str | None]:
        """Adds text.

        Args:
          text: The next characters.
          armed: A stop string that ends within `text` ends the output.

        Returns:
          Characters that belong to the output, and the stop string if the output ends with them.
        """
        if not self._stops:
            return text, None
        self._held += text
        for position, char in enumerate(text, start=len(self._held) - len(text)):
            matched = self._advance(char)
            if matched and armed:
                begin = position + 1 - matched
                return self._held[:begin], self._held[begin : position + 1]
        end = len(self._held) - max(self._lengths)
        given, self._held = self._held[:end], self._held[end:]
        return given, None

    def flush(self) -> str:
        """Returns the text that was held back for a possible stop string."""
        given, self._held = self._held, ""
        return given

    def _advance(self, char: str) -> int:
        """Returns the length of the longest stop string that ends with `char`, or 0."""
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
    """Returns for each prefix of `stop` the length of its longest proper prefix-suffix."""
    borders = [0]
    for char in stop[1:]:
        length = borders[-1]
        while length and stop[length] != char:
            length = borders[length - 1]
        borders.append(length + (stop[length] == char))
    return borders


@dataclass
class Choice:
    """Output of one choice, updated by engine events.

    Attributes:
      detokenizer: None if the checkpoint has no tokenizer; the text is then empty.
      stops: Matcher of the request's stop strings.
      parser: Parser of the text before a stop string.
      min_tokens: A stop string that ends earlier is part of the text.
      speculation: Verify steps, up to and including the step that ends the text.
      echo: Echoed prompt, until it is sent; then "".
      stop_ids: Tokens that end the text and are not part of it.
      prompt_text: Tokens and text of the prompt; None without prompt logprobs.
      prompt: Prompt logprobs, from the first event on.
      tokens: All tokens so far.
      logprobs: Logprobs of all tokens; empty if not requested.
      finish_reason: Set at the end.
      stop_string: Stop string that ended the output; None without one.
      num_reasoning_tokens: Tokens before the first content or call, if there is any reasoning.
      cached_tokens: Prompt tokens found in the prefix cache.
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
    stop_string: str | None = None
    num_reasoning_tokens: int = 0
    cached_tokens: int = 0
    _has_reasoning: bool = False
    _has_content: bool = False
    _num_characters: int = 0
    _texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._num_characters = len(self.echo)

    def take(self, event: Event) -> ChoiceUpdate:
        """Adds an event, within which the text may end.

        Tokens, logprobs and text all end with the token that completes a stop string.
        """
        self.cached_tokens = event.cached_tokens
        if event.accepted is not None:
            self.speculation.histogram[event.accepted] += 1
        begin, text, delta = len(self.tokens), "", Delta()
        if self.prompt_text is not None and not begin:
            self.prompt = self.prompt_text.entries(event.scores)
        self._texts = []
        for index, token in enumerate(event.tokens):
            self._note(event, index)
            is_last = index == len(event.tokens) - 1 and event.finish_reason is FinishReason.STOP
            # If a grammar ends the output, its last token is part of the text.
            given, self.stop_string = self._read(token, is_last and token in self.stop_ids)
            text += given
            if self.stop_string is not None:
                self.finish_reason = "stop"
                return self._piece(delta, text, begin)
            if not self._has_content:  # by token, to count those of the reasoning
                delta, text = delta + self._parse(text), ""
        if event.finish_reason:
            text += self._flush()
            self.finish_reason = event.finish_reason.value
        return self._piece(delta, text, begin)

    def _parse(self, text: str) -> Delta:
        """Returns the increment of a text, and counts the tokens of the reasoning."""
        delta = self.parser.push(text)
        if not self._has_content:
            self._has_reasoning |= bool(delta.reasoning)
            self._has_content = bool(delta.text or delta.tool_calls)
            count = len(self.tokens) - self._has_content
            self.num_reasoning_tokens = count if self._has_reasoning else 0
        return delta

    def _piece(self, parsed: Delta, text: str, begin: int) -> ChoiceUpdate:
        """Returns the update from token number `begin`, of parsed and further text."""
        delta = Delta(self.echo) + parsed
        if text:
            delta += self._parse(text)
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

    def _read(self, token: int, is_stop_token: bool) -> tuple[str, str | None]:
        if self.detokenizer is None or is_stop_token:
            self._texts.append("")
            return "", None
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
