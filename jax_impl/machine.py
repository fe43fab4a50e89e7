"""What all kinds of step work with, and what more than one of them does."""

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jax_impl import device_state
from jax_impl.device_state import DeviceState, Held
from jax_impl.drafters import Drafter
from jax_impl.ops import sampling
from jax_impl.weights import Model
from shared.boundary.backend import Limits
from shared.models.config import ModelConfig

Fields = dict[str, jax.Array]


class Machine(NamedTuple):
    """What all steps of a backend have in common."""

    config: ModelConfig
    limits: Limits
    weights: Model
    drafter: Drafter | None

    @property
    def has_relay(self) -> bool:
        """Whether extending the drafter ranks candidates, for which it needs noise."""
        return self.drafter is not None and self.drafter.sizes.has_relay


def held_by(state: DeviceState, plan: SimpleNamespace) -> Held:
    rows = (plan.slots, plan.starts != 0, plan.restore, plan.draft_from)
    return device_state.begun(state, *rows)


def logprobs_of(
    logits: Float[jax.Array, "B W vocab"],
    tokens: Int[jax.Array, "B W"],
    counts: Int[jax.Array, " B"],
    top: int,
) -> Fields:
    """Logprobs of the emitted tokens and the best ones; 0 past the counts."""
    B, W, vocab = logits.shape
    flat = logits.reshape(B * W, vocab)
    is_emitted = jnp.arange(W) < counts[:, None]
    chosen = sampling.logprobs(flat, tokens.reshape(-1)).reshape(B, W)
    ids, values = (x.reshape(B, W, top) for x in sampling.top_logprobs(flat, top))
    return {
        "chosen": jnp.where(is_emitted, chosen, 0),
        "top_ids": jnp.where(is_emitted[:, :, None], ids, 0),
        "top_values": jnp.where(is_emitted[:, :, None], values, 0),
    }
