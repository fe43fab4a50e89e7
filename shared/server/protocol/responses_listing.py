"""List of a response's input items, in the form of the Responses API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from shared.server.protocol.errors import ApiError
from shared.server.protocol.response_types import ResponseModel
from shared.server.protocol.responses_items import (
    ContentPart,
    CustomCallItem,
    FunctionCallItem,
    InputItem,
    InputText,
    MessageItem,
    ReasoningItem,
)
from shared.server.protocol.responses_response_types import (
    ItemStatus,
    OutputCallItem,
    OutputCustomCallItem,
)

_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "reasoning": "rs_",
}


class ListedMessage(ResponseModel):
    """Message with its parts."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["user", "assistant", "system", "developer"]
    content: list[dict[str, Any]]


class ListedResult(ResponseModel):
    """Result of a function call, or of a call of a custom tool."""

    id: str
    type: Literal["function_call_output", "custom_tool_call_output"]
    status: ItemStatus
    call_id: str
    output: str | list[dict[str, Any]]


class ListedReasoning(ResponseModel):
    """Reasoning of an earlier answer."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[dict[str, Any]]
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None


class InputItemPage(ResponseModel):
    """Page of input items; `first_id` and `last_id` are null if it is empty."""

    object: Literal["list"]
    data: list[
        Annotated[
            ListedMessage | OutputCallItem | OutputCustomCallItem | ListedResult | ListedReasoning,
            Field(discriminator="type"),
        ]
    ]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page_of(
    items: Sequence[InputItem],
    response_id: str,
    *,
    after: str | None,
    limit: int,
    is_ascending: bool,
) -> dict[str, Any]:
    """Returns one page of the input items of a response.

    Args:
      items: Input items, the oldest first.
      response_id: Part of the ids of items without an id.
      after: Id of the item before the page; None: the page is the first one.
      limit: Maximum number of items.
      is_ascending: The oldest item is first.

    Raises:
      ApiError: No item has the id `after`.
    """
    listed = _listed(items, response_id)[:: 1 if is_ascending else -1]
    ids = [item["id"] for item in listed]
    if after is not None and after not in ids:
        reason = f"after: the response has no input item {after!r:.80}; send the id of one"
        raise ApiError(400, reason, "after")
    begin = 0 if after is None else ids.index(after) + 1
    shown = listed[begin : begin + limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": begin + limit < len(listed),
    }


def _listed(items: Sequence[InputItem], response_id: str) -> list[dict[str, Any]]:
    """Returns the items with a type, a status and distinct ids."""
    found: dict[str, dict[str, Any]] = {}
    for number, item in enumerate(items):
        kind = item.type or "message"
        made = f"{_PREFIXES[kind]}{response_id.removeprefix('resp_')}_{number}"
        name = item.id if item.id and item.id not in found else made
        head = {"id": name, "type": kind, "status": item.status or "completed"}
        found[name] = {**head, **_fields(item)}
    return list(found.values())


def _fields(item: InputItem) -> dict[str, Any]:
    if isinstance(item, MessageItem):
        return {"role": item.role, "content": _message_content(item)}
    if isinstance(item, ReasoningItem):
        return item.model_dump(exclude={"id", "type", "status"}, exclude_none=True)
    if isinstance(item, FunctionCallItem | CustomCallItem):
        space = {} if item.namespace is None else {"namespace": item.namespace}
        head = {"call_id": item.call_id, "name": item.name, **space}
        if isinstance(item, CustomCallItem):
            return {**head, "input": item.input}
        return {**head, "arguments": json.dumps(item.arguments)}
    output = item.output
    listed = output if isinstance(output, str) else _parts(output, "user")
    return {"call_id": item.call_id, "output": listed}


def _message_content(item: MessageItem) -> list[dict[str, Any]]:
    given = item.content
    parts = [InputText(type="text", text=given)] if isinstance(given, str) else given
    return _parts(parts, item.role)


def _parts(parts: Sequence[ContentPart], role: str) -> list[dict[str, Any]]:
    is_output = role == "assistant"
    text = {"type": "output_text", "annotations": [], "logprobs": []}
    return [
        {**(text if is_output else {"type": "input_text"}), "text": part.text}
        if isinstance(part, InputText)
        else {"type": "input_image", "image_url": part.image_url, "detail": part.detail or "auto"}
        for part in parts
    ]
