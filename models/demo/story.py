"""Builder of a word problem: sentences and worked steps."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from models.demo.words import DAYS, GOODS, MEN, RELATIVES, THINGS, WOMEN

TABLE = 12  # largest factor of products and quotients that need no steps

# Each has a unit that no question uses.
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
    """Computes one operation.

    Raises:
      ValueError: A division has a remainder, or both factors exceed `TABLE`.
    """
    if op == "+":
        return left + right
    if op == "-":
        return left - right
    if op == "*":
        if min(left, right) > TABLE:
            raise ValueError(f"{left} * {right} has two factors above {TABLE}")
        return left * right
    if left % right:
        raise ValueError(f"{left} / {right} has a remainder")
    return left // right


def spell(step: Step) -> str:
    """Returns the equation; long products and quotients are split into tens and ones."""
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
    """Builds a problem sentence by sentence and tracks the requested quantity.

    Attributes:
      value: The current quantity.
      steps: The operations so far, `lines` their text.
      question: The forms of the question, which the last event sets.
    """

    def __init__(self, rng: random.Random) -> None:
        """Samples the people and the thing."""
        self.rng = rng
        # Distinct pronouns, so that each one is unambiguous.
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
        """Samples an integer from low to high, inclusive."""
        return self.rng.randrange(low, high + 1)

    def say(self, forms: Sequence[str], *, others: bool = False, **numbers: object) -> None:
        """Adds one of the forms; `{who}` becomes the name where a pronoun would be ambiguous."""
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
        """Adds a sentence with an irrelevant number."""
        number = self.between(2, 60)
        self.noise.append(number)
        self.say(DISTRACTORS, others=True, n=number)

    def divisor(self) -> int | None:
        """Samples a divisor of the quantity with a short quotient; None if there is none."""
        fits = [k for k in range(2, 11) if self.value % k == 0 and 2 <= self.value // k <= 24]
        return self.rng.choice(fits) if fits else None

    def ask(self) -> str:
        """Returns one of the forms of the question."""
        return self.rng.choice(self.question).format(**self.words)
