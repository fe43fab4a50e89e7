"""Active parameters: the weights that one token is multiplied with."""

from collections.abc import Sequence
from math import prod

from shared.models.config import ModelConfig
from shared.models.parameter import EXPERTS, Parameter

EMBEDDING = "embed"


def active_numbers(wanted: Sequence[Parameter], config: ModelConfig, is_tied: bool) -> int:
    """Returns the number of weights that one token's products read; of MoE layers, the selected
    experts'.

    Args:
      wanted: All parameters.
      config: Config of the model that has them.
      is_tied: True if the embedding is also the LM head.
    """
    found, experts = 0, config.experts
    for p in wanted:
        if len(p.shape) - p.stacked < 2 or (p.name == EMBEDDING and not is_tied):
            continue
        size = prod(p.shape)
        if experts is not None and p.name.endswith(EXPERTS):
            size = size * (experts.top_k + experts.shares_stacks) // experts.num_stacked
        found += size
    return found
