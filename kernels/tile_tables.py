"""Tables of tiles: lines with bounds, of which a call takes the first that bounds its sizes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Line(Generic[T]):
    """Tiles, and the sizes up to which they are taken."""

    at_most: Mapping[str, int]
    tiles: T

    def takes(self, sizes: Mapping[str, int]) -> bool:
        """Whether no size is above its bound."""
        return all(sizes[name] <= bound for name, bound in self.at_most.items())


@dataclass(frozen=True)
class Table(Generic[T]):
    """The tiles of one kernel; the first line that takes a call's sizes holds, the last takes all.

    Raises:
      ValueError: The last line does not take all sizes.
    """

    lines: tuple[Line[T], ...]

    def __post_init__(self) -> None:
        if not self.lines or self.lines[-1].at_most:
            raise ValueError("the last line must have no at_most, so that every size has tiles")

    def of(self, **sizes: int) -> T:
        """The tiles for a call; `sizes` names every one that the tables of the kernel can bound."""
        return next(line.tiles for line in self.lines if line.takes(sizes))


def check_at_least(tiles: object, **least: int) -> None:
    """Checks fields of tiles.

    Raises:
      ValueError: One is below the least value of it; says which.
    """
    for name, bound in least.items():
        if getattr(tiles, name) < bound:
            raise ValueError(f"{name} must be at least {bound}, got {getattr(tiles, name)}")


def check_one_of(tiles: object, **choices: Collection[int]) -> None:
    """As `check_at_least`, with the values that a field can have.

    Raises:
      ValueError: One has another; says which.
    """
    for name, values in choices.items():
        if getattr(tiles, name) not in values:
            told = ", ".join(map(str, values))
            raise ValueError(f"{name} must be one of {told}, got {getattr(tiles, name)}")


def check_powers_of_two(tiles: object, least: Mapping[str, int]) -> None:
    """As `check_at_least`, of powers of two.

    Raises:
      ValueError: One is below it, or no power of two; says which.
    """
    for name, bound in least.items():
        value = getattr(tiles, name)
        if value < bound or value & (value - 1):
            raise ValueError(f"{name} must be a power of two from {bound}, got {value}")
