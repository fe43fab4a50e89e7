"""Argument parser of the server, with `--help` and `--version`."""

import argparse
import platform
import sys
import typing
from collections.abc import Collection, Sequence
from dataclasses import Field, fields
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shared import VERSION
from shared.options.flags import ConfigError, spelling, spellings, switches, usual_value
from shared.options.options import HEADINGS, PARTS
from shared.revision import revision

SHELLS = ("bash", "zsh", "tcsh")
BACKEND_PACKAGES = ("torch", "triton", "jax", "jaxlib")
"""Packages whose versions `--version` prints if they are installed."""

_EPILOG = """\
examples:
  {prog} --model-path Qwen/Qwen3.5-9B --speculative-algorithm NEXTN
  {prog} --config flags.toml --tp-size 2 --port 8001

documentation:
  docs/server_flags.md          all flags with defaults and choices
  docs/speculative_decoding.md  drafting methods and when to use each
  docs/compatibility.md         unsupported combinations, also at GET /capabilities"""


class FlagParser(argparse.ArgumentParser):
    """An argument parser whose errors are `ConfigError`."""

    def error(self, message: str) -> typing.NoReturn:
        """Raises the message of argparse as one sentence."""
        flag_names, _, fault = message.removeprefix("argument ").partition(": ")
        is_bare = fault in ("expected one argument", "expected at least one argument")
        fault = "requires a value" if is_bare else f"is invalid: {fault}"
        raise ConfigError(f"{flag_names} {fault}; --help lists the flags")


def make_parser(prog: str | None = None, names: Collection[str] | None = None) -> FlagParser:
    """Returns the parser of a command line.

    Args:
      prog: Command in the help; None: the command of a server that started this process.
      names: Fields with an accepted flag; None: all.
    """
    prog = prog or _program()
    parser = FlagParser(
        prog=prog,
        usage="%(prog)s [--model-path MODEL] [--flag VALUE ...] [@FILE ...]",
        description="Serves a model over HTTP with an OpenAI-compatible API.",
        epilog=_EPILOG.format(prog=prog),
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        add_help=False,
    )
    add_flags(parser, names)
    return parser


def add_flags(parser: argparse.ArgumentParser, names: Collection[str] | None = None) -> None:
    """Adds the flags of these fields to a parser, or all flags."""
    group = parser.add_argument_group("Command line")
    group.add_argument("-h", "--help", action="help", help="show this help and exit")
    group.add_argument(
        "--version",
        action=_VersionAction,
        nargs=0,
        help="print the version, the revision and the backend packages, and exit",
    )
    group.add_argument(
        "--config",
        action=_Once,
        metavar="FILE",
        help="TOML, JSON or YAML file of flags; flags on the command line take precedence",
    )
    group.add_argument(
        "--print-completion",
        action=_Once,
        metavar="SHELL",
        help="print a completion script for `tandem serve`, and exit: one of " + ", ".join(SHELLS),
    )
    for name, part in PARTS.items():
        group = parser.add_argument_group(HEADINGS[name])
        for item in fields(part):
            if names is None or item.name in names:
                _add(group, item)


def help_of(item: "Field[Any]") -> str:
    """Returns the help text of a flag with its default."""
    text = item.metadata["help"]
    if " (default: " in text or item.default is False:
        return text
    return f"{text} (default: {'none' if item.default is None else item.default})"


def _add(group: Any, item: "Field[Any]") -> None:
    names = (spelling(item.name), *item.metadata.get("aliases", ()))
    hidden = [name for name in spellings(item) if name not in names]
    text = help_of(item).replace("%", "%%")
    rules: dict[str, Any] = {"dest": item.name, "action": "store_true"}
    if item.default is not False:
        usual = partial(usual_value, item)
        rules |= {"action": _Once, "metavar": _metavar(item), "type": usual}
        rules |= {"nargs": "+"} if item.metadata.get("names_paths") else {}
    group.add_argument(*names, **rules, help=text)
    if hidden:
        group.add_argument(*hidden, **rules, help=argparse.SUPPRESS)
    for name, value in switches(item).items():
        group.add_argument(
            name, dest=item.name, action=_Once, nargs=0, const=value, help=argparse.SUPPRESS
        )


def _metavar(item: "Field[Any]") -> str:
    rules = item.metadata
    if "choices" in rules:
        return f"{{{','.join(rules['choices'])}}}"
    if "metavar" in rules:
        return rules["metavar"]
    if rules.get("is_share"):
        return "FRACTION"
    return "N" if "low" in rules else "PATH" if rules.get("is_path") else "TEXT"


class _Once(argparse.Action):
    """Stores the value of a flag; a second, different value is an error."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        values = self.const if self.nargs == 0 else values
        values = ",".join(values) if isinstance(values, list) else values
        if values == "":
            raise ConfigError(f"{option_string} is empty; give a value, or remove the flag")
        if getattr(namespace, self.dest, values) != values:
            raise ConfigError(f"{option_string} is given twice; remove one")
        setattr(namespace, self.dest, values)


class _VersionAction(argparse.Action):
    """Prints the versions of the server and of the backend packages, and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        print(versions())
        parser.exit()


def versions() -> str:
    """Returns the versions of the server, of Python and of each installed backend package."""
    commit = revision()
    server = f"tandem {VERSION}" + (f" ({commit})" if commit else "")
    found = [server, f"Python {platform.python_version()}"]
    for name in BACKEND_PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help formatter that prints the value of a flag once, after all spellings."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(action.option_strings)
        return f"{names} {action.metavar}" if action.metavar and action.nargs != 0 else names


def _program(argv: Sequence[str] = sys.argv) -> str:
    """Returns the command that started this process, as typed."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name.endswith("_impl.serve"):
        return f"python -m {spec.name}"
    return f"{Path(argv[0]).name} serve"
