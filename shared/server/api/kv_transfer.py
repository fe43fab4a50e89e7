"""Route of disaggregated prefill: the KV cache of a prompt, for another server."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from shared.engine.checks import OWN_NAMES, check
from shared.engine.image_inputs import PromptImage
from shared.engine.request import InvalidRequestError, SamplingParams
from shared.server.api.access_middleware import matches_any_key, sent_keys
from shared.server.api.request_parsing import parse_plain
from shared.server.api.routes import json_response
from shared.server.api.transport import EventStream, read_json, watch_client
from shared.server.completions.generation import submission_errors
from shared.server.engine_link.body_thread import BodyParsingThread
from shared.server.engine_link.engine_client import EngineClient
from shared.server.engine_link.engine_errors import EngineLost, NoRecordError, RequestRejected
from shared.server.engine_link.server_metrics import ServerMetrics, TokenTimes
from shared.server.engine_link.submission import Submission, SubmittedPrompt
from shared.server.protocol.errors import ApiError
from shared.server.protocol.fields import Strict, Text, User
from shared.server.protocol.openai_types import TokenId

PREFILL = SamplingParams(max_tokens=0)
NOT_CACHED = "not_cached"
_NAMES = {**OWN_NAMES, "prompt": "tokens"}


class SentImage(Strict):
    """Image of a prompt, resized by the image processor of the same model.

    Attributes:
      first: Position of its first image token.
      height, width: Size in pixels.
      pixels: Bytes of the RGB pixels, by row, in base64.
    """

    first: Annotated[int, Field(ge=0)]
    height: Annotated[int, Field(ge=1)]
    width: Annotated[int, Field(ge=1)]
    pixels: str


class KVTransferRequest(Strict):
    """Body of /kv_transfer."""

    tokens: list[TokenId]
    tenant: User = ""
    lora_name: Text = ""
    images: list[SentImage] = []


class KVTransferRoutes:
    """Handler of `/kv_transfer`."""

    def __init__(
        self, client: EngineClient, metrics: ServerMetrics, work: BodyParsingThread
    ) -> None:
        self._client, self._metrics, self._work = client, metrics, work

    async def transfer(self, request: Request) -> Response:
        """POST /kv_transfer: prefills a prompt; responds with tickets for its KV cache.

        There is a line of JSON for each part. An error after the first one ends the response.
        """
        self._check_secret(request)
        sent = await read_json(request)
        prompt = await self._work.do(len(sent), self._read, sent)
        with submission_errors():
            submission = self._client.submit_transfer(prompt, TokenTimes(self._metrics))
        with contextlib.ExitStack() as ends:
            ends.callback(submission.close)
            with watch_client(submission, request.receive):
                first = await _ticket(submission)
            if first["header"]["is_last"]:
                return json_response(first)
            ends.pop_all()  # the stream closes it
        return EventStream(submission, _lines(submission, first), "application/x-ndjson")

    def _check_secret(self, request: Request) -> None:
        secret = self._client.facts.transfer_secret
        if secret is not None and not matches_any_key(sent_keys(request.headers), [secret]):
            reason = "the secret of --disaggregation-secret-file is missing or another one"
            raise ApiError(401, f"{reason}; send it as a bearer token", code="invalid_api_key")

    def _read(self, sent: bytes) -> SubmittedPrompt:
        """Parses and checks a body."""
        body, facts = parse_plain(sent, KVTransferRequest), self._client.facts
        factor = 1 if facts.images is None else facts.images.multiple
        images = tuple(_image(image, factor) for image in body.images)
        try:
            sampling = replace(PREFILL, lora=body.lora_name)
            check(body.tokens, sampling, facts.limits, _NAMES, images)
        except InvalidRequestError as error:
            raise ApiError(400, str(error), error.field, error.code) from error
        return SubmittedPrompt(body.tokens, sampling, [0], body.tenant, 0, images)


async def _lines(submission: Submission, ticket: dict[str, Any]) -> AsyncIterator[bytes]:
    """Yields tickets up to the last one; an error ends them before."""
    yield json.dumps(ticket).encode() + b"\n"
    with contextlib.suppress(ApiError):
        while not ticket["header"]["is_last"]:
            ticket = await _ticket(submission)
            yield json.dumps(ticket).encode() + b"\n"


async def _ticket(submission: Submission) -> dict[str, Any]:
    try:
        return await submission.ticket()
    except NoRecordError as error:
        status = 404 if error.reason == NOT_CACHED else 503
        raise ApiError(status, str(error), code=f"kv_{error.reason}") from error
    except RequestRejected as error:
        raise ApiError(400, str(error), error.field) from error
    except EngineLost as error:
        raise ApiError(503, str(error), code="engine_lost") from error


def _image(image: SentImage, factor: int) -> PromptImage:
    shape = image.height, image.width, 3
    try:
        pixels = np.frombuffer(base64.b64decode(image.pixels, validate=True), np.uint8)
        pixels = pixels.reshape(shape)
    except ValueError as error:
        message = f"images has pixels that are not {shape} bytes in base64"
        raise ApiError(400, message, "images") from error
    if image.height % factor or image.width % factor:
        raise ApiError(400, f"images has sides that are not multiples of {factor}", "images")
    return PromptImage.of(image.first, pixels, factor)
