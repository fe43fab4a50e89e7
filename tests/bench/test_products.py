"""The bench of products: what it tells of can stand in a table."""

import json

import pytest

from bench.kernels.products import LINES, PRODUCTS, TRIED, told_line
from kernels.tables import Line, Table
from kernels.tiles import MEASURED, LinearTiles, Tiles

LANGUAGES = {"torch": "triton_gpu", "jax": "pallas_gpu"}


@pytest.mark.parametrize("side", TRIED)
def test_a_line_before_that_of_today_is_taken_by_its_products_alone(side: str) -> None:
    today = Tiles.load(LANGUAGES[side], MEASURED).linear
    for (rows, line), tried in TRIED[side].items():
        sizes = {
            name: {"item_bytes": 2, "rows": rows, "outputs": N, "inputs": K}
            | {"gated": int(function == "gated_product")}
            for name, (function, _, K, N) in PRODUCTS.items()
        }
        names = line.split(", ")
        place = min(
            place for place, x in enumerate(today.lines) if any(x.takes(sizes[y]) for y in names)
        )
        for tiles in tried:
            said = json.loads(told_line(rows, line, tiles))
            told = Line(said.pop("at_most"), LinearTiles(**said))
            table = Table((*today.lines[:place], told, *today.lines[place:]))
            taken = {name for name, size in sizes.items() if table.of(**size) is told.tiles}
            assert taken == set(names)
    assert set(PRODUCTS) == {name for line in LINES for name in line.split(", ")}
