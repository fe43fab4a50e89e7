"""Programs of JAX as StableHLO, before they are compiled."""

import re

BROKEN_BY = {"case", "if", "while", "sort"}
"""Operations that no step on a GPU has: branches and loops, which no command buffer holds, and
sorts, which take many kernels, and minutes to compile where a vocabulary is sorted."""


def operations(text: str) -> set[str]:
    """The operations of a program; a branch that the platform alone decides is none."""
    defined: dict[str, str] = {}
    found = set()
    for line in text.splitlines():
        named = re.match(r"\s*(%\w+)(?::\d+)? = \"?(?:stablehlo|chlo)\.(\w+)\"?(.*)", line)
        if not named:
            continue
        name, operation, rest = named.groups()
        if operation == "case" and defined.get(rest[1 : rest.index(")")]) == "constant":
            operation = "constant"  # it is folded before anything is compiled
        defined[name] = operation
        found.add(operation)
    return found
