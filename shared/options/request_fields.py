"""Fields of OpenAI's, vLLM's and SGLang's APIs that are not served, or not every value of them."""

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
      is_read: The neutral values are passed on to who reads the request.
    """

    name: str
    endpoints: tuple[str, ...]
    neutral: tuple[Any, ...]
    example: Any
    why: str = "is not supported"
    way_out: str = "leave it out"
    is_read: bool = False

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
    NotServed(
        "reasoning_effort",
        (CHAT,),
        ("none",),
        "low",
        why="has no degrees but none",
        way_out="leave it out, or set the chat template's own argument with chat_template_kwargs",
        is_read=True,
    ),
    NotServed("service_tier", (CHAT,), ("auto", "default"), "flex"),
    NotServed("store", (CHAT,), (False,), True),
    NotServed("verbosity", (CHAT,), ("medium",), "low"),
    NotServed("web_search_options", (CHAT,), (), {}),
    NotServed("prompt_cache_retention", (CHAT,), ("in_memory", "in-memory"), "24h"),
    NotServed("allowed_token_ids", BOTH, (), [1, 2]),
    NotServed("bad_words", BOTH, ([],), ["word"]),
    NotServed("include_stop_str_in_output", BOTH, (False,), True),
    NotServed("length_penalty", BOTH, (1, 1.0), 0.8),
    NotServed(
        "skip_special_tokens",
        BOTH,
        (True,),
        False,
        way_out="ask for return_token_ids and send them to /detokenize",
    ),
    NotServed("spaces_between_special_tokens", BOTH, (True,), False),
    NotServed("truncate_prompt_tokens", BOTH, (), 100),
    NotServed("use_beam_search", BOTH, (False,), True),
    NotServed("add_special_tokens", (CHAT,), (False,), True),
    NotServed("add_special_tokens", (COMPLETIONS,), (True,), False),
    NotServed("echo", (CHAT,), (False,), True, way_out="use /v1/completions, which has it"),
    NotServed("include_reasoning", (CHAT,), (True,), False),
    NotServed("separate_reasoning", (CHAT,), (True,), False),
    NotServed("stream_reasoning", (CHAT,), (True,), False),
)
