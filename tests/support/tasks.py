"""The demo model's held-out tasks as prompts, and whether an answer is right."""

from dataclasses import dataclass
from itertools import islice

from models.demo.data import KINDS, Example, answer_of
from models.demo.tools import calls_of
from shared.text.chat_template import Conversation
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
        return cls(kind, examples, [prompt_of(example, tokenizer) for example in examples])


def prompt_of(example: Example, tokenizer: Tokenizer) -> Prompt:
    """The conversation of an example with its tools, in the tokenizer's chat form."""
    chat = Conversation(list(example.messages), list(example.tools))
    return tuple(tokenizer.encode_more(tokenizer.render_chat(chat)))


def is_right(kind: str, text: str, answer: str) -> bool:
    """Returns whether a reply is right.

    Problems are compared by their number, calls by name and arguments, other replies as text.
    """
    if kind == "problems":
        return answer_of(text) is not None and answer_of(text) == answer_of(answer)
    if kind == "tools" and (calls := calls_of(answer)) is not None:
        return calls_of(text) == calls
    return text == answer
