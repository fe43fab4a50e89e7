"""Lower bounds of a decode step: bytes and multiplications, computed by hand from sizes."""

from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.common.step_bytes import expert_bytes, step_bytes, step_products
from shared.boundary.backend import BackendSpec
from shared.drafts.config import DraftConfig
from shared.drafts.drafter_spec import DrafterSpec
from shared.models.config import ModelConfig
from shared.models.families import config_from_folder
from shared.models.formats.fp8 import Granularity
from shared.models.formats.fp8_w8a16 import FP8W8A16
from shared.models.parameters import parameters
from shared.spec.draft_tree import TreeShape

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ROOT / "bench" / "shapes"


def blueprint_of(drafts: DrafterSpec, config: ModelConfig) -> BackendSpec:
    capacity = SimpleNamespace()
    return BackendSpec(
        config=config, drafts=drafts, capacity=capacity, dtype="bfloat16", on_gpu=True
    )


def test_step_bytes_of_qwen3_8b():
    config = config_from_folder(SHAPES / "qwen3-8b")
    plain, chain = TreeShape.plain(8), TreeShape.chain(3, 8)
    found = step_bytes(blueprint_of(DrafterSpec.none(), config), plain, 8, 500)
    kv = 8 * 500 * 36 * 2 * 8 * 128 * 2
    assert found - kv == pytest.approx(2 * 7.568e9, rel=1e-3)  # 8.19 less the embedding
    head = DraftConfig.from_folder(SHAPES / "qwen3-8b-eagle3", config)
    more = step_bytes(blueprint_of(DrafterSpec.of_head(head), config), chain, 8, 500) - found
    layer = 3 * 4096 * 12288 + 4096 * (2 * 6144 + 4096) + 4096 * 3 * 4096
    norms = 4 * 4 * 4096  # in float32
    assert more == 3 * (2 * (layer + 32000 * 4096) + norms + 8 * 500 * 2 * 8 * 128 * 2)


def test_step_bounds_of_latent_rows_per_position():
    config = config_from_folder(SHAPES / "glm-4.7-flash")
    made, plain = blueprint_of(DrafterSpec.none(), config), TreeShape.plain(8)
    more = [of(made, plain, 8, 500) - of(made, plain, 8, 0) for of in (step_bytes, step_products)]
    assert more == [8 * 500 * 47 * 2 * 576, 8 * 500 * 47 * 20 * (576 + 512)]


def test_step_bytes_read_latent_mtp_layer_each_pass():
    config = config_from_folder(SHAPES / "glm-4.7-flash")
    chain, drafters = TreeShape.chain(3, 1), (DrafterSpec.none(), DrafterSpec.of_mtp(config))
    without, found = (step_bytes(blueprint_of(x, config), chain, 1, 500) for x in drafters)
    attention = 1344 * 2048 + 5120 * 768 + 20 * 448 * 512 + 2048 * 5120
    experts = 64 * 2048 + (4 + 1) * 3 * 1536 * 2048
    weights = attention + experts + 2048 * 4096 + 154880 * 2048
    assert found - without == pytest.approx(3 * (2 * weights + 500 * 1152), rel=1e-4)


def test_step_bytes_of_nemotron_3_nano():
    config = config_from_folder(SHAPES / "nemotron-3-nano")
    plain, chain = TreeShape.plain(1), TreeShape.chain(3, 1)
    found = step_bytes(blueprint_of(DrafterSpec.none(), config), plain, 1, 1000)
    mamba = 2688 * (2 * 4096 + 2 * 8 * 128 + 64) + 2688 * 4096 + 5 * 6144
    attention = 2688 * (32 + 2 + 2) * 128 + 2688 * 32 * 128
    experts = 2688 * (128 + 6 * 2 * 1856 + 2 * 3712)
    weights = 23 * mamba + 6 * attention + 23 * experts + 131072 * 2688
    state, kv = 23 * 64 * 64 * 128 * 4, 1000 * 6 * 2 * 2 * 128 * 2
    assert found == pytest.approx(2 * weights + 2 * state + kv, rel=2e-4)  # without norms
    with_mtp = blueprint_of(DrafterSpec.of_mtp(config), config)
    more = step_bytes(with_mtp, chain, 1, 1000) - step_bytes(
        blueprint_of(DrafterSpec.none(), config), chain, 1, 1000
    )
    layer = 2688 * 2 * 2688 + attention + experts + 131072 * 2688
    assert more == pytest.approx(3 * (2 * layer + 1000 * 2 * 2 * 128 * 2), rel=2e-4)


def test_step_products_of_qwen3_8b():
    config = config_from_folder(SHAPES / "qwen3-8b")
    plain, chain = TreeShape.plain(8), TreeShape.chain(3, 8)
    found = step_products(blueprint_of(DrafterSpec.none(), config), plain, 8, 500)
    attended = 2 * 8 * 500 * 36 * 32 * 128
    assert found - attended == pytest.approx(8 * 7.568e9, rel=1e-3)
    head = DraftConfig.from_folder(SHAPES / "qwen3-8b-eagle3", config)
    more = step_products(blueprint_of(DrafterSpec.of_head(head), config), chain, 8, 500) - 4 * found
    layer = 3 * 4096 * 12288 + 4096 * (2 * 6144 + 4096) + 4096 * 3 * 4096
    assert more == 3 * 8 * (layer + 32000 * 4096 + 2 * 500 * 32 * 128)
    block = DraftConfig.from_folder(SHAPES / "qwen3-8b-dflash", config)
    of_block, rows = blueprint_of(DrafterSpec.of_head(block), config), TreeShape.chain(15, 1)
    more = step_products(of_block, rows, 1, 0) - 16 * step_products(of_block, plain, 1, 0)
    assert more == pytest.approx(16 * (1.05e9 + config.vocab * config.hidden), rel=0.01)


def test_step_products_count_chosen_experts_and_tied_head():
    config = config_from_folder(ROOT / "tests" / "golden" / "glm4_moe")  # 8 of width 8, 3 chosen
    plain = TreeShape.plain(1)
    dense = [p for p in parameters(config, False) if p.shape[p.stacked :][1:]]
    weights = sum(prod(p.shape) for p in dense if p.name != "embed")
    weights -= 2 * 5 * (16 * 32 + 32 * 8)  # the experts that a row does not choose
    assert step_products(blueprint_of(DrafterSpec.none(), config), plain, 7, 0) == 7 * weights
    tied = config_from_folder(SHAPES / "qwen3-0.6b")
    found = step_products(blueprint_of(DrafterSpec.none(), tied), plain, 1, 0)
    assert found == pytest.approx(0.596e9, rel=0.01)


def test_step_bytes_count_expected_distinct_experts():
    config = config_from_folder(ROOT / "tests" / "golden" / "glm4_moe")  # 8 of width 8, 3 chosen
    plain = TreeShape.plain(1)
    one, all_of_them = (
        step_bytes(blueprint_of(DrafterSpec.none(), config), plain, batch, 0) for batch in (1, 1000)
    )
    expert = 2 * 3 * 8 * 32 * 2  # in both sparse layers
    assert all_of_them - one == 5 * expert
    two = step_bytes(blueprint_of(DrafterSpec.none(), config), plain, 2, 0)
    assert two - one == pytest.approx((8 * (1 - (5 / 8) ** 2) - 3) * expert, rel=0.01)


@pytest.mark.parametrize("name", ["qwen3.5-35b-a3b-fp8", "nemotron-3-nano"])
def test_step_bytes_of_one_row_equal_counted_experts(name):
    config = config_from_folder(SHAPES / name)
    made = blueprint_of(DrafterSpec.none(), config)
    layers = next(p for p in parameters(config, False) if p.name == "experts.down").shape[0]
    chosen = layers * config.experts.top_k
    one, two = (
        step_bytes(made, TreeShape.plain(1), 1, 100, routed=x) for x in (chosen, 2 * chosen)
    )
    assert one == pytest.approx(step_bytes(made, TreeShape.plain(1), 1, 100), rel=1e-6)
    assert two - one == pytest.approx(chosen * expert_bytes(made), rel=1e-6)


def test_step_bytes_of_w8a16_count_codes_and_scales():
    config = config_from_folder(SHAPES / "qwen3-30b-a3b-fp8")
    wide, plain = blueprint_of(DrafterSpec.none(), config), TreeShape.plain(1)
    format = FP8W8A16(Granularity.BLOCK)
    formats = dict.fromkeys(("experts.gate_up", "experts.down"), format)
    found = [step_bytes(replace(wide, formats=each), plain, 1, 0) for each in ({}, formats)]
    weights = 48 * 8 * 3 * 768 * 2048  # of the experts that a row chooses
    assert found[0] - found[1] == pytest.approx(weights * (1 - 2 / 128**2), rel=1e-6)


def test_step_bytes_of_block_head_read_once():
    config = config_from_folder(SHAPES / "qwen3-8b")
    head = DraftConfig.from_folder(SHAPES / "qwen3-8b-dflash", config)
    of_head = blueprint_of(DrafterSpec.of_head(head), config)
    plain, chain = TreeShape.plain(1), TreeShape.chain(15, 1)
    more = step_bytes(of_head, chain, 1, 0) - step_bytes(of_head, plain, 1, 0)
    assert more == pytest.approx(2 * (1.05e9 + config.vocab * config.hidden), rel=0.01)


def test_step_bytes_of_dspark_scale_with_drafts():
    config = config_from_folder(SHAPES / "qwen3-8b")
    heads = (
        DraftConfig.from_folder(SHAPES / f"qwen3-8b-{x}", config) for x in ("dflash", "dspark")
    )
    block, marked = (
        step_bytes(blueprint_of(DrafterSpec.of_head(head), config), TreeShape.chain(7, 1), 1, 0)
        for head in heads
    )
    assert marked - block == pytest.approx(2 * 7 * config.vocab * 256, rel=0.001)


def test_step_bytes_of_replay_move_states_once_more():
    config = config_from_folder(SHAPES / "qwen3.5-0.8b")
    of_mtp = blueprint_of(DrafterSpec.of_mtp(config), config)
    of_host = replace(of_mtp, drafts=DrafterSpec.none())
    plain, chain = TreeShape.plain(4), TreeShape.chain(3, 4)
    state = 4 * 18 * 16 * 128 * 128 * 4
    assert step_bytes(of_host, chain, 4, 0) - step_bytes(of_host, plain, 4, 0) == state
    mtp = step_bytes(of_mtp, chain, 4, 0) - step_bytes(of_host, chain, 4, 0)
    assert mtp > 3 * 2 * config.vocab * config.hidden
