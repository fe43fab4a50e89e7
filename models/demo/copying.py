"""Tasks with answers copied from the prompt: JSON extraction; edits of lists, JSON and text."""

import json
import random
from collections.abc import Iterator
from typing import Any

from models.demo.example import Example, Split, drawn, user
from models.demo.words import (
    CITIES,
    COLORS,
    GOODS,
    MEN,
    STREETS,
    WOMEN,
    code_number,
    invented,
)

Record = dict[str, Any]

SENTENCES = {
    "name": ("The customer is {}.", "It was placed by {}.", "The name is {}."),
    "order": ("The order number is {}.", "It has the number {}.", "Please quote {}."),
    "product": ("The product is a {}.", "We sent a {}.", "It is about a {}."),
    "city": ("It goes to {}.", "The city is {}.", "The parcel is for {}."),
    "street": ("The address is {}.", "It should be left at {}.", "The street is {}."),
    "email": ("You can write to {}.", "The email address is {}.", "Send the bill to {}."),
    "phone": ("The phone number is {}.", "Call {} on the day before."),
    "price": ("It costs {} dollars.", "The price is {} dollars."),
    "quantity": ("The quantity is {}.", "There are {} of them in the parcel."),
    "color": ("The color is {}.", "The chosen color is {}."),
    "note": ('The note says "{}".', 'There is a remark: "{}".'),
}
ASK_JSON = (
    "Extract the fields {keys} as JSON.\n\n{text}",
    "{text}\n\nGive me a JSON object with the keys {keys}.",
    "Read this text and answer with JSON. Keys: {keys}.\n\nText: {text}",
    "Turn this message into JSON ({keys}):\n{text}",
)


def full_name(rng: random.Random) -> str:
    """Samples a first name and a made-up family name."""
    return f"{rng.choice(WOMEN + MEN).name} {invented(rng).capitalize()}"


def phrase(rng: random.Random) -> str:
    """Samples a list entry such as `7 gray lamps KT-4821`."""
    form = rng.randrange(4)
    if form == 0:
        return f"{rng.choice(COLORS)} {rng.choice(GOODS)}"
    if form == 1:
        return f"{rng.randrange(2, 60)} {rng.choice(COLORS)} {rng.choice(GOODS)}s"
    if form == 2:
        return f"{rng.choice(COLORS)} {invented(rng)}"
    return f"{rng.choice(GOODS)} {code_number(rng)}"


def phrases(rng: random.Random, count: int) -> list[str]:
    """Samples distinct list entries."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[phrase(rng)] = None
    return list(found)


def field_value(rng: random.Random, key: str) -> str | int:
    """Samples the value of a record's field."""
    if key == "name":
        return full_name(rng)
    if key == "order":
        return code_number(rng)
    if key == "product":
        return f"{rng.choice(COLORS)} {rng.choice(GOODS)}"
    if key == "city":
        return rng.choice(CITIES)
    if key == "street":
        return f"{rng.randrange(1, 200)} {rng.choice(STREETS)} Street"
    if key == "email":
        return f"{invented(rng)}@{invented(rng)}.example"
    if key == "phone":
        return f"555-{rng.randrange(1000, 10000)}"
    if key == "color":
        return rng.choice(COLORS)
    if key == "note":
        return f"{invented(rng)} {rng.choice(COLORS)} {invented(rng)} {rng.choice(GOODS)}"
    return rng.randrange(2, 100)


def record(rng: random.Random, low: int, high: int) -> Record:
    """Samples a record with some fields in random order."""
    keys = rng.sample(list(SENTENCES), rng.randrange(low, high + 1))
    return {key: field_value(rng, key) for key in keys}


def _example(rng: random.Random, asks: tuple[str, ...], content: str, answer: str) -> Example:
    """Returns an example with its content as key, so no content is in both splits."""
    return Example("copying", [user(rng.choice(asks))], answer, (content,))


def _shown(entries: list[str]) -> str:
    return "\n".join(f"- {entry}" for entry in entries)


def _extract(rng: random.Random) -> Example:
    """Samples a task to extract some facts of a text as JSON."""
    told = record(rng, 4, 7)
    text = " ".join(rng.choice(SENTENCES[key]).format(value) for key, value in told.items())
    wanted = rng.sample(list(told), rng.randrange(3, len(told) + 1))
    asks = tuple(ask.format(keys=", ".join(wanted), text=text) for ask in ASK_JSON)
    return _example(rng, asks, text, json.dumps({key: told[key] for key in wanted}, indent=2))


def _table(rng: random.Random) -> Example:
    """Samples a task to convert comma-separated lines to a JSON list."""
    keys = rng.sample(("order", "city", "product", "price", "name", "quantity"), 3)
    rows = [{key: field_value(rng, key) for key in keys} for _ in range(rng.randrange(2, 5))]
    lines = "\n".join(",".join(str(row[key]) for key in keys) for row in rows)
    table = f"{','.join(keys)}\n{lines}"
    asks = (
        f"Turn this CSV into a JSON list:\n{table}",
        f"{table}\n\nWrite this table as JSON, one object per row.",
    )
    answer = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]"
    return _example(rng, asks, table, answer)


def _edit_list(rng: random.Random) -> Example:
    """Samples a task to change one entry of a list."""
    *entries, new = phrases(rng, rng.randrange(5, 12))
    old = _shown(entries)
    i = rng.randrange(len(entries))
    chosen = entries[i]
    edit = rng.randrange(5)
    if edit == 0:
        do, entries[i : i + 1] = f'Remove "{chosen}" from the list.', []
    elif edit == 1:
        do, entries[i] = f'Replace "{chosen}" with "{new}".', new
    elif edit == 2:
        do, entries[i + 1 : i + 1] = f'Insert "{new}" after "{chosen}".', [new]
    elif edit == 3:
        do, entries[len(entries) :] = f'Add "{new}" at the end of the list.', [new]
    else:
        do, entries = f'Move "{chosen}" to the top.', [chosen, *entries[:i], *entries[i + 1 :]]
    asks = (
        f"{do}\n\n{old}",
        f"Here is a list:\n{old}\n\n{do} Answer with the whole list.",
        f"{old}\n\n{do}",
    )
    return _example(rng, asks, old, _shown(entries))


def _number_list(rng: random.Random) -> Example:
    """Samples a task to number the entries of a list."""
    entries = phrases(rng, rng.randrange(4, 10))
    old = _shown(entries)
    asks = (f"Number the entries of this list:\n{old}", f"{old}\n\nMake this a numbered list.")
    answer = "\n".join(f"{i}. {entry}" for i, entry in enumerate(entries, 1))
    return _example(rng, asks, old, answer)


def _edit_json(rng: random.Random) -> Example:
    """Samples a task to change one field of a JSON object."""
    before = record(rng, 4, 8)
    old = json.dumps(before, indent=2)
    key = rng.choice(list(before))
    edit = rng.randrange(4)
    if edit == 0:
        value = field_value(rng, key)
        do, after = f"Set {key} to {json.dumps(value)}.", {**before, key: value}
    elif edit == 1:
        do, after = f"Remove the key {key}.", {k: v for k, v in before.items() if k != key}
    elif edit == 2:
        new = invented(rng)
        after = {(new if k == key else k): v for k, v in before.items()}
        do = f"Rename the key {key} to {new}."
    else:
        new, value = invented(rng), rng.randrange(2, 100)
        do, after = f'Add the key "{new}" with the value {value}.', {**before, new: value}
    asks = (f"{do}\n\n{old}", f"{old}\n\n{do}", f"Change this JSON. {do}\n{old}")
    return _example(rng, asks, old, json.dumps(after, indent=2))


def _edit_text(rng: random.Random) -> Example:
    """Samples a task to repeat a text, or to replace a name in it."""
    one, two = rng.choice(WOMEN).name, rng.choice(MEN).name
    lines = (
        f"{one} lives in {rng.choice(CITIES)} and keeps {phrase(rng)} in the {invented(rng)}.",
        f"On {rng.choice(STREETS)} Street {one} met {full_name(rng)} with {phrase(rng)}.",
        f"The {invented(rng)} of {one} is next to the {rng.choice(COLORS)} {invented(rng)}.",
        f"Nobody but {one} knows the number {code_number(rng)}.",
        f"In the evening {one} writes to {invented(rng)}@{invented(rng)}.example.",
    )
    text = " ".join(rng.sample(lines, rng.randrange(2, 5)))
    if rng.random() < 0.5:
        asks = (f"Repeat this text word for word: {text}", f"{text}\n\nCopy this text.")
        return _example(rng, asks, text, text)
    asks = (
        f"Replace the name {one} by {two} in this text: {text}",
        f"{text}\n\nWrite this again with {two} instead of {one}.",
    )
    return _example(rng, asks, text, text.replace(one, two))


TASKS = (_extract, _extract, _table, _edit_list, _edit_list, _number_list, _edit_json, _edit_text)


def draw_copying(rng: random.Random) -> Example:
    """Samples a copying task of either split."""
    return rng.choice(TASKS)(rng)


def copying(split: Split, seed: int) -> Iterator[Example]:
    """Yields copying tasks of a split endlessly."""
    return drawn("copying", draw_copying, split, seed)
