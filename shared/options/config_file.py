"""Files of flags: `--config FILE` with typed values, and `@FILE` with command-line words."""

import json
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field
from importlib import import_module
from pathlib import Path
from typing import Any

from shared.options.flags import ConfigError, check_value, spelling, switches, usual_value
from shared.options.unsupported_flags import asks_for_nothing


def read_config(
    path: str, fields: Mapping[str, "Field[Any]"], check_known: Callable[[str], None]
) -> dict[str, Any]:
    """Reads the flags of a TOML, JSON or YAML file; the extension selects the format.

    Args:
      path: File with a flat table; names are flags with dashes or underscores.
      fields: Field of each flag, by every spelling.
      check_known: Raises `ConfigError` for an unknown flag.

    Returns:
      Values by field name.

    Raises:
      ConfigError: The file cannot be read, or a name or value is invalid.
    """
    values: dict[str, Any] = {}
    for key, value in _table(path):
        flag_name = "--" + str(key).replace("_", "-")
        try:
            if isinstance(value, dict | _Pairs):
                raise ConfigError(
                    f"{key} is a table, and flags must not be nested; remove the table header"
                )
            if flag_name == "--config":
                raise ConfigError(
                    "--config must be given on the command line; remove it from the file"
                )
            if asks_for_nothing(flag_name, None if value is True else str(value)):
                continue
            check_known(flag_name)
            item = fields[flag_name]
            if item.name in values:
                raise ConfigError(f"{spelling(item.name)} is given twice; remove one")
            values[item.name] = _value(flag_name, item, value)
            check_value(item, values[item.name])
        except ConfigError as error:
            raise ConfigError(f"--config {path}: {error}") from error
    return {name: value for name, value in values.items() if value is not False}


def read_words(path: str) -> list[str]:
    """Reads the words of an `@FILE` by the rules of a shell; `#` begins a comment.

    Raises:
      ConfigError: The file cannot be read, or has an unclosed quote.
    """
    text = _text(path, f"@{path}", "; write a value that begins with @ as --flag=@value")
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(f"@{path} cannot be read: {error}") from error
    if nested := [word for word in words if word.startswith("@")]:
        raise ConfigError(
            f"@{path} must not name another file, {nested[0]}; give it on the command line"
        )
    return words


def _text(path: str, name: str, hint: str = "") -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} cannot be read: it is not UTF-8 text") from error
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}{hint}") from error


def _table(path: str) -> Sequence[tuple[str, Any]]:
    """Returns the names and values of a file in order; a name may occur twice."""
    readers = {".toml": _read_toml, ".json": _read_json, ".yaml": _read_yaml, ".yml": _read_yaml}
    ending = Path(path).suffix
    if ending not in readers:
        raise ConfigError(f"--config {path} must end in .toml, .json, .yaml or .yml")
    text = _text(path, f"--config {path}")
    try:
        return readers[ending](text)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config {path} cannot be read: {reason}") from error


def _read_toml(text: str) -> Sequence[tuple[str, Any]]:
    return [*tomllib.loads(text).items()]


class _Pairs(list[tuple[str, Any]]):
    """JSON object that keeps duplicate names."""


def _read_json(text: str) -> Sequence[tuple[str, Any]]:
    pairs = json.loads(text, object_pairs_hook=_Pairs)
    if not isinstance(pairs, _Pairs):
        raise ValueError("it must be an object")
    return pairs


def _read_yaml(text: str) -> Sequence[tuple[str, Any]]:
    try:
        yaml: Any = import_module("yaml")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--config requires PyYAML for YAML files; install pyyaml, or give a TOML or JSON file"
        ) from error
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise ValueError("it must be a mapping")
        return [
            (loader.construct_object(key), loader.construct_object(value, deep=True))
            for key, value in node.value
        ]
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _value(name: str, item: "Field[Any]", value: Any) -> Any:
    """Returns the value of a flag in the type of its field."""
    is_switch = name in switches(item)
    read, wanted = (_switch, "true or false") if is_switch else _reader(item)
    found = usual_value(item, read(value))
    if found is None:
        raise ConfigError(f"{name} must be {wanted}, got {json.dumps(value, default=str)}")
    if found == "":
        raise ConfigError(f"{name} is empty; give a value, or remove it")
    if is_switch:
        return switches(item)[name] if found else item.default
    return found


def _reader(item: "Field[Any]") -> tuple[Callable[[Any], Any], str]:
    """Returns a reader of a field's values (None: invalid) and the name of its type."""
    rules = item.metadata
    if item.default is False:
        return _switch, "true or false"
    if rules.get("is_share"):
        return _number, "a number"
    if "low" in rules:
        return lambda value: value if type(value) is int else None, "an integer"
    if rules.get("is_list"):
        return _joined, "a string, or a list of strings or numbers"
    return lambda value: value if isinstance(value, str) else None, "a string"


def _switch(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) else None


def _joined(value: Any) -> str | None:
    """Returns a list as a string with commas."""
    items = value if isinstance(value, list) else [value]
    return ",".join(map(str, items)) if all(type(x) in (str, int, float) for x in items) else None
