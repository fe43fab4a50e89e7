"""Tensor-parallel sharding of a model: every product is column-parallel, followed by an all-gather.

Products are split by outputs only. Sums over inputs are never split, so ranks exchange final values
and the bits do not depend on the number of ranks. A rank has whole heads, a shard of the inner
columns of MLPs and experts, a shard of the columns of the residual stream, and a shard of the
vocabulary. Embeddings, norms and routers are replicated.
"""

from collections.abc import Iterator
from dataclasses import replace

from shared.models.config import ModelConfig


def shard_config(config: ModelConfig, count: int) -> ModelConfig:
    """Returns the config of one of `count` TP ranks.

    Heads and inner columns are those of a rank. The hidden size and the vocabulary stay whole,
    because every rank reads whole rows of the residual stream and samples from all tokens.

    Raises:
      ValueError: A size is not divisible by `count`; the message names it.
    """
    if count == 1:
        return config
    for name, size in _divided(config):
        if size % count:
            raise ValueError(
                f"{name} ({size}) of a {config.name} model must be a multiple of the number of "
                f"ranks ({count})"
            )
    return replace(config, layers=tuple(each.local(count) for each in config.layers))


def _divided(config: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yields the sizes that must be multiples of the number of ranks, with their config.json
    fields.
    """
    yield "hidden_size", config.hidden
    mixers = sorted(config.groups, key=lambda group: group.name)  # query heads first
    for group in (*mixers, *config.mlp_groups):
        yield from group.config.divided
