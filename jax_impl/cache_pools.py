"""Allocation of cache pools: pages of attention layers, and states of GDN layers."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.ops.attention.attention import KV, Pools
from jax_impl.ops.recurrent.recurrent_state import RecurrentState
from shared.models.cache_spec import CacheArraySpec, CacheUnit
from shared.models.groups import CachePool, pools_with
from shared.models.mixers import MixerConfig


def new_states(
    pools: Sequence[CachePool], count: int, dtype: np.dtype | type
) -> RecurrentState | None:
    """Returns GDN states before the first token, or None for a model without GDN layers."""
    pool = next(iter(pools_with(pools, CacheUnit.SLOT)), None)
    if pool is None:
        return None

    def new(spec: CacheArraySpec) -> jax.Array:
        shape, kind = (len(pool), count, *spec.shape), np.float32 if spec.float32 else dtype
        return jnp.zeros(shape, kind)

    return RecurrentState(**{spec.name: new(spec) for spec in pool.mixer.cache_specs})


def new_pools(pools: Sequence[CachePool], size: tuple[int, int], dtype: np.dtype | type) -> Pools:
    """Returns empty KV pools of a model or drafter; `size` is the page count and page size."""
    of_pages = pools_with(pools, CacheUnit.POSITION)
    return tuple(new_kv(pool.mixer, len(pool), size, dtype) for pool in of_pages)


def new_kv(
    mixer: MixerConfig, num_layers: int, size: tuple[int, int], dtype: np.dtype | type
) -> KV:
    """Returns empty pages for some attention layers; `size` is the page count and page size."""
    specs = mixer.cache_specs
    return jnp.zeros((num_layers, len(specs), *size, *specs[0].shape), dtype)
