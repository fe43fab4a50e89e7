"""Tensor-parallel sharding of a model: every product is column-parallel, followed by an all-gather.

Products are split by outputs only. Sums over inputs are never split, so ranks exchange final values
and the bits do not depend on the number of ranks. A rank has whole heads, a shard of the inner
columns of MLPs and experts, a shard of the columns of the residual stream, and a shard of the
vocabulary. Embeddings, norms and routers are replicated.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shared.models.config import ModelConfig
from shared.models.layers import (
    AttentionConfig,
    GatedDeltaConfig,
    LayerConfig,
    MLPConfig,
    MoEConfig,
)

VOCAB_GROUP = 64
"""Neighbouring tokens that stay on one rank: sampling kernels sum their weights as one group."""


@dataclass(frozen=True)
class ShardedRange:
    """A range of a parameter's outputs that is sharded over TP ranks.

    Attributes:
      size: Outputs.
      unit: Outputs that stay together, such as those of a head.
      repeats: True if units are replicated when there are fewer than ranks; otherwise the last
        ranks have fewer outputs, or none.
    """

    size: int
    unit: int = 1
    repeats: bool = False

    def share(self, count: int) -> int:
        """Returns the outputs of each of `count` ranks, including padding of the last ones."""
        return self.unit * -(-self._units // count)

    def run(self, rank: int, count: int) -> tuple[int, int]:
        """Returns the range (first, end) of a rank's outputs."""
        if self.repeats and self._units < count:
            first = self.unit * (rank * self._units // count)
        else:
            first = rank * self.share(count)
        return min(first, self.size), min(first + self.share(count), self.size)

    @property
    def _units(self) -> int:
        return -(-self.size // self.unit)


def vocab_section(vocab: int) -> ShardedRange:
    """Returns the TP section of a vocabulary, split in whole groups."""
    return ShardedRange(vocab, VOCAB_GROUP)


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
    return replace(config, layers=tuple(_local_layer(each, count) for each in config.layers))


def _divided(config: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yields the sizes that must be multiples of the number of ranks, with their config.json
    fields.
    """
    yield "hidden_size", config.hidden
    yield "num_attention_heads", config.attention.num_heads
    if config.dense is not None:
        yield "intermediate_size", config.dense.intermediate
    if (sizes := config.experts) is not None:
        yield "moe_intermediate_size", sizes.intermediate
        yield "shared_expert_intermediate_size", sizes.shared_intermediate
    if (delta := config.gated_delta) is not None:
        yield "linear_num_key_heads", delta.num_key_heads


def _local_layer(layer: LayerConfig, count: int) -> LayerConfig:
    mixer, feed = layer.mixer, layer.mlp
    if isinstance(mixer, AttentionConfig):
        mixer = _local_attention(mixer, count)
    else:
        mixer = _local_delta(mixer, count)
    if isinstance(feed, MLPConfig):
        feed = replace(feed, intermediate=feed.intermediate // count)
    else:
        feed = _local_experts(feed, count)
    return LayerConfig(mixer=mixer, mlp=feed)


def _local_attention(mixer: AttentionConfig, count: int) -> AttentionConfig:
    """Shards the heads; KV heads fewer than ranks are replicated, each copy with some of its
    queries.
    """
    kv_heads = mixer.num_kv_heads
    if max(kv_heads, count) % min(kv_heads, count):
        raise ValueError(
            f"num_key_value_heads ({kv_heads}) must be a multiple or a divisor of the number of "
            f"ranks ({count})"
        )
    return replace(
        mixer,
        num_heads=mixer.num_heads // count,
        num_kv_heads=max(1, kv_heads // count),
    )


def _local_delta(mixer: GatedDeltaConfig, count: int) -> GatedDeltaConfig:
    return replace(
        mixer,
        num_key_heads=mixer.num_key_heads // count,
        num_value_heads=mixer.num_value_heads // count,
    )


def _local_experts(feed: MoEConfig, count: int) -> MoEConfig:
    return replace(
        feed,
        intermediate=feed.intermediate // count,
        shared_intermediate=feed.shared_intermediate // count,
    )
