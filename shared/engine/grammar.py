"""What a request's grammar allows next: after its text, and after every node of a draft tree.

A grammar itself is somebody else's (`Grammar`): here is what a decode step needs of it. A mask is
made of the text's tokens that may come next and, where the grammar is satisfied, of the tokens that
end the text. A draft that the grammar forbids is never chosen, so what would follow it has no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Int32

from shared.boundary.buffers import mask_words
from shared.text.grammar_faults import BROKEN, NO_TOKEN


class Matcher(Protocol):
    """A text that follows a grammar, and where it stands in it."""

    @property
    def is_satisfied(self) -> bool:
        """Whether the text may end here."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether it must end here."""
        ...

    @property
    def fault(self) -> str:
        """Why it is of no more use, once it is not; one sentence."""
        ...

    def fill(self, bits: Int32[np.ndarray, " words"]) -> bool:
        """Writes the tokens that may come next, without those that end a text.

        Returns:
          Whether it could be found out; if not, the matcher is of no more use.
        """
        ...

    def take(self, token: int) -> bool:
        """Goes on by a token; False where it cannot, and then it is of no more use."""
        ...

    def take_back(self) -> None:
        """Goes back by the last token."""
        ...


class Grammar(Protocol):
    """A compiled grammar, which any number of texts may follow."""

    def matcher(self) -> Matcher:
        """At the beginning of a text."""
        ...


@dataclass(frozen=True)
class Masks:
    """The masks of a step's rows; see `shared.boundary.backend.Mask`.

    Attributes:
      bits: Of nodes with a grammar, without the row of all ones.
      index: Of each request and node, 0 the row of all ones and i + 1 that of bits i.
    """

    bits: Int32[np.ndarray, "Q words"]
    index: Int32[np.ndarray, "B N"]


class Constraint:
    """A request's grammar, and how far its text has come in it.

    Args:
      grammar: What the text follows.
      vocab: Tokens of a mask.
      stop_ids: Tokens that end the text.
      min_tokens: Tokens of the text before one of those is allowed, unless nothing else is.

    Attributes:
      fault: Why the request cannot go on; None: it can.
    """

    def __init__(
        self, grammar: Grammar, vocab: int, stop_ids: Sequence[int], min_tokens: int
    ) -> None:
        self._grammar, self._words = grammar, mask_words(vocab)
        self._stops, self._min_tokens = frozenset(stop_ids), min_tokens
        self._stop_bits = np.zeros(self._words, np.uint32)
        for token in self._stops:
            self._stop_bits[token // 32] |= np.uint32(1 << token % 32)
        self._matcher = grammar.matcher()
        self._text: list[int] = []
        self.fault: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow the text."""
        return self._matcher.is_over

    def take(self, token: int) -> bool:
        """A token was chosen that does not end the text; whether it belongs to it.

        If not there is a `fault`: the token is not allowed, or the matcher cannot go on by it.
        """
        if self._matcher.take(token):
            self._text.append(token)
            return True
        failed, bits = self._matcher, np.zeros(self._words, np.int32)
        was_allowed = not (self._begins_anew() and self._matcher.fill(bits)) or _has(bits, token)
        self.fault = failed.fault if was_allowed else BROKEN
        return False

    def _begins_anew(self) -> bool:
        """Brings a new matcher to where the text is; whether it came there."""
        self._matcher = self._grammar.matcher()
        return all(map(self._matcher.take, self._text))

    def masks(
        self, tokens: Sequence[int], parents: Sequence[int]
    ) -> dict[int, Int32[np.ndarray, " words"]] | None:
        """The mask of each node that the text can come to, and that can have one more behind it.

        Args:
          tokens, parents: Nodes of the request's tree; the root stands for its newest token.

        Returns:
          Masks by node. Without drafts (one node) it is that of the root alone. None where one
          could not be found out: then the tree is not to be used, and a `fault` says that even
          the root has none.
        """
        mask_of: dict[int, Int32[np.ndarray, " words"]] = {}
        children: list[list[int]] = [[] for _ in tokens]
        for node in range(1, len(tokens)):
            children[parents[node]].append(node)
        if self._walk(0, 0, tokens, children, mask_of):
            return mask_of
        failed = self._matcher
        if not self._begins_anew() or len(tokens) == 1:
            self.fault = self.fault or failed.fault
        return None

    def _walk(
        self,
        node: int,
        depth: int,
        tokens: Sequence[int],
        children: list[list[int]],
        mask_of: dict[int, Int32[np.ndarray, " words"]],
    ) -> bool:
        """Finds the masks of a node and of those below it; the matcher stands at the node."""
        bits = self._mask(depth)
        if bits is None:
            return False
        mask_of[node] = bits
        for child in children[node]:
            token = tokens[child]
            if token in self._stops or not _has(bits, token):
                continue
            if not self._matcher.take(token):
                return False
            if not self._matcher.is_over and not self._walk(
                child, depth + 1, tokens, children, mask_of
            ):
                return False
            self._matcher.take_back()
        return True

    def _mask(self, depth: int) -> Int32[np.ndarray, " words"] | None:
        bits = np.zeros(self._words, np.int32)
        if not self._matcher.fill(bits):
            return None
        bits &= ~self._stop_bits.view(np.int32)  # as text too such a token would end it
        has_text = bits.any()
        if self._matcher.is_satisfied:
            is_long_enough = len(self._text) + depth >= self._min_tokens
            if is_long_enough or not has_text:
                bits |= self._stop_bits.view(np.int32)
        if not bits.any():
            self.fault = NO_TOKEN if not depth else None
            return None
        return bits


def _has(bits: Int32[np.ndarray, " words"], token: int) -> bool:
    return bool(bits[token // 32] >> (token % 32) & 1)
