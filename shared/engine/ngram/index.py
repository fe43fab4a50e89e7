"""N-gram index of all requests on the host, and the draft trees that it yields.

Every submitted prompt token and every committed token enters a trie, below the root of its
request's scope: its tenant, or the request itself. A request never reads another scope. External
corpora are matched in parallel. The match state of each request is advanced by its new tokens, so
no context is read twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from jaxtyping import Int32

from shared.boundary.backend import HostDraft
from shared.engine.image_inputs import text_tokens
from shared.engine.ngram import tree
from shared.engine.ngram.corpus import SEPARATOR, Corpus
from shared.engine.ngram.external_corpora import ExternalCorpora
from shared.engine.ngram.trie import BORN, FIRST, NewTokens, Trie, forget
from shared.engine.request import Request, SamplingParams
from shared.options.ngram import FREQUENCY, REQUEST, NgramConfig

SWEPT_SCOPES = 2
"""Scopes that are checked when a new one is created, to drop empty ones. Two are enough to keep
empty scopes in the minority; checking all would stall the engine."""


MOST_ENDED_TOKENS = 1 << 18
"""Maximum total tokens of finished requests whose output can still be truncated."""


@dataclass(eq=False)
class IndexedRequest:
    """State of a request in the index.

    Attributes:
      row: Its row of anchors.
      scope: Its scope.
      length: Tokens received.
    """

    row: int
    scope: str | int
    length: int = 0


@dataclass(eq=False)
class IndexScope:
    """A root of the trie, and the number of running requests below it."""

    root: int
    born: int
    num_texts: int = 0


@dataclass(eq=False)
class FinishedText:
    """Output of a finished request that may still be truncated.

    Attributes:
      name, scope: Its scope.
      tokens: Its inserted output, preceded by as much of the prompt as an n-gram may contain.
      num_before: Number of prompt tokens in them.
    """

    name: str
    scope: IndexScope
    tokens: Int32[np.ndarray, " T"]
    num_before: int


def host_draft_of(trees: tree.NgramTreeBatch) -> HostDraft:
    """Converts trees to the inputs of a plan."""
    return HostDraft(
        tokens=trees.tokens,
        parents=trees.parents,
        num_nodes=trees.num_nodes,
        forced=np.zeros(len(trees.num_nodes), np.int32),
    )


class NgramIndex:
    """Drafts from tokens of earlier requests and corpora.

    Args:
      config: Settings of the index and of tree growth.
      nodes: N, nodes of a tree including its root.
      depth: S, levels below the root.
      vocab: Vocabulary size of the target.
      chain: True if every tree must be a chain, as some accept rules require.
      ahead: Maximum tokens by which a sequence may have grown when its tree is verified; limits of
        draft tokens count from there.
      path: Nodes of the path that a tree starts with, which may be longer than any n-gram; 0 for
        none. See `tree.extend_path`.

    Attributes:
      nodes, depth: N and S.
      num_rows: Number of trees built.
      num_empty_rows: Number of those without a match.
      texts: State of each running request.
      corpora: External corpora.
      trie, scopes: N-grams of all sequences, and the root of each scope.
      ended, num_ended_tokens: Outputs that may still be truncated, by request, and their tokens.
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
        self._growth = tree.TreeParams(
            corpus_nodes=config.sam_budget and config.sam_budget + ahead,
            by_frequency=config.speculative_ngram_match_type == FREQUENCY,
            min_breadth=config.speculative_ngram_min_bfs_breadth,
            max_breadth=config.speculative_ngram_max_bfs_breadth,
            depth=depth,
            chain=chain,
        )
        self.trie = Trie.empty(config.speculative_ngram_capacity)
        self._anchors = np.zeros((1, config.speculative_ngram_max_trie_depth, 2), np.int32)
        self.texts: dict[int, IndexedRequest] = {}
        self.scopes: OrderedDict[str | int, IndexScope] = OrderedDict()
        self.ended: OrderedDict[int, FinishedText] = OrderedDict()
        self.num_ended_tokens = 0
        self._free_rows: list[int] = []
        self._unread: dict[int, list[int]] = {}
        self._prompts: list[tuple[int, list[int]]] = []
        self.corpora = ExternalCorpora(config, vocab, num_rows=len(self._anchors))
        self._drafted_from = NewTokens.of([])
        self.num_rows = 0
        self.num_empty_rows = 0

    def warm_up(self) -> None:
        """Compiles the loops in advance, and allocates the trie's buckets.

        The loops run on a temporary index.
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
        index.corpora.add("", Corpus.build(words))
        for number in range(2):
            text = Request(request_id=number, prompt=(), sampling=SamplingParams())
            index.add_tokens(text, [0, 0])
            index.draft([text])
            text.append_tokens([0])
            index.end(text, is_learnt=True)
            index.truncate(number, 0)
        index.trie.drop(index.trie.new_root())

    # Texts

    @property
    def num_ngrams(self) -> int:
        """Number of n-grams in the index."""
        return self.trie.num_nodes - len(self.scopes)

    def add_prompt(self, request: Request, end: int) -> None:
        """Adds the context of a request up to position `end`, as far as it is new.

        Image tokens are skipped: a run of one repeated token is no text.
        """
        text = self._text(request)
        if end > text.length:
            new = text_tokens(request.images, request.context[text.length : end], text.length)
            self._prompts.append((text.row, new.tolist()))
            text.length = end

    def add_tokens(self, request: Request, tokens: Sequence[int]) -> None:
        """Adds tokens that were committed to a request's output."""
        text = self._text(request)
        text.length += len(tokens)
        self._unread.setdefault(text.row, []).extend(tokens)

    def learn(self) -> None:
        """Inserts prompts into the trie, and the outputs from which trees have been built.

        A tree does not require its own request's newest tokens in the trie, so inserting happens
        while the device runs. An output is inserted only after its request's next tree or its end.
        A tree therefore does not depend on how steps of other requests interleave.
        """
        if len(self._drafted_from.rows):
            self._enter(self._drafted_from)
            self._drafted_from = NewTokens.of([])
        if self._prompts:
            prompts, self._prompts = NewTokens.of(self._prompts), []
            self.corpora.follow(prompts)
            self._enter(prompts)

    def _enter(self, tokens: NewTokens) -> None:
        if len(tokens.rows):
            self.trie.extend(self._anchors, tokens)

    def _take_unread(self, rows: Iterable[int]) -> NewTokens:
        """Returns and clears the unprocessed tokens of sequences."""
        return NewTokens.of([(row, self._unread.pop(row)) for row in rows if row in self._unread])

    def end(self, request: Request, *, is_learnt: bool) -> None:
        """Removes a finished request; its tokens stay, except in a scope of its own.

        Args:
          request: The request.
          is_learnt: True to insert tokens that are not in the trie yet; False to drop them.
        """
        text = self.texts.pop(request.request_id, None)
        if text is None:
            return
        if is_learnt or text.row in self._drafted_from.rows:
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

    def _keep(self, request: Request, name: str, scope: IndexScope, num_left_out: int) -> None:
        prompt = text_tokens(request.images, request.tokens()[: len(request.prompt)], 0)
        before = prompt[-self._anchors.shape[1] :]
        learnt = request.output[: len(request.output) - num_left_out]
        tokens = np.array([*before, *learnt], np.int32)
        self._forget_ended(request.request_id)
        self.ended[request.request_id] = FinishedText(name, scope, tokens, len(before))
        self.num_ended_tokens += len(tokens)
        while self.num_ended_tokens > MOST_ENDED_TOKENS:
            self._forget_ended(next(iter(self.ended)))

    def _forget_ended(self, request_id: int) -> FinishedText | None:
        ended = self.ended.pop(request_id, None)
        self.num_ended_tokens -= 0 if ended is None else len(ended.tokens)
        return ended

    def truncate(self, request_id: int, num_tokens: int) -> None:
        """Removes all but the first tokens of a finished request's output from the trie.

        A stop string is found after its tokens were inserted, possibly after the request has ended
        by itself. The latest finished outputs are stored for that; earlier ones are not truncated.

        Args:
          request_id: A request that was ended with `end`.
          num_tokens: Number of tokens that belong to its output.
        """
        ended, trie = self._forget_ended(request_id), self.trie
        if ended is None or self.scopes.get(ended.name) is not ended.scope:
            return
        keep, D = ended.num_before + num_tokens, self._anchors.shape[1]
        forget(trie.nodes, trie.buckets, trie.head, ended.scope.root, ended.tokens, keep, D)

    def _text(self, request: Request) -> IndexedRequest:
        text = self.texts.get(request.request_id)
        if text is None:
            by_request = self._config.speculative_ngram_scope == REQUEST
            text = IndexedRequest(
                self._take_row(), request.request_id if by_request else request.tenant
            )
            scope = self._scope(text.scope)
            scope.num_texts += 1
            self._anchors[text.row] = 0
            self._anchors[text.row, 0] = scope.root, scope.born
            self.corpora.reset(text.row)
            self.texts[request.request_id] = text
        return text

    def _take_row(self) -> int:
        if not self._free_rows:
            count = len(self._anchors)
            self._free_rows = list(range(2 * count - 1, count - 1, -1))
            self._anchors = np.concatenate([self._anchors, np.zeros_like(self._anchors)])
            self.corpora.resize(len(self._anchors))
        return self._free_rows.pop()

    def _scope(self, name: str | int) -> IndexScope:
        if name not in self.scopes:
            self._sweep_scopes()
            root = self.trie.new_root()
            self.scopes[name] = IndexScope(root, int(self.trie.nodes[root, BORN]))
        return self.scopes[name]

    def _sweep_scopes(self) -> None:
        for name in tuple(islice(self.scopes, SWEPT_SCOPES)):
            scope = self.scopes[name]
            if scope.num_texts or self.trie.nodes[scope.root, FIRST]:
                self.scopes.move_to_end(name)  # checked again after the others
            else:
                self.trie.drop(scope.root)
                del self.scopes[name]

    # Trees

    def draft(self, requests: Sequence[Request]) -> HostDraft:
        """Returns the draft trees of requests; the root alone without a match."""
        return host_draft_of(self.trees(requests))

    def last_positions(self, requests: Sequence[Request]) -> Int32[np.ndarray, " B"]:
        """Returns the position of each request's last known token."""
        return np.array([self._text(request).length - 1 for request in requests], np.int32)

    def trees(self, requests: Sequence[Request]) -> tree.NgramTreeBatch:
        """Returns the draft trees of requests, with the kind of each node."""
        B, N = len(requests), self.nodes
        rows = np.array([self._text(request).row for request in requests], np.int32)
        self.learn()
        unread, anchors = self._take_unread(rows.tolist()), self._anchors.copy()
        self.corpora.follow(unread)
        self._drafted_from = unread
        self.trie.advance(anchors, unread)
        most = [request.sampling.max_draft_tokens for request in requests]
        bounds = [N if m is None else 1 + m + self._ahead * (m > 0) for m in most]
        limits = np.minimum(bounds, N).astype(np.int32)
        trees = tree.roots_of(B, N)
        if self._path:
            paths = np.minimum(limits - 1, self._path)
            tree.extend_path(
                self.trie.nodes, self.trie.buckets, anchors, rows, paths, self._growth, trees
            )
        continuations = self.corpora.continuations(rows, self.depth)
        tree.draft(self.trie.nodes, anchors, rows, limits, continuations, self._growth, trees)
        self.num_rows += B
        self.num_empty_rows += trees.num_nodes.tolist().count(1)
        return trees
