"""The Markdown tables of measured drafters: a line for each drafter and temperature."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.common.markdown import between, table
from bench.quality.scoring import Row

MISSING = "-"

File = dict[str, Any]
Line = tuple[str, float]
"""A drafter and a temperature."""


def render(files: Sequence[File]) -> str:
    """The table of all files: acceptance and accuracy.

    They are those of the most tasks; backends that differ in them are listed in one cell.
    """
    rows = [row for file in files for row in file["rows"]]
    kinds = _in_order(row["kind"] for row in rows)
    values = [["drafter", "T"]]
    values[0] += [f"acceptance length, {kind}" for kind in kinds]
    values[0] += [f"accuracy, {kind}" for kind in kinds]
    for line in _in_order(map(_line, rows)):
        mine, begin = [row for row in rows if _line(row) == line], [line[0], f"{line[1]:g}"]
        values.append(begin + _values(mine, kinds))
    return "\n\n".join([table(values), *notes(files)])


def render_cells(rows: Sequence[Row]) -> str:
    """The table of a matrix: a line for each cell, with acceptance by position and the hash."""
    head = ("drafter", "backend", "T", "task", "acceptance length", "by draft position")
    lines: list[Sequence[str]] = [(*head, "tokens/s", "text")]
    for row in rows:
        shares = " ".join(f"{share:.2f}" for share in row["per_position"]) or MISSING
        place = (row["algorithm"], row["backend"], f"{row['temperature']:g}", row["kind"])
        speed = f"{row['tokens_per_s']:.0f}"
        lines.append((*place, f"{row['accept_length']:.3f}", shares, speed, row["text_hash"]))
    return table(lines)


def _values(mine: list[Row], kinds: list[str]) -> list[str]:
    """A line's acceptance lengths and accuracies by kind."""
    found = []
    for field, form in (("accept_length", "{:.2f}"), ("accuracy", "{:.1%}")):
        for kind in kinds:
            of_kind = [row for row in mine if row["kind"] == kind]
            most = max((row["count"] for row in of_kind), default=0)
            values = [form.format(row[field]) for row in of_kind if row["count"] == most]
            found.append(" / ".join(_in_order(values)) or MISSING)
    return found


def notes(files: Sequence[File]) -> Iterator[str]:
    """Yields tasks, equality of outputs, unsupported settings, and commands."""
    counts = _in_order(f"{row['count']} {row['kind']}" for file in files for row in file["rows"])
    yield f"Tasks: {', '.join(counts)}. Texts: {_texts(files)}."
    for refusal in _in_order(
        f"{r['algorithm']}: {r['refused']}" for f in files for r in f["refusals"]
    ):
        yield f"Refused: {refusal}."
    stored = [f"`{file['path']}` ({file['dtype']})" for file in files if "path" in file]
    if stored:
        yield f"Each file holds its command and versions: {', '.join(stored)}."
    else:
        commands = _in_order(f"{file['command']} ({file['dtype']})" for file in files)
        yield "```\n" + "\n".join(commands) + "\n```"


def _texts(files: Sequence[File]) -> str:
    tokens, excused = (sum(file[name] for file in files) for name in ("tokens", "excused"))
    if faults(files):
        return "NOT EQUAL"
    ties = f", {excused} texts excused as near ties" if excused else ""
    law = any(not row["keeps_text"] for file in files for row in file["rows"])
    but = ", the rejection rule apart" if law else ""
    return f"equal for every drafter and backend{but}, {tokens:,} tokens compared{ties}"


def faults(files: Sequence[File]) -> list[str]:
    """One sentence for each text that a drafter or a backend changed."""
    found, first = [], {}
    for file in files:
        if file["wrong"]:
            found.append(f"{file['wrong']} texts changed in: {file['command']}")
        for row in file["rows"]:
            if row["excused"] or not row["keeps_text"]:
                continue
            key = (file["model"], file["dtype"], row["kind"], row["temperature"], row["count"])
            want = first.setdefault(key, row)
            if row["text_hash"] != want["text_hash"]:
                found.append(
                    f"the text of {row['algorithm']} on {row['backend']} is not that of "
                    f"{want['algorithm']} on {want['backend']}: {row['kind']} at temperature "
                    f"{row['temperature']:g}; one run with both backends distinguishes near ties"
                )
    return found


def read(paths: Sequence[Path]) -> list[File]:
    """The files of some measurements."""
    return [json.loads(path.read_text(encoding="utf-8")) | {"path": str(path)} for path in paths]


def blame(files: Sequence[File]) -> int:
    """Prints the faults; the exit code is 1 where there are any."""
    found = faults(files)
    for fault in found:
        print(fault, file=sys.stderr)
    return int(bool(found))


def insert(document: Path, text: str, name: str = "accuracy") -> None:
    """Puts text between the document's markers of a name.

    Raises:
      ValueError: The document does not have the two markers.
    """
    page = document.read_text(encoding="utf-8")
    page = between(page, f"<!-- {name} -->", f"<!-- /{name} -->", text)
    document.write_text(page, encoding="utf-8")


def _line(row: Row) -> Line:
    return row["algorithm"], row["temperature"]


def _in_order(items: Any) -> list[Any]:
    """Each item once, as they first come."""
    return list(dict.fromkeys(items))
