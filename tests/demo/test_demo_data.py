"""Data of the demo model: correct, reproducible, with disjoint splits."""

import doctest
import json
import os
import random
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from models.demo import items, money, openings
from models.demo import tokenizer as demo_tokenizer
from models.demo.copying import TASKS
from models.demo.data import KINDS, SHARES, TEXT_SHARES, examples, main
from models.demo.example import answer_of, split_of
from models.demo.functions import ONE_LINE, draw_function
from models.demo.problems import draw_problem
from models.demo.scenes import SCENES
from models.demo.story import Story, apply
from models.make_random import SPECIAL_TOKENS
from shared.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
SPLITS = ("train", "held_out")
# Values of words and percentages in a calculation.
MEANS = {"twice": 2, "doubles": 2, "half": 2, "Half": 2, "a third": 3, "a quarter": 4, "dozen": 12}
MEANS |= {"10%": 10, "20%": 5, "25%": 4, "50%": 2}
UNITS = {2, 7, 12, 60, 100}  # both sides, days of a week, a dozen, minutes, centimeters
NUMBER = re.compile(r"twice|doubles|[Hh]alf|a third|a quarter|dozen|\d+%?")

# The running quantity after a part, from the quantity before it and the numbers of its sentences.
EFFECTS = {
    openings.has: lambda v, n: n[0],
    openings.boxes: lambda v, n: n[0] * n[1],
    openings.two_days: lambda v, n: n[0] + n[1],
    openings.more_than: lambda v, n: n[0] + n[1],
    openings.fewer_than: lambda v, n: max(n) - min(n),
    openings.times_as_many: lambda v, n: n[0] * n[1],
    openings.dozens: lambda v, n: n[0] * n[1],
    openings.daily: lambda v, n: n[0] * n[1],
    openings.weekly: lambda v, n: 7 * n[0] * n[1],
    openings.saved: lambda v, n: n[0],
    openings.wage: lambda v, n: n[0] * n[1],
    openings.weekly_wage: lambda v, n: n[0] * n[1] * n[2],
    items.gain: lambda v, n: v + n[0],
    items.lose: lambda v, n: v - n[0],
    items.double: lambda v, n: 2 * v,
    items.half: lambda v, n: v - v // 2,
    items.gain_boxes: lambda v, n: v + n[0] * n[1],
    items.give_each: lambda v, n: v - n[0] * n[1],
    items.give_part: lambda v, n: v - v // n[0],
    items.share_things: lambda v, n: v / n[0],
    items.pack: lambda v, n: v / n[0],
    items.compare_more: lambda v, n: v - n[0],
    items.compare_total: lambda v, n: v + n[0],
    money.earn: lambda v, n: v + n[0],
    money.spend: lambda v, n: v - n[0],
    money.buy_several: lambda v, n: v - n[0] * n[1],
    money.sell: lambda v, n: v * n[0],
    money.share_money: lambda v, n: v / n[0],
    money.can_buy: lambda v, n: v / n[0],
    money.still_needs: lambda v, n: n[0] - v,
}


def numbers(text: str) -> list[int]:
    return [MEANS[word] if word in MEANS else int(word) for word in NUMBER.findall(text)]


def some(kind: str, split: str, count: int, seed: int = 5) -> list:
    return list(islice(KINDS[kind](split, seed), count))


def test_effects_cover_every_story_part():
    tables = (openings.THINGS, openings.MONEY, items.EVENTS, items.ENDINGS)
    parts = {part for table in (*tables, money.EVENTS, money.ENDINGS) for _, part in table}
    assert parts | {money.sell} == set(EFFECTS)


@pytest.mark.parametrize("part", EFFECTS, ids=lambda part: part.__name__)
def test_story_part_value_follows_its_sentences(part):
    rng = random.Random(part.__name__)
    checked = 0
    while checked < 60:
        story = Story(rng)
        story.value = before = rng.randrange(2, 100)
        if part(story):
            checked += 1
            want = EFFECTS[part](before, numbers(" ".join(story.sentences)))
            assert story.value == want, (before, story.sentences)
            assert not story.steps or story.steps[-1].result == want
            assert story.question


def test_story_part_operations_equal_table():
    tables = (openings.THINGS, openings.MONEY, items.EVENTS, items.ENDINGS)
    for count, part in (row for table in (*tables, money.EVENTS, money.ENDINGS) for row in table):
        story = Story(random.Random(1))
        story.value = 60
        while not part(story):
            assert not story.steps, part.__name__
        assert len(story.steps) == count, part.__name__


@pytest.mark.parametrize("split", SPLITS)
def test_worked_answer_equations_are_correct(split):
    for example in some("problems", split, 400):
        *lines, last = example.answer.split("\n")
        results = []
        for line in lines:
            sides = line.rsplit(": ", 1)[1].split(" = ")
            assert len(sides) >= 2, line
            assert all(re.fullmatch(r"\d+( [-+*/] \d+)*", side) for side in sides), line
            values = {eval(side) for side in sides}
            assert len(values) == 1, line
            results.append(values.pop())
        assert last == f"#### {int(results[-1])}"
        assert answer_of(example.answer) == results[-1]


def test_problem_answer_equals_result_of_steps():
    rng = random.Random(2)
    operations = set()
    for _ in range(600):
        problem = draw_problem(rng)
        for step in problem.steps:
            assert apply(step.left, step.op, step.right) == step.result
            assert 0 < step.result <= 999
        assert answer_of(problem.answer) == problem.steps[-1].result
        operations.add(len(problem.steps))
    assert operations == {1, 2, 3, 4, 5}


def test_problem_uses_all_numbers_except_distractors():
    """A number of a step is in the text, is a unit's size, or is the result of an earlier step."""
    rng = random.Random(3)
    distracted = 0
    for _ in range(1500):
        problem = draw_problem(rng)
        in_text, known, taken = numbers(problem.text), set(UNITS), set()
        known |= set(in_text)
        for step in problem.steps:
            assert {step.left, step.right} <= known, (problem.text, step)
            taken |= {step.left, step.right}
            known.add(step.result)
        unused = [n for n in in_text if n not in taken and n not in problem.noise]
        assert not unused, problem.text
        assert set(problem.noise) <= set(in_text)
        distracted += bool(problem.noise)
    assert distracted > 100


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_scene_value_equals_last_step(scene):
    rng = random.Random(scene.__name__)
    for _ in range(50):
        story = Story(rng)
        scene(story)
        assert story.value == story.steps[-1].result > 0
        assert "{" not in "".join((*story.sentences, story.ask(), *story.lines))


@pytest.mark.parametrize("kind", KINDS)
def test_train_and_held_out_share_no_problem(kind):
    keys = {split: {k for e in some(kind, split, 800) for k in e.keys} for split in SPLITS}
    assert not keys["train"] & keys["held_out"]
    assert all(split_of(key) == split for split in SPLITS for key in keys[split])
    texts = {
        split: {e.messages[-1]["content"] for e in some(kind, split, 800, seed=6)}
        for split in SPLITS
    }
    if kind not in ("chats", "tools"):  # the last turn of a conversation may be "Thanks!"
        assert not texts["train"] & texts["held_out"]


def test_problem_key_ignores_wording():
    rng = random.Random(4)
    wordings: dict[str, set[str]] = {}
    for _ in range(20_000):
        problem = draw_problem(rng)
        wordings.setdefault(problem.key, set()).add(problem.text)
    assert max(map(len, wordings.values())) > 3


def test_unknown_split_raises():
    with pytest.raises(ValueError, match="split"):
        next(KINDS["problems"]("test", 0))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Pens: 1 + 2 = 3\n#### 3", 3),
        ("#### 1\n#### 1,024", 1024),
        ("#### -5\n", -5),
        ("The answer is 3", None),
        ("say #### 3 at last", None),
        ("#### ,", None),
    ],
)
def test_answer_of_reads_last_line(text, answer):
    assert answer_of(text) == answer


def test_json_answer_values_occur_in_prompt():
    for example in some("copying", "train", 400):
        if example.answer[0] not in "[{":
            continue
        answer = json.loads(example.answer)
        rows = answer if isinstance(answer, list) else [answer]
        for key, value in (field for row in rows for field in row.items()):
            assert str(value) in example.messages[0]["content"]
            assert key in example.messages[0]["content"]


@pytest.mark.parametrize("task", dict.fromkeys(TASKS), ids=lambda task: task.__name__)
def test_copying_answer_is_mostly_copied(task):
    rng = random.Random(task.__name__)
    for _ in range(100):
        example = task(rng)
        words = re.findall(r"\w+", example.answer)
        asked = set(re.findall(r"\w+", example.messages[0]["content"]))
        copied = sum(word in asked for word in words)
        # Only the numbers of a numbered list are new: one for an entry of two to four words.
        assert copied >= 0.6 * len(words)


def test_edited_list_answer_applies_edit():
    seen = set()
    for example in some("copying", "train", 1200):
        text = example.messages[0]["content"]
        edit = re.search(r'(Remove|Replace|Insert|Add|Move) "([^"]+)".*?(?:"([^"]+)")?[.] ?', text)
        old = re.findall(r"^- (.*)$", text, re.MULTILINE)
        if not edit or not old or "\n- " not in "\n" + example.answer:
            continue
        verb = edit.group(1)
        first, *second = re.findall(r'"([^"]+)"', edit.group(0))
        at = old.index(first if verb in ("Remove", "Replace", "Move") else (second or [old[-1]])[0])
        want = {
            "Remove": old[:at] + old[at + 1 :],
            "Replace": old[:at] + second + old[at + 1 :],
            "Insert": old[: at + 1] + [first] + old[at + 1 :],
            "Add": old + [first],
            "Move": [first] + old[:at] + old[at + 1 :],
        }[verb]
        assert example.answer == "\n".join(f"- {entry}" for entry in want), text
        seen.add(verb)
    assert seen == {"Remove", "Replace", "Insert", "Add", "Move"}


def test_generated_docstring_examples_pass():
    rng = random.Random(6)
    runner = doctest.DocTestRunner(verbose=False)
    names = set()
    for _ in range(1200):
        code = draw_function(rng).answer.removeprefix("```python\n").removesuffix("```")
        scope: dict = {}
        exec(code, scope)
        (function,) = (value for name, value in scope.items() if name[:2] != "__")
        test = doctest.DocTestParser().get_doctest(function.__doc__, scope, "code", None, 0)
        assert len(test.examples) == 1
        assert runner.run(test, out=lambda text: None).failed == 0, code
        names.add(re.sub(r"\d+", "K", function.__name__))
    assert len(names) > len(ONE_LINE)


def test_chat_alternates_and_ends_with_user():
    lengths = set()
    for example in some("chats", "train", 300):
        roles = [message["role"] for message in example.messages]
        assert roles[::2] == ["user"] * len(roles[::2])
        assert all(a != b for a, b in pairwise(roles))
        assert roles[-1] == "user"
        assert example.answer
        lengths.add(len(roles))
    assert len(lengths) > 2


def test_examples_contain_every_kind_and_follow_seed():
    first, again, other = (
        [(e.kind, e.messages, e.answer) for e in islice(examples("train", seed, SHARES), 300)]
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert {kind for kind, *_ in first} == set(SHARES)
    assert sum(SHARES.values()) == pytest.approx(1) == sum(TEXT_SHARES.values())


def test_sql_statements_run_on_stock_table():
    """Every statement is valid, and the kind is in no share of the training data."""
    assert "sql" not in SHARES
    with closing(sqlite3.connect(":memory:")) as database:
        columns = "product TEXT, color TEXT, city TEXT, price INTEGER, quantity INTEGER"
        database.execute(f"CREATE TABLE stock ({columns})")
        for example in some("sql", "train", 300):
            for statement in example.answer.splitlines():
                database.execute(statement)
        assert database.execute("SELECT COUNT(*) FROM stock").fetchone()[0] > 10


@pytest.mark.parametrize("kind", [*KINDS, "all"])
def test_data_command_is_reproducible_across_processes(kind, tmp_path):
    options = ["--split", "held_out", "--kind", kind, "--count", "12", "--out"]
    main([*options, str(tmp_path / "here.jsonl")])
    command = [sys.executable, "-m", "models.demo.data", *options, str(tmp_path / "there.jsonl")]
    hashing = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run(command, check=True, cwd=ROOT, env=hashing)
    here = (tmp_path / "here.jsonl").read_text(encoding="utf-8")
    assert here == (tmp_path / "there.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in here.splitlines()]
    assert len(lines) == 12
    fields = {"kind", "messages", "answer"}
    assert all(set(line) - {"tools"} == fields for line in lines)
    assert all("tools" in line for line in lines) or kind != "tools"


@pytest.fixture(scope="module")
def tokenizer() -> FastTokenizer:
    return FastTokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.mark.matrix
def test_tokenizer_training_is_reproducible(tmp_path):
    demo_tokenizer.write(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (DEMO / name).read_bytes()


def test_vocabulary_has_4096_tokens_ending_with_special_tokens(tokenizer):
    assert tokenizer.get_vocab_size() == 4096
    assert [tokenizer.id_to_token(i) for i in (4093, 4094, 4095)] == list(SPECIAL_TOKENS)


def test_tokenizer_splits_digits(tokenizer):
    tokens = tokenizer.encode("Ada has 1234 pens, 56*78=4368 x9y07").tokens
    assert [t for t in tokens if any(c.isdigit() for c in t)] == list("12345678436890" + "7")
    assert not [t for t in tokenizer.get_vocab() if len(t) > 1 and any(c.isdigit() for c in t)]


@pytest.mark.parametrize("split", SPLITS)
def test_tokenizer_round_trips_every_example(tokenizer, split):
    for example in islice(examples(split, 9, SHARES), 300):
        tools = json.dumps(example.tools)
        for text in (*(m["content"] for m in example.messages), example.answer, tools):
            assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_tokenizer_round_trips_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_encode_chat_writes_chat_template(tokenizer):
    question = [{"role": "user", "content": "What is 2 + 3?"}]
    tokens = Tokenizer.from_folder(DEMO).encode_chat(question)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == (
        "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [t for t in tokens if t >= 4093] == [4094, 4095, 4094]
