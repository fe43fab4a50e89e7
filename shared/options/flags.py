"""Command-line flags as fields of frozen dataclasses, with a default, a help text and rules."""

import errno
import os
from collections.abc import Mapping
from dataclasses import Field, field, fields, replace
from pathlib import Path
from typing import Any

AUTO, NONE = "auto", "none"
"""Flag values: chosen at startup by the model, and no choice at all."""


class ConfigError(ValueError):
    """Invalid configuration; the message is one sentence with the flag and what to do."""


def raise_fault(fault: str | None) -> None:
    """Raises a `ConfigError` with the message of a check; does nothing if it found no fault."""
    if fault is not None:
        raise ConfigError(fault)


def flag(default: Any, help: str, **rules: Any) -> Any:
    """Returns a dataclass field that is a command-line flag.

    Args:
      default: Value if the flag is not given; None if startup chooses it.
      help: Text of `--help`.
      **rules: `low` and `high` bound a number, which is an integer unless `is_share`;
        `multiple_of` divides it; `choices` are the allowed strings; `aliases` are other spellings
        that `--help` lists, `old_names` former spellings that it does not; `values` maps other
        spellings of a value to the value; `switches` maps flags without a value to the value that
        they set; `is_path` marks a file or folder, `is_file` a file to be "read" or "written";
        `is_list` a string of values separated by commas; `names_paths` one of NAME=PATH, which
        may also be several words.
    """
    return field(default=default, metadata={"help": help, **rules})


def spelling(name: str) -> str:
    """Returns the flag of a field, such as `--page-size` for `page_size`."""
    return "--" + name.replace("_", "-")


def spellings(item: "Field[Any]") -> tuple[str, ...]:
    """Returns every flag that sets a field by a value, its usual name first."""
    rules = item.metadata
    return (spelling(item.name), *rules.get("aliases", ()), *rules.get("old_names", ()))


def switches(item: "Field[Any]") -> Mapping[str, Any]:
    """Returns the flags without a value that set a field, with the value that each sets."""
    return item.metadata.get("switches", {})


def usual_value(item: "Field[Any]", value: Any) -> Any:
    """Returns a value in its usual spelling."""
    return item.metadata.get("values", {}).get(value, value) if isinstance(value, str) else value


def check_rules(config: Any) -> None:
    """Checks every field of a config by the rules of its `flag`."""
    for item in fields(config):
        check_value(item, getattr(config, item.name))


def check_value(item: "Field[Any]", value: Any) -> None:
    """Checks the value of a field by the rules of its `flag`.

    Raises:
      ConfigError: The value is not a choice, out of range, or not a multiple.
    """
    if value is None or isinstance(value, bool):
        return
    name, rules = spelling(item.name), item.metadata
    if "choices" in rules and value not in rules["choices"]:
        raise ConfigError(f"{name} must be one of {', '.join(rules['choices'])}, got {value}")
    low, high = rules.get("low"), rules.get("high")
    if low is not None and not low <= value <= high:
        raise ConfigError(f"{name} must be {low} to {high}, got {value}")
    step = rules.get("multiple_of")
    if step is not None and value % step:
        raise ConfigError(f"{name} must be a multiple of {step}, got {value}")


def check_files(config: Any) -> None:
    """Checks that every file of a config can be read or written.

    Raises:
      ConfigError: A file cannot.
    """
    for item in fields(config):
        name, verb = getattr(config, item.name), item.metadata.get("is_file")
        if name is None or verb is None:
            continue
        path = Path(os.path.expanduser(name))
        try:
            _check_readable(path) if verb == "read" else _check_writable(path)
        except OSError as error:
            reason = f"{spelling(item.name)} {name} cannot be {verb}: {error.strerror}"
            raise ConfigError(reason) from error


def _check_readable(path: Path) -> None:
    if path.is_dir() or path.is_file() or not path.exists():  # pipes are not opened
        with path.open("rb"):
            pass


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def with_absolute_paths(config: Any) -> Any:
    """Returns the config with absolute paths; other processes have other working folders."""
    found = {}
    for item in fields(config):
        path = getattr(config, item.name)
        if path and item.metadata.get("is_path"):
            found[item.name] = _absolute(path)
        elif path and item.metadata.get("names_paths"):
            entries = (entry.strip().partition("=") for entry in path.split(","))
            found[item.name] = ",".join(f"{name}={_absolute(x)}" for name, _, x in entries)
    return replace(config, **found)


def _absolute(path: str) -> str:
    return str(Path(os.path.expanduser(path)).absolute())
