"""What requests have said so far, and the draft trees that follow from it.

Every prompt token handed to the device and every committed token enters a trie, below the root of
its request's scope: its tenant, or the request alone. A request never reads another scope. External
corpora are followed beside it. How far each text matches is kept and moved on by its new tokens, so
no context is read twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice

import numpy as np
from jaxtyping import Int32

from shared.boundary.backend import HostDraft
from shared.engine.checks import check_ids
from shared.engine.ngram import tree
from shared.engine.ngram.corpus import SEPARATOR, Corpus, continuations, follow
from shared.engine.ngram.trie import BORN, FIRST, Trie, advance, extend, forget
from shared.engine.pictures import without
from shared.engine.request import Refusal, Request, SamplingParams
from shared.options.ngram import FREQUENCY, REQUEST, NgramConfig

SWEPT_SCOPES = 2
"""Scopes that a new one looks at in turn, to drop those whose text was all evicted. Two are enough
that no more scopes are empty than are not, and looking at all would stall the engine."""


MOST_ENDED_TOKENS = 1 << 18
"""Texts of ended requests are kept for a late cut as long as they have no more tokens than this."""


Tokens = tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, " T"], Int32[np.ndarray, " n+1"]]
"""Rows of texts, their new tokens one after the other, and where each begins, and the end."""


@dataclass(eq=False)
class Text:
    """A request's text as the index knows it.

    Attributes:
      row: Its row of anchors.
      scope: Whose text it is.
      length: Tokens seen.
    """

    row: int
    scope: str | int
    length: int = 0


@dataclass(eq=False)
class Scope:
    """A root of the trie, and the texts below it that may still grow."""

    root: int
    born: int
    num_texts: int = 0


@dataclass(eq=False)
class Ended:
    """The text of a request that ended, as long as it may still be cut.

    Attributes:
      name, scope: Whose text it is.
      tokens: Its output as far as it was learnt, behind as much of the prompt as an n-gram may
        reach back.
      num_before: How many of them are the prompt's.
    """

    name: str
    scope: Scope
    tokens: Int32[np.ndarray, " T"]
    num_before: int


def _batch(texts: Sequence[tuple[int, Sequence[int]]]) -> Tokens:
    """Rows and their new tokens as arrays."""
    rows = np.array([row for row, _ in texts], np.int32)
    tokens = np.array([token for _, new in texts for token in new], np.int32)
    ends = np.array([0, *accumulate(len(new) for _, new in texts)], np.int32)
    return rows, tokens, ends


def host_draft_of(trees: tree.Trees) -> HostDraft:
    """Trees as a plan brings them."""
    return HostDraft(
        tokens=trees.tokens,
        parents=trees.parents,
        num_nodes=trees.num_nodes,
        forced=np.zeros(len(trees.num_nodes), np.int32),
    )


class NgramIndex:
    """Drafts for requests from seen text.

    Args:
      config: What is remembered, and how trees grow.
      nodes: N, nodes of a tree with its root.
      depth: S, levels below the root.
      vocab: Tokens of the target's vocabulary.
      chain: Every tree is a chain, as some rules of acceptance need it.
      ahead: Tokens by which a text may have gone on when its tree is verified: what bounds its
        drafts counts from there.
      path: Nodes of the path that a tree begins with, however long the n-grams are; 0: it begins
        with none. See `tree.go_on`.

    Attributes:
      nodes, depth: N and S.
      num_rows: Trees made so far.
      num_empty_rows: Those of them for which nothing matched.
      texts: The text of each request that has not ended.
      trie, scopes: The n-grams of all texts, and the root of each scope's.
      ended, num_ended_tokens: Texts that may still be cut, by request, and their tokens.
    """

    def __init__(
        self,
        config: NgramConfig,
        *,
        nodes: int,
        depth: int,
        vocab: int,
        chain: bool,
        ahead: int = 0,
        path: int = 0,
    ) -> None:
        self._config, self.nodes, self.depth, self._vocab = config, nodes, depth, vocab
        self._chain, self._ahead, self._path = chain, ahead, path
        self._growth = tree.Growth(
            corpus_nodes=config.sam_budget and config.sam_budget + ahead,
            by_frequency=config.speculative_ngram_match_type == FREQUENCY,
            min_breadth=config.speculative_ngram_min_bfs_breadth,
            max_breadth=config.speculative_ngram_max_bfs_breadth,
            depth=depth,
            chain=chain,
        )
        self.trie = Trie.empty(config.speculative_ngram_capacity)
        self._anchors = np.zeros((1, config.speculative_ngram_max_trie_depth, 2), np.int32)
        self.texts: dict[int, Text] = {}
        self.scopes: OrderedDict[str | int, Scope] = OrderedDict()
        self.ended: OrderedDict[int, Ended] = OrderedDict()
        self.num_ended_tokens = 0
        self._free_rows: list[int] = []
        self._unread: dict[int, list[int]] = {}
        self._prompts: list[tuple[int, list[int]]] = []
        self._corpora: dict[str, Corpus] = {}
        self._in_corpora: dict[str, Int32[np.ndarray, "rows 2"]] = {}
        self._drafted_from = _batch([])
        self.num_rows = 0
        self.num_empty_rows = 0

    def warm_up(self) -> None:
        """Compiles what drafts, and takes the memory of the trie's buckets: no step waits for them.

        The loops run on an index that is thrown away.
        """
        self.trie.buckets.fill(0)
        index = NgramIndex(
            replace(
                self._config,
                speculative_ngram_external_sam_budget=1,
                speculative_ngram_capacity=1024,
            ),
            nodes=self.nodes,
            depth=self.depth,
            vocab=self._vocab,
            chain=self._chain,
            path=self._path,
        )
        words = np.array([0, 0, SEPARATOR], np.int32)
        index.add_corpus("", Corpus.build(words))
        for number in range(2):
            text = Request(request_id=number, prompt=(), sampling=SamplingParams())
            index.see(text, [0, 0])
            index.draft([text])
            text.commit([0])
            index.end(text, is_learnt=True)
            index.cut(number, 0)
        index.trie.drop(index.trie.new_root())

    # Texts

    @property
    def num_ngrams(self) -> int:
        """N-grams that are remembered so far."""
        return self.trie.num_nodes - len(self.scopes)

    def see_prompt(self, request: Request, end: int) -> None:
        """Takes in the context of a request up to position `end`, as far as it is new.

        The text goes on behind a picture as if there were none: a run of one token is no text.
        """
        text = self._text(request)
        if end > text.length:
            new = without(request.pictures, request.context[text.length : end], text.length)
            self._prompts.append((text.row, new.tolist()))
            text.length = end

    def see(self, request: Request, tokens: Sequence[int]) -> None:
        """Takes in tokens that were committed to a request's output."""
        text = self._text(request)
        text.length += len(tokens)
        self._unread.setdefault(text.row, []).extend(tokens)

    def learn(self) -> None:
        """Enters prompts into the trie, and those outputs that trees were made from.

        A tree does not wait for its own text's newest tokens, it follows them through what is
        there; so the engine learns while the device runs. An output enters only after its request's
        next tree or end: however steps of other requests fall between, a tree finds the same.
        """
        if len(self._drafted_from[0]):
            self._enter(self._drafted_from)
            self._drafted_from = _batch([])
        if self._prompts:
            prompts, self._prompts = _batch(self._prompts), []
            self._follow(prompts)
            self._enter(prompts)

    def _follow(self, tokens: Tokens) -> None:
        for name, corpus in self._corpora.items():
            automaton = (corpus.states, corpus.edges, corpus.buckets)
            follow(*automaton, self._in_corpora[name], *tokens)

    def _enter(self, tokens: Tokens) -> None:
        if not len(tokens[0]):
            return
        trie = self.trie
        extend(trie.nodes, trie.buckets, trie.head, self._anchors, *tokens)

    def _take_unread(self, rows: Iterable[int]) -> Tokens:
        """The unread tokens of texts, which count as read from now on."""
        return _batch([(row, self._unread.pop(row)) for row in rows if row in self._unread])

    def end(self, request: Request, *, is_learnt: bool) -> None:
        """Lets go of a request that ended; what it said stays, but in a scope of its own.

        Args:
          is_learnt: Whether what is not in the trie yet enters it; else that is left out.
        """
        text = self.texts.pop(request.request_id, None)
        if text is None:
            return
        if is_learnt or text.row in self._drafted_from[0]:
            self.learn()
        if is_learnt:
            self._enter(self._take_unread([text.row]))
        num_left_out = len(self._unread.pop(text.row, ()))
        self._prompts = [prompt for prompt in self._prompts if prompt[0] != text.row]
        self._free_rows.append(text.row)
        scope = self.scopes[text.scope]
        scope.num_texts -= 1
        if isinstance(text.scope, str):
            self._keep(request, text.scope, scope, num_left_out)
        else:
            self.trie.drop(scope.root)
            del self.scopes[text.scope]

    def _keep(self, request: Request, name: str, scope: Scope, num_left_out: int) -> None:
        prompt = without(request.pictures, request.tokens()[: len(request.prompt)], 0)
        before = prompt[-self._anchors.shape[1] :]
        learnt = request.output[: len(request.output) - num_left_out]
        tokens = np.array([*before, *learnt], np.int32)
        self._forget_ended(request.request_id)
        self.ended[request.request_id] = Ended(name, scope, tokens, len(before))
        self.num_ended_tokens += len(tokens)
        while self.num_ended_tokens > MOST_ENDED_TOKENS:
            self._forget_ended(next(iter(self.ended)))

    def _forget_ended(self, request_id: int) -> Ended | None:
        ended = self.ended.pop(request_id, None)
        self.num_ended_tokens -= 0 if ended is None else len(ended.tokens)
        return ended

    def cut(self, request_id: int, num_tokens: int) -> None:
        """Forgets all but the first tokens of an ended request's output.

        A stop string is found later than its tokens were taken in, maybe when the request had ended
        by itself. The texts of the latest ended requests are known, of earlier ones nothing is cut.

        Args:
          request_id: Its text was ended with `end`.
          num_tokens: How many tokens of its output belong to its text.
        """
        ended, trie = self._forget_ended(request_id), self.trie
        if ended is None or self.scopes.get(ended.name) is not ended.scope:
            return
        keep, D = ended.num_before + num_tokens, self._anchors.shape[1]
        forget(trie.nodes, trie.buckets, trie.head, ended.scope.root, ended.tokens, keep, D)

    def _text(self, request: Request) -> Text:
        text = self.texts.get(request.request_id)
        if text is None:
            by_request = self._config.speculative_ngram_scope == REQUEST
            text = Text(self._take_row(), request.request_id if by_request else request.tenant)
            scope = self._scope(text.scope)
            scope.num_texts += 1
            self._anchors[text.row] = 0
            self._anchors[text.row, 0] = scope.root, scope.born
            for places in self._in_corpora.values():
                places[text.row] = 0
            self.texts[request.request_id] = text
        return text

    def _take_row(self) -> int:
        if not self._free_rows:
            count = len(self._anchors)
            self._free_rows = list(range(2 * count - 1, count - 1, -1))
            self._anchors = np.concatenate([self._anchors, np.zeros_like(self._anchors)])
            for name, places in self._in_corpora.items():
                self._in_corpora[name] = np.concatenate([places, np.zeros_like(places)])
        return self._free_rows.pop()

    def _scope(self, name: str | int) -> Scope:
        if name not in self.scopes:
            self._sweep_scopes()
            root = self.trie.new_root()
            self.scopes[name] = Scope(root, int(self.trie.nodes[root, BORN]))
        return self.scopes[name]

    def _sweep_scopes(self) -> None:
        for name in tuple(islice(self.scopes, SWEPT_SCOPES)):
            scope = self.scopes[name]
            if scope.num_texts or self.trie.nodes[scope.root, FIRST]:
                self.scopes.move_to_end(name)  # its turn comes after the others'
            else:
                self.trie.drop(scope.root)
                del self.scopes[name]

    # Trees

    def draft(self, requests: Sequence[Request]) -> HostDraft:
        """The draft trees of requests; one node, the root, where nothing matches."""
        return host_draft_of(self.trees(requests))

    def ends(self, requests: Sequence[Request]) -> Int32[np.ndarray, " B"]:
        """The position of each text's last token that is known."""
        return np.array([self._text(request).length - 1 for request in requests], np.int32)

    def trees(self, requests: Sequence[Request]) -> tree.Trees:
        """The draft trees of requests, and what speaks for each node."""
        B, N = len(requests), self.nodes
        rows = np.array([self._text(request).row for request in requests], np.int32)
        self.learn()
        unread, anchors = self._take_unread(rows.tolist()), self._anchors.copy()
        self._follow(unread)
        self._drafted_from = unread
        advance(self.trie.nodes, self.trie.buckets, anchors, *unread)
        most = [request.sampling.max_draft_tokens for request in requests]
        bounds = [N if m is None else 1 + m + self._ahead * (m > 0) for m in most]
        limits = np.minimum(bounds, N).astype(np.int32)
        trees = tree.roots_of(B, N)
        if self._path:
            paths = np.minimum(limits - 1, self._path)
            tree.go_on(
                self.trie.nodes, self.trie.buckets, anchors, rows, paths, self._growth, trees
            )
        tree.draft(
            self.trie.nodes, anchors, rows, limits, self._continuations(rows), self._growth, trees
        )
        self.num_rows += B
        self.num_empty_rows += trees.num_nodes.tolist().count(1)
        return trees

    def _continuations(self, rows: Int32[np.ndarray, " B"]) -> tree.Continuations:
        """What each corpus has after each text: tokens, how many, and the length of the match."""
        B, C = len(rows), len(self._corpora)
        paths = np.zeros((B, C, self.depth), np.int32)
        lengths, matched = np.zeros((B, C), np.int32), np.zeros((B, C), np.int32)
        for index, (name, corpus) in enumerate(self._corpora.items()):
            continuations(
                corpus.tokens, corpus.states, self._in_corpora[name], rows,
                paths[:, index], lengths[:, index], matched[:, index],
            )  # fmt: skip
        return tree.Continuations(paths=paths, lengths=lengths, matched=matched)

    # Corpora

    @property
    def corpora(self) -> dict[str, int]:
        """Tokens of each corpus, by name, in the order in which they were added."""
        return {name: corpus.num_tokens for name, corpus in self._corpora.items()}

    def check_corpus(self, name: str, tokens: Int32[np.ndarray, " T"]) -> None:
        """Refuses a corpus that cannot be added.

        Args:
          name: What it will be called.
          tokens: Its documents, each with a separator after it.

        Raises:
          Refusal: Names the field at fault.
        """
        held, most = self.corpora, self._config.speculative_ngram_external_corpus_max_tokens
        words = tokens[tokens != SEPARATOR]
        if not self._config.sam_budget:
            raise Refusal(
                "corpus_id",
                "external corpora need draft nodes; start the server with "
                "--speculative-ngram-external-sam-budget",
            )
        if name in held:
            raise Refusal("corpus_id", f"there is a corpus {name!r:.200} already; remove it first")
        if not len(words):
            raise Refusal("documents", "documents must have at least one token")
        check_ids("documents", (int(words.min()), int(words.max())), self._vocab)
        total = sum(held.values()) + len(words)
        if total > most:
            raise Refusal(
                "documents",
                f"documents would make {total} tokens of external corpora, and "
                f"--speculative-ngram-external-corpus-max-tokens is {most}",
            )

    def add_corpus(self, name: str, corpus: Corpus) -> None:
        """Drafts from a corpus from now on; texts are followed in it from their next token on.

        Raises:
          Refusal: As `check_corpus`.
        """
        self.check_corpus(name, corpus.tokens)
        self._corpora[name] = corpus
        self._in_corpora[name] = np.zeros((len(self._anchors), 2), np.int32)

    def remove_corpus(self, name: str) -> None:
        """Drafts from a corpus no more.

        Raises:
          Refusal: There is none of this name.
        """
        if name not in self._corpora:
            raise Refusal("corpus_id", f"there is no corpus {name!r:.200}")
        del self._corpora[name], self._in_corpora[name]
