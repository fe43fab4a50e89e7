"""TP sharding: shards of all ranks form the model, and are read as slices of files."""

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

from jax_impl import weights as jax_weights
from jax_impl.ops.gemm import linear as jax_linear
from shared.boundary.tp_group import TPGroup
from shared.models import sharded_range, tp_sharding
from shared.models.checkpoint import open_checkpoint
from shared.models.dummy_weights import DummyCheckpoint
from shared.models.families import config_from_dict, config_from_folder
from shared.models.formats import fp8
from shared.models.formats.fp8_encoding import FP8Encoding
from shared.models.formats.weight_format import VALUES
from shared.models.parameter_arrays import shard_array
from shared.models.parameters import divided_parameters, parameters
from tests.support.tiny_models import DENSE, EXPERTS, FAMILIES, tiny_config, write_tiny
from tests.support.weight_formats import read_planes, w8a8_of, w8a16_of
from torch_impl import weights as torch_weights
from torch_impl.ops.gemm import linear as torch_linear

CPU, JAX_CPU = torch.device("cpu"), jax.devices("cpu")[0]
GOLDEN = Path(__file__).parents[1] / "golden"
WHOLE_BLOCKS = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
FOUR = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}


@pytest.mark.parametrize("family", [*FAMILIES, *DENSE, *EXPERTS])
@pytest.mark.parametrize("count", [2, 4])
def test_shard_load_equals_slice_of_parameter(family, count, tmp_path):
    config = write_tiny(tmp_path, family, 0)
    checkpoint = open_checkpoint(tmp_path)
    wanted, read = parameters(config, config.has_mtp), []
    for parameter in wanted:
        whole = checkpoint.load(parameter, np.float32)
        for rank in range(count):
            local = parameter.shard(rank, count)
            got = checkpoint.load(local, np.float32, read.append)
            np.testing.assert_array_equal(got, shard_array(local, whole))
    assert sum(read) < count * checkpoint.num_bytes(wanted)


def test_shards_hold_whole_heads_and_cover_parameter():
    config = config_from_dict(
        tiny_config("qwen3_5", nested=False, with_mtp=True, tied=False) | FOUR
    )
    local = tp_sharding.shard_config(config, 4)
    shapes = {p.name: p.shape for p in parameters(local, True)}
    for parameter in parameters(config, True):
        whole = np.arange(np.prod(parameter.shape), dtype=np.float32).reshape(parameter.shape)
        shares = [shard_array(parameter.shard(rank, 4), whole) for rank in range(4)]
        leaf = parameter.name.rsplit(".", 1)[-1]
        if leaf in ("inputs", "gate_up", "conv", "a_log", "dt_bias"):
            assert shares[0].shape == shapes[parameter.name], parameter.name
        if parameter.sections and leaf != "inputs":
            seen = np.unique(np.concatenate([share.ravel() for share in shares]))
            assert set(whole.ravel()) <= {*seen, 0.0}, parameter.name
    inputs = next(p for p in parameters(config, False) if p.name == "attention.inputs")
    rows = np.arange(inputs.shape[1], dtype=np.float32)[None, :, None] * np.ones((1, 1, 64))
    D, first_key = 16, 4 * 32
    for rank in range(4):
        got = shard_array(inputs.shard(rank, 4), rows)[0, :, 0]
        # A query head and its gate; each of the two KV heads is on two ranks.
        query, key = np.arange(32) + 32 * rank, first_key + D * (rank // 2) + np.arange(D)
        np.testing.assert_array_equal(got, np.concatenate([query, key, key + 2 * D]))


def test_vocab_section_divides_into_whole_groups():
    section = sharded_range.vocab_section(151_936)
    assert section.share(8) == 19_008 == 64 * 297
    assert [section.run(rank, 8) for rank in (0, 7)] == [(0, 19_008), (133_056, 151_936)]
    small = sharded_range.vocab_section(100)
    assert [small.run(rank, 4) for rank in range(4)] == [(0, 64), (64, 100), (100, 100), (100, 100)]
    head = next(p for p in parameters(config_of("qwen3"), False) if p.name == "lm_head")
    whole = np.ones(head.shape, np.float32)
    shares = [shard_array(head.shard(rank, 4), whole) for rank in range(4)]
    assert [len(share) for share in shares] == [128] * 4
    assert [int(share[:, 0].sum()) for share in shares] == [128, 128, 16, 0]


def config_of(family):
    return config_from_dict(tiny_config(family, nested=False, with_mtp=False, tied=False))


@pytest.mark.parametrize(
    ("family", "fields", "count", "error"),
    [
        ("llama", {}, 5, r"hidden_size \(48\) of a llama model must be a multiple .* ranks \(5\)"),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3}, 4, "num_attention_heads"),
        ("llama", {"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "num_key_value_heads"),
        ("llama", {"intermediate_size": 81}, 2, r"intermediate_size \(81\)"),
        ("qwen3_5", {}, 4, r"linear_num_key_heads \(2\)"),
        ("qwen3_moe", {"moe_intermediate_size": 25}, 2, r"moe_intermediate_size \(25\)"),
        ("qwen3_5_moe", {"shared_expert_intermediate_size": 41}, 2, "shared_expert_intermediate"),
    ],
)
def test_shard_config_rejects_indivisible_sizes(family, fields, count, error):
    stated = tiny_config(family, nested=False, with_mtp=False, tied=False) | fields
    with pytest.raises(ValueError, match=error):
        tp_sharding.shard_config(config_from_dict(stated), count)


def test_single_rank_shard_returns_same_object():
    config = config_of("qwen3_5")
    assert tp_sharding.shard_config(config, 1) is config
    for parameter in parameters(config, False):
        assert parameter.shard(0, 1) is parameter


def test_fp8_shard_load_equals_slice():
    """Covers dequantised weights, and W8A8 values with scales per output."""
    folder = GOLDEN / "qwen3_moe_fp8"
    config, checkpoint = config_from_folder(folder), open_checkpoint(folder)
    wanted = parameters(config, False)
    formats, seen = w8a8_of(checkpoint, wanted), 0
    for parameter in wanted:
        whole = checkpoint.load(parameter, np.float32)
        for rank in range(2):
            local = parameter.shard(rank, 2)
            got = checkpoint.load(local, np.float32)
            np.testing.assert_array_equal(got, shard_array(local, whole))
        if parameter.name in formats and parameter.sections:
            seen += 1
            format = formats[parameter.name]
            both = read_planes(checkpoint, parameter, format)
            for rank in range(2):
                local = parameter.shard(rank, 2)
                for name, mine in read_planes(checkpoint, local, format).items():
                    np.testing.assert_array_equal(mine, shard_array(local, both[name]))
    assert seen > 2


def planes_of(loaded):
    """All arrays of loaded weights, by parameter and plane."""
    planes = {
        name: stored.planes if isinstance(stored, jax_linear.Matrix) else {VALUES: stored}
        for name, stored in loaded.named.items()
    }
    return {(name, plane): x for name, own in planes.items() for plane, x in own.items()}


@pytest.mark.parametrize("quantises", [False, True], ids=["unquantised", "fp8"])
def test_dummy_shards_equal_slices_of_whole(quantises):
    """Covers both backends, unquantised and FP8, with a tied head."""
    stated = tiny_config("qwen3", nested=False, with_mtp=False, tied=True)
    config = config_from_dict(stated | WHOLE_BLOCKS)
    encoding = FP8Encoding(fp8.Granularity.BLOCK) if quantises else None
    dummy = DummyCheckpoint.of_model(config, encoding)
    formats = w8a8_of(dummy, parameters(config, False))
    assert bool(formats) == quantises
    where = (lambda num_bytes: None, formats)
    alone = planes_of(jax_weights.load(dummy, config, False, np.float32, JAX_CPU, *where))
    wanted = {p.name: p for p in divided_parameters(config, False, 4, None)}
    for rank in range(4):
        group = TPGroup(rank, 4, None)
        of_jax = planes_of(
            jax_weights.load(dummy, config, False, np.float32, JAX_CPU, *where, group)
        )
        of_torch = torch_weights.load(dummy, config, False, "float32", CPU, *where, group)
        for (name, plane), mine in of_jax.items():
            parameter = wanted[name].shard(rank, 4)
            stored = alone.get((name, plane), alone["embed", VALUES])
            whole = np.asarray(stored.astype(np.float32))
            np.testing.assert_array_equal(mine.astype(np.float32), shard_array(parameter, whole))
        for i, layer in enumerate(of_torch.layers):
            both = (layer.feed.gate_up, layer.feed.down)
            for name, matrix in zip(("gate_up", "down"), both, strict=True):
                want = np.asarray(of_jax[f"mlp.{name}", VALUES][i].astype(np.float32))
                np.testing.assert_array_equal(matrix.values.float().numpy(), want)
        head = np.asarray(of_jax["lm_head", VALUES])
        np.testing.assert_array_equal(of_torch.lm_head.values.numpy(), head)


@pytest.mark.parametrize(
    ("granularity", "piece"),
    [(None, 150_000), (fp8.Granularity.BLOCK, 40_000), (fp8.Granularity.CHANNEL, 1 << 24)],
)
@pytest.mark.parametrize("count", [2, 4])
def test_dummy_expert_shards_equal_slices_of_whole(granularity, piece, count, monkeypatch):
    """With 4 ranks each has half a block of gate and up.

    Torch generates several experts, a part of one expert, or all experts at a time.
    """
    monkeypatch.setattr(torch_weights.dummy_weights, "PIECE", piece)
    stated = tiny_config("qwen3_moe", nested=False, with_mtp=False, tied=False)
    stated |= {"hidden_size": 512, "head_dim": 32, "moe_intermediate_size": 256}
    config = config_from_dict(stated)
    encoding = granularity and FP8Encoding(granularity)
    dummy, stays = DummyCheckpoint.of_model(config, encoding), set()
    for parameter in parameters(config, False):
        whole = dummy.load(parameter, np.float32)
        for rank in (0, count - 1):
            local = parameter.shard(rank, count)
            want = shard_array(local, whole)
            formats = w8a16_of(dummy, [local])
            stays |= formats.keys()
            for name in ("torch", "jax"):
                got = _dummy_of(name, dummy, local, formats)
                if formats:  # packed FP8 is dequantised to bfloat16
                    want = want.astype(ml_dtypes.bfloat16).astype(np.float32)
                np.testing.assert_array_equal(got, want, f"{parameter.name} in {name}")
    of_experts = {"experts.down", "experts.gate_up"} if granularity else set()
    assert {x for x in stays if "experts" in x} == of_experts


def _dummy_of(name, dummy, local, formats):
    """The dequantised shard of a dummy weight by a backend."""
    backend, device = {"torch": (torch_weights, CPU), "jax": (jax_weights, JAX_CPU)}[name]
    if not formats:
        kind = torch.float32 if name == "torch" else np.float32
        made = backend.dummy_weights.parameter_array(local, dummy.init_spec(local), kind, device)
        if (encoding := dummy.encoding_of(local)) is not None:
            made = backend.registry.SCALED[type(encoding)](made, local, encoding)
        return np.asarray(made)
    (format,) = formats.values()
    planes = backend.registry.read(dummy, local, format, device, lambda count: None)
    ops = {"torch": torch_linear, "jax": jax_linear}[name]
    wide = ops.widened(ops.Matrix(format, planes))
    return wide.float().numpy() if name == "torch" else np.asarray(wide.astype(np.float32))
