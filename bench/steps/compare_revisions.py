"""Step times of two checkouts on one card: rounds of both in turns, within one call.

    python -m bench.steps.compare_revisions --base ../before --model bench/shapes/qwen3-8b \
        --backend torch jax --drafts none --batch 1 --out FILE.json

Each checkout serves each backend from a process of its own; all stay loaded, and one works at a
time. So a card's clock and temperature are the same for both. Outputs of both are compared.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common.environment import write_results
from bench.steps.decode_steps import decode_options, side_options

HERE = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("revision_worker.py")


class Side:
    """Process that serves one backend from one checkout."""

    def __init__(self, tree: Path, arguments: Sequence[str]) -> None:
        read, write = os.pipe()
        # One JAX process would take most of the memory that all share.
        variables = {"PYTHONPATH": str(tree), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(write), *arguments],
            cwd=tree,
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            text=True,
            pass_fds=[write],
        )
        os.close(write)
        self._answers = os.fdopen(read)
        self.ms = list[float]()
        self.outputs: Any = None

    def started(self) -> dict[str, str] | None:
        """Returns versions and device once the engine is ready; None if its start failed."""
        line = self._answers.readline()
        return json.loads(line) if line else None

    def round(self) -> None:
        """Serves the batch once.

        Raises:
          RuntimeError: The process ended.
        """
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        line = self._answers.readline()
        if not line:
            raise RuntimeError("a compared process ended; its error is above")
        answer = json.loads(line)
        self.ms += answer["ms"]
        self.outputs = answer["outputs"]

    def end(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(options: argparse.Namespace, backends: Sequence[str]) -> list[dict[str, Any]]:
    """Returns a line for each backend that started in both checkouts."""
    trees = {"before": options.base.resolve(), "after": HERE}
    sides = {
        (backend, name): Side(tree, _arguments(options, backend))
        for backend in backends
        for name, tree in trees.items()
    }
    try:
        started = {place: side.started() for place, side in sides.items()}
        found = [each for each in backends if all(started[each, name] for name in trees)]
        for number in range(options.rounds):
            for backend in found:
                for name in (*trees,) if number % 2 else (*reversed(trees),):
                    sides[backend, name].round()
        return [
            {"model": options.model.name, "backend": backend, "versions": started[backend, "after"]}
            | _line(*(sides[backend, name] for name in trees))
            for backend in found
        ]
    finally:
        for side in sides.values():
            side.end()


def _arguments(options: argparse.Namespace, backend: str) -> list[str]:
    """Returns the arguments of one process."""
    found = ["--model", str(options.model), "--load-format", options.load_format]
    found += ["--output", str(options.output), "--dtype", options.dtype, "--flags", options.flags]
    found += ["--input", str(options.input), "--steps", str(options.steps)]
    found += ["--backend", backend, "--drafts", *options.drafts, "--batch", str(options.batch)]
    return found + ["--folders", *options.folders]


def _line(before: Side, after: Side) -> dict[str, Any]:
    medians = [statistics.median(side.ms) for side in (before, after)]
    return {
        "before_ms": round(medians[0], 4),
        "after_ms": round(medians[1], 4),
        "change": round(medians[1] / medians[0] - 1, 5),
        "fastest_change": round(min(after.ms) / min(before.ms) - 1, 5),
        "blocks": len(after.ms),
        "outputs_are_equal": before.outputs == after.outputs,
    }


def main() -> int:
    """Prints and writes the lines; the exit code is 1 if a backend is missing."""
    parser = decode_options(__doc__)
    side_options(parser)
    parser.add_argument("--base", type=Path, required=True, help="the other checkout")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    text = "serve the backends one after the other, for models of which two fit into memory"
    parser.add_argument("--in-turns", action="store_true", help=text)
    options = parser.parse_args()
    groups = [[each] for each in options.backend] if options.in_turns else [options.backend]
    command = shlex.join(["python", "-m", "bench.steps.compare_revisions", *sys.argv[1:]])
    lines = list[dict[str, Any]]()
    for group in groups:
        for line in compare(options, group):
            lines.append(line)
            print(*options.drafts, line, flush=True)
        if options.out:
            write_results(options.out, {"command": command, "lines": lines})
    return 0 if len(lines) == len(options.backend) else 1


if __name__ == "__main__":
    sys.exit(main())
