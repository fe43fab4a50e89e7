"""Grade-school word problems with worked answers that end in `#### N`.

Source: our own plans, sentences and words; nothing is taken from a published set.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from models.demo import items, money, openings
from models.demo.example import Example, Split, drawn, user
from models.demo.scenes import SCENES
from models.demo.story import Step, Story

Part = tuple[int, Callable[[Story], bool]]

OPERATIONS = (1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5)  # of a story that is generated event by event
SCENE_SHARE = 0.3
DISTRACTED_SHARE = 0.25
JOINED_SHARE = 0.25  # of the sentences that start with a pronoun
LARGEST = 999  # three digits

FRAMES = (
    ("{story} {question}",) * 12
    + ("Question: {story} {question}",)
    + ("{story} {question} Think step by step.",)
    + ("Solve this problem.\n{story} {question}",)
    + ("{story}\n{question}",)
    + ("{question} {story}",)
    + ("Please help me with this: {story} {question}",)
)


@dataclass(frozen=True)
class Problem:
    """A problem in words and its plan.

    Attributes:
      text: The problem in words.
      steps: The operations; the last result is the answer.
      lines: The worked steps as text.
      noise: Irrelevant numbers of the text.
    """

    text: str
    steps: tuple[Step, ...]
    lines: tuple[str, ...]
    noise: tuple[int, ...]

    @property
    def result(self) -> int:
        """The final number."""
        return self.steps[-1].result

    @property
    def key(self) -> str:
        """The plan with its numbers; equal for problems that differ in wording only."""
        return "; ".join(f"{s.left} {s.op} {s.right}" for s in self.steps)

    @property
    def answer(self) -> str:
        """The worked answer."""
        return "\n".join((*self.lines, f"#### {self.result}"))


def draw_problem(rng: random.Random) -> Problem:
    """Samples a problem of either split."""
    while True:
        story = Story(rng)
        if rng.random() < SCENE_SHARE:
            rng.choice(SCENES)(story)
            _insert_distractor(story)
        elif not _tell(story, rng.choice(OPERATIONS)):
            continue
        if all(0 < step.result <= LARGEST for step in story.steps):
            return _finish(story)


def _tell(story: Story, operations: int) -> bool:
    """Adds events until no operations remain; returns False if the numbers do not fit."""
    rng = story.rng
    counts_things = rng.random() < 0.7
    starts = openings.THINGS if counts_things else openings.MONEY
    used = _take(story, starts, operations)
    if used is None:
        return False
    left = operations - used
    distract_at = rng.randrange(1, 4) if rng.random() < DISTRACTED_SHARE else 0
    while left:
        if left == distract_at:
            story.distract()
        events = items.EVENTS if counts_things else money.EVENTS
        endings = items.ENDINGS if counts_things else money.ENDINGS
        if left == 1 and rng.random() < 0.4:
            return _take(story, endings, left) is not None
        if counts_things and rng.random() < 0.12 and money.sell(story):
            counts_things, left = False, left - 1
            continue
        used = _take(story, events, left)
        if used is None or story.value > items.MOST:
            return False
        left -= used
    return True


def _take(story: Story, parts: Sequence[Part], most: int) -> int | None:
    """Adds a part and returns its operations; None if they exceed the limit or nothing fits."""
    operations, tell = story.rng.choice(parts)
    return operations if operations <= most and tell(story) else None


def _insert_distractor(story: Story) -> None:
    """Adds a distractor sentence first or last, so every pronoun keeps its antecedent."""
    if story.rng.random() < DISTRACTED_SHARE:
        story.distract()
        if story.rng.random() < 0.5:
            story.sentences.insert(0, story.sentences.pop())


def _joined(story: Story) -> str:
    """Joins the sentences to a text; merges some pairs with `and`."""
    pronoun, text = f"{story.words['He']} ", story.sentences[0]
    for sentence in story.sentences[1:]:
        if sentence.startswith(pronoun) and story.rng.random() < JOINED_SHARE:
            link = story.rng.choice((", and ", ", and then ")) + sentence[0].lower()
            text = text.removesuffix(".") + link + sentence[1:]
        else:
            text = f"{text} {sentence}"
    return text


def _finish(story: Story) -> Problem:
    frame = story.rng.choice(FRAMES)
    text = frame.format(story=_joined(story), question=story.ask())
    return Problem(text, tuple(story.steps), tuple(story.lines), tuple(story.noise))


def draw_example(rng: random.Random) -> Example:
    """Samples an example with a problem of either split."""
    problem = draw_problem(rng)
    return Example("problems", [user(problem.text)], problem.answer, (problem.key,))


def problems(split: Split, seed: int) -> Iterator[Example]:
    """Yields word problems of a split endlessly."""
    return drawn("problems", draw_example, split, seed)
