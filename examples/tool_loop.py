"""Runs a loop of tool calls with chat completions, the Responses API or the Messages API.

Start a server with a model that calls tools, then `python -m examples.tool_loop --api messages`;
`--base-url` sets the address of the server. The tool multiplies two numbers.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import httpx

from bench.common.server import headers_of, no_answer, server_options, url_of

QUESTION = "A cinema has 6 rows of 13 seats. How many seats are there? Use the tool."
NAME, PURPOSE = "multiply", "Returns the product of two numbers."
NUMBERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
MAX_TOKENS = 200

Post = Callable[[str, dict[str, Any]], dict[str, Any]]


def multiply(arguments: dict[str, Any]) -> str:
    """Returns the result of the tool as text."""
    try:
        return str(arguments["a"] * arguments["b"])
    except (KeyError, TypeError) as error:
        return f"Error: {error!r}"


def with_chat(post: Post, question: str, max_rounds: int) -> str:
    """Returns the last answer of a loop with /v1/chat/completions."""
    function = {"name": NAME, "description": PURPOSE, "parameters": NUMBERS}
    messages: list[Any] = [{"role": "user", "content": question}]
    fields = {"messages": messages, "tools": [{"type": "function", "function": function}]}
    for _ in range(max_rounds):
        answer = post("/v1/chat/completions", {**fields, "max_tokens": MAX_TOKENS})
        message = answer["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return message["content"]
        for call in message["tool_calls"]:
            result = multiply(json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return "no answer within the rounds"


def with_responses(post: Post, question: str, max_rounds: int) -> str:
    """Returns the last answer of a loop with /v1/responses."""
    tool = {"type": "function", "name": NAME, "description": PURPOSE, "parameters": NUMBERS}
    items: list[Any] = [{"role": "user", "content": question}]
    for _ in range(max_rounds):
        fields = {"input": items, "tools": [tool], "max_output_tokens": MAX_TOKENS}
        output = post("/v1/responses", fields)["output"]
        items += output
        calls = [item for item in output if item["type"] == "function_call"]
        if not calls:
            texts = [item["content"] for item in output if item["type"] == "message"]
            return "".join(part["text"] for content in texts for part in content)
        for call in calls:
            result = multiply(json.loads(call["arguments"]))
            item = {"type": "function_call_output", "call_id": call["call_id"], "output": result}
            items.append(item)
    return "no answer within the rounds"


def with_messages(post: Post, question: str, max_rounds: int) -> str:
    """Returns the last answer of a loop with /v1/messages."""
    tool = {"name": NAME, "description": PURPOSE, "input_schema": NUMBERS}
    messages: list[Any] = [{"role": "user", "content": question}]
    fields = {"model": "default", "messages": messages, "tools": [tool], "max_tokens": MAX_TOKENS}
    for _ in range(max_rounds):
        content = post("/v1/messages", fields)["content"]
        messages.append({"role": "assistant", "content": content})
        calls = [block for block in content if block["type"] == "tool_use"]
        if not calls:
            return "".join(block["text"] for block in content if block["type"] == "text")
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": multiply(call["input"])}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})
    return "no answer within the rounds"


LOOPS = {"chat": with_chat, "responses": with_responses, "messages": with_messages}


def main(options: argparse.Namespace) -> None:
    """Prints the last answer."""

    def post(path: str, fields: dict[str, Any]) -> dict[str, Any]:
        body = {"temperature": 0, **fields}
        body |= {"model": options.model} if options.model else {}
        headers = headers_of(options.api_key)
        answer = httpx.post(
            url_of(options) + path, json=body, headers=headers, timeout=options.timeout
        )
        answer.raise_for_status()
        return answer.json()

    print(LOOPS[options.api](post, options.question, options.max_rounds))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    server_options(parser)
    parser.add_argument("--api", choices=sorted(LOOPS), default="chat")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--max-rounds", type=int, default=10)
    given = parser.parse_args()
    try:
        main(given)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SystemExit(no_answer(url_of(given), error)) from None
