"""Weights of target models, draft heads and vision encoders, grouped by layer."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
from jaxtyping import Float, Int

from jax_impl.ops import Norm
from jax_impl.ops.attention.latent_attention import LatentWeights
from jax_impl.ops.gemm.linear import Matrix
from jax_impl.ops.gemm.per_layer import PerLayerInput, PerLayerTable
from jax_impl.ops.moe.experts import Experts
from jax_impl.ops.sampling.token_clusters import TokenClusters
from shared.drafts.assistant import TOKEN_CLUSTERS
from shared.drafts.checkpoint import part_names
from shared.drafts.config import DraftConfig
from shared.drafts.dflash2 import ConvConfig


class Attention(NamedTuple):
    """Attention layer. Norms (single or stacked) and sinks are None for a model without them.

    A layer that reads the KV of another layer has no K norm; `inputs` then has only query rows.
    """

    inputs: Matrix
    out: Matrix
    q_norm: Float[jax.Array, "*L queries"] | None
    k_norm: Float[jax.Array, "*L keys"] | None
    sinks: Norm | None


class LatentAttention(NamedTuple):
    """Latent attention layer; `heads` has the weights between its projections."""

    inputs: Matrix
    out: Matrix
    heads: LatentWeights


class Recurrent(NamedTuple):
    """Recurrent layer: GDN, or Mamba2, which alone has `skip`.

    With stacked matrices the small parameters are those of all layers.
    """

    inputs: Matrix
    out: Matrix
    conv: Float[jax.Array, "*L C 4"]
    conv_bias: Float[jax.Array, "*L C"] | None
    a_log: Float[jax.Array, "*L H"]
    dt_bias: Float[jax.Array, "*L H"]
    skip: Float[jax.Array, "*L H"] | None
    norm: Float[jax.Array, "*L V_or_values"] | None


class Mlp(NamedTuple):
    """Gated MLP; `gate_up` holds the gate rows, then the up rows."""

    gate_up: Matrix
    down: Matrix


class Layer(NamedTuple):
    """Decoder layer; a layer of an EAGLE head has no input norm.

    `parallel` is the mixer next to `mixer`, if the layer has one.
    Norms are applied before the mixer and the MLP, or to their outputs; unused ones are None.
    `scalar` multiplies the output of the layer.
    """

    input_norm: Norm | None
    mixer: Attention | LatentAttention | Recurrent
    parallel: Recurrent | None
    post_norm: Norm | None
    feed: Mlp | Experts
    mixer_end_norm: Norm | None
    feed_end_norm: Norm | None
    per_layer: PerLayerInput | None
    scalar: Norm | None


class MTPLayer(NamedTuple):
    """MTP layer of a checkpoint, the drafter of NEXTN."""

    fc: Matrix
    embedding_norm: Float[jax.Array, " hidden"]
    hidden_norm: Float[jax.Array, " hidden"]
    final_norm: Float[jax.Array, " hidden"]
    layer: Layer


class DraftVocabHead(NamedTuple):
    """LM-head rows of the reduced draft vocabulary, and the target's id of each."""

    lm_head: Matrix
    ids: Int[jax.Array, " draft_vocab"]


class Weights(NamedTuple):
    """Model weights.

    Attributes:
      draft_rows: None if the draft vocabulary is the whole vocabulary.
      per_layer: None for a model without per-layer embeddings.
    """

    embed: Float[jax.Array, "vocab hidden"]
    lm_head: Matrix
    final_norm: Float[jax.Array, " hidden"]
    layers: tuple[Layer, ...]
    mtp: MTPLayer | None
    draft_rows: DraftVocabHead | None
    per_layer: PerLayerTable | None


class HeadWeights(NamedTuple):
    """EAGLE or EAGLE-3 head. Fields that are None are absent or shared with the target.

    Attributes:
      layers: The input norm of the first layer of an EAGLE-3 head is its embedding norm.
      draft_ids: Target id of each token of the draft vocabulary (`d2t`).
    """

    config: DraftConfig
    fc: Matrix
    fc_bias: Float[jax.Array, " hidden"] | None
    aux_norm: Float[jax.Array, "streams target_hidden"] | None
    input_norm: Float[jax.Array, " inputs"] | None
    hidden_norm: Float[jax.Array, " hidden"] | None
    layers: tuple[Layer, ...]
    final_norm: Float[jax.Array, " hidden"] | None
    lm_head: Matrix | None
    embed: Float[jax.Array, "vocab hidden"] | None
    draft_ids: Int[jax.Array, " draft_vocab"] | None


class AssistantWeights(NamedTuple):
    """Assistant, which reads the KV of its target; its embedding is the target's.

    Attributes:
      fc: Matrix of a token's embedding and a hidden state, concatenated.
      post: Matrix from the output of the final norm to the hidden state of the next draft level.
      clusters: Clusters of the tokens of `lm_head`; None if all logits are computed.
    """

    config: DraftConfig
    fc: Matrix
    layers: tuple[Layer, ...]
    final_norm: Float[jax.Array, " hidden"]
    post: Matrix
    lm_head: Matrix
    clusters: TokenClusters | None

    @classmethod
    def of(
        cls, config: DraftConfig, layers: tuple[Layer, ...], arrays: Mapping[str, jax.Array]
    ) -> "AssistantWeights":
        """Builds the weights from a head's layers and its other named arrays."""
        clusters = None
        if config.clusters is not None:
            centroids = Matrix.plain(arrays["centroids"])
            clusters = TokenClusters(centroids, arrays[TOKEN_CLUSTERS], config.clusters.top_k)
        return cls(
            config=config,
            fc=Matrix.plain(arrays["fc"]),
            layers=layers,
            final_norm=arrays["final_norm"],
            post=Matrix.plain(arrays["post"]),
            lm_head=Matrix.plain(arrays["lm_head"]),
            clusters=clusters,
        )


class ConvWeights(NamedTuple):
    """Convolutions before and after the attention or the MLP of a DFlash2 layer.

    Attributes:
      base: Coefficients of both convolutions.
      moved: Matrix that computes each row's coefficient offsets for both convolutions.
    """

    base: Float[jax.Array, "2 taps hidden"]
    moved: Matrix


class LayerConvs(NamedTuple):
    """Convolutions around the attention and the MLP of a DFlash2 layer."""

    attention: ConvWeights
    mlp: ConvWeights

    @classmethod
    def of(
        cls, config: DraftConfig, arrays: Mapping[str, jax.Array]
    ) -> "tuple[LayerConvs, ...] | None":
        """Builds the weights of each layer from named arrays; None unless it is a DFlash2 head."""
        if config.part(ConvConfig) is None:
            return None

        def conv(name: str) -> ConvWeights:
            return ConvWeights(arrays[f"{name}.base"], Matrix.plain(arrays[f"{name}.moved"]))

        names = [f"conv.{layer}" for layer in range(config.layer.num_layers)]
        return tuple(cls(conv(f"{name}.attention"), conv(f"{name}.mlp")) for name in names)


class BlockWeights(NamedTuple):
    """Block head. Fields that are None are absent or shared with the target.

    Attributes:
      draft_ids: Target id of each token of the draft vocabulary (`d2t`).
      around: Convolutions of the layers; None unless it is a DFlash2 head.
      own: Named arrays of the parts that the kind has in addition to a DFlash head.
    """

    config: DraftConfig
    fc: Matrix
    hidden_norm: Float[jax.Array, " hidden"]
    layers: tuple[Layer, ...]
    final_norm: Float[jax.Array, " hidden"]
    lm_head: Matrix | None
    embed: Float[jax.Array, "vocab hidden"] | None
    draft_ids: Int[jax.Array, " draft_vocab"] | None
    around: tuple[LayerConvs, ...] | None
    own: Mapping[str, jax.Array]

    @classmethod
    def of(
        cls, config: DraftConfig, layers: tuple[Layer, ...], arrays: Mapping[str, jax.Array]
    ) -> "BlockWeights":
        """Builds the weights from a head's layers and its other named arrays."""
        return cls(
            config=config,
            fc=Matrix.plain(arrays["fc"]),
            hidden_norm=arrays["hidden_norm"],
            layers=layers,
            final_norm=arrays["final_norm"],
            lm_head=Matrix.plain(arrays["lm_head"]) if "lm_head" in arrays else None,
            embed=arrays.get("embed"),
            draft_ids=arrays.get("draft_ids"),
            around=LayerConvs.of(config, arrays),
            own={name: arrays[name] for name in part_names(config)},
        )


class LayerNorm(NamedTuple):
    """Scale and bias of a layer norm, float32."""

    weight: Float[jax.Array, "*blocks size"]
    bias: Float[jax.Array, "*blocks size"]


class EncoderBlock(NamedTuple):
    """Block of a vision encoder, or all blocks stacked."""

    attention_norm: LayerNorm
    inputs: Matrix
    out: Matrix
    mlp_norm: LayerNorm
    up: Matrix
    down: Matrix


class VisionEncoderWeights(NamedTuple):
    """Vision encoder weights.

    Attributes:
      patches: Patch embedding matrix.
      places: Learned position embeddings, row by row of the grid.
      blocks: All blocks, stacked.
    """

    patches: Matrix
    places: Float[jax.Array, "places hidden"]
    blocks: EncoderBlock
    merger_norm: LayerNorm
    merger_up: Matrix
    merger_down: Matrix
