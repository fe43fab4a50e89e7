"""Files of flags: `--config FILE`, with values of their types, and `@FILE`, with words."""

import json
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field
from importlib import import_module
from pathlib import Path
from typing import Any

from shared.options.flags import ConfigError, check_value, spelling, switches, usual_value
from shared.options.not_served import asks_for_nothing


def read_config(
    path: str, fields: Mapping[str, "Field[Any]"], check_known: Callable[[str], None]
) -> dict[str, Any]:
    """Reads the flags of a TOML, JSON or YAML file, by its ending.

    Args:
      path: A table without tables inside; names are those of flags, with dashes or underscores.
      fields: The field of each flag, for every spelling.
      check_known: Raises `ConfigError` for a flag that there is not.

    Returns:
      Values by the names of fields.

    Raises:
      ConfigError: The file cannot be read, or one of its names or values is wrong.
    """
    values: dict[str, Any] = {}
    for key, value in _table(path):
        flag_name = "--" + str(key).replace("_", "-")
        try:
            if isinstance(value, dict | _Pairs):
                raise ConfigError(f"{key} is a table, and flags are not nested; leave its name out")
            if flag_name == "--config":
                raise ConfigError("--config is not read from a file; give it on the command line")
            if asks_for_nothing(flag_name, None if value is True else str(value)):
                continue
            check_known(flag_name)
            item = fields[flag_name]
            if item.name in values:
                raise ConfigError(f"{spelling(item.name)} is given twice; leave one out")
            values[item.name] = _value(flag_name, item, value)
            check_value(item, values[item.name])
        except ConfigError as error:
            raise ConfigError(f"--config {path}: {error}") from error
    return {name: value for name, value in values.items() if value is not False}


def read_words(path: str) -> list[str]:
    """Reads the words of an `@FILE`: those of a shell, over any number of lines, `#` a comment.

    Raises:
      ConfigError: The file cannot be read, or has a quote that does not end.
    """
    text = _text(path, f"@{path}", "; a value that begins with @ is given as --flag=@value")
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(f"@{path} cannot be read: {error}") from error
    if nested := [word for word in words if word.startswith("@")]:
        raise ConfigError(f"@{path} names another file, {nested[0]}; give it on the command line")
    return words


def _text(path: str, name: str, hint: str = "") -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} cannot be read: it is no text in UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}{hint}") from error


def _table(path: str) -> Sequence[tuple[str, Any]]:
    """The names and values of a file, in its order; a name may occur twice."""
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
    """An object of JSON, in which a name that occurs twice stays visible."""


def _read_json(text: str) -> Sequence[tuple[str, Any]]:
    pairs = json.loads(text, object_pairs_hook=_Pairs)
    if not isinstance(pairs, _Pairs):
        raise ValueError("it must be an object of flags")
    return pairs


def _read_yaml(text: str) -> Sequence[tuple[str, Any]]:
    try:
        yaml: Any = import_module("yaml")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--config takes a YAML file where PyYAML is installed; install pyyaml, or give a TOML "
            "or JSON file"
        ) from error
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise ValueError("it must be a mapping of flags")
        return [
            (loader.construct_object(key), loader.construct_object(value, deep=True))
            for key, value in node.value
        ]
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _value(name: str, item: "Field[Any]", value: Any) -> Any:
    """Returns the value of a flag, of the type that its field has."""
    is_switch = name in switches(item)
    read, wanted = (_switch, "true or false") if is_switch else _reader(item)
    found = usual_value(item, read(value))
    if found is None:
        raise ConfigError(f"{name} must be {wanted}, got {json.dumps(value, default=str)}")
    if found == "":
        raise ConfigError(f"{name} is empty; give a value or leave it out")
    if is_switch:
        return switches(item)[name] if found else item.default
    return found


def _reader(item: "Field[Any]") -> tuple[Callable[[Any], Any], str]:
    """Returns a reader of a field's values (None: invalid) and the noun of what it reads."""
    rules = item.metadata
    if item.default is False:
        return _switch, "true or false"
    if rules.get("is_share"):
        return _number, "a number"
    if "low" in rules:
        return lambda value: value if type(value) is int else None, "a whole number"
    if rules.get("is_list"):
        return _joined, "a text, or a list of texts or numbers"
    return lambda value: value if isinstance(value, str) else None, "a text in quotes"


def _switch(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) else None


def _joined(value: Any) -> str | None:
    """Returns a list as the command line has it."""
    items = value if isinstance(value, list) else [value]
    return ",".join(map(str, items)) if all(type(x) in (str, int, float) for x in items) else None
