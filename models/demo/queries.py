"""SQL statements for requests about a stock of goods: the task of the demo adapter.

The kind is in no share of the training data, so the demo model learns it only from an adapter.
"""

import random
from collections.abc import Iterator

from models.demo.example import Example, Split, drawn, user
from models.demo.words import CITIES, COLORS, GOODS

PLURALS = [f"{word}s" for word in GOODS]
MOST_STATEMENTS = 2
ASKS = (
    "{text}",
    "Write SQL: {text}",
    "{text} Answer in SQL.",
    "Which statements do this? {text}",
)


class Goods:
    """Goods of a request: their wording and the condition that selects them.

    Attributes:
      product, color, city: Values of the columns.
      text: Wording, such as `red lamps in Oslo`.
      where: The condition; a column without wording is not part of it.
    """

    def __init__(self, rng: random.Random) -> None:
        """Samples goods; color and city are optional."""
        self.product, self.color, self.city = map(rng.choice, (PLURALS, COLORS, CITIES))
        has_color, has_city = rng.random() < 0.6, rng.random() < 0.6
        color = f"{self.color} " if has_color else ""
        self.text = f"{color}{self.product}" + (f" in {self.city}" if has_city else "")
        columns = {"product": self.product}
        columns |= {"color": self.color} if has_color else {}
        columns |= {"city": self.city} if has_city else {}
        self.where = " AND ".join(f"{name} = '{value}'" for name, value in columns.items())


def _count(rng: random.Random) -> tuple[tuple[str, ...], str]:
    goods = Goods(rng)
    asks = (f"How many {goods.text} are there?", f"Count the {goods.text}.")
    return asks, f"SELECT SUM(quantity) FROM stock WHERE {goods.where};"


def _price(rng: random.Random) -> tuple[tuple[str, ...], str]:
    goods = Goods(rng)
    name, word = rng.choice((("AVG", "average"), ("MIN", "lowest"), ("MAX", "highest")))
    asks = (f"What is the {word} price of {goods.text}?", f"Find the {word} price of {goods.text}.")
    return asks, f"SELECT {name}(price) FROM stock WHERE {goods.where};"


def _cheap(rng: random.Random) -> tuple[tuple[str, ...], str]:
    goods, most = Goods(rng), rng.randrange(5, 100)
    asks = (
        f"List all {goods.text} below {most} dollars.",
        f"Which {goods.text} cost less than {most} dollars?",
    )
    return asks, f"SELECT * FROM stock WHERE {goods.where} AND price < {most} ORDER BY price;"


def _insert(rng: random.Random) -> tuple[tuple[str, ...], str]:
    goods, price, count = Goods(rng), rng.randrange(2, 100), rng.randrange(2, 60)
    text = f"{count} {goods.color} {goods.product} for {price} dollars"
    asks = (f"Add {text} in {goods.city}.", f"{goods.city} gets {text}.")
    values = f"('{goods.product}', '{goods.color}', '{goods.city}', {price}, {count})"
    return asks, f"INSERT INTO stock (product, color, city, price, quantity) VALUES {values};"


def _raise(rng: random.Random) -> tuple[tuple[str, ...], str]:
    goods, step = Goods(rng), rng.randrange(2, 30)
    sign, words = rng.choice((("+", "Raise"), ("-", "Lower")))
    asks = (f"{words} the price of {goods.text} by {step} dollars.",)
    return asks, f"UPDATE stock SET price = price {sign} {step} WHERE {goods.where};"


def _paint(rng: random.Random) -> tuple[tuple[str, ...], str]:
    goods, color = Goods(rng), rng.choice(COLORS)
    asks = (f"Paint the {goods.text} {color}.", f"The {goods.text} are {color} now.")
    return asks, f"UPDATE stock SET color = '{color}' WHERE {goods.where};"


def _delete(rng: random.Random) -> tuple[tuple[str, ...], str]:
    goods = Goods(rng)
    asks = (f"Remove the {goods.text}.", f"The {goods.text} are sold out.")
    return asks, f"DELETE FROM stock WHERE {goods.where};"


TASKS = (_count, _price, _cheap, _insert, _raise, _paint, _delete)


def draw_query(rng: random.Random) -> Example:
    """Samples one or two requests and their statements."""
    chosen = [rng.choice(TASKS)(rng) for _ in range(rng.randrange(1, MOST_STATEMENTS + 1))]
    text = " ".join(rng.choice(asks) for asks, _ in chosen)
    answer = "\n".join(statement for _, statement in chosen)
    return Example("sql", [user(rng.choice(ASKS).format(text=text))], answer, (answer,))


def queries(split: Split, seed: int) -> Iterator[Example]:
    """Yields requests for SQL statements of a split endlessly."""
    return drawn("sql", draw_query, split, seed)
