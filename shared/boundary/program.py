"""What a backend compiles or captures once: a step's work, its sizes, and what few steps have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, Flag

from shared.spec.draft_tree import TreeShape


class Work(Enum):
    """What a step does."""

    PREFILL = "prefill"
    DECODE = "decode"
    DRAFT = "draft"
    COUNT = "count"
    ENCODE = "encode"


CAPTURED = (Work.DECODE, Work.DRAFT, Work.PREFILL, Work.ENCODE)
"""What is captured where steps can be."""


class Extra(Flag):
    """What a step brings or gives beside what every step of its work does, or several of these.

    Attributes:
      HOST_DRAFT: The tree comes with the plan (`HostDraft`), not from the device's drafter.
      COPIES: Copies of seen text come with the plan, and join what the device's drafter grows.
      MASK: Masks of grammars come with the plan (`Mask`).
      LOGPROBS: The result holds logprobs; which rows report them, the plan says.
      SCORES: Of a prefill: the result holds the scores of all its tokens.
      TEXTS: The device drafts from its table of n-grams, not with a drafter.
    """

    NONE = 0
    HOST_DRAFT = 1
    MASK = 2
    LOGPROBS = 4
    SCORES = 8
    COPIES = 16
    TEXTS = 32


OF_A_PLAN = Extra.HOST_DRAFT | Extra.MASK | Extra.COPIES
"""What a plan brings, so that a program with it takes no plan without; the others a result has,
where it may be more than was asked for."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is compiled or captured once: the work of a step and the sizes of its arrays.

    Attributes:
      work: What the step does.
      batch: B, rows of the plan.
      pages: P, columns of the page table.
      tokens: T, flat tokens of a prefill or a count, patches of an encoding; 0 elsewhere.
      shape: Draft tree of a decode or a draft; the one-node tree elsewhere.
      extras: What its plans and results have that not all of its work have.
      blocks: Of the tower, which an encoding runs; none elsewhere. One that begins behind the first
        goes on with the picture of the encoding before it.
    """

    work: Work
    batch: int
    pages: int
    tokens: int
    shape: TreeShape
    extras: Extra
    blocks: range = range(0)

    def has(self, extra: Extra) -> bool:
        """Whether it is one of the program's extras."""
        return extra in self.extras

    def having(self, wanted: Mapping[Extra, bool]) -> Program:
        """The same program with these extras, or without them."""
        extras = self.extras
        for extra, is_wanted in wanted.items():
            extras = extras | extra if is_wanted else extras & ~extra
        return replace(self, extras=extras)

    @property
    def is_chain(self) -> bool:
        """Whether every tree is a chain; those of a plan or of seen text may be anything."""
        branches = bool(self.extras & (Extra.HOST_DRAFT | Extra.COPIES | Extra.TEXTS))
        return self.shape.width <= 1 and not branches

    @property
    def drafts_on_device(self) -> bool:
        """Whether the device makes the trees of the step."""
        drafts = self.work in (Work.DECODE, Work.DRAFT)
        return drafts and not self.has(Extra.HOST_DRAFT) and not self.shape.is_plain

    @property
    def shares_rows(self) -> bool:
        """Whether the drafts of the batch compete for its verify rows; see `spec.verify_rows`."""
        return self.drafts_on_device and self.shape.shares_rows(self.batch)

    def __str__(self) -> str:
        """The sizes in words."""
        sizes = [f"{self.batch} rows"]
        of = "patches" if self.work is Work.ENCODE else "tokens"
        sizes += [f"{self.tokens} {of}"] * bool(self.tokens)
        sizes += [f"blocks {b.start} to {b.stop - 1}" for b in [self.blocks] if b]
        sizes += [f"{self.shape.nodes} nodes"] * (not self.shape.is_plain)
        sizes += [f"{self.shape.rows} verify rows"] * self.shape.shares_rows(self.batch)
        sizes += [f"{self.pages} pages"]
        named = [str(extra.name).lower().replace("_", " ") for extra in self.extras]
        return f"{self.work.value} of {', '.join(sizes + named)}"


def unmasked(programs: Sequence[Program]) -> tuple[Program, ...]:
    """Returns the programs of batches in which no request has a grammar.

    A program that takes masks is one of them where no other has its batch and its tree: rows
    without a grammar then have the mask of all ones.
    """
    plain = [program for program in programs if not program.has(Extra.MASK)]
    known = {_batch_and_tree(program) for program in plain}
    return (*plain, *(p for p in programs if p not in plain and _batch_and_tree(p) not in known))


def _batch_and_tree(program: Program) -> tuple[Work, int, tuple[int, ...], bool]:
    brought = program.has(Extra.HOST_DRAFT)
    return program.work, program.batch, program.shape.tree, brought
