"""Layer without a token mixer, in models with one sublayer per layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from shared.models.cache_spec import CacheArraySpec
from shared.models.parameter import Parameter
from shared.models.stacks import StackSettings


@dataclass(frozen=True)
class NoMixer:
    """Mixer of a layer that only has an MLP: no parameters, and no cache arrays."""

    kind: ClassVar[str] = "no_mixer"
    window: ClassVar[None] = None
    cache_specs: ClassVar[tuple[CacheArraySpec, ...]] = ()

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
