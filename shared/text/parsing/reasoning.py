"""Reasoning parsers: separate reasoning from the content."""

from __future__ import annotations

from shared.text.delimiters import THINK, THINK_END
from shared.text.parsing.output_parser import OutputBuilder, ParserStep, ReadCall, TextCursor

ALWAYS_OPEN = "deepseek-r1"
"""Parser of models whose output begins in reasoning without an opening tag."""


def read_reasoning(
    source: TextCursor,
    output: OutputBuilder,
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
      is_open: The text begins within the reasoning; an opening tag may follow all the same.
      openings: Tags of calls; none if only the content can have calls.
      read_call: Parses calls after a tag.
    """
    if not (yield from source.expect(THINK)) and not is_open:
        return
    yield from source.skip_space()
    output.is_thinking = True
    while lead := (yield from source.up_to((THINK_END, *openings), output)):
        if lead.endswith(THINK_END):
            output.is_thinking = False
            yield from source.skip_space()
            return
        if (yield from read_call(source, output, lead)):
            yield from _read_more_calls(source, output, openings, read_call)
            return


def _read_more_calls(
    source: TextCursor, output: OutputBuilder, openings: tuple[str, ...], read_call: ReadCall
) -> ParserStep[None]:
    """Parses further calls after a call within the reasoning, and then the closing tag."""
    while lead := (yield from source.expect_any(openings)):
        if not (yield from read_call(source, output, lead)):
            return
    if (yield from source.expect(THINK_END)):
        yield from source.skip_space()


def is_open_after(prompt: str, name: str, begun: str = "") -> bool | None:
    """Returns True if an output begins in reasoning; None if its text decides.

    Args:
      prompt: Output of the chat template. Templates of reasoning models open the reasoning at its
        end, or close it there if the request disables reasoning.
      name: Name of the reasoning parser.
      begun: Start of the output, at the end of the prompt.
    """
    if begun.strip():
        return _is_open_within(prompt.rstrip(), begun.strip()) or None
    end = prompt.rstrip()
    return end.endswith(THINK) or (name == ALWAYS_OPEN and not end.endswith(THINK_END))


def _is_open_within(prompt: str, begun: str) -> bool:
    """Returns True if the last tag before or at the start of the output opens reasoning."""
    opened, closed = begun.rfind(THINK), begun.rfind(THINK_END)
    if opened == closed:  # both are absent
        return prompt.removesuffix(begun).rstrip().endswith(THINK)
    return opened > closed


def thinking_after(prompt: str, name: str, begun: str = "") -> str | None:
    """Returns "open" or "maybe" if an output begins in reasoning; None without a parser.

    Args: same as for `is_open_after`.
    """
    is_open = is_open_after(prompt, name, begun)
    if is_open:
        return "open"
    return None if is_open is None or prompt.rstrip().endswith(THINK_END) else "maybe"
