"""Absent half of a layer, in models with one sublayer per layer."""

from collections.abc import Iterator, Sequence
from typing import Self

from shared.models.parameter import Parameter
from shared.models.stacks import StackSettings


class NoSublayer:
    """Base of a mixer and of an MLP that a layer does not have: no sizes, and no parameters."""

    @property
    def sizes(self) -> Self:
        """The config itself: all such layers are equal."""
        return self

    @property
    def divided(self) -> Iterator[tuple[str, int]]:
        """No sizes."""
        yield from ()

    def local(self, count: int) -> Self:
        """Returns the config of one of `count` TP ranks."""
        del count
        return self

    def parameters(
        self, prefix: str, layers: Sequence[str], settings: StackSettings
    ) -> list[Parameter]:
        """Returns no parameters."""
        del prefix, layers, settings
        return []
