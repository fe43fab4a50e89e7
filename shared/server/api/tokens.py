"""Routes /tokenize and /detokenize, in vLLM's format."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import Request
from starlette.responses import Response

from shared.engine.checks import check_ids
from shared.engine.request import InvalidRequestError
from shared.process.ipc_messages import ServerInfo
from shared.server.api.request_parsing import parse_plain, parse_with
from shared.server.api.transport import read_json
from shared.server.completions.logprobs import TokenNames
from shared.server.completions.prompts import PromptReader, adapter_of
from shared.server.engine_link.body_thread import BodyParsingThread
from shared.server.protocol.errors import ApiError
from shared.server.protocol.fields import No, Strict, Text
from shared.server.protocol.openai_types import ChatPrompt, TokenId
from shared.text.tokenizer import Tokenizer


class TokenizeText(Strict):
    """Body of /tokenize for a plain prompt."""

    model: Text | None = None
    prompt: Text
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChat(ChatPrompt):
    """Body of /tokenize for a conversation."""

    model: Text | None = None
    add_special_tokens: No = False
    return_token_strs: bool | None = None


class Detokenize(Strict):
    """Body of /detokenize."""

    model: Text | None = None
    tokens: list[TokenId]


class TokenRoutes:
    """Handlers of `/tokenize` and `/detokenize`."""

    def __init__(
        self,
        facts: ServerInfo,
        reader: PromptReader,
        tokenizer: Tokenizer | None,
        work: BodyParsingThread,
    ) -> None:
        self._facts, self._reader, self._tokenizer = facts, reader, tokenizer
        self._work = work
        self._names = TokenNames(tokenizer)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        sent = await read_json(request)
        body = await self._work.do(len(sent), parse_with, sent, _kind)
        adapter_of(body.model, self._facts)
        tokens = await self._tokens(body, len(sent))
        names = [self._names.name(token) for token in tokens] if body.return_token_strs else None
        most = self._facts.limits.context_length
        values = {
            "count": len(tokens),
            "max_model_len": most,
            "tokens": tokens,
            "token_strs": names,
        }
        return _json(values)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize; the text includes special tokens."""
        sent = await read_json(request)
        body = await self._work.do(len(sent), parse_plain, sent, Detokenize)
        adapter_of(body.model, self._facts)
        if self._tokenizer is None:
            raise ApiError(400, "the model folder has no tokenizer.json", "tokens")
        self._check_tokens(body.tokens)
        return _json({"prompt": await asyncio.to_thread(self._tokenizer.decode_all, body.tokens)})

    async def _tokens(self, body: TokenizeText | TokenizeChat, num_bytes: int) -> list[int]:
        if isinstance(body, TokenizeChat):
            chat = await self._work.do(num_bytes, body.to_chat)
            return (await self._reader.read_chat(chat, num_bytes)).tokens
        return (await self._reader.read_prompt(body.prompt, body.add_special_tokens)).tokens

    def _check_tokens(self, tokens: list[int]) -> None:
        limits = self._facts.limits
        if len(tokens) > limits.context_length:
            message = (
                f"tokens has {len(tokens)} tokens, at most {limits.context_length} are supported"
            )
            raise ApiError(400, message, "tokens")
        try:
            check_ids("tokens", tokens, limits.vocab_size)
        except InvalidRequestError as refusal:
            raise ApiError(400, str(refusal), refusal.field) from refusal


def _kind(fields: dict[str, Any]) -> type[TokenizeText] | type[TokenizeChat]:
    return TokenizeChat if "messages" in fields else TokenizeText


def _json(content: dict[str, Any]) -> Response:
    return Response(json.dumps(content), media_type="application/json")
