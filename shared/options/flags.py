"""What a command-line flag is: a field of a frozen dataclass with a default, a help and rules."""

import errno
import os
from collections.abc import Mapping
from dataclasses import Field, field, fields, replace
from pathlib import Path
from typing import Any

AUTO, NONE = "auto", "none"
"""Values of flags: the start chooses by the model, and nothing of what the flag chooses from."""


class ConfigError(ValueError):
    """The start cannot go on as told; the message is one sentence with the flag and the way out."""


def flag(default: Any, help: str, **rules: Any) -> Any:
    """A field that is a command-line flag.

    Args:
      default: Its value where the flag is not given; None means that the start decides.
      help: What it means, in the words of `--help`.
      **rules: `low`, `high` bound a number, which is a whole one unless `is_share`; `multiple_of`
        divides it; `choices` lists the words; `aliases` are other spellings of the flag that
        `--help` lists, `old_names` former ones that it does not; `values` maps other spellings of
        a value to the value, and `switches` flags without a value to the value that they set;
        `is_path` names a file or a folder, `is_file` that it is a file to be "read" or "written";
        `is_list` a text of values with commas between them.
    """
    return field(default=default, metadata={"help": help, **rules})


def spelling(name: str) -> str:
    """The flag of a field: `page_size` is `--page-size`."""
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
    """Holds every field of a config against the rules of its `flag`."""
    for item in fields(config):
        check_value(item, getattr(config, item.name))


def check_value(item: "Field[Any]", value: Any) -> None:
    """Holds the value of a field against the rules of its `flag`.

    Raises:
      ConfigError: It is no choice, out of range, or no multiple.
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
    """Looks at every file that a config names, so that a wrong one is found at once.

    Raises:
      ConfigError: One cannot be read, or not be written.
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
    if path.is_dir() or path.is_file() or not path.exists():  # a pipe is left alone
        with path.open("rb"):
            pass


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def in_full(config: Any) -> Any:
    """The same with each path in full: other processes have folders of their own."""
    found = {}
    for item in fields(config):
        path = getattr(config, item.name)
        if path and item.metadata.get("is_path"):
            found[item.name] = str(Path(os.path.expanduser(path)).absolute())
    return replace(config, **found)
