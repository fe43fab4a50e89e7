"""Offline inference in Python: `LLM(model_path, **options)`, without a server."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self

from rich.console import Console

from shared.engine.checks import check
from shared.engine.request import Request
from shared.models.sentence_list import sentence_list
from shared.offline.answer import OutputStream, PendingOutput, TokenizedPrompt
from shared.offline.engine_thread import EngineThread, Started
from shared.offline.late_platform import LatePlatform
from shared.offline.messages import (
    for_template,
    read_tools,
    read_variables,
)
from shared.offline.options import python_words, read_options
from shared.offline.params import SamplingParams
from shared.offline.prompts import Message, is_message, listed_chats, listed_prompts, not_a_prompt
from shared.offline.results import RequestOutput
from shared.offline.values import items_of, token_ids
from shared.options.options import Options
from shared.process import engines, gc_freeze, logs, serving
from shared.process.address import Listeners
from shared.process.ipc_messages import ServerInfo
from shared.process.model_files import local_models
from shared.process.model_places import find_models
from shared.process.progress import console_of
from shared.process.start import Platform
from shared.process.startup_report import start_notes
from shared.process.tp.startup import tp_startup
from shared.server.completions.choice import Choice, Speculation, StopStringMatcher
from shared.server.completions.logprobs import PromptText, TokenNames
from shared.server.completions.sampling import make_sampling
from shared.spec.gumbel_noise import derive_seed
from shared.text.chat_template import Conversation
from shared.text.grammar_worker import GrammarRequest, ToolCallSpec
from shared.text.parsing.output_parser import OutputBuilder
from shared.text.parsing.reasoning import is_open_after, thinking_after
from shared.text.reasoning_formats import REASONING_FORMATS, THINKING
from shared.text.text_parsers import new_parser
from shared.text.tokenizer import Detokenizer, Tokenizer, is_text
from shared.text.tool_call_grammar import arguments_schema
from shared.text.tool_messages import read_functions

Prompt = str | Iterable[int]
Params = SamplingParams | Iterable[SamplingParams] | None


class LLM:
    """Model on this machine's GPU, or on its CPU if there is no GPU.

    The engine runs on its own thread. Options are the server's flags, spelled as Python names
    (`--page-size 64` is `page_size=64`), with the same validation. Outputs are identical to those
    of the server, and speculation never changes them.

    Methods are thread-safe, and concurrent requests share the batch. In a forked process every
    call raises RuntimeError. An unclosed engine ends when its `LLM` is freed, with a
    ResourceWarning.

    Args:
      model_path: Folder of a Hugging Face checkpoint, or a hub id `ORG/NAME` or
        `ORG/NAME@REVISION`; None: the demo model of the package.
      **options: Flags of the server, except those of its listeners and its log. `log_level`
        defaults to "warning"; "info" prints the progress of the startup on stderr.

    Raises:
      ValueError: An option is unknown or invalid, or the startup check failed; one sentence.
    """

    PLATFORM: ClassVar[Platform | LatePlatform]
    RANK_MODULE: ClassVar[str | None]

    def __init__(self, model_path: str | None = None, **options: Any) -> None:
        if model_path is not None:
            options = {"model_path": model_path, **options}
        self._options = read_options(options)
        start = partial(_start, self._options, type(self), self.RANK_MODULE)
        with python_words():
            self._engine = EngineThread(start)
        self._facts, self.tokenizer = self._engine.facts, self._engine.tokenizer
        self._names, self._ids = TokenNames(self.tokenizer), itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._engine.is_own:  # not in a forked process
            self.close()

    def close(self) -> None:
        """Ends all requests and frees the device memory; a second call does nothing.

        Raises:
          RuntimeError: This process was forked from the engine's.
        """
        self._engine.close()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params = None,
    ) -> list[RequestOutput]:
        """Generates completions of prompts as one batch.

        Args:
          prompts: A string, a list of token ids, or several of either, as a list, an array or a
            generator.
          sampling_params: Parameters of all prompts, or one for each prompt; None: the model's
            defaults, with no limit on the output.

        Returns:
          One result for each prompt, in order.

        Raises:
          ValueError: A prompt or a parameter is invalid; one sentence.
          RuntimeError: The engine failed, or this process was forked from the engine's.
        """
        self._engine.check_process()
        read = [self._read(prompt) for prompt in listed_prompts(prompts)]
        return self._answers(read, sampling_params)

    def chat(
        self,
        messages: Iterable[Message] | Iterable[Iterable[Message]],
        sampling_params: Params = None,
        *,
        tools: Iterable[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generates replies to conversations as one batch; otherwise the same as `generate`.

        Args:
          messages: One conversation or several, in OpenAI's format.
          sampling_params: See `generate`.
          tools: Tools that the model may call, in OpenAI's format; the option `tool_call_parser`
            selects the parser of the calls.
          chat_template_kwargs: Values of variables that the chat template defines.
        """
        self._engine.check_process()
        listed = read_tools(tools)
        variables = read_variables(chat_template_kwargs)
        read = [self._read_chat(chat, listed, variables) for chat in listed_chats(messages)]
        return self._answers(read, sampling_params)

    def stream(
        self,
        prompt: Prompt | Iterable[Message],
        sampling_params: SamplingParams | None = None,
    ) -> OutputStream:
        """Generates the output of a prompt or a conversation step by step.

        Returns:
          Iterator for `for` and `async for` loops, with one `StreamChunk` for each step.
          Leaving the loop ends the request.
        """
        self._engine.check_process()
        items = None if isinstance(prompt, str) else items_of(prompt)
        if items and is_message(items[0]):
            (chat,) = listed_chats(items)
            read = self._read_chat(chat, [], {})
        else:
            read = self._read(prompt if items is None else items)
        return self._begin(read, _checked(sampling_params))

    def _read(self, prompt: Any) -> TokenizedPrompt:
        if is_text(prompt):
            if self.tokenizer is None:
                raise ValueError("the model folder has no tokenizer.json: pass token ids")
            return TokenizedPrompt(self.tokenizer.encode(prompt), prompt, None)
        if (ids := token_ids(prompt)) is None:
            raise ValueError(not_a_prompt(prompt))
        return TokenizedPrompt(ids, "", None)

    def _read_chat(
        self, messages: list[Message], tools: list[dict[str, Any]], variables: dict[str, Any]
    ) -> TokenizedPrompt:
        if self.tokenizer is None or self.tokenizer.templates is None:
            raise ValueError("the model folder has no chat template: use generate")
        if tools and self._facts.tool_call_parser is None:
            raise ValueError("tools require the option tool_call_parser")
        functions = read_functions(tools)
        written = list(map(for_template, messages))
        text = self.tokenizer.render_chat(Conversation(written, tools, variables))
        tokens = self.tokenizer.encode_more(text)
        return TokenizedPrompt(tokens, text, self._facts.reasoning_parser, functions)

    def _answers(self, prompts: list[TokenizedPrompt], given: Params) -> list[RequestOutput]:
        params = _listed_params(given, len(prompts))
        begun: list[OutputStream] = []
        try:
            for prompt, each in zip(prompts, params, strict=True):
                begun.append(self._begin(prompt, each))
            return [stream.result() for stream in begun]
        finally:  # after an error or an interrupt no request keeps running
            for stream in begun:
                stream.close()

    @python_words()
    def _begin(self, prompt: TokenizedPrompt, params: SamplingParams) -> OutputStream:
        """Submits the requests of a prompt to the engine."""
        sampling = make_sampling(params.fields, len(prompt.tokens), self._facts)
        calls = self._calls(prompt, params)
        lora = _adapter(params, self._facts)
        sampling = replace(sampling, grammar=_grammar(prompt, params, calls), lora=lora)
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
            answers.append(PendingOutput(index, request, choice, self._names))
        return OutputStream(prompt, answers, self._engine)

    def _calls(self, prompt: TokenizedPrompt, params: SamplingParams) -> ToolCallSpec | None:
        """Returns the tool-call part of the grammar; None if calls are unconstrained."""
        style, functions, form = self._facts.tool_call_parser, prompt.functions, params.form
        is_held = form is not None or any(each.get("strict") for each in functions)
        if style is None or not functions or not is_held:
            return None
        tools = [
            (each["name"], arguments_schema(each.get("parameters")) if each.get("strict") else None)
            for each in functions
        ]
        return ToolCallSpec(style=style, tools=tools, many=True, free="answer" if form else "text")

    def _choice(
        self,
        prompt: TokenizedPrompt,
        request: Request,
        params: SamplingParams,
        calls: ToolCallSpec | None,
    ) -> Choice:
        schemas = {each["name"]: each.get("parameters") or {} for each in prompt.functions}
        style = self._facts.tool_call_parser if schemas else None
        name, sampling = prompt.reasoning, request.sampling
        is_open = None if name is None else is_open_after(prompt.text, name)
        prompt_text = PromptText(prompt.tokens, [0] * len(prompt.tokens))
        return Choice(
            Detokenizer(self.tokenizer, prompt.tokens) if self.tokenizer else None,
            StopStringMatcher(tuple(params.stop)),
            new_parser(
                style,
                OutputBuilder(schemas, None, calls is not None),
                is_open,
                THINKING if name is None else REASONING_FORMATS[name],
            ),
            sampling.min_tokens,
            Speculation.empty(self._facts.max_draft_depth),
            "",
            sampling.stop_token_ids,
            None if sampling.prompt_logprobs is None else prompt_text,
        )


def _start(options: Options, model: type[LLM], rank_module: str | None) -> Started:
    """Starts an engine, on the only thread that uses the device."""
    gc_freeze.unfreeze_gc()
    logs.set_level(options.observing.log_level)
    console = console_of(options.observing)
    # A download takes minutes, so a terminal shows its progress at every log level.
    options = local_models(options, find_models(options), Console(stderr=True))
    with tp_startup(options, lambda: model.PLATFORM, rank_module, lambda failure: None) as ranked:
        start = ranked.prepare()
        for note in (*ranked.notes, *start_notes(start)):
            console.print(note)
        backend = serving.ready(start, ranked, console)
        engine = engines.make_engine(backend, start.memory, adapters=start.read_adapters())
        served = engines.with_shadow_verify(engine, backend, options.engine.shadow_verify_rate)
    facts = serving.server_info(start, Listeners([], []))
    files = start.opened.target.tokenizer
    tokenizer = Tokenizer.from_files(
        files, facts.marks, facts.chat_template, facts.tool_call_parser
    )
    facts = facts.with_end(tokenizer.end_id if tokenizer else None)
    gc_freeze.freeze_gc()
    return Started(served, start.grammars, facts, tokenizer)


def _checked(params: Any) -> SamplingParams:
    """Returns a validated copy of the parameters, whose fields may have been assigned."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling_params must be SamplingParams, got {params!r:.60}")
    return replace(params)


def _listed_params(given: Params, count: int) -> list[SamplingParams]:
    """Returns one set of parameters for each of `count` prompts."""
    if given is None or isinstance(given, SamplingParams):
        return [_checked(given)] * count
    items = items_of(given)
    if items is None:
        raise ValueError(f"sampling_params must be SamplingParams or a list, got {given!r:.60}")
    if len(items) != count:
        raise ValueError(
            f"sampling_params must be one for all or one for each of {count} prompts, "
            f"got {len(items)}"
        )
    return list(map(_checked, items))


def _adapter(params: SamplingParams, facts: ServerInfo) -> str:
    """Returns the name of the adapter; empty for the base model."""
    if params.lora is not None and params.lora not in facts.adapters:
        names = sentence_list(map(repr, facts.adapters)) if facts.adapters else "none"
        raise ValueError(
            f"lora must be a name in the option lora_paths ({names}), got {params.lora!r:.60}"
        )
    return params.lora or ""


def _grammar(
    prompt: TokenizedPrompt, params: SamplingParams, calls: ToolCallSpec | None
) -> str | None:
    """Returns the grammar of the output, which begins after the reasoning; None without one."""
    if params.form is None and calls is None:
        return None
    lead = None if prompt.reasoning is None else thinking_after(prompt.text, prompt.reasoning)
    return GrammarRequest(form=params.form, calls=calls, lead=lead).grammar()
