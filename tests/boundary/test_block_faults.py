"""Planted faults of DFlash: each changes the golden numbers or the acceptance, and is detected.

A fault is planted in the specification; its drafts are compared with torch, which has no fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shared.models.families import config_from_folder
from shared.reference.drafters import BlockDrafter
from shared.spec import dflash
from tests.support import block_cells
from tests.support.block_cells import Backends
from tests.support.cells import SAMPLED
from tests.support.golden_blocks import (
    GOLDEN,
    TARGET,
    SpecBlock,
    assert_golden_numbers,
    golden_block_head,
)
from tests.support.planted_faults import Patch, after


def causal_in_full_layers(patch: Patch) -> None:
    def spoil(rows: list[Any], *rest: Any) -> list[Any]:
        return [replace(r, until=np.where(r.is_real, r.positions + 1, 0)) for r in rows]

    after(patch, dflash, "block_rows", spoil)


def block_does_not_see_itself(patch: Patch) -> None:
    def spoil(rows: list[Any], block: Any, lengths: Any, *rest: Any) -> list[Any]:
        return [replace(r, until=np.minimum(r.until, lengths[r.request])) for r in rows]

    after(patch, dflash, "block_rows", spoil)


def block_left_in_the_context(patch: Patch) -> None:
    """The row of the newest token keeps the values of the block."""
    healthy = BlockDrafter.extend

    def extend(drafter: BlockDrafter, batch: Any, fed: Any, lengths: Any, *rest: Any) -> None:
        before = drafter._kv
        healthy(drafter, batch, fed, lengths, *rest)
        size = before.shape[3]
        page = batch.page_table[np.arange(len(lengths)), lengths // size]
        drafter._kv[:, :, page, lengths % size] = before[:, :, page, lengths % size]

    patch.setattr(BlockDrafter, "extend", extend)
    keep_block_rows(patch)


def keep_block_rows(patch: Patch) -> None:
    """The specification discards these rows; a device leaves them past the length."""
    healthy = dflash.fill

    def fill(*arguments: Any) -> Any:
        hidden, kv = healthy(*arguments)
        arguments[-1][:] = kv
        return hidden, kv

    patch.setattr(dflash, "fill", fill)


def newest_token_counted_as_context(patch: Patch) -> None:
    """The block begins one position late, after an unwritten row."""
    healthy = dflash.block_rows

    def block_rows(block: Any, lengths: Any, *rest: Any) -> Any:
        return healthy(block, lengths + 1, *rest)

    patch.setattr(dflash, "block_rows", block_rows)


def rejected_rows_in_the_context(patch: Patch) -> None:
    """Writes every row of a path, shifted by one position per rejected row."""
    healthy = BlockDrafter.extend

    def extend(
        drafter: BlockDrafter, batch: Any, fed: Any, lengths: Any, counts: Any, *rest: Any
    ) -> None:
        W = len(fed.tokens) // len(counts)
        healthy(drafter, batch, fed, lengths - (W - counts), np.full_like(counts, W), *rest)

    patch.setattr(BlockDrafter, "extend", extend)


GOLDEN_FAULTS = {
    "causal instead of bidirectional": causal_in_full_layers,
    "the block does not attend to itself": block_does_not_see_itself,
    "the newest token counts as context": newest_token_counted_as_context,
}
SERVED_FAULTS = {
    "the block's rows stay in the context": block_left_in_the_context,
    "rejected rows get into the context": rejected_rows_in_the_context,
    "the newest token counts as context": newest_token_counted_as_context,
}


def golden_block(folder: str) -> SpecBlock:
    head, weights = golden_block_head(GOLDEN / folder, TARGET)
    return SpecBlock(head, config_from_folder(TARGET), weights)


@pytest.mark.parametrize("name", GOLDEN_FAULTS)
def test_planted_fault_fails_golden_block_numbers(name, monkeypatch):
    assert_golden_numbers("dflash", golden_block)
    GOLDEN_FAULTS[name](monkeypatch)
    with pytest.raises(AssertionError):
        assert_golden_numbers("dflash", golden_block)


@pytest.fixture
def backends() -> Iterator[Backends]:
    """Backends per test, so that no output of a healthy backend is reused."""
    made = Backends()
    yield made
    made.close()


def test_block_rows_past_length_change_nothing(backends, monkeypatch):
    keep_block_rows(monkeypatch)
    block_cells.assert_cell(
        block_cells.cell("qwen3", SAMPLED, "mixed", 1, 16), backends, ("reference", "torch")
    )


@pytest.mark.parametrize("name", SERVED_FAULTS)
def test_planted_fault_changes_block_acceptance(name, backends, monkeypatch):
    SERVED_FAULTS[name](monkeypatch)
    each = block_cells.cell("qwen3", SAMPLED, "mixed", 1, 16)
    with pytest.raises(AssertionError):
        block_cells.assert_cell(each, backends, ("reference", "torch"))
