"""Allocation of cache pools: pages of attention layers, and states of GDN layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.models.cache_spec import CacheArraySpec, CacheUnit
from shared.models.groups import CachePool, pools_with
from shared.models.mixers import MixerConfig
from torch_impl.ops.attention.attention import KV, Pools
from torch_impl.ops.recurrent.recurrent_state import RecurrentState


def new_states(
    pools: Sequence[CachePool], count: int, dtype: torch.dtype, device: torch.device
) -> RecurrentState | None:
    """Returns GDN states before the first token, or None for a model without GDN layers."""
    pool = next(iter(pools_with(pools, CacheUnit.SLOT)), None)
    if pool is None:
        return None

    def new(spec: CacheArraySpec) -> Tensor:
        shape, kind = (len(pool), count, *spec.shape), torch.float32 if spec.float32 else dtype
        return torch.zeros(shape, dtype=kind, device=device)

    return RecurrentState(**{spec.name: new(spec) for spec in pool.mixer.cache_specs})


def new_pools(
    pools: Sequence[CachePool], size: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Pools:
    """Returns empty KV pools of a model or drafter; `size` is the page count and page size."""
    of_pages = pools_with(pools, CacheUnit.POSITION)
    return tuple(new_kv(pool.mixer, len(pool), size, dtype, device) for pool in of_pages)


def new_kv(
    mixer: MixerConfig,
    num_layers: int,
    size: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> KV:
    """Returns empty pages for some attention layers; `size` is the page count and page size."""
    specs = mixer.cache_specs
    shape = (num_layers, len(specs), *size, *specs[0].shape)
    return torch.zeros(shape, dtype=dtype, device=device)
