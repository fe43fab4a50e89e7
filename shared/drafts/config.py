"""Config of a draft head, read from its config.json.

An EAGLE head is one or more decoder layers that read hidden states of the target. A block head has
a few such layers. Unsupported settings are errors, because a head that ignores
them would propose bad tokens silently.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from shared.drafts import assistant
from shared.drafts.assistant import ClusterConfig
from shared.drafts.aux_hidden_states import IDS_FLAG, LayerIdMeaning
from shared.drafts.config_formats import read_raw_config
from shared.drafts.dflash_config import SLIDING, BlockConfig, Part, block_of, windows_of
from shared.drafts.kinds import HEADS, KINDS, LOGITS_SOFTCAP, EmbeddingInput, HeadTraits
from shared.drafts.raw_config import PLACE, RawDraftConfig
from shared.models.config import ModelConfig
from shared.models.config_fields import Json, count
from shared.models.families import config_from_dict
from shared.models.groups import CachePool
from shared.models.model_folder import ModelFolder
from shared.models.rotary import settings_of
from shared.models.stacks import StackSettings
from shared.models.tp_sharding import shard_config

DRAFT_FOLDER = "the draft model folder"
"""Description of a head's folder in messages."""


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Settings of a draft head that its forward pass needs.

    Attributes:
      kind: Name of a kind of `shared.drafts.kinds.HEADS`; "EAGLE" includes EAGLE-2.
      layer: The head's own layers, as a model config.
      target_hidden: Hidden size of the target.
      aux_streams: Auxiliary hidden states r_i of the target that `fc` reads, in ascending order;
        r_0 is the embedding, r_i the residual stream after i layers. Empty for EAGLE.
      stored_vocab: Vocabulary size of the head's files, with padding; may differ from the target's,
        which `layer` has.
      draft_vocab: Size of the output vocabulary; the target's if the head has no draft vocabulary.
      own_embed: True if the head has its own embedding; False if it shares the target's.
      own_lm_head: True if the head has its own `lm_head`; False if it shares the target's.
      has_bias: True if `fc` has a bias.
      norm_aux: True if each auxiliary hidden state has an RMS norm before `fc`.
      norm_input: True if the concatenated hidden states have one RMS norm before `fc`.
      norm_output: True if the next draft step reads the hidden state after the final norm.
      norm_residual: True if the first layer's residual is the normalised hidden state.
      block: Block of a head that fills one in one pass; else None.
      kv_layers: For each layer of the head the target layer that has the KV it reads; empty for a
        head with KV of its own.
      clusters: Clusters of its LM head; None if all logits are computed.

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
    kv_layers: tuple[int, ...]
    clusters: ClusterConfig | None

    @property
    def traits(self) -> HeadTraits:
        """Structure of its kind."""
        return HEADS[self.kind]

    @property
    def has_draft_vocab(self) -> bool:
        """True if the head has a reduced draft vocabulary."""
        return self.draft_vocab != self.layer.vocab

    @property
    def fc_inputs(self) -> int:
        """Input width of `fc`: embedding and hidden state, or the auxiliary hidden states."""
        streams = len(self.aux_streams) * self.target_hidden
        is_joined = self.traits.embedding is EmbeddingInput.FC
        return 2 * self.target_hidden if is_joined else streams

    @property
    def attention_inputs(self) -> int:
        """Input width of the layer's QKV projection."""
        is_joined = self.traits.embedding is EmbeddingInput.ATTENTION
        return self.layer.hidden * (2 if is_joined else 1)

    @property
    def stack_settings(self) -> StackSettings:
        """Settings that determine the parameters of its first layer."""
        return replace(self.layer.stack_settings, inputs=self.attention_inputs)

    @property
    def sizes(self) -> "DraftStateSizes":
        """State of the head on the device."""
        if self.traits.reads_target_kv:
            return DraftStateSizes(model=self.layer, pools=(), has_draft_input=True)
        layers, has_draft_input = self.layer.num_layers, self.block is None
        return DraftStateSizes.of_layers(self.layer, layers, has_draft_input=has_draft_input)

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        target: ModelConfig,
        layer_ids: LayerIdMeaning | None = None,
        num_known: int | None = None,
    ) -> "DraftConfig":
        """Reads config.json of a draft model's folder; for the arguments see `from_dict`.

        Raises:
          ValueError: The file is missing or invalid, or the head does not fit the target.
        """
        return cls.from_dict(ModelFolder(folder, DRAFT_FOLDER).config, target, layer_ids, num_known)

    @classmethod
    def from_dict(
        cls,
        config: Json,
        target: ModelConfig,
        layer_ids: LayerIdMeaning | None = None,
        num_known: int | None = None,
    ) -> "DraftConfig":
        """Parses the contents of a head's config.json, in any supported format.

        `shared.drafts.checkpoint.fitted` adds the settings that its tensors determine.

        Args:
          config: Contents of the config.json.
          target: Config of the target.
          layer_ids: Meaning of the listed target layers, if the list is ambiguous.
          num_known: Tokens in the target's tokenizer, without padding, of which a head may have
            more or less. None if the target has no tokenizer.

        Raises:
          ValueError: The head does not fit the target; the message names the field.
        """
        raw = read_raw_config(config)
        if raw.kind not in HEADS:
            raise ValueError(
                "the draft model is an MTP layer (speculators_model_type); use it with "
                "--speculative-algorithm NEXTN"
            )
        traits, settings = HEADS[raw.kind], raw.settings
        kv_layers, clusters = tuple[int, ...](), None
        if traits.reads_target_kv:
            layer, kv_layers = assistant.read_layers(settings, target)
            clusters = assistant.read_clusters(settings, layer.vocab)
        else:
            layer = _layers(raw, target)
            _refuse_sizes(raw, layer, target, num_known)
        stored_vocab, layer = layer.vocab, replace(layer, vocab=target.vocab)
        draft_vocab = count(settings, "draft_vocab_size", place=PLACE) or target.vocab
        if layer_ids is not None and traits.aux_streams is None:
            raise ValueError(f"{KINDS[raw.kind].described} lists no layers; remove {IDS_FLAG}")
        draft = cls(
            kind=raw.kind,
            layer=layer,
            target_hidden=target.hidden,
            aux_streams=_streams(raw, layer, target, layer_ids),
            stored_vocab=stored_vocab,
            draft_vocab=draft_vocab,
            own_embed=layer.hidden != target.hidden and not traits.reads_target_kv,
            own_lm_head=traits.is_independent and settings.get("draft_vocab_size", 0) is not None,
            has_bias=raw.flag("bias", traits.has_bias),
            norm_aux=raw.flag("fc_norm") or raw.flag("use_aux_norm"),
            norm_input=raw.flag("norm_before_fc"),
            norm_output=raw.flag("norm_output"),
            norm_residual=raw.flag("norm_before_residual"),
            block=block_of(raw, layer) if KINDS[raw.kind].is_block else None,
            kv_layers=kv_layers,
            clusters=clusters,
        )
        return draft._checked(target, raw)

    def part(self, of: type[Part]) -> Part | None:
        """Returns the part of a block head of a class; None if it has none."""
        return self.block.part(of) if self.block else None

    def with_window(self, window: int | None) -> "DraftConfig":
        """Returns the config with one window for all layers of a block head; None changes
        nothing.
        """
        if window is None or self.block is None:
            return self
        return replace(self, block=self.block.with_window(window))

    def with_attention(self, **changed: Any) -> "DraftConfig":
        """Returns the config with changed attention settings of all layers."""
        return replace(self, layer=_with_mixers(self.layer, **changed))

    def _checked(self, target: ModelConfig, raw: RawDraftConfig) -> "DraftConfig":
        if not 0 < self.draft_vocab <= target.vocab:
            raise ValueError(
                f"the draft model's draft_vocab_size must be 1 to {target.vocab}, the vocabulary "
                f"of the target, got {self.draft_vocab}"
            )
        table = self.traits.token_table
        if self.stored_vocab != target.vocab and table:
            raise ValueError(
                f"the draft model's vocab_size ({self.stored_vocab}) must equal the target's "
                f"({target.vocab}), because its {table} is indexed by the target's tokens; use a "
                "head with the target's padding"
            )
        if self.has_draft_vocab and not self.traits.has_draft_vocab:
            raise ValueError(
                f"the draft model's draft_vocab_size must be {target.vocab}, the vocabulary of "
                f"the target, because {self.traits.title} does not support a draft vocabulary; "
                f"got {self.draft_vocab}"
            )
        if self.norm_aux and self.norm_input and raw.is_speculators:
            raise ValueError(
                "the draft model's fc_norm and norm_before_fc are mutually exclusive; use a "
                "config.json with one of them"
            )
        if self.own_embed and not self.own_lm_head:
            raise ValueError(
                f"the draft model's hidden_size ({self.layer.hidden}) is not the target's "
                f"({target.hidden}), so it cannot share the target's lm_head; use a head with a "
                "draft_vocab_size"
            )
        raw.flag("tie_word_embeddings")  # copied from base models; the tensors decide
        return replace(self, own_lm_head=self.own_lm_head or self.has_draft_vocab)


@dataclass(frozen=True, eq=False)
class DraftHead:
    """A draft head with its weights.

    Attributes:
      config: Its settings.
      weights: Arrays by the names of `shared.drafts.checkpoint.head_parameters`. With a draft
        vocabulary also `draft_ids`, int32, the target token id of each draft token.
    """

    config: DraftConfig
    weights: Mapping[str, Shaped[np.ndarray, "..."]]


@dataclass(frozen=True)
class DraftStateSizes:
    """State of a drafter on the device between steps.

    Attributes:
      model: Config of its layers and hidden state.
      pools: Its cache pools; KV is stored in the target's pages. The layers of a head share a pool,
        whatever their windows. Empty for a drafter that reads the target's KV.
      has_draft_input: True if draft extend stores a draft input (candidates and a hidden state) for
        the next step.
    """

    model: ModelConfig
    pools: tuple[CachePool, ...]
    has_draft_input: bool

    @property
    def reads_target_kv(self) -> bool:
        """True if the drafter has no KV and reads that of the target."""
        return not self.pools

    @classmethod
    def of_layers(
        cls, config: ModelConfig, num_layers: int, *, has_draft_input: bool = True
    ) -> "DraftStateSizes":
        """Returns the sizes of an MTP layer or draft head.

        Args:
          config: Config of the layers.
          num_layers: Number of attention layers.
          has_draft_input: See `DraftStateSizes`.
        """
        pool = CachePool(config.draft_layer.mixer, tuple(range(num_layers)))
        return cls(model=config, pools=(pool,), has_draft_input=has_draft_input)

    @classmethod
    def of_model(cls, config: ModelConfig) -> "DraftStateSizes":
        """Returns the sizes of a draft model: KV and states of all its layers, and no draft
        input.
        """
        return cls(model=config, pools=config.cache_pools, has_draft_input=False)

    def local(self, count: int) -> "DraftStateSizes":
        """Returns the shard of one of `count` TP ranks.

        Raises:
          ValueError: A size is not divisible; see `shared.models.tp_sharding.shard_config`.
        """
        pools = tuple(pool.local(count) for pool in self.pools)
        return replace(self, model=shard_config(self.model, count), pools=pools)


def _with_mixers(model: ModelConfig, **changed: Any) -> ModelConfig:
    layers = tuple(replace(each, mixer=replace(each.mixer, **changed)) for each in model.layers)
    return replace(model, layers=layers)


_SLIDING = ("layer_types", "use_sliding_window", "sliding_window")
_READ_ELSEWHERE = (*_SLIDING, LOGITS_SOFTCAP)


def _layers(raw: RawDraftConfig, target: ModelConfig) -> ModelConfig:
    """Returns the layers of a head as a model config.

    A head may omit fields that only a whole model needs. Sliding windows are read separately: in a
    block head and in the speculators format any layer may have one. A block head reads rows of the
    target's embedding layer, which in Gemma multiplies them.
    """
    settings, is_block = raw.settings, KINDS[raw.kind].is_block
    slides = is_block or raw.is_speculators
    is_qwen = is_block or (raw.is_speculators and settings["model_type"] == "qwen3")
    whole: dict[str, Any] = {
        "max_position_embeddings": target.context_length,
        "vocab_size": target.vocab,
        "num_hidden_layers": 1,
        **{
            name: value
            for name, value in settings.items()
            if not (slides and name in _READ_ELSEWHERE)
        },
        "architectures": ["Qwen3ForCausalLM" if is_qwen else "LlamaForCausalLM"],
        "tie_word_embeddings": False,
    }
    try:
        if settings_of(whole, SLIDING) != settings_of(whole):
            raise ValueError("rope_parameters that differ by layer type are not supported")
        model = config_from_dict(whole)
    except ValueError as error:
        raise ValueError(f"the draft model is not supported: {error}") from error
    if raw.flag("qkv_bias"):
        model = _with_mixers(model, input_bias=True)
    if slides and not is_block:
        windows = windows_of(settings, model.num_layers)
        pairs = zip(model.layers, windows, strict=True)
        layers = tuple(replace(x, mixer=replace(x.mixer, window=w)) for x, w in pairs)
        model = replace(model, layers=layers)
    if is_block and target.rounds_embedding_factor:
        factor = target.embedding_factor
        model = replace(model, embedding_factor=factor, rounds_embedding_factor=True)
    # The head may share the target's `lm_head`, which produces scaled and softly capped logits.
    return replace(model, logits_factor=target.logits_factor, logits_softcap=target.logits_softcap)


def _refuse_sizes(
    raw: RawDraftConfig, layer: ModelConfig, target: ModelConfig, num_known: int | None
) -> None:
    softcap = raw.settings.get(LOGITS_SOFTCAP)
    if softcap not in (None, target.logits_softcap):
        raise ValueError(
            f"the draft model's {LOGITS_SOFTCAP} must be the target's ({target.logits_softcap}), "
            f"got {softcap!r}; use a head that was trained for this model"
        )
    is_padded = num_known is not None and num_known <= min(layer.vocab, target.vocab)
    if layer.vocab != target.vocab and not is_padded:
        raise ValueError(
            f"the draft model's vocab_size ({layer.vocab}) is not the target's ({target.vocab}); "
            "use a head that was trained for this model"
        )
    stated = raw.settings.get("target_hidden_size")
    read, is_independent = stated or layer.hidden, HEADS[raw.kind].is_independent
    if read == target.hidden != layer.hidden and not is_independent:
        raise ValueError(
            f"the draft model's hidden_size ({layer.hidden}) differs from its target_hidden_size "
            f"({read}), which requires an adapter between the two and is not supported; use a head "
            "of the target's hidden size"
        )
    if read != target.hidden or (layer.hidden != target.hidden and not is_independent):
        field = "target_hidden_size" if stated else "hidden_size"
        raise ValueError(
            f"the draft model's {field} ({read}) does not match the target's hidden_size "
            f"({target.hidden}); use a head that was trained for this model"
        )


def _streams(
    raw: RawDraftConfig, layer: ModelConfig, target: ModelConfig, layer_ids: LayerIdMeaning | None
) -> tuple[int, ...]:
    read = HEADS[raw.kind].aux_streams
    return () if read is None else read(raw, layer.num_layers, target.num_layers, layer_ids)
