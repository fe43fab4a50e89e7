"""Demo models: ordinary checkpoints, correct on held-out tasks, and accepted as drafters."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.demo.data import Example
from shared.engine.request import Request, SamplingParams
from shared.options.options import DEFAULT_MODEL
from shared.text.tokenizer import Tokenizer
from tests.support.golden_models import GoldenModel, SpecModel
from tests.support.golden_torch import TorchModel
from tests.support.in_process_engine import Outcome, acceptance, serve_all, start
from tests.support.tasks import Tasks, is_right

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
ARCHITECTURES = {"target": "Qwen3_5ForCausalLM", "standalone": "Qwen3ForCausalLM"}
MOST_BYTES = 24 * 10**6
COUNT = 1
TREE = "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
SHAPES = {"EAGLE3": TREE.split()}
ACCEPTED = {"NEXTN": 3.0, "EAGLE": 3.0, "EAGLE3": 3.3, "STANDALONE": 3.0, "DFLASH": 3.5}
"""Least tokens of a verify step, on problems that no drafter has seen."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_folder(DEMO / "target")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def problems(tokenizer: Tokenizer) -> Tasks:
    """The README's question, then held-out problems."""
    found = Tasks.of("problems", COUNT, 0, tokenizer)
    first = readme_example()
    prompts = [tuple(tokenizer.encode_chat(first.messages)), *found.prompts]
    return replace(found, examples=[first, *found.examples], prompts=prompts)


def readme_example() -> Example:
    """The question of the README's curl command, and the answer below it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    asked = re.search(r"chat/completions .*? -d '(\{.*?\})'\n", text, re.DOTALL)
    answer = re.search(r"```\n([^`]*\n#### \d+)\n```", text)
    assert asked
    assert answer
    return Example("problems", json.loads(asked[1])["messages"], answer[1], ())


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("implementation", [SpecModel, TorchModel])
def test_demo_model_matches_transformers(
    name: str, implementation: type[GoldenModel], problems: Tasks
):
    oracle = AutoModelForCausalLM.from_pretrained(DEMO / name, dtype=torch.float32)
    assert type(oracle).__name__ == ARCHITECTURES[name]
    tokens = np.array(problems.prompts[0], np.int32)
    with torch.no_grad():
        want = oracle(torch.from_numpy(tokens)[None].long()).logits[0].numpy()
    got = implementation(DEMO / name).prefill(tokens, None).logits
    # Float32 on both sides: only the order of the sums differs, by 3e-5 on logits of up to 36.
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_demo_chat_template_matches_transformers(name: str, problems: Tasks):
    oracle = AutoTokenizer.from_pretrained(DEMO / name)
    for example, prompt in zip(problems.examples, problems.prompts, strict=True):
        text = oracle.apply_chat_template(
            example.messages, add_generation_prompt=True, tokenize=False
        )
        assert oracle(text)["input_ids"] == list(prompt)


def test_demo_folders_share_tokenizer_and_stay_small():
    folders = {path.parent for path in DEMO.glob("*/config.json")}
    assert {DEMO / name for name in ARCHITECTURES} <= folders
    for folder in folders:
        assert sum(path.stat().st_size for path in folder.iterdir()) < MOST_BYTES
        if folder.name == "vlm":
            continue  # of which a token is the place of an image, see below
        for path in folder.glob("tokenizer*.json"):
            assert path.read_bytes() == (DEMO / path.name).read_bytes()
    for name in ARCHITECTURES:
        assert (DEMO / name / "tokenizer.json").is_file()


def test_demo_vlm_tokenizer_differs_by_one_token():
    usual, seeing = (
        json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        for folder in (DEMO, DEMO / "vlm")
    )
    (word,) = usual["model"]["vocab"].keys() - seeing["model"]["vocab"].keys()
    place = {"id": usual["model"]["vocab"].pop(word), "content": "<|image|>"}
    assert usual["added_tokens"] == [
        x for x in seeing["added_tokens"] if not place.items() <= x.items()
    ]
    usual["model"]["merges"] = [x for x in usual["model"]["merges"] if "".join(x) != word]
    assert usual | {"added_tokens": seeing["added_tokens"]} == seeing


@pytest.fixture(scope="module")
def answers(problems: Tasks) -> dict[str, tuple[list[Outcome], int]]:
    """Greedy outputs of torch for each drafter, and the maximum depth of its drafts."""
    found = {"none": answered([], problems)}
    for name in ACCEPTED:
        flags = ["--speculative-algorithm", name, *SHAPES.get(name, ())]
        if (folder := DEMO / name.lower()).is_dir():
            flags += ["--speculative-draft-model-path", str(folder)]
        found[name] = answered(flags, problems)
    return found


def answered(drafting: list[str], asked: Tasks) -> tuple[list[Outcome], int]:
    """Serves the tasks all at once from the model that a start takes without a path."""
    flags = [*drafting, "--dtype", "float32", "--chunked-prefill-size", "128"]
    served = start("torch", flags, batch=1 + COUNT, context=256, radix_cache=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=160, stop_token_ids=served.eos_ids)
    try:
        requests = [
            Request(request_id=place, prompt=prompt, sampling=sampling)
            for place, prompt in enumerate(asked.prompts)
        ]
        return serve_all(served.engine, requests), served.max_depth
    finally:
        served.engine.close()


def test_default_model_answers_readme_and_held_out_problems(answers, problems, tokenizer):
    assert DEFAULT_MODEL == DEMO / "target"
    # Without the token that ends each.
    texts = [tokenizer.decode(outcome.tokens[:-1]) for outcome in answers["none"][0]]
    assert texts[0] == problems.examples[0].answer
    for text, example in zip(texts, problems.examples, strict=True):
        assert is_right("problems", text, example.answer), text


@pytest.mark.parametrize("drafter", ACCEPTED)
def test_demo_drafter_accepted_and_preserves_output(answers, drafter):
    plain, (drafted, max_depth) = answers["none"][0], answers[drafter]
    assert [outcome.tokens for outcome in drafted] == [outcome.tokens for outcome in plain]
    assert acceptance(drafted, max_depth)["accept_length"] > ACCEPTED[drafter]
