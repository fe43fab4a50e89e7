"""Request fields of other servers that are not supported, or not with every value.

Fields of OpenAI's, vLLM's and SGLang's APIs and of the proxies and agents that speak them are of
two kinds. *Advice* cannot change a token of the answer: a request that has such a field is served,
and the answer lists the field under `ignored`; with `--strict-fields` it is an error. Every other
field is an error, except with a value that requests nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

COMPLETIONS, CHAT, MESSAGES, RESPONSES = "completions", "chat", "messages", "responses"
BOTH = (COMPLETIONS, CHAT)
ENDPOINTS = (*BOTH, MESSAGES, RESPONSES)


@dataclass(frozen=True)
class UnsupportedField:
    """Unsupported request field.

    Attributes:
      name: The field, or a path such as `tools[].function.cache_control`.
      endpoints: Endpoints of the field; for the others it is an unknown field.
      neutral: Accepted values besides null; they request nothing.
      example: An unsupported value.
      why: Reason why other values are unsupported, after the field's name.
      hint: Alternative to use.
      is_read: True if accepted values stay in the body for the request parser.
      is_advice: True if other values are ignored, except by a strict server.
      is_of_template: Advice that the chat template may read as its own variable.
      code: Machine-readable code of the error.
    """

    name: str
    endpoints: tuple[str, ...]
    neutral: tuple[Any, ...]
    example: Any
    why: str = "is not supported"
    hint: str = "leave it out"
    is_read: bool = False
    is_advice: bool = False
    is_of_template: bool = False
    code: str | None = None

    @property
    def reason(self) -> str:
        """Reason of the error."""
        return f"{self.name} {self.why}"

    def refuses(self, value: Any) -> bool:
        """Returns True if a value is neither null nor neutral."""
        if value is None:
            return False
        return not any(type(value) is type(other) and value == other for other in self.neutral)

    def take_from(self, fields: dict[str, Any]) -> bool:
        """Removes the field from a body unless the request parser reads it.

        Returns:
          True if a value of the field was neither null nor neutral.
        """
        *parents, name = self.name.split(".")
        asks = False
        for holder in _holders(fields, parents):
            if name in holder:
                asks |= self.refuses(holder[name])
                if not self.is_read:
                    del holder[name]
        return asks


def _holders(value: Any, parents: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the objects of a body that may contain the last field of a path."""
    if not isinstance(value, dict):
        return
    if not parents:
        yield value
        return
    below = value.get(parents[0].removesuffix("[]"))
    each = below if parents[0].endswith("[]") and isinstance(below, list) else [below]
    for part in each:
        yield from _holders(part, parents[1:])


def _advice(
    name: str,
    example: Any,
    *neutral: Any,
    endpoints: tuple[str, ...] = BOTH,
    is_read: bool = False,
    is_of_template: bool = False,
) -> UnsupportedField:
    return UnsupportedField(
        name,
        endpoints,
        neutral,
        example,
        why="has no effect here",
        hint="leave it out, or start the server without --strict-fields",
        is_read=is_read or is_of_template,
        is_advice=True,
        is_of_template=is_of_template,
    )


def _template_advice(name: str, example: Any, *neutral: Any) -> UnsupportedField:
    return _advice(name, example, *neutral, endpoints=(CHAT,), is_of_template=True)


_KEPT_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_FORMS = "give structured_outputs, which has the same"

UNSUPPORTED_FIELDS = (
    # Advice: OpenAI's, then what vLLM, SGLang, llama.cpp, Ollama, OpenRouter and litellm add.
    _template_advice("reasoning_effort", "low"),
    _template_advice("verbosity", "low", "medium"),
    _template_advice("enable_thinking", False),
    _template_advice("thinking", {"type": "enabled", "budget_tokens": 1024}),
    *(
        _advice(name, value, endpoints=(COMPLETIONS,))  # which has no template
        for name, value in (
            ("reasoning_effort", "low"),
            ("enable_thinking", False),
            ("thinking", {"type": "disabled"}),
        )
    ),
    _advice("metadata", {"team": "a"}, {}),
    _advice("store", True, False),
    _advice("service_tier", "flex", "auto", "default"),
    _advice("prediction", {"type": "content", "content": "text"}, endpoints=(CHAT,)),
    _advice("web_search_options", {}, endpoints=(CHAT,)),
    _advice("prompt_cache_retention", "24h", "in_memory", "in-memory"),
    _advice("prompt_cache_key", "a", is_read=True),
    _advice("safety_identifier", "a", is_read=True),
    _advice("client_metadata", {"version": "1"}, {}),
    _advice("reasoning", {"effort": "low"}, {}, endpoints=(CHAT,)),
    _advice("cache_control", {"type": "ephemeral"}),
    _advice("request_id", "a"),
    _advice("rid", "a"),
    _advice("guided_decoding_backend", "xgrammar"),
    _advice("data_parallel_rank", 0),
    _advice("routed_dp_rank", 0),
    _advice("log_metrics", False, True),
    _advice("cache_prompt", False, True),
    _advice("id_slot", 0, -1),
    _advice("keep_alive", "5m"),
    _advice("ttl", 300),
    _advice("session_id", "a"),
    _advice("user_id", "a"),
    _advice("routing_key", "a"),
    _advice("output_config", {"effort": "low"}, {}, endpoints=(CHAT,)),
    _advice("provider", {"sort": "price"}, {}),
    _advice("models", ["other"], []),
    _advice("route", "fallback"),
    _advice("usage", {"include": True}, {}, {"include": False}),
    _advice("stream_options.include_obfuscation", True, False, is_read=True),
    *(
        _advice(name, {"type": "ephemeral"}, endpoints=(CHAT,))
        for name in (
            "messages[].cache_control",
            "tools[].cache_control",
            "tools[].function.cache_control",
        )
    ),
    _advice("messages[].content[].image_url.format", "image/png", endpoints=(CHAT,)),
    _advice("messages[].content[].uuid", "a", endpoints=(CHAT,)),
    *(
        _advice(name, value, {}, [], endpoints=(CHAT,))
        for name, value in (
            ("messages[].provider_specific_fields", {"a": 1}),
            ("messages[].annotations", [{"type": "url_citation"}]),
            ("messages[].thinking_blocks", [{"type": "thinking"}]),
            ("messages[].reasoning_details", [{"type": "reasoning.text"}]),
            ("messages[].tool_calls[].provider_specific_fields", {"a": 1}),
            ("messages[].tool_calls[].extra_content", {"a": 1}),
            ("messages[].tool_calls[].function.provider_specific_fields", {"a": 1}),
        )
    ),
    # Advice of Anthropic's Messages API and its clients.
    *(
        replace(_advice(name, value, endpoints=(MESSAGES,)), neutral=tuple(neutral))
        for name, value, *neutral in (
            ("service_tier", "auto", "standard_only"),
            ("inference_geo", "us"),
            ("speed", "fast", "standard"),
            ("diagnostics", {"previous_message_id": "a"}),
            ("user_profile_id", "a"),
            ("workspace_id", "a"),
            ("output_config.task_budget", {"type": "tokens", "total": 1000}),
            ("tools[].eager_input_streaming", True, False),
            ("tools[].toolset_name", "a"),
            ("messages[].content[].caller", {"type": "other"}, {"type": "direct"}),
            ("messages[].content[].toolset_name", "a"),
            ("messages[].id", "a"),
        )
    ),
    # Advice of the Responses API and its clients.
    *(
        replace(_advice(name, value, endpoints=(RESPONSES,)), neutral=tuple(neutral))
        for name, value, *neutral in (
            ("service_tier", "flex", "auto", "default"),
            ("max_tool_calls", 5),  # of server tools
            ("prompt_cache_retention", "24h", "in_memory"),
            ("prompt_cache_options", {"mode": "implicit"}, {}),
            ("client_metadata", {"version": "1"}, {}),
            ("access_programs", {"cyber": "standard"}, {}),
            ("image", {"context_compression": "auto"}, {}),
            ("reasoning.summary", "auto"),
            ("reasoning.generate_summary", "auto"),
            ("reasoning.context", "auto"),
            ("reasoning.mode", "pro", "standard"),
            *(
                (f"{holder}.{name}", value, *neutral)
                for holder in ("tools[]", "tools[].tools[]")
                for name, value, *neutral in (
                    ("defer_loading", True, False),
                    ("output_schema", {"type": "object"}),
                    ("allowed_callers", ["programmatic"], ["direct"]),
                    ("async", True, False),
                )
            ),
            ("input[].async", True, False),
            ("input[].async_", True, False),  # of objects of the openai package
        )
    ),
    _advice("prompt_cache_key", "a", endpoints=(RESPONSES,), is_read=True),
    _advice("safety_identifier", "a", endpoints=(RESPONSES,), is_read=True),
    _advice(
        "stream_options.include_obfuscation", True, False, endpoints=(RESPONSES,), is_read=True
    ),
    # What would change the answer.
    *(
        UnsupportedField(name, (RESPONSES,), neutral, value, hint=hint, is_read=is_read)
        for name, neutral, value, hint, is_read in (
            ("background", (False,), True, "send the request with stream: true", False),
            ("background_options", ({},), {"completion_window": "2h"}, "leave it out", False),
            ("conversation", (), "conv_1", "send the whole conversation as input", False),
            ("prompt", (), {"id": "pmpt_1"}, "send its text as instructions", False),
            ("truncation", ("disabled",), "auto", "remove old items from input", True),
            ("context_management", ([],), [{"type": "compaction"}], "shorten input", False),
            ("moderation", (), {"model": "a"}, "leave it out", False),
        )
    ),
    *(
        UnsupportedField(name, (MESSAGES,), neutral, value, hint=hint)
        for name, neutral, value, hint in (
            ("container", (), "a", "run the code in a custom tool"),
            ("mcp_servers", ([],), [{"name": "a"}], "send their tools as custom tools"),
            (
                "context_management",
                ({}, {"edits": []}, _KEPT_THINKING),
                {"edits": [{"type": "clear_tool_uses_20250919"}]},
                "remove old messages from the request",
            ),
            ("fallbacks", ([],), [{"model": "a"}], "leave it out"),
            ("tools[].input_examples", ([],), [{"a": 1}], "put them into the description"),
            ("tools[].defer_loading", (False,), True, "leave it out"),
            ("tools[].allowed_callers", (["direct"],), ["code_execution_20250825"], "leave it out"),
        )
    ),
    UnsupportedField(
        "thread",
        (MESSAGES,),
        (),
        {"type": "create"},
        hint="send the whole conversation as messages",
        code="thread_unsupported_request",
    ),
    UnsupportedField("best_of", BOTH, (1,), 3),
    UnsupportedField("suffix", (COMPLETIONS,), ("",), "end"),
    UnsupportedField("audio", (CHAT,), (), {"voice": "alloy", "format": "wav"}),
    UnsupportedField("function_call", (CHAT,), ("none",), "auto"),
    UnsupportedField("functions", (CHAT,), ([],), [{"name": "f"}]),
    UnsupportedField("modalities", (CHAT,), (["text"],), ["text", "audio"]),
    UnsupportedField("allowed_token_ids", BOTH, (), [1, 2]),
    UnsupportedField("bad_words", BOTH, ([],), ["word"]),
    UnsupportedField("include_stop_str_in_output", BOTH, (False,), True),
    UnsupportedField("length_penalty", BOTH, (1, 1.0), 0.8),
    UnsupportedField(
        "skip_special_tokens",
        BOTH,
        (True,),
        False,
        hint="ask for return_token_ids and send them to /detokenize",
    ),
    UnsupportedField("spaces_between_special_tokens", BOTH, (True,), False),
    UnsupportedField("truncate_prompt_tokens", BOTH, (), 100),
    UnsupportedField("use_beam_search", BOTH, (False,), True),
    UnsupportedField("add_special_tokens", (CHAT,), (False,), True),
    UnsupportedField("add_special_tokens", (COMPLETIONS,), (True,), False),
    UnsupportedField("echo", (CHAT,), (False,), True, hint="use /v1/completions, which has it"),
    UnsupportedField("include_reasoning", (CHAT,), (True,), False),
    UnsupportedField("separate_reasoning", (CHAT,), (True,), False),
    UnsupportedField("stream_reasoning", (CHAT,), (True,), False),
    UnsupportedField("regex", BOTH, (), "a+", hint=_FORMS),
    UnsupportedField("ebnf", BOTH, (), "root ::= [a]", hint=_FORMS),
    UnsupportedField("json_schema", BOTH, (), "{}", hint=_FORMS),
    UnsupportedField("stop_regex", BOTH, (), "a+", hint="give stop"),
    UnsupportedField("no_stop_trim", BOTH, (False,), True),
    UnsupportedField("thinking_token_budget", BOTH, (), 100),
    UnsupportedField("cache_salt", BOTH, (), "a", hint="give user, whose prefix cache is its own"),
    UnsupportedField("extra_key", BOTH, (), "a", hint="give user, whose prefix cache is its own"),
    UnsupportedField("lora_path", BOTH, (), "a", hint="give the adapter's name as model"),
    UnsupportedField("guided_whitespace_pattern", BOTH, (), " ?"),
    UnsupportedField("structural_tag", BOTH, (), "{}", hint=_FORMS),
    UnsupportedField("logits_processors", BOTH, ([],), ["a"]),
    UnsupportedField("custom_logit_processor", BOTH, (), "a"),
    UnsupportedField("custom_params", BOTH, ({},), {"a": 1}),
    UnsupportedField("session_params", BOTH, ({},), {"id": "a"}),
    UnsupportedField("vllm_xargs", BOTH, ({},), {"a": 1}),
    UnsupportedField("kv_transfer_params", BOTH, ({},), {"do_remote_decode": True}),
    UnsupportedField(
        "return_tokens_as_token_ids", BOTH, (False,), True, hint="ask for return_token_ids"
    ),
    UnsupportedField("return_hidden_states", BOTH, (False,), True),
    UnsupportedField("media_io_kwargs", (CHAT,), ({},), {"image": {}}),
    UnsupportedField(
        "chat_template",
        (CHAT,),
        (),
        "{{ messages }}",
        why="of a request is not supported",
        hint="put it into the model folder, or send its text to /v1/completions",
    ),
    UnsupportedField(
        "documents", (CHAT,), ([],), [{"text": "a"}], hint="put their texts into messages"
    ),
    UnsupportedField("mm_processor_kwargs", (CHAT,), ({},), {"max_pixels": 1}),
)
