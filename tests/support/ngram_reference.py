"""Reference n-gram index, written for readability: dictionaries, no eviction, no speed."""

from __future__ import annotations

from collections import Counter, defaultdict

Ngram = tuple[int, ...]
Tree = tuple[list[int], list[int]]


class SeenText:
    """The n-grams of one scope.

    Attributes:
      following: What came after each n-gram, the newest first.
      count: How often each n-gram was seen.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.following: dict[Ngram, list[int]] = defaultdict(list)
        self.count: Counter[Ngram] = Counter()

    def learn(self, text: list[int], token: int) -> None:
        """Notes that `token` follows `text`."""
        for size in range(min(self.longest, len(text) + 1)):
            before = tuple(text[len(text) - size :])
            if token in self.following[before]:
                self.following[before].remove(token)
            self.following[before].insert(0, token)
            self.count[(*before, token)] += 1


class GrowingTree:
    """A tree of at most `limit` nodes and `depth` levels; as a chain it never branches."""

    def __init__(self, limit: int, depth: int, chain: bool) -> None:
        self.limit, self.depth, self.chain = limit, depth, chain
        self.tokens, self.parents, self.levels = [0], [0], [0]
        self.children: dict[tuple[int, int], int] = {}

    @property
    def is_full(self) -> bool:
        return len(self.tokens) >= self.limit

    def has_room(self, parent: int, token: int) -> bool:
        """Returns whether the child exists, or the branching limit allows to add it."""
        is_tip = parent == len(self.tokens) - 1
        return (parent, token) in self.children or is_tip or not self.chain

    def child(self, parent: int, token: int) -> int:
        """The child with the token, made if need be."""
        if (parent, token) not in self.children:
            self.children[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.levels.append(self.levels[parent] + 1)
        return self.children[parent, token]

    def add_path(self, path: list[int], most: int) -> int:
        """Adds at most `most` nodes along a path; returns how many."""
        node, before = 0, len(self.tokens)
        for token in path[: self.depth]:
            is_new = (node, token) not in self.children
            if is_new and (self.is_full or len(self.tokens) - before == most):
                break
            if not self.has_room(node, token):
                break
            node = self.child(node, token)
        return len(self.tokens) - before


def corpus_match(text: list[int], documents: list[list[int]]) -> tuple[int, list[int]]:
    """The longest end of a text that a corpus has, and what follows where it has it first."""
    for size in range(len(text), 0, -1):
        end = text[len(text) - size :]
        for document in documents:
            for start in range(len(document) - size + 1):
                if document[start : start + size] == end:
                    return size, document[start + size :]
    return 0, []


def draft(
    text: list[int],
    seen: SeenText,
    corpora: list[list[list[int]]],
    *,
    limit: int,
    depth: int,
    by_frequency: bool,
    breadths: tuple[int, int],
    corpus_nodes: int,
    chain: bool,
) -> Tree:
    """Tokens and parents of the tree for a text."""
    tree = GrowingTree(limit, depth, chain)
    matches = [corpus_match(text, documents) for documents in corpora]
    matches = sorted((m for m in matches if m[1]), key=lambda match: -match[0])
    matches = [match for match in matches if 2 * match[0] >= matches[0][0]]
    left = min(corpus_nodes, limit - 1)
    share = max(1, left // len(matches)) if matches else 0
    for _, path in matches:
        left -= tree.add_path(path, min(share, left))
    low, high = breadths
    fall = (high - low) / max(1, seen.longest - 1)
    for size in range(min(seen.longest - 1, len(text)), 0, -1):
        anchor = tuple(text[len(text) - size :])
        if by_frequency:
            _grow_by_frequency(tree, seen, anchor, high)
        else:
            _grow_by_recency(tree, seen, anchor, (seen.longest - size) * fall + low, fall)
    if matches and corpus_nodes:
        tree.add_path(matches[0][1], limit)
    return tree.tokens, tree.parents


def _grow_by_recency(
    tree: GrowingTree, seen: SeenText, anchor: Ngram, breadth: float, fall: float
) -> None:
    queue = [(anchor, 0)]
    while queue:
        ngram, parent = queue.pop(0)
        level = len(ngram) - len(anchor)
        if level == tree.depth or len(ngram) == seen.longest:
            continue
        for token in seen.following[ngram][: max(1, int(breadth - level * fall))]:
            if tree.is_full:
                return
            if not tree.has_room(parent, token):
                break
            queue.append(((*ngram, token), tree.child(parent, token)))


def _grow_by_frequency(tree: GrowingTree, seen: SeenText, anchor: Ngram, breadth: int) -> None:
    candidates: list[tuple[float, Ngram, int]] = []

    def expand(ngram: Ngram, parent: int, weight: float) -> None:
        if len(ngram) - len(anchor) == tree.depth or len(ngram) == seen.longest:
            return
        children = [(*ngram, token) for token in seen.following[ngram][:64]]
        best = sorted(children, key=lambda child: -seen.count[child])[:breadth]
        total = sum(seen.count[child] for child in best)
        candidates.extend((weight * seen.count[child] / total, child, parent) for child in best)

    expand(anchor, 0, 1.0)
    while candidates and not tree.is_full:
        chosen = max(candidates, key=lambda candidate: candidate[0])
        candidates.remove(chosen)
        weight, ngram, parent = chosen
        if not tree.has_room(parent, ngram[-1]):
            continue
        expand(ngram, tree.child(parent, ngram[-1]), weight)
