"""Workspace of latent attention: partial results of the kernels for any tiles and batch."""

from functools import partial
from itertools import product

import pytest

from kernels.kernel_limits import fits_latent_sm90
from kernels.latent_tiles import (
    LatentAttentionTiles,
    latent_bytes,
    most_splits,
    splits_of,
)
from kernels.tiles import Tiles
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.boundary.workspace import split_attention
from shared.models.families import config_from_folder
from shared.spec.draft_tree import TreeShape
from shared.spec.reduction_order import LATENT_ATTENTION
from tests.support.contract_host import contract_capacity, contract_model

ORDER = {name: size for name, size in LATENT_ATTENTION.sizes_for(2).items() if name != "tile"}


@pytest.mark.parametrize("language", ["triton_gpu", "pallas_gpu"])
def test_most_splits_bound_partial_results_of_tables(language: str) -> None:
    tiles = Tiles.load(language, "NVIDIA H200").latent_attention
    for heads, rows, requests in product((5, 20, 128), (1, 4, 16, 64, 2048), (1, 2, 8, 32, 64)):
        pairs = rows * heads
        chosen = tiles.of(item_bytes=2, rows=pairs, requests=requests, rank=512)
        _, _, sharing = chosen.programs_of(pairs, requests)
        for capacity in (64, 4096, 131072):
            found = splits_of(capacity, **ORDER) if sharing > 1 else 0
            assert found <= most_splits(pairs, requests, capacity, **ORDER)


def test_tiles_beyond_sm90_lanes_raise() -> None:
    with pytest.raises(ValueError, match="lanes must be at most 64, got 128"):
        LatentAttentionTiles(lanes=128, programs=1, warps=8, stages=2)


@pytest.mark.parametrize(
    ("changed", "fits"),
    [({}, True), ({"page": 128}, True)]
    + [({name: 32}, False) for name in ("page", "size", "rank", "tile")]
    + [({"nodes": 1}, False), ({"page": 96}, False)],
)
def test_sm90_kernel_fits_sizes(changed: dict[str, int], fits: bool) -> None:
    sizes = {"page": 64, "size": 576, "nodes": 0, "rank": 512, "tile": 64}
    assert fits_latent_sm90(**(sizes | changed)) == fits


@pytest.mark.parametrize(("lanes", "programs"), [(64, 132), (32, 264)])
def test_split_tiles_beyond_bound_raise(lanes: int, programs: int) -> None:
    with pytest.raises(ValueError, match="tiles with several programs"):
        LatentAttentionTiles(lanes=lanes, programs=programs, warps=4, stages=2)


def test_latent_workspace_counts_partial_results_per_split() -> None:
    mixer = config_from_folder("bench/shapes/glm-4.7-flash").attentions[0]
    capacity = contract_capacity(contract_model()[0])
    shape = TreeShape.chain(3, 1)
    program = Program(
        work=StepKind.DECODE,
        batch=1,
        pages=32768,
        tokens=0,
        shape=shape,
        extras=ProgramFeature.NONE,
    )
    found = split_attention(0, latent_bytes, program, mixer, capacity, 2)
    far = 32768 * capacity.page_size - ORDER["near"]
    splits = ORDER["near"] // ORDER["split"] + far // ORDER["far_split"]
    pairs = 4 * 20
    assert found == pairs * (576 + 512) * 2 + splits * pairs * (512 + 2) * 4


def test_latent_workspace_counts_passes_of_few_rows() -> None:
    """Verify rows of 8 requests fill the GPU alone, but rows of a draft pass do not."""
    mixer = config_from_folder("bench/shapes/deepseek-v3-8-layers-fp8").attentions[0]
    capacity = contract_capacity(contract_model()[0])
    program = Program(
        work=StepKind.DECODE,
        batch=8,
        pages=4096,
        tokens=0,
        shape=TreeShape.chain(3, 8),
        extras=ProgramFeature.NONE,
    )
    verified = 8 * 4 * 128 * (576 + 512) * 2
    positions = 4096 * capacity.page_size
    assert most_splits(4 * 128, 8, positions, **ORDER) == 0
    parts = most_splits(128, 8, positions, **ORDER) * 8 * 128
    found = split_attention(0, latent_bytes, program, mixer, capacity, 2)
    assert parts > 0
    assert found == verified + parts * (512 + 2) * 4


def test_latent_workspace_of_plain_decoding_is_one_pass() -> None:
    mixer = config_from_folder("bench/shapes/glm-4.7-flash").attentions[0]
    capacity = contract_capacity(contract_model()[0])
    shape, extras = TreeShape.chain(0, 8), ProgramFeature.NONE
    kind = StepKind.DECODE
    program = Program(work=kind, batch=8, pages=8, tokens=0, shape=shape, extras=extras)
    found = split_attention(0, latent_bytes, program, mixer, capacity, 2)
    splits = most_splits(20, 8, 8 * capacity.page_size, **ORDER)
    assert found == 8 * 20 * ((576 + 512) * 2 + splits * (512 + 2) * 4)


@pytest.mark.parametrize(("copies_lanes", "copied"), [(False, 0), (True, (576 + 512) * 2)])
def test_latent_workspace_counts_blocks_of_prefill(copies_lanes: bool, copied: int) -> None:
    """A prompt of two requests has 132 totals, and its lanes fill 640 blocks and parts of two."""
    mixer = config_from_folder("bench/shapes/glm-4.7-flash").attentions[0]
    capacity = contract_capacity(contract_model()[0])
    shape, extras = TreeShape.chain(0, 2), ProgramFeature.NONE
    kind = StepKind.PREFILL
    program = Program(work=kind, batch=2, pages=8, tokens=2048, shape=shape, extras=extras)
    counted = partial(latent_bytes, copies_lanes=copies_lanes)
    found = split_attention(0, counted, program, mixer, capacity, 2)
    pairs = 2048 * 20
    assert found == pairs * (576 + 512) * 2 + 64 * (132 * 512 * 4 + (640 + 2) * copied)
