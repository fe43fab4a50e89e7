"""Formats of reasoning: delimiters that separate it from the content of an output."""

from __future__ import annotations

from dataclasses import dataclass

from shared.text.delimiters import CHANNEL_MARKS, CLOSE, OPEN, SEPARATOR, THINK, THINK_END

ALWAYS_OPEN = "deepseek-r1"
"""Parser of models that begin their output within reasoning, without an opening tag."""


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """Delimiters of reasoning.

    Attributes:
      begin, end: Texts around the reasoning.
      marks: Delimiters that a tokenizer may have as special tokens and the parser reads.
      content_begins, content_ends: Texts around the content, which are no part of it.
      source: Text of every chat template with this reasoning; "": `begin`.
      has_channels: The output is a list of messages, each in a channel, such as that of reasoning.
    """

    begin: str
    end: str
    marks: tuple[str, ...]
    content_begins: tuple[str, ...] = ()
    content_ends: tuple[str, ...] = ()
    source: str = ""
    has_channels: bool = False

    @property
    def content_tags(self) -> tuple[str, ...]:
        """Texts around the content."""
        return self.content_begins + self.content_ends

    def lead(self, state: str) -> str:
        """Returns the key of the grammar's prefix for a state, "open" or "maybe"."""
        return state if self.begin == THINK else f"{state} {self.begin}"


THINKING = ReasoningFormat(begin=THINK, end=THINK_END, marks=(THINK, THINK_END))
HARMONY = ReasoningFormat(
    begin="<|channel|>analysis<|message|>", end="<|end|>", marks=CHANNEL_MARKS, has_channels=True
)
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "qwen3": THINKING,
    ALWAYS_OPEN: THINKING,
    "mistral": ReasoningFormat(begin="[THINK]", end="[/THINK]", marks=("[THINK]", "[/THINK]")),
    "gemma4": ReasoningFormat(
        begin="<|channel>thought", end="<channel|>", marks=("<|channel>", "<channel|>")
    ),
    "harmony": HARMONY,
    "cohere": ReasoningFormat(
        begin="<|START_THINKING|>",
        end="<|END_THINKING|>",
        marks=(
            *("<|START_THINKING|>", "<|END_THINKING|>"),
            *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        ),
        content_begins=("<|START_RESPONSE|>", "<|START_TEXT|>"),
        content_ends=("<|END_RESPONSE|>", "<|END_TEXT|>"),
    ),
    "kimi_k3": ReasoningFormat(
        begin=f"{OPEN}think{SEPARATOR}",
        end=f"{CLOSE}think{SEPARATOR}",
        marks=(OPEN, CLOSE, SEPARATOR),
        content_begins=(f"{OPEN}response{SEPARATOR}",),
        content_ends=(f"{CLOSE}response{SEPARATOR}", f"{CLOSE}message{SEPARATOR}"),
        source="open_tag('think')",
    ),
    "hy3": ReasoningFormat(
        begin="<think:opensource>",
        end="</think:opensource>",
        marks=("<think:opensource>", "</think:opensource>"),
        source="'<think{}>'",
    ),
}
"""Formats by their name, the value of `--reasoning-parser`."""
