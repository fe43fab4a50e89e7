"""Steps of another engine and of both backends, measured in one call on one card."""

from collections.abc import Iterator
from typing import NamedTuple

from bench.common import markdown
from bench.pages.results import File, Found, Line, engine_of, stamp, table
from bench.pages.summary import NONE_ACCEPTED
from bench.quality.accuracy_table import MISSING
from tests.support.op_sides import SIDES


class Cell(NamedTuple):
    """A step of another engine, next to the backends.

    Attributes:
      file: File of the engine; its lines have the times of the backends under `own`.
      line: Drafting method, batch and times.
    """

    file: File
    line: Line

    @property
    def waits_for_host(self) -> bool:
        """True if the other engine waited for its host, so that a ratio says nothing."""
        return "note" in self.line

    @property
    def title(self) -> str:
        """Model, drafting method and GPUs in a few words."""
        gpus = f", {self.file['gpus']} GPUs" if self.file["gpus"] > 1 else ""
        return f"{self.file['model']}, {self.line['drafts']}{gpus}"


def cells_of(found: Found) -> list[Cell]:
    """Returns the steps of all engines that were measured next to the backends."""
    return [
        Cell(file, line | stamp(file))
        for file in found.peers
        for line in file["lines"]
        if "own" in line
    ]


def side_by_side(found: Found) -> list[str]:
    """Returns the table of these steps, with the time of the engine relative to each backend."""
    shown = cells_of(found)
    cards = dict.fromkeys(cell.file["device"] for cell in shown)
    lines = [cell.line for cell in shown]
    return table("Next to another engine in one call, ms", lines, cards, list(_rows(shown)))


def _rows(cells: list[Cell]) -> Iterator[list[str]]:
    engines = dict.fromkeys(engine_of(cell.file) for cell in cells)
    for engine in engines:
        yield ["model", "batch", engine, *SIDES, *(f"{engine} / {side}" for side in SIDES)]
        for file, line in (cell for cell in cells if engine_of(cell.file) == engine):
            cell, own = Cell(file, line), line["own"]
            times = [f"{ms:.2f}" for ms in (line["ms"], *(own[side] for side in SIDES))]
            ratios = [
                MISSING if cell.waits_for_host else f"{line['ms'] / own[side]:.2f}"
                for side in SIDES
            ]
            yield [cell.title, str(line["batch"]), *times, *ratios]


def slower(found: Found) -> str:
    """Returns the sentence that names the cells in which another engine is faster."""
    cells = [cell for cell in cells_of(found) if not cell.waits_for_host]
    count, slow = len(SIDES) * len(cells), 0
    batches: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        sides = [side for side in SIDES if cell.line["ms"] < cell.line["own"][side]]
        slow += len(sides)
        if sides:
            same = batches.setdefault((cell.title, " and ".join(sides)), [])
            same.append(str(cell.line["batch"]))
    if not slow:
        return f"Tandem is faster in all {count} cells that were measured with another engine."
    parts = [f"{title}, batch {', '.join(of)} ({sides})" for (title, sides), of in batches.items()]
    return markdown.wrapped(
        f"Measured in one call, another engine is faster in {slow} of {count} cells: "
        f"{'; '.join(parts)}. No draft is accepted in cells with {NONE_ACCEPTED}."
    )
