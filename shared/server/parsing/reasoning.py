"""Reasoning parsers: separate reasoning from the content."""

from __future__ import annotations

from shared.server.parsing.output_parser import ParserStep, ReadCall, Said, TextCursor
from shared.text.delimiters import CALL, THINK, THINK_END

ALWAYS_OPEN = "deepseek-r1"
"""The parser of models that think from the first token on, without an opening tag."""


def read_reasoning(
    source: TextCursor, said: Said, is_open: bool, read_call: ReadCall | None
) -> ParserStep[None]:
    """Reads the reasoning with which a text begins, if it does; what is left is the answer.

    Only the beginning of a text can be reasoning, so an answer may speak of the tags. The white
    space beside them belongs to them. A whole call within the reasoning ends it, as models that
    call in the middle of a thought do not close it; a mark that no call follows is reasoning.

    Args:
      is_open: The text begins within the reasoning; it may open it once more.
      read_call: Reads a call behind `<tool_call>`; None: calls stand in the answer alone.
    """
    if not (yield from source.expect(THINK)) and not is_open:
        return
    yield from source.skip_space()
    said.is_thinking = True
    marks = (THINK_END,) if read_call is None else (THINK_END, CALL)
    while lead := (yield from source.up_to(marks, said)):
        if read_call is None or lead.endswith(THINK_END):
            said.is_thinking = False
            yield from source.skip_space()
            return
        if (yield from read_call(source, said, lead)):
            yield from _read_more_calls(source, said, read_call)
            return


def _read_more_calls(source: TextCursor, said: Said, read_call: ReadCall) -> ParserStep[None]:
    """Reads what may follow a call within the reasoning: more calls, and then its end."""
    while lead := (yield from source.expect(CALL)):
        if not (yield from read_call(source, said, lead)):
            return
    if (yield from source.expect(THINK_END)):
        yield from source.skip_space()


def is_open_after(prompt: str, name: str, begun: str = "") -> bool | None:
    """Returns True if an output begins in reasoning; None if its text decides.

    Args:
      prompt: What the chat template wrote. Templates of models that think open the reasoning at
        its end, or close it there where the request asks for none.
      name: Of the reasoning parser.
      begun: What the prompt has of the answer already, at its end.
    """
    if begun.strip():
        return _is_open_within(prompt.rstrip(), begun.strip()) or None
    end = prompt.rstrip()
    return end.endswith(THINK) or (name == ALWAYS_OPEN and not end.endswith(THINK_END))


def _is_open_within(prompt: str, begun: str) -> bool:
    """Returns True if the last tag before or at the start of the output opens reasoning."""
    opened, closed = begun.rfind(THINK), begun.rfind(THINK_END)
    if opened == closed:  # there is neither
        return prompt.removesuffix(begun).rstrip().endswith(THINK)
    return opened > closed


def thinking_after(prompt: str, name: str, begun: str = "") -> str | None:
    """Returns "open" or "maybe" if an output begins in reasoning; None without a parser.

    Args: as of `is_open_after`.
    """
    is_open = is_open_after(prompt, name, begun)
    if is_open:
        return "open"
    return None if is_open is None or prompt.rstrip().endswith(THINK_END) else "maybe"
