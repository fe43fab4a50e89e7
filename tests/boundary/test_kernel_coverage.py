"""Kernel coverage on a GPU: an operation has kernels, is an error, or is a counted fallback."""

import ast
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import pytest

from jax_impl import platform as jax_platform
from shared.boundary.kernel_coverage import (
    OF_TOWERS,
    OPERATIONS,
    FallbackOp,
    fallback_gauges,
    fallback_ops,
)
from shared.drafts.config import DraftConfig
from shared.drafts.drafter_spec import DrafterSpec
from shared.models.config import ModelConfig
from shared.models.layers import LayerConfig
from shared.models.mixers import MixerConfig
from shared.options.options import Options
from shared.process import loop
from shared.process.device import Device
from shared.process.image_startup import VisionEncoder
from shared.process.launch import launch
from shared.process.memory_plan import plan
from shared.process.start import Platform
from shared.server.engine_link.server_metrics import ServerMetrics
from shared.spec.acceptance import RULES
from tests.support import serve_reference
from tests.support.golden_images import image_config, vision
from tests.support.tiny_heads import tiny_pair_head
from tests.support.tiny_models import tiny_model, write_tiny
from torch_impl import platform as torch_platform

ROOT = Path(__file__).resolve().parents[2]
GPU = Device("gpu", "a GPU", 1 << 30)
PLATFORMS = {"jax": jax_platform.PLATFORM, "torch": torch_platform.PLATFORM}
each_platform = pytest.mark.parametrize("platform", PLATFORMS.values(), ids=PLATFORMS.keys())


CONFIG = tiny_model("qwen3_5", 0, with_mtp=True)[0]


def config_with(model: ModelConfig = CONFIG, /, **sizes: int) -> ModelConfig:
    """The model with changed sizes of its token mixers."""

    def resized(mixer: MixerConfig) -> MixerConfig:
        names = {field.name for field in fields(mixer)} & sizes.keys()
        return replace(mixer, **{name: sizes[name] for name in names})

    def resized_layer(layer: LayerConfig) -> LayerConfig:
        parallel = None if layer.parallel is None else resized(layer.parallel)
        return replace(layer, mixer=resized(layer.mixer), parallel=parallel)

    return replace(model, layers=tuple(map(resized_layer, model.layers)))


def fallbacks_of(
    platform: Platform,
    model: ModelConfig,
    device: Device = GPU,
    tower: VisionEncoder | None = None,
    head: DraftConfig | None = None,
    **flags: object,
) -> tuple[FallbackOp, ...]:
    """The fallback operations in the programs of a server, or an error."""
    values = {"model_path": "model", "max_running_requests": 2, "max_total_tokens": 4096} | flags
    options = Options.from_values(values)
    drafts = DrafterSpec.of_mtp(model) if options.speculative.with_mtp else DrafterSpec.none()
    drafts = DrafterSpec.of_head(head) if head else drafts
    memory = plan(options, model, drafts, device, platform.costs, vision=tower)
    assert platform.kernels is not None
    return fallback_ops(memory.blueprint, platform.kernels)


NEXTN = {"speculative_algorithm": "NEXTN"}
HEADS = {*range(16, 257, 16), 512}
DELTA = {16, 32, 64, 128}


@each_platform
def test_attention_head_sizes_have_kernels_or_raise(platform):
    for size in (*range(2, 322, 2), 512):
        if size in HEADS:
            assert fallbacks_of(platform, config_with(head_size=size), **NEXTN) == ()
            continue
        with pytest.raises(ValueError, match=f"attention heads of size .*, got {size}; set CUDA"):
            fallbacks_of(platform, config_with(head_size=size), **NEXTN)


@each_platform
@pytest.mark.parametrize(("name", "most"), [("latent_rank", 512), ("rope_size", 64)])
def test_latent_sizes_have_kernels_or_raise(name: str, most: int, platform):
    model = tiny_model("deepseek_v3", 0)[0]
    model = replace(model, layers=model.layers[:1])  # experts of this width have no kernels
    assert fallbacks_of(platform, config_with(model, **{name: most})) == ()
    with pytest.raises(ValueError, match=f"at most {most}.*; set CUDA"):
        fallbacks_of(platform, config_with(model, **{name: most + 2}))


@each_platform
def test_gdn_head_sizes_have_kernels_or_raise(platform):
    sizes = [8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    for key, value in product(sizes, sizes):
        config = config_with(key_size=key, value_size=value)
        if {key, value} <= DELTA:
            assert fallbacks_of(platform, config) == ()
            continue
        name, size = ("values", value) if key in DELTA else ("keys", key)
        with pytest.raises(ValueError, match=f"GDN {name} of size .*, got {size}; set CUDA"):
            fallbacks_of(platform, config)


@each_platform
@pytest.mark.parametrize("width", range(1, 17))
def test_tree_widths_have_kernels(width: int, platform):
    nodes = {"speculative_num_draft_tokens": min(64, 1 + width + width**2)} if width > 1 else {}
    shape = {"speculative_num_steps": 2, "speculative_eagle_topk": width, **nodes}
    assert fallbacks_of(platform, CONFIG, **NEXTN, **shape) == ()


@each_platform
@pytest.mark.parametrize("rule", RULES)
def test_accept_rules_have_kernels(rule: str, platform):
    flags = {"accept_rule": "exact" if rule == "exact" else "rejection"}
    assert (
        fallbacks_of(
            platform, CONFIG, **NEXTN, **flags, speculative_use_block_verification=rule == "block"
        )
        == ()
    )


@each_platform
def test_float32_fallbacks_counted_on_gpu_only(platform):
    found = fallbacks_of(platform, CONFIG, dtype="float32")
    names = ["recurrent_layer.prefill", "layers.rms_norm", "linear", "lm_head"]
    assert [each.name for each in found] == names
    assert {each.reason for each in found} == {"bfloat16, got float32"}
    assert fallbacks_of(platform, CONFIG, Device("cpu", "CPU", 1 << 30)) == ()


@each_platform
def test_float32_head_convolutions_counted_on_gpu(platform):
    flags = {"speculative_algorithm": "DFLASH2", "speculative_draft_model_path": "head"}
    flags |= {"head": tiny_pair_head(CONFIG, 0, head_dim=16).config}
    found = {each.name: each for each in fallbacks_of(platform, CONFIG, dtype="float32", **flags)}
    assert found["convolution"].reason == "bfloat16, got float32"
    assert found["convolution"].programs < found["linear"].programs
    assert fallbacks_of(platform, CONFIG, **flags) == ()


@each_platform
def test_float32_vision_encoder_counted_on_gpu(platform):
    tower = VisionEncoder(vision(), image_config())
    found = {
        each.name: each for each in fallbacks_of(platform, CONFIG, tower=tower, dtype="float32")
    }
    assert {*OF_TOWERS} <= found.keys()
    assert {found[name].reason for name in OF_TOWERS} == {"bfloat16, got float32"}
    assert fallbacks_of(platform, CONFIG, tower=tower) == ()


@each_platform
def test_mamba2_sizes_have_kernels_or_raise(platform):
    model = tiny_model("bamba", 0)[0]
    sizes = [8, 16, 32, 64, 128, 192, 256]
    for state, head in product(sizes, sizes):
        if head not in HEADS:  # attention has heads of this size, too
            continue
        config = config_with(model, state_size=state, head_size=head, norm_size=head)
        if state in {*DELTA, 256} and head in DELTA:
            assert fallbacks_of(platform, config) == ()
            continue
        is_head = state in {*DELTA, 256}
        name, size = ("heads", head) if is_head else ("states", state)
        with pytest.raises(ValueError, match=f"Mamba2 {name} of size .*, got {size}; set CUDA"):
            fallbacks_of(platform, config)


@each_platform
@pytest.mark.parametrize(("norm_size", "ranks"), [(16, 4), (128, 2), (128, 4)])
def test_mamba2_norm_cut_within_chunks_counted(norm_size: int, ranks: int, platform):
    """Two ranks have a chunk of 64 columns each of a group of 128, and four ranks half of one."""
    sizes = {"head_size": 16, "state_size": 16, "norm_size": norm_size}
    config = config_with(tiny_model("bamba", 0)[0], **sizes)
    assert config.recurrent is not None
    assert config.recurrent.values == 128
    found = {each.name: each.reason for each in fallbacks_of(platform, config, tp_size=ranks)}
    reason = "multiples of 64 columns of an output norm that ranks share, got 32"
    has_fault = norm_size == 128 and ranks == 4
    assert found == ({"mamba2.gated_output": reason} if has_fault else {})


@each_platform
@pytest.mark.parametrize("family", ["falcon_h1", "granitemoehybrid"])
def test_multipliers_of_hybrids_have_kernels(family: str, platform):
    sizes = {"head_size": 16, "state_size": 16, "norm_size": 16}
    model = config_with(tiny_model(family, 0)[0], **sizes)
    if model.experts is not None:  # of a width that has kernels
        wide = replace(model.experts, intermediate=32, shared_intermediate=48)
        kinds = (replace(x, mlp=wide) if x.mlp == model.experts else x for x in model.layers)
        model = replace(model, layers=tuple(kinds))
    assert fallbacks_of(platform, model) == ()


EXPERTS = tiny_model("qwen3_5_moe", 0)[0]


def with_experts(**changed):
    """The config with changed experts; shared experts have the width of the others."""
    experts = replace(EXPERTS.experts, **{"intermediate": 32, "shared_intermediate": 32} | changed)
    layers = [replace(each, mlp=experts) for each in EXPERTS.layers]
    return replace(EXPERTS, layers=tuple(layers))


@each_platform
def test_float32_experts_counted_on_gpu(platform):
    found = {
        each.name: each.reason for each in fallbacks_of(platform, with_experts(), dtype="float32")
    }
    assert found["experts"] == "bfloat16, got float32"
    assert fallbacks_of(platform, with_experts()) == ()


@each_platform
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"intermediate": 24, "shared_intermediate": 24},
            "expert widths that are multiples of 16, got 24",
        ),
        (
            {"latent": 24, "shared_intermediate": 0, "shared_is_gated": False},
            "expert widths that are multiples of 16, got 24",
        ),
        (
            {"shared_intermediate": 24},
            "gated shared experts of the same width as the others .32., got 24",
        ),
    ],
)
def test_unsupported_expert_widths_raise(platform, changed, message):
    model = with_experts(**changed)
    with pytest.raises(ValueError, match=message):
        fallbacks_of(platform, model)
    assert "experts" in {each.name for each in fallbacks_of(platform, model, dtype="float32")}


def started(platform: Platform, *flags: str) -> int:
    return launch(["--port", "0", *flags], lambda: replace(platform, find_device=lambda: GPU))


@each_platform
def test_unsupported_kernel_sizes_rejected_before_loading(platform, tmp_path, capfd, monkeypatch):
    write_tiny(tmp_path, "qwen3_5", 0, with_mtp=False)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"head_dim": 16', '"head_dim": 24'))
    assert started(platform, "--model-path", str(tmp_path), "--load-format", "dummy") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "require attention heads of size" in line
    assert "got 24" in line


def test_fallback_ops_are_logged_and_counted(tmp_path, capfd, monkeypatch):
    write_tiny(tmp_path, "qwen3_5", 0, with_mtp=False)
    served = []
    monkeypatch.setattr(loop, "run", lambda engine, *rest: served.append(engine) or 0)
    platform = replace(serve_reference.PLATFORM, kernels=torch_platform.PLATFORM.kernels)
    flags = ("--max-total-tokens", "4096", "--max-running-requests", "2")
    assert started(platform, "--model-path", str(tmp_path), "--dtype", "float32", *flags) == 0
    err = capfd.readouterr().err
    assert "linear falls back to the reference implementation" in err
    assert "its kernel requires bfloat16, got float32" in err
    page = ServerMetrics("m").render(served[0].metrics.snapshot()).decode()
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if line[0] != "#")
    counts = {
        name: float(lines[f'tandem:engine_fallback_ops{{model_name="m",op="{name}"}}'])
        for name in (operation.name for operation in OPERATIONS)
    }
    assert counts["attention_layer"] == counts["recurrent_layer"] == 0
    assert 0 < counts["recurrent_layer.prefill"] < counts["linear"] == counts["layers.rms_norm"]


def test_fallback_gauges_without_fallbacks_equal_zero():
    assert {name: read() for name, read in fallback_gauges(()).items()} == {
        f'engine_fallback_ops{{op="{operation.name}"}}': 0.0 for operation in OPERATIONS
    }


@pytest.mark.parametrize("backend", ["jax_impl", "torch_impl"])
def test_fallback_ops_in_code_match_operations_table(backend: str):
    """Searches the source for operations with a condition for their kernels."""
    found = set()
    for path in (ROOT / backend / "ops").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_call = isinstance(node, ast.Call) and len(node.args) + len(node.keywords) > 2
            if is_call and ast.unparse(node.func) == "kernel_or_reference":
                found.add(f"{path.stem}.{ast.unparse(node.args[0]).removeprefix('kernel_')}")
            elif isinstance(node, ast.FunctionDef) and node.name.startswith("kernel_"):
                calls = (x for x in ast.walk(node) if isinstance(x, ast.Call))
                if any(ast.unparse(x.func).startswith("plain_") for x in calls):
                    found.add(f"{path.stem}.{node.name.removeprefix('kernel_')}")
    named = {operation.name for operation in OPERATIONS if not operation.is_refused}
    assert {name if name in named else name.split(".")[0] for name in found} == named
