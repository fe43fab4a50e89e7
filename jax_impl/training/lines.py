"""Conversion of common training data formats to one: a chat or a text, and an answer.

| format | fields |
|---|---|
| OpenAI chats, TRL conversations | `messages`, `tools`, `chat_template_kwargs`, `answer` |
| text and answer, as in TRL and OpenAI | `prompt`, `answer` or `completion` |
| chat and answer, as in TRL | `prompt` and `completion`, lists of messages |
| ShareGPT | `conversations` of `from` and `value`, `system`, `tools` |
| Alpaca | `instruction`, `input`, `output`, `system` |

A field that is not read is an error, unless it is metadata (`NOTES`) or empty.
"""

import json
from typing import Any

Line = dict[str, Any]

NOTES = {
    *("id", "idx", "index", "uuid", "key", "hash", "prompt_id", "sample_id", "question_id"),
    *("conversation_id", "conv_id", "turn_id", "source", "sources", "dataset", "data_source"),
    *("origin", "url", "license", "author", "created", "created_at", "timestamp", "date", "split"),
    *("kind", "category", "categories", "task", "task_type", "topic", "tags", "domain", "subject"),
    *("difficulty", "score", "rating", "quality", "language", "lang", "num_turns", "num_tokens"),
    *("metadata", "meta", "model", "generator", "parallel_tool_calls"),
}
"""Metadata fields of a line or a message, which are ignored."""

MESSAGE_FIELDS = (
    *("role", "content", "name", "reasoning_content", "reasoning", "tool_calls", "tool_call_id"),
    "weight",
)
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "developer": "developer",
}
"""Chat roles by the names of ShareGPT."""

_FORMATS = {
    "messages": ("messages", "tools", "chat_template_kwargs", "answer"),
    "conversations": ("conversations", "tools", "chat_template_kwargs", "system"),
    "instruction": ("instruction", "input", "output", "system"),
    "prompt": ("prompt", "answer", "completion", "tools", "chat_template_kwargs"),
}
"""Fields of each format, by the field that identifies it."""


def read_line(name: str, line: Line) -> Line:
    """Converts a line to a chat or a prompt.

    A chat has `messages`, `tools` and `chat_template_kwargs`, a prompt `prompt` and `answer`.

    Raises:
      ValueError: The line has no known format, or a field that is not read; the message starts with
        `name`.
    """
    line = {field: value for field, value in line.items() if value is not None}
    kinds = [kind for kind in _FORMATS if kind in line]
    if len(kinds) != 1:
        found = " and ".join(kinds) or "neither messages nor a prompt"
        raise ValueError(f"{name} has {found}; it must have one of {', '.join(_FORMATS)}")
    _check_fields(name, "", line, _FORMATS[kinds[0]])
    read = {"messages": _chat, "conversations": _share_gpt, "instruction": _alpaca}
    line = read.get(kinds[0], _prompt)(name, line)
    if "messages" in line:
        _check_messages(name, line["messages"])
    return line


def for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that chat templates read, with parsed arguments and no null content."""
    turn = {field: message[field] for field in MESSAGE_FIELDS if message.get(field) is not None}
    turn["content"] = "" if message["content"] is None else message["content"]
    turn.pop("weight", None)
    if calls := message.get("tool_calls"):
        turn["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}}
            for call in calls
        ]
    return turn


def _arguments(function: dict[str, Any]) -> Any:
    arguments = function.get("arguments") or {}
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _check_fields(name: str, of: str, given: Line, known: tuple[str, ...]) -> None:
    for field, value in given.items():
        is_empty = value is None or value in ("", [], {})
        if field not in known and field not in NOTES and not is_empty:
            raise ValueError(
                f"{name} has the field {field!r:.80}{of}, which is not read; fields are "
                f"{', '.join(known)}: rename it or remove it"
            )


def _check_messages(name: str, messages: Any) -> None:
    is_list = isinstance(messages, list) and all(isinstance(turn, dict) for turn in messages)
    if not is_list or not all({"role", "content"} <= turn.keys() for turn in messages):
        raise ValueError(f"{name}: messages must be a list of objects with role and content")
    for turn in messages:
        _check_fields(name, " in a message", turn, MESSAGE_FIELDS)
        if turn["role"] not in ROLES.values():
            roles = ", ".join(dict.fromkeys(ROLES.values()))
            raise ValueError(f"{name} has the role {turn['role']!r:.80}; roles are {roles}")
        parts = turn["content"] if isinstance(turn["content"], list) else []
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
            raise ValueError(
                f"{name} has a message with parts other than text, which are unsupported; remove "
                "them"
            )
        if turn.get("weight") not in (None, 0, 1):
            raise ValueError(f"{name}: weight of a message must be 0 or 1, got {turn['weight']!r}")


def _chat(name: str, line: Line) -> Line:
    """Returns a chat with the `answer` field as its last message."""
    messages = _messages(name, "messages", line["messages"])
    if "answer" in line:
        messages = [*messages, {"role": "assistant", "content": line["answer"]}]
    return {field: value for field, value in line.items() if field != "answer"} | {
        "messages": messages
    }


def _prompt(name: str, line: Line) -> Line:
    """Returns a text and its answer, or one chat whose labels are in the completion."""
    if {"answer", "completion"} <= line.keys():
        raise ValueError(f"{name} has both answer and completion; remove one of them")
    rest = {key: value for key, value in line.items() if key not in ("prompt", "completion")}
    prompt, answer = line["prompt"], line.get("completion", line.get("answer"))
    if isinstance(prompt, list):
        _check_messages(name, prompt)
        known = [turn | ({"weight": 0} if turn["role"] == "assistant" else {}) for turn in prompt]
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        return {**rest, "messages": [*known, *_messages(name, "completion", answer or [])]}
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(
            f"{name} has neither messages nor a prompt; prompt must be a string that is not empty"
        )
    if unread := [field for field in ("tools", "chat_template_kwargs") if rest.get(field)]:
        raise ValueError(
            f"{name} has {unread[0]}, which are unsupported with a text prompt; use messages"
        )
    return {"prompt": prompt} | ({} if answer is None else {"answer": answer})


def _messages(name: str, field: str, value: Any) -> list[Line]:
    if not isinstance(value, list):
        raise ValueError(f"{name}: {field} must be a list of messages with role and content")
    return value


def _share_gpt(name: str, line: Line) -> Line:
    turns = [_turn(name, turn) for turn in _messages(name, "conversations", line["conversations"])]
    rest = {key: line[key] for key in ("tools", "chat_template_kwargs") if key in line}
    return {**rest, "messages": _system(line) + turns}


def _turn(name: str, turn: Any) -> Line:
    """Converts a message of ShareGPT, which has `from` and `value` for role and content."""
    if not isinstance(turn, dict):
        raise ValueError(f"{name}: conversations must be a list of objects with from and value")
    if "from" not in turn:
        return turn
    if turn["from"] not in ROLES or not isinstance(turn.get("value"), str):
        raise ValueError(
            f"{name} has a message from {turn['from']!r:.80}; from must be one of "
            f"{', '.join(ROLES)}, and value must be a string"
        )
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {**rest, "role": ROLES[turn["from"]], "content": turn["value"]}


def _alpaca(name: str, line: Line) -> Line:
    texts = {field: line.get(field, "") for field in ("instruction", "input", "output")}
    if not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"{name}: {', '.join(texts)} must be strings")
    question = "\n\n".join(filter(None, [texts["instruction"], texts["input"]]))
    answer = [{"role": "assistant", "content": texts["output"]}] if texts["output"] else []
    return {"messages": [*_system(line), {"role": "user", "content": question}, *answer]}


def _system(line: Line) -> list[Line]:
    """Returns the system message of a format with a `system` field; none if it is empty."""
    return [{"role": "system", "content": line["system"]}] if line.get("system") else []
