"""Runs a loop of tool calls with chat completions, the Responses API or the Messages API.

Start a server, for example `make serve`, then `python -m examples.tool_loop --api messages`;
`--base-url` sets the address of the server. The tools calculate. Each call is printed with its
result, then the answer.
"""

import argparse
import json
import operator
from typing import Any

import anthropic
import httpx
import openai

from bench.common.server import no_answer, server_options, url_of

QUESTION = "A cinema has 6 rows of 13 seats. 15 seats are taken. How many are free? Use the tools."
OPERATIONS = {
    "add": (operator.add, "Returns a + b."),
    "subtract": (operator.sub, "Returns a - b."),
    "multiply": (operator.mul, "Returns a * b."),
}
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}
MAX_TOKENS = 200
NO_ANSWER = "no answer within the rounds"


def call_tool(name: str, arguments: dict[str, Any]) -> str:
    """Prints a call, and returns its result as text."""
    try:
        operation, _ = OPERATIONS[name]
        result = str(operation(arguments["a"], arguments["b"]))
    except (KeyError, TypeError) as error:
        result = f"Error: {error!r}"
    print(f"{name}({', '.join(f'{key}={value}' for key, value in arguments.items())}): {result}")
    return result


def tools(schema: str) -> list[Any]:
    """Returns the tools with the JSON schema of their arguments in the field `schema`."""
    named = OPERATIONS.items()
    return [{"name": name, "description": text, schema: NUMBERS} for name, (_, text) in named]


def with_chat(url: str, options: argparse.Namespace) -> str:
    """Returns the last answer of a loop with /v1/chat/completions."""
    client = openai.OpenAI(base_url=f"{url}/v1", **_client_options(options))
    functions: Any = [{"type": "function", "function": each} for each in tools("parameters")]
    messages: list[Any] = [{"role": "user", "content": options.question}]
    for _ in range(options.max_rounds):
        completion = client.chat.completions.create(
            model=options.model or "default",
            messages=messages,
            tools=functions,
            parallel_tool_calls=False,
            max_tokens=MAX_TOKENS,
            temperature=0,
        )
        message: Any = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = call_tool(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return NO_ANSWER


def with_responses(url: str, options: argparse.Namespace) -> str:
    """Returns the last answer of a loop with /v1/responses."""
    client = openai.OpenAI(base_url=f"{url}/v1", **_client_options(options))
    functions: Any = [{"type": "function", **each} for each in tools("parameters")]
    items: list[Any] = [{"role": "user", "content": options.question}]
    for _ in range(options.max_rounds):
        response = client.responses.create(
            model=options.model or "default",
            input=items,
            tools=functions,
            parallel_tool_calls=False,
            max_output_tokens=MAX_TOKENS,
            temperature=0,
        )
        items += response.output
        calls: list[Any] = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        for call in calls:
            result = call_tool(call.name, json.loads(call.arguments))
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )
    return NO_ANSWER


def with_messages(url: str, options: argparse.Namespace) -> str:
    """Returns the last answer of a loop with /v1/messages."""
    client = anthropic.Anthropic(base_url=url, **_client_options(options))
    messages: list[Any] = [{"role": "user", "content": options.question}]
    for _ in range(options.max_rounds):
        message = client.messages.create(
            model=options.model or "default",
            messages=messages,
            tools=tools("input_schema"),
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
            max_tokens=MAX_TOKENS,
            extra_body={"temperature": 0},
        )
        messages.append({"role": "assistant", "content": message.content})
        calls: list[Any] = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in message.content if block.type == "text")
        results: list[Any] = []
        for call in calls:
            result = call_tool(call.name, call.input)
            results.append({"type": "tool_result", "tool_use_id": call.id, "content": result})
        messages.append({"role": "user", "content": results})
    return NO_ANSWER


LOOPS = {"chat": with_chat, "responses": with_responses, "messages": with_messages}


def _client_options(options: argparse.Namespace) -> dict[str, Any]:
    return {"api_key": options.api_key or "none", "timeout": options.timeout, "max_retries": 0}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    server_options(parser)
    parser.add_argument("--api", choices=sorted(LOOPS), default="chat")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--max-rounds", type=int, default=10)
    given = parser.parse_args()
    address = url_of(given)
    try:
        print(LOOPS[given.api](address, given))
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        line = f"The server at {address} answered {error.status_code}: {error.message}"
        raise SystemExit(line) from None
    except (openai.APIConnectionError, anthropic.APIConnectionError) as error:
        is_timeout = isinstance(error, openai.APITimeoutError | anthropic.APITimeoutError)
        cause = httpx.ReadTimeout if is_timeout else httpx.ConnectError
        raise SystemExit(no_answer(address, cause(error.message))) from None
