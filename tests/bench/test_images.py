"""Benchmarks of images: of the vision encoder, and of a VLM."""

import json
from dataclasses import replace

import pytest

from bench.steps import vision_encoder, vlm_steps
from shared.boundary.images import EncoderCacheSpec
from shared.boundary.program import Program
from shared.process.image_startup import MOST_PRODUCTS, encode_programs
from tests.support.golden_images import MODEL

TINY = replace(
    vision_encoder.QWEN3_5, depth=2, hidden=32, num_heads=2, intermediate=48, table_side=4, out=24
)


def test_products_of_counts_patches_and_attention_pairs():
    patches = 64
    of_patch = 1536 * 32 + 2 * (4 * 32 * 32 + 2 * 32 * 48)
    of_merger = (128 * 128 + 128 * 24) // 4
    attended = 2 * 2 * patches * 32
    found = vision_encoder.products_of(patches, TINY)
    assert found == patches * (of_patch + of_merger + attended)
    assert vision_encoder.image_of(16, TINY).num_patches == 64


def test_bench_encodes_same_images_on_both_backends(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(vision_encoder, "QWEN3_5", TINY)
    out = tmp_path / "found.json"
    words = ["--depth", "2", "--tokens", "4", "16", "--rounds", "2", "--out", str(out)]
    vision_encoder.run(vision_encoder.options(words), "the command")
    lines = json.loads(out.read_text())["lines"]
    assert [(x["backend"], x["tokens"]) for x in lines] == [
        *(("torch", 4), ("torch", 16)),
        *(("jax", 4), ("jax", 16)),
    ]
    for line in lines:
        assert 0 < line["ms_low"] <= line["ms"] <= line["ms_high"]
        assert line["products_ms"] > 0
        assert line["card"] == {}
    assert [x["equal_share"] for x in lines[:2]] == [None, None]
    assert all(0 < x["equal_share"] <= 1 for x in lines[2:])
    assert "equal" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_bench_encoders_match_spec(name):
    image = vision_encoder.image_of(4, TINY)
    dummy = vision_encoder.DummyCheckpoint(vision_encoder.vision_encoder_parameters(TINY), {}, None)
    weights = {
        p.name: dummy.load(p, "float32") for p in vision_encoder.vision_encoder_parameters(TINY)
    }
    want = vision_encoder.vision_encoder.encoded(
        TINY, weights, vision_encoder.vision_encoder.patches(TINY, image)
    )
    got = vision_encoder.ENCODERS[name](TINY)(image)()
    assert abs(got - want).max() < 0.1 * abs(want).max()  # bfloat16 has 8 bits


def test_vlm_steps_requests_new_and_cached_images(monkeypatch, tmp_path):
    monkeypatch.setattr(vlm_steps, "QWEN3_5", TINY)
    out, model = tmp_path / "found.json", str(MODEL)
    words = ["--model", model, "--backend", "torch", "--tokens", "64", "--rounds", "1"]
    kept = []
    ask = vlm_steps.asked

    def asked(served, request):
        kept.append((bool(request.images), served.engine.images.num_encoded))
        return ask(served, request)

    monkeypatch.setattr(vlm_steps, "asked", asked)
    vlm_steps.run(vlm_steps.options([*words, "--output", "4", "--out", str(out)]), "the command")
    (line,) = json.loads(out.read_text())["lines"]
    assert kept == [x for n in range(2) for x in ((True, n), (True, n + 1), (False, n + 1))]
    assert line["gap_longest_ms"] >= line["gap_median_ms"] > 0
    assert all(line[f"{what}_{x}_ms"] > 0 for what in ("first", "step") for x in ("new", "kept"))


def test_encode_programs_split_large_images_within_limit():
    """Qwen3.5's largest image, 16,384 patches, takes nine steps; a quarter of it takes one."""
    pool = EncoderCacheSpec(
        vision_encoder.QWEN3_5, replace(vision_encoder.IMAGES, max_pixels=4096 * 32**2), 9000
    )
    of_size: dict[int, list[Program]] = {}
    for program in encode_programs(pool, are_few=False):
        of_size.setdefault(program.tokens, []).append(program)
    assert [(size, len(each)) for size, each in of_size.items()][-3:] == [
        (4096, 1),
        (8192, 3),
        (16384, 9),
    ]
    for size, each in of_size.items():
        longest = max(
            len(program.blocks) for program in each
        ) * vision_encoder.QWEN3_5.block_products(size)
        assert longest <= MOST_PRODUCTS
        assert [block for program in each for block in program.blocks] == [
            *range(vision_encoder.QWEN3_5.depth)
        ]
