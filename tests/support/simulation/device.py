"""Simulated device: step costs come from a table, and drafts are accepted by a distribution.

It is a backend with a number as its clock. A controller's choices are evaluated on a CPU in
milliseconds, over work that does not depend on them: acceptance of a draft depends on the request's
seed and the position only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int, UInt32

from shared.boundary.backend import BackendLimits, Decode, HostDraft, Prefill, StepPlan, StepResult
from shared.boundary.program import LaunchMode, Program, ProgramFeature, StepKind
from shared.engine.adaptive.tiers import Tier
from shared.spec.draft_tree import TreeShape
from shared.spec.gumbel_noise import uniforms
from tests.support.limits import make_limits, make_program

PROMPT_SECONDS = 0.005
MOST_DEPTH = 16

Law = Callable[[UInt32[np.ndarray, " B"], Int[np.ndarray, " B"]], Float[np.ndarray, "B D"]]
"""From the rows' seeds and how many tokens of output each has, how often the draft of each depth of
a chain is accepted, given those before it. A tree's follow by `Tier.independent_candidates`."""

Seconds = Callable[[int, Tier], float]
"""Cost of a decode step, by batch bucket and tier."""


def seconds_of(table: Mapping[str, Mapping[int, float]]) -> Seconds:
    """Costs from milliseconds by tier and batch, interpolated linearly between batches."""

    def seconds(batch: int, tier: Tier) -> float:
        sizes = table[str(tier)]
        return float(np.interp(batch, list(sizes), list(sizes.values()))) / 1000

    return seconds


def simulated_capacity(
    tiers: Sequence[Tier],
    batches: Sequence[int],
    *,
    overlap: int,
    context_length: int = 8192,
    block: int = 0,
) -> BackendLimits:
    """A capacity with a decode program for each batch and tier, and room for every request; trees
    are over a block of `block` rows."""
    page_size = 64

    def program(work: StepKind, batch: int, tokens: int, shape: TreeShape) -> Program:
        return make_program(work, shape, tokens, batch=batch, pages=pages)

    pages = context_length // page_size + 4
    decodes = [
        program(StepKind.DECODE, batch, 0, replace(tier.shape(batch), block=block))
        for batch in batches
        for tier in tiers
    ]
    prefills = [program(StepKind.PREFILL, b, 64 * b, TreeShape.plain(b)) for b in {1, max(batches)}]
    return make_limits(
        (*decodes, *prefills),
        page_size=page_size,
        overlap=overlap,
        context_length=context_length,
        vocab=16,
    )


def with_host_drafts(capacity: BackendLimits, vocab: int) -> BackendLimits:
    """The same limits with trees from the host and a vocabulary of `vocab` tokens."""
    programs = (
        p.with_features({ProgramFeature.HOST_DRAFT: not p.shape.is_plain})
        for p in capacity.programs
    )
    return replace(capacity, programs=tuple(programs), vocab=vocab)


@dataclass(frozen=True)
class Known:
    """A result; reading it advances the clock to the end of its step."""

    value: StepResult
    ends: float
    device: Clock

    def result(self) -> StepResult:
        self.device.clock = max(self.device.clock, self.ends)
        return self.value


class Clock:
    """A `shared.boundary.backend.Backend` of numbers; what its rows accept is a subclass's.

    Attributes:
      clock: Seconds until the end of the last step with a requested result: the host's time.
    """

    def __init__(self, capacity: BackendLimits, seconds: Seconds, noise: float, seed: int) -> None:
        self.capacity, self.clock, self._ends = capacity, 0.0, 0.0
        self._seconds, self._noise, self._prompt_s = seconds, noise, PROMPT_SECONDS
        self._rng = np.random.default_rng(seed)
        self._lengths = np.zeros(capacity.num_slots, np.int64)
        self._is_after_off = np.zeros(capacity.num_slots, bool)

    @property
    def is_idle(self) -> bool:
        """Reports whether the host has waited for every step."""
        return self.clock >= self._ends

    def _decode(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        """Moves the rows' lengths on; their tokens of the step, and the nodes of their trees."""
        raise NotImplementedError

    def workspace(self, program: Program) -> int:
        return 0

    def prepare(self, programs: Sequence[Program], progress: Callable[[Program], None]) -> None:
        pass

    def launch(self, program: Program) -> LaunchMode:
        return LaunchMode.EAGER

    def close(self) -> None:
        pass

    def submit(self, plan: StepPlan) -> Known:
        work = plan.work
        counts, nodes = (
            self._prefill(plan, work) if isinstance(work, Prefill) else self._decode(plan)
        )
        B = plan.program.batch
        seconds = self._prompt_s
        if plan.program.work is StepKind.DECODE:
            seconds = self._decode_seconds(plan, nodes)
            seconds *= max(1 + self._noise * self._rng.standard_normal(), 0.5)
        self._ends = max(self._ends, self.clock) + seconds
        zeros, (drafts, parents) = np.zeros(B, np.int32), self._trees(plan)
        return Known(
            StepResult(
                tokens=self._tokens(plan, counts),
                counts=counts.astype(np.int32),
                failed=zeros,
                snapshot_saved=zeros,
                drafts=drafts,
                parents=parents,
                num_nodes=nodes.astype(np.int32),
                logprobs=None,
                scores=None,
                device_seconds=seconds,
            ),
            self._ends,
            self,
        )

    def _decode_seconds(self, plan: StepPlan, nodes: np.ndarray) -> float:
        """Returns the cost of a decode step."""
        batch = plan.program.batch
        return self._seconds(batch, Tier.of(plan.program.shape, batch))

    def _trees(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens and parents of the trees of the last step; zeros by default."""
        trees = np.zeros((plan.program.batch, plan.program.shape.nodes), np.int32)
        return trees, trees

    def _tokens(self, plan: StepPlan, counts: np.ndarray) -> Int[np.ndarray, "B W"]:
        """Returns the tokens of each row; called after its length has grown."""
        return np.ones((len(counts), plan.program.shape.max_tokens), np.int32)

    def _prefill(self, plan: StepPlan, work: Prefill) -> tuple[np.ndarray, np.ndarray]:
        fed = np.diff(work.row_starts)
        self._lengths[plan.slots] = work.first_positions + fed
        self._is_after_off[plan.slots] = False
        return work.ends_prompt * (plan.slots > 0), np.ones(len(fed))


DRAWN = 64
"""Positions of which a request's chances are drawn at once, since a step's alone take as long."""


@lru_cache(maxsize=1 << 13)
def _chances(seed: int, block: int) -> Float[np.ndarray, "DRAWN MOST_DEPTH"]:
    """Returns the uniforms that decide on a request's drafts, which do not depend on the batch."""
    positions = np.arange(block * DRAWN, (block + 1) * DRAWN, dtype=np.int32)
    return uniforms(np.full(DRAWN, seed, np.uint32), positions, MOST_DEPTH)


class SimulatedBackend(Clock):
    """Backend with device drafts that are accepted by a distribution.

    Args:
      noise: Standard deviation of a step's time, as a share of it.
    """

    def __init__(
        self,
        capacity: BackendLimits,
        seconds: Seconds,
        law: Law,
        *,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(capacity, seconds, noise, seed)
        self.law = law

    def _decode(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        slots, shape = plan.slots, plan.program.shape
        tier, lengths = Tier.of(shape, plan.program.batch), self._lengths[slots]
        most = np.minimum(plan.sampling.max_drafts, tier.depth)
        most = np.where(self._is_after_off[slots] | (slots == 0), 0, most)
        if shape.rows < len(slots) * shape.nodes:
            most = _granted(most, plan.sampling.calibration, shape.rows - len(slots))
        seeds = plan.sampling.seed
        pairs = zip(seeds.tolist(), lengths.tolist(), strict=True)
        chance = np.stack([_chances(seed, at // DRAWN)[at % DRAWN] for seed, at in pairs])
        rates = self.law(seeds, lengths + 1 - plan.sampling.prompt_length)
        deep = min(tier.depth, rates.shape[1])
        wins = chance[:, :deep] < 1 - (1 - rates[:, :deep]) ** tier.independent_candidates
        accepted = np.minimum(np.cumprod(wins, axis=1).sum(axis=1), most)
        counts = np.where(slots > 0, 1 + accepted, 0)
        self._lengths[slots] += counts
        self._is_after_off[slots] = tier.is_off
        is_chain = tier.width <= 1
        nodes = 1 + (most if is_chain else np.where(most > 0, tier.nodes - 1, 0))
        return counts, nodes


class TextBackend(Clock):
    """Backend with given output texts; the host's drafts are compared with them.

    Args:
      texts: The output of each request, by its seed.
      noise: See `SimulatedBackend`.
    """

    def __init__(
        self,
        capacity: BackendLimits,
        seconds: Seconds,
        texts: Mapping[int, Sequence[int]],
        *,
        noise: float,
    ) -> None:
        super().__init__(capacity, seconds, noise, seed=0)
        self._texts = texts

    def _ahead(self, plan: StepPlan, row: int, start: int) -> Sequence[int]:
        """The text of a row from a position on; nothing past its end."""
        said = self._texts[int(plan.sampling.seed[row])]
        return said[start - int(plan.sampling.prompt_length[row]) :]

    def _tokens(self, plan: StepPlan, counts: np.ndarray) -> Int[np.ndarray, "B W"]:
        found = super()._tokens(plan, counts)
        starts = self._lengths[plan.slots] + 1 - counts
        for row in np.flatnonzero(counts).tolist():
            said = self._ahead(plan, row, int(starts[row]))[: counts[row]]
            found[row, : len(said)] = said
        return found

    def _decode(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        slots, nodes = plan.slots, np.ones(len(plan.slots))
        counts = (slots > 0).astype(np.int64)
        drafts = plan.work.drafts if isinstance(plan.work, Decode) else None
        if drafts is not None:
            nodes = drafts.num_nodes
            for row in np.flatnonzero(counts).tolist():
                ahead = self._ahead(plan, row, int(self._lengths[slots[row]]) + 1)
                counts[row] += _agreed(drafts, row, ahead)
        self._lengths[slots] += counts
        return counts, nodes


@dataclass(frozen=True)
class Spinning:
    """A result; reading it spins until its step has ended."""

    value: StepResult
    ends: float

    def result(self) -> StepResult:
        spin_until(self.ends)
        return self.value


def spin_until(end: float) -> None:
    """Keeps the processor busy, like a host that submits a step or waits for its end."""
    while time.perf_counter() < end:
        pass


class RealTimeBackend(TextBackend):
    """A `TextBackend` in real time, for what a host costs beside a device that is fast.

    Args:
      seconds: Of a step on the device alone.
      submit_s: That submitting a step keeps the host; the device takes as long for a prompt.
    """

    def __init__(
        self,
        capacity: BackendLimits,
        seconds: Seconds,
        texts: Mapping[int, Sequence[int]],
        *,
        submit_s: float,
    ) -> None:
        super().__init__(capacity, seconds, texts, noise=0.0)
        self._submit_s = self._prompt_s = submit_s

    def submit(self, plan: StepPlan) -> Spinning:
        self.clock = time.perf_counter() + self._submit_s
        known = super().submit(plan)
        spin_until(self.clock)
        return Spinning(known.value, known.ends)


def _agreed(drafts: HostDraft, row: int, ahead: Sequence[int]) -> int:
    """Returns the number of drafts of a row's tree that match the text."""
    parent, tokens, parents = 0, drafts.tokens[row], drafts.parents[row]
    for count, token in enumerate(ahead):
        children = range(parent + 1, drafts.num_nodes[row])
        found = [node for node in children if parents[node] == parent and tokens[node] == token]
        if not found:
            return count
        parent = found[0]
    return len(ahead)


def _granted(
    most: Int[np.ndarray, " B"], calibration: Float[np.ndarray, "B S"], count: int
) -> Int[np.ndarray, " B"]:
    """Returns the number of drafts of each chain that are among the `count` best of the batch."""
    depth = np.arange(calibration.shape[1])
    weights = np.where(depth < most[:, None], calibration, -np.inf)
    order = np.argsort(-weights, axis=None, kind="stable")[:count]
    is_best = np.zeros(weights.size, bool)
    is_best[order] = True
    return (is_best.reshape(weights.shape) & np.isfinite(weights)).sum(axis=1)
