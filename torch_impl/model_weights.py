"""The weights of a model by layers, as a step reads them."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from shared.drafts.config import DraftConfig
from shared.drafts.dflash2 import SelectorConfig
from shared.drafts.dspark_config import MarkovConfig
from shared.models.parameters import BIAS
from torch_impl.ops.gemm.linear import Matrix
from torch_impl.ops.moe.experts import Experts


@dataclass(frozen=True)
class Attention:
    """An attention layer; the norms are None in a model without them."""

    inputs: Matrix
    out: Matrix
    q_norm: Float[Tensor, " queries"] | None
    k_norm: Float[Tensor, " keys"] | None


@dataclass(frozen=True)
class GatedDelta:
    """A gated-delta layer."""

    inputs: Matrix
    conv: Float[Tensor, "C 4"]
    a_log: Float[Tensor, " H"]
    dt_bias: Float[Tensor, " H"]
    norm: Float[Tensor, " V"]
    out: Matrix


@dataclass(frozen=True)
class Mlp:
    """A gated MLP; `gate_up` holds the gate's rows, then those of up."""

    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True)
class Layer:
    """A decoder layer; that of an EAGLE head has no norm of its input.

    Norms stand before mixers and MLPs, or at the ends of both; the others are None.
    """

    input_norm: Float[Tensor, " hidden"] | None
    mixer: Attention | GatedDelta
    post_norm: Float[Tensor, " hidden"] | None
    feed: Mlp | Experts
    mixer_end_norm: Float[Tensor, " hidden"] | None
    feed_end_norm: Float[Tensor, " hidden"] | None


@dataclass(frozen=True)
class Mtp:
    """The MTP layer of a Qwen3.5 checkpoint."""

    fc: Matrix
    embedding_norm: Float[Tensor, " hidden"]
    hidden_norm: Float[Tensor, " hidden"]
    final_norm: Float[Tensor, " hidden"]
    layer: Layer


@dataclass(frozen=True)
class DraftRows:
    """The rows of a model's head that drafts are scored by, and the model's id of each."""

    lm_head: Matrix
    ids: Int[Tensor, " draft_vocab"]


@dataclass(frozen=True)
class Weights:
    """A model's weights. All norm weights are float32 and scale by what they are, not by 1 more.

    Attributes:
      draft_rows: None where drafts are of all tokens.
    """

    embed: Float[Tensor, "vocab hidden"]
    lm_head: Matrix
    final_norm: Float[Tensor, " hidden"]
    layers: tuple[Layer, ...]
    mtp: Mtp | None
    draft_rows: DraftRows | None


@dataclass(frozen=True)
class HeadWeights:
    """An EAGLE or EAGLE-3 head; what is None the head does without, or shares with its target.

    Attributes:
      layers: Of an EAGLE-3 head the first has the norm of the embedding as its input norm.
      draft_ids: The target's id of each token of the draft vocabulary.
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
    """What a DSpark head has beside a DFlash one; what is None it does without.

    Attributes:
      embed: Of the token before a draft.
      lm_head: What scores it, of the tokens that the head scores.
      mix: What makes a gate, or a state and what is scored.
    """

    config: MarkovConfig
    embed: Float[Tensor, "vocab rank"]
    lm_head: Matrix
    mix: Matrix | None
    confidence: Matrix | None

    @classmethod
    def of(cls, config: DraftConfig, arrays: Mapping[str, Tensor]) -> "MarkovWeights | None":
        """Of a head's arrays by name; None of a head that is no DSpark head."""
        if config.block is None or config.block.markov is None:
            return None

        def biased(name: str) -> Matrix | None:
            return Matrix(arrays[name], arrays[f"{name}{BIAS}"]) if name in arrays else None

        return cls(
            config=config.block.markov,
            embed=arrays["markov.embed"],
            lm_head=Matrix(arrays["markov.lm_head"]),
            mix=biased("markov.mix"),
            confidence=biased("confidence"),
        )


@dataclass(frozen=True)
class Conv:
    """The convolutions before and behind a part of a DFlash2 layer.

    Attributes:
      base: Their coefficients.
      moved: What makes what each row moves them by, of both.
    """

    base: Float[Tensor, "2 taps hidden"]
    moved: Matrix


@dataclass(frozen=True)
class Around:
    """The convolutions around the parts of a DFlash2 layer."""

    attention: Conv
    mlp: Conv

    @classmethod
    def of(cls, config: DraftConfig, arrays: Mapping[str, Tensor]) -> "tuple[Around, ...] | None":
        """Of each layer, from a head's arrays by name; None of a head that is no DFlash2 head."""
        if config.block is None or config.block.conv is None:
            return None

        def conv(name: str) -> Conv:
            return Conv(arrays[f"{name}.base"], Matrix(arrays[f"{name}.moved"]))

        names = [f"conv.{layer}" for layer in range(config.layer.num_layers)]
        return tuple(cls(conv(f"{name}.attention"), conv(f"{name}.mlp")) for name in names)


@dataclass(frozen=True)
class SelectorWeights:
    """What a DFlash2 head selects drafts by.

    Attributes:
      before, after: Of the first and the second token of a pair.
      hidden: What makes what weighs their numbers, of a slot's hidden state.
    """

    config: SelectorConfig
    before: Float[Tensor, "vocab rank"]
    after: Float[Tensor, "vocab rank"]
    hidden: Matrix

    @classmethod
    def of(cls, config: DraftConfig, arrays: Mapping[str, Tensor]) -> "SelectorWeights | None":
        """Of a head's arrays by name; None of a head that is no DFlash2 head."""
        if config.block is None or config.block.selector is None:
            return None
        return cls(
            config=config.block.selector,
            before=arrays["selector.before"],
            after=arrays["selector.after"],
            hidden=Matrix(arrays["selector.hidden"]),
        )


@dataclass(frozen=True)
class BlockWeights:
    """A DFlash, DSpark or DFlash2 head; what is None it shares with its target.

    Attributes:
      draft_ids: The target's id of each token of the draft vocabulary.
      markov: Of a DSpark head; None of the others.
      around, selector: Of a DFlash2 head; None of the others.
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
    around: tuple[Around, ...] | None
    selector: SelectorWeights | None

    @classmethod
    def of(
        cls, config: DraftConfig, layers: tuple[Layer, ...], arrays: Mapping[str, Tensor]
    ) -> "BlockWeights":
        """Of a head's layers and its other arrays by name."""
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
            around=Around.of(config, arrays),
            selector=SelectorWeights.of(config, arrays),
        )


@dataclass(frozen=True)
class LayerNorm:
    """What a layer norm scales by, and what it adds; float32."""

    weight: Float[Tensor, " size"]
    bias: Float[Tensor, " size"]


@dataclass(frozen=True)
class TowerBlock:
    """A block of a vision tower."""

    attention_norm: LayerNorm
    inputs: Matrix
    out: Matrix
    mlp_norm: LayerNorm
    up: Matrix
    down: Matrix


@dataclass(frozen=True)
class TowerWeights:
    """A vision tower.

    Attributes:
      patches: What a patch's numbers are multiplied with.
      places: The learned table of places, row by row.
    """

    patches: Matrix
    places: Float[Tensor, "places hidden"]
    blocks: tuple[TowerBlock, ...]
    merger_norm: LayerNorm
    merger_up: Matrix
    merger_down: Matrix
