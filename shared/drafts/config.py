"""The config.json of a draft head as one dataclass, and the head itself.

An EAGLE head is a decoder layer, or some, that reads hidden states of its target, a DFlash, DSpark
or DFlash2 head a few layers that do. Whatever a head may do that is not implemented is refused by
name, as it would draft badly without a word.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from shared.drafts.block import SLIDING, BlockConfig, block_of, default_layers, windows_of
from shared.drafts.formats import PLACE, Stated, stated
from shared.drafts.streams import IDS_FLAG, Ids, block_streams, eagle3_streams
from shared.models.config import ModelConfig
from shared.models.families import config_from_dict
from shared.models.fields import Json, count, read_json
from shared.models.file_kind import folder_fault
from shared.models.rotary import settings_of

DRAFT_FOLDER = "the draft model folder"
"""The part of a head's folder in sentences."""


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """What a draft head's forward pass needs to know.

    Attributes:
      kind: "EAGLE" (1 and 2), "EAGLE3", "DFLASH", "DSPARK" or "DFLASH2".
      layer: The head's own layers, as the settings of a model of such layers.
      target_hidden: Hidden size of the target.
      aux_streams: Which residual streams r_i of the target `fc` reads, low to high; r_0 is the
        embedding, r_i the residual after i layers. Empty for EAGLE.
      stored_vocab: Tokens that the head counts, with its padding, which may be other than the
        target's; its layers have the target's.
      draft_vocab: Tokens that the head scores; the target's vocabulary where it has no own.
      own_embed: The head has its own embedding; else it shares the target's.
      own_lm_head: The head has its own `lm_head`; else it shares the target's.
      has_bias: `fc` has a bias.
      norm_aux: Each stream has an RMS norm before `fc`.
      norm_input: The joined streams have one RMS norm before `fc`.
      norm_output: The hidden state of the next draft step is taken after the final norm.
      norm_residual: What the first layer adds to is the hidden state after its norm.
      block: What a head of the last three kinds fills in one pass; None for the others.

    Source: EAGLE, Li et al. 2024, arXiv:2401.15077; EAGLE-3, Li et al. 2025, arXiv:2503.01840;
      DFlash, arXiv:2602.06036; DSpark, arXiv:2607.05147.
    """

    kind: str
    layer: ModelConfig
    target_hidden: int
    aux_streams: tuple[int, ...]
    stored_vocab: int
    draft_vocab: int
    own_embed: bool
    own_lm_head: bool
    has_bias: bool
    norm_aux: bool
    norm_input: bool
    norm_output: bool
    norm_residual: bool
    block: BlockConfig | None

    @property
    def has_draft_vocab(self) -> bool:
        """The head scores fewer tokens than the target has."""
        return self.draft_vocab != self.layer.vocab

    @property
    def fc_inputs(self) -> int:
        """Width of what `fc` reads: embedding and hidden state, or the streams."""
        streams = len(self.aux_streams) * self.target_hidden
        return 2 * self.target_hidden if self.kind == "EAGLE" else streams

    @property
    def attention_inputs(self) -> int:
        """Width of what the layer's query, key and value projections read."""
        return self.layer.hidden * (2 if self.kind == "EAGLE3" else 1)

    @property
    def sizes(self) -> "DraftSizes":
        """What the head keeps on the device."""
        return DraftSizes(self.layer, self.layer.num_attention_layers, 0, self.block is None)

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        target: ModelConfig,
        layer_ids: Ids | None = None,
        num_known: int | None = None,
    ) -> "DraftConfig":
        """Reads config.json of a draft model's folder.

        Raises:
          ValueError: The file is missing or broken, or the head cannot draft for the target; one
            sentence.
        """
        return cls.from_dict(head_json(folder), target, layer_ids, num_known)

    @classmethod
    def from_dict(
        cls,
        config: Json,
        target: ModelConfig,
        layer_ids: Ids | None = None,
        num_known: int | None = None,
    ) -> "DraftConfig":
        """Parses the contents of a head's config.json, in any of the formats that are served.

        What its tensors decide, `shared.drafts.checkpoint.fitted` adds.

        Args:
          layer_ids: What listed layers of the target mean, where the list cannot tell.
          num_known: Tokens that the target's tokenizer knows, from the first on: those beyond are
            padding, of which a head may have more or less. None: the target has no tokenizer.

        Raises:
          ValueError: The head cannot draft for the target; one sentence that names the field.
        """
        said = stated(config)
        if said.kind == "NEXTN":
            raise ValueError(
                "the draft model is an MTP layer by its speculators_model_type; give it with "
                "--speculative-algorithm NEXTN"
            )
        is_third, settings, layer = said.kind == "EAGLE3", said.settings, _layers(said, target)
        _refuse_sizes(said, layer, target, num_known)
        stored_vocab, layer = layer.vocab, replace(layer, vocab=target.vocab)
        draft_vocab = count(settings, "draft_vocab_size", place=PLACE) or target.vocab
        if layer_ids is not None and said.kind == "EAGLE":
            raise ValueError(f"an EAGLE head lists no layers; leave {IDS_FLAG} out")
        draft = cls(
            kind=said.kind,
            layer=layer,
            target_hidden=target.hidden,
            aux_streams=_streams(said, layer, target, layer_ids),
            stored_vocab=stored_vocab,
            draft_vocab=target.vocab if said.kind == "EAGLE" else draft_vocab,
            own_embed=layer.hidden != target.hidden,
            own_lm_head=is_third and settings.get("draft_vocab_size", 0) is not None,
            has_bias=said.flag("bias", said.kind == "EAGLE"),
            norm_aux=said.flag("fc_norm") or said.flag("use_aux_norm"),
            norm_input=said.flag("norm_before_fc"),
            norm_output=said.flag("norm_output"),
            norm_residual=said.flag("norm_before_residual"),
            block=block_of(said, layer) if said.is_block else None,
        )
        return draft._checked(target, said)

    def with_window(self, window: int | None) -> "DraftConfig":
        """With one window for all layers of a head with blocks; None leaves each what it has."""
        if window is None or self.block is None:
            return self
        return replace(self, block=self.block.with_window(window))

    def with_attention(self, **changed: Any) -> "DraftConfig":
        """With some settings of the attention of all layers changed."""
        return replace(self, layer=_with_mixers(self.layer, **changed))

    def _checked(self, target: ModelConfig, said: Stated) -> "DraftConfig":
        if not 0 < self.draft_vocab <= target.vocab:
            raise ValueError(
                f"the draft model's draft_vocab_size must be 1 to {target.vocab}, the vocabulary "
                f"of the target, got {self.draft_vocab}"
            )
        block = self.block
        if self.stored_vocab != target.vocab and block and (block.markov or block.selector):
            what = "Markov step" if block.markov else "selector"
            raise ValueError(
                f"the draft model's vocab_size ({self.stored_vocab}) is not the target's "
                f"({target.vocab}), and its {what} counts the target's tokens; use a head "
                "that is padded as its target is"
            )
        if block and block.selector and self.has_draft_vocab:
            raise ValueError(
                f"the draft model's draft_vocab_size must be {target.vocab}, the vocabulary of the "
                f"target, whose tokens a DFlash2 head selects, got {self.draft_vocab}"
            )
        if self.norm_aux and self.norm_input and said.is_speculators:
            raise ValueError(
                "the draft model's fc_norm and norm_before_fc exclude each other; use a "
                "config.json with one of them"
            )
        if self.own_embed and not self.own_lm_head:
            raise ValueError(
                f"the draft model's hidden_size ({self.layer.hidden}) is not the target's "
                f"({target.hidden}), so it cannot share the target's lm_head; "
                "use a head with a draft_vocab_size"
            )
        said.flag("tie_word_embeddings")  # copied from base models; the tensors decide
        return replace(self, own_lm_head=self.own_lm_head or self.has_draft_vocab)


@dataclass(frozen=True, eq=False)
class DraftHead:
    """A draft head with its weights.

    Attributes:
      config: Its settings.
      weights: By the names of `draft_checkpoint.head_parameters`; with a draft vocabulary also
        `draft_ids`, int32, the target's token id of each draft token.
    """

    config: DraftConfig
    weights: Mapping[str, Shaped[np.ndarray, "..."]]


@dataclass(frozen=True)
class DraftSizes:
    """What a drafter keeps on the device between steps.

    Attributes:
      model: Sizes of its layers and of its hidden state.
      num_attention_layers: Layers with KV of their own, in the target's pages.
      num_gated_delta_layers: Layers with a recurrent state of their own.
      has_relay: Extending it leaves candidates and a hidden state for the next draft.
    """

    model: ModelConfig
    num_attention_layers: int
    num_gated_delta_layers: int
    has_relay: bool

    @classmethod
    def of_layer(cls, target: ModelConfig) -> "DraftSizes":
        """Of one attention layer of the target's own sizes."""
        return cls(target, num_attention_layers=1, num_gated_delta_layers=0, has_relay=True)

    @classmethod
    def of_model(cls, config: ModelConfig) -> "DraftSizes":
        """Of a small model: KV and states of all its layers; extending it leaves no relay."""
        return cls(config, config.num_attention_layers, config.num_gated_delta_layers, False)


def head_json(folder: str | Path) -> Json:
    """The contents of config.json of a draft model's folder.

    Raises:
      ValueError: It is missing or broken; one sentence.
    """
    folder = Path(folder)
    if fault := folder_fault(folder, DRAFT_FOLDER):
        raise ValueError(fault)
    return read_json(folder / "config.json")


def _with_mixers(model: ModelConfig, **changed: Any) -> ModelConfig:
    layers = tuple(replace(each, mixer=replace(each.mixer, **changed)) for each in model.layers)
    return replace(model, layers=layers)


_SLIDING = ("layer_types", "use_sliding_window", "sliding_window")


def _layers(said: Stated, target: ModelConfig) -> ModelConfig:
    """The layers of a head as a model of such layers.

    A head may leave out what only a whole model needs. How layers slide is not read as of a whole
    model: in a head with a block and in the speculators format any layer may.
    """
    settings, is_block = said.settings, said.is_block
    slides = is_block or said.is_speculators
    is_qwen = is_block or (said.is_speculators and settings["model_type"] == "qwen3")
    whole: dict[str, Any] = {
        "max_position_embeddings": target.context_length,
        "vocab_size": target.vocab,
        "num_hidden_layers": 1,
        **{name: value for name, value in settings.items() if not (slides and name in _SLIDING)},
        "architectures": ["Qwen3ForCausalLM" if is_qwen else "LlamaForCausalLM"],
        "tie_word_embeddings": False,
    }
    try:
        if settings_of(whole, SLIDING) != settings_of(whole):
            raise ValueError("rope_parameters that differ by layer type are not supported")
        model = config_from_dict(whole)
    except ValueError as error:
        raise ValueError(f"the draft model cannot be served: {error}") from error
    if said.flag("qkv_bias"):
        model = _with_mixers(model, input_bias=True)
    if slides and not is_block:
        windows = windows_of(settings, model.num_layers)
        pairs = zip(model.layers, windows, strict=True)
        layers = tuple(replace(x, mixer=replace(x.mixer, window=w)) for x, w in pairs)
        model = replace(model, layers=layers)
    # Of the target's logits, whose `lm_head` the head may share.
    return replace(model, logits_factor=target.logits_factor)


def _refuse_sizes(
    said: Stated, layer: ModelConfig, target: ModelConfig, num_known: int | None
) -> None:
    is_padded = num_known is not None and num_known <= min(layer.vocab, target.vocab)
    if layer.vocab != target.vocab and not is_padded:
        raise ValueError(
            f"the draft model's vocab_size ({layer.vocab}) is not the target's ({target.vocab}); "
            "use a head that was trained for this model"
        )
    stated = said.settings.get("target_hidden_size")
    read = stated or layer.hidden
    if read != target.hidden or (said.kind != "EAGLE3" and layer.hidden != target.hidden):
        field = "target_hidden_size" if stated else "hidden_size"
        raise ValueError(
            f"the draft model's {field} ({read}) does not fit the target's hidden_size "
            f"({target.hidden}); use a head that was trained for this model"
        )


def _streams(
    said: Stated, layer: ModelConfig, target: ModelConfig, layer_ids: Ids | None
) -> tuple[int, ...]:
    L = target.num_layers
    if said.kind == "EAGLE3":
        return eagle3_streams(said, L, layer_ids)
    if not said.is_block:
        return ()
    named = said.settings.get("num_target_layers")
    if named not in (None, L):
        raise ValueError(
            f"the draft model's num_target_layers is {named}, this model has {L} layers; use a "
            "draft model that was trained for this model"
        )
    return block_streams(said, default_layers(layer.num_layers, L), L, layer_ids)
