"""The demo model's held-out tasks as prompts, and whether an answer is right."""

from dataclasses import dataclass
from itertools import islice

from models.demo.data import KINDS, Example, answer_of
from shared.text.tokenizer import Tokenizer

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Tasks:
    """The held-out tasks of one kind."""

    kind: str
    examples: list[Example]
    prompts: list[Prompt]

    @classmethod
    def of(cls, kind: str, count: int, seed: int, tokenizer: Tokenizer) -> "Tasks":
        """The first `count` tasks of a seed in the tokenizer's chat form."""
        examples = list(islice(KINDS[kind]("held_out", seed), count))
        prompts = [tuple(tokenizer.encode_chat(example.messages)) for example in examples]
        return cls(kind, examples, prompts)


def is_right(kind: str, text: str, answer: str) -> bool:
    """Returns whether a reply is right: by its number for a problem, else by every letter."""
    if kind == "problems":
        return answer_of(text) is not None and answer_of(text) == answer_of(answer)
    return text == answer
