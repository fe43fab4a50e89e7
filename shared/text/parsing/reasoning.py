"""Reasoning parsers: separate reasoning from the content."""

from __future__ import annotations

from shared.text.parsing.output_parser import OutputBuilder, ParserStep, ReadCall, TextCursor
from shared.text.reasoning_formats import ALWAYS_OPEN, REASONING_FORMATS, ReasoningFormat


def read_reasoning(
    source: TextCursor,
    output: OutputBuilder,
    tags: ReasoningFormat,
    is_open: bool,
    openings: tuple[str, ...],
    read_call: ReadCall,
) -> ParserStep[None]:
    """Parses reasoning at the start of a text; the rest of the text is content.

    Only the start of a text can be reasoning, so the content may mention the tags. White space
    next to the tags belongs to them. A complete call within the reasoning ends it, because models
    that call in the middle of a thought do not close it. A tag without a call is reasoning.

    Args:
      source: Reads the text.
      output: Receives reasoning and calls.
      tags: Delimiters of the reasoning.
      is_open: The text begins within the reasoning; an opening tag may follow all the same.
      openings: Tags of calls; none if only the content can have calls.
      read_call: Parses calls after a tag.
    """
    if not (yield from source.expect(tags.begin)) and not is_open:
        return
    yield from source.skip_space()
    output.is_thinking = True
    while lead := (yield from source.up_to((tags.end, *openings), output)):
        if lead.endswith(tags.end):
            output.is_thinking = False
            yield from source.skip_space()
            return
        if (yield from read_call(source, output, lead)):
            yield from _read_more_calls(source, output, tags.end, openings, read_call)
            return


def _read_more_calls(
    source: TextCursor,
    output: OutputBuilder,
    end: str,
    openings: tuple[str, ...],
    read_call: ReadCall,
) -> ParserStep[None]:
    """Parses further calls after a call within the reasoning, and then the closing tag."""
    while lead := (yield from source.expect_any(openings)):
        if not (yield from read_call(source, output, lead)):
            return
    if (yield from source.expect(end)):
        yield from source.skip_space()


def is_open_after(prompt: str, name: str, begun: str = "") -> bool | None:
    """Returns True if an output begins in reasoning; None if its text decides.

    Args:
      prompt: Output of the chat template. Templates of reasoning models open the reasoning at its
        end, or close it there if the request disables reasoning.
      name: Name of the reasoning parser.
      begun: Start of the output, at the end of the prompt.
    """
    tags = REASONING_FORMATS[name]
    if begun.strip():
        return _is_open_within(prompt.rstrip(), begun.strip(), tags) or None
    end = prompt.rstrip()
    return end.endswith(tags.begin) or (name == ALWAYS_OPEN and not end.endswith(tags.end))


def _is_open_within(prompt: str, begun: str, tags: ReasoningFormat) -> bool:
    """Returns True if the last tag before or at the start of the output opens reasoning."""
    opened, closed = begun.rfind(tags.begin), begun.rfind(tags.end)
    if opened == closed:  # both are absent
        return prompt.removesuffix(begun).rstrip().endswith(tags.begin)
    return opened > closed


def thinking_after(prompt: str, name: str, begun: str = "") -> str | None:
    """Returns the key of the grammar's prefix if an output begins or may begin in reasoning.

    Args: same as for `is_open_after`.
    """
    tags, is_open = REASONING_FORMATS[name], is_open_after(prompt, name, begun)
    if is_open:
        return tags.lead("open")
    return None if is_open is None or prompt.rstrip().endswith(tags.end) else tags.lead("maybe")
