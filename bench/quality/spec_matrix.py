"""Every drafter in several shapes on both backends: acceptance, speed, equal outputs.

    python -m bench.quality.spec_matrix --model models/demo/target --out FILE.json
    python -m bench.quality.spec_matrix --table FILE.json...

Prints the tables and writes them next to the JSON file. The exit code is 1 if the output of a cell
differs from plain decoding.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.common.options import add_options
from bench.quality.accuracy_table import File, blame, read, render, render_cells
from bench.quality.drafter_matrix import measured, verdict

DRAFTS = (
    "none",
    "NAIVE_EAGLE",
    *(f"NEXTN:{shape}" for shape in ("S=1", "S=3", "S=5", "S=3,k=2,N=8", "S=5,k=4,N=16")),
    *(f"EAGLE:{shape}" for shape in ("S=3", "S=5", "S=3,k=2,N=8", "S=5,k=4,N=16")),
    *(f"EAGLE3:{shape}" for shape in ("S=3", "S=5", "S=3,k=2,N=8", "S=5,k=4,N=16", "S=7,k=4,N=32")),
    *(f"STANDALONE:{shape}" for shape in ("S=3", "S=5", "S=3,k=2,N=8")),
    "DFLASH",
    *(f"NGRAM:N={nodes}" for nodes in (4, 8, 12, 16)),
    "NGRAM:N=8,sam=7,corpus=own",
)
COUNT = 40


def show(files: Sequence[File]) -> str:
    """Prints the tables of some files, and returns them."""
    rows = [row for file in files for row in file["rows"]]
    tables = f"{render(files)}\n\n{render_cells(rows)}\n"
    print(tables)
    return tables


def main() -> int:
    """Measures all cells, or shows those of some files; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.quality.spec_matrix")
    add_options(parser, DRAFTS, COUNT)
    parser.add_argument("--table", nargs="+", type=Path, help="show these files instead")
    args = parser.parse_args()
    if args.table:
        files = read(args.table)
        show(files)
        return blame(files)
    try:
        measurement = measured(args, "bench.quality.spec_matrix")
    except ValueError as error:
        parser.error(str(error))
    print()
    tables = show([measurement.to_json("bench.quality.spec_matrix")])
    if args.out:
        args.out.with_suffix(".md").write_text(tables, encoding="utf-8")
    return verdict(measurement)


if __name__ == "__main__":
    raise SystemExit(main())
