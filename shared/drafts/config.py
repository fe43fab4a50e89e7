"""The config.json of an EAGLE, EAGLE-3 or DFlash draft head as one dataclass, and the head itself.

An EAGLE head is one Llama decoder layer that reads hidden states of its target, a DFlash head a few
Qwen3 layers. Whatever a head may do that is not implemented is refused by name, as it would draft
badly without a word.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from shared.drafts.block import (
    BlockConfig,
    block_of,
    refuse_relatives,
    settings_of,
    streams_of,
)
from shared.models.config import ModelConfig
from shared.models.families import config_from_dict
from shared.models.fields import Json, read_json

NUM_AUX = 3
"""Residual streams of the target that an EAGLE-3 head reads."""

KINDS = {
    "LlamaForCausalLMEagle": "EAGLE",
    "EagleLlamaForCausalLM": "EAGLE",
    "LlamaForCausalLMEagle3": "EAGLE3",
    "Eagle3LlamaForCausalLM": "EAGLE3",
    "DFlashDraftModel": "DFLASH",
}
"""Architecture names of draft heads; `LlamaForCausalLM` is told by `draft_vocab_size`."""

REFUSED = {
    "qkv_bias": "biases of the query, key and value projections",
    "hot_vocab_size": "a restricted output vocabulary",
    "norm_before_residual": "a residual that starts from the normed hidden state",
    "vision_config": "image input",
    "text_config": "image input",
}
"""Fields that change a head's forward pass, and what they would ask for."""


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """What a draft head's forward pass needs to know.

    Attributes:
      kind: "EAGLE" (1 and 2), "EAGLE3" or "DFLASH".
      layer: The head's own Llama settings, with one layer; of DFLASH Qwen3 settings, with any
        number.
      target_hidden: Hidden size of the target.
      aux_streams: Which residual streams r_i of the target `fc` reads, low to high; r_0 is the
        embedding, r_i the residual after i layers. Empty for EAGLE.
      draft_vocab: Tokens that the head scores; the target's vocabulary where it has no own.
      own_embed: The head has its own embedding; else it shares the target's.
      own_lm_head: The head has its own `lm_head`; else it shares the target's.
      has_bias: `fc` may have a bias; it is zero where the checkpoint holds none.
      norm_aux: Each stream has an RMS norm before `fc`.
      norm_input: The joined streams have one RMS norm before `fc`.
      norm_output: The hidden state of the next draft step is taken after the final norm.
      block: What a DFLASH head fills in one pass; None for the others.

    Source: EAGLE, Li et al. 2024, arXiv:2401.15077; EAGLE-3, Li et al. 2025, arXiv:2503.01840;
      DFlash, arXiv:2602.06036.
    """

    kind: str
    layer: ModelConfig
    target_hidden: int
    aux_streams: tuple[int, ...]
    draft_vocab: int
    own_embed: bool
    own_lm_head: bool
    has_bias: bool
    norm_aux: bool
    norm_input: bool
    norm_output: bool
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
    def from_folder(cls, folder: str | Path, target: ModelConfig) -> "DraftConfig":
        """Reads config.json of a draft model's folder.

        Raises:
          ValueError: The file is missing or broken, or the head cannot draft for the target; one
            sentence.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ValueError(f"the draft model folder {folder} does not exist")
        if not (folder / "config.json").is_file():
            raise ValueError(f"the draft model folder {folder} has no config.json")
        return cls.from_dict(read_json(folder / "config.json"), target)

    @classmethod
    def from_dict(cls, config: Json, target: ModelConfig) -> "DraftConfig":
        """Parses the contents of a head's config.json.

        Raises:
          ValueError: The head cannot draft for the target; one sentence that names the field.
        """
        _refuse_format(config)
        kind, eagle = _kind(config), config.get("eagle_config") or {}
        if kind == "DFLASH":
            return cls._dflash(settings_of(config), target)
        settings = {**config, **eagle}
        _refuse_unsupported(settings, kind)
        layer = _layer(config, target)
        _refuse_sizes(config, layer, target, kind)
        is_third = kind == "EAGLE3"
        stated = config.get("draft_vocab_size", target.vocab)
        draft = cls(
            kind=kind,
            layer=layer,
            target_hidden=target.hidden,
            aux_streams=_aux_streams(settings, target) if is_third else (),
            draft_vocab=int(stated or target.vocab) if is_third else target.vocab,
            own_embed=layer.hidden != target.hidden,
            own_lm_head=is_third and stated is not None,
            has_bias=bool(settings.get("bias", not is_third)),
            norm_aux=bool(settings.get("fc_norm") or settings.get("use_aux_norm")),
            norm_input=bool(settings.get("norm_before_fc")),
            norm_output=bool(settings.get("norm_output")),
            block=None,
        )
        draft._check(target)
        return draft

    @classmethod
    def _dflash(cls, settings: Json, target: ModelConfig) -> "DraftConfig":
        refuse_relatives(settings)
        _refuse_draft_vocab(settings)
        layer = _layers(settings, target)
        _refuse_sizes(settings, layer, target, "DFLASH")
        return cls(
            kind="DFLASH",
            layer=layer,
            target_hidden=target.hidden,
            aux_streams=streams_of(settings, layer, target),
            draft_vocab=target.vocab,
            own_embed=False,
            own_lm_head=False,
            has_bias=False,
            norm_aux=False,
            norm_input=False,
            norm_output=False,
            block=block_of(settings, layer),
        )

    def with_window(self, window: int | None) -> "DraftConfig":
        """With one window for all layers of a DFLASH head; None leaves each what it has."""
        if window is None or self.block is None:
            return self
        return replace(self, block=self.block.with_window(window))

    def _check(self, target: ModelConfig) -> None:
        if not 0 < self.draft_vocab <= target.vocab:
            raise ValueError(
                f"the draft model's draft_vocab_size must be 1 to {target.vocab}, the vocabulary "
                f"of the target, got {self.draft_vocab}"
            )
        if self.own_embed and not self.own_lm_head:
            raise ValueError(
                f"the draft model's hidden_size ({self.layer.hidden}) is not the target's "
                f"({target.hidden}), so it cannot share the target's lm_head; "
                "use a head with a draft_vocab_size"
            )


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


def _kind(config: Json) -> str:
    names = [str(name) for name in config.get("architectures") or ["LlamaForCausalLM"]]
    for name in names:
        if name in KINDS:
            return KINDS[name]
    if "LlamaForCausalLM" in names:
        return "EAGLE3" if "draft_vocab_size" in config else "EAGLE"
    raise ValueError(
        f"architectures in the draft model's config.json is {', '.join(names)}, which is no "
        f"supported draft head; use one of {', '.join(KINDS)}"
    )


def _refuse_unsupported(settings: Json, kind: str) -> None:
    for field, meaning in REFUSED.items():
        if settings.get(field):
            raise ValueError(
                f"the draft model's {field} ({meaning}) is not supported; use another head"
            )
    if settings.get("num_hidden_layers", 1) != 1:
        raise ValueError(
            f"the draft model has num_hidden_layers {settings['num_hidden_layers']}; "
            "heads of one layer are supported"
        )
    if kind != "EAGLE3":
        return
    if settings.get("use_aux_hidden_state") is False:
        raise ValueError("the draft model's use_aux_hidden_state: false is not supported")
    if settings.get("num_aux_hidden_states", NUM_AUX) != NUM_AUX:
        raise ValueError(
            f"the draft model's num_aux_hidden_states must be {NUM_AUX}, "
            f"got {settings['num_aux_hidden_states']}"
        )
    if settings.get("tie_word_embeddings") and settings.get("draft_vocab_size"):
        raise ValueError(
            "the draft model's tie_word_embeddings: true with a draft_vocab_size is not supported"
        )


def _refuse_format(config: Json) -> None:
    """Refuses a format that writes other things under the same names, whatever the kind."""
    if config.get("speculators_model_type"):
        raise ValueError(
            "the draft model's speculators_model_type (the speculators format, whose ids of layers "
            "mean other streams) is not supported; use a head in the format of its authors"
        )


def _refuse_draft_vocab(settings: Json) -> None:
    draft_vocab = settings.get("draft_vocab_size")
    if draft_vocab not in (None, settings.get("vocab_size")):
        raise ValueError(
            f"the draft model's draft_vocab_size ({draft_vocab}) is not supported for DFlash; use "
            "a head that scores the whole vocabulary"
        )


def _layer(config: Json, target: ModelConfig) -> ModelConfig:
    """The head's layer as a Llama model; a head may leave out what only a whole model needs."""
    llama: dict[str, Any] = {
        "max_position_embeddings": target.context_length,
        "vocab_size": target.vocab,
        **config,
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    return _drafting(_served(llama), target)


def _layers(settings: Json, target: ModelConfig) -> ModelConfig:
    """The layers of a DFlash head as a Qwen3 model; how they slide is the block's to say."""
    ignored = ("layer_types", "use_sliding_window", "sliding_window")
    qwen: dict[str, Any] = {
        "max_position_embeddings": target.context_length,
        "vocab_size": target.vocab,
        **{field: value for field, value in settings.items() if field not in ignored},
        "architectures": ["Qwen3ForCausalLM"],
        "tie_word_embeddings": False,
    }
    return _drafting(_served(qwen), target)


def _drafting(layer: ModelConfig, target: ModelConfig) -> ModelConfig:
    """With the factor of the target's logits, whose `lm_head` the head may share."""
    return replace(layer, logits_factor=target.logits_factor)


def _served(config: Json) -> ModelConfig:
    try:
        return config_from_dict(config)
    except ValueError as error:
        raise ValueError(f"the draft model cannot be served: {error}") from error


def _refuse_sizes(config: Json, layer: ModelConfig, target: ModelConfig, kind: str) -> None:
    if layer.vocab != target.vocab:
        raise ValueError(
            f"the draft model's vocab_size ({layer.vocab}) is not the target's ({target.vocab}); "
            "use a head that was trained for this model"
        )
    read = config.get("target_hidden_size") or layer.hidden
    if read != target.hidden or (kind != "EAGLE3" and layer.hidden != target.hidden):
        field = "target_hidden_size" if config.get("target_hidden_size") else "hidden_size"
        raise ValueError(
            f"the draft model's {field} ({read}) does not fit the target's hidden_size "
            f"({target.hidden}); use a head that was trained for this model"
        )


def _aux_streams(settings: Json, target: ModelConfig) -> tuple[int, ...]:
    """The streams of listed ids; by default the inputs of layers 2, L/2, L-3."""
    listed = settings.get("eagle_aux_hidden_state_layer_ids")
    L = target.num_layers
    ids = [2, L // 2, L - 3] if listed is None else sorted(map(int, listed))
    shift = 0 if listed is None else _shift(ids, settings, L)
    streams = [i + shift for i in ids]
    in_range = all(1 <= i <= L for i in streams)
    if not in_range or len(set(streams)) != NUM_AUX or streams != sorted(streams):
        stated = f"are {list(listed)}" if listed is not None else "are not given"
        raise ValueError(
            f"the draft model's eagle_aux_hidden_state_layer_ids {stated}; they must be {NUM_AUX} "
            f"different layers of the target's {L}"
        )
    return tuple(streams)


def _shift(ids: list[int], settings: Json, num_layers: int) -> int:
    """What is added to listed ids so that they name streams.

    Trainers write two things under one name: layers whose output is read (stream i + 1), and layers
    whose input is read (stream i). Only the second can name the target's number of layers, and only
    the first has been seen to begin at 1, or at 0 within `eagle_config`.

    Args:
      ids: In ascending order.

    Raises:
      ValueError: They may be either.
    """
    if num_layers in ids:
        return 0
    is_nested = "eagle_aux_hidden_state_layer_ids" in (settings.get("eagle_config") or {})
    if ids[:1] == [1] or (ids[:1] == [0] and is_nested):
        return 1
    raise ValueError(
        f"the draft model's eagle_aux_hidden_state_layer_ids {ids} do not say whether outputs or "
        "inputs of these layers are read; use a head whose list begins with 1, or leave out a list "
        f"of the defaults, the inputs of layers 2, {num_layers // 2} and {num_layers - 3}"
    )
