"""Scores of a run: right answers, accepted drafts, and outputs that no drafter may change.

With exact matching every drafter must return the outputs of the first one, at any temperature and
on either backend. A different output is compared with the specification
(`tests/support/equality.py`): only a near tie is excused.
"""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.engine.request import Request
from tests.support.equality import MOST_EXCUSED, Oracle

Row = dict[str, Any]


def text_hash(outputs: Sequence[Sequence[int]]) -> str:
    """One hash of the tokens of all texts, in their order."""
    lines = "\n".join(" ".join(map(str, tokens)) for tokens in outputs)
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


@dataclass
class Texts:
    """The first texts of every temperature and kind, and what later ones did to them.

    Attributes:
      oracle: Distinguishes near ties from faults; None if every difference is a fault.
      tokens, excused, wrong: What was compared: tokens, near ties, and texts that are wrong.
    """

    oracle: Oracle | None
    tokens: int = 0
    excused: int = 0
    wrong: int = 0
    _first: dict[tuple[float, str], list[list[int]]] = field(default_factory=dict)

    def compare(
        self, row: Row, requests: Sequence[Request], outputs: list[list[int]]
    ) -> tuple[int, int]:
        """Returns the number of outputs that differ by near ties, and by other faults.

        A row that preserves only the distribution is not compared.
        """
        if not row["keeps_text"]:
            return 0, 0
        first = self._first.setdefault((row["temperature"], row["kind"]), outputs)
        excused = wrong = 0
        for index, (want, got) in enumerate(zip(first, outputs, strict=True)):
            if want == got:
                continue
            is_tie = self._is_near_tie(requests[index], want, got)
            excused, wrong = excused + is_tie, wrong + (not is_tie)
            _say_difference(row, index, want, got, is_tie)
        self.tokens += sum(map(len, outputs))
        self.excused, self.wrong = self.excused + excused, self.wrong + wrong
        return excused, wrong

    def _is_near_tie(self, request: Request, *outputs: list[int]) -> bool:
        if self.oracle is None:
            return False
        try:
            for output in outputs:
                self.oracle.check(request.prompt, output, request.sampling)
        except AssertionError as error:
            print(error, file=sys.stderr)
            return False
        return True

    @property
    def are_equal(self) -> bool:
        """True if no output is wrong and near ties are rare enough."""
        return not self.wrong and self.excused <= max(1, MOST_EXCUSED * self.tokens)


def _say_difference(row: Row, index: int, want: list[int], got: list[int], is_tie: bool) -> None:
    place = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), len(want))
    what = "a near tie, excused" if is_tie else "THE TEXT CHANGED"
    print(
        f"{what}: {row['algorithm']} on {row['backend']}, {row['kind']} {index} at temperature "
        f"{row['temperature']:g}, token {place}: {want[place : place + 8]} became "
        f"{got[place : place + 8]}",
        file=sys.stderr,
        flush=True,
    )
