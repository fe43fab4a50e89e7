"""The argument parser of a server's flags, with its `--help` and `--version`."""

import argparse
import platform
import sys
import typing
from collections.abc import Sequence
from dataclasses import Field, fields
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shared import VERSION
from shared.options.flags import ConfigError, spelling, spellings, switches, usual_value
from shared.options.options import HEADINGS, PARTS

SHELLS = ("bash", "zsh", "tcsh")
BACKEND_PACKAGES = ("torch", "triton", "jax", "jaxlib")
"""Distributions whose versions `--version` shows, where they are installed."""

_EPILOG = """\
examples:
  {prog} --model-path models/demo/target --port 8000
  {prog} --speculative-algorithm NGRAM --config flags.toml --port 8001

Every flag with its default is also in docs/server_flags.md, what does not work together in
docs/compatibility.md; a running server has the same at /capabilities."""


class FlagParser(argparse.ArgumentParser):
    """An argument parser whose errors are `ConfigError`."""

    def error(self, message: str) -> typing.NoReturn:
        """Raises the message as one sentence."""
        flag_names, _, fault = message.removeprefix("argument ").partition(": ")
        fault = "needs a value" if "expected one argument" in fault else f"is wrong: {fault}"
        raise ConfigError(f"{flag_names} {fault}; --help lists the flags")


def make_parser() -> FlagParser:
    """Makes the parser of a server's command line."""
    prog = _program()
    parser = FlagParser(
        prog=prog,
        usage="%(prog)s [--model-path PATH] [--FLAG VALUE ...] [@FILE ...]",
        description="Serves a model over HTTP with the APIs of OpenAI.",
        epilog=_EPILOG.format(prog=prog),
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        add_help=False,
    )
    add_flags(parser)
    return parser


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds every flag of a server to a parser."""
    group = parser.add_argument_group("Command line")
    group.add_argument("-h", "--help", action="help", help="show this help and exit")
    group.add_argument(
        "--version", action=_Version, nargs=0, help="show the versions of server and backends"
    )
    group.add_argument(
        "--config",
        action=_Once,
        metavar="FILE",
        help="TOML, JSON or YAML file of flags, names with dashes or underscores; a flag of the "
        "command line takes the place of the file's",
    )
    group.add_argument(
        "--print-completion",
        action=_Once,
        metavar="SHELL",
        help="print what makes a shell complete the flags of `tandem serve`, and exit: one of "
        + ", ".join(SHELLS),
    )
    for name, part in PARTS.items():
        group = parser.add_argument_group(HEADINGS[name])
        for item in fields(part):
            _add(group, item)


def help_of(item: "Field[Any]") -> str:
    """Returns the meaning of a flag with its choices and its default."""
    text, choices = item.metadata["help"], item.metadata.get("choices", ())
    meaning, stated, default = text.partition(" (default: ")
    if choices:
        meaning += f": one of {', '.join(choices)}"
    if stated or item.default is False:
        return meaning + stated + default
    return f"{meaning} (default: {'none' if item.default is None else item.default})"


def _add(group: Any, item: "Field[Any]") -> None:
    names = (spelling(item.name), *item.metadata.get("aliases", ()))
    hidden = [name for name in spellings(item) if name not in names]
    text = help_of(item).replace("%", "%%")
    rules: dict[str, Any] = {"dest": item.name, "action": "store_true"}
    if item.default is not False:
        usual = partial(usual_value, item)
        rules |= {"action": _Once, "metavar": _metavar(item), "type": usual}
    group.add_argument(*names, **rules, help=text)
    if hidden:
        group.add_argument(*hidden, **rules, help=argparse.SUPPRESS)
    for name, value in switches(item).items():
        group.add_argument(
            name, dest=item.name, action=_Once, nargs=0, const=value, help=argparse.SUPPRESS
        )


def _metavar(item: "Field[Any]") -> str:
    rules = item.metadata
    if "metavar" in rules:
        return rules["metavar"]
    if rules.get("is_share"):
        return "SHARE"
    return "N" if "low" in rules else "PATH" if rules.get("is_path") else "TEXT"


class _Once(argparse.Action):
    """Stores a flag's value and refuses a second, other one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        values = self.const if self.nargs == 0 else values
        if values == "":
            raise ConfigError(f"{option_string} is empty; give a value or leave the flag out")
        if getattr(namespace, self.dest, values) != values:
            raise ConfigError(f"{option_string} is given twice; leave one out")
        setattr(namespace, self.dest, values)


class _Version(argparse.Action):
    """Prints the versions of the server and of the packages of the backends, and exits."""

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
    found = [f"tandem {VERSION}", f"Python {platform.python_version()}"]
    for name in BACKEND_PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help with the value's name once behind all spellings of a flag."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(action.option_strings)
        return f"{names} {action.metavar}" if action.metavar and action.nargs != 0 else names


def _program(argv: Sequence[str] = sys.argv) -> str:
    """Returns the command that started this process, as the reader typed it."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name.endswith("_impl.serve"):
        return f"python -m {spec.name}"
    return f"{Path(argv[0]).name} serve"
