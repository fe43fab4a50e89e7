"""Layer groups and cache pools: which layers share stacks of parameters, and cache arrays.

Layers with equal mixer sizes, or with equal MLP sizes, form a group with its own stacks. The first
group of a kind has the name of the kind, a further one has a number: `attention`, `attention_2`.
Layers with equal cache arrays and the same sliding window share a pool. A layer that reads the KV
of another layer has no cache arrays, and the place of the other layer in a pool.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from shared.models.cache_spec import CacheUnit, cache_bytes
from shared.models.layers import LayerConfig
from shared.models.mixers import AttentionConfig, MixerConfig, RecurrentConfig


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
        return self.mixer.window

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
      pool: Index of its pool among the pools with the same unit; for a layer that reads the KV of
        another layer, the pool of the other layer.
      pool_index: Index in the arrays of that pool.
      parallel: Name of the group of its parallel mixer; None without one.
      parallel_index: Index in the stacks of that group, and in its pool.
    """

    mixer: str
    mixer_index: int
    mlp: str
    mlp_index: int
    pool: int
    pool_index: int
    parallel: str | None = None
    parallel_index: int = 0


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


def parallel_groups(layers: Sequence[LayerConfig]) -> tuple[LayerGroup[RecurrentConfig], ...]:
    """Groups the parallel mixers of layers, in the order of the groups' first layers."""
    own = {index: x.parallel for index, x in enumerate(layers) if x.parallel is not None}
    numbers = list(own)
    return tuple(
        replace(each, layers=tuple(numbers[index] for index in each.layers))
        for each in group(list(own.values()))
    )


def cache_pools(mixers: Sequence[MixerConfig]) -> tuple[CachePool, ...]:
    """Returns the pools of layers with these mixers, in the order of their first layers."""
    found = [layers for layers in _equal(mixers, _pool_key) if mixers[layers[0]].cache_specs]
    return tuple(CachePool(mixers[layers[0]], layers) for layers in found)


def check_kv_sharing(layers: Sequence[LayerConfig]) -> None:
    """Checks the layers that read the KV of another layer; in a drafter that reads the KV of its
    target, all layers do.

    Raises:
      ValueError: A layer cannot read the KV of the layer that it names; the message names both.
    """
    if all(each.reads_target_kv for each in layers):
        return
    for index, each in enumerate(layers):
        mixer, source = each.mixer, each.kv_shared_layer_index
        own = mixer.with_kv if isinstance(mixer, AttentionConfig) and not mixer.has_kv else None
        if (own is None) != (source is None):
            raise ValueError(
                f"layer {index} has kv_shared_layer_index {source}; an attention layer without KV "
                "of its own must have the index of another layer, and any other layer none"
            )
        if own is None or source is None:
            continue
        earlier = [_pool_key(layer.mixer) for layer in layers[:index]]
        if source not in range(index) or earlier[source] != _pool_key(own):
            raise ValueError(
                f"layer {index} reads the KV of layer {source}, which must be an earlier attention "
                "layer with KV of its own, and with the same head_dim, num_key_value_heads and "
                "sliding_window; give another kv_shared_layer_index"
            )


def pools_with(pools: Sequence[CachePool], unit: CacheUnit) -> tuple[CachePool, ...]:
    """Returns the pools with an entry for each `unit`."""
    return tuple(pool for pool in pools if any(spec.per is unit for spec in pool.mixer.cache_specs))


def pool_bytes(pools: Sequence[CachePool], unit: CacheUnit, item: int) -> int:
    """Returns the bytes of the entries of one unit in all pools; see `CachePool.unit_bytes`."""
    return sum(pool.unit_bytes(unit, item) for pool in pools)


def places(layers: Sequence[LayerConfig]) -> tuple[LayerPlace, ...]:
    """Returns the place of each layer of a model, or of some layers with stacks of their own."""
    mixers, found = [each.mixer for each in layers], dict[int, dict[str, Any]]()
    for each in group(mixers):
        for index, layer in enumerate(each.layers):
            found[layer] = {"mixer": each.name, "mixer_index": index}
            found[layer] |= {"pool": 0, "pool_index": 0}  # of a layer without cache arrays
    for each in group([each.mlp for each in layers]):
        for index, layer in enumerate(each.layers):
            found[layer] |= {"mlp": each.name, "mlp_index": index}
    for unit in CacheUnit:
        for number, pool in enumerate(pools_with(cache_pools(mixers), unit)):
            for index, layer in enumerate(pool.layers):
                found[layer] |= {"pool": number, "pool_index": index}
    for each in parallel_groups(layers):
        for index, layer in enumerate(each.layers):
            found[layer] |= {"parallel": each.name, "parallel_index": index}
    for layer, each in enumerate(layers):
        if (source := each.kv_shared_layer_index) is not None:
            found[layer] |= {name: found[source][name] for name in ("pool", "pool_index")}
    return tuple(LayerPlace(**found[layer]) for layer in range(len(layers)))


def places_in_target(
    own: Sequence[LayerPlace], target: Sequence[LayerPlace], kv_layers: Sequence[int]
) -> tuple[LayerPlace, ...]:
    """Returns the places of a drafter's layers, which read the pools of its target.

    Args:
      own: Places of the drafter's layers in its own groups.
      target: Places of the target's layers.
      kv_layers: Target layer of each layer of the drafter.
    """
    read = (target[layer] for layer in kv_layers)
    pairs = zip(own, read, strict=True)
    return tuple(replace(x, pool=y.pool, pool_index=y.pool_index) for x, y in pairs)


def _pool_key(mixer: MixerConfig) -> Hashable:
    return mixer.cache_specs, mixer.window


def _equal(items: Sequence[Item], key: Callable[[Item], Hashable]) -> list[tuple[int, ...]]:
    """Returns the indices of items with equal keys, in the order of first occurrence."""
    found: dict[Hashable, list[int]] = {}
    for index, item in enumerate(items):
        found.setdefault(key(item), []).append(index)
    return [tuple(indices) for indices in found.values()]
