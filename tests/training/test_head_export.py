"""Export of trained heads in the speculators format."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_impl.train import main
from jax_impl.training import export, init, tasks
from jax_impl.training.block import BlockHeadConfig
from jax_impl.training.formats import speculators_json
from shared.drafts.checkpoint import check_head, load_head, open_head
from shared.drafts.config import DraftConfig
from shared.drafts.infer_from_tensors import infer_from_tensors
from shared.models.checkpoint import open_checkpoint
from tests.support.training import GOLDEN, golden_model

TARGETS = {"eagle3": "llama", "dflash": "qwen3", "dspark": "qwen3", "dflash2": "qwen3"}


@pytest.mark.parametrize(
    ("kind", "draft_vocab"),
    [("eagle3", None), ("eagle3", 64), ("dflash", None), ("dspark", None), ("dflash2", None)],
)
def test_speculators_head_equals_head_in_original_format(kind, draft_vocab, tmp_path):
    folder = GOLDEN / TARGETS[kind]
    target, model = golden_model(TARGETS[kind])
    authors = tasks.head_json(kind, target, draft_vocab, 2, 4, 255, False)
    config = DraftConfig.from_dict(authors, target)
    if (block := config.block) is None:
        ids = None if draft_vocab is None else np.arange(0, 4 * draft_vocab, 4)
        head = init.fresh_head(config, target, model, 0, ids)
    else:
        head = init.fresh_block(BlockHeadConfig.of(config), target, model, 0)
    export.save_head(tmp_path / "authors", authors, config, head)
    other = speculators_json(authors, config, folder, 4)
    export.save_head(tmp_path / "speculators", other, config, head)
    read, files = {}, open_checkpoint(folder)
    for name in ("authors", "speculators"):
        opened = open_head(tmp_path / name)
        own = infer_from_tensors(DraftConfig.from_folder(tmp_path / name, target), opened, files)
        check_head(opened, own)
        read[name] = load_head(opened, own, np.float32)
    want, got = read["authors"], read["speculators"]
    if block is not None:
        got = replace(got, config=replace(got.config, block=block))  # without windows the same
    assert got.config == want.config
    assert got.weights.keys() == want.weights.keys()
    for name, array in want.weights.items():
        np.testing.assert_array_equal(got.weights[name], array, err_msg=name)
    written = json.loads((tmp_path / "speculators" / "config.json").read_text(encoding="utf-8"))
    assert "draft_vocab_size" in written
    names = {*open_head(tmp_path / "speculators").names}
    assert ("d2t" in names) == ("t2d" in names) == (draft_vocab is not None)


def test_speculators_format_rejects_eagle(capsys, tmp_path):
    words = ["--target", str(tmp_path), "--draft", "eagle", "--data", "none", "--out", "out"]
    assert main([*words, "--steps", "1", "--format", "speculators"]) == 2
    assert (
        "--format speculators requires --draft eagle3, dflash, dspark and dflash2"
        in capsys.readouterr().err
    )


def test_speculators_format_rejects_causal_head(capsys, tmp_path):
    words = ["--target", str(tmp_path), "--draft", "dflash", "--data", "none", "--out", "out"]
    assert main([*words, "--steps", "1", "--causal-head", "--format", "speculators"]) == 2
    assert "not supported for a JetSpec head" in capsys.readouterr().err


def test_speculators_format_preserves_rope_scaling():
    target, _ = golden_model("llama")
    rope = {"type": "linear", "factor": 4.0}
    authors = {**tasks.head_json("eagle3", target, 64, 1, 4, 255, False), "rope_scaling": rope}
    config = DraftConfig.from_dict(authors, target)
    other = speculators_json(authors, config, GOLDEN / "llama", 4)
    rotary = DraftConfig.from_dict(other, target).layer.attention.rotary
    assert rotary == config.layer.attention.rotary
    assert rotary.type == "linear"


def test_started_head_follows_its_files(tmp_path):
    """Its own LM head and embedding are trained, and a missing bias is not required."""
    files = open_checkpoint(GOLDEN / "llama")
    target, model = golden_model("llama")
    fields = tasks.head_json("eagle3", target, None, 1, 4, 255, False)
    config = DraftConfig.from_dict(fields, target)
    head = init.fresh_head(config, target, model, 0, None)
    export.save_head(tmp_path, fields, config, head)
    fields |= {"draft_vocab_size": None}
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embed_tokens.weight"] = np.ones((target.vocab, target.hidden), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    stated = DraftConfig.from_dict(fields, target)
    assert not stated.own_lm_head
    own = tasks.started(stated, "eagle3", tmp_path, files)
    tasks.check_head_trained(own)
    assert {"lm_head", "embed"} <= export.arrays_of(tasks.load_head(tmp_path, own)).keys()
    bare = GOLDEN / "eagle1_nobias"
    without = tasks.started(DraftConfig.from_folder(bare, target), "eagle", bare, files)
    assert "fc_bias" not in export.arrays_of(tasks.load_head(bare, without))
    with pytest.raises(ValueError, match="its own embedding"):
        tasks.check_head_trained(replace(without, own_embed=True))


REFUSED = {
    "a head of kind EAGLE; use --draft eagle": ["eagle3", "--start", str(GOLDEN / "eagle1")],
    "--draft-vocab requires --draft eagle3": ["eagle", "--draft-vocab", "64"],
    "--block requires --draft dflash, dspark, dflash2": ["eagle3", "--block", "8"],
    "--causal-head requires --draft dflash": ["dspark", "--causal-head"],
    "--loss requires --draft dflash, dspark, dflash2": ["eagle3", "--loss", "kl"],
    "--speculative-aux-layer-convention requires --draft eagle3, dflash, dspark, dflash2": [
        *("eagle3", "--speculative-aux-layer-convention", "inputs"),
    ],
    "--draft-vocab is not supported with --start": [
        *("eagle3", "--draft-vocab", "64", "--start", str(GOLDEN / "eagle3")),
    ],
}


@pytest.mark.parametrize("fault", REFUSED)
def test_invalid_start_rejected_before_generating_outputs(fault, capsys, tmp_path):
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text('{"prompt": "a"}\n', encoding="utf-8")
    words = ["--target", str(GOLDEN / "llama"), "--data", str(data), "--out", str(out)]
    assert main([*words, "--steps", "1", "--draft", *REFUSED[fault]]) == 2
    assert fault in capsys.readouterr().err
    assert not out.exists()


def test_layer_id_meaning_flag_accepted_by_trainer(capsys, tmp_path):
    """The trainer has the flag that the error names."""
    start, data = tmp_path / "start", tmp_path / "data.jsonl"
    shutil.copytree(GOLDEN / "eagle3", start)
    fields = json.loads((start / "config.json").read_text(encoding="utf-8"))
    data.write_text('{"prompt": "a"}\n', encoding="utf-8")
    words = ["--target", str(GOLDEN / "llama"), "--data", str(data), "--out", str(tmp_path / "out")]
    words += ["--draft", "eagle3", "--start", str(start), "--steps", "1"]

    def refusal(listed, *flags):
        given = {"eagle_aux_hidden_state_layer_ids": listed}
        (start / "config.json").write_text(json.dumps({**fields, **given}), encoding="utf-8")
        assert main([*words, *flags]) == 2
        return capsys.readouterr().err

    (flag,) = re.findall(r"give (--\S+) outputs or \1 inputs", refusal([3, 5, 7]))
    for means in ("inputs", "outputs"):  # a list with a fault, as a run would take long
        assert f"whose {means} are read" in refusal([3, 5, 5], flag, means)
