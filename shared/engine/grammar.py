"""Grammar state of a request: token bitmasks after its output and after every node of a draft tree.

The grammar engine is external (`Grammar`). A mask contains the tokens that may come next and, if
the grammar is satisfied, the stop tokens. A draft token that the grammar forbids is never chosen,
so the nodes below it have no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Int32

from shared.boundary.grammar_bitmask import mask_words
from shared.text.grammar_errors import BROKEN, NO_TOKEN


class Matcher(Protocol):
    """Position of one output in a grammar."""

    @property
    def is_satisfied(self) -> bool:
        """True if the output may end here."""
        ...

    @property
    def is_terminated(self) -> bool:
        """True if the output must end here."""
        ...

    @property
    def fault(self) -> str:
        """Reason of a failure, after which the matcher is unusable; one sentence."""
        ...

    def fill(self, bits: Int32[np.ndarray, " words"]) -> bool:
        """Writes the bitmask of tokens that may come next, without stop tokens.

        Returns:
          False if it failed; the matcher is unusable then.
        """
        ...

    def take(self, token: int) -> bool:
        """Advances by a token; returns False if that fails, and the matcher is unusable then."""
        ...

    def rollback(self) -> None:
        """Rolls back the last token."""
        ...


class Grammar(Protocol):
    """A compiled grammar for any number of outputs."""

    def matcher(self) -> Matcher:
        """Returns a matcher at the start of an output."""
        ...


@dataclass(frozen=True)
class BitmaskRows:
    """Bitmasks of a step's rows; see `shared.boundary.backend.Mask`.

    Attributes:
      bits: Masks of nodes with a grammar, without the mask of all ones.
      index: Mask of each request and node: 0 for all ones, i + 1 for `bits[i]`.
    """

    bits: Int32[np.ndarray, "Q words"]
    index: Int32[np.ndarray, "B N"]


class GrammarState:
    """Grammar of a request, and the state of its output in it.

    Args:
      grammar: Grammar of the output.
      vocab: Tokens of a mask.
      stop_ids: Stop tokens.
      min_tokens: Output tokens before a stop token is allowed, unless nothing else is.

    Attributes:
      fault: Reason why the request cannot continue; None if it can.
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
    def is_terminated(self) -> bool:
        """True if nothing may follow the output."""
        return self._matcher.is_terminated

    def take(self, token: int) -> bool:
        """Advances by a sampled token that is not a stop token; returns False if it does not match.

        In that case `fault` is set: the token is not allowed, or the matcher failed.
        """
        if self._matcher.take(token):
            self._text.append(token)
            return True
        failed, bits = self._matcher, np.zeros(self._words, np.int32)
        was_allowed = not (self._begins_anew() and self._matcher.fill(bits)) or _has(bits, token)
        self.fault = failed.fault if was_allowed else BROKEN
        return False

    def _begins_anew(self) -> bool:
        """Creates a new matcher and advances it to the current output; returns False if that
        fails.
        """
        self._matcher = self._grammar.matcher()
        return all(map(self._matcher.take, self._text))

    def masks(
        self, tokens: Sequence[int], parents: Sequence[int]
    ) -> dict[int, Int32[np.ndarray, " words"]] | None:
        """Returns the masks of all nodes that the grammar allows and that may have a successor.

        Args:
          tokens, parents: Nodes of the request's tree; the root is its newest token.

        Returns:
          Masks by node; without draft tokens (one node) only the root's. None if one failed: the
          tree must not be used then, and `fault` is set if even the root has no mask.
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
        """Computes the masks of a node and of the nodes below it; the matcher is positioned at the
        node.
        """
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
            if not self._matcher.is_terminated and not self._walk(
                child, depth + 1, tokens, children, mask_of
            ):
                return False
            self._matcher.rollback()
        return True

    def _mask(self, depth: int) -> Int32[np.ndarray, " words"] | None:
        bits = np.zeros(self._words, np.int32)
        if not self._matcher.fill(bits):
            return None
        bits &= ~self._stop_bits.view(np.int32)  # a stop token always ends the output
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
