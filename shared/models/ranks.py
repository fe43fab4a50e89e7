"""What ranks divide among them, so that each runs the whole model with a share of every product.

Every product is cut by its outputs: sums over inputs stay whole, and what ranks give each other
are finished values. A rank has whole heads, a share of the inner columns of MLPs and experts, a
share of the columns of the stream, and a share of the vocabulary. Embeddings, norms and routers are
whole on every rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shared.models.config import ModelConfig
from shared.models.layers import (
    AttentionConfig,
    DenseConfig,
    ExpertsConfig,
    GatedDeltaConfig,
    LayerConfig,
)

VOCAB_GROUP = 64
"""Neighbours in the vocabulary that stay on one rank: those that a kernel of sampling weighs as
one."""


@dataclass(frozen=True)
class Section:
    """A run of a parameter's outputs that ranks divide among them.

    Attributes:
      size: Outputs.
      unit: Outputs that stay together, such as those of a head.
      repeats: Units that are fewer than ranks are on several of them; else the last ranks have
        less than the others, or nothing.
    """

    size: int
    unit: int = 1
    repeats: bool = False

    def share(self, count: int) -> int:
        """Outputs of each of `count` ranks, what the last ones lack counted in."""
        return self.unit * -(-self._units // count)

    def run(self, rank: int, count: int) -> tuple[int, int]:
        """The first output of a rank, and the one behind its last."""
        if self.repeats and self._units < count:
            first = self.unit * (rank * self._units // count)
        else:
            first = rank * self.share(count)
        return min(first, self.size), min(first + self.share(count), self.size)

    @property
    def _units(self) -> int:
        return -(-self.size // self.unit)


def vocab_section(vocab: int) -> Section:
    """How ranks divide a vocabulary: in whole groups."""
    return Section(vocab, VOCAB_GROUP)


def local(config: ModelConfig, count: int) -> ModelConfig:
    """What one of `count` ranks has of a model.

    Heads and inner columns are a rank's; the hidden size and the vocabulary are the whole model's,
    as every rank sees whole rows of the stream and chooses among all tokens.

    Raises:
      ValueError: Something does not divide; one sentence that names it.
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
    """What must be a multiple of the number of ranks, by its name in a config.json."""
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
    mixer, feed = layer.mixer, layer.feed
    if isinstance(mixer, AttentionConfig):
        mixer = _local_attention(mixer, count)
    else:
        mixer = _local_delta(mixer, count)
    if isinstance(feed, DenseConfig):
        feed = replace(feed, intermediate=feed.intermediate // count)
    else:
        feed = _local_experts(feed, count)
    return LayerConfig(mixer=mixer, feed=feed)


def _local_attention(mixer: AttentionConfig, count: int) -> AttentionConfig:
    """KV heads fewer than ranks stand on several of them, each with some of its queries."""
    kv_heads = mixer.num_kv_heads
    if max(kv_heads, count) % min(kv_heads, count):
        raise ValueError(
            f"num_key_value_heads ({kv_heads}) must be a multiple of the number of ranks "
            f"({count}), or the number of ranks one of it"
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


def _local_experts(feed: ExpertsConfig, count: int) -> ExpertsConfig:
    return replace(
        feed,
        intermediate=feed.intermediate // count,
        shared_intermediate=feed.shared_intermediate // count,
    )
