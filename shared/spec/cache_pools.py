"""Cache pools: pages of attention layers, and states of GDN layers."""

import numpy as np
from jaxtyping import Float

from shared.models.cache_spec import CacheUnit
from shared.models.config import ModelConfig
from shared.models.groups import pools_with
from shared.models.mixers import MixerConfig
from shared.spec import recurrent_state
from shared.spec.recurrent_state import RecurrentState

KV = Float[np.ndarray, "L arrays P page H D"]
"""Page pools of some layers: an array each, such as keys and values. Page 0 is reserved for
padding."""

Pools = tuple[Float[np.ndarray, "_ arrays _ page _ _"], ...]
"""Page pools of a model, in the order of `ModelConfig.kv_pools`."""


def new_pools(config: ModelConfig, num_pages: int, page_size: int) -> Pools:
    """Returns empty pools for all attention layers of a model."""
    return tuple(new_kv(pool.mixer, len(pool), num_pages, page_size) for pool in config.kv_pools)


def new_kv(mixer: MixerConfig, num_layers: int, num_pages: int, page_size: int) -> KV:
    """Returns empty pools for `num_layers` attention layers."""
    specs = mixer.cache_specs
    shape = (num_layers, len(specs), num_pages, page_size, *specs[0].shape)
    return np.zeros(shape, np.float32)


def new_state(config: ModelConfig, batch: int) -> RecurrentState:
    """Returns the states of `batch` rows before their first token; empty for a model without GDN
    layers.
    """
    pool = next(iter(pools_with(config.cache_pools, CacheUnit.SLOT)), None)
    if pool is None:
        return RecurrentState(
            np.zeros((0, batch, 0, 0, 0), np.float32),
            np.zeros((0, batch, recurrent_state.WINDOW, 0), np.float32),
        )
    return RecurrentState(
        **{
            x.name: np.zeros((len(pool), batch, *x.shape), np.float32)
            for x in pool.mixer.cache_specs
        }
    )
