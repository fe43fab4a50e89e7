"""Random servers and random traffic, as hypothesis draws them.

A `Server` is one way to start: model, drafter, shape, rule of acceptance, page size, overlap. Its
traffic is requests with any field of the API, which come at any step and some of which are aborted
or end early. `tests/support/random_serving.py` serves them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from shared.drafts.kinds import BLOCK_KINDS
from shared.engine.request import SamplingParams
from shared.options.ngram import MATCH_TYPES, SCOPES
from shared.spec.draft_tree import TreeShape
from tests.support.tiny_heads import BLOCK_SIZE
from tests.support.tiny_models import WITH_MTP

BATCH, OVERLAP, CONTEXT, CHUNK = 4, 2, 144, 64
VOCAB = 272
"""Vocabulary of the smaller model; every requested token is below it."""

PLAIN = TreeShape.plain(BATCH)
NAIVE, CHAIN, LONG = (TreeShape.chain(depth, BATCH) for depth in (1, BLOCK_SIZE - 1, 5))
TREE = TreeShape(nodes=6, depth=3, width=2, rows=6 * BATCH)
NARROW = TreeShape(nodes=8, depth=4, width=4, rows=8 * BATCH)
# Fewer verify rows than nodes, and a chain that is shorter than a block.
FEW_TREE, FEW_LONG = replace(TREE, rows=2 * BATCH + 1), replace(LONG, rows=BATCH + 5)
SHORT = replace(TreeShape.chain(BLOCK_SIZE - 2, BATCH), block=BLOCK_SIZE)
FEW_SHORT = replace(SHORT, rows=BATCH + 3)
SHAPES = (TREE, CHAIN, NARROW, FEW_TREE, FEW_LONG, NAIVE, LONG, PLAIN)
CHAINS = (CHAIN, NAIVE, LONG, PLAIN)
FEW_BLOCK_TREE = replace(
    TreeShape(nodes=9, depth=BLOCK_SIZE - 1, width=3, rows=3 * BATCH), block=BLOCK_SIZE
)
BLOCKS = (CHAIN, SHORT, FEW_BLOCK_TREE, PLAIN)
BLOCK_CHAINS = (CHAIN, SHORT, PLAIN)
HYBRID = "qwen3_5"
FAMILIES = (HYBRID, "llama")
DRAFTERS = (
    *("NEXTN", "EAGLE3", "STANDALONE", "NGRAM", "DFLASH", "EAGLE", "none"),
    *("DSPARK", "DFLASH2", "ASSISTANT"),
    *("NEXTN+NGRAM", "EAGLE3+NGRAM", "STANDALONE+NGRAM", "DFLASH+NGRAM"),
    *("DSPARK+NGRAM", "DFLASH2+NGRAM", "ASSISTANT+NGRAM"),
)
WITH_COPIES = "+NGRAM"
COPIES = 4
"""N-gram nodes next to those of a drafter."""
RULES = ("exact", "exact", "exact", "rejection", "block")
PAGE_SIZES = (1, 4, 16)


@dataclass(frozen=True)
class Server:
    """One way to start.

    Attributes:
      shape: Of every decode step; None takes another one for each.
      spare: Share of the pages that the requests would need at once, beside the longest's.
      scope, match_type: How NGRAM remembers.
      caches: Whether texts are kept for later requests.
    """

    framework: str
    family: str
    drafter: str
    shape: TreeShape | None
    rule: str
    page_size: int
    overlap: int
    spare: float
    scope: str
    match_type: str
    caches: bool

    @property
    def drafts_on_host(self) -> bool:
        return self.drafter == "NGRAM"

    @property
    def own_drafter(self) -> str:
        """Drafter without n-gram drafts."""
        return self.drafter.removesuffix(WITH_COPIES)

    @property
    def joins(self) -> bool:
        """Merged drafting: n-gram drafts are added to the drafter's tree."""
        return self.drafter != self.own_drafter

    @property
    def joined(self) -> tuple[TreeShape, TreeShape, TreeShape]:
        """The drafter's own shape, with copies, and these alone.

        They reach over the steps in flight.
        """
        own = self.shape or shapes_of(self.drafter, self.rule)[0]
        deepest = max(own.depth, COPIES)

        def with_copies(grown: TreeShape) -> TreeShape:
            return TreeShape(
                nodes=grown.nodes + COPIES,
                depth=max(grown.depth, COPIES),
                width=own.width,
                rows=BATCH * (grown.nodes + COPIES // 2),
                grown=grown,
                copied=1 + self.overlap * (deepest + 1) + 2 * COPIES,
            )

        return own, with_copies(own), with_copies(PLAIN)

    @property
    def taken(self) -> list[TreeShape]:
        """Shapes that its steps take, as the programs have them."""
        if self.joins:
            return list(self.joined)
        shapes = shapes_of(self.drafter, self.rule) if self.shape is None else (self.shape,)
        return self._as_programs(shapes)

    @property
    def existing(self) -> list[TreeShape]:
        """Shapes that its backend has; with JAX all, since each backend compiles its own."""
        if self.joins:
            return [PLAIN, *self.joined]
        if self.framework == "jax":
            return self._as_programs(shapes_of(self.drafter, self.rule))
        return self._as_programs((PLAIN,)) + self.taken if self.drafts_on_host else self.taken

    def _as_programs(self, shapes: Iterable[TreeShape]) -> list[TreeShape]:
        """The host may hang any tree of N nodes into a program, so its shapes have S = N - 1."""
        if not self.drafts_on_host:
            return list(shapes)
        return list(dict.fromkeys(TreeShape.chain(shape.nodes - 1, BATCH) for shape in shapes))


@dataclass(frozen=True)
class Asked:
    """One prompt with its choices.

    Attributes:
      choices: n; each is a request with a seed of its own.
      arrives: Step before which it is added.
      leaves: Steps after which its choices are ended, or None where they end by themselves.
      late: Tokens that an early end takes back (a stop string); None is an abort.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    choices: int
    tenant: str
    arrives: int
    leaves: int | None
    late: int | None


def shapes_of(drafter: str, rule: str) -> tuple[TreeShape, ...]:
    """The shapes that a drafter has under a rule of acceptance."""
    if drafter == "none":
        return (PLAIN,)
    if drafter.endswith(WITH_COPIES):
        own = shapes_of(drafter.removesuffix(WITH_COPIES), "exact")
        return tuple(shape for shape in own if not shape.is_plain)
    if drafter in BLOCK_KINDS:
        return BLOCKS if rule == "exact" else BLOCK_CHAINS
    return SHAPES if rule == "exact" else CHAINS


# What is drawn


@st.composite
def servers(
    draw: st.DrawFn,
    framework: str,
    drafters: tuple[str, ...],
    page_sizes: tuple[int, ...],
    families: tuple[str, ...],
    rules: tuple[str, ...],
) -> Server:
    """Ways to start one framework."""
    drafter = draw(st.sampled_from(drafters))
    if drafter.startswith("NEXTN"):
        families = tuple(name for name in families if name in WITH_MTP)
    if drafter.startswith("ASSISTANT"):
        families = ("gemma4",)
    rule = "exact" if drafter.endswith(WITH_COPIES) else draw(st.sampled_from(rules))
    return Server(
        framework=framework,
        family=draw(st.sampled_from(families)),
        drafter=drafter,
        shape=draw(st.sampled_from((*shapes_of(drafter, rule), None))),
        rule=rule,
        page_size=draw(st.sampled_from(page_sizes)),
        overlap=draw(st.integers(0, OVERLAP)),
        spare=draw(st.sampled_from((0.1, 0.4, 1.0))),
        scope=draw(st.sampled_from(SCOPES)),
        match_type=draw(st.sampled_from(MATCH_TYPES)),
        caches=draw(st.booleans()),
    )


TOKENS = st.one_of(st.integers(0, 9), st.integers(0, VOCAB - 1))


def often(neutral: object, other: st.SearchStrategy) -> st.SearchStrategy:
    """The neutral value in about half of the draws."""
    return st.one_of(st.just(neutral), other)


PENALTIES = st.one_of(st.just(0.0), st.just(2.0), st.floats(-2.0, 2.0))
BIASES = st.one_of(st.floats(4.0, 12.0), st.floats(-100.0, 100.0))
"""Biases of a few units repeat a token, so that penalties count on a path."""


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    """Any values that the server lets through; narrow ones are as likely as wide ones."""
    max_tokens = draw(st.one_of(st.integers(1, 24), st.integers(12, 40)))
    cold = draw(st.booleans())
    return SamplingParams(
        temperature=0.0 if cold else draw(st.one_of(st.just(1.0), st.floats(0.02, 2.0))),
        top_p=draw(often(1.0, st.floats(0.01, 1.0))),
        top_k=draw(often(None, st.integers(1, 60))),
        min_p=draw(often(0.0, st.floats(0.0, 1.0))),
        presence_penalty=draw(PENALTIES),
        frequency_penalty=draw(PENALTIES),
        repetition_penalty=draw(often(1.0, st.floats(0.2, 2.0))),
        max_tokens=max_tokens,
        min_tokens=draw(often(0, st.integers(0, max_tokens))),
        stop_token_ids=draw(often((), st.lists(TOKENS, max_size=2, unique=True).map(tuple))),
        logit_bias=draw(often({}, st.dictionaries(TOKENS, BIASES, max_size=2))),
        logprobs=draw(often(None, st.integers(0, 3))),
        prompt_logprobs=draw(often(None, st.integers(0, 3))),
        max_draft_tokens=draw(often(None, st.integers(0, 6))),
    )


def prompt_of(seed: int, length: int, alphabet: int) -> tuple[int, ...]:
    """Few different tokens make a text that repeats itself; texts of one seed begin alike."""
    rng = random.Random(seed)
    words = [rng.randrange(2, VOCAB - 1) for _ in range(alphabet)]
    return tuple(rng.choice(words) for _ in range(length))


PROMPTS = st.builds(
    prompt_of,
    st.one_of(st.just(0), st.integers(0, 1 << 16)),
    st.one_of(st.integers(1, 24), st.integers(1, 100)),
    st.sampled_from((2, 8, 100)),
)


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    """One request of the API."""
    leaves = draw(st.one_of(st.none(), st.none(), st.integers(0, 12)))
    return Asked(
        prompt=draw(PROMPTS),
        sampling=draw(samplings()),
        seed=draw(st.integers(0, (1 << 64) - 1)),
        choices=draw(st.sampled_from((1, 1, 2, 3))),
        tenant=draw(st.sampled_from(("", "other"))),
        arrives=draw(often(0, st.integers(0, 6))),
        leaves=leaves,
        late=None if leaves is None else draw(st.one_of(st.none(), st.integers(0, 3))),
    )


TRAFFIC = st.lists(asked(), min_size=1, max_size=4)
