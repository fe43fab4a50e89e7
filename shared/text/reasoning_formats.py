"""Formats of reasoning: delimiters that separate it from the content of an output."""

from __future__ import annotations

from dataclasses import dataclass

from shared.text.delimiters import CHANNEL_MARKS, THINK, THINK_END

ALWAYS_OPEN = "deepseek-r1"
"""Parser of models that begin their output within reasoning, without an opening tag."""


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """Delimiters of reasoning.

    Attributes:
      begin, end: Texts around the reasoning.
      marks: Delimiters that a tokenizer may have as special tokens and the parser reads.
      has_channels: The output is a list of messages, each in a channel, such as that of reasoning.
    """

    begin: str
    end: str
    marks: tuple[str, ...]
    has_channels: bool = False

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
}
"""Formats by their name, the value of `--reasoning-parser`."""
