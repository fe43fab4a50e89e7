"""The command `tandem`: `serve`, `route`, `bench` and `env`."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from bench import __path__ as bench_path
from shared import VERSION, children
from tandem import backends, environment

EXIT_REFUSED = 2
USAGE = """\
usage: tandem serve [--backend torch|jax] [FLAG ...]  serve a model; --help lists the flags
       tandem route --servers URL[,URL ...]           route to running servers; see --help
       tandem bench PROGRAM [FLAG ...]                run a benchmark; `tandem bench` lists them
       tandem env                                     print the versions of this installation
       tandem --version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the process's exit code."""
    name, *rest = (sys.argv[1:] if argv is None else [*argv]) or ["--help"]
    if name in COMMANDS:
        return COMMANDS[name](rest)
    if name in ("-h", "--help"):
        return _print(USAGE)
    if name == "--version":
        return _print(f"tandem {VERSION}\n")
    return _refuse(f"{name} is no command of tandem. Use {', '.join(COMMANDS)} or --version.")


def serve(argv: Sequence[str]) -> int:
    """Serves with one backend; every other flag is the server's."""
    parser = argparse.ArgumentParser(prog="tandem serve", add_help=False, allow_abbrev=False)
    parser.add_argument("--backend", choices=backends.BACKENDS, default=backends.default())
    given, flags = parser.parse_known_args([*argv])
    if not {"-h", "--help"} & {*flags} and (fault := backends.fault(given.backend)):
        return _refuse(fault)
    return import_module(f"{given.backend}_impl.serve").main(flags)


def route(argv: Sequence[str]) -> int:
    """Routes requests to running servers."""
    return import_module("shared.router.starting").main(argv)


def run_bench(argv: Sequence[str]) -> int:
    """Replaces this process by a benchmark."""
    if not argv or argv[0] in ("-h", "--help"):
        return _print("".join(f"tandem bench {name}\n" for name in programs()))
    name, *rest = argv
    if name not in programs():
        return _refuse(f"{name} is no benchmark. `tandem bench` lists them.")
    command = children.command(f"bench.{name}", *rest)
    os.execve(command[0], command, children.environment())


def print_environment(argv: Sequence[str]) -> int:
    """Prints the versions that a bug report needs."""
    if argv:
        return _refuse(f"{argv[0]} is no flag of `tandem env`, which has none.")
    return _print("".join(f"{line}\n" for line in environment.lines()))


def programs() -> list[str]:
    """Names of the benchmarks, as of modules below `bench`."""
    folder = Path(bench_path[0])
    paths = [
        path.relative_to(folder).with_suffix("")
        for path in sorted(folder.rglob("*.py"))
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    ]
    return [".".join(path.parts).removesuffix(".__main__") for path in paths]


COMMANDS = {"serve": serve, "route": route, "bench": run_bench, "env": print_environment}


def _print(text: str) -> int:
    sys.stdout.write(text)
    return 0


def _refuse(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return EXIT_REFUSED
