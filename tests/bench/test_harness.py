"""Scores of lm-eval for several servers: differing answers are reported."""

import json
from ast import literal_eval
from pathlib import Path

import jinja2
import pytest
import yaml

from bench.quality import lm_eval_runner
from models.demo.data import KINDS
from shared.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]


def written(folder: Path, answers: list[str], score: float) -> lm_eval_runner.Line:
    """Returns the results of the harness, read from files; it does not keep the order."""
    inside = folder / "default"
    inside.mkdir(parents=True)
    task = lm_eval_runner.task_of("problems")
    found = {"alias": task, "exact_match,last-line": score, "exact_match_stderr,last-line": 0.1}
    (inside / "results_1.json").write_text(json.dumps({"results": {task: found}}))
    samples = [{"doc_id": i, "resps": [[answer]]} for i, answer in enumerate(answers)]
    lines = "\n".join(map(json.dumps, reversed(samples)))
    (inside / f"samples_{task}_1.jsonl").write_text(lines)
    return {"drafts": folder.name, **lm_eval_runner.read_score(folder, "problems")}


def test_compared_reports_score_and_answer_differences(tmp_path):
    first = written(tmp_path / "none", ["a", "b"], 0.5)
    assert lm_eval_runner.compared(first, first) == {
        "drafts": "none",
        "score": 0.5,
        "count": 2,
        "differ": 0,
        "is_equal": True,
    }
    other = lm_eval_runner.compared(written(tmp_path / "NEXTN", ["a", "c"], 0.5), first)
    assert (other["differ"], other["is_equal"]) == (1, False)
    worse = lm_eval_runner.compared(written(tmp_path / "EAGLE3", ["a", "b"], 0.25), first)
    assert (worse["differ"], worse["is_equal"]) == (0, False)


def test_read_score_compares_choices_by_order(tmp_path):
    """The score depends on the best choice only; sums of float32 may differ in their last bits."""
    inside, task = tmp_path / "default", lm_eval_runner.task_of("choices")
    inside.mkdir()
    found = {"alias": task, "acc,none": 1.0, "acc_stderr,none": 0.1}
    (inside / "results_1.json").write_text(json.dumps({"results": {task: found}}))
    answers = [["-3.5", "False"], ["-1.25", "True"], ["-9.0", "False"]]
    line = {"doc_id": 0, "resps": [[answer] for answer in answers]}
    (inside / f"samples_{task}_1.jsonl").write_text(json.dumps(line))
    assert lm_eval_runner.read_score(tmp_path, "choices") == {"score": 1.0, "answers": ["1 0 2"]}


def test_choices_task_has_right_and_three_wrong_answers(tmp_path):
    lm_eval_runner.prepare(tmp_path, "choices", 20)
    task = yaml.safe_load((tmp_path / lm_eval_runner.TASKS / "tandem_choices.yaml").read_text())
    lines = (tmp_path / task["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()
    for line in map(json.loads, lines):
        choices = literal_eval(jinja2.Template(task["doc_to_choice"]).render(line))
        assert choices[task["doc_to_target"]] == line["answer"]
        assert len(set(choices)) == 4


@pytest.mark.parametrize("kind", lm_eval_runner.KINDS)
def test_completions_task_prompt_equals_chat_template(kind, tmp_path):
    lm_eval_runner.prepare(tmp_path, kind, 2)
    task = yaml.safe_load(
        (tmp_path / lm_eval_runner.TASKS / f"{lm_eval_runner.task_of(kind)}.yaml").read_text()
    )
    whole = yaml.safe_load((tmp_path / lm_eval_runner.TASKS / task["include"]).read_text())
    assert task["task"] == lm_eval_runner.task_of(kind)
    data = tmp_path / whole["dataset_kwargs"]["data_files"]["test"]
    (line, _) = data.read_text().splitlines()
    messages = json.loads(line)["messages"]
    assert messages == next(KINDS[lm_eval_runner.DATA.get(kind, kind)]("held_out", 0)).messages
    prompt = task["doc_to_text"].replace("{{messages[0]['content']}}", messages[0]["content"])
    tokenizer = Tokenizer.from_folder(ROOT / "models/demo/target")
    assert tokenizer.encode(prompt) == tokenizer.encode_chat(messages)
