"""The harness's scores of servers beside each other: another answer is seen."""

import json
from pathlib import Path

import pytest
import yaml

from bench import harness
from models.demo.data import KINDS
from shared.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]


def written(folder: Path, answers: list[str], score: float) -> harness.Line:
    """What the harness writes, read again; it does not keep the order."""
    inside = folder / "default"
    inside.mkdir(parents=True)
    task = harness.task_of("problems")
    found = {"alias": task, "exact_match,last-line": score, "exact_match_stderr,last-line": 0.1}
    (inside / "results_1.json").write_text(json.dumps({"results": {task: found}}))
    samples = [{"doc_id": i, "resps": [[answer]]} for i, answer in enumerate(answers)]
    lines = "\n".join(map(json.dumps, reversed(samples)))
    (inside / f"samples_{task}_1.jsonl").write_text(lines)
    return {"drafts": folder.name, **harness.read_score(folder, "problems")}


def test_a_score_or_an_answer_that_differs_is_told(tmp_path):
    first = written(tmp_path / "none", ["a", "b"], 0.5)
    assert harness.compared(first, first) == {
        "drafts": "none", "score": 0.5, "count": 2, "differ": 0, "is_equal": True
    }  # fmt: skip
    other = harness.compared(written(tmp_path / "NEXTN", ["a", "c"], 0.5), first)
    assert (other["differ"], other["is_equal"]) == (1, False)
    worse = harness.compared(written(tmp_path / "EAGLE3", ["a", "b"], 0.25), first)
    assert (worse["differ"], worse["is_equal"]) == (0, False)


@pytest.mark.parametrize("kind", harness.KINDS)
def test_a_completions_task_asks_in_the_chat_form_of_the_shipped_model(kind, tmp_path):
    harness.prepare(tmp_path, kind, 2)
    task = yaml.safe_load((tmp_path / harness.TASKS / f"{harness.task_of(kind)}.yaml").read_text())
    whole = yaml.safe_load((tmp_path / harness.TASKS / task["include"]).read_text())
    assert task["task"] == harness.task_of(kind)
    data = tmp_path / whole["dataset_kwargs"]["data_files"]["test"]
    (line, _) = data.read_text().splitlines()
    messages = json.loads(line)["messages"]
    assert messages == next(KINDS[kind]("held_out", 0)).messages
    prompt = task["doc_to_text"].replace("{{messages[0]['content']}}", messages[0]["content"])
    tokenizer = Tokenizer.from_folder(ROOT / "models/demo/target")
    assert tokenizer.encode(prompt) == tokenizer.encode_chat(messages)
