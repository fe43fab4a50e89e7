"""The summary: one row per model and drafting method, next to other engines."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.common import markdown
from bench.pages.results import INDEX, SIMULATED, Found, Line, Subject, cell, lines_of
from bench.pages.tables import number
from bench.quality.accuracy_table import MISSING
from tests.support.op_sides import SIDES

H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
NONE_ACCEPTED = "°"
"""Follows a time of steps that accept no draft."""


class Asked(NamedTuple):
    """A row of the summary.

    Attributes:
      model, card, gpus: The model and the GPUs that it runs on.
      name: Drafting method, as the row shows it.
      drafts: The same as result files name it.
      peers: Its name in the results of other engines; empty if they were not measured.
      in_readme: Whether the README has the row too.
    """

    model: str
    card: str
    gpus: int
    name: str
    drafts: str
    peers: str = ""
    in_readme: bool = True


def _dense(model: str, *methods: str) -> list[Asked]:
    return [Asked(model, H200, 1, name, name, name) for name in methods]


ROWS = (
    *_dense("qwen3.5-9b", "none", "NEXTN S=3"),
    *_dense("qwen3-8b", "none", "EAGLE3 S=3", "DFLASH"),
    Asked("qwen3-8b", H200, 1, "NGRAM N=8, host index", f"NGRAM N=8 {INDEX}host", "NGRAM N=8"),
    Asked("qwen3-8b", H200, 1, "NGRAM N=8, device index", f"NGRAM N=8 {INDEX}device", "NGRAM N=8"),
    Asked("qwen3-8b-fp8", H200, 1, "none", "none", in_readme=False),
    Asked("qwen3-8b-fp8 --fp8-activations", H100, 1, "none", "none"),
    Asked("qwen3.5-35b-a3b", H200, 1, "none", "none", in_readme=False),
    Asked("qwen3.5-35b-a3b-fp8", H200, 1, "none", "none", "none"),
    Asked("qwen3.5-35b-a3b-fp8", H100, 1, "NEXTN S=3", "NEXTN S=3", in_readme=False),
    Asked("qwen3-8b", H200, 2, "none", "none", "none", in_readme=False),
    Asked("qwen3-32b", H200, 4, "none", "none", in_readme=False),
    Asked("qwen3-32b", H200, 4, "EAGLE3 S=3", "EAGLE3 S=3"),
    Asked("qwen3.5-122b-a10b-fp8", H200, 4, "none", "none", in_readme=False),
    Asked("qwen3.5-122b-a10b-fp8", H200, 4, "NEXTN S=3", "NEXTN S=3"),
)
BATCHES = (1, 8, 32)


@dataclass(frozen=True)
class Row:
    """A row with its measured steps.

    Attributes:
      asked: The row.
      own: The newest line of each backend and batch.
      peers: Milliseconds by engine, then by batch.
    """

    asked: Asked
    own: dict[str, dict[int, Line]]
    peers: dict[str, dict[int, float]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Model, drafting method and GPUs in a few words."""
        gpus = f", {self.asked.gpus} GPUs" if self.asked.gpus > 1 else ""
        return f"{self.asked.model}, {self.asked.name}{gpus}"


def rows_of(found: Found) -> list[Row]:
    """Returns the rows of the summary that were measured."""
    rows = [_row(found, asked) for asked in ROWS]
    return [row for row in rows if any(row.own.values())]


def _row(found: Found, asked: Asked) -> Row:
    subject = Subject(asked.model, asked.card)
    files = found.decode if asked.gpus == 1 else found.tp
    lines = [line for line in lines_of(files, subject) if _fits(line, asked)]
    own = {side: _newest([line for line in lines if line["backend"] == side]) for side in SIDES}
    peers = {
        name: {batch: ms for (drafts, batch), ms in known.items() if drafts == asked.peers}
        for name, known in found.peers_of(subject, asked.gpus, with_equal_prompts=False).items()
    }
    return Row(asked, own, peers if asked.peers else {})


def _fits(line: Line, asked: Asked) -> bool:
    is_usual = line["temperature"] == 0 and line["overlap"] == 1 and line["batch"] in BATCHES
    drafts = " ".join(w for w in line["drafts"].split(" ") if not w.startswith(SIMULATED))
    same = (drafts, line.get("ranks", 1)) == (asked.drafts, asked.gpus)
    return is_usual and same and f"{SIMULATED}1" not in line["drafts"].split(" ")


def _newest(lines: Sequence[Line]) -> dict[int, Line]:
    """Returns a line of each batch: simulated acceptance first, then the newest."""
    found = {}
    for line in sorted(lines, key=lambda line: (_accepts(line), line["date"])):
        found[line["batch"]] = line
    return dict(sorted(found.items()))


def _accepts(line: Line) -> bool:
    return line["drafts"] == "none" or SIMULATED in line["drafts"]


def _own(line: Line) -> str:
    return f"{line['ms']:.2f}{'' if _accepts(line) else NONE_ACCEPTED}"


def _gpus(asked: Asked) -> str:
    name = "H200" if asked.card == H200 else "H100"
    return name if asked.gpus == 1 else f"{asked.gpus} x {name}"


def speed(found: Found, *, in_readme: bool) -> str:
    """Returns the summary as a table; a cell has the milliseconds of batch 1 / 8 / 32.

    Args:
      in_readme: Only the rows of the README.
    """
    rows = [row for row in rows_of(found) if row.asked.in_readme or not in_readme]
    engines = list(dict.fromkeys(name for row in rows for name in row.peers))
    cells = [["model", "GPU", "drafts", *SIDES, *engines]]
    for row in rows:
        own = [[cell(row.own[side].get(n), _own) for n in BATCHES] for side in SIDES]
        others = [[number(row.peers.get(name, {}).get(n)) for n in BATCHES] for name in engines]
        each = [_joined(numbers) for numbers in (*own, *others)]
        cells.append([row.asked.model, _gpus(row.asked), row.asked.name, *each])
    return markdown.table(cells)


def _joined(numbers: Sequence[str]) -> str:
    return MISSING if set(numbers) == {MISSING} else " / ".join(numbers)
