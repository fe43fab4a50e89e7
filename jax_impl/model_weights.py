"""The weights of a model by layers, as a step reads them."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
from jaxtyping import Float, Int

from jax_impl.ops import Norm
from jax_impl.ops.gemm.linear import Matrix
from jax_impl.ops.moe.experts import Experts
from shared.drafts.config import DraftConfig
from shared.drafts.dflash2 import SelectorConfig
from shared.drafts.dspark_config import MarkovConfig
from shared.models.parameters import BIAS


class Attention(NamedTuple):
    """An attention layer; the norms, alone or in their stack, are None in a model without them."""

    inputs: Matrix
    out: Matrix
    q_norm: Float[jax.Array, "*L queries"] | None
    k_norm: Float[jax.Array, "*L keys"] | None


class GatedDelta(NamedTuple):
    """A gated-delta layer; its small parameters are those of all where matrices are in stacks."""

    inputs: Matrix
    conv: Float[jax.Array, "*L C 4"]
    a_log: Float[jax.Array, "*L H"]
    dt_bias: Float[jax.Array, "*L H"]
    norm: Float[jax.Array, "*L V"]
    out: Matrix


class Mlp(NamedTuple):
    """A gated MLP; `gate_up` holds the gate's rows, then those of up."""

    gate_up: Matrix
    down: Matrix


class Layer(NamedTuple):
    """A decoder layer; that of an EAGLE head has no norm of its input.

    Norms stand before mixers and MLPs, or at the ends of both; the others are None.
    """

    input_norm: Norm | None
    mixer: Attention | GatedDelta
    post_norm: Norm | None
    feed: Mlp | Experts
    mixer_end_norm: Norm | None
    feed_end_norm: Norm | None


class Mtp(NamedTuple):
    """The MTP layer of a Qwen3.5 checkpoint, which drafts for NEXTN."""

    fc: Matrix
    embedding_norm: Float[jax.Array, " hidden"]
    hidden_norm: Float[jax.Array, " hidden"]
    final_norm: Float[jax.Array, " hidden"]
    layer: Layer


class DraftRows(NamedTuple):
    """The rows of a model's head that drafts are scored by, and the model's id of each."""

    lm_head: Matrix
    ids: Int[jax.Array, " draft_vocab"]


class Weights(NamedTuple):
    """A model's weights.

    Attributes:
      draft_rows: None where drafts are of all tokens.
    """

    embed: Float[jax.Array, "vocab hidden"]
    lm_head: Matrix
    final_norm: Float[jax.Array, " hidden"]
    layers: tuple[Layer, ...]
    mtp: Mtp | None
    draft_rows: DraftRows | None


class HeadWeights(NamedTuple):
    """An EAGLE or EAGLE-3 head; what is None the head does without, or shares with its target.

    Attributes:
      layers: Of an EAGLE-3 head the first has the norm of the embedding as its input norm.
      draft_ids: The target's id of each token of the draft vocabulary.
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


class MarkovWeights(NamedTuple):
    """What a DSpark head has beside a DFlash one; what is None it does without.

    Attributes:
      embed: Of the token before a draft.
      lm_head: What scores it, of the tokens that the head scores.
      mix: What makes a gate, or a state and what is scored.
    """

    config: MarkovConfig
    embed: Float[jax.Array, "vocab rank"]
    lm_head: Matrix
    mix: Matrix | None
    confidence: Matrix | None

    @classmethod
    def of(cls, config: DraftConfig, arrays: Mapping[str, jax.Array]) -> "MarkovWeights | None":
        """Of a head's arrays by name; None of a head that is no DSpark head."""
        if config.block is None or config.block.markov is None:
            return None

        def biased(name: str) -> Matrix | None:
            return Matrix(arrays[name], None, arrays[f"{name}{BIAS}"]) if name in arrays else None

        return cls(
            config=config.block.markov,
            embed=arrays["markov.embed"],
            lm_head=Matrix(arrays["markov.lm_head"]),
            mix=biased("markov.mix"),
            confidence=biased("confidence"),
        )


class Conv(NamedTuple):
    """The convolutions before and behind a part of a DFlash2 layer.

    Attributes:
      base: Their coefficients.
      moved: What makes what each row moves them by, of both.
    """

    base: Float[jax.Array, "2 taps hidden"]
    moved: Matrix


class Around(NamedTuple):
    """The convolutions around the parts of a DFlash2 layer."""

    attention: Conv
    mlp: Conv

    @classmethod
    def of(
        cls, config: DraftConfig, arrays: Mapping[str, jax.Array]
    ) -> "tuple[Around, ...] | None":
        """Of each layer, from a head's arrays by name; None of a head that is no DFlash2 head."""
        if config.block is None or config.block.conv is None:
            return None

        def conv(name: str) -> Conv:
            return Conv(arrays[f"{name}.base"], Matrix(arrays[f"{name}.moved"]))

        names = [f"conv.{layer}" for layer in range(config.layer.num_layers)]
        return tuple(cls(conv(f"{name}.attention"), conv(f"{name}.mlp")) for name in names)


class SelectorWeights(NamedTuple):
    """What a DFlash2 head selects drafts by.

    Attributes:
      before, after: Of the first and the second token of a pair.
      hidden: What makes what weighs their numbers, of a slot's hidden state.
    """

    config: SelectorConfig
    before: Float[jax.Array, "vocab rank"]
    after: Float[jax.Array, "vocab rank"]
    hidden: Matrix

    @classmethod
    def of(cls, config: DraftConfig, arrays: Mapping[str, jax.Array]) -> "SelectorWeights | None":
        """Of a head's arrays by name; None of a head that is no DFlash2 head."""
        if config.block is None or config.block.selector is None:
            return None
        return cls(
            config=config.block.selector,
            before=arrays["selector.before"],
            after=arrays["selector.after"],
            hidden=Matrix(arrays["selector.hidden"]),
        )


class BlockWeights(NamedTuple):
    """A DFlash, DSpark or DFlash2 head; what is None it shares with its target.

    Attributes:
      draft_ids: The target's id of each token of the draft vocabulary.
      markov: Of a DSpark head; None of the others.
      around, selector: Of a DFlash2 head; None of the others.
    """

    config: DraftConfig
    fc: Matrix
    hidden_norm: Float[jax.Array, " hidden"]
    layers: tuple[Layer, ...]
    final_norm: Float[jax.Array, " hidden"]
    lm_head: Matrix | None
    embed: Float[jax.Array, "vocab hidden"] | None
    draft_ids: Int[jax.Array, " draft_vocab"] | None
    markov: MarkovWeights | None
    around: tuple[Around, ...] | None
    selector: SelectorWeights | None

    @classmethod
    def of(
        cls, config: DraftConfig, layers: tuple[Layer, ...], arrays: Mapping[str, jax.Array]
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


class LayerNorm(NamedTuple):
    """What a layer norm scales by, and what it adds; float32."""

    weight: Float[jax.Array, "*blocks size"]
    bias: Float[jax.Array, "*blocks size"]


class TowerBlock(NamedTuple):
    """A block of a vision tower, or all of them in stacks."""

    attention_norm: LayerNorm
    inputs: Matrix
    out: Matrix
    mlp_norm: LayerNorm
    up: Matrix
    down: Matrix


class TowerWeights(NamedTuple):
    """A vision tower.

    Attributes:
      patches: What a patch's numbers are multiplied with.
      places: The learned table of places, row by row.
      blocks: All blocks in stacks.
    """

    patches: Matrix
    places: Float[jax.Array, "places hidden"]
    blocks: TowerBlock
    merger_norm: LayerNorm
    merger_up: Matrix
    merger_down: Matrix
