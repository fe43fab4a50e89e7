"""Generator of `/openapi.json`: every route with body, limits, responses and errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from shared.options.unsupported_fields import UNSUPPORTED_FIELDS
from shared.server.api.access_middleware import OPEN_PATHS
from shared.server.protocol.messages_response_types import AnthropicError
from shared.server.protocol.response_types import STREAM_END, Error

_REFERENCE = "#/components/schemas/{model}"
_ERRORS = {
    400: "a field is invalid or unsupported; `param` names it",
    401: "the API key is missing or invalid",
    403: "the route is disabled, or the host or origin is not allowed",
    404: "unknown model or resource",
    408: "the request did not arrive in time",
    409: "the response was cancelled",
    413: "the body is too long or has too many parts",
    415: "the body is not declared as JSON, or is compressed",
    431: "the request headers are too long",
    500: "the engine failed on the request",
    529: "the queue is full",
    503: "the engine has exited, the server is shutting down, or the queue is full",
}
_ANYTHING = ["null", "boolean", "number", "string", "array", "object"]
_OF_EVERY_ROUTE = (401, 403, 408, 431, 500)
_OF_BODIES = (400, 413, 415)


@dataclass(frozen=True, kw_only=True)
class Route:
    """Route with its documentation.

    Attributes:
      path, method, handler: Arguments of FastAPI.
      bodies: Models of the request body; a request matches one of them.
      answer: Model of the successful response; None without a JSON body.
      other_answer: Model of the response to Anthropic's clients; None: the same.
      error: Model of an error response.
      media_type: Media type of a response without a model.
      event: Model of a stream event; None without streaming.
      errors: Further error statuses, besides those of every route and every body.
    """

    path: str
    method: str
    handler: Callable[..., Any]
    bodies: tuple[type[BaseModel], ...] = ()
    answer: type[BaseModel] | None = None
    other_answer: type[BaseModel] | None = None
    error: type[BaseModel] = Error
    media_type: str | None = None
    event: type[BaseModel] | None = None
    errors: tuple[int, ...] = ()

    def add_to(self, app: FastAPI) -> None:
        """Adds the route to an application."""
        kind = "object" if self.media_type == "application/json" else "string"
        content = {self.media_type: {"schema": {"type": kind}}} if self.media_type else {}
        if self.answer:
            content["application/json"] = _any_of((self.answer, self.other_answer))
        if self.event:
            content["text/event-stream"] = {"itemSchema": _event_of(self.event, self.error)}
        success = {200: {"description": "a success", "content": content}}
        statuses = sorted({*_OF_EVERY_ROUTE, *(_OF_BODIES if self.bodies else ()), *self.errors})
        errors = {status: self._error(_ERRORS[status]) for status in statuses}
        extra = {"requestBody": _one_of(self.bodies)} if self.bodies else {}
        extra |= {"security": []} if self.path in OPEN_PATHS else {}
        app.add_api_route(
            self.path,
            self.handler,
            methods=[self.method],
            response_class=Response,  # adds no media type
            response_model=None,
            responses={**success, **errors, "default": self._error("any other error")},
            openapi_extra=extra,
        )

    def _error(self, description: str) -> dict[str, Any]:
        """Returns the documentation of an error; Anthropic's clients get their format."""
        other = None if self.error is AnthropicError else AnthropicError
        schema = _any_of((self.error, other))
        return {"description": description, "content": {"application/json": schema}}


def document(app: FastAPI, routes: Sequence[Route], has_key: bool) -> dict[str, Any]:
    """Returns the OpenAPI document of an application.

    Args:
      app: Application with the routes.
      routes: Routes with their models.
      has_key: Every route requires a key.
    """
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = schema.setdefault("components", {})
    components["schemas"] = _schemas(routes)
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {**schema, "security": [{"key": []}]} if has_key else schema


def _schemas(routes: Sequence[Route]) -> dict[str, Any]:
    types: set[type[BaseModel]] = {Error, AnthropicError}
    for route in routes:
        answers = (route.answer, route.other_answer, route.event, route.error)
        types.update(kind for kind in (*route.bodies, *answers) if kind)
    ordered = sorted(types, key=lambda kind: kind.__name__)
    _, schema = models_json_schema(
        [(kind, "validation") for kind in ordered], ref_template=_REFERENCE
    )
    schemas = schema["$defs"]
    for kind in types:
        if endpoint := getattr(kind, "ENDPOINT", None):
            schemas[kind.__name__]["properties"] |= _neutral_fields(endpoint)
    return schemas


def _neutral_fields(endpoint: str) -> dict[str, Any]:
    """Returns the schemas of unsupported fields with neutral values, and of ignored fields."""
    return {
        field.name: {
            **({"type": _ANYTHING} if field.is_advice else {"enum": [None, *field.neutral]}),
            "description": field.reason,
        }
        for field in UNSUPPORTED_FIELDS
        if endpoint in field.endpoints and not field.is_read and "." not in field.name
    }


def _schema_of(kind: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": _REFERENCE.format(model=kind.__name__)}}


def _any_of(kinds: Sequence[type[BaseModel] | None]) -> dict[str, Any]:
    schemas = [_schema_of(kind)["schema"] for kind in kinds if kind]
    return {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}


def _event_of(kind: type[BaseModel], error: type[BaseModel]) -> dict[str, Any]:
    """Returns the OpenAPI 3.2 schema of a stream event: JSON text, or the end marker."""
    either = _any_of((kind, error))["schema"]
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": either}
    fields = {"data": {"anyOf": [{"const": STREAM_END}, data]}}
    return {"type": "object", "properties": fields, "required": ["data"]}


def _one_of(kinds: tuple[type[BaseModel], ...]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": _any_of(kinds)}}
