"""Scores policies on the trace of a server, without a device.

    python -m bench.speculation.policy_replay TRACE

A trace (`--speculative-adaptive-trace FILE`) has the tier, the rows and the accepted drafts of each
step. The result of a tier that did not run is estimated. The acceptance rate of each depth of a
request is that of its own steps near in time, shrunk towards that of all requests. A level of a
tree counts as `Tier.independent_candidates` of a chain. The time of a step is the recorded median
of its batch bucket and tier, or else the time that the server measured at startup. Rows are as
recorded: that a faster tier would have ended them earlier is ignored for all policies. Resuming
drafting costs a step without drafts, as on a device.

The oracle uses these estimates and takes the best tier of each step; static tiers take theirs. The
adaptive, greedy and probing policies observe only the recorded steps before, so they know nothing
of tiers that did not run.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from bench.speculation.recorded_tiers import current_name
from shared.engine.adaptive.acceptance import AcceptanceModel
from shared.engine.adaptive.policy import ExpectedValuePolicy, Policy, PolicyInput
from shared.engine.adaptive.tiers import Tier
from tests.support.simulation.imposed import DISABLED
from tests.support.simulation.policies import Greedy, Probe

WINDOW = 30
"""Steps before and after that describe a step."""

SHRINKAGE = 5.0
STEPS_AHEAD = 100.0


@dataclass(frozen=True)
class Step:
    """A line of a trace."""

    batch: int
    tier: int
    requests: list[int]
    drafted: list[int]
    accepted: list[int]
    seconds: float | None


@dataclass(frozen=True)
class Recorded:
    """A trace.

    Attributes:
      table: Seconds by batch bucket, then by tier.
    """

    tiers: tuple[Tier, ...]
    table: dict[int, list[float]]
    steps: list[Step]


@dataclass(frozen=True)
class Score:
    """Result of a policy over the whole trace."""

    name: str
    tokens: float
    seconds: float
    used: dict[str, int]

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def read(path: Path) -> Recorded:
    """A trace of drafts of the device.

    Raises:
      ValueError: It is none; one sentence.
    """
    first, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if "tiers" not in first or not lines:
        raise ValueError(f"{path} is no trace of --speculative-adaptive-trace, or an empty one")
    names = list(map(current_name, first["tiers"]))
    if DISABLED in names:
        raise ValueError(f"{path} is a trace of NGRAM: its drafts do not depend on other steps")
    tiers = tuple(map(Tier.parse, names))
    steps = [Step(**{n: line[n] for n in Step.__dataclass_fields__}) for line in lines]
    measured: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step in steps:
        if step.seconds is not None:
            measured[step.batch, step.tier].append(step.seconds)
    table = {int(batch): list(seconds) for batch, seconds in first["seconds"].items()}
    for (batch, tier), seconds in measured.items():
        if batch in table:
            table[batch][tier] = statistics.median(seconds)
    if not {step.batch for step in steps} <= table.keys():
        raise ValueError(f"{path} has batches without step times measured at startup")
    return Recorded(tiers, table, steps)


def scores(recorded: Recorded) -> list[Score]:
    """Every tier by itself, and every policy."""
    hindsight = Hindsight(recorded)
    found = [
        _replay(recorded, hindsight, str(tier), lambda step, now, tier=number: tier)
        for number, tier in enumerate(recorded.tiers)
    ]
    for name, policy in (
        ("greedy", Greedy()),
        ("probe", Probe()),
        ("adaptive", ExpectedValuePolicy()),
    ):
        found.append(_replay(recorded, hindsight, name, _Student(recorded, policy)))
    seconds = recorded.table

    def best(step: Step, tokens: list[float]) -> int:
        speeds = [t / s for t, s in zip(tokens, seconds[step.batch], strict=True)]
        return speeds.index(max(speeds))

    return [*found, _replay(recorded, hindsight, "oracle", best)]


Chooser = Callable[[Step, list[float]], int]
"""From a step and the tokens of each tier by hindsight, the tier."""


def _replay(recorded: Recorded, hindsight: Hindsight, name: str, choose: Chooser) -> Score:
    total, seconds, after_off = 0.0, 0.0, set[int]()
    used: dict[str, int] = defaultdict(int)
    for number, step in enumerate(recorded.steps):
        tokens = hindsight.tokens(number)  # [rows, tiers]
        is_after_off = np.array([request in after_off for request in step.requests])
        now = np.where(is_after_off[:, None], 1.0, tokens)
        tier = choose(step, tokens.sum(axis=0).tolist())
        total += float(now[:, tier].sum())
        seconds += recorded.table[step.batch][tier]
        used[str(recorded.tiers[tier])] += 1
        is_off = recorded.tiers[tier].is_off
        after_off.update(step.requests) if is_off else after_off.difference_update(step.requests)
    return Score(name, total, seconds, dict(used))


class Hindsight:
    """Rates of every request at every step, from the steps before and after it."""

    def __init__(self, recorded: Recorded) -> None:
        self._tiers, self._steps = recorded.tiers, recorded.steps
        depth = max(tier.depth for tier in recorded.tiers)
        # Tries and successes of one candidate, for each step and row.
        self._seen = [self._counts(step, depth) for step in recorded.steps]
        self._near = self._sums([seen.sum(axis=0) for seen in self._seen])
        self._own: dict[int, tuple[list[int], list[np.ndarray]]] = {}
        rows: dict[int, list[tuple[int, np.ndarray]]] = defaultdict(list)
        for number, (step, seen) in enumerate(zip(recorded.steps, self._seen, strict=True)):
            for row, request in enumerate(step.requests):
                rows[request].append((number, seen[row]))
        for request, found in rows.items():
            numbers, seen = zip(*found, strict=True)
            self._own[request] = (list(numbers), self._sums(seen))

    def _counts(self, step: Step, depth: int) -> Float[np.ndarray, "B D 2"]:
        """Returns the observations of each row; a tree counts as a chain with the same
        probability.
        """
        tier = self._tiers[step.tier]
        found = np.zeros((len(step.requests), depth, 2))
        for row, (drafted, accepted) in enumerate(zip(step.drafted, step.accepted, strict=True)):
            levels = min(drafted, tier.depth)
            found[row, : min(accepted + 1, levels), 0] = 1
            found[row, : max(accepted, 0), 1] = 1
        if tier.independent_candidates > 1:
            found /= tier.independent_candidates
        return found

    @staticmethod
    def _sums(seen: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The sum over the window around each entry."""
        ends = np.cumsum([np.zeros_like(seen[0]), *seen], axis=0)
        count = len(seen)
        return [ends[min(i + WINDOW + 1, count)] - ends[max(i - WINDOW, 0)] for i in range(count)]

    def tokens(self, number: int) -> Float[np.ndarray, "B tiers"]:
        """Returns the mean tokens of each row of a step with each tier."""
        step, near = self._steps[number], self._near[number]
        shared = (near[:, 1] + 1) / (near[:, 0] + 2)
        found = np.ones((len(step.requests), len(self._tiers)))
        for row, request in enumerate(step.requests):
            numbers, sums = self._own[request]
            own = sums[numbers.index(number)]
            rates = (own[:, 1] + SHRINKAGE * shared) / (own[:, 0] + SHRINKAGE)
            for index, tier in enumerate(self._tiers):
                hits = 1 - (1 - rates[: tier.depth]) ** tier.independent_candidates
                found[row, index] += np.cumprod(hits).sum()
        return found


class _Student:
    """Policy that receives the results of the recorded steps before."""

    def __init__(self, recorded: Recorded, policy: Policy) -> None:
        self._tiers, self._table, self._policy = recorded.tiers, recorded.table, policy
        self._acceptance, self._after_off = AcceptanceModel(recorded.tiers), set[int]()

    def __call__(self, step: Step, tokens: list[float]) -> int:
        rows = self._acceptance.rows_of(step.requests)
        after_off = np.array([request in self._after_off for request in step.requests])
        seconds, most = self._table[step.batch], np.full(len(rows), 1 << 20)
        expected, _ = self._acceptance.predict(rows, most, after_off, step.batch, seconds)
        tier = self._policy.choose(
            PolicyInput(seconds, expected, len(rows), float(after_off.mean()), STEPS_AHEAD)
        )
        is_off = self._tiers[tier].is_off
        requests = step.requests
        self._after_off.update(requests) if is_off else self._after_off.difference_update(requests)
        drafted = np.minimum(step.drafted, self._tiers[step.tier].depth)
        accepted = np.array(step.accepted)
        self._acceptance.learn(rows, step.tier, np.where(accepted < 0, 0, drafted), accepted)
        return tier


def table(found: Sequence[Score]) -> str:
    """The scores for a terminal, and of the adaptive policy how often it took what."""
    best = max(score.speed for score in found[:-4])
    lines = [f"{'policy':12}{'tokens/s':>12}{'of the best tier':>18}"]
    lines += [f"{s.name:12}{s.speed:12.1f}{s.speed / best:18.3f}" for s in found]
    used = next(score.used for score in found if score.name == "adaptive")
    lines.append("adaptive: " + ", ".join(f"{name} {count}" for name, count in used.items()))
    return "\n".join(lines)


def main() -> int:
    """Prints the table."""
    if len(sys.argv) != 2:
        print("give the file of --speculative-adaptive-trace", file=sys.stderr)
        return 2
    try:
        print(table(scores(read(Path(sys.argv[1])))))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
