"""Request types of the OpenAI-compatible API."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, PrivateAttr

from shared.options.unsupported_fields import UNSUPPORTED_FIELDS
from shared.server.protocol.chat_messages import MAX_MESSAGES, MAX_TOOLS, Message, Tool
from shared.server.protocol.content import check_image_count
from shared.server.protocol.fields import (
    BIAS_SCHEMA,
    ID_FORMAT,
    MAX_COUNT,
    MAX_TOKEN_IDS,
    PROMPT_SCHEMA,
    STOP_SCHEMA,
    Nested,
    Strict,
    Text,
    User,
    check_depth,
    read_bias,
    read_prompt,
    read_stops,
)
from shared.server.protocol.structured import (
    AllowedChoice,
    NamedTool,
    Options,
    Pattern,
    ResponseFormat,
    StructuredOutputs,
    ToolChoice,
    form_of,
)
from shared.text.chat_template import text_of
from shared.text.grammar_worker import OutputFormat

TEMPLATE_ADVICE = tuple(field.name for field in UNSUPPORTED_FIELDS if field.is_of_template)
MAX_PRIORITY = 1000
MAX_SEED = (1 << 63) - 1  # OpenAI's bounds
MAX_ARGUMENTS = 32  # of a chat template
MAX_DRAFT_TOKENS = 1 << 16  # more than any step has


TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT, json_schema_extra=ID_FORMAT)]
Name = Annotated[Text, Field(max_length=64)]


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool | None = None  # advice: events are never padded


class SpeculativeOptions(Strict):
    """Speculation options of a request; the distribution of its output does not depend on them."""

    enabled: bool | None = None
    max_draft_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] | None = None

    @property
    def most_drafts(self) -> int | None:
        """Most drafts of a step, or None for all that the step has."""
        if self.enabled is False:
            return 0
        return self.max_draft_tokens


class GenerationRequest(Strict):
    """The fields that both endpoints share.

    `DEFAULT_TOKENS` bounds an output whose request does not say; None: all that fits. `PROMPT` is
    the field of the prompt.
    """

    DEFAULT_TOKENS: ClassVar[int | None] = None
    PROMPT: ClassVar[str]

    model: Text | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None  # -1 and 0: off
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    # Logits are divided by it: far smaller values leave float32's range.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(read_bias), BIAS_SCHEMA] = {}
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: Annotated[list[str], PlainValidator(read_stops), STOP_SCHEMA] = []
    stop_token_ids: (
        Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)] | None
    ) = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    speculative: SpeculativeOptions | None = None
    trace: bool | None = None
    user: User | None = None
    # OpenAI's two names for parts of `user`: advice.
    safety_identifier: User | None = None
    prompt_cache_key: User | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # What vLLM's clients sent before there was structured_outputs.
    guided_json: Nested | None = None
    guided_regex: Pattern | None = None
    guided_choice: Options | None = None
    guided_grammar: Pattern | None = None

    _advice: tuple[str, ...] = PrivateAttr(())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields that have no effect on this request, whatever its chat template reads."""
        return self._advice

    @property
    def wants_trace(self) -> bool:
        """True if the request asks for a trace of its steps."""
        return bool(self.trace)

    def with_advice(self, names: tuple[str, ...]) -> Self:
        """The same request, which had these fields of `unsupported_fields` beside its own."""
        self._advice = names
        return self

    @property
    def forms(self) -> dict[str, OutputFormat]:
        """Output formats by the field that requests them; at most one is supported."""
        by_field = {
            "response_format": form_of(self.response_format) if self.response_format else None,
            "structured_outputs": self.structured_outputs and self.structured_outputs.form,
        }
        for kind, name in (("schema", "json"), ("regex", "regex"), ("choice", "choice")):
            value = getattr(self, f"guided_{name}")
            by_field[f"guided_{name}"] = (
                None if value is None else OutputFormat(kind=kind, value=value)
            )
        lark = self.guided_grammar
        by_field["guided_grammar"] = None if lark is None else OutputFormat(kind="lark", value=lark)
        return {name: form for name, form in by_field.items() if form is not None}

    @property
    def form(self) -> OutputFormat | None:
        """Requested output format; None without one."""
        return next(iter(self.forms.values()), None)

    @property
    def grammar_field(self) -> str:
        """The field that asks for a grammar, where one does."""
        return next(iter(self.forms), "grammar")

    @property
    def num_choices(self) -> int:
        """Choices of each prompt."""
        return self.n or 1

    @property
    def asked_tokens(self) -> tuple[str, int | None]:
        """The field that bounds the output, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def asked_logprobs(self) -> tuple[str, int | None]:
        """The field that asks for the best tokens, and how many; None for no logprobs at all."""
        return "logprobs", None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if an answer says something of the prompt."""
        return self.prompt_logprobs is not None

    @property
    def echoed_logprobs(self) -> int | None:
        """Number of top logprobs of an echoed prompt; None without echo."""
        return None

    @property
    def asked_prompt_logprobs(self) -> tuple[str, int | None]:
        """The field that asks for most of the prompt's logprobs, and how many; None for none."""
        echoed, asked = self.echoed_logprobs, self.prompt_logprobs
        if echoed is None or (asked is not None and asked >= echoed):
            return "prompt_logprobs", asked
        return "logprobs", echoed

    @property
    def names(self) -> dict[str, str]:
        """This API's words for the fields of a request that the engine calls otherwise."""
        asked = {"max_tokens": self.asked_tokens[0], "logprobs": self.asked_logprobs[0]}
        asked["prompt_logprobs"] = self.asked_prompt_logprobs[0]
        return {"prompt": self.PROMPT, "grammar": self.grammar_field, **asked}

    @property
    def most_drafts(self) -> int | None:
        """Most drafts of a step, or None for all that the step has."""
        return self.speculative.most_drafts if self.speculative else None


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    DEFAULT_TOKENS: ClassVar[int | None] = 16  # OpenAI's
    PROMPT: ClassVar[str] = "prompt"

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(read_prompt), PROMPT_SCHEMA]
    # 0 reads the prompt and says nothing.
    max_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    echo: bool | None = None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if an answer says something of the prompt."""
        return bool(self.echo) or super().wants_prompt_logprobs

    @property
    def echoed_logprobs(self) -> int | None:
        """Number of top logprobs of an echoed prompt, from `logprobs`."""
        return self.logprobs if self.echo else None

    @property
    def asked_logprobs(self) -> tuple[str, int | None]:
        """`logprobs`, a number here."""
        return "logprobs", self.logprobs


class ChatPrompt(Strict):
    """The fields of which the chat template makes a prompt."""

    messages: Annotated[
        list[Message],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(check_image_count),
    ]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    chat_template_kwargs: (
        Annotated[dict[Name, Any], Field(max_length=MAX_ARGUMENTS), AfterValidator(check_depth)]
        | None
    ) = None
    add_generation_prompt: bool | None = None  # null: unless the last message is continued
    continue_final_message: bool | None = None

    @property
    def begun(self) -> str:
        """Start of the output: the last message, if it is to be continued."""
        return text_of(vars(self.messages[-1])) if self.continue_final_message else ""

    @property
    def usable_tools(self) -> list[Tool]:
        """Tools that the chat template lists."""
        return self.tools or []

    @property
    def advice(self) -> dict[str, Any]:
        """Optional inputs of the chat template, by the names in `unsupported_fields`."""
        return {}


class ChatRequest(GenerationRequest, ChatPrompt):
    """Body of /v1/chat/completions."""

    PROMPT: ClassVar[str] = "messages"

    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[Name, Field(min_length=1)] | None = None
    verbosity: Annotated[Name, Field(min_length=1)] | None = None
    enable_thinking: bool | None = None
    thinking: bool | Nested | None = None

    @property
    def usable_tools(self) -> list[Tool]:
        """Tools that the chat template lists."""
        return [] if self.tool_choice == "none" else super().usable_tools

    @property
    def advice(self) -> dict[str, Any]:
        """Optional inputs of the chat template, by the names in `unsupported_fields`."""
        given = {name: getattr(self, name) for name in TEMPLATE_ADVICE}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields that have no effect; a form has none where an answer is calls alone."""
        return (*super().ignored, *(self.forms if self.requires_tool_call else ()))

    @property
    def requires_tool_call(self) -> bool:
        """True if an answer has to be a call."""
        choice = self.tool_choice
        is_required = isinstance(choice, AllowedChoice) and choice.allowed_tools.mode == "required"
        return choice == "required" or isinstance(choice, NamedTool) or is_required

    @property
    def constrains_tool_calls(self) -> bool:
        """True if a grammar holds the calls of an answer, if it has tools."""
        is_strict = any(tool.function.strict for tool in self.callable_tools)
        return is_strict or self._names_calls or self.form is not None

    @property
    def _names_calls(self) -> bool:
        """True if `tool_choice` says what has to be called, or what alone may be."""
        return self.requires_tool_call or isinstance(self.tool_choice, AllowedChoice)

    @property
    def chosen_names(self) -> set[str] | None:
        """The functions that `tool_choice` names; None where it names none."""
        choice = self.tool_choice
        if isinstance(choice, AllowedChoice):
            return choice.allowed_tools.names
        return {choice.function.name} if isinstance(choice, NamedTool) else None

    @property
    def callable_tools(self) -> list[Tool]:
        """Tools that the output may call."""
        names = self.chosen_names
        if names is None:
            return self.usable_tools
        return [tool for tool in self.usable_tools if tool.function.name in names]

    @property
    def grammar_field(self) -> str:
        """The field that asks for a grammar, where one does."""
        if self.requires_tool_call:
            return "tool_choice"
        return next(iter(self.forms), "tool_choice" if self._names_calls else "tools")

    @property
    def max_tool_calls(self) -> int | None:
        """Calls that a choice may have; None for any number."""
        is_one = self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool)
        return 1 if is_one else None

    @property
    def asked_tokens(self) -> tuple[str, int | None]:
        """`max_completion_tokens`, or its old name."""
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def asked_logprobs(self) -> tuple[str, int | None]:
        """`top_logprobs`, which `logprobs` turns on."""
        return "top_logprobs", (self.top_logprobs or 0) if self.logprobs else None
