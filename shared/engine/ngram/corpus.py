"""Suffix automaton of an external corpus, and matching of requests against it.

The automaton contains every substring of the corpus. Advanced token by token, it holds the longest
suffix of a sequence that occurs in the corpus, and the position of its first occurrence. The tokens
after that position are the draft. Documents are separated, so that no draft crosses documents.

Source: Blumer et al. 1985, The smallest automaton recognizing the subwords of a text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from shared.engine.jit import compiled

SEPARATOR = -1
LENGTH, LINK, END, EDGE = range(4)
"""Columns of a state: length of its longest substring, suffix link, position of the first end, and
its newest edge."""

SOURCE, LABEL, TARGET, SIBLING, CHAIN = range(5)
"""Columns of an edge: source state, token, target state, the state's previous edge, and the next
edge of its hash bucket. Edge 0 means none."""


@dataclass(frozen=True)
class Corpus:
    """A corpus and its automaton, about 100 bytes per token.

    Attributes:
      tokens: Its documents, each followed by `SEPARATOR`.
      states, edges: See the columns above; state 0 is the start.
      buckets: First edge of each hash bucket, by state and token; the number of buckets is a power
        of two.
    """

    tokens: Int32[np.ndarray, " T"]
    states: Int32[np.ndarray, "states columns"]
    edges: Int32[np.ndarray, "edges columns"]
    buckets: Int32[np.ndarray, " buckets"]

    @classmethod
    def build(cls, tokens: Int32[np.ndarray, " T"]) -> Corpus:
        """Builds the automaton of documents with separators; takes about one second per million
        tokens.
        """
        tokens = np.array(tokens, np.int32)  # numba compiles loops again for read-only arrays
        most = max(1, len(tokens))
        states = np.zeros((2 * most, 4), np.int32)
        edges = np.zeros((3 * most + 1, 5), np.int32)
        buckets = np.zeros(1 << (2 * most).bit_length(), np.int32)
        num_states, num_edges = build(tokens, states, edges, buckets)
        return cls(tokens, states[:num_states].copy(), edges[:num_edges].copy(), buckets)

    @property
    def num_tokens(self) -> int:
        """Number of tokens without separators."""
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
    """Writes a new edge; returns the index of the next one."""
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
    """Fills the automaton token by token; returns the numbers of states and edges."""
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
        # The target also represents longer substrings with fewer occurrences: split it.
        clone = num_states
        num_states += 1
        states[clone] = states[target]
        states[clone, LENGTH], states[clone, EDGE] = states[state, LENGTH] + 1, 0
        copied = states[target, EDGE]
        while copied:
            num_edges = _connect(
                states,
                edges,
                buckets,
                num_edges,
                clone,
                edges[copied, LABEL],
                edges[copied, TARGET],
            )
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
    """Advances sequences in the automaton by their new tokens.

    Args:
      states, edges, buckets: The automaton.
      at: [texts, 2] state of each sequence, and the length of its match.
      texts: [n] rows of `at`.
      tokens, starts: New tokens of all n sequences, concatenated; start of each, and the end.
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
    """Fills the tokens that follow each sequence's match at its first occurrence.

    Args:
      corpus: Tokens of the corpus.
      states: States of the automaton.
      at, texts: See `follow`.
      paths: [n, S] filled with at most S tokens of each continuation.
      sizes: [n] filled with their number.
      matched: [n] filled with the length of the match.
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
