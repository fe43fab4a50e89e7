"""INT4 copies of checkpoints: nearest codes, and loading."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from models import quantize_int4
from shared.models.checkpoint import load_all, open_checkpoint
from shared.models.families import config_from_dict, config_from_folder
from shared.models.formats.int4_encoding import dequantize
from shared.models.formats.int4_w4a16 import Int4W4A16
from shared.models.formats.registry import choose_formats
from shared.models.parameters import parameters
from shared.models.saving import save_checkpoint
from tests.support.tiny_models import tiny_config, tiny_weights
from tests.support.weight_formats import ON_GPU


def test_quantised_picks_nearest_codes() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((6, 256)) * np.exp(rng.standard_normal((6, 1)))
    weight = weight.astype(ml_dtypes.bfloat16).astype(np.float32)
    weight[2, :128] = 0
    codes, scales = quantize_int4.quantised(weight)
    assert scales.shape == (6, 2)
    got = dequantize(codes, scales, None)
    steps = np.repeat(scales.astype(np.float32), 128, axis=-1)
    # A scale rounded down clips the largest weight by less than half a step.
    assert (np.abs(got - weight) <= steps * 0.5001).all()
    assert not got[2, :128].any()


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_int4_copy_loads_within_rounding(family: str, tmp_path: Path) -> None:
    fields = tiny_config(family, nested=False, with_mtp=True, tied=False)
    fields |= {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 128}
    config = config_from_dict(fields)
    rounded = {k: x.astype(ml_dtypes.bfloat16) for k, x in tiny_weights(config, 1).items()}
    save_checkpoint(tmp_path / "plain", fields, rounded, num_shards=2)
    quantize_int4.write(tmp_path / "plain", tmp_path / "copy")
    assert config_from_folder(tmp_path / "copy") == config
    opened = open_checkpoint(tmp_path / "copy")
    opened.check(config, True)
    want, got = (load_all(tmp_path / x, config, True) for x in ("plain", "copy"))
    formats = choose_formats(parameters(config, True), opened.stored, ON_GPU)
    assert formats["attention.inputs"] == Int4W4A16(128, has_words=False)
    for parameter in parameters(config, True):
        name = parameter.name
        is_matrix = name.endswith((".inputs", ".out", "gate_up", "down"))
        if name.startswith("mtp.") or not is_matrix or parameter.shape[-1] % 128:
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)
            continue
        largest = np.abs(want[name].astype(np.float32)).max()
        np.testing.assert_allclose(
            got[name].astype(np.float32), want[name].astype(np.float32), atol=largest / 13
        )
        assert (got[name] != want[name]).any()


def test_write_rejects_own_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="must be an unquantised checkpoint and a different"):
        quantize_int4.write(tmp_path, tmp_path)
