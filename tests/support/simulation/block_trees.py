"""Simulated device with a block head: chains and trees of best prefixes from the same head, and
phases of requests on it.

Each depth of a block has a distribution over candidates, drawn by the request's seed and the
position. The target's choice has a rank in it while the path is the first one. After a sibling it
is among the candidates in a given fraction of cases only, as with a head without a causal mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int

from shared.boundary.backend import BackendLimits, Decode, StepPlan
from shared.engine.adaptive.controller import AdaptiveController
from shared.engine.adaptive.policy import Policy
from shared.engine.adaptive.tiers import Tier
from shared.engine.branch_calibration import BranchCalibrationController
from shared.engine.cache_policy import NO_CACHE
from shared.engine.engine import Engine
from shared.spec import best_prefixes, verify_budget
from tests.support.simulation.device import Clock, Seconds, simulated_capacity
from tests.support.simulation.phases import Served, imposed, serve
from tests.support.simulation.work import always

DEPTHS, RANKS = 15, 8
NO_RANK = RANKS
"""Rank of a target's choice that is no candidate."""
BONUS = NO_RANK + 1
"""Token after the accepted drafts; a draft of rank r has token r + 1."""


@dataclass(frozen=True)
class Profile:
    """Distributions of a head on one kind of text.

    Attributes:
      certain: Fraction of depths with a nearly certain token.
      least, most: Range of the first candidate's probability in the other depths.
      follows: Fraction of cases in which the candidates after a sibling contain the target's choice
        as often as their probabilities state.
    """

    certain: float
    least: float
    most: float
    follows: float = 1.0


@lru_cache(maxsize=1 << 15)
def _drawn(
    profile: Profile, seed: int, position: int
) -> tuple[Float[np.ndarray, "D K"], Int[np.ndarray, "paths D"]]:
    """Returns the log probabilities of each depth, and the rank of the target's choice on the first
    path and after a sibling.
    """
    rng = np.random.default_rng((seed, position))
    first = rng.uniform(profile.least, profile.most, DEPTHS)
    first = np.where(rng.random(DEPTHS) < profile.certain, 0.985, first)
    falling = 0.5 ** np.arange(1, RANKS)
    shares = np.concatenate([first[:, None], (1 - first)[:, None] * falling], axis=1)
    ranks = (rng.random(DEPTHS)[:, None] > shares.cumsum(axis=1)).sum(axis=1)
    follows = rng.random(DEPTHS) < profile.follows
    return np.log(shares).astype(np.float32), np.stack([ranks, np.where(follows, ranks, NO_RANK)])


@lru_cache(maxsize=1 << 15)
def _tree(
    profile: Profile,
    seed: int,
    position: int,
    tree: tuple[int, int, int],
    branch_calibration: tuple[float, ...],
) -> np.ndarray:
    """Returns ranks, parents and weights of a tree's nodes, [3, N]."""
    nodes, depth, width = tree
    shares, _ = _drawn(profile, seed, position)
    found = np.zeros((3, nodes))
    if nodes == 1:
        return found
    edges = shares[:depth, None, :width]
    known = np.array(branch_calibration, np.float32)
    for node, prefix in enumerate(best_prefixes.best_prefixes(edges, None, known, nodes - 1), 1):
        parent, slot, weight = prefix
        found[:, node] = slot % width, parent, weight
    return found


class BlockTreeBackend(Clock):
    """Backend with a block head, and acceptance by a profile.

    Args:
      noise: Standard deviation of a step's time, as a share of it.
    """

    def __init__(
        self, capacity: BackendLimits, seconds: Seconds, profile: Profile, *, noise: float = 0.0
    ) -> None:
        super().__init__(capacity, seconds, noise, seed=0)
        self._profile = profile

    def _decode(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        slots, shape = plan.slots, plan.program.shape
        B, lengths = len(slots), self._lengths[slots]
        keys = list(zip(plan.sampling.seed.tolist(), lengths.tolist(), strict=True))
        known = [tuple(each) for each in plan.sampling.branch_calibration.tolist()]
        trees = np.stack(
            [
                _tree(self._profile, seed, at, shape.tree, known[row])
                for row, (seed, at) in enumerate(keys)
            ]
        )
        can_draft = (slots > 0) & ~self._is_after_off[slots]
        count = 1 + np.where(can_draft, np.minimum(plan.sampling.max_drafts, shape.nodes - 1), 0)
        tokens, parents = (trees[:, i].astype(np.int32) for i in (0, 1))
        tokens, count = tokens + 1, count.astype(np.int32)
        if shape.rows < B * shape.nodes:
            weights = trees[:, 2].astype(np.float32)
            ranked = verify_budget.log_acceptance(parents, weights, plan.sampling.calibration)
            tokens, parents, count = verify_budget.prune_to_budget(
                tokens, parents, count, ranked, shape.rows
            )
        self._drafted = tokens, parents
        self._said = np.zeros((B, shape.max_tokens), np.int32)
        accepted = [
            self._walk(row, keys[row], tokens[row], parents[row], int(count[row]))
            for row in range(B)
        ]
        counts = np.where(slots > 0, 1 + np.array(accepted), 0)
        self._lengths[slots] += counts
        self._is_after_off[slots] = shape.is_plain
        return counts, count

    def _walk(
        self,
        row: int,
        key: tuple[int, int],
        tokens: Int[np.ndarray, " N"],
        parents: Int[np.ndarray, " N"],
        count: int,
    ) -> int:
        """Returns the number of accepted drafts of a row, and stores their tokens."""
        seed, position = key
        _, ranks = _drawn(self._profile, seed, position)
        node, has_left = 0, False
        for depth in range(self._said.shape[1] - 1):
            rank = int(ranks[int(has_left), depth])
            is_next = (parents[1:count] == node) & (tokens[1:count] == rank + 1)
            if not is_next.any():
                return depth
            self._said[row, depth] = rank + 1
            node, has_left = 1 + int(is_next.argmax()), has_left or rank > 0
        return self._said.shape[1] - 1

    def _tokens(self, plan: StepPlan, counts: np.ndarray) -> Int[np.ndarray, "B W"]:
        if not isinstance(plan.work, Decode):
            return super()._tokens(plan, counts)
        self._said[np.arange(len(counts)), np.maximum(counts - 1, 0)] = BONUS
        return self._said

    def _trees(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        return self._drafted if isinstance(plan.work, Decode) else super()._trees(plan)


MEASURED = {"none": {1: 4.3, 8: 4.6, 32: 5.3}}
"""Milliseconds of plain decoding, as in `work.MILLISECONDS`."""

FIRST_MS, ROW_MS, TREE_MS = 5.5, 0.012, 0.05
"""Cost of a drafting step: the line through 5.69 ms at 16 verify rows and 7.03 ms at 128 (torch,
H200, Qwen3-8B, DFLASH), and an assumed addition for a tree."""


def block_seconds(batch: int, tier: Tier) -> float:
    """Returns the cost of a step; beyond 128 rows the line is an assumption."""
    if tier.is_off:
        known = MEASURED["none"]
        return float(np.interp(batch, list(known), list(known.values()))) / 1000
    rows = tier.shape(batch).rows
    return (FIRST_MS + ROW_MS * rows + TREE_MS * (tier.width > 1)) / 1000


TIERS = (Tier(1, 0, 0), Tier(8, 7, 1), Tier(16, 15, 1), Tier(32, 15, 8))
CHAIN, TREE = 2, 3
"""Numbers of the longest chain and of the tree in `TIERS`."""

BATCHES = (1, 8, 32)

# At batch 1 chains of 15 drafts give 8.0, 5.6 and 3.3 tokens a step, trees of 32 nodes 9.6, 7.2
# and 4.8.
PROFILES = {
    "maths": Profile(certain=0.7, least=0.5, most=0.95),
    "code": Profile(certain=0.5, least=0.5, most=0.9),
    "chat": Profile(certain=0.2, least=0.4, most=0.85),
    "bidirectional": Profile(certain=0.3, least=0.4, most=0.85, follows=0.3),
}


def run(
    policy: Policy, profile: Profile, batch: int, tokens: int = 600
) -> tuple[Served, BranchCalibrationController]:
    """Serves a phase of equal requests with one policy, and returns the controller too."""
    phases, _ = imposed([("texts", batch, 2 * batch + 6, tokens, always(0.0))], part=1 << 20)
    capacity = simulated_capacity(TIERS, BATCHES, overlap=1, block=16)
    backend = BlockTreeBackend(capacity, block_seconds, profile, noise=0.03)
    table = {b: [block_seconds(b, tier) for tier in TIERS] for b in BATCHES}
    inner = AdaptiveController(capacity, policy, table, has_experts=False)
    controller = BranchCalibrationController(inner, capacity)
    engine = Engine(backend, controller, overlap=1, chunked_prefill_size=2048, cache=NO_CACHE)
    return serve(engine, phases, lambda: backend.clock)[0], controller
