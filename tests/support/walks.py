"""Texts that a grammar allows, chosen token by token as an engine would choose them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from shared.engine.grammar import Constraint, Grammar
from shared.text.marks import CALL, PARAMETER_END, THINK_END

ENDINGS = (THINK_END, CALL, f"\n{PARAMETER_END}\n", '"', "}", "]", "\n", "0")
"""What ends the parts of a text that could go on for ever."""


def walk(
    grammar: Grammar, vocab: int, end: int, endings: Sequence[list[int]], seed: int, most: int = 400
) -> list[int]:
    """A text of a grammar without the token that ends it: some tokens at random, then endings.

    Args:
      grammar, vocab, end: As `Constraint` takes them.
      endings: Tokens of `ENDINGS`.
      seed: Of the choices.
      most: Tokens after which the text must be over.
    """
    chosen, tokens, rest = random.Random(seed), [], []
    held = Constraint(grammar, vocab, (end,), 0)
    while not held.is_over:
        masks = held.masks([0], [0])
        assert masks is not None, held.fault
        allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
        if end in allowed:
            break
        if not (rest and rest[0] in allowed):
            may_wander = len(allowed) > 1 and len(tokens) < most // 4 and chosen.random() < 0.7
            known = [] if may_wander else [each for each in endings if each[0] in allowed]
            rest = list(chosen.choice(known)) if known else [int(chosen.choice(allowed))]
        token = rest.pop(0)
        assert held.take(token), held.fault
        tokens.append(token)
        assert len(tokens) < most, "the text comes to no end"
    return tokens
