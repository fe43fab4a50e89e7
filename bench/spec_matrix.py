"""Every drafter in several shapes on both backends: acceptance, speed, and one text.

    python -m bench.spec_matrix --model models/demo/target --out FILE.json --picture FILE.png

Prints the tables, writes them beside the JSON file, and draws them. The exit code is 1 where a
cell's text is not plain decoding's.
"""

import argparse
from importlib import import_module
from pathlib import Path

from bench.accuracy_table import render, render_cells
from bench.measuring import measured, verdict
from bench.options import add_options

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


def main() -> int:
    """Measures all cells; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.spec_matrix")
    add_options(parser, DRAFTS, COUNT)
    parser.add_argument("--picture", type=Path, help="PNG or SVG file; needs matplotlib")
    args = parser.parse_args()
    try:
        measurement = measured(args, "bench.spec_matrix")
    except ValueError as error:
        parser.error(str(error))
    found = measurement.to_json("bench.spec_matrix")
    tables = f"{render([found])}\n\n{render_cells(measurement.rows)}\n"
    print(f"\n{tables}")
    if args.out:
        args.out.with_suffix(".md").write_text(tables, encoding="utf-8")
    if args.picture and measurement.rows:
        import_module("bench.spec_picture").draw(measurement.rows, args.picture)
    return verdict(measurement)


if __name__ == "__main__":
    raise SystemExit(main())
