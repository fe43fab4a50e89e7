"""Tables of tile configs: a call uses the first line with bounds that its sizes do not exceed."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Line(Generic[T]):
    """Tiles, and the largest sizes for which they are used."""

    at_most: Mapping[str, float]
    tiles: T

    def takes(self, sizes: Mapping[str, float]) -> bool:
        """Returns whether no size exceeds its bound."""
        return all(sizes[name] <= bound for name, bound in self.at_most.items())


@dataclass(frozen=True)
class Table(Generic[T]):
    """Tiles of one kernel. A call uses the first line that fits its sizes; the last line fits all.

    Raises:
      ValueError: The last line does not fit all sizes.
    """

    lines: tuple[Line[T], ...]

    def __post_init__(self) -> None:
        if not self.lines or self.lines[-1].at_most:
            raise ValueError("the last line must have no at_most, so that every size has tiles")

    def of(self, **sizes: float) -> T:
        """Returns the tiles for a call; `sizes` has all sizes that the tables can bound.

        An `item_bytes` below 1 is that of packed weights.
        """
        return next(line.tiles for line in self.lines if line.takes(sizes))


def check_at_least(tiles: object, **least: int) -> None:
    """Checks minimum values of fields.

    Raises:
      ValueError: A field is below its minimum; names it.
    """
    for name, bound in least.items():
        if getattr(tiles, name) < bound:
            raise ValueError(f"{name} must be at least {bound}, got {getattr(tiles, name)}")


def check_one_of(tiles: object, **choices: Collection[int]) -> None:
    """Checks that fields have one of their allowed values.

    Raises:
      ValueError: A field has another value; names it.
    """
    for name, values in choices.items():
        if getattr(tiles, name) not in values:
            allowed = ", ".join(map(str, values))
            raise ValueError(f"{name} must be one of {allowed}, got {getattr(tiles, name)}")


def check_powers_of_two(tiles: object, least: Mapping[str, int]) -> None:
    """Checks that fields are powers of two and not below their minimum.

    Raises:
      ValueError: A field is below its minimum, or not a power of two; names it.
    """
    for name, bound in least.items():
        value = getattr(tiles, name)
        if value < bound or value & (value - 1):
            raise ValueError(f"{name} must be a power of two from {bound}, got {value}")
