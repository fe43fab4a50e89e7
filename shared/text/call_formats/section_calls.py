"""Calls in a section, each a name between tags with parameters that are written one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.text.call_formats.call_format import Call, CallableFunction, CallFormat, any_of
from shared.text.call_formats.typed_parameters import (
    MAX_NAME,
    ParameterTags,
    parameter_rules,
    read_parameters,
)
from shared.text.grammar_source import literal
from shared.text.parsing.output_parser import OutputBuilder, ParserStep, TextCursor


@dataclass(frozen=True, kw_only=True)
class SectionTags:
    """Texts of a section with calls.

    Attributes:
      begin, end: Texts around all calls.
      call: Text before the name of a call.
      after_name: Text after the name; if there are two, the number of the call is between them.
      call_end: Text after the parameters.
      parameters: Texts of the parameters.
      line: Line break after each of these texts, which a parser does not require; "": none.
    """

    begin: str
    end: str
    call: str
    after_name: tuple[str, ...]
    call_end: str
    parameters: ParameterTags
    line: str = "\n"

    def read_calls(self, source: TextCursor, output: OutputBuilder, lead: str) -> ParserStep[bool]:
        """Parses the calls of a section and its closing tag."""
        has_call = False
        source.record()
        while (yield from source.expect(self.call)):
            name = yield from self._read_name(source)
            arguments = None
            if output.allows_call(name):
                schema = output.tools[name]
                arguments = yield from read_parameters(source, output, schema, self.parameters)
            if arguments is None or not (yield from source.expect(self.call_end)):
                source.give_up_recorded(lead, output, self.parameters.begin)
                return has_call
            output.add_whole_call(name, arguments)
            source.recorded()
            source.record()
            has_call, lead = True, ""
        if not has_call:
            source.give_up_recorded(lead, output, self.parameters.begin)
            return False
        source.recorded()
        yield from source.close(self.end, output, (self.call,))
        return True

    def _read_name(self, source: TextCursor) -> ParserStep[str]:
        parts = []
        for text in self.after_name:
            parts.append((yield from source.until(text, MAX_NAME)) or "")
        name, *numbers = parts
        return name if all(map(str.isdecimal, numbers)) else ""

    def rules(self, tools: Sequence[CallableFunction], many: bool) -> list[str]:
        """Returns the rules of the calls in a section; line breaks are optional."""
        line = f"{literal(self.line)}?" if self.line else ""
        more = "+" if many else ""
        made = [f"inner: {line} call{more} {literal(self.end)}", f"call: {any_of('f', tools)}"]
        after, *numbered = map(literal, self.after_name)
        head = f"{after} {' '.join(f'/[0-9]{{1,4}}/ {text}' for text in numbered)}"
        for number, tool in enumerate(tools):
            begin = f"{literal(self.call + tool.name)} {head} {line}"
            made.append(f"f_{number}: {begin} p_{number} {literal(self.call_end)} {line}")
        return made + parameter_rules(tools, self.parameters)

    def write(self, calls: Sequence[Call]) -> str:
        """Returns the text of calls."""
        written = (self._written(call, str(number)) for number, call in enumerate(calls, 1))
        return f"{self.begin}{self.line}{''.join(written)}{self.end}"

    def _written(self, call: Call, number: str) -> str:
        name, arguments = call
        parameters = "".join(self.parameters.write(key, x) for key, x in arguments.items())
        head = f"{self.call}{name}{number.join(self.after_name)}{self.line}"
        return f"{head}{parameters}{self.call_end}{self.line}"

    def call_format(self, name: str, description: str, marks: tuple[str, ...]) -> CallFormat:
        """Returns the format of calls in this section."""
        return CallFormat(
            name=name,
            description=description,
            markers=(self.begin,),
            openings=(self.begin,),
            marks=marks,
            read_calls=self.read_calls,
            rules=self.rules,
            write=self.write,
        )
