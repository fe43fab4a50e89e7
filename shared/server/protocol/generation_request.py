"""Request of a generation, the same for every API: prompt or conversation, tools and sampling.

Each API has a request model and a conversion to these types. Nothing after the conversion depends
on the API.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel

from shared.server.protocol.chat_messages import Function
from shared.server.protocol.content import ImagePart
from shared.server.protocol.sampling_fields import SamplingFields
from shared.text.chat_template import Conversation, text_of
from shared.text.grammar_worker import OutputFormat


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """Functions that the output may call, and constraints on the calls.

    Attributes:
      functions: Functions that may be called; the prompt may list more.
      requires_call: The output must be a call.
      restricts_calls: A call is required, or only some of the listed functions may be called.
      forbids_calls: The prompt lists functions, and the output must not call them.
      max_calls: Maximum calls per choice; None: no limit.
      input_formats: Constraints of the only argument, a text, by the name of the function.
    """

    functions: Sequence[Function] = ()
    requires_call: bool = False
    restricts_calls: bool = False
    forbids_calls: bool = False
    max_calls: int | None = None
    input_formats: Mapping[str, OutputFormat] = field(default_factory=dict)

    @property
    def is_strict(self) -> bool:
        """True if calls must match the schemas of their functions, or are restricted."""
        return self.restricts_calls or any(function.strict for function in self.functions)


@dataclass(frozen=True, kw_only=True)
class ChatInput:
    """Conversation with its images and tools.

    Attributes:
      conversation: Input of the chat template.
      images: Images, in the order of their placeholders.
      tools: Constraints on tool calls.
      names: Fields of the API by the names of `Conversation`, for errors.
    """

    conversation: Conversation
    images: Sequence[ImagePart] = ()
    tools: ToolUse = field(default_factory=ToolUse)
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def begun(self) -> str:
        """Start of the output: the last message, if it is to be continued."""
        given = self.conversation
        return text_of(given.messages[-1]) if given.continue_final_message else ""

    def name(self, part: str) -> str:
        """Returns the API's name of a part of the conversation."""
        return self.names.get(part, part)


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Validated request.

    Attributes:
      endpoint: Name of the endpoint, as in `shared.options.unsupported_fields`.
      id_prefix: Start of the response id.
      body: Request model of the API, for logs and for fields that the response repeats.
      model: Requested model; None: the served one.
      chat: Conversation; None for plain prompts.
      prompts: Plain prompts, texts or token ids; empty for a conversation.
      sampling: Sampling fields.
      names: Fields of the API by the engine's names, for errors.
      stop: Stop strings.
      form: Output format; None without one.
      seed: Seed of the request; None: random.
      num_choices: Choices per prompt.
      user: Owner of cached prefixes.
      priority: Lower values are scheduled first.
      ignored: Fields without effect, apart from inputs of the chat template.
      stream: The response is a stream.
      includes_usage: The last event of a stream has the usage, and no choices.
      echo: The output begins with the prompt.
      echoed_logprobs: Top logprobs per token of an echoed prompt; None: no logprobs.
      returned_prompt_logprobs: Top logprobs per token in `prompt_logprobs`; None: no such field.
      returns_token_ids: Choices have their token ids.
      returns_trace: Stream events have a step trace.
    """

    endpoint: str
    id_prefix: str
    body: BaseModel
    model: str | None
    chat: ChatInput | None = None
    prompts: Sequence[str] | Sequence[list[int]] = ()
    sampling: SamplingFields
    names: Mapping[str, str]
    stop: Sequence[str] = ()
    form: OutputFormat | None = None
    seed: int | None = None
    num_choices: int = 1
    user: str = ""
    priority: int = 0
    ignored: tuple[str, ...] = ()
    stream: bool = False
    includes_usage: bool = False
    echo: bool = False
    echoed_logprobs: int | None = None
    returned_prompt_logprobs: int | None = None
    returns_token_ids: bool = False
    returns_trace: bool = False

    @property
    def constrains_tool_calls(self) -> bool:
        """True if a grammar constrains the tool calls."""
        return self.chat is not None and (self.chat.tools.is_strict or self.form is not None)

    def name(self, part: str) -> str:
        """Returns the API's name of a field of the engine."""
        return self.names.get(part, part)
