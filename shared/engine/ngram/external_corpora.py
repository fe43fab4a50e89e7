"""External corpora of the n-gram index, and the match of each sequence in them."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32

from shared.engine.checks import check_ids
from shared.engine.ngram.corpus import SEPARATOR, Corpus, continuations, follow
from shared.engine.ngram.tree import CorpusContinuations
from shared.engine.ngram.trie import NewTokens
from shared.engine.request import InvalidRequestError
from shared.options.ngram import NgramConfig


class ExternalCorpora:
    """Corpora by name, and the match state of each sequence in each corpus.

    Args:
      config: Settings of the n-gram index: draft nodes for corpora, and their maximum tokens.
      vocab: Vocabulary size of the target.
      num_rows: Number of sequences.
    """

    def __init__(self, config: NgramConfig, vocab: int, num_rows: int) -> None:
        self._config, self._vocab, self._num_rows = config, vocab, num_rows
        self._corpora: dict[str, Corpus] = {}
        self._states: dict[str, Int32[np.ndarray, "rows 2"]] = {}

    @property
    def sizes(self) -> dict[str, int]:
        """Tokens of each corpus by name, in the order of insertion."""
        return {name: corpus.num_tokens for name, corpus in self._corpora.items()}

    def check(self, name: str, tokens: Int32[np.ndarray, " T"]) -> None:
        """Checks that a corpus can be added.

        Args:
          name: Name of the corpus.
          tokens: Its documents, each followed by a separator.

        Raises:
          InvalidRequestError: Names the field at fault.
        """
        sizes, most = self.sizes, self._config.speculative_ngram_external_corpus_max_tokens
        words = tokens[tokens != SEPARATOR]
        if not self._config.sam_budget:
            raise InvalidRequestError(
                "corpus_id",
                "external corpora require draft nodes; start the server with "
                "--speculative-ngram-external-sam-budget",
            )
        if name in sizes:
            raise InvalidRequestError(
                "corpus_id", f"corpus {name!r:.200} already exists; remove it first"
            )
        if not len(words):
            raise InvalidRequestError("documents", "documents must have at least one token")
        check_ids("documents", (int(words.min()), int(words.max())), self._vocab)
        total = sum(sizes.values()) + len(words)
        if total > most:
            raise InvalidRequestError(
                "documents",
                f"documents would make {total} tokens of external corpora, and "
                f"--speculative-ngram-external-corpus-max-tokens is {most}",
            )

    def add(self, name: str, corpus: Corpus) -> None:
        """Adds a corpus; sequences are matched in it from their next token on.

        Raises:
          InvalidRequestError: See `check`.
        """
        self.check(name, corpus.tokens)
        self._corpora[name] = corpus
        self._states[name] = np.zeros((self._num_rows, 2), np.int32)

    def remove(self, name: str) -> None:
        """Removes a corpus.

        Raises:
          InvalidRequestError: No corpus has this name.
        """
        if name not in self._corpora:
            raise InvalidRequestError("corpus_id", f"corpus {name!r:.200} not found")
        del self._corpora[name], self._states[name]

    def reset(self, row: int) -> None:
        """Clears the matches of one row, for a new sequence."""
        for states in self._states.values():
            states[row] = 0

    def resize(self, num_rows: int) -> None:
        """Appends rows without a match, to `num_rows` in total."""
        for name, states in self._states.items():
            more = np.zeros((num_rows - self._num_rows, 2), np.int32)
            self._states[name] = np.concatenate([states, more])
        self._num_rows = num_rows

    def follow(self, new: NewTokens) -> None:
        """Advances the matches of sequences by their new tokens."""
        for name, corpus in self._corpora.items():
            follow(
                corpus.states,
                corpus.edges,
                corpus.buckets,
                self._states[name],
                new.rows,
                new.tokens,
                new.starts,
            )

    def continuations(self, rows: Int32[np.ndarray, " B"], depth: int) -> CorpusContinuations:
        """Returns each corpus's continuation of each sequence.

        Args:
          rows: Rows of the sequences.
          depth: Maximum tokens of a continuation.

        Returns:
          Tokens of the continuations, their number, and the length of the match.
        """
        B, C = len(rows), len(self._corpora)
        paths = np.zeros((B, C, depth), np.int32)
        lengths, matched = np.zeros((B, C), np.int32), np.zeros((B, C), np.int32)
        for index, (name, corpus) in enumerate(self._corpora.items()):
            continuations(
                corpus.tokens,
                corpus.states,
                self._states[name],
                rows,
                paths[:, index],
                lengths[:, index],
                matched[:, index],
            )
        return CorpusContinuations(paths=paths, lengths=lengths, matched=matched)
