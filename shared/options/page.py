"""Every flag of the server, as `docs/server_flags.md` lists them.

`python -m shared.options.page` prints the page, of the fields of the dataclasses of options.
"""

import re
from dataclasses import Field, fields
from typing import Any

from shared.options.flags import spelling
from shared.options.not_served import ALWAYS, NEUTRAL
from shared.options.options import HEADINGS, PARTS

_DEFAULT = re.compile(r"(.*) \(default: (.*)\)", re.DOTALL)
_HEAD = """<!-- Made by `python -m shared.options.page`; a test compares. -->
# Flags

Spelled as users of SGLang know them; `--help` lists them too. A flag that is not supported ends the
start with exit code 2 and one sentence that names it and the way out. What does not work together
is in [compatibility.md](compatibility.md). `make serve ARGS="--tp-size 2"` passes flags on.
`--version` prints the versions of the server and of the backends.

## Files of flags

`--config FILE` reads flags from a TOML file, from a JSON file, or, where PyYAML is installed, from
a YAML file; the ending of the name decides. A flag of the command line takes the place of the
file's. Names have dashes or underscores, and every spelling of a flag is known.

```toml
model-path = "models/demo/target"
port = 8001
speculative_algorithm = "NGRAM"
disable_radix_cache = true
allowed-origins = ["https://chat.example", "https://admin.example"]
```

An unknown name, a name given twice, a table and a value of another type are errors with the name of
the file. A switch is `true` or `false`, a text stands in quotes, and a list is for the flags whose
values have commas between them.

`@FILE` stands for the words of a file, as a shell reads them: flags with their values over any
number of lines, `#` begins a comment. No flag is read from the environment.

## Completion in a shell

`tandem serve --print-completion bash` (or `zsh`, `tcsh`) prints a script that completes flags and
their choices; it needs the extra `completion`. In bash: `source <(tandem serve --print-completion
bash)`."""
_PEERS = """## Flags of SGLang and vLLM

These switches ask for what every server does, and are taken: {always}. So are these values, which
ask for nothing: {values}. Other flags of theirs are errors with the way out."""
_TABLE = "| flag | default | meaning |\n|---|---|---|"


def to_markdown() -> str:
    """The page `docs/server_flags.md`: a table for each part of the options."""
    parts = [_HEAD]
    for name, part in PARTS.items():
        lines = [_line(item) for item in fields(part)]
        parts.append(f"## {HEADINGS[name]}\n\n" + "\n".join([_TABLE, *lines]))
    return "\n\n".join([*parts, _of_peers()]) + "\n"


def _of_peers() -> str:
    always = ", ".join(f"`{name}`" for name in sorted(ALWAYS))
    values = [f"`{name} {value}`" for name, taken in NEUTRAL.items() for value in taken]
    return _PEERS.format(always=always, values=", ".join(sorted(values)))


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
