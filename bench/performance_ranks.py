"""The table of `bench.performance` that says what several GPUs gain."""

from collections.abc import Iterator, Sequence
from typing import Any

from bench.quality.accuracy_table import MISSING
from tests.support.op_sides import SIDES

Line = dict[str, Any]


def ranked_steps(lines: Sequence[Line]) -> Iterator[list[str]]:
    """A line for each drafter and batch: of each backend, milliseconds by ranks.

    Args:
      lines: Of one model, as `bench.steps.offline` writes them.
    """
    counts = sorted({line["ranks"] for line in lines})
    told = [f"{side}, {count}" for side in SIDES for count in counts]
    yield ["drafts", "batch", *told, "texts"]
    found: dict[tuple[str, int], dict[tuple[str, int], Line]] = {}
    for line in lines:
        by_side = found.setdefault((line["drafts"], line["batch"]), {})
        by_side[line["backend"], line["ranks"]] = line
    for (drafts, batch), by_side in sorted(found.items(), key=lambda item: item[0]):
        cells = [_cell(by_side, side, count) for side in SIDES for count in counts]
        yield [drafts, str(batch), *cells, _texts(list(by_side.values()))]


def _cell(by_side: dict[tuple[str, int], Line], side: str, count: int) -> str:
    line, alone = by_side.get((side, count)), by_side.get((side, 1))
    if line is None:
        return MISSING
    gain = f" ({alone['ms'] / line['ms']:.2f} x)" if alone and count > 1 else ""
    return f"{line['ms']:.2f}{gain}"


def _texts(lines: Sequence[Line]) -> str:
    compared = [line["texts"] for line in lines if line["texts"]]
    if not compared:
        return MISSING
    return "equal" if all(texts["equal"] for texts in compared) else "DIFFER"
