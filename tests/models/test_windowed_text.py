"""Models with windows and shared KV: the text of both backends equals that of transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from jax_impl import LLM as JaxLLM
from shared.offline.llm import LLM
from shared.offline.params import SamplingParams
from tests.support import saved_models
from torch_impl import LLM as TorchLLM

BACKENDS: dict[str, type[LLM]] = {"torch": TorchLLM, "jax": JaxLLM}
TOKENS = 16
PROMPTS = [[(7 * i + i // 5) % 150 for i in range(27)], [11, 12, 13, 14] * 5]
"""Prompts of two windows and more."""
NAMES = (
    *("gemma4, shared KV, wide MLPs", "gemma4, K = V", "gemma4, experts", "gemma4_unified_text"),
    "gpt_oss",
)
DRAFTERS = ("none", "NGRAM", "STANDALONE")


@cache
def made(name: str) -> Any:
    return saved_models.make(name)


@cache
def wanted(name: str) -> list[list[int]]:
    return [saved_models.greedy(made(name), prompt, TOKENS) for prompt in PROMPTS]


def flags(drafter: str, folder: Path) -> dict[str, Any]:
    """Options of the speculative decoding; STANDALONE drafts with the model itself."""
    own = {"speculative_draft_model_path": str(folder), "speculative_num_steps": 3}
    given = {"none": {}, "NGRAM": {"speculative_num_draft_tokens": 4}, "STANDALONE": own}
    return given[drafter] | ({} if drafter == "none" else {"speculative_algorithm": drafter})


def cell(backend: str, name: str, drafter: str) -> Any:
    is_default = (backend, name) == ("torch", NAMES[0])
    return pytest.param(backend, name, drafter, marks=() if is_default else pytest.mark.matrix)


CELLS = [
    *(cell("torch", name, drafter) for name in NAMES for drafter in DRAFTERS),
    *(cell("jax", name, drafter) for name in NAMES for drafter in DRAFTERS),
]


@pytest.mark.parametrize(("backend", "name", "drafter"), CELLS)
def test_windowed_text_matches_transformers(backend, name, drafter, tmp_path):
    made(name).save_pretrained(tmp_path)
    limits = {"context_length": 96, "max_running_requests": 2, "page_size": 4}
    limits |= {"dtype": "float32"}
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with BACKENDS[backend](str(tmp_path), **limits, **flags(drafter, tmp_path)) as llm:
        served = [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, params)]
    assert served == wanted(name)
