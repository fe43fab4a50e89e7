"""Short Python functions with docstrings; each docstring's example is correct."""

import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from models.demo.example import Example, Split, drawn, user
from models.demo.words import invented, words

NUMBER_NAMES = words("x n value number count amount size total score level")
LIST_NAMES = words("numbers values items data xs entries scores sizes amounts counts")
TEXT_NAMES = words("text word s name line title string label phrase sentence")
LETTERS = "aeioustrn"

ASKS = (
    "Write a Python function `{head}` that returns {what}.",
    "Write a function {head} in Python. It returns {what}.",
    "Please write `{head}` in Python. It should return {what}.",
    "I need a Python function called `{name}` that takes `{arg}` and returns {what}.",
    "def {head}: return {what}. Write this with a docstring.",
)


class Kind(NamedTuple):
    """A kind of function.

    Attributes:
      takes: What the argument is: number, list or text.
      name: The function's name; `{k}` is its constant.
      what: What it returns; `{x}` is the argument.
      body: Its lines.
    """

    takes: str
    name: str
    what: str
    body: str


ONE_LINE = tuple(
    Kind(*(part.strip() for part in line.split("|", 3)))
    for line in """
number | add_{k} | {x} plus {k} | return {x} + {k}
number | subtract_{k} | {x} minus {k} | return {x} - {k}
number | times_{k} | {x} times {k} | return {x} * {k}
number | square_plus_{k} | the square of {x} plus {k} | return {x} * {x} + {k}
number | is_divisible_by_{k} | whether {x} is divisible by {k} | return {x} % {k} == 0
number | rest_by_{k} | the remainder of {x} divided by {k} | return {x} % {k}
number | at_most_{k} | {x}, but at most {k} | return min({x}, {k})
number | at_least_{k} | {x}, but at least {k} | return max({x}, {k})
number | is_above_{k} | whether {x} is greater than {k} | return {x} > {k}
number | distance_to_{k} | the distance between {x} and {k} | return abs({x} - {k})
number | round_to_{k} | {x} rounded down to a multiple of {k} | return {x} // {k} * {k}
number | multiples_of_{k} | the first {x} multiples of {k} | return [i * {k} for i in range({x})]
number | sum_up_to | the sum of the numbers from 1 to {x} | return sum(range(1, {x} + 1))
number | digit_sum | the sum of the digits of {x} | return sum(int(d) for d in str({x}))
list | sum_above_{k} | the sum of {x} above {k} | return sum(v for v in {x} if v > {k})
list | count_above_{k} | how many of {x} are above {k} | return sum(v > {k} for v in {x})
list | count_equal_to_{k} | how many of {x} are equal to {k} | return {x}.count({k})
list | keep_above_{k} | the values of {x} above {k} | return [v for v in {x} if v > {k}]
list | keep_below_{k} | the values of {x} below {k} | return [v for v in {x} if v < {k}]
list | without_{k} | the values of {x} that are not {k} | return [v for v in {x} if v != {k}]
list | add_{k}_to_all | each value of {x} plus {k} | return [v + {k} for v in {x}]
list | scale_by_{k} | each value of {x} times {k} | return [v * {k} for v in {x}]
list | first_{k} | the first {k} values of {x} | return {x}[:{k}]
list | last_{k} | the last {k} values of {x} | return {x}[-{k}:]
list | largest_or_{k} | the largest of {x}, or {k} if it is empty | return max({x}, default={k})
list | smallest_or_{k} | the smallest of {x}, or {k} if it is empty | return min({x}, default={k})
list | any_above_{k} | whether any of {x} is above {k} | return any(v > {k} for v in {x})
list | all_below_{k} | whether all of {x} are below {k} | return all(v < {k} for v in {x})
list | append_{k} | {x} with {k} at the end | return [*{x}, {k}]
list | in_reverse | {x} in reverse order | return {x}[::-1]
list | even_values | the even values of {x} | return [v for v in {x} if v % 2 == 0]
text | reverse | {x} in reverse | return {x}[::-1]
text | upper | {x} in upper case | return {x}.upper()
text | first_{k}_letters | the first {k} letters of {x} | return {x}[:{k}]
text | twice | {x} twice in a row | return {x} + {x}
text | is_longer_than_{k} | whether {x} has more than {k} letters | return len({x}) > {k}
text | count_{c} | how often the letter {c} is in {x} | return {x}.count("{c}")
text | remove_{c} | {x} without the letter {c} | return {x}.replace("{c}", "")
text | starts_with_{c} | whether {x} starts with {c} | return {x}.startswith("{c}")
text | ends_with_{c} | whether {x} ends with {c} | return {x}.endswith("{c}")
text | replace_{c} | {x} with a dash for each {c} | return {x}.replace("{c}", "-")
text | without_first_{k} | {x} without its first {k} letters | return {x}[{k}:]
""".strip().splitlines()
)
LOOPS = (
    Kind(
        "list",
        "running_total",
        "the running total of {x}",
        "result, total = [], 0\nfor v in {x}:\n    total += v\n    result.append(total)\n"
        "return result",
    ),
    Kind(
        "list",
        "total_from_{k}",
        "the sum of {x}, starting from {k}",
        "total = {k}\nfor v in {x}:\n    total += v\nreturn total",
    ),
    Kind(
        "list",
        "steps_past_{k}",
        "how many of {x} are added until the sum is above {k}",
        "total = 0\nfor i, v in enumerate({x}, 1):\n    total += v\n    if total > {k}:\n"
        "        return i\nreturn len({x})",
    ),
    Kind(
        "text",
        "first_repeated",
        "the first letter that {x} has more than once, or nothing",
        'for c in {x}:\n    if {x}.count(c) > 1:\n        return c\nreturn ""',
    ),
    Kind(
        "number",
        "halvings_to_{k}",
        "how often {x} is halved until it is at most {k}",
        "steps = 0\nwhile {x} > {k}:\n    {x} //= 2\n    steps += 1\nreturn steps",
    ),
)
KINDS = ONE_LINE + LOOPS
NAMES = {"number": NUMBER_NAMES, "list": LIST_NAMES, "text": TEXT_NAMES}


@lru_cache(maxsize=4096)
def _compiled(name: str, source: str) -> Any:
    scope: dict[str, Any] = {}
    exec(source, scope)  # noqa: S102 - of this file's own functions
    return scope[name]


def _argument(rng: random.Random, takes: str) -> object:
    """Samples an argument for the docstring's example."""
    if takes == "number":
        return rng.randrange(2, 13)
    if takes == "list":
        return [rng.randrange(1, 20) for _ in range(rng.randrange(3, 6))]
    return invented(rng)


def draw_function(rng: random.Random) -> Example:
    """Samples a function of either split."""
    kind = rng.choice(KINDS)
    x, k, c = rng.choice(NAMES[kind.takes]), rng.randrange(2, 21), rng.choice(LETTERS)
    name, what, body = (part.format(x=x, k=k, c=c) for part in kind[1:])
    body = body.replace("\n", "\n    ")
    argument = _argument(rng, kind.takes)
    value = _compiled(name, f"def {name}({x}):\n    {body}\n")(argument)
    answer = (
        f'```python\ndef {name}({x}):\n    """Returns {what}.\n\n'
        f'    >>> {name}({argument!r})\n    {value!r}\n    """\n    {body}\n```'
    )
    ask = rng.choice(ASKS).format(head=f"{name}({x})", name=name, arg=x, what=what)
    return Example("code", [user(ask)], answer, (f"{name}({x}): {what}",))


def functions(split: Split, seed: int) -> Iterator[Example]:
    """Yields functions of a split endlessly."""
    return drawn("code", draw_function, split, seed)
