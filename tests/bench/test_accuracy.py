"""Counts of accuracy and acceptance, and detection of outputs that a drafter changed."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from bench.common.draft_config import Draft, folders_beside
from bench.common.options import Settings
from bench.quality import accuracy, accuracy_table, drafter_matrix, spec_matrix
from bench.quality.drafter_matrix import Measurement, verdict
from bench.quality.scoring import Texts, text_hash
from models.demo.data import answer_of
from models.demo.data import main as write_data
from shared.boundary.program import ProgramFeature, StepKind
from shared.drafts.drafter_spec import DrafterSpec
from shared.engine.request import Request, SamplingParams
from shared.models.families import config_from_folder
from shared.options.command_line import parse
from shared.process.device import Device
from shared.process.memory_plan import plan
from tests.support.in_process_engine import Outcome, acceptance, one_bucket
from tests.support.serve_reference import PLATFORM
from tests.support.tasks import is_right

ROOT = Path(__file__).resolve().parents[2]
RANDOM_MODEL = ROOT / "models" / "random"
LM_EVAL = ROOT / "bench" / "lm_eval"


def settings(**changes) -> Settings:
    """Two short texts of each kind on torch: nothing here is compiled."""
    model = RANDOM_MODEL
    few = Settings(
        model=model,
        backends=["torch"],
        drafts=[Draft.parse(text) for text in ("none", "NEXTN:S=2", "DFLASH")],
        folders=folders_beside(model),
        kinds=["problems", "copying"],
        temperatures=[0.0, 1.0],
        count=2,
        seed=0,
        batch=2,
        repeat=2,
        max_tokens=6,
        dtype="float32",
        device=None,
    )
    return replace(few, **changes)


@pytest.mark.parametrize(
    ("kind", "text", "answer", "right"),
    [
        ("problems", "Pens: 1 + 2 = 3\n#### 3", "3 more: 0 + 3 = 3\n#### 3", True),
        ("problems", "#### 3\nno: 1 + 1 = 2\n#### 2", "#### 3", False),
        ("problems", "the answer is 3", "#### 3", False),
        ("problems", "the answer is 3", "no answer either", False),
        ("copying", "- a\n- b", "- a\n- b", True),
        ("copying", "- a\n- b\n", "- a\n- b", False),
    ],
)
def test_is_right_compares_number_or_every_letter(kind, text, answer, right):
    assert is_right(kind, text, answer) == right


def test_acceptance_counts_bonus_token_and_reached_positions():
    found = acceptance([Outcome([], [0, 1, 3]), Outcome([], [3])], max_depth=3)
    assert found["accept_length"] == 2.75
    assert found["accept_length_histogram"] == [1, 1, 0, 2]
    assert found["per_position"] == [0.75, 0.6667, 1.0]
    nothing = {"accept_length": 1.0, "per_position": [], "accept_length_histogram": [0]}
    assert acceptance([Outcome([5], [])], max_depth=0) == nothing


def test_text_hash_depends_on_tokens_and_boundaries():
    texts = [[[1, 2], [3]], [[1], [2, 3]], [[12], [3]], [[1, 2], [4]], [[1, 2]], [[1, 2], [3], []]]
    assert len(set(map(text_hash, texts))) == len(texts)


class Says:
    """An oracle with a fixed answer."""

    def __init__(self, is_tie: bool) -> None:
        self.is_tie = is_tie

    def check(self, prompt, output, params) -> None:
        assert self.is_tie


@pytest.mark.parametrize(
    ("oracle", "excused", "wrong"), [(None, 0, 1), (Says(False), 0, 1), (Says(True), 1, 0)]
)
def test_changed_output_excused_only_for_near_ties(oracle, excused, wrong, capsys):
    row = {"temperature": 0.0, "kind": "problems", "algorithm": "NEXTN", "backend": "torch"}
    row |= {"keeps_text": True}
    requests = [Request(request_id=i, prompt=(1,), sampling=SamplingParams()) for i in range(2)]
    texts = Texts(oracle)
    assert texts.compare(row, requests, [[5, 6], [7]]) == (0, 0)
    assert texts.compare(row, requests, [[5, 6], [7]]) == (0, 0)
    assert texts.are_equal
    assert texts.compare(row, requests, [[5, 8], [7]]) == (excused, wrong)
    assert texts.compare(row | {"temperature": 1.0}, requests, [[5, 8], [7]]) == (0, 0)
    assert texts.are_equal == (wrong == 0)
    err = capsys.readouterr().err
    assert ("THE TEXT CHANGED" in err) == (wrong == 1)
    assert "token 1: [6] became [8]" in err


def test_near_ties_excused_only_while_rare():
    texts = Texts(None, tokens=10_000, excused=2)
    assert not texts.are_equal
    assert replace(texts, excused=1).are_equal
    assert replace(texts, tokens=20_000).are_equal


@pytest.fixture(scope="module")
def measurement() -> Measurement:
    found = Measurement(settings(), lambda so_far: None)
    found.run()
    return found


def test_accuracy_has_row_or_refusal_per_drafter(measurement):
    lines = {(r["algorithm"], r["temperature"], r["kind"]) for r in measurement.rows}
    tasks = [(t, kind) for t in (0.0, 1.0) for kind in ("problems", "copying")]
    assert lines == {(name, *task) for name in ("none", "NEXTN S=2") for task in tasks}
    assert [line["algorithm"] for line in measurement.refusals] == ["DFLASH"]
    assert measurement.refusals[0]["refused"]


def test_drafter_preserves_hash_and_accuracy(measurement):
    by_task: dict = {}
    for row in measurement.rows:
        by_task.setdefault((row["temperature"], row["kind"]), []).append(row)
        assert row["tokens"] <= 2 * 6
        assert row["compiles"] == 0
    for plain, drafted in by_task.values():
        assert plain["text_hash"] == drafted["text_hash"]
        assert plain["accuracy"] == drafted["accuracy"]
        assert (plain["accept_length"], len(drafted["per_position"])) == (1.0, 2)
    assert max(row["accept_length"] for row in measurement.rows) > 1
    assert len({rows[0]["text_hash"] for rows in by_task.values()}) == len(by_task)
    assert verdict(measurement) == 0


def test_drafter_changing_token_exits_with_one(monkeypatch, capsys):
    run_timed = drafter_matrix.timed

    def spoiled(served, requests):
        run = run_timed(served, requests)
        if served.max_depth:
            run.outcomes[1].tokens[-1] ^= 1
        return run

    monkeypatch.setattr(drafter_matrix, "timed", spoiled)
    found = Measurement(settings(kinds=["problems"], temperatures=[0.0]), lambda so_far: None)
    found.run()
    assert verdict(found) == 1
    err = capsys.readouterr().err
    assert "THE TEXT CHANGED: NEXTN S=2 on torch, problems 1" in err
    assert "THE TEXTS ARE NOT EQUAL" in err
    assert [row["wrong"] for row in found.rows] == [0, 1]


def test_run_with_all_drafters_unsupported_fails(capsys):
    found = Measurement(settings(drafts=[Draft.parse("DFLASH")]), lambda so_far: None)
    found.run()
    assert verdict(found) == 1
    assert "NOTHING WAS MEASURED" in capsys.readouterr().err


def test_accuracy_show_replaces_table_between_markers(measurement, tmp_path, capsys):
    file, document = tmp_path / "found.json", tmp_path / "README.md"
    file.write_text(json.dumps(measurement.to_json("bench.quality.accuracy")))
    document.write_text("above\n<!-- accuracy -->\nold\n<!-- /accuracy -->\nbelow\n")
    for _ in range(2):  # a second time changes nothing
        assert accuracy.show([file], document) == 0
    text = document.read_text()
    assert text.startswith(
        "above\n<!-- accuracy -->\n| drafter | T | acceptance length, problems |"
    )
    assert text.endswith("<!-- /accuracy -->\nbelow\n")
    assert "\nold\n" not in text
    assert text.count("\n| NEXTN S=2 | ") == 2  # two temperatures
    assert f"`{file}` (float32)" in text
    assert "Refused: DFLASH: " in text
    assert capsys.readouterr().out.count("| none | 0 | 1.00 | 1.00 |") == 2
    with pytest.raises(ValueError, match="markers|<!-- accuracy -->"):
        accuracy_table.insert(file, "table")


def test_render_cells_shows_acceptance_per_position_and_hash(measurement):
    _, _, *lines = accuracy_table.render_cells(measurement.rows).splitlines()
    assert len(lines) == len(measurement.rows)
    for line, row in zip(lines, measurement.rows, strict=True):
        cells = line.strip("| ").split(" | ")
        assert cells[:2] == [row["algorithm"], "torch"]
        assert cells[5] == (" ".join(f"{s:.2f}" for s in row["per_position"]) or "-")
        assert cells[-1] == row["text_hash"]


def test_spec_matrix_show_prints_rendered_cells(measurement, capsys):
    tables = spec_matrix.show([measurement.to_json("bench.quality.spec_matrix")])
    assert capsys.readouterr().out == f"{tables}\n"
    assert tables.endswith(f"{accuracy_table.render_cells(measurement.rows)}\n")


def table_row(backend: str, batch: int, algorithm: str, **changes) -> dict:
    row = {"backend": backend, "machine": "CPU, 2 cores", "batch": batch, "algorithm": algorithm}
    row |= {"temperature": 0.0, "kind": "problems", "count": 200, "accuracy": 0.95}
    row |= {"accept_length": 3.0, "text_hash": "a", "tokens": 100, "seconds": 1.0, "excused": 0}
    return row | {"keeps_text": True} | changes


def table_file(*rows: dict) -> dict:
    file = {"command": "python -m bench.quality.accuracy", "model": "target", "dtype": "float32"}
    return file | {"rows": list(rows), "refusals": [], "tokens": 1, "excused": 0, "wrong": 0}


def test_accuracy_table_merges_backends_and_prefers_max_tasks():
    torch = table_file(
        table_row("torch", 8, "none", accept_length=1.0), table_row("torch", 8, "NEXTN")
    )
    jax = table_file(table_row("jax", 8, "NEXTN", accept_length=3.01))
    alone = table_file(table_row("torch", 1, "NEXTN", count=5, accuracy=0.2))
    table, *_ = accuracy_table.render([torch, jax, alone]).split("\n\n")
    assert table.splitlines()[2:] == [
        "| none | 0 | 1.00 | 95.0% |",
        "| NEXTN | 0 | 3.00 / 3.01 | 95.0% |",
    ]


def test_accuracy_table_reports_unequal_outputs():
    same, other = table_file(table_row("torch", 8, "none")), table_row("jax", 8, "NEXTN")
    assert accuracy_table.faults([same, table_file(other)]) == []
    assert accuracy_table.faults([same, table_file(other | {"count": 5, "text_hash": "b"})]) == []
    changed = [same, table_file(other | {"text_hash": "b"})]
    assert len(accuracy_table.faults(changed)) == 1
    assert "Texts: NOT EQUAL." in accuracy_table.render(changed)
    tie = [same, table_file(other | {"text_hash": "b", "excused": 1})]
    assert accuracy_table.faults(tie) == []
    assert len(accuracy_table.faults([same | {"wrong": 1}])) == 1


@pytest.mark.parametrize("text", dict.fromkeys((*accuracy.DRAFTS, *spec_matrix.DRAFTS)))
def test_bench_drafters_are_valid_server_flags(text):
    draft = Draft.parse(text)
    flags = draft.flags(folders_beside(Path("models/demo/target")))
    assert parse(flags).speculative.drafts == (text != "none")
    if draft.algorithm == "EAGLE3":
        assert flags[3] == str(ROOT / "models" / "demo" / "eagle3")
    assert str(draft) == re.sub("[:,]", " ", text)


def test_draft_parse_rejects_setting_without_value():
    with pytest.raises(ValueError, match="NAME=VALUE"):
        Draft.parse("NEXTN:S")


@pytest.mark.parametrize("are_compiled", [False, True])
def test_one_bucket_has_one_decode_program_per_shape(are_compiled):
    """Also where the widest programs are made with logprobs alone."""
    costs = replace(PLATFORM.costs, are_compiled=are_compiled)
    options = parse(["--speculative-algorithm", "NEXTN", "--max-running-requests", "8"])
    model = config_from_folder(RANDOM_MODEL)
    device = Device("cpu", "CPU", 1 << 32)
    capacity = one_bucket(plan(options, model, DrafterSpec.of_mtp(model), device, costs).capacity)
    assert not any(program.has(ProgramFeature.LOGPROBS) for program in capacity.programs)
    decodes = [p for p in capacity.programs if p.work is StepKind.DECODE]
    assert [p.shape.nodes for p in decodes] == [4]
    assert {p.batch for p in decodes} == {8}
    assert len([p for p in capacity.programs if p.work is StepKind.PREFILL]) == 2


@pytest.mark.parametrize("kind", ["problems", "copying"])
def test_lm_eval_task_reads_file_of_data_command(kind, tmp_path):
    task = yaml.safe_load((LM_EVAL / f"tandem_{kind}.yaml").read_text())
    data = task["dataset_kwargs"]["data_files"]["test"]
    assert task["task"] == f"tandem_{kind}"
    assert task["dataset_path"] == "json"
    command = f"python -m models.demo.data --split held_out --kind {kind} --count 200 --out {data}"
    assert command in (LM_EVAL / "README.md").read_text()
    out = tmp_path / "tasks.jsonl"
    arguments = command.partition("models.demo.data ")[2].replace(data, str(out)).split()
    write_data(arguments)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 200
    # The prompt's template takes the first message alone.
    assert all(len(line["messages"]) == 1 for line in lines)
    assert set(re.findall(r"\w+", task["doc_to_target"])) & set(lines[0]) == {"answer"}


def test_lm_eval_filter_matches_answer_of():
    task = yaml.safe_load((LM_EVAL / "tandem_problems.yaml").read_text())
    last_line, first = task["filter_list"][0]["filter"]
    assert (last_line["group_select"], first["function"]) == (-1, "take_first")
    for text in ("1 + 2 = 3\n#### 3", "#### 1\n#### 1,024", "#### -5\n"):
        found = re.findall(last_line["regex_pattern"], text)[-1]
        assert int(found.replace(*task["metric_list"][0]["regexes_to_ignore"], "")) == (
            answer_of(text)
        )
    assert not re.findall(last_line["regex_pattern"], "the answer is 3, say #### 3 at last")


OWN_WAYS = (
    "none",
    "NEXTN:S=2,rule=rejection",
    "NEXTN:S=2,most=1",
    "NGRAM:N=8,sam=7,corpus=own",
)


@pytest.fixture(scope="module")
def in_own_ways() -> Measurement:
    """Three warm texts of a random model, drafted with the settings that only a bench has."""
    chosen: dict = {"drafts": [Draft.parse(text) for text in OWN_WAYS], "kinds": ["problems"]}
    chosen |= {"temperatures": [1.0], "count": 3, "batch": 3, "repeat": 1, "max_tokens": 16}
    found = Measurement(settings(**chosen), lambda so_far: None)
    found.run()
    return found


@pytest.mark.matrix
def test_match_rule_preserves_output_and_rejection_is_exempt(in_own_ways):
    plain, rejected, *matched = in_own_ways.rows
    assert verdict(in_own_ways) == 0
    assert [row["keeps_text"] for row in in_own_ways.rows] == [True, False, True, True]
    assert rejected["text_hash"] != plain["text_hash"]
    assert {row["text_hash"] for row in matched} == {plain["text_hash"]}


def test_setting_max_limits_draft_tokens(in_own_ways):
    one = next(row for row in in_own_ways.rows if "most=1" in row["algorithm"])
    assert one["accept_length_histogram"][2] == 0
    assert one["accept_length_histogram"][0]


def test_corpus_of_own_outputs_raises_acceptance(in_own_ways):
    (outputs,) = in_own_ways._other_outputs.values()
    assert len(outputs) == 3
    row = next(row for row in in_own_ways.rows if "corpus=own" in row["algorithm"])
    assert row["accept_length"] > 1


@pytest.mark.parametrize("text", ["NEXTN:rule=none", "NGRAM:corpus=other", "NEXTN:most=few"])
def test_draft_parse_rejects_invalid_setting(text):
    with pytest.raises(ValueError, match=text.partition(":")[0]):
        Draft.parse(text)
