"""Weights of target models, draft heads and vision encoders, grouped by layer."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from shared.drafts.assistant import TOKEN_CLUSTERS
from shared.drafts.checkpoint import part_names
from shared.drafts.config import DraftConfig
from shared.drafts.dflash2 import ConvConfig
from torch_impl.ops.attention.latent_attention import LatentWeights
from torch_impl.ops.gemm.linear import Matrix
from torch_impl.ops.gemm.per_layer import PerLayerInput, PerLayerTable
from torch_impl.ops.moe.experts import Experts
from torch_impl.ops.sampling.token_clusters import TokenClusters


@dataclass(frozen=True)
class Attention:
    """Attention layer. Norms and sinks are None for a model without them.

    A layer that reads the KV of another layer has no K norm; `inputs` then has only query rows.
    """

    inputs: Matrix
    out: Matrix
    q_norm: Float[Tensor, " queries"] | None
    k_norm: Float[Tensor, " keys"] | None
    sinks: Float[Tensor, " heads"] | None


@dataclass(frozen=True)
class LatentAttention:
    """Latent attention layer; `heads` has the weights between its projections."""

    inputs: Matrix
    out: Matrix
    heads: LatentWeights


@dataclass(frozen=True)
class Recurrent:
    """Recurrent layer: GDN, or Mamba2, which alone has `skip`."""

    inputs: Matrix
    out: Matrix
    conv: Float[Tensor, "C 4"]
    conv_bias: Float[Tensor, " C"] | None
    a_log: Float[Tensor, " H"]
    dt_bias: Float[Tensor, " H"]
    skip: Float[Tensor, " H"] | None
    norm: Float[Tensor, " V_or_values"] | None


@dataclass(frozen=True)
class Mlp:
    """Gated MLP; `gate_up` holds the gate rows, then the up rows."""

    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True)
class Layer:
    """Decoder layer; a layer of an EAGLE head has no input norm.

    `parallel` is the mixer next to `mixer`, if the layer has one.
    Norms are applied before the mixer and the MLP, or to their outputs; unused ones are None.
    `scalar` multiplies the output of the layer.
    """

    input_norm: Float[Tensor, " hidden"] | None
    mixer: Attention | LatentAttention | Recurrent
    parallel: Recurrent | None
    post_norm: Float[Tensor, " hidden"] | None
    feed: Mlp | Experts
    mixer_end_norm: Float[Tensor, " hidden"] | None
    feed_end_norm: Float[Tensor, " hidden"] | None
    per_layer: PerLayerInput | None
    scalar: Float[Tensor, " 1"] | None


@dataclass(frozen=True)
class MTPLayer:
    """MTP layer of a checkpoint, the drafter of NEXTN."""

    fc: Matrix
    embedding_norm: Float[Tensor, " hidden"]
    hidden_norm: Float[Tensor, " hidden"]
    final_norm: Float[Tensor, " hidden"]
    layer: Layer


@dataclass(frozen=True)
class DraftVocabHead:
    """LM-head rows of the reduced draft vocabulary, and the target's id of each."""

    lm_head: Matrix
    ids: Int[Tensor, " draft_vocab"]


@dataclass(frozen=True)
class Weights:
    """Model weights. Norm weights are float32; the norm scales by the weight, not by 1 + weight.

    Attributes:
      draft_rows: None if the draft vocabulary is the whole vocabulary.
      per_layer: None for a model without per-layer embeddings.
    """

    embed: Float[Tensor, "vocab hidden"]
    lm_head: Matrix
    final_norm: Float[Tensor, " hidden"]
    layers: tuple[Layer, ...]
    mtp: MTPLayer | None
    draft_rows: DraftVocabHead | None
    per_layer: PerLayerTable | None


@dataclass(frozen=True)
class HeadWeights:
    """EAGLE or EAGLE-3 head. Fields that are None are absent or shared with the target.

    Attributes:
      layers: The input norm of the first layer of an EAGLE-3 head is its embedding norm.
      draft_ids: Target id of each token of the draft vocabulary (`d2t`).
    """

    config: DraftConfig
    fc: Matrix
    fc_bias: Float[Tensor, " hidden"] | None
    aux_norm: Float[Tensor, "streams target_hidden"] | None
    input_norm: Float[Tensor, " inputs"] | None
    hidden_norm: Float[Tensor, " hidden"] | None
    layers: tuple[Layer, ...]
    final_norm: Float[Tensor, " hidden"] | None
    lm_head: Matrix | None
    embed: Float[Tensor, "vocab hidden"] | None
    draft_ids: Int[Tensor, " draft_vocab"] | None


@dataclass(frozen=True)
class AssistantWeights:
    """Assistant, which reads the KV of its target; its embedding is the target's.

    Attributes:
      fc: Matrix of a token's embedding and a hidden state, concatenated.
      post: Matrix from the output of the final norm to the hidden state of the next draft level.
      clusters: Clusters of the tokens of `lm_head`; None if all logits are computed.
    """

    config: DraftConfig
    fc: Matrix
    layers: tuple[Layer, ...]
    final_norm: Float[Tensor, " hidden"]
    post: Matrix
    lm_head: Matrix
    clusters: TokenClusters | None

    @classmethod
    def of(
        cls, config: DraftConfig, layers: tuple[Layer, ...], arrays: Mapping[str, Tensor]
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


@dataclass(frozen=True)
class ConvWeights:
    """Convolutions before and after the attention or the MLP of a DFlash2 layer.

    Attributes:
      base: Coefficients of both convolutions.
      moved: Matrix that computes each row's coefficient offsets for both convolutions.
    """

    base: Float[Tensor, "2 taps hidden"]
    moved: Matrix


@dataclass(frozen=True)
class LayerConvs:
    """Convolutions around the attention and the MLP of a DFlash2 layer."""

    attention: ConvWeights
    mlp: ConvWeights

    @classmethod
    def of(
        cls, config: DraftConfig, arrays: Mapping[str, Tensor]
    ) -> "tuple[LayerConvs, ...] | None":
        """Builds the weights of each layer from named arrays; None unless it is a DFlash2 head."""
        if config.part(ConvConfig) is None:
            return None

        def conv(name: str) -> ConvWeights:
            return ConvWeights(arrays[f"{name}.base"], Matrix.plain(arrays[f"{name}.moved"]))

        names = [f"conv.{layer}" for layer in range(config.layer.num_layers)]
        return tuple(cls(conv(f"{name}.attention"), conv(f"{name}.mlp")) for name in names)


@dataclass(frozen=True)
class BlockWeights:
    """Block head. Fields that are None are absent or shared with the target.

    Attributes:
      draft_ids: Target id of each token of the draft vocabulary (`d2t`).
      around: Convolutions of the layers; None unless it is a DFlash2 head.
      own: Named arrays of the parts that the kind has in addition to a DFlash head.
    """

    config: DraftConfig
    fc: Matrix
    hidden_norm: Float[Tensor, " hidden"]
    layers: tuple[Layer, ...]
    final_norm: Float[Tensor, " hidden"]
    lm_head: Matrix | None
    embed: Float[Tensor, "vocab hidden"] | None
    draft_ids: Int[Tensor, " draft_vocab"] | None
    around: tuple[LayerConvs, ...] | None
    own: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, config: DraftConfig, layers: tuple[Layer, ...], arrays: Mapping[str, Tensor]
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


@dataclass(frozen=True)
class LayerNorm:
    """Scale and bias of a layer norm, float32."""

    weight: Float[Tensor, " size"]
    bias: Float[Tensor, " size"]


@dataclass(frozen=True)
class EncoderBlock:
    """Block of a vision encoder."""

    attention_norm: LayerNorm
    inputs: Matrix
    out: Matrix
    mlp_norm: LayerNorm
    up: Matrix
    down: Matrix


@dataclass(frozen=True)
class VisionEncoderWeights:
    """Vision encoder weights.

    Attributes:
      patches: Patch embedding matrix.
      places: Learned position embeddings, row by row of the grid.
    """

    patches: Matrix
    places: Float[Tensor, "places hidden"]
    blocks: tuple[EncoderBlock, ...]
    merger_norm: LayerNorm
    merger_up: Matrix
    merger_down: Matrix
