"""Layer groups and cache pools: which layers share stacks of parameters, and cache arrays.

Layers with equal mixer sizes, or with equal MLP sizes, form a group with its own stacks. The first
group of a kind has the name of the kind, a further one has a number: `attention`, `attention_2`.
Layers with equal cache arrays and the same sliding window share a pool.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from shared.models.cache_spec import CacheUnit, cache_bytes
from shared.models.layers import LayerConfig
from shared.models.mixers import AttentionConfig, MixerConfig


class _Part(Protocol):
    kind: ClassVar[str]

    @property
    def sizes(self) -> Hashable: ...
    def local(self, count: int) -> Self: ...


Part = TypeVar("Part", bound=_Part, covariant=True)
Item = TypeVar("Item")


@dataclass(frozen=True)
class LayerGroup(Generic[Part]):
    """Layers with equal mixer sizes, or with equal MLP sizes.

    Attributes:
      name: Prefix of its parameters.
      config: Mixer or MLP of its first layer; rotary settings and windows of the others may differ.
      layers: Indices of its layers, in ascending order.
    """

    name: str
    config: Part
    layers: tuple[int, ...]

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.layers)


@dataclass(frozen=True)
class CachePool:
    """Cache arrays that some layers share, stacked by layer.

    Attributes:
      mixer: Mixer of its first layer, which specifies the arrays.
      layers: Indices of its layers, in ascending order.
    """

    mixer: MixerConfig
    layers: tuple[int, ...]

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def window(self) -> int | None:
        """Sliding window of its layers; None if all positions stay visible."""
        return self.mixer.window if isinstance(self.mixer, AttentionConfig) else None

    def has(self, unit: CacheUnit) -> bool:
        """Returns True if the arrays have an entry for each `unit`."""
        return any(spec.per is unit for spec in self.mixer.cache_specs)

    def unit_bytes(self, unit: CacheUnit, item: int) -> int:
        """Returns the bytes of the entries of one unit in all layers.

        Args:
          unit: A KV position, or a slot.
          item: Element size of the model's dtype.
        """
        specs = tuple(spec for spec in self.mixer.cache_specs if spec.per is unit)
        return len(self.layers) * cache_bytes(specs, item)

    def local(self, count: int) -> "CachePool":
        """Returns the pool of one of `count` TP ranks."""
        return replace(self, mixer=self.mixer.local(count))


@dataclass(frozen=True)
class LayerPlace:
    """Place of a layer in the groups and pools of a model.

    Attributes:
      mixer, mlp: Names of its groups.
      mixer_index, mlp_index: Index in the stacks of each group.
      pool: Index of its pool among the pools with the same unit.
      pool_index: Index in the arrays of that pool.
    """

    mixer: str
    mixer_index: int
    mlp: str
    mlp_index: int
    pool: int
    pool_index: int


def group(parts: Sequence[Part]) -> tuple[LayerGroup[Part], ...]:
    """Groups the mixers or the MLPs of layers, in the order of the groups' first layers."""
    groups, counts = list[LayerGroup[Part]](), Counter[str]()
    for layers in _equal(parts, lambda part: part.sizes):
        like = parts[layers[0]]
        counts[like.kind] += 1
        number = counts[like.kind]
        name = like.kind if number == 1 else f"{like.kind}_{number}"
        groups.append(LayerGroup(name, like, layers))
    return tuple(groups)


def cache_pools(mixers: Sequence[MixerConfig]) -> tuple[CachePool, ...]:
    """Returns the pools of layers with these mixers, in the order of their first layers."""
    found = _equal(mixers, lambda mixer: (mixer.cache_specs, getattr(mixer, "window", None)))
    return tuple(CachePool(mixers[layers[0]], layers) for layers in found)


def pool_bytes(pools: Sequence[CachePool], unit: CacheUnit, item: int) -> int:
    """Returns the bytes of the entries of one unit in all pools; see `CachePool.unit_bytes`."""
    return sum(pool.unit_bytes(unit, item) for pool in pools)


def places(layers: Sequence[LayerConfig]) -> tuple[LayerPlace, ...]:
    """Returns the place of each layer of a model, or of some layers with stacks of their own."""
    mixers = [each.mixer for each in layers]
    in_mixers, in_mlps = _indices(group(mixers)), _indices(group([each.mlp for each in layers]))
    found = cache_pools(mixers)
    in_pools = [_indices([pool for pool in found if pool.has(unit)]) for unit in CacheUnit]
    pool_of = {layer: at for each in in_pools for layer, at in each.items()}
    return tuple(
        LayerPlace(
            mixer=in_mixers[i][0].name,
            mixer_index=in_mixers[i][2],
            mlp=in_mlps[i][0].name,
            mlp_index=in_mlps[i][2],
            pool=pool_of[i][1],
            pool_index=pool_of[i][2],
        )
        for i in range(len(layers))
    )


Owner = TypeVar("Owner", LayerGroup[Any], CachePool)


def _indices(owners: Sequence[Owner]) -> dict[int, tuple[Owner, int, int]]:
    """Returns the owner of each layer, its number, and the index of the layer in it."""
    return {
        layer: (owner, number, index)
        for number, owner in enumerate(owners)
        for index, layer in enumerate(owner.layers)
    }


def _equal(items: Sequence[Item], key: Callable[[Item], Hashable]) -> list[tuple[int, ...]]:
    """Returns the indices of items with equal keys, in the order of first occurrence."""
    found: dict[Hashable, list[int]] = {}
    for index, item in enumerate(items):
        found.setdefault(key(item), []).append(index)
    return [tuple(indices) for indices in found.values()]
