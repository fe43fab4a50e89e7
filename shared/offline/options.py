"""Options of `LLM`: the server's flags as Python names, validated by name and type."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, fields
from typing import Any

from shared.offline.values import number, truth, whole_number
from shared.options.command_line import parse
from shared.options.disaggregation import DisaggregationOptions
from shared.options.flags import ConfigError, spelling, spellings, switches, usual_value
from shared.options.observing import ObservingOptions
from shared.options.options import PARTS, Options
from shared.options.server import ServerOptions
from shared.options.unsupported_flags import UNSUPPORTED_FLAGS, asks_for_nothing
from shared.text.tokenizer import is_text

DEFAULT_LOG_LEVEL = "warning"
"""Default log level of `LLM`, at which the startup prints no progress."""

OF_A_SERVER = (
    {
        item.name
        for part in (ServerOptions, ObservingOptions, DisaggregationOptions)
        for item in fields(part)
    }
    | {"speculative_ngram_external_corpus_path"}
) - {"sampling_defaults", "reasoning_parser", "tool_call_parser", "log_level"}
"""Options that have no meaning without the HTTP server."""

_NUMBERS_AS_TEXT = {"speculative_simulate_accept_length"}
"""String options that also accept a number."""

_FIELDS: dict[str, Field[Any]] = {
    item.name: item for part in PARTS.values() for item in fields(part)
}


def _python_name(flag: str) -> str:
    """Returns the option of a flag: `--page-size` is `page_size`."""
    return flag.removeprefix("--").replace("-", "_")


_NAMES = {name: name for name in _FIELDS} | {
    _python_name(alias): name for name, item in _FIELDS.items() for alias in spellings(item)
}
"""Option of each spelling, including aliases."""

_SWITCHES = {
    _python_name(flag): (name, value)
    for name, item in _FIELDS.items()
    for flag, value in switches(item).items()
}
"""Options that are True or False and set another option, with the value that it gets."""

_FLAG = re.compile(r"(?<!\w)--([a-z][a-z0-9-]*)(?:[ =]([^\s`;,:)]*[^\s`;,:).]))?")
"""Pattern of a flag with its value in a sentence; a part of a path does not match."""

_UNSUPPORTED = {_python_name(flag): reason for flag, reason in UNSUPPORTED_FLAGS.items()}


def read_options(given: Mapping[str, Any]) -> Options:
    """Parses keyword arguments with the validation of the command line.

    Raises:
      ConfigError: A name is unknown or belongs to the HTTP server, or a value is invalid; one
        sentence with Python names of options.
    """
    values: dict[str, Any] = {"log_level": DEFAULT_LOG_LEVEL}
    spelled: dict[str, str] = {}
    for name, value in given.items():
        option = _known(name, value)
        if option is None or value is None:
            continue
        if name in _SWITCHES:
            if not _is_on(name, value):
                continue
            read = _SWITCHES[name][1]
        else:
            read = usual_value(_FIELDS[option], _read(name, _FIELDS[option], value))
        if option in spelled and values[option] != read:
            raise ConfigError(f"{spelled[option]} and {name} are the same option; remove one")
        values[option], spelled[option] = read, name
    with python_words():
        return parse([*_words(values)])


@contextmanager
def python_words() -> Iterator[None]:
    """Replaces flags by Python names in the errors that the body raises.

    Raises:
      ConfigError: The body raised a ValueError whose sentence has flags.
    """
    try:
        yield
    except ValueError as error:
        said = in_python(str(error))
        if said == str(error):
            raise
        raise ConfigError(said) from error


def in_python(sentence: str) -> str:
    """Returns a sentence with `page_size=16` in place of `--page-size 16`."""
    found = re.sub(
        r"(?<!\w)--([a-z][a-z0-9-]*)(?:[ =]([^\s`;,:)]*[^\s`;,:).]))?", _option, sentence
    )
    found = found.replace("start the server with", "create the LLM with")
    return re.sub(r"\bflag(s?)\b", r"option\1", found)


def _option(match: re.Match[str]) -> str:
    """Returns an option, with its value if the flag has a valid one."""
    name, value = _python_name(match[1]), match[2]
    if value is None:
        return name
    item = _FIELDS.get(_NAMES.get(name, ""))
    choices = () if item is None else item.metadata.get("choices", ())
    if re.fullmatch(r"-?\d+(\.\d+)?", value):
        return f"{name}={value}"
    is_word = value in choices or (name == "speculative_algorithm" and value.isupper())
    return f'{name}="{value}"' if is_word else f"{name} {value}"


def _known(name: str, value: Any) -> str | None:
    """Returns the option of a name; None if it is unsupported but its value requests nothing."""
    if _NAMES.get(name) in OF_A_SERVER:
        raise ConfigError(f"{name} is an option of the HTTP server; remove it")
    if name in _NAMES:
        return _NAMES[name]
    if name in _SWITCHES:
        return _SWITCHES[name][0]
    if asks_for_nothing(spelling(name), None if value is None or truth(value) else str(value)):
        return None
    if name in _UNSUPPORTED:
        if value is None or truth(value) is False:
            return None
        raise ConfigError(f"{name} is not supported: {in_python(_UNSUPPORTED[name])}")
    names = sorted(name for name, option in _NAMES.items() if option not in OF_A_SERVER)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else "docs/server_flags.md lists the options"
    raise ConfigError(f"{name} is not an option of LLM; {hint}")


def _read(name: str, item: Field[Any], value: Any) -> Any:
    """Returns the value of an option, converted to its type."""
    read, noun = _kind(item)
    if (found := read(value)) is None:
        raise ConfigError(f"{name} must be {noun}, got {value!r:.60}")
    return found


def _is_on(name: str, value: Any) -> bool:
    """Returns the value of an option that is True or False."""
    if (found := truth(value)) is None:
        raise ConfigError(f"{name} must be True or False, got {value!r:.60}")
    return found


def _kind(item: Field[Any]) -> tuple[Callable[[Any], Any], str]:
    """Returns the converter of an option's values (None: invalid) and the name of its type."""
    rules = item.metadata
    if item.default is False:
        return truth, "True or False"
    if "low" in rules:
        return (number, "a number") if "is_share" in rules else (whole_number, "a whole number")
    if "is_path" in rules:
        return _path, "a path"
    if "names_paths" in rules:
        return _named_paths, "a dict of names and paths"
    if item.name in _NUMBERS_AS_TEXT:
        return _text_or_number, "a number or a string"
    return _text, "a string"


def _text(value: Any) -> str | None:
    return str(value) if is_text(value) else None


def _path(value: Any) -> str | None:
    return _text(os.fspath(value)) if isinstance(value, os.PathLike) else _text(value)


def _named_paths(value: Any) -> str | None:
    """Returns a dict of paths by name as the text of its flag."""
    if not isinstance(value, Mapping):
        return _text(value)
    paths = {name: _path(path) for name, path in value.items()}
    if not paths or not all(map(is_text, paths)) or None in paths.values():
        return None
    return ",".join(f"{name}={path}" for name, path in paths.items())


def _text_or_number(value: Any) -> str | None:
    return _text(value) if number(value) is None else str(number(value))


def _words(values: Mapping[str, Any]) -> Iterator[str]:
    """Yields the options as arguments of the server's command line."""
    for name, value in values.items():
        if value is True:
            yield spelling(name)
        elif value is not False:
            yield f"{spelling(name)}={value}"
