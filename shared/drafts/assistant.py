"""Gemma 4 assistants: drafters of a few layers that read the keys and values of their target.

Each layer has queries only, and reads the KV of the last layer of its type in the target that has
KV of its own. An assistant therefore has no KV. Its LM head may be clustered: of each row, only the
logits of the tokens in the best clusters are computed, see `shared.spec.token_clusters`.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int, Int32, Shaped

from shared.drafts.raw_config import PLACE
from shared.models.config import ModelConfig
from shared.models.config_fields import Json, flag, object_of, positive
from shared.models.families import config_from_dict
from shared.models.layers import LayerConfig
from shared.models.mixers import AttentionConfig
from shared.models.mlp import MLPConfig
from shared.models.sharded_range import vocab_section

CENTROIDS = "masked_embedding.centroids.weight"
TOKEN_ORDERING = "masked_embedding.token_ordering"
"""Tensors of a clustered LM head: the centroid of each cluster, and the tokens, cluster by
cluster."""

TOKEN_CLUSTERS = "token_clusters"
"""Name of the array with the cluster of each token."""


@dataclass(frozen=True)
class ClusterConfig:
    """Clusters of the tokens of an LM head, all of the same size.

    Attributes:
      num_clusters: Number of clusters.
      top_k: Number of clusters that a row selects.
    """

    num_clusters: int
    top_k: int


def read_layers(config: Json, target: ModelConfig) -> tuple[ModelConfig, tuple[int, ...]]:
    """Reads the layers of an assistant.

    Args:
      config: Contents of its config.json.
      target: Config of the target.

    Returns:
      The layers as a model config, and for each of them the target layer that has its KV.

    Raises:
      ValueError: The assistant is not supported, or does not fit the target; the message names the
        field.
    """
    text, read = object_of(config, "text_config", PLACE), positive(config, "backbone_hidden_size")
    for field, got, wanted in (
        ("backbone_hidden_size", read, target.hidden),
        ("vocab_size", positive(text, "vocab_size"), target.vocab),
    ):
        if got != wanted:
            raise ValueError(
                f"the draft model's {field} ({got}) is not the target's ({wanted}); use an "
                "assistant that was trained for this model"
            )
    layers = _all_shared(text)
    factor = 2 if flag(text, "use_double_wide_mlp", False) else 1
    kv_layers = tuple(_kv_layer(each, target) for each in layers.layers)
    return replace(
        layers,
        layers=tuple(
            _reading(each, target.layers[source], factor)
            for each, source in zip(layers.layers, kv_layers, strict=True)
        ),
        tied=False,  # its LM head is loaded by itself: rows of its embedding are not read
        logits_softcap=None,  # as in transformers; a cap changes no order
    ), kv_layers


def _all_shared(text: Json) -> ModelConfig:
    """Reads the layers with KV of their own, all of which must read that of the target."""
    number = positive(text, "num_hidden_layers")
    if (shared := text.get("num_kv_shared_layers", number)) not in (0, number):
        raise ValueError(
            f"the draft model's num_kv_shared_layers must be num_hidden_layers ({number}), got "
            f"{shared}; use an assistant without KV of its own"
        )
    whole: dict[str, Any] = {"hidden_size_per_layer_input": 0, **text, "num_kv_shared_layers": 0}
    try:
        layers = config_from_dict(whole)
    except ValueError as error:
        raise ValueError(f"the draft model is not supported: {error}") from error
    if layers.per_layer_size or layers.experts is not None:
        field = "hidden_size_per_layer_input" if layers.per_layer_size else "enable_moe_block"
        raise ValueError(
            f"the draft model's {field} is not supported for an assistant; use one without it"
        )
    return layers


def _kv_layer(layer: LayerConfig, target: ModelConfig) -> int:
    """Returns the last target layer of the same type that has KV of its own.

    Layers of one type have the same KV heads, head size and RoPE. A window that exceeds the context
    is none in the target.
    """
    own, found = layer.mixer, list[int]()
    assert isinstance(own, AttentionConfig)  # the family has no other
    for index, each in enumerate(target.layers):
        mixer = each.mixer
        if isinstance(mixer, AttentionConfig) and mixer.has_kv and mixer.rotary == own.rotary:
            is_same = mixer.cache_specs == own.cache_specs
            found += [index] * (is_same and mixer.window in (own.window, None))
    if found:
        return found[-1]
    kind = "full_attention" if own.window is None else "sliding_attention"
    raise ValueError(
        f"the draft model's {kind} layers read {own.num_kv_heads} KV heads of size "
        f"{own.head_size}, and the target has no layer with such KV and their sliding_window and "
        "rope_parameters; use an assistant that was trained for this model"
    )


def _reading(layer: LayerConfig, source: LayerConfig, factor: int) -> LayerConfig:
    """Returns the layer without KV of its own, with the window of the layer that it reads."""
    assert isinstance(layer.mixer, AttentionConfig)
    assert isinstance(layer.mlp, MLPConfig)
    mixer = replace(layer.mixer, has_kv=False, window=source.mixer.window)
    mlp = replace(layer.mlp, intermediate=factor * layer.mlp.intermediate)
    return replace(layer, mixer=mixer, mlp=mlp)


def read_clusters(config: Json, vocab: int) -> ClusterConfig | None:
    """Reads the clusters of an assistant's LM head; None if it computes all logits.

    Raises:
      ValueError: The clusters cannot have the same number of tokens, or a row would select more
        clusters than there are.
    """
    if not flag(config, "use_ordered_embeddings", False):
        return None
    clusters = ClusterConfig(
        num_clusters=positive(config, "num_centroids", 2048),
        top_k=positive(config, "centroid_intermediate_top_k", 32),
    )
    if vocab % clusters.num_clusters or clusters.top_k > clusters.num_clusters:
        raise ValueError(
            f"the draft model's num_centroids ({clusters.num_clusters}) must divide vocab_size "
            f"({vocab}) and be at least centroid_intermediate_top_k ({clusters.top_k})"
        )
    return clusters


def clusters_of_tokens(
    ordering: Shaped[np.ndarray, "..."], clusters: ClusterConfig, vocab: int
) -> Int32[np.ndarray, " vocab"]:
    """Returns the cluster of each token.

    Args:
      ordering: The tokens, cluster by cluster.
      clusters: Config of the clusters.
      vocab: Number of tokens.

    Raises:
      ValueError: A token occurs twice or not at all.
    """
    if ordering.dtype.kind != "i" or not np.array_equal(np.sort(ordering), np.arange(vocab)):
        raise ValueError(
            f"tensor {TOKEN_ORDERING} must contain each of the {vocab} tokens once, as integers"
        )
    found = np.empty(vocab, np.int32)
    found[ordering] = np.arange(vocab) // (vocab // clusters.num_clusters)
    return found


def clusters_of_rank(
    clusters: Int[np.ndarray, " vocab"], rank: int, count: int
) -> Int32[np.ndarray, " share"]:
    """Returns the cluster of each token in the shard of a TP rank; padding has cluster 0."""
    if count == 1:
        return clusters
    section = vocab_section(len(clusters))
    first, end = section.run(rank, count)
    share = np.zeros(section.share(count), np.int32)
    share[: end - first] = clusters[first:end]
    return share
