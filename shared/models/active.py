"""The numbers of a model that one row is multiplied with."""

from collections.abc import Sequence
from math import prod

from shared.models.config import ModelConfig
from shared.models.parameters import Parameter

EMBEDDING = "embed"
EXPERTS = ("experts.gate_up", "experts.down")


def active_numbers(wanted: Sequence[Parameter], config: ModelConfig, is_tied: bool) -> int:
    """How many numbers of weights a row's products read; of experts, those of one choice.

    Args:
      wanted: All parameters.
      config: Of the model that has them.
      is_tied: Whether the embedding is the LM head too.
    """
    found, experts = 0, config.experts
    for p in wanted:
        if len(p.shape) - p.stacked < 2 or (p.name == EMBEDDING and not is_tied):
            continue
        size = prod(p.shape)
        if experts is not None and p.name.endswith(EXPERTS):
            size = size * (experts.num_chosen + experts.shares_stacks) // experts.num_stacked
        found += size
    return found
