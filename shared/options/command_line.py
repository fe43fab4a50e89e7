"""The command line of a server: flags in, `Options` out.

A flag that is unknown, unsupported or given twice is an error with the flag's name.
"""

import argparse
import difflib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from shared.options.flags import ConfigError, spelling
from shared.options.not_served import NOT_SUPPORTED, NOT_SUPPORTED_PREFIXES
from shared.options.options import PARTS, Options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        flag_names, _, fault = message.removeprefix("argument ").partition(": ")
        fault = "needs a value" if "expected one argument" in fault else f"is wrong: {fault}"
        raise ConfigError(f"{flag_names} {fault}; --help lists the flags")


class _Once(argparse.Action):
    """Stores a flag's value and refuses a second, other one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values == "":
            raise ConfigError(f"{option_string} is empty; give a value or leave the flag out")
        if getattr(namespace, self.dest, values) != values:
            raise ConfigError(f"{option_string} is given twice; leave one out")
        setattr(namespace, self.dest, values)


def parse(argv: Sequence[str]) -> Options:
    """The options of a command line.

    Raises:
      ConfigError: A flag is unknown, not supported, out of range or contradicts another.
    """
    parser = _make_parser()
    known = set(parser._option_string_actions)
    for word in argv:
        if word.startswith("-") and not _is_number(word):
            _check_known(word.split("=", 1)[0], known)
    parsed, stray = parser.parse_known_args(list(argv))
    if stray:
        raise ConfigError(f"{stray[0]} belongs to no flag; --help lists the flags")
    given = vars(parsed)
    kinds = {name: kind for part in PARTS.values() for name, kind in _kinds(part).items()}
    return Options.from_values({name: kinds[name](name, given[name]) for name in given})


def _make_parser() -> _Parser:
    parser = _Parser(
        prog="serve", allow_abbrev=False, argument_default=argparse.SUPPRESS, add_help=True
    )
    for part in PARTS.values():
        group = parser.add_argument_group(part.__doc__)
        for item in fields(part):
            _add(group, item)
    return parser


def _add(group: Any, item: "Field[Any]") -> None:
    names = (spelling(item.name), *item.metadata.get("aliases", ()))
    text = item.metadata["help"].replace("%", "%%")
    if item.default not in (None, MISSING, False) and "default" not in text:
        text += f" (default: {item.default})"
    if item.default is False:
        group.add_argument(*names, dest=item.name, action="store_true", help=text)
    else:
        metavar = item.metadata.get("metavar", "N" if "low" in item.metadata else "X")
        group.add_argument(*names, dest=item.name, action=_Once, metavar=metavar, help=text)


def _kinds(part: type) -> dict[str, Callable[[str, Any], Any]]:
    """How the text of each field's flag becomes its value."""
    return {item.name: _kind(item.metadata) for item in fields(part)}


def _kind(rules: Mapping[str, Any]) -> Callable[[str, Any], Any]:
    if "is_share" in rules:
        return _share
    return _whole_number if "low" in rules else lambda name, value: value


def _share(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{spelling(name)} must be a number, got {text}") from None


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{spelling(name)} must be a whole number, got {text}") from None


def _is_number(word: str) -> bool:
    return word[1:].replace(".", "").isdigit()


def _check_known(word: str, known: set[str]) -> None:
    if word in known:
        return
    if word in NOT_SUPPORTED:
        raise ConfigError(f"{word} is not supported: {NOT_SUPPORTED[word]}")
    if word.startswith(NOT_SUPPORTED_PREFIXES):
        raise ConfigError(f"{word} is not supported; leave the flag out")
    near = difflib.get_close_matches(word, sorted(known), n=1)
    hint = f"did you mean {near[0]}?" if near else "--help lists the flags"
    raise ConfigError(f"{word} is no flag of this server; {hint}")
