"""Parity of the two backends: the definitions that both have, and their parameters.

`python -m tests.support.backend_parity` prints the table, `tests/test_twins.py` holds it.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TWINS = ("jax_impl", "torch_impl")

OPS = {path.stem for path in (ROOT / TWINS[0] / "ops").rglob("*.py")} - {"__init__"}
"""Modules of ops, which both have."""

NAMED_BY_FRAMEWORK = {"JaxBackend": "Backend", "TorchBackend": "Backend"}
"""Classes with the framework in their names, and their common names."""

CARRIED = {"self", "cls", "state", "kv", "memory", "carry"}
"""Parameters that only functional code needs: it passes state, and torch writes it in place."""


@dataclass(frozen=True)
class Definition:
    """A function, class or method; `parameters` are its names in order, less the carried ones."""

    name: str
    parameters: tuple[str, ...]


def files() -> list[Path]:
    """Python files that both backends have, by their place in the backend."""
    found = [{p.relative_to(ROOT / twin) for p in (ROOT / twin).rglob("*.py")} for twin in TWINS]
    return sorted(set.intersection(*found))


def definitions(twin: str, file: Path, *, with_private: bool) -> dict[str, Definition]:
    """The definitions of a file by name, methods as `Class.method`; fields count as parameters."""
    tree = ast.parse((ROOT / twin / file).read_text(encoding="utf-8"))
    found = [each for node in tree.body for each in _of(node, "")]
    return {d.name: d for d in found if with_private or not _is_private(d.name)}


def _is_private(name: str) -> bool:
    last = name.rsplit(".", 1)[-1]
    return any(part.startswith("_") for part in name.split(".")[:-1]) or last.startswith("_")


def _of(node: ast.stmt, owner: str) -> Iterator[Definition]:
    if isinstance(node, ast.FunctionDef):
        yield Definition(owner + node.name, _parameters(node.args))
    elif isinstance(node, ast.ClassDef):
        fields = [
            part.target.id
            for part in node.body
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
        ]
        name = owner + NAMED_BY_FRAMEWORK.get(node.name, node.name)
        yield Definition(name, tuple(x for x in fields if x not in CARRIED))
        for part in node.body:
            yield from _of(part, f"{name}.")


def _parameters(args: ast.arguments) -> tuple[str, ...]:
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    return tuple(arg.arg for arg in named if arg.arg not in CARRIED)


def differences(file: Path) -> dict[str, str]:
    """Returns the differences between the public definitions of the twins.

    Returns:
      By `FILE::NAME`, what each twin has.
    """
    sides = [definitions(twin, file, with_private=False) for twin in TWINS]
    return {
        f"{file}::{name}": "; ".join(
            f"{twin} has {side[name].parameters if name in side else 'none'}"
            for twin, side in zip(TWINS, sides, strict=True)
        )
        for name in sides[0].keys() | sides[1].keys()
        if sides[0].get(name) != sides[1].get(name)
    }


def order_differences(file: Path) -> list[tuple[str, str]]:
    """Pairs of top-level definitions at which the orders of the twins differ."""
    sides = [definitions(twin, file, with_private=True) for twin in TWINS]
    orders = [
        [name for name in side if name in other and "." not in name]
        for side, other in zip(sides, reversed(sides), strict=True)
    ]
    return [pair for pair in zip(*orders, strict=True) if pair[0] != pair[1]]


def ops_called(twin: str, file: Path) -> dict[str, frozenset[str]]:
    """The ops that each public function of a file names, itself or through private ones of it.

    Returns:
      By `NAME` or `Class.NAME`, ops as `module.name`; what begins with a capital is a type.
    """
    tree = ast.parse((ROOT / twin / file).read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name: _without_room(f"{node.module}.{alias.name}", f"{twin}.ops.")
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{twin}.ops")
        for alias in node.names
    }
    functions = dict(_functions(tree.body, ""))

    def named(name: str, seen: frozenset[str]) -> frozenset[str]:
        found: frozenset[str] = frozenset()
        for node in ast.walk(functions[name]):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = imported.get(node.value.id, "")
                found |= {f"{module}.{node.attr}"} if module in OPS else set()
                called = f"{name.rpartition('.')[0]}.{node.attr}"
            elif isinstance(node, ast.Name):
                whole = imported.get(node.id, "")
                found |= {whole} if whole.partition(".")[0] in OPS and "." in whole else set()
                called = node.id
            else:
                continue
            if called in functions and _is_private(called) and called not in seen:
                found |= named(called, seen | {called})
        return frozenset(op for op in found if not op.rpartition(".")[2][0].isupper())

    return {name: named(name, frozenset({name})) for name in functions if not _is_private(name)}


def _without_room(name: str, package: str) -> str:
    """Returns the name of an op without its package and the folder it is in."""
    room, _, rest = name.removeprefix(package).partition(".")
    return rest if rest and room not in OPS | {""} or rest.split(".")[0] in OPS else room


def _functions(body: list[ast.stmt], owner: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield owner + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{owner}{node.name}.")


def other_ops(file: Path) -> dict[str, str]:
    """Public functions of both twins that name other ops.

    Returns:
      By `FILE::NAME`, what each names alone.
    """
    sides = [ops_called(twin, file) for twin in TWINS]
    return {
        f"{file}::{name}": "; ".join(
            f"{twin} alone {', '.join(sorted(alone))}"
            for twin, alone in zip(TWINS, (jax - torch, torch - jax), strict=True)
            if alone
        )
        for name in sides[0].keys() & sides[1].keys()
        if (jax := sides[0][name]) != (torch := sides[1][name])
    }


def table() -> str:
    """Lines and definitions of the twins, in and above `ops`, private ones included."""
    lines = [
        "| where | lines jax / torch | equal | other parameters | one side only |",
        "|" + "---|" * 5,
    ]
    parts = {"ops": [f for f in files() if f.parts[0] == "ops"]}
    parts["above ops"] = [f for f in files() if f not in parts["ops"]]
    for where, names in parts.items():
        sides = [
            {(f, n): d for f in names for n, d in definitions(twin, f, with_private=True).items()}
            for twin in TWINS
        ]
        both = sides[0].keys() & sides[1].keys()
        equal = sum(sides[0][key] == sides[1][key] for key in both)
        alone = len(sides[0].keys() ^ sides[1].keys())
        counts = [
            sum(len((ROOT / twin / f).read_text().splitlines()) for f in names) for twin in TWINS
        ]
        row = (where, f"{counts[0]} / {counts[1]}", equal, len(both) - equal, alone)
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
