"""Loops of tool calls with litellm: `litellm_loop.py URL API`, complete and streamed."""

import asyncio
import json
import sys

import litellm

URL, API = sys.argv[1:]
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
FUNCTION = {"name": "multiply", "description": "Returns a product.", "parameters": NUMBERS}
USER = {"role": "user", "content": "Multiply."}
COMMON = {"api_key": "none", "max_tokens": 500}


def product(arguments):
    return str(arguments["a"] * arguments["b"])


def chat(model, base, stream):
    messages = [USER]
    tools = [{"type": "function", "function": FUNCTION}]
    while True:
        answer = litellm.completion(
            model=model, api_base=base, messages=messages, tools=tools, stream=stream, **COMMON
        )
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            return [each["content"] for each in messages if each["role"] == "tool"], message.content
        for call in message.tool_calls:
            result = product(json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses(stream):
    items = [USER]
    common = {"api_base": f"{URL}/v1", "api_key": "none", "stream": stream}
    tools = [{"type": "function", **FUNCTION}]
    while True:
        answer = litellm.responses(model="openai/repeater", input=items, tools=tools, **common)
        if stream:
            answer = [*answer][-1].response
        output = [each if isinstance(each, dict) else each.model_dump() for each in answer.output]
        items += output
        calls = [each for each in output if each["type"] == "function_call"]
        if not calls:
            results = [each["output"] for each in items if "output" in each]
            return results, output[-1]["content"][0]["text"]
        for call in calls:
            result = product(json.loads(call["arguments"]))
            found = {"type": "function_call_output", "call_id": call["call_id"], "output": result}
            items.append(found)


async def messages():
    history, results = [USER], []
    tools = [{"name": "multiply", "description": "Returns a product.", "input_schema": NUMBERS}]
    while True:
        answer = await litellm.anthropic.messages.acreate(
            model="anthropic/repeater", api_base=URL, messages=history, tools=tools, **COMMON
        )
        content = answer["content"]
        history.append({"role": "assistant", "content": content})
        calls = [block for block in content if block["type"] == "tool_use"]
        if not calls:
            return results, content[-1]["text"]
        found = [product(call["input"]) for call in calls]
        results += found
        blocks = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": result}
            for call, result in zip(calls, found, strict=True)
        ]
        history.append({"role": "user", "content": blocks})


if API == "chat":
    ends = [chat("openai/repeater", f"{URL}/v1", stream) for stream in (False, True)]
elif API == "responses":
    ends = [responses(stream) for stream in (False, True)]
else:
    ends = [chat("anthropic/repeater", URL, stream) for stream in (False, True)]
    ends.append(asyncio.run(messages()))
print(json.dumps(ends))
