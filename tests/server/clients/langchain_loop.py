"""Loops of tool calls with langchain: `langchain_loop.py URL API`, complete and streamed."""

import json
import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

URL, API = sys.argv[1:]
COMMON = {"model": "repeater", "api_key": "none", "temperature": 0, "max_retries": 0}


@tool
def multiply(a: int, b: int) -> int:
    """Returns a product."""
    return a * b


def loop(model, stream):
    bound = model.bind_tools([multiply])
    messages = [SystemMessage("Be brief."), HumanMessage("Multiply.")]
    while True:
        if stream:
            first, *others = bound.stream(messages)
            answer = sum(others, first)
        else:
            answer = bound.invoke(messages)
        messages.append(answer)
        if not answer.tool_calls:
            results = [each.content for each in messages if each.type == "tool"]
            return results, answer.text
        messages += [multiply.invoke(call) for call in answer.tool_calls]


if API == "messages":
    models = [ChatAnthropic(base_url=URL, max_tokens=500, **COMMON)]
elif API == "chat":
    models = [ChatOpenAI(base_url=f"{URL}/v1", **COMMON)]
else:
    sent_back = {"output_version": "responses/v1", "include": ["reasoning.encrypted_content"]}
    models = [
        ChatOpenAI(base_url=f"{URL}/v1", use_responses_api=True, **COMMON, **more)
        for more in ({}, {**sent_back, "store": False})
    ]
print(json.dumps([loop(model, stream) for model in models for stream in (False, True)]))
