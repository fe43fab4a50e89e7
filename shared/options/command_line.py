"""Command line of the server: parses flags into `Options`.

A flag that is unknown, unsupported or given twice is an error that names it. `@FILE` is replaced by
the words of a file; `--config FILE` reads flags with typed values.
"""

import difflib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any

from shared.options.completion import completion_script
from shared.options.config_file import read_config, read_words
from shared.options.flag_parser import FlagParser, make_parser
from shared.options.flags import ConfigError, spelling, spellings, switches
from shared.options.options import PARTS, Options
from shared.options.unsupported_flags import (
    NEUTRAL,
    UNSUPPORTED_FLAGS,
    UNSUPPORTED_PREFIXES,
    asks_for_nothing,
)

FLAGS: dict[str, "Field[Any]"] = {
    name: item
    for part in PARTS.values()
    for item in fields(part)
    for name in (*spellings(item), *switches(item))
}
"""Field of each flag, by every spelling."""

SHOWN = frozenset(
    name
    for item in FLAGS.values()
    for name in (spelling(item.name), *item.metadata.get("aliases", ()))
)
"""Spellings that `--help` lists and that errors suggest."""


def parse(argv: Sequence[str]) -> Options:
    """Parses a command line and the files that it names.

    Raises:
      ConfigError: A flag is unknown, unsupported or out of range, or contradicts another.
      SystemExit: The command line requests help, versions or a completion script.
    """
    parser = make_parser()
    words = _with_effect([*_expanded(argv)])
    _check_flags(words, parser)
    parsed, stray = parser.parse_known_args(words)
    if stray:
        raise ConfigError(f"{stray[0]} is not a flag or the value of one; --help lists the flags")
    given = vars(parsed)
    if shell := given.pop("print_completion", None):
        print(completion_script(shell))
        parser.exit()
    path = given.pop("config", None)
    values = {} if path is None else read_config(path, FLAGS, lambda name: _check(name, FLAGS))
    kinds = {item.name: _kind(item.metadata) for item in FLAGS.values()}
    return Options.from_values(values | {name: kinds[name](name, given[name]) for name in given})


def words_of(options: Options, **changes: Any) -> list[str]:
    """Returns a command line with the flags that were set explicitly.

    Args:
      options: Options of a command line and its config file.
      changes: Values of other flags, or None to remove a flag.
    """
    names = options.explicit_flags | {"fp8_activations"}  # set by `--quantization w8a8_fp8`
    given = {
        name: getattr(part, name)
        for part in map(vars(options).get, PARTS)
        for name in names
        if hasattr(part, name)
    }
    words = []
    for name, value in (given | changes).items():
        if value is True:
            words.append(spelling(name))
        elif value is not None and value is not False:
            words.append(f"{spelling(name)}={value}")
    return words


def _expanded(argv: Iterable[str]) -> Iterator[str]:
    """Yields the words of a command line, with each `@FILE` replaced by its words."""
    for word in argv:
        if word.startswith("@"):
            yield from read_words(word[1:])
        else:
            yield word


def _with_effect(words: Sequence[str]) -> list[str]:
    """Returns the words without flags that request the only supported behaviour."""
    kept, left = [], deque(words)
    while left:
        word = left.popleft()
        name, has_value, value = word.partition("=")
        if name in NEUTRAL and not has_value and left and asks_for_nothing(name, left[0]):
            left.popleft()
        elif not asks_for_nothing(name, value if has_value else None):
            kept.append(word)
    return kept


def _check_flags(words: Sequence[str], parser: FlagParser) -> None:
    for word in words:
        if word.startswith("-") and not _is_number(word):
            _check(word.split("=", 1)[0], parser._option_string_actions)


def _kind(rules: Mapping[str, Any]) -> Callable[[str, Any], Any]:
    """Returns the conversion of a flag's text to its value."""
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
        raise ConfigError(f"{spelling(name)} must be an integer, got {text}") from None


def _is_number(word: str) -> bool:
    return word[1:].replace(".", "").isdigit()


def _check(word: str, known: Iterable[str]) -> None:
    """Raises `ConfigError` for an unknown or unsupported flag."""
    names = sorted(known)
    if word in names:
        return
    if word in UNSUPPORTED_FLAGS:
        raise ConfigError(f"{word} is not supported: {UNSUPPORTED_FLAGS[word]}")
    if word.startswith(UNSUPPORTED_PREFIXES):
        raise ConfigError(f"{word} is not supported; remove the flag")
    shown = [name for name in names if name in SHOWN or name not in FLAGS]
    near = difflib.get_close_matches(word, shown, n=1)
    hint = f"did you mean {near[0]}?" if near else "--help lists the flags"
    raise ConfigError(f"unknown flag {word}; {hint}")
