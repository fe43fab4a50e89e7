"""Layer without a token mixer, in models with one sublayer per layer."""

from dataclasses import dataclass
from typing import ClassVar

from shared.models.cache_spec import CacheArraySpec
from shared.models.no_sublayer import NoSublayer


@dataclass(frozen=True)
class NoMixer(NoSublayer):
    """Mixer of a layer that only has an MLP: no parameters, and no cache arrays."""

    kind: ClassVar[str] = "no_mixer"
    window: ClassVar[None] = None
    cache_specs: ClassVar[tuple[CacheArraySpec, ...]] = ()
