"""The draft vocabulary: choice of tokens, token map files, errors and startup."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from jax_impl import weights as jax_weights
from models import token_map
from shared.boundary.tp_group import TPGroup
from shared.drafts.token_map import most_frequent, read_token_map
from shared.models import checkpoint as checkpoint_module
from shared.models.checkpoint import CheckpointError, open_checkpoint
from shared.models.dummy_weights import DummyCheckpoint
from shared.models.parameters import draft_head, parameters
from shared.options.command_line import parse
from shared.process.device import Device
from shared.process.launch import launch
from shared.process.start import prepare
from shared.text.tokenizer import Tokenizer
from tests.support.http_fixtures import save_tokenizer
from tests.support.serve_reference import PLATFORM
from tests.support.tiny_heads import write_tiny_head
from tests.support.tiny_models import tiny_model, write_tiny
from torch_impl import weights as torch_weights

VOCAB = 288
NEXTN = ["--speculative-algorithm", "NEXTN"]
MAP = (1, 2, 3, 64, 65, *range(100, 180), 200, 271)


def written(folder: Path, contents: object) -> str:
    path = folder / "map.json"
    path.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    return str(path)


def test_read_token_map_sorts_ids(tmp_path):
    assert read_token_map(written(tmp_path, [7, 0, 287, 5]), VOCAB) == (0, 5, 7, 287)


REFUSED = {
    "beyond the vocabulary": ([1, 288], r"token 288, but the target has tokens 0 to 287"),
    "below it": ([-1, 1], "token -1"),
    "twice": ([5, 9, 5], "token 5 twice"),
    "no list": ({"ids": [1]}, "must be a JSON list of token ids"),
    "empty": ([], "at least one"),
    "other things": ([1, True], "must be a JSON list of token ids"),
    "no JSON": ("1 2 3", "cannot be read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_read_token_map_rejects_invalid_list(case, tmp_path):
    contents, named = REFUSED[case]
    with pytest.raises(ValueError, match=named):
        read_token_map(written(tmp_path, contents), VOCAB)


def test_read_token_map_rejects_pickle_and_missing_file():
    with pytest.raises(ValueError, match="is a pickle"):
        read_token_map("freq_32768.pt", VOCAB)
    with pytest.raises(ValueError, match="cannot be read"):
        read_token_map("nowhere.json", VOCAB)


def test_max_frequent_keeps_top_tokens_ties_lower():
    counts = np.array([3, 0, 5, 3, 0, 3])
    assert most_frequent(counts, 3).tolist() == [0, 2, 3]
    assert most_frequent(counts, 3, [4]).tolist() == [0, 2, 4]
    with pytest.raises(ValueError, match="must have 1 to 6 tokens, got 7"):
        most_frequent(counts, 7)


def test_token_map_counts_all_text_formats_deterministically(tmp_path):
    write_tiny(tmp_path / "model", "qwen3_5", 0)
    save_tokenizer(tmp_path / "model")
    lines = ["aab", [98, 98], {"target": "01ab"}, {"prompt_ids": [122], "output_ids": [98, 99]}]
    lines += [{"answer": "d"}, {"text": "e"}]
    lines.append(
        {"messages": [{"role": "user", "content": "zz"}, {"role": "assistant", "content": "f"}]}
    )
    texts, plain = tmp_path / "texts.jsonl", tmp_path / "plain.txt"
    texts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    plain.write_text("gg")
    made = tmp_path / "one.json", tmp_path / "other.json"
    parts = [token_map.write(tmp_path / "model", [texts, plain], 7, out) for out in made]
    ids = json.loads(made[0].read_text())
    model = prepare(parse(["--model-path", str(tmp_path / "model")]), PLATFORM)
    ends, ours = model.memory.blueprint.config.eos_ids, [97, 98, 103]
    assert made[0].read_text() == made[1].read_text()
    assert {*ends, *ours} <= {*ids}
    assert len(ids) == 7
    assert 122 not in ids, "a user message was counted"
    assert parts[0] == parts[1] > 0.5


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"prompt": "a"}', "text 1: it has none of the fields"),
        (
            '{"output_ids": [1, 50000000000]}',
            "text 1: it contains token id 50000000000; valid ids are 0 to",
        ),
        ('{"output_ids": [-1]}', "text 1: it contains token id -1; valid ids are 0 to"),
        ('{"messages": ["x"]}', "text 1: its messages must be a list of objects"),
        ("{bad", "line 1 is not valid JSON"),
    ],
)
def test_token_map_rejects_invalid_line(line, sentence, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text(line + "\n")
    with pytest.raises(ValueError, match=f"texts.jsonl.*{sentence}"):
        token_map.counted([texts], None, VOCAB)


def test_token_map_counts_answers_beside_messages(tmp_path):
    save_tokenizer(tmp_path)
    reply = {"role": "assistant", "content": "f"}
    lines = [{"messages": [reply], "answer": "d"}, {"prompt": "z", "completion": "e"}]
    lines.append({"prompt": "z", "completion": [reply]})
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    counts = token_map.counted([texts], Tokenizer.from_folder(tmp_path), VOCAB)
    assert [counts[ord(letter)] for letter in "defz"] == [1, 1, 2, 0]


@pytest.mark.parametrize("tied", [False, True])
def test_draft_head_shards_equal_token_map_rows(tied, tmp_path, monkeypatch):
    config = write_tiny(tmp_path, "qwen3_5", 0, tied=tied)
    files, nothing = open_checkpoint(tmp_path), lambda count: None
    whole = next(p for p in parameters(config, False) if p.name == ("embed" if tied else "lm_head"))
    monkeypatch.setattr(checkpoint_module, "LARGE", 10 * config.hidden)  # rows in several pieces
    dummy = DummyCheckpoint.of_model(config, None)
    for stored in (files, dummy):
        want = stored.load(whole, np.float32)[[*MAP]]
        rows = draft_head(config, MAP)
        np.testing.assert_array_equal(stored.load(rows, np.float32), want)
        shares = [stored.load(rows.shard(rank, 2), np.float32) for rank in (0, 1)]
        assert [len(share) for share in shares] == [64, 64]
        np.testing.assert_array_equal(np.concatenate(shares)[: len(MAP)], want)
        for rank in (0, 1):
            how = (nothing, {}, TPGroup(rank, 2, None), MAP)
            of_torch = torch_weights.load(
                stored, config, False, "float32", torch.device("cpu"), *how
            )
            device = jax.devices("cpu")[0]
            of_jax = jax_weights.load(stored, config, False, np.float32, device, *how)
            assert of_torch.draft_rows is not None
            np.testing.assert_array_equal(of_torch.draft_rows.lm_head.values, shares[rank])
            np.testing.assert_array_equal(of_jax.alone["draft_lm_head"], shares[rank])
            assert of_torch.draft_rows.ids.tolist() == of_jax.alone["draft_ids"].tolist() == [*MAP]


def start(argv: list[str], reached: list) -> int:
    def load_backend(blueprint, checkpoint, draft_files, progress):
        reached.append(blueprint)
        raise CheckpointError("enough")

    device = Device("cpu", "CPU", 1 << 30)
    platform = replace(PLATFORM, find_device=lambda: device, load=load_backend)
    return launch(["--port", "0", *argv], lambda: platform)


def test_token_map_reaches_backend_and_memory_plan(tmp_path):
    config, reached = write_tiny(tmp_path / "model", "qwen3_5", 0), []
    argv = ["--model-path", str(tmp_path / "model"), *NEXTN]
    argv += ["--speculative-token-map", written(tmp_path, [*MAP])]
    start(argv, reached)
    assert reached[0].drafts.token_map == MAP
    made, bare = (prepare(parse(each), PLATFORM) for each in (argv, argv[:-2]))
    lines = {line.name: line for line in made.memory.lines}
    assert lines["draft LM head"].num_bytes == len(MAP) * (4 * config.hidden + 4)
    assert "87 of the LM head's 272 rows" in lines["draft LM head"].detail
    rows = made.opened.checkpoint.num_bytes([draft_head(config, MAP)])
    assert made.num_bytes == bare.num_bytes + rows


def test_unusable_token_map_raises(tmp_path, capfd):
    target = tiny_model("llama", 0)
    write_tiny(tmp_path / "model", "llama", 0)
    argv = ["--model-path", str(tmp_path / "model")]
    argv += ["--speculative-token-map", written(tmp_path, [1, 2, 3])]
    tree = ["--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "6"]
    few = "has 3 tokens, and a node of the draft tree may have 4 children"
    for fields, shape, named in (
        ({"draft_vocab_size": 32}, [], "the draft model has its own lm_head of 32 tokens"),
        ({"draft_vocab_size": None}, tree, few),
        ({"draft_vocab_size": None}, [], few),  # a Llama model has trees by default
        ({"draft_vocab_size": None}, ["--speculative-adaptive"], few),
    ):
        head = tmp_path / f"head {fields['draft_vocab_size']}"
        if not head.exists():
            write_tiny_head(head, *target, "EAGLE3", 0, **fields)
        drafting = ["--speculative-algorithm", "EAGLE3"]
        drafting += ["--speculative-draft-model-path", str(head), *shape]
        assert start([*argv, *drafting], []) == 2
        assert named in capfd.readouterr().err.splitlines()[-1]
