"""Fields of OpenAI's API that a request may name and that are not served, or not every value."""

from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHAT = "completions", "chat"
BOTH = (COMPLETIONS, CHAT)


@dataclass(frozen=True)
class NotServed:
    """One of them.

    Attributes:
      endpoints: Whose field it is; the other one does not know it.
      neutral: Values that ask for nothing, and are taken beside null.
      example: A value that is refused.
      why: Why other values are refused, after the field's name.
      way_out: What to do instead.
    """

    name: str
    endpoints: tuple[str, ...]
    neutral: tuple[Any, ...]
    example: Any
    why: str = "is not supported"
    way_out: str = "leave it out"

    @property
    def reason(self) -> str:
        """Why a request is refused."""
        return f"{self.name} {self.why}"

    def refuses(self, value: Any) -> bool:
        """Whether a value asks for something."""
        if value is None:
            return False
        return not any(type(value) is type(other) and value == other for other in self.neutral)


NOT_SERVED = (
    NotServed("best_of", BOTH, (1,), 3),
    NotServed("metadata", BOTH, ({},), {"team": "a"}),
    NotServed("prediction", BOTH, (), {"type": "content", "content": "text"}),
    NotServed("suffix", (COMPLETIONS,), ("",), "end"),
    NotServed("audio", (CHAT,), (), {"voice": "alloy", "format": "wav"}),
    NotServed("function_call", (CHAT,), ("none",), "auto"),
    NotServed("functions", (CHAT,), ([],), [{"name": "f"}]),
    NotServed("modalities", (CHAT,), (["text"],), ["text", "audio"]),
    NotServed("reasoning_effort", (CHAT,), (), "low"),
    NotServed("service_tier", (CHAT,), ("auto", "default"), "flex"),
    NotServed("store", (CHAT,), (False,), True),
    NotServed("verbosity", (CHAT,), (), "low"),
    NotServed("web_search_options", (CHAT,), (), {}),
)
