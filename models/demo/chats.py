"""Multi-turn conversations about problems, copying tasks and code."""

import json
import random
import re
from collections.abc import Callable, Iterator
from functools import partial

from models.demo.copying import draw_copying
from models.demo.example import (
    Example,
    Message,
    Split,
    answer_of,
    assistant,
    drawn,
    split_of,
    user,
)
from models.demo.functions import draw_function
from models.demo.problems import draw_example
from models.demo.words import invented

Turn = tuple[str, str]

GREETINGS = (
    ("Hi!", "Hello! What can I do for you?"),
    ("Hello", "Hello! What can I do for you?"),
    ("Good morning!", "Good morning! What can I do for you?"),
    ("Can you help me?", "Yes. What can I do for you?"),
    (
        "Who are you?",
        "I am a small language model. I solve word problems, edit lists and JSON, "
        "and write short functions.",
    ),
)
THANKS = (
    ("Thanks!", "You are welcome!"),
    ("Thank you.", "You are welcome!"),
    ("Great, that is all.", "You are welcome!"),
)
MORE = ("", "Here is another one. ", "Next: ", "Thanks. Now this: ")


def _about_problem(rng: random.Random, question: str, answer: str) -> Turn:
    """Returns a follow-up about a worked answer."""
    *lines, _ = answer.split("\n")
    result = answer_of(answer) or 0
    n = rng.randrange(2, 50)
    more = f"{n} more: {result} + {n} = {result + n}\n#### {result + n}"
    return rng.choice(
        (
            ("Give me only the number.", f"{result}"),
            ("What was the first step?", lines[0]),
            ("What was the last step?", lines[-1]),
            ("How many steps did you need?", f"{len(lines)}"),
            ("Write the answer as JSON.", json.dumps({"answer": result})),
            ("Write the steps as a JSON list.", json.dumps(lines, indent=2)),
            ("Repeat my question.", question),
            (f"Add {n} to the result.", more),
            ("Explain it again.", answer),
        )
    )


def _about_copying(rng: random.Random, question: str, answer: str) -> Turn:
    """Returns a follow-up about a copied answer."""
    lines = answer.split("\n")
    return rng.choice(
        (
            ("Repeat that, please.", answer),
            ("Put it into a code block.", f"```\n{answer}\n```"),
            ("How many lines does your answer have?", f"{len(lines)}"),
            ("Show me only the last line.", lines[-1]),
            ("Put a > before each line.", "\n".join(f"> {line}" for line in lines)),
        )
    )


def _about_code(rng: random.Random, question: str, answer: str) -> Turn:
    """Returns a follow-up about a function."""
    name, argument = re.findall(r"def (\w+)\((\w+)\)", answer)[0]
    new = invented(rng)
    plain = re.sub(r'    """.*?"""\n', "", answer, flags=re.DOTALL)
    return rng.choice(
        (
            (f"Rename the function to {new}.", re.sub(rf"\b{name}\b", new, answer)),
            (f"Call the function {new} instead.", re.sub(rf"\b{name}\b", new, answer)),
            ("Now without the docstring.", plain),
            ("What is the name of its argument?", argument),
            ("Show the code again.", answer),
            ("Write the code without the code block.", answer[len("```python\n") : -len("\n```")]),
        )
    )


PARTS: tuple[tuple[Callable, Callable], ...] = (
    (draw_example, _about_problem),
    (draw_example, _about_problem),
    (draw_copying, _about_copying),
    (draw_function, _about_code),
)


def _part(rng: random.Random, split: Split) -> tuple[Example, Callable]:
    """Samples a task of the split with the function that generates its follow-ups."""
    draw, about = rng.choice(PARTS)
    while True:
        example = draw(rng)
        if split_of(example.keys[0]) == split:
            return example, about


def _draw(split: Split, rng: random.Random) -> Example:
    """Samples a conversation with two to five user turns."""
    turns: list[Turn] = []
    keys: list[str] = []
    if rng.random() < 0.2:
        turns.append(rng.choice(GREETINGS))
    for i in range(rng.randrange(1, 3)):
        example, about = _part(rng, split)
        question = example.messages[0]["content"]
        turns.append(((rng.choice(MORE) if i else "") + question, example.answer))
        if rng.random() < 0.7 or len(turns) == 1:
            turns.append(about(rng, question, example.answer))
        keys.append(example.keys[0])
    if rng.random() < 0.1:
        turns.append(rng.choice(THANKS))
    return Example("chats", _messages(turns), turns[-1][1], tuple(keys))


def _messages(turns: list[Turn]) -> list[Message]:
    """Returns all turns except the last reply."""
    told = [message for asked, said in turns for message in (user(asked), assistant(said))]
    return told[:-1]


def chats(split: Split, seed: int) -> Iterator[Example]:
    """Yields conversations of a split endlessly."""
    return drawn("chats", partial(_draw, split), split, seed)
