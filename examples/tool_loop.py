"""Runs a loop of tool calls with chat completions, the Responses API or the Messages API.

Start a server, for example `make serve`, then `python -m examples.tool_loop --api messages
--force-call`; `--base-url` sets the address of the server. The tool multiplies two integers.
`--force-call` forces a call in the first round, which every model can make.
"""

import argparse
import json
from typing import Any

import anthropic
import httpx
import openai

from bench.common.server import no_answer, server_options, url_of

QUESTION = "A cinema has 6 rows of 13 seats. How many seats are there? Use the tool."
NAME, PURPOSE = "multiply", "Returns a * b."
NUMBER = {"type": "integer", "minimum": 0, "maximum": 9999}
NUMBERS = {
    "type": "object",
    "properties": {"a": NUMBER, "b": NUMBER},
    "required": ["a", "b"],
    "additionalProperties": False,
}
MAX_TOKENS = 200
NO_ANSWER = "no answer within the rounds"


def multiply(arguments: dict[str, Any]) -> str:
    """Returns the result of the tool as text."""
    try:
        return str(arguments["a"] * arguments["b"])
    except (KeyError, TypeError) as error:
        return f"Error: {error!r}"


def with_chat(url: str, options: argparse.Namespace) -> str:
    """Returns the last answer of a loop with /v1/chat/completions."""
    client = openai.OpenAI(base_url=f"{url}/v1", **_client_options(options))
    function: Any = {"name": NAME, "description": PURPOSE, "parameters": NUMBERS}
    messages: list[Any] = [{"role": "user", "content": options.question}]
    for number in range(options.max_rounds):
        completion = client.chat.completions.create(
            model=options.model or "default",
            messages=messages,
            tools=[{"type": "function", "function": function}],
            tool_choice="required" if _is_forced(number, options) else "auto",
            parallel_tool_calls=False,
            max_tokens=MAX_TOKENS,
            temperature=0,
        )
        message: Any = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = multiply(json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return NO_ANSWER


def with_responses(url: str, options: argparse.Namespace) -> str:
    """Returns the last answer of a loop with /v1/responses."""
    client = openai.OpenAI(base_url=f"{url}/v1", **_client_options(options))
    tool: Any = {"type": "function", "name": NAME, "description": PURPOSE, "parameters": NUMBERS}
    items: list[Any] = [{"role": "user", "content": options.question}]
    for number in range(options.max_rounds):
        response = client.responses.create(
            model=options.model or "default",
            input=items,
            tools=[tool],
            tool_choice="required" if _is_forced(number, options) else "auto",
            parallel_tool_calls=False,
            max_output_tokens=MAX_TOKENS,
            temperature=0,
        )
        items += response.output
        calls: list[Any] = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        for call in calls:
            result = multiply(json.loads(call.arguments))
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )
    return NO_ANSWER


def with_messages(url: str, options: argparse.Namespace) -> str:
    """Returns the last answer of a loop with /v1/messages."""
    client = anthropic.Anthropic(base_url=url, **_client_options(options))
    tool: Any = {"name": NAME, "description": PURPOSE, "input_schema": NUMBERS}
    messages: list[Any] = [{"role": "user", "content": options.question}]
    for number in range(options.max_rounds):
        kind: Any = "any" if _is_forced(number, options) else "auto"
        message = client.messages.create(
            model=options.model or "default",
            messages=messages,
            tools=[tool],
            tool_choice={"type": kind, "disable_parallel_tool_use": True},
            max_tokens=MAX_TOKENS,
            extra_body={"temperature": 0},
        )
        messages.append({"role": "assistant", "content": message.content})
        calls: list[Any] = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in message.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": multiply(call.input)}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})
    return NO_ANSWER


LOOPS = {"chat": with_chat, "responses": with_responses, "messages": with_messages}


def _client_options(options: argparse.Namespace) -> dict[str, Any]:
    return {"api_key": options.api_key or "none", "timeout": options.timeout, "max_retries": 0}


def _is_forced(number: int, options: argparse.Namespace) -> bool:
    return options.force_call and number == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    server_options(parser)
    parser.add_argument("--api", choices=sorted(LOOPS), default="chat")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--max-rounds", type=int, default=10)
    parser.add_argument("--force-call", action="store_true", help="force a call in the first round")
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
