"""Acceptance of drafts at temperature 1, by the drafter's use of the target's noise.

The target is a random Markov table: the logits of the next token by the last one. The head is that
table plus normal noise, scaled until the total variation of the two distributions has a given mean
over the target's own text. Trees grow, and are accepted, by the specification itself, so the table
measures the rule and not a backend. All drafters of a target see the same seeds; that they emit the
same text is asserted.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from shared.spec import acceptance, draft_tree, eagle, sampling
from shared.spec.draft_tree import TreeShape
from shared.spec.gumbel_noise import TARGET_STREAM, gumbel
from shared.spec.tree_growth import DraftRequests

TREE = TreeShape(nodes=16, depth=4, width=4, rows=16)
CHAIN = TreeShape.chain(4, 1)

Table = Float[np.ndarray, "context vocab"]
"""Logits of the next token, by the last one."""


@dataclass(frozen=True)
class Drafter:
    """A line of the table.

    Attributes:
      name: What the line is called.
      shape: Of the trees; rows are those of one request.
      is_perturbed: Whether children are ranked with the target's noise.
      tau: Softness of the weights; means nothing without the noise.
    """

    name: str
    shape: TreeShape
    is_perturbed: bool
    tau: float


DRAFTERS = (
    Drafter("perturbed tree", TREE, True, sampling.DRAFT_TAU),
    Drafter("plain tree", TREE, False, 1.0),
    Drafter("perturbed chain", CHAIN, True, 1.0),
    Drafter("greedy chain", CHAIN, False, 1.0),
)


@dataclass(frozen=True)
class Pair:
    """A target and a head that disagree.

    Attributes:
      target, head: Their logits.
      by_context: Total variation of the two distributions after each token.
      usual: How often each token is the last one in the target's text.
    """

    target: Table
    head: Table
    by_context: Float[np.ndarray, " context"]
    usual: Float[np.ndarray, " context"]

    @property
    def total_variation(self) -> float:
        """The mean over the target's text."""
        return float(self.by_context @ self.usual)

    @property
    def bound(self) -> float:
        """Agreement of two samples of the same noise is at least this, on average.

        Source: Gumbel coupling, Daliri, Musco, Suresh 2024, arXiv:2408.07978.
        """
        return float(((1 - self.by_context) / (1 + self.by_context)) @ self.usual)


def mixed_target(vocab: int, rng: np.random.Generator) -> Table:
    """Contexts from nearly certain to nearly open, as in a text."""
    scale = np.exp(rng.uniform(np.log(1), np.log(12), (vocab, 1)))
    return (rng.normal(size=(vocab, vocab)) * scale).astype(np.float32)


def probabilities(table: Table) -> Table:
    """In float64, for the sums over the vocabulary."""
    return np.exp(sampling.log_softmax(table.astype(np.float64)))


def disagreeing(target: Table, wanted: float, rng: np.random.Generator) -> Pair:
    """Adds noise to a target until the mean total variation is `wanted`."""
    p, noise = probabilities(target), rng.normal(size=target.shape)
    usual = np.full(len(p), 1 / len(p))
    for _ in range(200):
        usual = usual @ p

    def pair(scale: float) -> Pair:
        head = (target + scale * noise).astype(np.float32)
        return Pair(target, head, abs(p - probabilities(head)).sum(axis=1) / 2, usual)

    low, high = 0.0, 64.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if pair(middle).total_variation < wanted else (low, middle)
    return pair(low)


@dataclass(frozen=True)
class Texts:
    """Output tokens of some rows.

    Attributes:
      tokens: Of all steps, in their order.
      counts: Tokens of each row in each step.
    """

    tokens: list[list[int]]
    counts: Int[np.ndarray, "steps B"]

    @property
    def tokens_per_step(self) -> float:
        """The bonus token included."""
        return float(self.counts.mean())

    def agreement(self, depth: int) -> list[float]:
        """By draft position, how often a draft there was accepted once all before it were."""
        reached = [int((self.counts > level).sum()) for level in range(depth + 1)]
        return [after / before for before, after in itertools.pairwise(reached)]


def decode(pair: Pair, drafter: Drafter, rows: int, steps: int) -> Texts:
    """Decodes `steps` steps of `rows` requests, seeds 0, 1, ..., at temperature 1."""
    seeds, lengths = np.arange(rows, dtype=np.uint32), np.zeros(rows, np.int32)
    newest = (np.arange(rows) % len(pair.target)).astype(np.int32)
    texts, counts = [[] for _ in range(rows)], []
    for _ in range(steps):
        noise = _noise(seeds, lengths, drafter.shape.max_tokens, len(pair.target))
        tokens, parents, num_nodes = _trees(pair, drafter, newest, noise)
        emitted, count = _verify(pair, drafter.shape, tokens, parents, num_nodes, noise)
        for text, row, n in zip(texts, emitted, count, strict=True):
            text += row[:n].tolist()
        newest, lengths = emitted[np.arange(rows), count - 1], lengths + count
        counts.append(count)
    return Texts(texts, np.stack(counts))


def _noise(
    seeds: Int[np.ndarray, " B"], lengths: Int[np.ndarray, " B"], levels: int, vocab: int
) -> Float[np.ndarray, "B levels vocab"]:
    """The noise of a step: one row of it serves the target and the drafter at a depth."""
    positions = (lengths[:, None] + 1 + np.arange(levels)).astype(np.int32)
    flat = gumbel(np.repeat(seeds, levels), positions.reshape(-1), vocab, TARGET_STREAM)
    return flat.reshape(*positions.shape, vocab)


def _trees(
    pair: Pair,
    drafter: Drafter,
    newest: Int[np.ndarray, " B"],
    noise: Float[np.ndarray, "B levels vocab"],
) -> tuple[Int[np.ndarray, "B N"], Int[np.ndarray, "B N"], Int[np.ndarray, " B"]]:
    """Grows the trees by `eagle.draft` with a head that looks its logits up."""
    B = len(newest)

    def rank(logits, paths):
        flat = logits.reshape(-1, logits.shape[2])
        warm = np.full(len(flat), drafter.is_perturbed, np.float32)
        level = np.repeat(noise[:, paths.shape[2]], logits.shape[1], axis=0)
        scores = flat + level if drafter.is_perturbed else flat
        ids = sampling.top_candidates(scores, drafter.shape.width)
        weights = sampling.draft_weights(scores, warm, drafter.tau)
        weights = np.take_along_axis(weights, ids, axis=1)
        return ids.reshape(*logits.shape[:2], -1), weights.reshape(*logits.shape[:2], -1)

    def head(rows, tokens, shown, hidden, kv):
        return hidden, pair.head[tokens], kv

    no_hidden, no_kv = np.zeros((B, 1), np.float32), np.zeros((1, 2, 1, 1, 1, 1), np.float32)
    ones, all_nodes = np.ones(B, np.int32), np.full(B, drafter.shape.nodes, np.int32)
    relay = eagle.relay_of(no_hidden, pair.head[newest], np.arange(B), rank)
    trees, _ = eagle.draft(
        head,
        no_kv,
        relay,
        DraftRequests(newest, ones, 0 * ones, all_nodes, ones[:, None]),
        drafter.shape,
        rank,
    )
    return trees[:3]


def _verify(
    pair: Pair,
    shape: TreeShape,
    tokens: Int[np.ndarray, "B N"],
    parents: Int[np.ndarray, "B N"],
    num_nodes: Int[np.ndarray, " B"],
    noise: Float[np.ndarray, "B levels vocab"],
) -> tuple[Int[np.ndarray, "B W"], Int[np.ndarray, " B"]]:
    """The step's tokens of each row and how many they are."""
    B, N = tokens.shape
    depths = draft_tree.depths(parents)
    at_node = noise[np.arange(B)[:, None], depths].reshape(B * N, -1)
    scores = pair.target[tokens.reshape(-1)]
    choices = sampling.best(scores + at_node).reshape(B, N)
    path, counts = acceptance.accept_greedy_path(tokens, parents, num_nodes, choices, shape.depth)
    return acceptance.emitted(choices, path, counts), counts


@dataclass(frozen=True)
class Line:
    """Results of one drafter.

    Attributes:
      tokens_per_step: The bonus token included.
      agreement: By draft position; see `Texts.agreement`.
      bound: See `Pair.bound`.
    """

    tokens_per_step: float
    agreement: list[float]
    bound: float


def measure(wanted: float, vocab: int, rows: int, steps: int) -> dict[str, Line]:
    """A line of every drafter at one total variation.

    Raises:
      AssertionError: A drafter changed the text.
    """
    rng = np.random.default_rng(1)
    pair = disagreeing(mixed_target(vocab, rng), wanted, rng)
    lines, first = {}, None
    for drafter in DRAFTERS:
        texts = decode(pair, drafter, rows, steps)
        first = first or texts
        for text, other in zip(texts.tokens, first.tokens, strict=True):
            shared = min(len(text), len(other))
            assert text[:shared] == other[:shared], f"{drafter.name} changed the text"
        agreement = texts.agreement(drafter.shape.depth)
        lines[drafter.name] = Line(texts.tokens_per_step, agreement, pair.bound)
    return lines
