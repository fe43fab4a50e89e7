"""Checks and times an operation in both backends, over the cases of its tests.

    python -m bench.kernels.op mix --out bench/results/op_mix.json

Every case is compared with the specification and then timed over rotating inputs, so that no call
finds its own in the GPU's cache. The bytes limit is the time of the bytes that a call must read and
write at the rate of a large copy on the same device. On a GPU an operation is its bound kernel, and
every case runs; on a CPU it is the reference implementation, and small cases run. Each line is
printed and written as soon as it is known.

    python -m bench.kernels.op mix --cases "32 x" \
        --tiles '{}' '{"stages": 2}' '{"stages": 2, "splits": 4}'

searches tile configs for a GPU (`kernels/tiles.py`): the cases with the text in their name, with
the tiles of the GPU's file and with some of them replaced. A config that cannot run is printed with
its error. `--compile-at-once 12` first compiles the torch kernels of all of them in 12 processes,
which share Triton's cache on the disk.
"""

import argparse
import hashlib
import json
import multiprocessing
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.environment import write_results
from tests.support.op_case import TOLERANCE, OpCase, table, tables
from tests.support.op_sides import SIDES, Changes, Placed, Side, rounds_for

# More than the cache of any GPU so far (50 MiB on an H200).
ROTATED_BYTES = 100 * 2**20
MOST_SETS = 16
MOST_FAULT = 240
"""Characters of an error that are printed."""
HEADER = f"{'side':7}{'case':40}{'dtype':10}{'error':>9}"
HEADER += f"{'us':>10}{'limit us':>10}{'GB/s':>8}{'share':>7}"

Line = dict[str, Any]


class Report:
    """Results, printed and written as they come.

    Attributes:
      found: All of it, as the file has it.
    """

    def __init__(self, command: str, out: Path | None, seconds: float) -> None:
        versions = {"python": platform.python_version(), "numpy": version("numpy")}
        self.found: dict[str, Any] = {"command": command, "versions": versions, "sides": {}}
        self.found |= {"results": [], "bits_equal": {}, "left_out": [], "faults": []}
        self._out, self._until = out, time.monotonic() + seconds

    def say(self, line: str) -> None:
        """Prints a line and writes the file."""
        print(line, flush=True)
        if self._out:
            write_results(self._out, self.found)

    def add_side(self, side: Side, copy_rate: float) -> None:
        """Prints the versions and devices."""
        self.found["versions"][side.name] = side.version
        where = {"device": side.device, "kernels": side.kernels}
        self.found["sides"][side.name] = where | {"copy_gigabytes_per_s": copy_rate / 1e9}
        kernels = ", ".join(side.kernels) or "none"
        copies = f"copies {copy_rate / 1e9:.0f} GB/s"
        self.say(f"{side.name} on {side.device}, {copies}, kernels: {kernels}\n{HEADER}")

    def add(self, line: Line) -> None:
        """Takes a line over."""
        self.found["results"].append(line)
        self.say(line_of(line))

    def add_fault(self, side: Side, case: OpCase, tiles: Changes, fault: Exception) -> None:
        """Records tiles that cannot run."""
        text = f"{side.name}: {case}, {json.dumps(dict(tiles))}: {type(fault).__name__}: {fault}"
        self.found["faults"].append(text)
        self.say(f"cannot run: {' '.join(text.split())[:MOST_FAULT]}")

    def may_begin(self, side: Side, case: OpCase) -> bool:
        """Returns whether there is time for another case, and records a skipped one."""
        if time.monotonic() < self._until:
            return True
        self.found["left_out"].append(f"{side.name}: {case}")
        self.say(f"left out: {side.name}, {case}")
        return False

    def compare_sides(self) -> None:
        """Prints the cases with equal bits on all sides."""
        hashes: dict[str, list[str]] = {}
        for line in self.found["results"]:
            hashes.setdefault(f"{line['function']}, {line['case']}", []).append(line["bits"])
        equal = {case: len(set(all_)) == 1 for case, all_ in hashes.items() if len(all_) > 1}
        self.found["bits_equal"] = equal
        self.say("\n".join(f"bits equal in all lines, {case}: {equal[case]}" for case in equal))

    @property
    def wrong(self) -> list[Line]:
        """Returns lines with an error above the tolerance, or NaN."""
        return [line for line in self.found["results"] if not line["is_right"]]


class Inputs:
    """Arguments of a case on a side, made once for all tiles."""

    def __init__(self, side: Side, case: OpCase) -> None:
        self.side, self.case, self.arguments = side, case, case.arguments(seed=0)
        self._sets = [side.placed(case, self.arguments)]

    def sets(self, num_bytes: int) -> list[Placed]:
        """Returns sets of arguments that are together too large for a cache.

        Args:
          num_bytes: Bytes that a call reads and writes.
        """
        count = min(MOST_SETS, max(2, -(-ROTATED_BYTES // num_bytes))) if self.side.is_gpu else 2
        for seed in range(len(self._sets), count):
            self._sets.append(self.side.placed(self.case, self.case.arguments(seed)))
        return self._sets


def measure(inputs: Inputs, tiles: Changes, copy_rate: float) -> Line:
    """Compares one case with the specification and times it: the median of seven."""
    side, case, arguments = inputs.side, inputs.case, inputs.arguments
    operation = side.operation(case)
    results = side.run(operation, side.placed(case, arguments))
    error = max(case.errors(arguments, results))
    num_bytes = case.bytes_of(arguments, results)
    seconds = _seconds(inputs, num_bytes)
    median = statistics.median(seconds)
    return {
        "side": side.name,
        "function": case.function,
        "case": case.name,
        "dtype": case.dtype,
        "tiles": dict(tiles),
        "error": error,
        "is_right": error <= TOLERANCE[case.dtype],
        "bits": _hash(case, arguments, results),
        "us": median * 1e6,
        "us_spread": (max(seconds) - min(seconds)) * 1e6,
        "bytes": num_bytes,
        "limit_us": num_bytes / copy_rate * 1e6,
        "gigabytes_per_s": num_bytes / median / 1e9,
    }


def _seconds(inputs: Inputs, num_bytes: int) -> list[float]:
    side, sets = inputs.side, inputs.sets(num_bytes)
    timer = side.timer(side.operation(inputs.case), sets)
    rounds = rounds_for(timer, len(sets))
    return [timer(rounds) for _ in range(7)]


def _hash(case: OpCase, arguments: dict[str, Any], results: Sequence[np.ndarray]) -> str:
    """Returns a digest of the bits of all meaningful rows of the results."""
    rows = slice(None) if case.real_rows is None else case.real_rows(arguments)
    return hashlib.sha256(b"".join(x[rows].tobytes() for x in results)).hexdigest()[:16]


def line_of(line: Line) -> str:
    """A line for a terminal, under `HEADER`; the share is the limit's of the time."""
    name = f"{line['function']}, {line['case']}"
    cells = f"{line['side']:7}{name:40}{line['dtype']:10}{line['error']:9.1e}{line['us']:10.1f}"
    cells += f"{line['limit_us']:10.2f}{line['gigabytes_per_s']:8.1f}"
    share = line["limit_us"] / line["us"]
    tiles = "".join(f"  {name} {value}" for name, value in line["tiles"].items())
    return f"{cells}{share:7.0%}{tiles}" + ("" if line["is_right"] else "  WRONG")


def run(arguments: argparse.Namespace, command: str) -> Report:
    """Runs the cases that the options name."""
    if arguments.compile_at_once:
        _compile(arguments)
    report = Report(command, arguments.out, arguments.seconds)
    for name in (name for name in SIDES if name in arguments.sides):
        side = SIDES[name]()
        with side.with_ops(arguments.ops):
            rate = side.copy_rate()
            report.add_side(side, rate)
            for case in _cases(arguments, side.is_gpu):
                _add_lines(report, side, case, arguments.tiles, rate)
        side.release()
    report.compare_sides()
    return report


def _add_lines(
    report: Report, side: Side, case: OpCase, searched: Sequence[Changes], rate: float
) -> None:
    """Measures a case with each of the tiles."""
    inputs = None
    for tiles in searched:
        with side.with_tiles(case, tiles):
            if not report.may_begin(side, case):
                continue
            inputs = inputs or Inputs(side, case)
            try:
                report.add(measure(inputs, tiles, rate))
            except Exception as fault:
                if len(searched) == 1:
                    raise
                report.add_fault(side, case, tiles, fault)


def _compile(arguments: argparse.Namespace) -> None:
    """Runs every torch case with each of the tiles once, in processes of their own."""
    works = [(str(case), tiles) for case in _cases(arguments, True) for tiles in arguments.tiles]
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(arguments.compile_at_once, maxtasksperchild=16) as pool:
        pool.starmap(_run_once, [(arguments.name, arguments.ops, *work) for work in works])


def _run_once(name: str, ops: str, case_name: str, tiles: Changes) -> None:
    """Runs a case in torch; what cannot run is reported when it is timed."""
    side = SIDES["torch"]()
    (case,) = (case for case in table(name) if str(case) == case_name)
    with side.with_ops(ops), side.with_tiles(case, tiles), suppress(Exception):
        side.run(side.operation(case), side.placed(case, case.arguments(seed=0)))
    side.release()


def _cases(arguments: argparse.Namespace, is_gpu: bool) -> list[OpCase]:
    sizes = arguments.sizes or (["small", "large"] if is_gpu else ["small"])
    cases = [case for case in table(arguments.name) if re.search(arguments.cases, str(case))]
    return [case for case in cases if ("large" if case.is_large else "small") in sizes]


def options() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=tables(), help="a table of `tests/support/cases`")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--sizes", nargs="+", choices=("small", "large"))
    parser.add_argument("--cases", default="", help="regular expression of the cases")
    changes = "JSON: tiles that replace those of the GPU's file"
    parser.add_argument("--tiles", nargs="+", type=json.loads, default=[{}], help=changes)
    parser.add_argument(
        "--compile-at-once", type=int, default=0, metavar="N", help="processes that compile first"
    )
    parser.add_argument("--ops", choices=("bound", "plain"), default="bound")
    parser.add_argument("--seconds", type=float, default=300, help="start no case after this time")
    return parser


def main() -> int:
    """Prints and writes the table; the exit code is 1 where a result is wrong."""
    report = run(
        options().parse_args(), shlex.join(["python", "-m", "bench.kernels.op", *sys.argv[1:]])
    )
    for line in report.wrong:
        print(f"WRONG: {line['side']}, {line['function']}, {line['case']}", file=sys.stderr)
    return 1 if report.wrong or not report.found["results"] else 0


if __name__ == "__main__":
    sys.exit(main())
