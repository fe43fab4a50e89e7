"""Completion of flags and their values in a shell, written by shtab."""

import argparse
from dataclasses import fields
from importlib import import_module
from typing import Any

from shared.options.algorithms import KNOWN_ALGORITHMS
from shared.options.flag_parser import SHELLS, add_flags
from shared.options.flags import ConfigError
from shared.options.options import PARTS

COMMAND = "tandem"
BACKENDS = ("torch", "jax")


def completion_script(shell: str) -> str:
    """Returns the script that makes a shell complete the flags of `tandem serve`.

    Raises:
      ConfigError: The shell is unknown, or shtab is not installed.
    """
    if shell not in SHELLS:
        raise ConfigError(f"--print-completion must be one of {', '.join(SHELLS)}, got {shell}")
    try:
        shtab: Any = import_module("shtab")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--print-completion needs shtab, which is not installed; install the extra completion"
        ) from error
    parser = argparse.ArgumentParser(prog=COMMAND)
    commands = parser.add_subparsers(dest="command")
    serve = commands.add_parser("serve", add_help=False, help="serve a model")  # shtab wants help
    serve.add_argument("--backend", choices=BACKENDS, help="what runs the model")
    add_flags(serve)
    _add_values(serve, shtab)
    return shtab.complete(parser, shell)


def _add_values(parser: argparse.ArgumentParser, shtab: Any) -> None:
    """Adds the values that a shell offers; `parse` checks values with sentences of its own."""
    rules = {item.name: item.metadata for part in PARTS.values() for item in fields(part)}
    choices = {name: rule["choices"] for name, rule in rules.items() if "choices" in rule}
    choices |= {"speculative_algorithm": KNOWN_ALGORITHMS, "print_completion": SHELLS}
    for action in parser._actions:
        if action.dest in choices:
            action.choices = choices[action.dest]
        elif action.dest == "config" or rules.get(action.dest, {}).get("is_path"):
            action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
