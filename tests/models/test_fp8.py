"""FP8 weights: value times scale, rounded once, and errors that name the tensor."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from shared.models.checkpoint import CheckpointError, load_all, open_checkpoint
from shared.models.families import config_from_dict, config_from_folder
from shared.models.formats import fp8
from shared.models.parameters import parameters
from tests.support.files import read_stored, write_stored

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDER = GOLDEN / "qwen3_moe_fp8"
LAYER = "model.layers.0."
QUERY = "layers.0.self_attn.q_proj.weight"
SCALE = "_scale_inv"


def test_fp8_values_match_ml_dtypes():
    want = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(fp8.VALUES, want)
    found = [code for code in range(256) if fp8.has_nan(np.array([0, code], np.uint8))]
    assert found == np.flatnonzero(np.isnan(want)).tolist() == [0x7F, 0xFF]


def test_fp8_quantize_rounds_to_nearest_even():
    sizes = np.exp(np.random.default_rng(0).uniform(-9, 6, 5000))
    between = (fp8.VALUES[:126] + fp8.VALUES[1:127]) / 2
    x = np.concatenate([sizes, -sizes, between, -between, [np.nan, 0, -0.0]]).astype(np.float32)
    x = x[~(np.abs(x) > fp8.LARGEST)]
    want = x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(fp8.quantize(x), want)
    np.testing.assert_array_equal(fp8.quantize(np.array([1e9, -449], np.float32)), [0x7E, 0xFE])


def test_fp8_dequantize_matches_golden_reference():
    want = np.load(GOLDEN / "fp8_block" / "vectors.npz")
    for one in "ab":
        codes, scales = want[f"{one}_w_u8"], want[f"{one}_scale_inv"]
        np.testing.assert_array_equal(fp8.dequantize(codes, scales), want[f"{one}_dequant"])
        stacked = fp8.dequantize(np.stack([codes, codes[::-1]]), np.stack([scales, scales]))
        np.testing.assert_array_equal(stacked[0], want[f"{one}_dequant"])
        np.testing.assert_array_equal(stacked[1], fp8.dequantize(codes[::-1], scales))


def rewrite(folder: Path, change) -> None:
    """Writes the golden checkpoint with changed tensors into a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((FOLDER / "config.json").read_text())
    tensors = read_stored(FOLDER / "model.safetensors")
    write_stored(folder / "model.safetensors", change(tensors))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_fp8_weight_load_rounds_product_once(dtype):
    config, checkpoint = config_from_folder(FOLDER), open_checkpoint(FOLDER)
    tensors = read_stored(FOLDER / "model.safetensors")
    (down,) = (p for p in parameters(config, False) if p.name == "experts.down")
    got = checkpoint.load(down, dtype)
    for expert in range(3):
        name = f"{LAYER}mlp.experts.{expert}.down_proj.weight"
        _, codes = tensors[name]
        _, scales = tensors[f"{name}{SCALE}"]
        exact = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        exact *= np.repeat(scales.astype(np.float64), 128, axis=1)[:, :160]
        np.testing.assert_array_equal(got[0, expert], exact.astype(dtype))
    # A product has 12 bits, so that rounding changes it.
    assert (checkpoint.load(down, np.float32) != got.astype(np.float32)).any() == (
        dtype is not np.float32
    )


def with_stacked_down(tensors):
    """Stacks the down projections of the experts, like transformers does when it quantises."""
    kept = {name: each for name, each in tensors.items() if "down_proj" not in name}
    for end in ("", SCALE):
        names = [f"{LAYER}mlp.experts.{i}.down_proj.weight{end}" for i in range(3)]
        whole = np.stack([tensors[name][1] for name in names])
        kept[f"{LAYER}mlp.experts.down_proj{end}"] = (tensors[names[0]][0], whole)
    return kept


def test_stacked_fp8_experts_load_with_scales(tmp_path):
    rewrite(tmp_path, with_stacked_down)
    config = config_from_folder(FOLDER)
    open_checkpoint(tmp_path).check(config, False)
    want, got = (load_all(folder, config, False) for folder in (FOLDER, tmp_path))
    assert want.keys() == got.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def test_fp8_progress_counts_values_and_scales():
    config, checkpoint, seen = config_from_folder(FOLDER), open_checkpoint(FOLDER), []
    wanted = parameters(config, False)
    for parameter in wanted:
        checkpoint.load(parameter, np.float32, seen.append)
    stored = read_stored(FOLDER / "model.safetensors").values()
    assert sum(seen) == checkpoint.num_bytes(wanted) == sum(x.nbytes for _, x in stored)


def test_tensor_without_scales_loads_unscaled(tmp_path):
    """The lists of ignored modules in the config have no effect."""

    def change(tensors):
        name = f"model.{QUERY}"
        kept = {n: t for n, t in tensors.items() if not n.startswith(name)}
        return kept | {name: ("F32", np.full((128, 128), 0.3, np.float32))}

    rewrite(tmp_path, change)
    got = load_all(tmp_path, config_from_folder(FOLDER), False)["attention.inputs"]
    assert (got[0, :128] == np.float32(0.3)).all()
    assert (got[0, 128:] != np.float32(0.3)).all()


def changed(name, kind, change):
    def apply(tensors):
        (found,) = (n for n in tensors if n.endswith(name))
        old_kind, old = tensors[found]
        return tensors | {found: (kind or old_kind, change(old))}

    return apply


def with_code(code):
    def spoil(codes):
        codes = codes.copy()
        codes[100, 3] = code
        return codes

    return changed(QUERY, None, spoil)


FAULTS = {
    f"{QUERY} contains NaN": with_code(0x7F),
    f"tensor {QUERY} contains": with_code(0xFF),
    rf"{QUERY}_scale_inv has shape \[2, 1\], expected \[1, 1\]": changed(
        f"{QUERY}_scale_inv", None, lambda s: np.repeat(s, 2, axis=0)
    ),
    f"{QUERY}_scale_inv is stored as F8_E8M0": changed(
        f"{QUERY}_scale_inv", "F8_E8M0", lambda s: np.zeros(s.shape, np.uint8)
    ),
    f"{QUERY} is stored as BF16; use a checkpoint in one of F8_E4M3": changed(
        QUERY, "BF16", lambda c: np.zeros(c.shape, ml_dtypes.bfloat16)
    ),
    f"no tensor {QUERY}_scale_inv or {QUERY}_scale, the scales of {QUERY}": lambda t: {
        n: x for n, x in t.items() if n != f"model.{QUERY}_scale_inv"
    },
    r"layers\.0\.mlp\.gate\.bias_scale_inv is not part of": lambda t: {
        **t,
        f"{LAYER}mlp.gate.bias_scale_inv": ("F32", np.zeros((1, 1), np.float32)),
    },
    r"norm\.weight_scale_inv is not supported: only matrices": lambda t: {
        **t,
        "model.norm.weight": ("F8_E4M3", np.zeros(128, np.uint8)),
        "model.norm.weight_scale_inv": ("F32", np.zeros(1, np.float32)),
    },
}


@pytest.mark.parametrize("message", FAULTS)
def test_faulty_fp8_tensor_named_in_error(message, tmp_path):
    rewrite(tmp_path, FAULTS[message])
    with pytest.raises(CheckpointError, match=message):
        load_all(tmp_path, config_from_folder(FOLDER), False)


QUANTISED = json.loads((FOLDER / "config.json").read_text())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"modules_to_not_convert": ["re:.*mlp.gate$"]},
        {"ignored_layers": ["lm_head"]},
        {"dequantize": False, "scale_fmt": None},
        {"activation_scheme": "static"},
    ],
    ids=str,
)
def test_block_fp8_quantization_config_is_accepted(fields):
    plain = {field: value for field, value in QUANTISED.items() if field != "quantization_config"}
    stated = QUANTISED["quantization_config"] | fields
    assert config_from_dict(QUANTISED | {"quantization_config": stated}) == config_from_dict(plain)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quant_method", "fbgemm_fp8"),
        ("fmt", "e5m2"),
        ("weight_block_size", [64, 64]),
        ("scale_fmt", "e5m3"),
        ("kv_cache_scheme", {"num_bits": 8}),
    ],
)
@pytest.mark.parametrize("place", ["outer", "inner"])
def test_unsupported_quantization_config_raises(field, value, place):
    stated = QUANTISED["quantization_config"] | {field: value}
    config = QUANTISED | {"quantization_config": stated}
    if place == "inner":
        outer = {"architectures": QUANTISED["architectures"], "model_type": "qwen3_moe"}
        config = outer | {"text_config": config}
    with pytest.raises(ValueError, match=rf"quantization_config with {field}"):
        config_from_dict(config)


@pytest.mark.parametrize("stated", [{"quant_method": None}, {"fmt": "e4m3"}], ids=str)
def test_quantization_config_without_method_raises(stated):
    with pytest.raises(ValueError, match="quantization_config without quant_method"):
        config_from_dict(QUANTISED | {"quantization_config": stated})
