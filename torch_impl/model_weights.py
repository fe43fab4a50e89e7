"""Weights of target models, draft heads and vision encoders, grouped by layer."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from shared.drafts.config import DraftConfig
from shared.drafts.dflash2 import ConvConfig, SelectorConfig
from shared.drafts.dspark_config import MarkovConfig
from shared.models.parameters import BIAS
from torch_impl.ops.gemm.linear import Matrix
from torch_impl.ops.moe.experts import Experts


@dataclass(frozen=True)
class Attention:
    """Attention layer. Norms are None for a model without them."""

    inputs: Matrix
    out: Matrix
    q_norm: Float[Tensor, " queries"] | None
    k_norm: Float[Tensor, " keys"] | None


@dataclass(frozen=True)
class GatedDelta:
    """GDN layer."""

    inputs: Matrix
    conv: Float[Tensor, "C 4"]
    a_log: Float[Tensor, " H"]
    dt_bias: Float[Tensor, " H"]
    norm: Float[Tensor, " V"]
    out: Matrix


@dataclass(frozen=True)
class Mlp:
    """Gated MLP; `gate_up` holds the gate rows, then the up rows."""

    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True)
class Layer:
    """Decoder layer; a layer of an EAGLE head has no input norm.

    Norms are applied before the mixer and the MLP, or to their outputs; unused ones are None.
    """

    input_norm: Float[Tensor, " hidden"] | None
    mixer: Attention | GatedDelta
    post_norm: Float[Tensor, " hidden"] | None
    feed: Mlp | Experts
    mixer_end_norm: Float[Tensor, " hidden"] | None
    feed_end_norm: Float[Tensor, " hidden"] | None


@dataclass(frozen=True)
class MTPLayer:
    """MTP layer of a Qwen3.5 checkpoint, the drafter of NEXTN."""

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
    """

    embed: Float[Tensor, "vocab hidden"]
    lm_head: Matrix
    final_norm: Float[Tensor, " hidden"]
    layers: tuple[Layer, ...]
    mtp: MTPLayer | None
    draft_rows: DraftVocabHead | None


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
class MarkovWeights:
    """Weights of a DSpark head beyond those of a DFlash head. Absent weights are None.

    Attributes:
      embed: Embedding of the token before a draft token.
      lm_head: Output matrix of the Markov part, over the head's vocabulary.
      mix: Matrix that computes the gate, or the state and the input of `lm_head`.
    """

    config: MarkovConfig
    embed: Float[Tensor, "vocab rank"]
    lm_head: Matrix
    mix: Matrix | None
    confidence: Matrix | None

    @classmethod
    def of(cls, config: DraftConfig, arrays: Mapping[str, Tensor]) -> "MarkovWeights | None":
        """Builds the weights from a head's named arrays; None unless it is a DSpark head."""
        if (markov := config.part(MarkovConfig)) is None:
            return None

        def biased(name: str) -> Matrix | None:
            return Matrix(arrays[name], arrays[f"{name}{BIAS}"]) if name in arrays else None

        return cls(
            config=markov,
            embed=arrays["markov.embed"],
            lm_head=Matrix(arrays["markov.lm_head"]),
            mix=biased("markov.mix"),
            confidence=biased("confidence"),
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
            return ConvWeights(arrays[f"{name}.base"], Matrix(arrays[f"{name}.moved"]))

        names = [f"conv.{layer}" for layer in range(config.layer.num_layers)]
        return tuple(cls(conv(f"{name}.attention"), conv(f"{name}.mlp")) for name in names)


@dataclass(frozen=True)
class SelectorWeights:
    """Weights of the low-rank selector of a DFlash2 head.

    Attributes:
      before, after: Embeddings of the first and the second token of a pair.
      hidden: Matrix that computes the weights of the rank dimensions from a slot's hidden state.
    """

    config: SelectorConfig
    before: Float[Tensor, "vocab rank"]
    after: Float[Tensor, "vocab rank"]
    hidden: Matrix

    @classmethod
    def of(cls, config: DraftConfig, arrays: Mapping[str, Tensor]) -> "SelectorWeights | None":
        """Builds the weights from a head's named arrays; None unless it is a DFlash2 head."""
        if (selector := config.part(SelectorConfig)) is None:
            return None
        return cls(
            config=selector,
            before=arrays["selector.before"],
            after=arrays["selector.after"],
            hidden=Matrix(arrays["selector.hidden"]),
        )


@dataclass(frozen=True)
class BlockWeights:
    """DFlash, DSpark or DFlash2 head. Fields that are None are absent or shared with the target.

    Attributes:
      draft_ids: Target id of each token of the draft vocabulary (`d2t`).
      markov: Set for DSpark only.
      around, selector: Set for DFlash2 only.
    """

    config: DraftConfig
    fc: Matrix
    hidden_norm: Float[Tensor, " hidden"]
    layers: tuple[Layer, ...]
    final_norm: Float[Tensor, " hidden"]
    lm_head: Matrix | None
    embed: Float[Tensor, "vocab hidden"] | None
    draft_ids: Int[Tensor, " draft_vocab"] | None
    markov: MarkovWeights | None
    around: tuple[LayerConvs, ...] | None
    selector: SelectorWeights | None

    @classmethod
    def of(
        cls, config: DraftConfig, layers: tuple[Layer, ...], arrays: Mapping[str, Tensor]
    ) -> "BlockWeights":
        """Builds the weights from a head's layers and its other named arrays."""
        return cls(
            config=config,
            fc=Matrix(arrays["fc"]),
            hidden_norm=arrays["hidden_norm"],
            layers=layers,
            final_norm=arrays["final_norm"],
            lm_head=Matrix(arrays["lm_head"]) if "lm_head" in arrays else None,
            embed=arrays.get("embed"),
            draft_ids=arrays.get("draft_ids"),
            markov=MarkovWeights.of(config, arrays),
            around=LayerConvs.of(config, arrays),
            selector=SelectorWeights.of(config, arrays),
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
