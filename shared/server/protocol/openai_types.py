"""Request types of the OpenAI-compatible API."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, PrivateAttr

from shared.options.unsupported_fields import CHAT, COMPLETIONS, UNSUPPORTED_FIELDS
from shared.server.protocol.chat_messages import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Function,
    Message,
    Tool,
    for_template,
)
from shared.server.protocol.content import check_image_count, images_in
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
from shared.server.protocol.generation_request import (
    ChatInput,
    GenerationRequest,
    ToolUse,
)
from shared.server.protocol.sampling_fields import SAME_NAMES, SamplingFields
from shared.server.protocol.structured import (
    AllowedChoice,
    NamedTool,
    Options,
    Pattern,
    ResponseFormat,
    StructuredOutputs,
    ToolChoice,
    chosen_names,
    form_of,
    requires_call,
)
from shared.text.chat_template import Conversation
from shared.text.grammar_worker import OutputFormat

TEMPLATE_ADVICE = tuple(field.name for field in UNSUPPORTED_FIELDS if field.is_of_template)
MAX_PRIORITY = 1000
MAX_SEED = (1 << 63) - 1  # OpenAI's bounds
MAX_ARGUMENTS = 32  # per chat template
MAX_DRAFT_TOKENS = 1 << 16  # above the draft tokens of any step


TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT, json_schema_extra=ID_FORMAT)]
Name = Annotated[Text, Field(max_length=64)]


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool | None = None  # ignored: events are never padded


class SpeculativeOptions(Strict):
    """Speculation options of a request; the distribution of its output does not depend on them."""

    enabled: bool | None = None
    max_draft_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] | None = None

    @property
    def max_drafts(self) -> int | None:
        """Maximum draft tokens per step; None: no limit."""
        if self.enabled is False:
            return 0
        return self.max_draft_tokens


class OpenAIRequest(Strict):
    """Fields of both OpenAI-compatible generation endpoints."""

    DEFAULT_TOKENS: ClassVar[int | None] = None  # default of max_tokens; None: up to the context
    PROMPT: ClassVar[str]  # name of the field with the prompt
    ENDPOINT: ClassVar[str]
    ID_PREFIX: ClassVar[str]  # start of response ids

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
    # Logits are divided by it: far smaller values exceed the range of float32.
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
    # OpenAI's two names for parts of `user`: ignored.
    safety_identifier: User | None = None
    prompt_cache_key: User | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # vLLM's fields from before structured_outputs.
    guided_json: Nested | None = None
    guided_regex: Pattern | None = None
    guided_choice: Options | None = None
    guided_grammar: Pattern | None = None

    _advice: tuple[str, ...] = PrivateAttr(())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields without effect on this request, apart from inputs of the chat template."""
        return self._advice

    def with_advice(self, names: tuple[str, ...]) -> Self:
        """Sets the ignored fields (`unsupported_fields`) of the body; returns itself."""
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
        """Name of the field that requests a grammar, for errors."""
        return next(iter(self.forms), "grammar")

    @property
    def num_choices(self) -> int:
        """Number of choices per prompt."""
        return self.n or 1

    @property
    def max_tokens_field(self) -> tuple[str, int | None]:
        """Name of the field that limits the output tokens, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def logprobs_field(self) -> tuple[str, int | None]:
        """Name of the field that requests logprobs, and the number of top tokens or None."""
        return "logprobs", None

    @property
    def returns_prompt_logprobs(self) -> bool:
        """True if the response reports logprobs of the prompt."""
        return self.prompt_logprobs is not None

    @property
    def echoed_logprobs(self) -> int | None:
        """Number of top logprobs of an echoed prompt; None without echo."""
        return None

    @property
    def prompt_logprobs_field(self) -> tuple[str, int | None]:
        """Name of the field with the most prompt logprobs, and the number or None."""
        echoed, asked = self.echoed_logprobs, self.prompt_logprobs
        if echoed is None or (asked is not None and asked >= echoed):
            return "prompt_logprobs", asked
        return "logprobs", echoed

    @property
    def names(self) -> dict[str, str]:
        """Field names of this API by the engine's names, for errors."""
        asked = {"max_tokens": self.max_tokens_field[0], "logprobs": self.logprobs_field[0]}
        asked["prompt_logprobs"] = self.prompt_logprobs_field[0]
        return {"prompt": self.PROMPT, "grammar": self.grammar_field, **asked}

    def to_generation(self) -> GenerationRequest:
        """Returns the request in the form that all APIs share."""
        return GenerationRequest(
            endpoint=self.ENDPOINT,
            id_prefix=self.ID_PREFIX,
            body=self,
            model=self.model,
            sampling=self._sampling(),
            names=self.names,
            stop=self.stop,
            form=self.form,
            seed=self.seed,
            num_choices=self.num_choices,
            user=self.user or "",
            priority=self.priority or 0,
            ignored=self.ignored,
            stream=bool(self.stream),
            includes_usage=bool(self.stream_options and self.stream_options.include_usage),
            echoed_logprobs=self.echoed_logprobs,
            returned_prompt_logprobs=self.prompt_logprobs,
            returns_token_ids=bool(self.return_token_ids),
            returns_trace=bool(self.trace),
            **self._input(),
        )

    def _sampling(self) -> SamplingFields:
        return SamplingFields(
            **{name: getattr(self, name) for name in SAME_NAMES},
            max_tokens=self.max_tokens_field[1],
            default_tokens=self.DEFAULT_TOKENS,
            logprobs=self.logprobs_field[1],
            prompt_logprobs=self.prompt_logprobs_field[1],
            max_drafts=self.speculative.max_drafts if self.speculative else None,
            returns_trace=bool(self.trace),
        )

    @abstractmethod
    def _input(self) -> dict[str, Any]:
        """Returns the fields of the request's input: `chat`, or `prompts` and `echo`."""


def tool_use_of(
    choice: ToolChoice | None, functions: Sequence[Function], are_parallel: bool | None
) -> ToolUse:
    """Returns the constraints on tool calls.

    Args:
      choice: Tool choice of the request.
      functions: Functions that the prompt lists.
      are_parallel: False: at most one call.
    """
    if choice == "none":
        return ToolUse(forbids_calls=bool(functions))
    names, is_required = chosen_names(choice), requires_call(choice)
    is_one = are_parallel is False or isinstance(choice, NamedTool)
    return ToolUse(
        functions=[each for each in functions if names is None or each.name in names],
        requires_call=is_required,
        restricts_calls=is_required or isinstance(choice, AllowedChoice),
        max_calls=1 if is_one else None,
    )


class CompletionRequest(OpenAIRequest):
    """Body of /v1/completions."""

    DEFAULT_TOKENS: ClassVar[int | None] = 16  # OpenAI's default
    PROMPT: ClassVar[str] = "prompt"
    ENDPOINT: ClassVar[str] = COMPLETIONS
    ID_PREFIX: ClassVar[str] = "cmpl-"

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(read_prompt), PROMPT_SCHEMA]
    # 0 evaluates the prompt without generating tokens.
    max_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    echo: bool | None = None

    @property
    def returns_prompt_logprobs(self) -> bool:
        """True if the response reports logprobs of the prompt."""
        return bool(self.echo) or super().returns_prompt_logprobs

    @property
    def echoed_logprobs(self) -> int | None:
        """Number of top logprobs of an echoed prompt, from `logprobs`."""
        return self.logprobs if self.echo else None

    @property
    def logprobs_field(self) -> tuple[str, int | None]:
        """`logprobs`, which is a number in this endpoint."""
        return "logprobs", self.logprobs

    def _input(self) -> dict[str, Any]:
        return {"prompts": self.prompt, "echo": bool(self.echo)}


class ChatPrompt(Strict):
    """Fields that the chat template renders to a prompt."""

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
    def advice(self) -> dict[str, Any]:
        """Optional inputs of the chat template, by the names in `unsupported_fields`."""
        return {}

    @property
    def tool_use(self) -> ToolUse:
        """Constraints on tool calls."""
        return ToolUse(functions=[tool.function for tool in self.tools or ()])

    def to_chat(self) -> ChatInput:
        """Returns the conversation in the form that all APIs share."""
        continues, begins = bool(self.continue_final_message), self.add_generation_prompt
        conversation = Conversation(
            messages=list(map(for_template, self.messages)),
            tools=[tool.model_dump(exclude_unset=True) for tool in self.tools or ()],
            arguments=self.chat_template_kwargs or {},
            advice=self.advice,
            add_generation_prompt=not continues if begins is None else begins,
            continue_final_message=continues,
        )
        return ChatInput(
            conversation=conversation,
            images=images_in(message.content for message in self.messages),
            tools=self.tool_use,
            names={"arguments": "chat_template_kwargs"},
        )


class ChatRequest(OpenAIRequest, ChatPrompt):
    """Body of /v1/chat/completions."""

    PROMPT: ClassVar[str] = "messages"
    ENDPOINT: ClassVar[str] = CHAT
    ID_PREFIX: ClassVar[str] = "chatcmpl-"

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
    def advice(self) -> dict[str, Any]:
        """Optional inputs of the chat template, by the names in `unsupported_fields`."""
        given = {name: getattr(self, name) for name in TEMPLATE_ADVICE}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields without effect; output formats have none if the output must be a tool call."""
        return (*super().ignored, *(self.forms if self.requires_tool_call else ()))

    @property
    def requires_tool_call(self) -> bool:
        """True if the output must be a tool call."""
        return requires_call(self.tool_choice)

    @property
    def chosen_names(self) -> set[str] | None:
        """Functions that `tool_choice` names; None if it names none."""
        return chosen_names(self.tool_choice)

    @property
    def grammar_field(self) -> str:
        """Name of the field that requests a grammar, for errors."""
        if self.requires_tool_call:
            return "tool_choice"
        return next(iter(self.forms), "tool_choice" if self.tool_use.restricts_calls else "tools")

    @property
    def tool_use(self) -> ToolUse:
        """Constraints on tool calls."""
        functions = [tool.function for tool in self.tools or ()]
        return tool_use_of(self.tool_choice, functions, self.parallel_tool_calls)

    def _input(self) -> dict[str, Any]:
        return {"chat": self.to_chat()}

    @property
    def max_tokens_field(self) -> tuple[str, int | None]:
        """`max_completion_tokens`, or its old name `max_tokens`."""
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def logprobs_field(self) -> tuple[str, int | None]:
        """`top_logprobs`, which `logprobs` enables."""
        return "top_logprobs", (self.top_logprobs or 0) if self.logprobs else None
