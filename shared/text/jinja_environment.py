"""Jinja environment of chat templates, with Hugging Face's settings, and static analysis."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_OF_LISTS = {"map", "selectattr", "rejectattr"}
"""Filters that read the elements of a list."""

_SAME_LIST = {"list", "default", "d", "reverse", "sort", "select", "reject", *_OF_LISTS}
"""Filters that return a list of parts for a list of parts."""


def environment() -> jinja2.Environment:
    """Returns the environment that Hugging Face templates require."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlocks]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    return made


class _GenerationBlocks(Extension):
    """Block `{% generation %}`, which marks assistant text for training; only its text is used."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Parses the statements of the block; their names end with it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes <, > and & for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def reads_parts(tree: nodes.Template) -> bool:
    """Returns whether a template iterates over the parts of a message's `content`.

    It does if it loops over `content`, over a variable assigned from it, or over a macro parameter
    that receives it.
    """
    names = _names_of_content(tree)
    loops = (_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    filters = (each for each in tree.find_all(nodes.Filter) if each.name in _OF_LISTS)
    return any(loops) or any(each.node and _is_content(each.node, names) for each in filters)


def reads_attribute(tree: nodes.Template, name: str) -> bool:
    """Returns whether a template reads an attribute of this name, such as that of a message."""
    return any(each.attr == name for each in tree.find_all(nodes.Getattr))


def _names_of_content(tree: nodes.Template) -> set[str]:
    """Returns every name that `content` is bound to, as a fixed point."""
    bindings, names = list(_bindings(tree)), set[str]()
    while new := {name for name, value in bindings if _is_content(value, names)} - names:
        names |= new
    return names


def _bindings(tree: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    """Yields names of variables and macro parameters, each with its value."""
    for each in tree.find_all(nodes.Assign):
        if isinstance(each.target, nodes.Name):
            yield each.target.name, each.node
        elif isinstance(each.target, nodes.NSRef):
            yield each.target.attr, each.node
    for block in tree.find_all(nodes.With):
        for target, value in zip(block.targets, block.values, strict=True):
            if isinstance(target, nodes.Name):
                yield target.name, value
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            parameters = [parameter.name for parameter in macros[call.node.name].args]
            yield from zip(parameters, call.args, strict=False)
            yield from ((given.key, given.value) for given in call.kwargs)


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    """Returns whether an expression is a message's `content`, or a selection of its parts."""
    match node:
        case nodes.Name(name=name):
            return name in names
        case nodes.Getattr(attr=attr):  # attribute of a message or of a namespace
            return attr == "content" or attr in names
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Getitem(node=whole, arg=nodes.Slice()):
            return _is_content(whole, names)
        case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value="content"), *_]):
            return True
        case nodes.Filter(name=name, node=nodes.Node() as whole):
            return name in _SAME_LIST and _is_content(whole, names)
        case nodes.CondExpr(expr1=one, expr2=other):
            return _is_content(one, names) or (other is not None and _is_content(other, names))
        case nodes.And(left=one, right=other) | nodes.Or(left=one, right=other):
            return _is_content(one, names) or _is_content(other, names)
    return False
