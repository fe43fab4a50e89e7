"""Generator of `docs/server_flags.md`.

python -m shared.options.flags_doc > docs/server_flags.md
"""

import re
import textwrap
from dataclasses import Field, fields
from typing import Any

from shared.options.flags import spelling, switches
from shared.options.options import HEADINGS, PARTS
from shared.options.unsupported_flags import ALWAYS, NEUTRAL

_DEFAULT = re.compile(r"(.*) \(default: (.*)\)", re.DOTALL)
_HEAD = """<!-- Made by `python -m shared.options.flags_doc`; a test compares. -->
# Server flags

All flags of the server with defaults and choices, as in `--help`. Names follow SGLang; the names of
vLLM are aliases. An unsupported flag is an error with exit code 2 and one sentence that names the
flag and what to do. Unsupported combinations are in [compatibility.md](compatibility.md).
`make serve ARGS="--tp-size 2"` passes flags on. `--version` prints the versions of the server and
of the backends.

## Files of flags

`--config FILE` reads flags from a TOML or JSON file, or from a YAML file if PyYAML is installed.
The extension selects the format. Flags on the command line take precedence. Names have dashes or
underscores, and aliases are accepted.

```toml
model-path = "models/demo/target"
port = 8001
speculative_algorithm = "NGRAM"
disable_radix_cache = true
allowed-origins = ["https://chat.example", "https://admin.example"]
```

An unknown name, a duplicate name, a nested table and a value of the wrong type are errors that name
the file. A switch is `true` or `false`. A list is accepted for flags with comma-separated values.

`@FILE` is replaced by the words of a file, which are split as in a shell; `#` begins a comment.
Flags are not read from environment variables.

## Shell completion

`tandem serve --print-completion bash` (or `zsh`, `tcsh`) prints a script that completes flags and
their choices; it requires the extra `completion`. In bash: `source <(tandem serve
--print-completion bash)`."""
_PEERS = """## Flags of SGLang and vLLM

These flags set another flag.

| flag | same as |
|---|---|
{switches}

These switches request the only supported behaviour and have no effect:
{always}.

These values have no effect either:
{values}.

Other flags of SGLang and vLLM are errors that name the flag to use instead."""
_TABLE = "| flag | default | meaning |\n|---|---|---|"


def to_markdown() -> str:
    """Returns the page, with one table for each group of flags."""
    parts = [_HEAD]
    for name, part in PARTS.items():
        lines = [_line(item) for item in fields(part)]
        parts.append(f"## {HEADINGS[name]}\n\n" + "\n".join([_TABLE, *lines]))
    return "\n\n".join([*parts, _of_peers()]) + "\n"


def _of_peers() -> str:
    switched = [
        (flag, item, value)
        for part in PARTS.values()
        for item in fields(part)
        for flag, value in switches(item).items()
    ]
    spelled = [
        (f"{item.metadata.get('aliases', [spelling(item.name)])[-1]} {other}", item, value)
        for part in PARTS.values()
        for item in fields(part)
        for other, value in item.metadata.get("values", {}).items()
        if not item.metadata.get("old_names")
    ]
    same = [
        f"| `{flag}` | `{spelling(item.name)} {value}` |"
        for flag, item, value in switched + spelled
    ]
    always = ", ".join(f"`{name}`" for name in sorted(ALWAYS))
    values = [f"`{name} {value}`" for name, taken in NEUTRAL.items() for value in taken]
    return _PEERS.format(
        switches="\n".join(same),
        always=_wrapped(always),
        values=_wrapped(", ".join(sorted(values))),
    )


def _wrapped(text: str) -> str:
    """Returns text in lines of at most 100 columns, without breaks inside code spans."""
    whole = text.replace(" ", "\0").replace(",\0", ", ")
    lines = textwrap.wrap(whole, 99, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def _line(item: "Field[Any]") -> str:
    names = (spelling(item.name), *item.metadata.get("aliases", ()))
    meaning, default = item.metadata["help"], item.default
    if stated := _DEFAULT.fullmatch(meaning):
        meaning, default = stated.groups()
    choices = item.metadata.get("choices", ())
    if choices:
        meaning += f": one of {', '.join(f'`{choice}`' for choice in choices)}"
    if default is None or default is False:
        default = "none" if default is None else "off"
    cells = (", ".join(f"`{name}`" for name in names), str(default), meaning)
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(to_markdown(), end="")
