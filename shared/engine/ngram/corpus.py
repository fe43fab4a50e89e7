"""The suffix automaton of an external corpus, and how texts are followed through it.

The automaton knows every run of tokens of the corpus. Following a text token by token it always
stands at the longest end of the text that occurs in the corpus, and knows where that occurs first;
what comes next there is the draft. Documents are separated, so that no draft runs from one into the
next.

Source: Blumer et al. 1985, The smallest automaton recognizing the subwords of a text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from shared.engine.compiled import compiled

SEPARATOR = -1
LENGTH, LINK, END, EDGE = range(4)
"""Columns of a state: tokens of its longest run, the state of the longest end of that run which
occurs elsewhere, where the run first ends, and its newest edge."""

SOURCE, LABEL, TARGET, SIBLING, CHAIN = range(5)
"""Columns of an edge: its state, its token, where it leads, the state's edge before it, and the
next edge of its hash bucket. Edge 0 is none."""


@dataclass(frozen=True)
class Corpus:
    """A corpus and its automaton, about 100 bytes a token.

    Attributes:
      tokens: Its documents, each with `SEPARATOR` after it.
      states, edges: See the columns above; state 0 is the start.
      buckets: First edge of each hash bucket, by state and token; a power of two.
    """

    tokens: Int32[np.ndarray, " T"]
    states: Int32[np.ndarray, "states columns"]
    edges: Int32[np.ndarray, "edges columns"]
    buckets: Int32[np.ndarray, " buckets"]

    @classmethod
    def build(cls, tokens: Int32[np.ndarray, " T"]) -> Corpus:
        """The automaton of documents with their separators; takes about a second a million."""
        tokens = np.array(tokens, np.int32)  # loops are compiled anew for what is read-only
        most = max(1, len(tokens))
        states = np.zeros((2 * most, 4), np.int32)
        edges = np.zeros((3 * most + 1, 5), np.int32)
        buckets = np.zeros(1 << (2 * most).bit_length(), np.int32)
        num_states, num_edges = build(tokens, states, edges, buckets)
        return cls(tokens, states[:num_states].copy(), edges[:num_edges].copy(), buckets)

    @property
    def num_tokens(self) -> int:
        """Tokens without the separators."""
        return int((self.tokens != SEPARATOR).sum())


@compiled
def _bucket(state: int, token: int, buckets: Int32[np.ndarray, " buckets"]) -> int:
    key = state * 0x9E3779B1 + (token + 1) * 0x85EBCA77
    return (key ^ (key >> 29)) & (len(buckets) - 1)


@compiled
def _find(
    edges: Int32[np.ndarray, "edges columns"],
    buckets: Int32[np.ndarray, " buckets"],
    state: int,
    token: int,
) -> int:
    edge = buckets[_bucket(state, token, buckets)]
    while edge and (edges[edge, SOURCE] != state or edges[edge, LABEL] != token):
        edge = edges[edge, CHAIN]
    return edge


@compiled
def _connect(
    states: Int32[np.ndarray, "states columns"],
    edges: Int32[np.ndarray, "edges columns"],
    buckets: Int32[np.ndarray, " buckets"],
    edge: int,
    state: int,
    token: int,
    target: int,
) -> int:
    """Writes a new edge; returns the number of the next one."""
    at = _bucket(state, token, buckets)
    edges[edge, SOURCE], edges[edge, LABEL], edges[edge, TARGET] = state, token, target
    edges[edge, SIBLING], edges[edge, CHAIN] = states[state, EDGE], buckets[at]
    states[state, EDGE] = buckets[at] = edge
    return edge + 1


@compiled
def build(
    tokens: Int32[np.ndarray, " T"],
    states: Int32[np.ndarray, "states columns"],
    edges: Int32[np.ndarray, "edges columns"],
    buckets: Int32[np.ndarray, " buckets"],
) -> tuple[int, int]:
    """Fills the automaton token by token; returns how many states and edges it has."""
    last, num_states, num_edges = 0, 1, 1
    states[0, LINK] = -1
    for place in range(len(tokens)):
        token, new = tokens[place], num_states
        num_states += 1
        states[new, LENGTH], states[new, END] = states[last, LENGTH] + 1, place
        state, edge = last, 0
        while state != -1:
            edge = _find(edges, buckets, state, token)
            if edge:
                break
            num_edges = _connect(states, edges, buckets, num_edges, state, token, new)
            state = states[state, LINK]
        last = new
        if state == -1:
            continue
        target = edges[edge, TARGET]
        if states[target, LENGTH] == states[state, LENGTH] + 1:
            states[new, LINK] = target
            continue
        # The target is also reached by longer runs, which end in fewer places: split it.
        clone = num_states
        num_states += 1
        states[clone] = states[target]
        states[clone, LENGTH], states[clone, EDGE] = states[state, LENGTH] + 1, 0
        copied = states[target, EDGE]
        while copied:
            num_edges = _connect(
                states, edges, buckets, num_edges,
                clone, edges[copied, LABEL], edges[copied, TARGET],
            )  # fmt: skip
            copied = edges[copied, SIBLING]
        while state != -1:
            edge = _find(edges, buckets, state, token)
            if edge == 0 or edges[edge, TARGET] != target:
                break
            edges[edge, TARGET] = clone
            state = states[state, LINK]
        states[target, LINK] = states[new, LINK] = clone
    return num_states, num_edges


@compiled
def follow(
    states: Int32[np.ndarray, "states columns"],
    edges: Int32[np.ndarray, "edges columns"],
    buckets: Int32[np.ndarray, " buckets"],
    at: Int32[np.ndarray, "texts 2"],
    texts: Int32[np.ndarray, " n"],
    tokens: Int32[np.ndarray, " T"],
    starts: Int32[np.ndarray, " n+1"],
) -> None:
    """Follows texts through the automaton by their new tokens.

    Args:
      at: [texts, 2] state of each text, and how many of its newest tokens it matches.
      texts: [n] rows of `at`.
      tokens, starts: Tokens of all n texts one after the other, and where each begins, and the end.
    """
    for index in range(len(texts)):
        state, length = at[texts[index], 0], at[texts[index], 1]
        for place in range(starts[index], starts[index + 1]):
            edge = _find(edges, buckets, state, tokens[place])
            while edge == 0 and state != 0:
                state = states[state, LINK]
                length = states[state, LENGTH]
                edge = _find(edges, buckets, state, tokens[place])
            if edge:
                state, length = edges[edge, TARGET], length + 1
        at[texts[index], 0], at[texts[index], 1] = state, length


@compiled
def continuations(
    corpus: Int32[np.ndarray, " T"],
    states: Int32[np.ndarray, "states columns"],
    at: Int32[np.ndarray, "texts 2"],
    texts: Int32[np.ndarray, " n"],
    paths: Int32[np.ndarray, "n S"],
    sizes: Int32[np.ndarray, " n"],
    matched: Int32[np.ndarray, " n"],
) -> None:
    """What follows each text where its match first occurs.

    Args:
      corpus: Tokens of the corpus.
      at, texts: As in `follow`.
      paths: [n, S] is filled with at most S tokens of each text's continuation.
      sizes: [n] is filled with how many there are.
      matched: [n] is filled with the length of the match.
    """
    for index in range(len(texts)):
        state, length = at[texts[index], 0], at[texts[index], 1]
        sizes[index], matched[index] = 0, length
        place = states[state, END] + 1
        while length and sizes[index] < paths.shape[1] and place < len(corpus):
            if corpus[place] == SEPARATOR:
                break
            paths[index, sizes[index]] = corpus[place]
            sizes[index] += 1
            place += 1
