"""Admin routes: external corpora of the n-gram drafter, and LoRA adapters."""

from __future__ import annotations

import array
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from shared.engine.checks import check_ids
from shared.engine.request import InvalidRequestError
from shared.process.ipc_messages import DEFAULT_NAME
from shared.server.api.access_middleware import matches_any_key, sent_keys
from shared.server.api.request_parsing import parse_plain
from shared.server.api.transport import read_json
from shared.server.engine_link.engine_client import EngineClient
from shared.server.engine_link.engine_errors import EngineLost, RequestRejected
from shared.server.protocol.errors import ApiError
from shared.server.protocol.fields import ID_SCHEMA, Strict, Text, is_id_list
from shared.text.tokenizer import Tokenizer, is_text

SEPARATOR = -1
"""Separator after each document; n-gram drafts end there (`shared.engine.ngram.corpus`)."""

START_CORPUS = "start"
"""Name of the corpus of `--speculative-ngram-external-corpus-path`."""

MAX_DOCUMENTS = 1 << 17  # per request
Document = str | list[int]


def _read_texts(value: Any) -> list[Document]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_DOCUMENTS:
        raise PydanticCustomError(
            "documents", "must be a list of 1 to {most}", {"most": MAX_DOCUMENTS}
        )
    if not all(map(_is_document, value)):
        raise PydanticCustomError("documents", "must be strings or lists of token ids")
    return value


def _is_document(value: Any) -> bool:
    return is_text(value) or is_id_list(value)


_TOKENS = {"type": "array", "items": ID_SCHEMA}
_DOCUMENTS = {
    "type": "array",
    "items": {"anyOf": [{"type": "string"}, _TOKENS]},
    "minItems": 1,
    "maxItems": MAX_DOCUMENTS,
}


class AddCorpus(Strict):
    """Body of /add_external_corpus."""

    corpus_id: Annotated[Text, Field(min_length=1, max_length=200)]
    documents: Annotated[list[Document], PlainValidator(_read_texts), WithJsonSchema(_DOCUMENTS)]


class RemoveCorpus(Strict):
    """Body of /remove_external_corpus."""

    corpus_id: Text


class AdapterToLoad(Strict):
    """Body of /load_lora_adapter, as in SGLang."""

    lora_name: Annotated[Text, Field(min_length=1, max_length=200)]
    lora_path: Annotated[Text, Field(min_length=1)]


class AdapterToUnload(Strict):
    """Body of /unload_lora_adapter, as in SGLang."""

    lora_name: Text


class AdminRoutes:
    """Handlers of the admin routes; each requires the admin key."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None) -> None:
        self._client, self._tokenizer = client, tokenizer

    async def add_corpus(self, request: Request) -> Response:
        """POST /add_external_corpus; responds once the corpus can supply drafts."""
        self._check_key(request)
        body = parse_plain(await read_json(request), AddCorpus)
        parts = body.documents, self._tokenizer, self._client.facts.limits.vocab_size
        tokens = await asyncio.to_thread(pack_documents, *parts)
        return await self._answer("corpus_add", body.corpus_id, tokens)

    async def remove_corpus(self, request: Request) -> Response:
        """POST /remove_external_corpus."""
        self._check_key(request)
        body = parse_plain(await read_json(request), RemoveCorpus)
        return await self._answer("corpus_remove", body.corpus_id)

    async def list_corpora(self, request: Request) -> Response:
        """GET /list_external_corpora: number of tokens of each corpus, by name."""
        self._check_key(request)
        return await self._answer("corpus_list")

    async def load_adapter(self, request: Request) -> Response:
        """POST /load_lora_adapter; responds once requests may name the adapter."""
        self._check_key(request)
        body, facts = parse_plain(await read_json(request), AdapterToLoad), self._client.facts
        if body.lora_name in (facts.model_name, DEFAULT_NAME):
            reason = f"{body.lora_name!r:.200} is a name of the model; choose another one"
            raise ApiError(400, reason, "lora_name")
        return await self._adapters("lora_load", body.lora_name, body.lora_path)

    async def unload_adapter(self, request: Request) -> Response:
        """POST /unload_lora_adapter; responds once the requests of the adapter have ended."""
        self._check_key(request)
        name = parse_plain(await read_json(request), AdapterToUnload).lora_name
        self._client.facts.adapters.pop(name, None)  # no further requests
        return await self._adapters("lora_unload", name)

    async def _adapters(self, *message: str) -> Response:
        """Sends a message; returns the adapters, which the routes serve from then on."""
        found, served = await self._ask(message), self._client.facts.adapters
        served.clear()
        served.update(found["folders"])
        answer = {"success": True, "loaded_adapters": found["folders"], "notes": found["notes"]}
        return Response(json.dumps(answer), media_type="application/json")

    def _check_key(self, request: Request) -> None:
        key = self._client.facts.admin_api_key
        if key is None:
            reason = "this route is disabled; start the server with --admin-api-key"
            raise ApiError(403, reason, code="admin_closed")
        if not matches_any_key(sent_keys(request.headers), [key]):
            reason = "the admin key is missing or invalid; send it as a bearer token"
            raise ApiError(401, reason, code="invalid_api_key")

    async def _answer(self, *message: Any) -> Response:
        corpora = await self._ask(message)
        return Response(json.dumps({"corpora": corpora}), media_type="application/json")

    async def _ask(self, message: Sequence[Any]) -> dict[str, Any]:
        try:
            return await self._client.ask(*message)
        except RequestRejected as error:
            raise ApiError(400, str(error), error.field) from error
        except EngineLost as error:
            raise ApiError(503, str(error), code="engine_lost") from error


async def load_start_corpus(client: EngineClient, tokenizer: Tokenizer | None) -> None:
    """Adds the corpus of --speculative-ngram-external-corpus-path, if the flag is set.

    Raises:
      ValueError: The file cannot be used; the message is one sentence.
      EngineLost: The engine is gone.
    """
    path = client.facts.corpus_path
    if path is None:
        return
    try:
        tokens = pack_documents(read_documents(path), tokenizer, client.facts.limits.vocab_size)
        await client.ask("corpus_add", START_CORPUS, tokens)
    except (ApiError, RequestRejected, OSError) as error:
        raise ValueError(f"--speculative-ngram-external-corpus-path {path}: {error}") from error


def read_documents(path: str) -> list[Document]:
    """Reads the documents of a JSONL file: one string or list of token ids per line.

    Raises:
      ApiError: A line is invalid; the message has its number.
    """
    documents: list[Document] = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            document = _read_document(line)
            if document is None:
                raise ApiError(400, f"line {number} must be a string or a list of token ids")
            documents.append(document)
    return documents


def _read_document(line: str) -> Document | None:
    try:
        document = json.loads(line)
    except ValueError:
        return None
    return document if _is_document(document) else None


def pack_documents(documents: Sequence[Document], tokenizer: Tokenizer | None, vocab: int) -> bytes:
    """Returns the token ids of documents as int32, with a separator after each document.

    Raises:
      ApiError: A document is a string and the model has no tokenizer, or an id is out of range.
    """
    words = array.array("i")
    for document in documents:
        ids = _tokens(document, tokenizer)
        try:
            check_ids("documents", ids, vocab)
        except InvalidRequestError as refusal:
            raise ApiError(400, str(refusal), refusal.field) from refusal
        words.extend(ids)
        words.append(SEPARATOR)
    return words.tobytes()


def _tokens(document: Document, tokenizer: Tokenizer | None) -> list[int]:
    if not isinstance(document, str):
        return document
    if tokenizer is None:
        reason = "the model folder has no tokenizer.json; send documents as token ids"
        raise ApiError(400, reason, "documents")
    return tokenizer.encode(document)
