"""Deltas of a choice: parser output, stop strings, and chunks of the response."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from shared.engine.request import Event, FinishReason
from shared.server.completions.choice import Choice, ChoiceUpdate, Speculation, StopStringMatcher
from shared.server.completions.logprobs import TokenNames
from shared.server.completions.openai_serializer import ChatForm, OpenAISerializer
from shared.server.completions.output import GenerationOutput
from shared.server.protocol.openai_types import ChatRequest
from shared.text.parsing.delta import Delta, OutputParser, PassthroughParser, ToolCallDelta
from shared.text.tokenizer import Detokenizer, Tokenizer
from tests.support.http_fixtures import byte_tokenizer

BYTES = Tokenizer(byte_tokenizer(), None, {})
TEXT = "<let me see>So: {get}{4}{2}."


class TagParser:
    """Parser of `<reasoning>`, a call's `{name}`, its `{argument}`s, and text."""

    def __init__(self) -> None:
        self._held, self._calls = "", 0

    def push(self, text: str) -> Delta:
        self._held, delta = self._held + text, Delta()
        while found := re.match(r"<(.*?)>|\{(.*?)\}|([^<{]+)", self._held):
            self._held = self._held[found.end() :]
            delta += self._delta(found)
        return delta

    def flush(self, was_cut: bool) -> Delta:
        held, self._held = self._held, ""
        return Delta(held)

    @property
    def has_whole_calls(self) -> bool:
        return self._calls > 0

    num_malformed_calls = 0

    def _delta(self, found: re.Match[str]) -> Delta:
        reasoning, call, text = found.groups()
        if call is None:
            return Delta(text or "", reasoning or "")
        first, self._calls = not self._calls, self._calls + 1
        part = ToolCallDelta(0, "call-0", call, "") if first else ToolCallDelta(0, "", "", call)
        return Delta(tool_calls=(part,))


REQUEST = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}]})


def new_output(parsers: list[OutputParser], stops: tuple[str, ...] = ()) -> GenerationOutput:
    return GenerationOutput(
        id_prefix="",
        model="m",
        num_prompt_tokens=1,
        num_image_tokens=0,
        choices=[
            Choice(
                Detokenizer(BYTES, []),
                StopStringMatcher(stops),
                parser,
                0,
                Speculation.empty(3),
                "",
                (),
            )
            for parser in parsers
        ],
        choices_of_prompt=1,
        names=TokenNames(BYTES),
    )


def chat_of(output: GenerationOutput) -> OpenAISerializer:
    return OpenAISerializer(ChatForm(), REQUEST.to_generation(), output)


def events(text: str, size: int) -> Iterator[Event]:
    tokens = list(text.encode())
    for begin in range(0, len(tokens), size):
        reason = FinishReason.LENGTH if begin + size >= len(tokens) else None
        yield Event(1, tokens[begin : begin + size], None, reason, None, None)


def total(pieces: list[ChoiceUpdate]) -> Delta:
    return sum((piece.delta for piece in pieces), Delta())


@pytest.mark.parametrize("size", [1, 3, 100])
def test_chat_response_separates_reasoning_content_and_calls(size):
    output = new_output([TagParser()])
    pieces = [output.take(0, event) for event in events(TEXT, size)]
    message = chat_of(output).whole([total(pieces)])["choices"][0]["message"]
    function = {"name": "get", "arguments": "42"}
    assert message == {
        "role": "assistant",
        "content": "So: .",
        "reasoning_content": "let me see",
        "tool_calls": [{"id": "call-0", "type": "function", "function": function}],
    }


def test_chat_stream_sends_tool_call_deltas():
    output = new_output([TagParser()])
    pieces = [output.take(0, event) for event in events(TEXT, 1)]
    serializer = chat_of(output)
    shown = [event.data for piece in pieces for event in serializer.update(0, piece)]
    parts = [c["tool_calls"][0] for c in deltas(shown) if "tool_calls" in c]
    begun = {"name": "get", "arguments": ""}
    assert parts == [
        {"index": 0, "id": "call-0", "type": "function", "function": begun},
        {"index": 0, "function": {"arguments": "4"}},
        {"index": 0, "function": {"arguments": "2"}},
    ]
    assert "".join(c.get("reasoning_content", "") for c in deltas(shown)) == "let me see"
    assert [c for c in deltas(shown) if "role" in c] == deltas(shown)[:1]


def deltas(chunks: list[dict]) -> list[dict]:
    return [chunk["choices"][0]["delta"] for chunk in chunks]


def test_parser_held_text_is_sent_at_end():
    output = new_output([TagParser()])
    pieces = [output.take(0, event) for event in events("a<b", 1)]
    assert [piece.delta.text for piece in pieces] == ["a", "", "<b"]


def test_stop_string_truncates_parser_input():
    output = new_output([TagParser()], stops=("{get}",))
    pieces = [output.take(0, event) for event in events(TEXT, 100)]
    assert total(pieces) == Delta("So: ", "let me see")
    assert pieces[-1].finish_reason == "stop"


def test_passthrough_parser_omits_reasoning_and_tool_fields():
    output = new_output([PassthroughParser()])
    pieces = [output.take(0, event) for event in events(TEXT, 2)]
    message = chat_of(output).whole([total(pieces)])["choices"][0]["message"]
    assert message == {"role": "assistant", "content": TEXT}


def test_delta_sum_merges_calls_by_index():
    one, two = ToolCallDelta(0, "a", "f", "{"), ToolCallDelta(1, "b", "g", "")
    more = Delta(tool_calls=(ToolCallDelta(1, "", "", "[]"), ToolCallDelta(0, "", "", "}")))
    got = Delta(tool_calls=(one,)) + Delta(tool_calls=(two,)) + more
    assert got == Delta(
        tool_calls=(ToolCallDelta(0, "a", "f", "{}"), ToolCallDelta(1, "b", "g", "[]"))
    )
    assert got
    assert not Delta()


class Unwalkable(list):
    """List that supports indexing and raises on iteration."""

    def __iter__(self):
        raise AssertionError("all choices were iterated for one event")


def test_output_ended_without_iterating_choices():
    output = new_output([PassthroughParser() for _ in range(3)])
    output.choices = Unwalkable(output.choices)
    for index in (2, 0, 1):
        assert not output.ended
        for event in events("ab", 1):
            output.take(index, event)
    assert output.ended
