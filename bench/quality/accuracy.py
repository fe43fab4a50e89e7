"""Held-out accuracy of the shipped model, and the acceptance of each drafter.

    python -m bench.quality.accuracy --model models/demo/target --backend torch jax --out FILE.json
    python -m bench.quality.accuracy --table FILE.json... --into models/demo/README.md

The engine runs in this process, at temperature 0 and 1, with the same seeds for every drafter. The
exit code is 1 if a drafter changes an output. The second form renders the table of some files
between the markers `<!-- accuracy -->` and `<!-- /accuracy -->` of a document.
"""

import argparse
from pathlib import Path

from bench.common.options import add_options
from bench.quality.accuracy_table import blame, insert, read, render
from bench.quality.drafter_matrix import measured, verdict

DRAFTS = (
    "none",
    "NEXTN:S=3",
    "EAGLE:S=5,k=4,N=16",
    "EAGLE3:S=5,k=4,N=16",
    "STANDALONE:S=3",
    "DFLASH",
    "NGRAM:N=8",
    "NGRAM:N=8,sam=7,corpus=own",
)
COUNT = 200


def show(paths: list[Path], into: Path | None) -> int:
    """Renders the table of some files; the exit code is 1 where their texts are not equal."""
    files = read(paths)
    table = render(files)
    print(table)
    if into:
        insert(into, table)
    return blame(files)


def main() -> int:
    """Measures, or renders the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.quality.accuracy")
    add_options(parser, DRAFTS, COUNT)
    parser.add_argument("--table", nargs="+", type=Path, help="render these files instead")
    parser.add_argument("--into", type=Path, help="document to insert the table into")
    args = parser.parse_args()
    try:
        if args.table:
            return show(args.table, args.into)
        return verdict(measured(args, "bench.quality.accuracy"))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    raise SystemExit(main())
