"""What each way to draft and to accept gains at a temperature: tokens per verify step, by drafter.

    python -m bench.accept_rules --model models/demo/target --out bench/results/accept_rules.json
    python -m bench.accept_rules --table FILE.json...

Three levels of drafts. The match rule keeps the target's choice where a draft is that choice, the
rejection rule accepts by both laws (Leviathan et al. 2023), block verification judges a chain as a
whole (Sun et al. 2024). Drafts of the match rule share the target's noise, or are the drafter's
likeliest tokens ("greedy", "plain"): those are ranked by torch alone. A drafter that does not exist
is a line among the refused. The exit code is 1 where the match rule did not keep the text.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.accuracy_table import MISSING, File, blame, markdown, notes, read
from bench.drafting import Draft
from bench.measuring import measured, verdict
from bench.options import add_options
from bench.scoring import Row

CHAIN = "S=3"
TREE = "S=3,k=4,N=16"
BLOCK = "most=3"  # a block is as long as its head was trained for, and judged up to three drafts
SHAPES = {
    "NEXTN": (CHAIN, TREE),
    "EAGLE": (CHAIN, TREE),
    "EAGLE3": (CHAIN, TREE),
    "STANDALONE": (CHAIN, TREE),
    "DFLASH": (BLOCK, None),
}
"""Of each drafter, its chain and its tree; DFLASH drafts chains only."""

MATCH, REJECTION, WHOLE, GREEDY, PERTURBED_TREE, PLAIN_TREE = WAYS = {
    "match rule, chain": (0, "rule=match"),
    "rejection rule, chain": (0, "rule=rejection"),
    "block verification, chain": (0, "rule=block"),
    "match rule, greedy chain": (0, "candidates=plain"),
    "match rule, perturbed tree": (1, "candidates=perturbed"),
    "match rule, plain tree": (1, "candidates=plain"),
}
"""Of each column of the table, which of a drafter's shapes it has, and its settings."""

MOST_LOST = 0.08
"""Of what a rejected chain emits a step, the share that a matched chain may lack."""

COUNT = 20
ALL = "all"

Cell = tuple[str, str, float, str]
"""A drafter, a way, a temperature and a kind of task, or `ALL` of them."""


def draft_of(drafter: str, way: str) -> Draft | None:
    """How a drafter drafts in one way; None: it does not."""
    shape, setting = WAYS[way]
    form = SHAPES[drafter][shape]
    return None if form is None else Draft.parse(f"{drafter}:{form},{setting}")


def specs() -> Iterator[str]:
    """All lines, plain decoding first: its text is everyone's."""
    yield "none"
    for drafter in SHAPES:
        for shape, setting in WAYS.values():
            form = SHAPES[drafter][shape]
            if form is not None:
                yield f"{drafter}:{form},{setting}"


def cells_of(rows: Sequence[Row]) -> dict[Cell, list[int]]:
    """How often a step of each cell accepted 0, 1, ... drafts, on all backends together."""
    found: dict[Cell, list[int]] = {}
    names = {str(draft_of(d, w)): (d, w) for d in SHAPES for w in WAYS if draft_of(d, w)}
    for row in rows:
        if row["algorithm"] not in names:
            continue
        for kind in (row["kind"], ALL):
            key = (*names[row["algorithm"]], row["temperature"], kind)
            histogram = found.get(key, [0] * len(row["accepted_histogram"]))
            pairs = zip(histogram, row["accepted_histogram"], strict=True)
            found[key] = [a + b for a, b in pairs]
    return found


def length(histogram: Sequence[int]) -> tuple[float, float]:
    """Mean tokens per verify step, and its standard error if steps were independent."""
    counts, accepted = np.array(histogram), np.arange(len(histogram))
    steps = max(1, int(counts.sum()))
    mean = float(counts @ accepted) / steps
    return 1 + mean, float(np.sqrt((counts @ (accepted - mean) ** 2) / steps / steps))


def expectations(cells: dict[Cell, list[int]]) -> list[dict[str, Any]]:
    """For each drafter and temperature, over all tasks, whether the shared noise does its work.

    The tree is above the chains unless it is below them by more than two standard errors.
    """
    found = []
    for drafter, temperature in dict.fromkeys((c[0], c[2]) for c in cells):
        of = {way: cells.get((drafter, way, temperature, ALL)) for way in WAYS}
        match, reject, tree = (of[way] for way in (MATCH, REJECTION, PERTURBED_TREE))
        if match is None or reject is None:
            continue
        ratio = length(match)[0] / length(reject)[0]
        line = {"drafter": drafter, "temperature": temperature, "match_of_rejection": ratio}
        line |= {"is_near": ratio >= 1 - MOST_LOST}
        if tree is not None:
            gains = [_above(tree, chain) for chain in (match, reject)]
            line |= {"tree_is_above": all(gain > -2 for gain in gains)}
            line |= {"tree_gain_in_errors": min(gains)}
        found.append(line)
    return found


def _above(one: Sequence[int], other: Sequence[int]) -> float:
    """How far one mean is above another one, in standard errors of the difference."""
    (a, error_a), (b, error_b) = length(one), length(other)
    return (a - b) / max(float(np.hypot(error_a, error_b)), 1e-9)


def render(files: Sequence[File]) -> str:
    """The tables of all files: one for each temperature, and what was expected."""
    cells, parts = cells_of([row for file in files for row in file["rows"]]), []
    for temperature in dict.fromkeys(cell[2] for cell in cells):
        kinds = dict.fromkeys(cell[3] for cell in cells)
        lines = [["drafter", "tasks", *WAYS]]
        for drafter in dict.fromkeys(cell[0] for cell in cells):
            for kind in sorted(kinds, key=lambda kind: kind == ALL):
                keys = [(drafter, way, temperature, kind) for way in WAYS]
                lines.append([drafter, kind, *(_shown(cells.get(key)) for key in keys)])
        parts.append(f"Temperature {temperature:g}, tokens per verify step:\n\n{markdown(lines)}")
    said = "\n".join(map(_said, expectations(cells)))
    return "\n\n".join([*parts, *([said] if said else []), *notes(files)])


def _shown(histogram: Sequence[int] | None) -> str:
    if histogram is None:
        return MISSING
    mean, error = length(histogram)
    return f"{mean:.3f} ± {error:.3f}"


def _said(line: dict[str, Any]) -> str:
    is_near = "" if line["is_near"] else f", LESS THAN {1 - MOST_LOST:.0%}"
    text = (
        f"- {line['drafter']} at temperature {line['temperature']:g}: the matched chain emits "
        f"{line['match_of_rejection']:.1%} of the rejected chain's tokens{is_near}"
    )
    if "tree_is_above" in line:
        where = "not below" if line["tree_is_above"] else "BELOW"
        text += f"; the perturbed tree is {where} both ({line['tree_gain_in_errors']:+.1f} errors)"
    return text + "."


def main() -> int:
    """Measures, or renders the tables of a file; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.accept_rules")
    add_options(parser, tuple(specs()), COUNT)
    parser.set_defaults(kinds="problems,copying,chats", temperature=[1.0, 1.5], backend=["torch"])
    parser.add_argument("--table", nargs="+", type=Path, help="render these files instead")
    args = parser.parse_args()
    if args.table:
        files = read(args.table)
        print(render(files))
        return blame(files)
    try:
        measurement = measured(args, "bench.accept_rules")
    except ValueError as error:
        parser.error(str(error))
    tables = render([measurement.to_json("bench.accept_rules")])
    print(f"\n{tables}")
    if args.out:
        args.out.with_suffix(".md").write_text(tables + "\n", encoding="utf-8")
    return verdict(measurement)


if __name__ == "__main__":
    raise SystemExit(main())
