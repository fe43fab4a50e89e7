"""Words of transferred entries: which pages and snapshots they are, and their TP shards."""

from __future__ import annotations

import numpy as np
import pytest

from shared.models.cache_spec import ColumnSection
from shared.models.mixers import GatedDeltaConfig
from shared.spec import kv_transfer
from tests.support.tiny_models import tiny_model

RNG = np.random.default_rng(3)


def random(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def test_pages_survive_export_and_import():
    source, sink = random(3, 2, 9, 4, 2, 8), random(3, 2, 7, 4, 2, 8)
    taken, into = np.array([5, 1, 8], np.int32), np.array([2, 6, 3], np.int32)
    words = kv_transfer.page_words(source, taken)
    got = kv_transfer.with_pages(sink, into, words)
    np.testing.assert_array_equal(got[:, :, into], source[:, :, taken])
    others = np.setdiff1d(np.arange(7), into)
    np.testing.assert_array_equal(got[:, :, others], sink[:, :, others])


def test_words_of_page_are_its_arrays():
    kv = random(3, 2, 9, 4, 2, 8)
    words = kv_transfer.page_words(kv, np.array([5, 1], np.int32))
    assert words.dtype == np.int32
    np.testing.assert_array_equal(words.view(np.float32)[1], kv[:, :, 1].reshape(-1))


def test_snapshot_survives_export_and_import():
    source, sink = random(4, 5, 2, 3), random(4, 6, 2, 3)
    got = kv_transfer.with_layers(sink, 2, kv_transfer.layer_words(source, 4))
    np.testing.assert_array_equal(got[:, 2], source[:, 4])
    others = [0, 1, 3, 4, 5]
    np.testing.assert_array_equal(got[:, others], sink[:, others])


SECTIONS = {
    "heads": (ColumnSection(32, 4),),
    "few heads": (ColumnSection(32, 1),),
    "replicated": (ColumnSection(32, None),),
    "ranges": (ColumnSection(8, 4), ColumnSection(8, 4), ColumnSection(16, 8)),
}


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("sections", SECTIONS.values(), ids=SECTIONS)
def test_columns_survive_split_and_join(sections, count):
    columns = random(5, 32)
    shares = [kv_transfer.own_columns(columns, sections, rank, count) for rank in range(count)]
    assert {share.shape[1] for share in shares} == {sum(each.share(count) for each in sections)}
    np.testing.assert_array_equal(kv_transfer.joined(shares, sections), columns)


def test_rank_has_part_of_each_range():
    """Convolution channels of a rank are its query heads, its key heads and its value heads."""
    shares = [
        kv_transfer.own_columns(np.arange(32), SECTIONS["ranges"], rank, 2) for rank in (0, 1)
    ]
    assert shares[0].tolist() == [*range(4), *range(8, 12), *range(16, 24)]


@pytest.mark.parametrize("count", [1, 2])
def test_sections_match_cache_arrays_of_rank(count):
    config, _ = tiny_model("qwen3_5", seed=1)
    for layer in config.layers:
        whole, local = layer.mixer.cache_specs, layer.mixer.local(count).cache_specs
        for spec, own in zip(whole, local, strict=True):
            share = sum(each.share(count) for each in spec.sections)
            assert share == np.prod(own.shape[spec.heads :])
    assert any(isinstance(layer.mixer, GatedDeltaConfig) for layer in config.layers)
