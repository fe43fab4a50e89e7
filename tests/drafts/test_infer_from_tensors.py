"""Head config from tensors: biases, head norms and own or shared embedding."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shared.drafts.checkpoint import check_head, load_head, open_head
from shared.drafts.config import DraftConfig
from shared.drafts.drafter_spec import DrafterSpec
from shared.drafts.infer_from_tensors import infer_from_tensors
from shared.models.checkpoint import SINGLE_FILE, CheckpointError, open_checkpoint
from shared.options.command_line import parse
from shared.process.device import Device
from shared.process.memory_plan import plan
from tests.support.serve_reference import PLATFORM
from tests.support.tiny_heads import write_tiny_block, write_tiny_head
from tests.support.tiny_models import tiny_model, write_tiny

TARGET, WEIGHTS = tiny_model("llama", 0)
CPU = Device("cpu", "CPU", 8 << 30)


@pytest.fixture
def target(tmp_path):
    write_tiny(tmp_path / "target", "llama", 0)
    return open_checkpoint(tmp_path / "target")


def write(folder, kind: str, more: dict[str, np.ndarray]) -> None:
    if kind == "DFLASH":
        write_tiny_block(folder, TARGET, 1)
    else:
        write_tiny_head(folder, TARGET, WEIGHTS, kind, 1)
    path = folder / SINGLE_FILE
    save_file(load_file(path) | more, path)


def found(folder, target) -> DraftConfig:
    files = open_head(folder)
    config = infer_from_tensors(DraftConfig.from_folder(folder, TARGET), files, target)
    check_head(files, config)
    return config


@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE3", "DFLASH"])
def test_differing_embedding_is_own_and_copy_shared(kind, target, tmp_path):
    embed = WEIGHTS["embed"]
    copies = {"same": embed, "rounded": embed.astype(np.float16)}
    for name, copy in copies.items():
        write(tmp_path / name, kind, {"embed_tokens.weight": copy})
        assert not found(tmp_path / name, target).own_embed
    trained = embed.copy()
    trained[-1, -1] += 1
    write(tmp_path / "trained", kind, {"embed_tokens.weight": trained})
    config = found(tmp_path / "trained", target)
    assert config.own_embed
    head = load_head(open_head(tmp_path / "trained"), config, np.float32)
    np.testing.assert_array_equal(head.weights["embed"], trained)
    # Its own tensors are in the memory plan.
    flags = ["--speculative-algorithm", kind, "--speculative-draft-model-path", "head"]
    planned = plan(parse(flags), TARGET, DrafterSpec.of_head(config), CPU, PLATFORM.costs)
    (line,) = (each for each in planned.lines if each.name == "draft weights")
    assert line.num_bytes == 4 * sum(array.size for array in head.weights.values())


def test_head_biases_and_norms_follow_tensors(tmp_path):
    D, queries, keys = 16, 6 * 16, 3 * 16
    sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": TARGET.hidden}
    layer = {f"midlayer.self_attn.{x}.bias": np.ones(n, np.float32) for x, n in sizes.items()}
    layer |= {f"midlayer.self_attn.{x}_norm.weight": np.ones(D, np.float32) for x in "qk"}
    wide = {"gate": 40, "up": 40, "down": TARGET.hidden}
    layer |= {f"midlayer.mlp.{x}_proj.bias": np.ones(n, np.float32) for x, n in wide.items()}
    write(tmp_path / "head", "EAGLE3", layer | {"fc.bias": np.ones(TARGET.hidden, np.float32)})
    config = found(tmp_path / "head", None)
    attention, fed = config.layer.attention, config.layer.dense
    assert (attention.input_bias, attention.out_bias, attention.qk_norm) == (True, True, True)
    assert (config.has_bias, fed.bias) == (True, True)
    write(tmp_path / "plain", "EAGLE3", {})
    config = found(tmp_path / "plain", None)
    attention, fed = config.layer.attention, config.layer.dense
    assert (attention.input_bias, attention.out_bias, attention.qk_norm) == (False, False, False)
    assert (config.has_bias, fed.bias) == (False, False)


@pytest.mark.parametrize("size", [TARGET.vocab, TARGET.vocab // 2])
def test_missing_lm_head_uses_target_for_whole_vocabulary(size, tmp_path):
    folder = tmp_path / "head"
    write_tiny_head(folder, TARGET, WEIGHTS, "EAGLE3", 1, draft_vocab_size=size)
    assert found(folder, None).own_lm_head
    path = folder / SINGLE_FILE
    save_file({k: v for k, v in load_file(path).items() if k != "lm_head.weight"}, path)
    if size == TARGET.vocab:
        assert not found(folder, None).own_lm_head
        return
    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight"):
        found(folder, None)


def padded(table: np.ndarray, more: int) -> np.ndarray:
    """Adds `more` rows, or removes rows if it is negative."""
    return np.pad(table, ((0, max(more, 0)), (0, 0)))[: len(table) + more]


@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE3"])
@pytest.mark.parametrize("more", [8, -8])
def test_head_vocab_padding_may_differ_from_target(more, kind, target, tmp_path):
    """The tokenizer has fewer tokens than both vocabularies."""
    known, embed, folder = TARGET.vocab - 10, WEIGHTS["embed"], tmp_path / "head"
    write(folder, kind, {"embed_tokens.weight": padded(embed, more)})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": len(embed) + more}))
    config = infer_from_tensors(
        DraftConfig.from_folder(folder, TARGET, None, known), open_head(folder), target
    )
    check_head(open_head(folder), config)
    assert (config.layer.vocab, config.own_embed) == (TARGET.vocab, False)
    for too_many in (None, TARGET.vocab + 1):
        with pytest.raises(ValueError, match="vocab_size"):
            DraftConfig.from_folder(folder, TARGET, None, too_many)
    write(tmp_path / "trained", kind, {"embed_tokens.weight": padded(embed + 1, more)})
    files = open_head(tmp_path / "trained")
    config = infer_from_tensors(config, files, target)
    assert config.own_embed
    if more < 0:
        with pytest.raises(CheckpointError, match=f"embedding has {len(embed) - 8} tokens"):
            check_head(files, config)
        return
    loaded = load_head(files, config, np.float32).weights["embed"]
    np.testing.assert_array_equal(loaded, embed + 1)
