"""Demo model with trees over its DFlash head: the output of plain decoding."""

import json

import pytest

from torch_impl import LLM, SamplingParams

OPTIONS = {
    "max_running_requests": 2,
    "context_length": 256,
    "grammar_backend": "none",
    "tool_call_parser": "none",
}
HEAD = {"speculative_draft_model_path": "models/demo/dflash"}
TREE = {**HEAD, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16}
QUESTION = [{"role": "user", "content": "A cinema has 6 rows of 13 seats. How many seats?"}]
HOW = ({"temperature": 0.0, "max_tokens": 32}, {"temperature": 1.0, "seed": 5, "max_tokens": 32})
ADAPTIVE = {"candidates": [{"steps": 3}, {"steps": 7, "topk": 4, "draft_tokens": 24}]}


def outputs_of(**options) -> list[tuple[list[int], float]]:
    """Token ids and acceptance length of each request."""
    with LLM(**OPTIONS, **options) as llm:
        answers = [llm.chat(QUESTION, SamplingParams(**how))[0].outputs[0] for how in HOW]
        answers += [llm.generate("Ann buys 2 pens", SamplingParams(**HOW[1]))[0].outputs[0]]
    return [(list(answer.token_ids), answer.accept_length) for answer in answers]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [tokens for tokens, _ in outputs_of()]


@pytest.mark.parametrize(
    "algorithm", ["DFLASH+NGRAM", pytest.param("DFLASH", marks=pytest.mark.matrix)]
)
def test_demo_block_trees_preserve_plain_output(algorithm, plain):
    found = outputs_of(speculative_algorithm=algorithm, **TREE)
    assert [tokens for tokens, _ in found] == plain
    assert found[0][1] > 4


@pytest.mark.matrix
def test_demo_adaptive_block_trees_preserve_plain_output(plain, tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(ADAPTIVE), encoding="utf-8")
    adaptive = {"speculative_adaptive": True, "speculative_adaptive_config": str(path)}
    found = outputs_of(speculative_algorithm="DFLASH", **HEAD, **adaptive)
    assert [tokens for tokens, _ in found] == plain
