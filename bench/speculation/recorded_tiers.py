"""Tiers of recorded results: today's names for those of former versions."""

from collections.abc import Mapping

_FORMER = {"off": "none", "asleep": "disabled"}


def current_name(name: str) -> str:
    """Returns today's name of a tier."""
    return _FORMER.get(name, name)


def seconds_by_tier(seconds: Mapping[str, Mapping[str, float]]) -> dict[int, dict[str, float]]:
    """Returns the step times of a start of `bench.speculation.adaptive` by batch size and tier.

    Args:
      seconds: Field `seconds` of a start, in a report of any version.
    """
    return {
        int(batch): {current_name(name): value for name, value in of_tiers.items()}
        for batch, of_tiers in seconds.items()
    }
