"""Tokenization of prompts and conversations."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from shared.engine.checks import TOO_LONG, RequestLimits
from shared.engine.image_inputs import PromptImage
from shared.images.placeholders import expanded
from shared.models.sentence_list import sentence_list
from shared.options.unsupported_fields import UNSUPPORTED_FIELDS
from shared.process.ipc_messages import DEFAULT_NAME, ServerInfo
from shared.server.completions.chat_renderer import Renderer
from shared.server.completions.image_decoder_pool import ImageDecoderPool
from shared.server.engine_link.body_thread import BodyParsingThread
from shared.server.protocol.errors import ApiError
from shared.server.protocol.fields import MAX_CHOICES
from shared.server.protocol.generation_request import ChatInput, GenerationRequest
from shared.text.template_worker import pack_conversation
from shared.text.tokenizer import Tokenizer
from shared.text.worker import WorkerError

_ADVICE = {field.name: field for field in UNSUPPORTED_FIELDS if field.is_of_template}


@dataclass(frozen=True)
class ReadPrompt:
    """Tokenized prompt.

    Attributes:
      tokens: Token ids for the engine.
      text: Text of the prompt; "" if it was sent as token ids.
      images: Images with their positions in the prompt.
    """

    tokens: list[int]
    text: str
    images: tuple[PromptImage, ...] = ()


class PromptReader:
    """Tokenizes prompts, off the event loop if that takes long.

    Args:
      tokenizer: None if the checkpoint has none; prompts must then be token ids.
      renderer: None without a chat template.
      opener: None if the model does not support images.
      limits: Limits of a request.
      max_open_requests: Maximum number of open choices of the server; None: no limit.
      work: Thread for long work.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        renderer: Renderer | None,
        opener: ImageDecoderPool | None,
        limits: RequestLimits,
        max_open_requests: int | None,
        work: BodyParsingThread,
    ) -> None:
        self._tokenizer, self._renderer, self._limits = tokenizer, renderer, limits
        self._opener, self._work = opener, work
        self._max_choices = min(MAX_CHOICES, max_open_requests or MAX_CHOICES)

    async def read(self, request: GenerationRequest, num_bytes: int) -> list[ReadPrompt]:
        """Returns all prompts of a request.

        Args:
          request: Validated request.
          num_bytes: Length of its body.

        Raises:
          ApiError: A prompt is invalid; names the field.
        """
        if request.chat is not None:
            self._check_choices(request.num_choices, "n")
            return [await self.read_chat(request.chat, num_bytes)]
        prompts = request.prompts
        field = "prompt" if len(prompts) > 1 else "n"
        self._check_choices(len(prompts) * request.num_choices, field)
        return [await self.read_prompt(prompt, with_special=True) for prompt in prompts]

    def _check_choices(self, count: int, field: str) -> None:
        """Rejects more choices than an idle server could run."""
        if count > self._max_choices:
            message = f"{field} requests {count} choices, at most {self._max_choices} are supported"
            raise ApiError(400, message, field)

    def ignored(self, chat: ChatInput | None) -> list[str]:
        """Returns the optional template inputs that the chat template does not read.

        Raises:
          ApiError: The model has no template for the conversation.
        """
        if chat is None or self._renderer is None:
            return []
        advice, has_tools = chat.conversation.advice, bool(chat.conversation.tools)
        try:
            unread = self._renderer.templates.unread(advice, has_tools)
        except WorkerError as error:
            raise ApiError(400, str(error), chat.name(error.part)) from error
        return [chat.name(name) for name in unread if _has_effect(name, advice.get(name))]

    async def read_prompt(self, prompt: str | list[int], with_special: bool) -> ReadPrompt:
        """Tokenizes a plain prompt; raises the errors of `read`.

        Args:
          prompt: Text or token ids.
          with_special: Add the tokenizer's special tokens.
        """
        if isinstance(prompt, list):
            return ReadPrompt(prompt, "")
        if self._tokenizer is None:
            message = "the model folder has no tokenizer.json; send prompt as token ids"
            raise ApiError(400, message, "prompt")
        self._check_length(prompt, "prompt", self._tokenizer)
        encode = self._tokenizer.encode if with_special else self._tokenizer.encode_more
        return ReadPrompt(await asyncio.to_thread(encode, prompt), prompt)

    async def read_chat(self, chat: ChatInput, num_bytes: int) -> ReadPrompt:
        """Renders and tokenizes a conversation; raises the errors of `read`."""
        field = chat.name("messages")
        if self._tokenizer is None or self._renderer is None:
            message = "the model folder has no chat template; use /v1/completions"
            raise ApiError(400, message, field)
        packed = await self._work.do(num_bytes, self._packed, chat, self._tokenizer)
        try:
            text = await self._renderer.render(packed)
        except WorkerError as error:
            raise ApiError(400, str(error), chat.name(error.part)) from error
        self._check_length(text, field, self._tokenizer)
        tokens = await asyncio.to_thread(self._tokenizer.encode_more, text)
        if self._opener is None:
            return ReadPrompt(tokens, text)
        return await self._with_images(ReadPrompt(tokens, text), chat, self._opener)

    def _packed(self, chat: ChatInput, tokenizer: Tokenizer) -> bytes:
        """Returns the packed conversation; raises the errors of `read`."""
        sent = chat.images
        if sent and self._opener is None:
            reason = (
                "is an image, and the served model does not support image input; send text only"
            )
            raise ApiError(400, f"{sent[0].place} {reason}", sent[0].place)
        self._check_texts(chat, tokenizer)
        return pack_conversation(chat.conversation)

    def _check_texts(self, chat: ChatInput, tokenizer: Tokenizer) -> None:
        """Rejects text that contains the placeholder of images."""
        conversation = chat.conversation
        token = self._limits.image_token
        name = None if token is None else tokenizer.bytes_of(token)
        if name is None:
            return
        given = [*conversation.messages, conversation.tools, conversation.arguments]
        if any(name.decode() in json.dumps(each, ensure_ascii=False) for each in given):
            reason = f"a text contains {name.decode()}, the placeholder of images"
            raise ApiError(400, f"{reason}; remove it", chat.name("messages"))

    async def _with_images(
        self, prompt: ReadPrompt, chat: ChatInput, opener: ImageDecoderPool
    ) -> ReadPrompt:
        """Adds images at the placeholders of a prompt; raises the errors of `read`."""
        token, sent, field = self._limits.image_token, chat.images, chat.name("messages")
        assert token is not None, "a vision-language model has an image token"
        places = [at for at, each in enumerate(prompt.tokens) if each == token]
        if len(places) != len(sent):
            reason = f"the chat template wrote {len(places)} image placeholders"
            raise ApiError(400, f"{reason} for {len(sent)} images", field)
        if not sent:
            return prompt
        opened = await opener.open(sent, field)
        counts = list(map(opener.num_tokens, opened))
        grown = accumulate(counts, lambda rows, count: rows + count - 1, initial=0)
        firsts = [place + more for place, more in zip(places, grown, strict=False)]
        images = await asyncio.to_thread(opener.placed, opened, firsts)
        return replace(prompt, tokens=expanded(prompt.tokens, token, counts), images=images)

    def _check_length(self, text: str, param: str, tokenizer: Tokenizer) -> None:
        """Rejects a text that is too long, before the time for encoding is spent."""
        if not tokenizer.can_fit(text, self._limits.max_request_tokens):
            message = f"{param} has {len(text)} characters and cannot fit into {self._limits.room}"
            raise ApiError(400, message, param, TOO_LONG)


def _has_effect(name: str, value: Any) -> bool:
    return name not in _ADVICE or _ADVICE[name].refuses(value)


def adapter_of(name: str | None, facts: ServerInfo) -> str:
    """Returns the LoRA adapter that a request names; empty for the base model.

    Raises:
      ApiError: Status 404; the server has neither a model nor an adapter of this name.
    """
    if name in facts.adapters:
        return str(name)
    if name not in (None, DEFAULT_NAME, facts.model_name):
        served = sentence_list(map(repr, (facts.model_name, *facts.adapters)), "and")
        message = f"the model {name!r:.200} does not exist; this server has {served}"
        raise ApiError(404, message, "model", "model_not_found")
    return ""
