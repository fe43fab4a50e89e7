"""Rows, batches and training loop, without a model."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.training import examples
from jax_impl.training.examples import Batches, RaggedRows, Row, best_widths, read_rows, row_of
from jax_impl.training.loop import Schedule, Task, train
from jax_impl.training.records import curves
from models.make_random import ROOT
from tests.support.training import rows_of, shared_run

TOKENIZER = ROOT / "random"
END = 258
CHAT = [
    {"role": "user", "content": "2 + 3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "Sure?"},
]

CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def write_lines(path, count):
    lines = [{"messages": CHAT, "answer": f"Yes, {i}."} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_row_of_chat_matches_server_tokens():
    tokenizer = examples.open_tokenizer(TOKENIZER)
    row = row_of("line", {"messages": CHAT, "answer": "Yes."}, tokenizer)
    prompt = tokenizer.encode_chat(CHAT)
    assert row.tokens == [*prompt, *b"Yes.", END]
    learnt = [t for t, is_answer in zip(row.tokens, row.is_answer, strict=True) if is_answer]
    assert learnt == [*b"5", END, *b"Yes.", END]


def test_row_of_rewriting_template_trains_last_answer_only(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((TOKENIZER / name).read_bytes())
    counts = "{{ messages | length }}:{% for m in messages %}{{ m.content }}|{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(counts, encoding="utf-8")
    tokenizer = examples.open_tokenizer(tmp_path)
    row = row_of("line", {"messages": CHAT, "answer": "Yes."}, tokenizer)
    assert bytes(row.tokens[:-1]) == b"3:2 + 3?|5|Sure?|Yes."
    assert sum(row.is_answer) == len(b"Yes.") + 1


def test_read_prompts_with_tools_matches_server(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((TOKENIZER / name).read_bytes())
    written = (
        "{% for t in tools %}{{ t.function.name }};{% endfor %}{% for m in messages %}"
        "{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.arguments.a }}{% endfor %}|{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(written, encoding="utf-8")
    path = tmp_path / "data.jsonl"
    turns = [CHAT[0], CALLING, {"role": "tool", "content": "5", "tool_call_id": "x"}]
    line = {"messages": turns, "tools": [{"type": "function", "function": {"name": "add"}}]}
    path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    (prompt,) = examples.read_prompts([path], examples.open_tokenizer(tmp_path), 1)
    assert bytes(prompt) == b"add;user:2 + 3?|assistant:2|tool:5|"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"text": "a"}', "neither messages nor a prompt"),
        ('{"messages": [{"role": "user"}]}', "role and content"),
        ('{"messages": [], "tools": {"a": 1}}', "tools must be a list"),
        ('{"prompt": "a", "answer": 5}', "answer that is not a string"),
        (json.dumps({"messages": [*CHAT[:1], CALLING]}), "an answer of tool_calls"),
        (json.dumps({"messages": CHAT, "tools": [{"type": "function"}]}), "function with a name"),
    ],
)
def test_read_rows_rejects_invalid_line_with_location(tmp_path, line, fault):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=fault) as refused:
        read_rows([path], TOKENIZER, 100)
    assert f"{path}, byte 16" in str(refused.value)


ASKED = {"role": "user", "content": "2 + 3?"}
SAID = {"role": "assistant", "content": "5"}
FORMATS = {
    "answer": {"messages": [ASKED], "answer": "5"},
    "chat": {"messages": [ASKED, SAID | {"weight": 1}], "id": 7, "source": "x", "tools": []},
    "conversation": {"prompt": [ASKED], "completion": [SAID]},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5"}],
        "system": "",
    },
    "sharegpt_roles": {"conversations": [ASKED, SAID]},
    "alpaca": {"instruction": "2 + 3?", "input": "", "output": "5", "history": []},
}


@pytest.mark.parametrize("line", FORMATS.values(), ids=FORMATS)
def test_row_of_equal_for_every_chat_format(line, tmp_path):
    tokenizer = examples.open_tokenizer(TOKENIZER)
    prompt = tokenizer.encode_chat([ASKED])
    row = row_of("line", line, tokenizer)
    assert row.tokens == [*prompt, *b"5", END]
    assert row.is_answer == [False] * len(prompt) + [True, True]
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    assert examples.read_prompts([path], tokenizer, 1) == [prompt]


@pytest.mark.parametrize("field", ["answer", "completion"])
def test_row_of_prompt_and_answer_trains_answer(field):
    row = row_of("line", {"prompt": "hi", field: "yo"}, examples.open_tokenizer(TOKENIZER))
    assert row == Row([*b"hi", *b"yo", END], [False] * 2 + [True] * 3)


def test_row_of_weight_zero_answer_is_context():
    tokenizer = examples.open_tokenizer(TOKENIZER)
    chat = [ASKED, SAID | {"weight": 0}, CHAT[2], {"role": "assistant", "content": "Yes."}]
    trl = {"prompt": [ASKED, SAID, CHAT[2]], "completion": "Yes."}
    for line in ({"messages": chat}, trl):
        row = row_of("line", line, tokenizer)
        assert row.tokens == [*tokenizer.encode_chat(CHAT), *b"Yes.", END]
        assert sum(row.is_answer) == len(b"Yes.") + 1


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ({"prompt": "a", "respones": "b"}, "has the field 'respones', which is not read; fields"),
        ({"messages": [ASKED, SAID], "chosen": [SAID]}, "has the field 'chosen', which is not"),
        ({"messages": [ASKED | {"images": ["x"]}, SAID]}, "has the field 'images' in a message"),
        ({"conversations": [{"from": "gpt", "value": "a", "loss": 1}]}, "the field 'loss' in a"),
        ({"conversations": [{"from": "function_call", "value": "a"}]}, "from 'function_call'"),
        ({"conversations": [{"from": "human"}]}, "value must be a string"),
        ({"instruction": "a", "output": 5}, "instruction, input, output must be strings"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "the field 'history'"),
        (
            {"prompt": "a", "completion": "b", "answer": "b"},
            "both answer and completion; remove one",
        ),
        ({"prompt": "a", "messages": [ASKED, SAID]}, "has messages and prompt; it must have one"),
        ({"prompt": ""}, "neither messages nor a prompt"),
        ({"prompt": "a", "tools": [{}]}, "has tools, which are unsupported with a text prompt"),
        ({"messages": []}, "no answer to learn"),
        ({"messages": [{"role": "system", "content": "a"}]}, "no answer to learn"),
        ({"messages": [ASKED, SAID | {"weight": 0}]}, "no answer to learn"),
        ({"messages": [ASKED, SAID | {"weight": 0.5}]}, "weight of a message must be 0 or 1"),
        ({"messages": [ASKED, SAID | {"reasoning_content": "a"}]}, "an answer of reasoning_con"),
        ({"messages": [ASKED, SAID | {"content": None}]}, "an answer that is not a string"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "has the role 'bot'; roles are"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts other than"),
    ],
)
def test_row_of_rejects_unknown_fields(line, fault):
    with pytest.raises(ValueError, match=f"^line.*{fault}"):
        row_of("line", line, examples.open_tokenizer(TOKENIZER))


def test_read_prompts_rejects_chat_without_prompt(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": [SAID]}) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="byte 0 has no message before its answer"):
        examples.read_prompts([path], examples.open_tokenizer(TOKENIZER), 1)


def test_read_rows_equal_with_processes_and_cache(tmp_path, monkeypatch):
    path = tmp_path / "data.jsonl"
    write_lines(path, 20)
    whole = read_rows([path], TOKENIZER, 200)
    cache = tmp_path / "data.jsonl.tokens.npz"
    cache.unlink()
    monkeypatch.setattr(examples, "BYTES_PER_WORKER", path.stat().st_size // 2)
    monkeypatch.setattr(examples.os, "cpu_count", lambda: 2)
    parts = read_rows([path], TOKENIZER, 200)
    assert cache.is_file()
    monkeypatch.setattr(examples, "_tokenised", None)  # only the cache remains
    for rows in (parts, read_rows([path], TOKENIZER, 200)):
        assert np.array_equal(rows.tokens, whole.tokens)
        assert np.array_equal(rows.is_answer, whole.is_answer)
        assert np.array_equal(rows.starts, whole.starts)


def test_read_rows_cache_misses_after_file_change(tmp_path):
    path = tmp_path / "data.jsonl"
    write_lines(path, 3)
    assert len(read_rows([path], TOKENIZER, 200).lengths) == 3
    write_lines(path, 4)
    assert len(read_rows([path], TOKENIZER, 200).lengths) == 4
    with pytest.raises(ValueError, match="no example of at most 59 tokens"):
        read_rows([path], TOKENIZER, 59)


def test_batches_epoch_contains_every_row_once_shuffled():
    batches = Batches(
        rows_of(*[10] * 8, *[100] * 4), batch_tokens=256, seed=1, prompt_weight=0.0, shares=1
    )
    assert batches.shapes == [(4, 64), (2, 128)]
    orders = []
    for epoch in range(2):
        first = [batches.at(epoch * len(batches) + i).tokens[:, 0] for i in range(len(batches))]
        orders.append(np.concatenate(first).tolist())
        assert sorted(orders[-1]) == list(range(1, 13))
    assert orders[0] != orders[1]


def test_batches_weigh_padding_and_prompts():
    rows = RaggedRows.of([Row([5, 6, 7], [False, True, True])], max_tokens=10)
    batch = Batches(rows, batch_tokens=64, seed=0, prompt_weight=0.25, shares=1).at(0)
    assert batch.tokens.shape == (1, 64)
    assert batch.weights[0, :4].tolist() == [0.25, 1, 1, 0]
    assert not batch.weights[0, 4:].any()


@pytest.mark.parametrize("most", [1, 2, 3])
def test_best_widths_minimise_padding(most):
    lengths = np.array([10] * 50 + [70] * 9 + [130] * 20 + [500])
    found = best_widths(lengths, most)

    def padded(widths):
        return np.array(widths)[np.searchsorted(widths, lengths)].sum()

    others = [(512,), (64, 512), (128, 512), (192, 512), (64, 128, 512), (64, 192, 512)]
    assert len(found) <= most
    assert padded(found) == min(padded(w) for w in others if len(w) <= most)


class Broken(Exception):
    """The process of a run is gone."""


def toy_run(folder, steps, broken_at, minutes=None):
    """A matrix learns to hold the mean of the tokens, with noise from the run's key."""
    batches = Batches(rows_of(*range(3, 40)), batch_tokens=256, seed=1, prompt_weight=0.0, shares=1)
    whole = batches.at

    def at(step):
        if step == broken_at:
            raise Broken
        return whole(step)

    batches.at = at

    def loss(params, frozen, batch, key):
        noise = 0.1 * jax.random.normal(key)
        wanted = jnp.mean(batch.tokens * batch.weights) + frozen["offset"] + noise
        found = jnp.sum((params["matrix"] - wanted) ** 2) + jnp.sum(params["norm"] ** 2)
        return found, {"loss": found}

    params = {"matrix": jnp.ones((2, 3)), "norm": jnp.ones(2)}
    task = Task(params=params, frozen={"offset": jnp.ones(())}, loss=loss)
    schedule = Schedule(steps=steps, minutes=minutes, learning_rate=0.1, warmup=2, save_minutes=0.0)
    return train(task, batches, schedule, 7, folder)


def test_resumed_run_equals_uninterrupted_run(tmp_path):
    whole = toy_run(tmp_path / "whole", 10, None)
    with pytest.raises(Broken):
        toy_run(tmp_path / "parts", 10, 5)
    resumed = toy_run(tmp_path / "parts", 10, None)
    for name in ("matrix", "norm"):
        assert np.array_equal(resumed[name], whole[name])
        assert not np.array_equal(whole[name], np.ones_like(whole[name]))
    steps = [json.loads(line)["step"] for line in (tmp_path / "parts/log.jsonl").open()]
    assert steps == [10]
    assert (tmp_path / "parts/curves.png").stat().st_size


TWO_DEVICES = """
import sys
import jax
import numpy as np
from tests.support.training import shared_run
assert jax.device_count() == 2
np.save(sys.argv[2], shared_run(__import__("pathlib").Path(sys.argv[1])))
"""


def test_two_devices_match_one_device(tmp_path):
    alone = shared_run(tmp_path / "one")
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", TWO_DEVICES, str(tmp_path / "two"), str(tmp_path / "two.npy")]
    subprocess.run(command, check=True, env=os.environ | flags, cwd=ROOT.parent)
    # Means of two halves instead of a whole: one more rounding.
    np.testing.assert_allclose(np.load(tmp_path / "two.npy"), alone, rtol=1e-5)


def test_finished_run_is_not_trained_further(tmp_path):
    done = toy_run(tmp_path, 4, None)
    again = toy_run(tmp_path, 4, 4)
    assert np.array_equal(done["matrix"], again["matrix"])


def test_schedule_ends_with_decayed_rate_at_time_limit(tmp_path):
    schedule = Schedule(steps=None, minutes=1.0, learning_rate=1.0, warmup=10, save_minutes=1.0)
    assert schedule.rate(4, 0.0) == pytest.approx(0.5)
    assert schedule.rate(999, 30.0) == pytest.approx(0.51)
    assert schedule.rate(999, 60.0) == pytest.approx(0.02)
    toy_run(tmp_path, None, None, minutes=0.05)
    # It ends: how many steps three seconds hold depends on the machine.
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])["step"] > 0


def test_nan_loss_ends_run(tmp_path):
    def loss(params, frozen, batch, key):
        return jnp.sum(params) / 0, {"loss": jnp.sum(params) / 0}

    task = Task(params=jnp.ones(2), frozen=(), loss=loss)
    schedule = Schedule(steps=2, minutes=None, learning_rate=0.1, warmup=1, save_minutes=9.0)
    with pytest.raises(FloatingPointError, match="step 2"):
        train(task, Batches(rows_of(5), 64, 0, 0.0, 1), schedule, 0, tmp_path)


def test_checkpoints_never_contain_nan(tmp_path):
    """The same run continues from its last checkpoint after the fault is fixed."""

    def run(least: float) -> np.ndarray:
        def loss(params, frozen, batch, key):
            found = jnp.sum(params)
            found *= jnp.where(found > least, 1, jnp.nan)
            return found, {"loss": found}

        task = Task(params=jnp.ones(2), frozen=(), loss=loss)
        schedule = Schedule(steps=9, minutes=None, learning_rate=0.1, warmup=1, save_minutes=0.0)
        return train(task, Batches(rows_of(5), 64, 0, 0.0, 1), schedule, 0, tmp_path)

    with pytest.raises(FloatingPointError, match="the (loss|gradient norm) is"):
        run(1.5)
    assert np.isfinite(run(-np.inf)).all()


def test_curves_have_markers_and_integer_steps():
    (axis,) = curves([{"step": 20, "loss": 3.0, "accuracy": float("nan")}]).axes
    assert [line.get_marker() for line in axis.get_lines()] == ["o"]
    lines = [{"step": step, "loss": 3.0, "accuracy": 0.5} for step in (1, 2, 3)]
    loss, accuracy = curves(lines).axes
    assert [axis.get_title() for axis in (loss, accuracy)] == ["loss", "share of correct tokens"]
    assert [line.get_marker() for line in loss.get_lines()] == [""]
    ticks = [tick for tick in loss.get_xticks() if 1 <= tick <= 3]
    assert all(tick == round(tick) for tick in ticks)
    assert curves([]) is None
    assert curves([{"step": 1, "tokens_per_second": 5.0}]) is None
