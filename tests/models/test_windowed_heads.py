"""Draft heads of models with sliding windows: the text equals that of transformers.

Prompts are several windows long. The last row of a draft is a window away from the first.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from jax_impl import LLM as JaxLLM
from shared.models.families import config_from_dict
from shared.models.saving import save_checkpoint
from shared.offline.llm import LLM
from shared.offline.params import SamplingParams
from shared.offline.results import RequestOutput
from tests.support import saved_models
from tests.support.tiny_assistants import write_tiny_assistant
from tests.support.tiny_heads import cyclic, write_tiny_block, write_tiny_head
from tests.support.tiny_models import tiny_config, tiny_weights
from torch_impl import LLM as TorchLLM

BACKENDS: dict[str, type[LLM]] = {"torch": TorchLLM, "jax": JaxLLM}
WINDOW, DEPTH, TOKENS = 3, 3, 24
PROMPTS = [[2 + (7 * i + i // 5) % 250 for i in range(27)], [11, 12, 13, 14] * 5]
SCALES = {"gemma4": 1, "gemma4_moe": 1, "gpt_oss": 2}
SHAPES: dict[str, dict[str, int]] = {
    "chain": {"speculative_num_draft_tokens": DEPTH + 1},
    "tree": {"speculative_num_draft_tokens": 16, "speculative_eagle_topk": 4},
}


@cache
def config_of(family: str) -> dict[str, Any]:
    given = tiny_config(family, nested=False, with_mtp=False, tied=False)
    limit = {"swiglu_limit": 7.0} if family == "gpt_oss" else {}  # transformers has it in its code
    return given | limit | {"sliding_window": WINDOW}


@cache
def model_of(family: str) -> Any:
    """Returns a model in which tokens follow from the newest one or from a window."""
    config = config_from_dict(config_of(family))
    weights = cyclic(config, tiny_weights(config, 7))
    return config, {**weights, "embed": np.float32(SCALES[family]) * weights["embed"]}


@cache
def wanted(family: str) -> list[list[int]]:
    with TemporaryDirectory() as folder:
        save_checkpoint(folder, config_of(family), model_of(family)[1])
        model = saved_models.reloaded(Path(folder))
    return [saved_models.greedy(model, prompt, TOKENS) for prompt in PROMPTS]


def written_head(folder: Path, family: str, kind: str, **fields: Any) -> str:
    config, weights = model_of(family)
    if kind == "ASSISTANT":
        write_tiny_assistant(folder, config, weights, 4)
    elif kind == "DFLASH":
        write_tiny_block(folder, config, 4, block_size=DEPTH + 1)
    else:
        write_tiny_head(folder, config, weights, kind, 4, **fields)
    return str(folder)


def served(backend: str, family: str, kind: str, shape: str, head: str) -> list[RequestOutput]:
    flags = {"speculative_algorithm": kind, "speculative_draft_model_path": head, **SHAPES[shape]}
    if kind != "DFLASH":
        flags["speculative_num_steps"] = DEPTH
    limits = {"context_length": 96, "max_running_requests": 2, "page_size": 4}
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with TemporaryDirectory() as folder:
        save_checkpoint(folder, config_of(family), model_of(family)[1])
        with BACKENDS[backend](folder, dtype="float32", **limits, **flags) as llm:
            return llm.generate(PROMPTS, params)


def cell(backend: str, family: str, kind: str, shape: str) -> Any:
    is_default = (backend, shape) == ("torch", "tree") and family != "gemma4_moe"
    marks = () if is_default else pytest.mark.matrix
    return pytest.param(backend, family, kind, shape, marks=marks)


CELLS = [
    cell(backend, family, kind, shape)
    for backend in BACKENDS
    for family in SCALES
    for kind in ("EAGLE3", "DFLASH", "ASSISTANT")
    for shape in SHAPES
    if kind != "ASSISTANT" or family.startswith("gemma4")
]


@pytest.mark.parametrize(("backend", "family", "kind", "shape"), CELLS)
def test_windowed_head_text_matches_transformers(backend, family, kind, shape, tmp_path):
    outputs = served(backend, family, kind, shape, written_head(tmp_path / "head", family, kind))
    assert [list(each.outputs[0].token_ids) for each in outputs] == wanted(family)
    counts = [each.outputs[0].accept_length_histogram for each in outputs]
    assert sum(sum(each[1:]) for each in counts) > 2


STREAMS = {
    "inputs with the last layer's output": [1, 2, 4],
    "outputs": [0, 1, 3],
}


def test_gpt_oss_eagle3_layer_conventions_draft_alike(tmp_path):
    """One head for both: the residual streams 1, 2 and 4 of four layers."""
    found = []
    for name, listed in STREAMS.items():
        ids = {"eagle_aux_hidden_state_layer_ids": listed}
        head = written_head(tmp_path / name, "gpt_oss", "EAGLE3", eagle_config=ids)
        found.append(
            [each.outputs[0] for each in served("torch", "gpt_oss", "EAGLE3", "chain", head)]
        )
    assert [each.token_ids for each in found[0]] == wanted("gpt_oss")
    assert found[0] == found[1]
