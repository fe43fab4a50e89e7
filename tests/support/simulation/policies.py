"""Simple policies that the served one is held against."""

from __future__ import annotations

from shared.engine.adaptive.policy import PolicyInput

EVERY_STEPS, PROBE_STEPS = 100, 3


class Greedy:
    """The tier that is believed to give the most tokens a second; it tries nothing."""

    def choose(self, situation: PolicyInput) -> int:
        """The tier with the most."""
        tokens = situation.expected.tokens.tolist()
        seconds = situation.seconds or [1.0] * len(tokens)
        speeds = [each / s for each, s in zip(tokens, seconds, strict=True)]
        return speeds.index(max(speeds))


class Probe:
    """The greedy choice, but for 3 steps in 100 that take the other tiers in turn."""

    def __init__(self) -> None:
        self._greedy, self._steps = Greedy(), 0

    def choose(self, situation: PolicyInput) -> int:
        """The greedy tier, or the tier to probe next."""
        best = self._greedy.choose(situation)
        turn, step = divmod(self._steps, EVERY_STEPS)
        self._steps += 1
        if turn == 0 or step >= PROBE_STEPS:
            return best
        others = [t for t in range(len(situation.expected.tokens)) if t != best]
        return others[turn % len(others)]
