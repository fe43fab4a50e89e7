"""Calls written as a function's name between tags, followed by JSON arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shared.text.call_formats.call_format import Call, CallableFunction, to_json
from shared.text.call_formats.json_calls import argument_rules, read_json_arguments
from shared.text.grammar_source import literal
from shared.text.parsing.output_parser import OutputBuilder, ParserStep, TextCursor

MAX_NAME = 256  # characters of a name

SplitName = Callable[[str], tuple[str, str]]
"""Splits the text between the tags into a function's name and the id of the call, or ""."""


@dataclass(frozen=True, kw_only=True)
class NameTags:
    """Texts around the name and the arguments of a call.

    Attributes:
      begin: Text before the name.
      after_name: Text between name and arguments.
      end: Text after the arguments; "": none.
    """

    begin: str
    after_name: str
    end: str

    def rules(self, tools: Sequence[CallableFunction], more: str = "") -> Iterator[str]:
        """Yields rules `n_0`, `n_1`, ... of calls and of their arguments; see `name_rules`."""
        yield from self.name_rules(tools, more)
        yield from argument_rules(tools)

    def name_rules(self, tools: Sequence[CallableFunction], more: str = "") -> Iterator[str]:
        """Yields rules `n_0`, `n_1`, ... of calls; `more` is a rule after the name."""
        after = literal(self.after_name)
        for number, tool in enumerate(tools):
            end = literal(self.end) if self.end else ""
            yield f"n_{number}: {literal(self.begin + tool.name)} {more} {after} a_{number} {end}"

    def write(self, call: Call, more: str = "") -> str:
        """Returns the text of a call."""
        name, arguments = call
        return f"{self.begin}{name}{more}{self.after_name}{to_json(arguments)}{self.end}"


def just_name(text: str) -> tuple[str, str]:
    """Returns a name without an id."""
    return text, ""


def read_named_call(
    source: TextCursor,
    output: OutputBuilder,
    lead: str,
    tags: NameTags,
    split: SplitName = just_name,
) -> ParserStep[bool]:
    """Parses a call after `tags.begin`; see `ReadCall`."""
    source.record()
    text = yield from source.until(tags.after_name, MAX_NAME)
    yield from source.skip_space()
    char = yield from source.next()
    source.put_back(char)
    name, call_id = ("", "") if text is None else split(text)
    if char != "{" or not output.allows_call(name):
        source.give_up_lead(lead, output)
        return False
    source.recorded()
    if not (yield from read_json_arguments(source, output, name, call_id)):
        return False
    if tags.end:
        yield from source.close(tags.end.lstrip(), output)
    return True


def read_section(
    source: TextCursor,
    output: OutputBuilder,
    lead: str,
    tags: NameTags,
    end: str,
    split: SplitName = just_name,
) -> ParserStep[bool]:
    """Parses the calls of a section, each after `tags.begin`, and the section's closing tag."""
    has_call = False
    while begin := (yield from source.expect(tags.begin)):
        if not (yield from read_named_call(source, output, lead + begin, tags, split)):
            return has_call
        has_call, lead = True, ""
    if has_call:
        yield from source.close(end, output, (tags.begin,))
    else:
        source.record()
        source.give_up_lead(lead, output)
    return has_call
