"""Every flag of the server, as `docs/flags.md` lists them.

`python -m shared.options.page` prints the page, of the fields of the dataclasses of options.
"""

import re
from dataclasses import Field, fields
from typing import Any

from shared.options.flags import spelling
from shared.options.options import PARTS

_DEFAULT = re.compile(r"(.*) \(default: (.*)\)", re.DOTALL)
_HEAD = """<!-- Made by `python -m shared.options.page`; a test compares. -->
# Flags

Spelled as users of SGLang know them; `--help` lists them too. A flag that is not supported ends the
start with exit code 2 and one sentence that names it and the way out. What does not work together
is in [capabilities.md](capabilities.md). `make serve ARGS="--tp-size 2"` passes flags on."""
_TABLE = "| flag | default | meaning |\n|---|---|---|"


def to_markdown() -> str:
    """The page `docs/flags.md`: a table for each part of the options."""
    parts = [_HEAD]
    for part in PARTS.values():
        lines = [_line(item) for item in fields(part)]
        parts.append(f"## {(part.__doc__ or '').rstrip('.')}\n\n" + "\n".join([_TABLE, *lines]))
    return "\n\n".join(parts) + "\n"


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
