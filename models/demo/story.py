"""A word problem while it is being told: its sentences, and its worked steps."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from models.demo.words import DAYS, GOODS, MEN, RELATIVES, THINGS, WOMEN

TABLE = 12  # products and quotients up to here are known by heart

# Each has a unit that no story asks for.
DISTRACTORS = (
    "The shop is {n} blocks away.",
    "{name} lives at number {n}.",
    "There are {n} trees in front of the house.",
    "It is {n} degrees outside.",
    "{name} takes bus number {n}.",
    "There are {n} children in {name}'s class.",
    "The street has {n} houses.",
    "{name} is in room {n}.",
)


@dataclass(frozen=True)
class Step:
    """One operation: `left op right = result`."""

    left: int
    op: str
    right: int
    result: int


def apply(left: int, op: str, right: int) -> int:
    """The result of one operation.

    Raises:
      ValueError: A division leaves a rest, or a product needs two long factors.
    """
    if op == "+":
        return left + right
    if op == "-":
        return left - right
    if op == "*":
        if min(left, right) > TABLE:
            raise ValueError(f"{left} * {right} is no product of one short factor")
        return left * right
    if left % right:
        raise ValueError(f"{left} / {right} leaves a rest")
    return left // right


def spell(step: Step) -> str:
    """The equation, long products and quotients by tens and ones: each sum is short."""
    left, right, result = step.left, step.right, step.result
    head = f"{left} {step.op} {right}"
    if step.op == "*" and left > TABLE and left % 10 and right != 10:
        tens, ones = left - left % 10, left % 10
        parts = f"{tens} * {right} + {ones} * {right} = {tens * right} + {ones * right}"
        return f"{head} = {parts} = {result}"
    if step.op == "*" and right > TABLE and right % 10 and left != 10:
        tens, ones = right - right % 10, right % 10
        parts = f"{left} * {tens} + {left} * {ones} = {left * tens} + {left * ones}"
        return f"{head} = {parts} = {result}"
    if step.op == "/" and result > TABLE and result % 10:
        tens, ones = result - result % 10, result % 10
        parts = f"{tens * right} / {right} + {ones * right} / {right} = {tens} + {ones}"
        return f"{head} = {parts} = {result}"
    return f"{head} = {result}"


class Story:
    """Tells a problem sentence by sentence and keeps the quantity that the question asks for.

    Attributes:
      value: The running quantity.
      steps: The operations so far, `lines` their text.
      question: The question's forms; the last event that is told sets them.
    """

    def __init__(self, rng: random.Random) -> None:
        """Chooses the people and the thing."""
        self.rng = rng
        # One pronoun each, so that it is always plain who is meant.
        person, other = rng.sample((rng.choice(WOMEN), rng.choice(MEN)), 2)
        self.words = {
            **person._asdict(),
            "He": person.he.capitalize(),
            "His": person.his.capitalize(),
            **rng.choice(THINGS)._asdict(),
            "other": other.name,
            "relative": rng.choice(RELATIVES),
            "good": rng.choice(GOODS),
            "day": rng.choice(DAYS),
        }
        self.value = 0
        self.sentences: list[str] = []
        self.steps: list[Step] = []
        self.lines: list[str] = []
        self.noise: list[int] = []
        self.question: Sequence[str] = ()
        self.names_person = True

    def between(self, low: int, high: int) -> int:
        """A whole number from low to high, both among them."""
        return self.rng.randrange(low, high + 1)

    def say(self, forms: Sequence[str], *, others: bool = False, **numbers: object) -> None:
        """Adds one of the forms; `{who}` is the name where the pronoun might mean another."""
        pronoun = not self.names_person and self.rng.random() < 0.5
        who = self.words["He"] if pronoun else self.words["name"]
        form = self.rng.choice(forms)
        self.sentences.append(form.format(who=who, **self.words, **numbers))
        self.names_person = others

    def work(self, label: str, left: int, op: str, right: int, **numbers: object) -> int:
        """Adds a step and its line, and returns its result."""
        step = Step(left, op, right, apply(left, op, right))
        self.steps.append(step)
        self.lines.append(f"{label.format(**self.words, **numbers)}: {spell(step)}")
        return step.result

    def distract(self) -> None:
        """Adds a sentence with a number that the answer does not need."""
        number = self.between(2, 60)
        self.noise.append(number)
        self.say(DISTRACTORS, others=True, n=number)

    def divisor(self) -> int | None:
        """A whole divisor of the quantity with a short quotient; None where there is none."""
        fits = [k for k in range(2, 11) if self.value % k == 0 and 2 <= self.value // k <= 24]
        return self.rng.choice(fits) if fits else None

    def ask(self) -> str:
        """One of the question's forms."""
        return self.rng.choice(self.question).format(**self.words)
