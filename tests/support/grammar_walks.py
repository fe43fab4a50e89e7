"""Texts that a grammar allows, chosen token by token as an engine would choose them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from shared.engine.grammar import Grammar, GrammarState
from shared.text.call_formats.qwen3_coder import PARAMETER_END
from shared.text.delimiters import CALL, THINK_END

ENDINGS = [
    text.encode()
    for text in (
        *(THINK_END, CALL, f"\n{PARAMETER_END}\n", "</arg_value>"),
        *('"', "}", "]", "\n", "0"),
    )
]
"""Texts that end unbounded parts of an output."""

OF_STYLES = {
    "gemma4": ['<|"|>', "<channel|>", ":"],
    "functiongemma": ["<escape>", ":"],
    "harmony": ["<|end|>"],
    "deepseek_v32": ["</｜DSML｜parameter>"],
    "deepseek_v4": ["</｜DSML｜parameter>"],
    "kimi_k3": ["<|close|>argument<|sep|>", "<|close|>think<|sep|>"],
    "hy3": ["</arg_value:opensource>", "</think:opensource>"],
    "cohere": ["<|END_THINKING|>"],
    "mistral": ["[/THINK]"],
}
"""Further ones of tool-call formats; a walk chooses them in half of the cases."""


def walk(
    grammar: Grammar,
    vocab: int,
    end: int,
    named: Mapping[bytes, Sequence[int]],
    seed: int,
    *,
    most: int,
    begun: str = "",
    style: str = "",
) -> list[int]:
    """A text of a grammar without the token that ends it: some tokens at random, then endings.

    Args:
      grammar, vocab, end: As `GrammarState` takes them.
      named: The tokens of some byte strings.
      seed: Of the choices.
      most: Tokens after which the text must be over.
      begun: With what it begins.
      style: Tool-call format of the grammar.
    """
    of_style = [each.encode() for each in OF_STYLES.get(style, ())]
    chosen, tokens, rest, is_begun = random.Random(seed), [], begun.encode(), not begun
    held = GrammarState(grammar, vocab, (end,), 0)
    while not held.is_terminated:
        masks = held.masks([0], [0])
        assert masks is not None, held.fault
        allowed = np.unpackbits(masks[0].view(np.uint8), bitorder="little")
        is_begun = is_begun or not rest
        if allowed[end] and is_begun:
            break
        found = _longest(rest, named, allowed)
        if not (found or is_begun):
            found = _beyond(rest, named, allowed)
            assert found, f"{rest} is not allowed"
        if found is None:
            may_wander = allowed.sum() > 1 and len(tokens) < most // 4 and chosen.random() < 0.7
            endings = of_style if of_style and chosen.random() < 0.5 else ENDINGS
            known = [each for each in endings if _longest(each, named, allowed)]
            rest = b"" if may_wander or not known else chosen.choice(known)
            found = _longest(rest, named, allowed)
        size, token = found or (0, int(chosen.choice(np.flatnonzero(allowed))))
        rest = rest[size:]
        assert held.take(token), held.fault
        tokens.append(token)
        assert len(tokens) < most, "the text comes to no end"
    return tokens


def _longest(
    text: bytes, named: Mapping[bytes, Sequence[int]], allowed: np.ndarray
) -> tuple[int, int] | None:
    """Returns length and id of the allowed token with the longest match of a text's beginning, or
    None.
    """
    for size in range(len(text), 0, -1):
        for token in named.get(text[:size], ()):
            if allowed[token]:
                return size, token
    return None


def _beyond(
    text: bytes, named: Mapping[bytes, Sequence[int]], allowed: np.ndarray
) -> tuple[int, int] | None:
    """Length of a text and id of an allowed token that begins with it, or None.

    Where the text that follows is certain, a grammar allows only the token that spans the border.
    """
    for name, tokens in named.items():
        if name.startswith(text):
            for token in tokens:
                if allowed[token]:
                    return len(text), token
    return None
