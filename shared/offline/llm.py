"""A model in Python: `LLM(model_path, **options)`, without a server."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from numbers import Integral
from typing import Any, ClassVar, Self

from rich.console import Console

from shared.engine.checks import check
from shared.engine.request import Request
from shared.offline.answer import Answer, ReadPrompt, Stream
from shared.offline.conversations import Message, for_template, read_functions
from shared.offline.engine_thread import EngineThread, Started
from shared.offline.params import SamplingParams
from shared.offline.results import RequestOutput
from shared.options.command_line import parse
from shared.options.flags import ConfigError, spelling
from shared.options.observing import ObservingOptions
from shared.options.server import ServerOptions
from shared.process import engines, heap, launch
from shared.process.address import Listeners
from shared.process.notes import start_notes
from shared.process.ranks.starting import ranked_start
from shared.process.start import Platform
from shared.server.choice import Choice, Speculation, StopFinder
from shared.server.logprobs import PromptText, TokenNames
from shared.server.reading import Said
from shared.server.reasoning import is_open_after, thinking_after
from shared.server.sampling import make_sampling
from shared.server.text_parsers import new_parser
from shared.spec.noise import derive_seed
from shared.text.chat_template import Conversation
from shared.text.forced_calls import arguments_schema
from shared.text.grammar_worker import Calls, Wanted
from shared.text.tokenizer import Detokenizer, Tokenizer, is_text

Prompt = str | list[int]
Params = SamplingParams | Sequence[SamplingParams] | None

OF_A_SERVER = (
    {item.name for part in (ServerOptions, ObservingOptions) for item in fields(part)}
    | {"speculative_ngram_external_corpus_path"}
) - {"sampling_defaults", "reasoning_parser", "tool_call_parser"}
"""Options that mean nothing without the HTTP server."""


class LLM:
    """A model on this machine's GPU, or else its processor; the engine runs on its own thread.

    The options are the server's flags, spelled as Python names (`--page-size 64` is
    `page_size=64`), and are checked as they are. Texts are those of the server: speculation never
    changes them.

    Methods may be called from several threads at once; their requests are served together.

    Args:
      model_path: Folder of a Hugging Face checkpoint; None: the model that ships.
      **options: Any flag of the server but those of its listeners and its log.

    Raises:
      ValueError: What the server would refuse to start with; one sentence.
    """

    PLATFORM: ClassVar[Platform]
    RANK_MODULE: ClassVar[str | None]

    def __init__(self, model_path: str | None = None, **options: Any) -> None:
        if model_path is not None:
            options = {"model_path": model_path, **options}
        self._options = parse(_command_line(options))
        self._engine = EngineThread(self._start)
        self._names, self._ids = TokenNames(self.tokenizer), itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what runs and frees the device's memory; a second call does nothing."""
        self._engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
    ) -> list[RequestOutput]:
        """Continues prompts, all of them together.

        Args:
          prompts: A text, the token ids of one, or several of either.
          sampling_params: For all of them, or one for each; None: the model's defaults, until the
            model ends.

        Returns:
          A result for each prompt, in their order.

        Raises:
          ValueError: A prompt cannot be served; one sentence.
          RuntimeError: The engine failed.
        """
        return self._answers([self._read(prompt) for prompt in _listed(prompts)], sampling_params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        tools: Sequence[dict[str, Any]] = (),
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations, all of them together; the rest as `generate`.

        Args:
          messages: One conversation or several, in OpenAI's form.
          tools: What the model may call, in OpenAI's form; needs `tool_call_parser`.
          chat_template_kwargs: Values of the chat template's own variables.
        """
        chats = [messages] if messages and isinstance(messages[0], dict) else messages
        read = [self._read_chat(chat, tools, chat_template_kwargs or {}) for chat in chats]
        return self._answers(read, sampling_params)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
    ) -> Stream:
        """Answers a prompt or a conversation part by part.

        Returns:
          Gives a `Part` a step, in a `for` and in an `async for` alike; a loop that is left ends
          the request.
        """
        is_chat = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], dict)
        read = self._read_chat(prompt, (), {}) if is_chat else self._read(prompt)
        return self._begin(read, sampling_params or SamplingParams())

    def _start(self) -> Started:
        """On the engine's thread, which alone may touch the device."""
        heap.unsettle()
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        of_ranks = (lambda: self.PLATFORM, self.RANK_MODULE)
        with ranked_start(self._options, *of_ranks, lambda failure: None) as ranked:
            start = ranked.prepare()
            for note in (*ranked.notes, *start_notes(start.memory, start.plain, start.defaults)):
                console.print(note)
            backend = launch.ready(start, ranked, console)
            engine = engines.make_engine(backend, start.memory)
            served = engines.with_checks(engine, backend, self._options.engine.shadow_check)
        self._facts = launch.facts_of(start, self._options.server, Listeners([], []))
        self.tokenizer = Tokenizer.from_folder(self._facts.model_folder)
        end = self.tokenizer.end_id if self.tokenizer else None
        self._facts = self._facts.with_end(end)
        heap.settle()
        return Started(served, start.grammars)

    def _read(self, prompt: Any) -> ReadPrompt:
        if is_text(prompt):
            if self.tokenizer is None:
                raise ValueError("the model folder has no tokenizer.json: give token ids")
            return ReadPrompt(self.tokenizer.encode(prompt), prompt, None)
        if isinstance(prompt, str | bytes) or not all(map(_is_id, found := _items(prompt))):
            raise ValueError(f"a prompt must be a text or a list of token ids, got {prompt!r:.60}")
        return ReadPrompt(list(map(int, found)), "", None)

    def _read_chat(
        self, messages: Any, tools: Sequence[dict[str, Any]], arguments: dict[str, Any]
    ) -> ReadPrompt:
        if self.tokenizer is None or self.tokenizer.templates is None:
            raise ValueError("the model folder has no chat template: use generate")
        if tools and self._facts.tool_call_parser is None:
            raise ValueError("tools need the option tool_call_parser")
        functions = read_functions(tools)
        written = list(map(for_template, messages))
        text = self.tokenizer.render_chat(Conversation(written, list(tools), arguments))
        tokens = self.tokenizer.encode_more(text)
        return ReadPrompt(tokens, text, self._facts.reasoning_parser, functions)

    def _answers(self, prompts: Sequence[ReadPrompt], given: Params) -> list[RequestOutput]:
        params = (
            given if isinstance(given, Sequence) else [given or SamplingParams()] * len(prompts)
        )
        if len(params) != len(prompts):
            raise ValueError(
                f"sampling_params must be one for all or one for each of {len(prompts)} prompts, "
                f"got {len(params)}"
            )
        begun: list[Stream] = []
        try:
            for prompt, each in zip(prompts, params, strict=True):
                begun.append(self._begin(prompt, each))
            return [stream.result() for stream in begun]
        finally:  # a refusal, or an interrupt, leaves nothing running
            for stream in begun:
                stream.close()

    def _begin(self, prompt: ReadPrompt, params: SamplingParams) -> Stream:
        """Gives the engine the requests of a prompt."""
        sampling = make_sampling(params, len(prompt.tokens), self._facts)
        calls = self._calls(prompt, params)
        sampling = replace(sampling, grammar=_grammar(prompt, params, calls))
        check(prompt.tokens, sampling, self._facts.limits)
        seed = secrets.randbits(64) if params.seed is None else params.seed % 2**64
        answers = []
        for index in range(params.n):
            request = Request(
                request_id=next(self._ids),
                prompt=tuple(prompt.tokens),
                sampling=replace(sampling, seed32=derive_seed(seed, index)),
            )
            choice = self._choice(prompt, request, params, calls)
            answers.append(Answer(index, request, choice, self._names))
        return Stream(prompt, answers, self._engine)

    def _calls(self, prompt: ReadPrompt, params: SamplingParams) -> Calls | None:
        """How an answer may call, where that is to be held to something."""
        style, functions, form = self._facts.tool_call_parser, prompt.functions, params.form
        is_held = form is not None or any(each.get("strict") for each in functions)
        if style is None or not functions or not is_held:
            return None
        tools = [
            (each["name"], arguments_schema(each.get("parameters")) if each.get("strict") else None)
            for each in functions
        ]
        return Calls(style=style, tools=tools, many=True, free="answer" if form else "text")

    def _choice(
        self, prompt: ReadPrompt, request: Request, params: SamplingParams, calls: Calls | None
    ) -> Choice:
        schemas = {each["name"]: each.get("parameters") or {} for each in prompt.functions}
        style = self._facts.tool_call_parser if schemas else None
        name, sampling = prompt.reasoning, request.sampling
        is_open = None if name is None else is_open_after(prompt.text, name)
        prompt_text = PromptText(prompt.tokens, [0] * len(prompt.tokens))
        return Choice(
            Detokenizer(self.tokenizer, prompt.tokens) if self.tokenizer else None,
            StopFinder(tuple(params.stop)),
            new_parser(style, Said(schemas, None, calls is not None), is_open),
            sampling.min_tokens,
            Speculation.empty(self._facts.max_draft_depth),
            "",
            sampling.stop_token_ids,
            None if sampling.prompt_logprobs is None else prompt_text,
        )


def _command_line(options: dict[str, Any]) -> list[str]:
    """The options as the server's command line, which is checked as a whole.

    Raises:
      ConfigError: One belongs to the HTTP server.
    """
    words = []
    for name, value in options.items():
        if name in OF_A_SERVER:
            raise ConfigError(f"{name} is an option of the HTTP server; leave it out")
        if value is True:
            words.append(spelling(name))
        elif value is not None and value is not False:
            words.append(f"{spelling(name)}={value}")
    return words


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Several prompts, where one was given too."""
    if isinstance(prompts, str | bytes) or any(map(_is_id, _items(prompts)[:1])):
        return [prompts]  # pyright: ignore[reportReturnType]  # a list of ids is one prompt
    return prompts  # pyright: ignore[reportReturnType]


def _items(prompt: Any) -> list[Any]:
    """What a prompt or several are a list of, or an array; something that is no id, otherwise."""
    return list(prompt) if isinstance(prompt, Iterable) else [None]


def _is_id(value: Any) -> bool:
    """Whether it may be a token's id: a whole number, one of an array too."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _grammar(prompt: ReadPrompt, params: SamplingParams, calls: Calls | None) -> str | None:
    """What the answer is held to; it begins behind the reasoning."""
    if params.form is None and calls is None:
        return None
    lead = None if prompt.reasoning is None else thinking_after(prompt.text, prompt.reasoning)
    return Wanted(form=params.form, calls=calls, lead=lead).grammar()
