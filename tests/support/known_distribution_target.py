"""Target with a table of logits: the distribution of its texts, and texts that a rule decodes.

The probability of every text of four of its nine tokens is computed exactly. The texts are decoded
with a draft tree from a head that disagrees, the target's choice at each node, and the walk.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from shared.spec import sampling
from shared.spec.draft_tree import TreeShape
from shared.spec.gumbel_noise import TARGET_STREAM
from shared.spec.sampling import Sampling
from tests.support.implementations import Implementation
from tests.support.sampling_rows import neutral

VOCAB, TOKENS, ROWS = 9, 4, 12_000
ROWS_OF_A_BACKEND = 5_000
"""Its texts are held against the specification's as well, one by one."""
PROMPT = (4, 1, 4, 6)
CHAIN, TREE = TreeShape.chain(3, 1), TreeShape(nodes=8, depth=3, width=2, rows=8)
PLAIN = TreeShape.plain(1)
SHAPES = {"chain": CHAIN, "tree": TREE}
PENALTIES = {
    "repetition": 1.4,
    "presence": 0.4,
    "frequency": 0.3,
    "bias_ids": (3, 7),
    "bias_values": (0.7, -0.5),
    "stop_ids": (2, 5),
    "min_length": len(PROMPT) + 2,
}
FILTERS = {"temperature": 1.3, "top_k": 6, "top_p": 0.85, "min_p": 0.08}
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "penalties": PENALTIES,
    "filters": FILTERS,
    "penalties and filters": PENALTIES | FILTERS,
}
LIMIT = 4.75
"""Deviations of a normal variable that chance exceeds once in a million; seeds are fixed."""


@dataclass(frozen=True)
class Rule:
    """The three modules that decide a text, of the specification or of a backend."""

    draft_tree: Any
    acceptance: Any
    sampling: Any


@cache
def rule_of(name: str) -> Rule:
    parts = ("draft_tree", "acceptance", "sampling")
    if name == "specification":
        return Rule(*(import_module(f"shared.spec.{part}") for part in parts))
    return Rule(*map(Implementation(name), parts))


@cache
def tables() -> tuple[np.ndarray, np.ndarray]:
    """Logits of the next token by the last one: of the target, and of a head that disagrees."""
    rng = np.random.default_rng(5)
    target = rng.normal(size=(VOCAB, VOCAB)) * 1.5
    head = target + rng.normal(size=target.shape)
    return target.astype(np.float32), head.astype(np.float32)


def parameters(rows: int, settings: dict[str, Any]) -> Sampling:
    """The settings in each row; seeds are 0, 1, ..."""
    base = neutral(rows, VOCAB, max_drafts=np.full(rows, 64, np.int32))
    given = {"temperature": 1.0, "prompt_length": len(PROMPT)} | settings
    return replace(
        base,
        **{
            name: np.tile(np.array(value, getattr(base, name).dtype), (rows, *[1] * np.ndim(value)))
            for name, value in given.items()
        },
    )


@dataclass
class Texts:
    """Requests that decode; the newest token has no place among the `lengths` yet."""

    how: Sampling
    newest: np.ndarray
    lengths: np.ndarray
    seen: np.ndarray

    @classmethod
    def after_the_prompt(cls, rows: int, settings: dict[str, Any]) -> "Texts":
        seen = np.zeros((rows, VOCAB), np.int32)
        seen[:, list(PROMPT)] = 1
        newest = np.full(rows, PROMPT[-1], np.int32)
        lengths = np.full(rows, len(PROMPT) - 1, np.int32)
        return cls(parameters(rows, settings), newest, lengths, seen)

    def commit(self, tokens: np.ndarray, counts: np.ndarray) -> None:
        rows = np.arange(len(counts))
        for place in range(tokens.shape[1]):
            self.seen[rows, tokens[:, place]] += 2 * (place < counts)
        self.newest, self.lengths = tokens[rows, counts - 1], self.lengths + counts


def rows_of(texts: Texts, seen: np.ndarray, depth: np.ndarray) -> dict[str, Any]:
    """Returns the arguments for the choice at one node of each request, with its token counts.

    Node by node, so that JAX compiles programs of one size for all shapes.
    """
    everyone = np.arange(len(texts.lengths), dtype=np.int32)
    return {
        "seen": sampling.counts_alone(seen, everyone),
        "positions": (texts.lengths + depth + 1).astype(np.int32),
        "sampling": texts.how,
    }


def rows_for(name: str) -> int:
    """Returns the number of texts that the rule of this name decodes."""
    return ROWS if name == "specification" else ROWS_OF_A_BACKEND


def assert_as_specified(written: np.ndarray, specified: np.ndarray) -> None:
    """The texts of the first requests, but for near ties: one in a thousand is far more of them."""
    is_same = (written == specified[: len(written)]).all(axis=1)
    assert is_same.mean() > 0.999


def everyone(texts: Texts) -> dict[str, Any]:
    """Each request has one row, and no grammar."""
    return {"request": np.arange(len(texts.lengths), dtype=np.int32), "allowed": None}


def rank(rule: Rule, texts: Texts, path: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The drafter's best children of one node of each request, given the drafts on the way."""
    B, depth = path.shape
    last, seen = path[:, -1] if depth else texts.newest, texts.seen.copy()
    for place in range(depth):
        seen[np.arange(B), path[:, place]] += 2
    rows = rows_of(texts, seen, np.full(B, depth))
    ranked = rule.sampling.rank(
        tables()[1][last][:, None],
        **rows,
        keys=rows["positions"],
        stream=TARGET_STREAM,
        width=width,
        is_sampled=False,
        columns=None,
    )
    return ranked.ids[:, 0], ranked.weights[:, 0]


def rank_all(
    rule: Rule, texts: Texts, paths: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Same as `rank`, for all nodes of a frontier [B, k]."""
    found = [rank(rule, texts, paths[:, node], width) for node in range(paths.shape[1])]
    ids, weights = (np.stack(part, axis=1) for part in zip(*found, strict=True))
    return ids, weights


def grow(rule: Rule, texts: Texts, shape: TreeShape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One draft tree per request: tokens, parents, node counts."""
    B, k = len(texts.newest), shape.width
    if shape.is_plain:
        return texts.newest[:, None], np.zeros((B, 1), np.int32), np.ones(B, np.int32)
    ids, weights = rank(rule, texts, np.zeros((B, 0), np.int32), k)
    paths = ids[:, :, None]
    numbers = np.tile(np.arange(1, k + 1, dtype=np.int32), (B, 1))
    found = [(ids, weights, np.zeros((B, k), np.int32))]
    for s in range(1, shape.depth):
        ids, edges = rank_all(rule, texts, paths, k)
        parents, path_weights = rule.draft_tree.children(numbers, weights, edges)
        found.append((ids.reshape(B, k * k), path_weights, parents))
        chosen, weights, numbers, above = rule.draft_tree.next_frontier(
            found[-1][0], path_weights, 1 + k + (s - 1) * k * k, k
        )
        paths = np.concatenate([paths[np.arange(B)[:, None], above], chosen[:, :, None]], axis=2)
    tokens, weights, parents = (np.concatenate(part, axis=1) for part in zip(*found, strict=True))
    return rule.draft_tree.keep_best(
        texts.newest, tokens, weights, parents, texts.how.max_drafts, np.ones(B, bool), shape.nodes
    )[:3]


def counts_at(
    rule: Rule, texts: Texts, tokens: np.ndarray, parents: np.ndarray, node: int
) -> np.ndarray:
    """Returns the token counts for penalties at one node of each tree."""
    request = np.arange(len(tokens), dtype=np.int32)
    trees = (texts.seen, request, tokens, parents, request, np.full_like(request, node))
    return rule.sampling.counts_of_rows(rule.sampling.counts_in_trees(*trees))


def step(rule: Rule, texts: Texts, shape: TreeShape) -> tuple[np.ndarray, np.ndarray]:
    """Drafts, verifies and accepts: the tokens of each request, and how many they are."""
    tokens, parents, num_nodes = grow(rule, texts, shape)
    depths = rule.draft_tree.depths(parents)
    logits = tables()[0][tokens]
    choices = []
    for n in range(shape.nodes):
        rows = rows_of(texts, counts_at(rule, texts, tokens, parents, n), depths[:, n])
        choices.append(rule.sampling.choose(logits[:, n], **rows, **everyone(texts)).ids)
    choices = np.stack(choices, axis=1)
    path, counts = rule.acceptance.accept_greedy_path(
        tokens, parents, num_nodes, choices, shape.depth
    )
    return rule.acceptance.emitted(choices, path, counts), counts


Step = Callable[[Rule, Texts, TreeShape], tuple[np.ndarray, np.ndarray]]


def decode(
    rule: Rule, shape: TreeShape, settings: dict[str, Any], rows: int, by: Step = step
) -> tuple[np.ndarray, float]:
    """The texts, and the mean tokens of a first step.

    Every text is cut at the same length: counting what a number of steps happened to give would
    count texts that are easy to draft more often.
    """
    texts = Texts.after_the_prompt(rows, settings)
    written, first = np.zeros((rows, TOKENS), np.int64), 0.0
    while (done := texts.lengths + 1 - len(PROMPT)).min() < TOKENS:
        tokens, counts = by(rule, texts, shape)
        for place in range(tokens.shape[1]):
            fits = (place < counts) & (done + place < TOKENS)
            written[fits, (done + place)[fits]] = tokens[fits, place]
        first = first or float(counts.mean())
        texts.commit(tokens, counts)
    return written, first


def exact(settings: dict[str, Any]) -> np.ndarray:
    """Probability of each text, by the definitions and in float64."""
    found = np.zeros((VOCAB,) * TOKENS)
    for prefix in itertools.product(range(VOCAB), repeat=TOKENS - 1):
        before = np.prod([law(settings, prefix[:i])[token] for i, token in enumerate(prefix)])
        found[prefix] = before * np.array(law(settings, prefix))
    return found.reshape(-1)


def law(settings: dict[str, Any], output: tuple[int, ...]) -> tuple[float, ...]:
    """The target's distribution of the token after `output`."""
    return _law(tuple(settings.items()), output)


@cache
def _law(settings: tuple[tuple[str, Any], ...], output: tuple[int, ...]) -> tuple[float, ...]:
    given = {"repetition": 1, "presence": 0, "frequency": 0, "temperature": 1} | dict(settings)
    logits = tables()[0][(PROMPT + output)[-1]].astype(float).tolist()
    bias = dict(zip(given.get("bias_ids", ()), given.get("bias_values", ()), strict=True))
    for v in range(VOCAB):
        if v in PROMPT + output:
            logits[v] *= given["repetition"] if logits[v] <= 0 else 1 / given["repetition"]
        if v in output:
            logits[v] -= given["presence"] + given["frequency"] * output.count(v)
        logits[v] += bias.get(v, 0)
        is_early = len(PROMPT) + len(output) < given.get("min_length", 0)
        if is_early and v in given.get("stop_ids", ()):
            logits[v] = -np.inf
    p = np.exp(np.array(logits) / given["temperature"])
    return tuple(_filtered(p / p.sum(), given))


def _filtered(p: np.ndarray, given: dict[str, Any]) -> np.ndarray:
    """Each filter on the full distribution; the survivors' share is their probability."""
    order, before, kept = sorted(range(VOCAB), key=lambda v: -p[v]), 0.0, np.zeros(VOCAB)
    for place, v in enumerate(order):
        is_kept = place < given.get("top_k", VOCAB) and before < given.get("top_p", 2)
        kept[v] = p[v] if is_kept and p[v] >= given.get("min_p", 0) * p.max() else 0
        before += p[v]
    return kept / kept.sum()


def deviation(written: np.ndarray, probabilities: np.ndarray) -> float:
    """Returns the deviation of counted texts from their distribution, the worst of several views.

    Whole texts show dependencies between tokens. Pairs of consecutive tokens have far fewer cells,
    so a small error of the distribution exceeds the noise there.
    """
    shape = (VOCAB,) * TOKENS
    cell = np.ravel_multi_index(tuple(written.T), shape)
    counts = np.bincount(cell, minlength=len(probabilities)).reshape(shape)
    expected = len(written) * probabilities.reshape(shape)
    pairs = [tuple(set(range(TOKENS)) - {t - 1, t}) for t in range(1, TOKENS)]
    views = [(counts.sum(axis=axes), expected.sum(axis=axes)) for axes in [(), *pairs]]
    return max(chi_square_deviation(*(part.reshape(-1) for part in view)) for view in views)


def chi_square_deviation(counts: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's statistic as deviations of a normal variable, as Wilson and Hilferty (1931) do.

    What is expected less than ten times is taken together; the cube root is good to some percent
    of the probability this far out.
    """
    if counts[expected == 0].any():
        return np.inf
    rare = expected < 10
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    statistic, freedom = ((counts - expected) ** 2 / expected).sum(), len(counts) - 1
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / np.sqrt(spread))


BOTH, NOTHING = "penalties and filters", "nothing"
