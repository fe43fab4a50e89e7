"""Kinds of drafters: one record for each drafting method.

The options, the readers of draft heads, the startup and the backends read these records instead of
comparing names. The module imports no array library, because `--help` reads it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from shared.drafts.aux_hidden_states import LayerIdMeaning, block_streams, eagle3_streams
from shared.drafts.block_part import BlockPart
from shared.drafts.dflash2 import SELECTOR_BEFORE, conv_of, selector_of
from shared.drafts.dspark_config import MARKOV_EMBEDDING, markov_of
from shared.drafts.raw_config import RawDraftConfig
from shared.models.config import ModelConfig
from shared.models.config_fields import Json

AuxStreams = Callable[[RawDraftConfig, int, int, LayerIdMeaning | None], tuple[int, ...]]
"""Function that returns the auxiliary hidden states of a head; see `eagle3_streams`."""

ReadParts = Callable[[RawDraftConfig, ModelConfig, int], tuple[BlockPart, ...]]
"""Function from the fields, the layers and the block size of a head to its parts."""

TOKEN_MAP, WINDOW = "speculative_token_map", "speculative_draft_window_size"
LAYER_CONVENTION = "speculative_aux_layer_convention"
"""Options that some kinds support."""


class Source(Enum):
    """Origin of the draft tokens."""

    MTP = "the target's MTP layer"
    HEAD = "a draft head"
    MTP_OR_HEAD = "the target's MTP layer, or a draft head if one is given"
    MODEL = "a small model with the target's tokenizer"
    NGRAMS = "n-grams of earlier text"


class Form(Enum):
    """Form of the drafts."""

    TREE = "chains and trees, grown level by level"
    BLOCK = "chains of a block that is filled in one pass"
    TOKEN = "one draft token"
    NGRAM_TREE = "trees of n-grams"


class EmbeddingInput(Enum):
    """Place where the embedding of a token enters a head, next to the target's hidden state."""

    FC = "the input of `fc`"
    ATTENTION = "the input of the first attention"
    ROWS = "rows of their own"


@dataclass(frozen=True, kw_only=True)
class HeadFormat:
    """Files of a draft head or MTP layer.

    Attributes:
      architectures: Architecture names in the format of the head's authors.
      speculators: `speculators_model_type` in the speculators format; None if there is none.
      tensors: Patterns of tensor names. A head has a tensor for each pattern of its kind.
      without: Names of tensors that a head of the kind does not have.
      fields: Fields that are read.
      fixed: Fields with one supported value; other values are errors.
      defaults: Defaults of absent fields in the speculators format.
      nested: Name of the nested object in the format of the head's authors.
      layer_type: `model_type` of the layers, if config.json names none that is supported.
    """

    architectures: tuple[str, ...]
    speculators: str | None
    tensors: tuple[str, ...]
    without: tuple[str, ...] = ()
    fields: frozenset[str]
    fixed: Mapping[str, Any]
    defaults: Json = field(default_factory=dict)
    nested: str
    layer_type: str

    def matches(self, names: Collection[str]) -> bool:
        """Returns True if these tensor names are those of the kind or of a more specific one."""
        has_all = all(any(fnmatchcase(name, x) for name in names) for x in self.tensors)
        return has_all and not any(name in names for name in self.without)


@dataclass(frozen=True, kw_only=True)
class HeadTraits:
    """Structure of a draft head.

    Attributes:
      title: Name in prose.
      embedding: Place where token embeddings enter.
      aux_streams: Reads the auxiliary hidden states; None if the head reads the last hidden state.
      is_independent: True if the head may have its own hidden size, embedding and `lm_head`.
      has_bias: True if `fc` has a bias unless config.json states otherwise.
      parts: Names of the parts that the head has in addition to a DFlash head, by a field of each.
      read_parts: Reads these parts; None without any.
      token_table: Name of a part that is indexed by target tokens; None without one.
      has_draft_vocab: True if a reduced draft vocabulary is supported.
      samples_from_anchor: True if the newest token's slot predicts the first draft token unless
        config.json states otherwise.
      reads_target_kv: True if the layers have queries only and read the KV of the target.
    """

    title: str
    embedding: EmbeddingInput
    aux_streams: AuxStreams | None = None
    is_independent: bool = False
    has_bias: bool = False
    parts: Mapping[str, str] = field(default_factory=dict)
    read_parts: ReadParts | None = None
    token_table: str | None = None
    has_draft_vocab: bool = True
    samples_from_anchor: bool = False
    reads_target_kv: bool = False


@dataclass(frozen=True, kw_only=True)
class DrafterKind:
    """Drafting method.

    Attributes:
      name: Value of `--speculative-algorithm`.
      aliases: Names in other engines.
      source: Origin of the draft tokens.
      form: Form of the drafts.
      flags: Options that this kind supports and some others do not.
      merges_ngrams: True if n-gram drafts can be merged into the drafts (NAME+NGRAM).
      files: Files of the head or MTP layer; None for other sources.
      head: Structure of the draft head; None for other sources.
    """

    name: str
    aliases: tuple[str, ...] = ()
    source: Source
    form: Form
    flags: frozenset[str] = frozenset()
    merges_ngrams: bool = True
    files: HeadFormat | None = None
    head: HeadTraits | None = None

    @property
    def is_block(self) -> bool:
        """True if drafts are the tokens of a block that is filled in one pass."""
        return self.form is Form.BLOCK

    @property
    def has_cheap_trees(self) -> bool:
        """True for a drafter of few layers: its trees cost little more than chains."""
        return self.form is Form.TREE and self.source in (Source.MTP, Source.HEAD)

    @property
    def needs_folder(self) -> bool:
        """True if the drafter has a folder of its own."""
        return self.source in (Source.HEAD, Source.MODEL)

    @property
    def described(self) -> str:
        """Name with its article, for messages about a head."""
        return f"{'an' if self.name[0] in 'AEINOU' else 'a'} {self.name} head"


LAYER_FIELDS = frozenset(
    {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
        *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
        *("max_position_embeddings", "attention_bias", "mlp_bias", "tie_word_embeddings"),
        *("layer_types", "sliding_window", "use_sliding_window", "target_hidden_size"),
        *("quantization_config", "architectures", "model_type"),
    }
)
"""Fields of a head's layers."""

LOGITS_SOFTCAP = "final_logit_softcapping"
"""Field of a block head with the soft cap of its target's logits."""

_AUX = {"eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"}
_BLOCK = (
    LAYER_FIELDS
    | _AUX
    | {"draft_vocab_size", "block_size", "mask_token_id", "num_target_layers", "target_layer_ids"}
    | {"is_causal", "sliding_window_non_causal", "dflash_config", LOGITS_SOFTCAP}
)
_BLOCK_DEFAULTS: Json = {"draft_vocab_size": 32000, "block_size": 8}
_BLOCK_TENSORS = ("fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight")

CAUSAL_FIELDS = {"DFlashDraftModel": "causal_head", "Qwen3DFlashDraftModel": "causal"}
"""Field of `dflash_config` that makes a DFlash head causal (a JetSpec head), by architecture: of
JetSpec and of NeMo Automodel."""

_FIXED: dict[str, Any] = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "next_layer_regular": True,
    "has_lm_head": True,
    "parallel_draft_step": 1,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "projector_type": "dflash",
}

NEXTN = DrafterKind(
    name="NEXTN",
    aliases=("mtp", "draft_mtp"),
    source=Source.MTP,
    form=Form.TREE,
    flags=frozenset({TOKEN_MAP}),
    files=HeadFormat(
        architectures=(),
        speculators="mtp",
        tensors=("mtp_layers.*",),
        fields=LAYER_FIELDS | {"num_nextn_predict_layers"},
        fixed=_FIXED,
        nested="eagle_config",
        layer_type="llama",
    ),
)
EAGLE = DrafterKind(
    name="EAGLE",
    source=Source.HEAD,
    form=Form.TREE,
    flags=frozenset({TOKEN_MAP}),
    files=HeadFormat(
        architectures=("LlamaForCausalLMEagle", "EagleLlamaForCausalLM"),
        speculators=None,
        tensors=("fc.weight",),
        without=("hidden_norm.weight",),
        fields=LAYER_FIELDS | {"bias", "qkv_bias", "eagle_config"},
        fixed={**_FIXED, "use_aux_hidden_state": False},
        nested="eagle_config",
        layer_type="llama",
    ),
    head=HeadTraits(title="EAGLE", embedding=EmbeddingInput.FC, has_bias=True),
)
EAGLE3 = DrafterKind(
    name="EAGLE3",
    aliases=("draft_eagle3",),
    source=Source.HEAD,
    form=Form.TREE,
    flags=frozenset({TOKEN_MAP, LAYER_CONVENTION}),
    files=HeadFormat(
        architectures=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
        speculators="eagle3",
        tensors=("fc.weight", "*.*hidden_norm.weight"),
        fields=LAYER_FIELDS
        | _AUX
        | {"bias", "qkv_bias", "draft_vocab_size", "num_aux_hidden_states", "eagle_config"}
        | {"fc_norm", "use_aux_norm", "norm_before_fc", "norm_before_residual", "norm_output"},
        fixed=_FIXED,
        defaults={"draft_vocab_size": 32000},
        nested="eagle_config",
        layer_type="llama",
    ),
    head=HeadTraits(
        title="EAGLE-3",
        embedding=EmbeddingInput.ATTENTION,
        aux_streams=eagle3_streams,
        is_independent=True,
    ),
)
ASSISTANT = DrafterKind(
    name="ASSISTANT",
    aliases=("frozen_kv_mtp",),
    source=Source.HEAD,
    form=Form.TREE,
    files=HeadFormat(
        architectures=("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"),
        speculators=None,
        tensors=("pre_projection.weight", "post_projection.weight"),
        fields=frozenset(
            {
                *("architectures", "model_type", "backbone_hidden_size", "text_config"),
                *("num_centroids", "centroid_intermediate_top_k", "use_ordered_embeddings"),
            }
        ),
        fixed={"tie_word_embeddings": True},
        nested="text_config",
        layer_type="gemma4_text",
    ),
    head=HeadTraits(
        title="Gemma 4 assistant",
        embedding=EmbeddingInput.FC,
        is_independent=True,
        has_draft_vocab=False,
        reads_target_kv=True,
    ),
)
_DFLASH_FILES = HeadFormat(
    architectures=("DFlashDraftModel", "Qwen3DFlashDraftModel"),
    speculators="dflash",
    tensors=_BLOCK_TENSORS,
    fields=_BLOCK | {*CAUSAL_FIELDS.values()},
    fixed=_FIXED,
    defaults=_BLOCK_DEFAULTS,
    nested="dflash_config",
    layer_type="qwen3",
)
_DFLASH_HEAD = HeadTraits(title="DFlash", embedding=EmbeddingInput.ROWS, aux_streams=block_streams)
DFLASH = DrafterKind(
    name="DFLASH",
    aliases=("draft_dflash",),
    source=Source.HEAD,
    form=Form.BLOCK,
    flags=frozenset({WINDOW, LAYER_CONVENTION}),
    files=_DFLASH_FILES,
    head=_DFLASH_HEAD,
)
DSPARK = replace(
    DFLASH,
    name="DSPARK",
    aliases=(),
    files=replace(
        _DFLASH_FILES,
        architectures=("DSparkDraftModel", "Qwen3DSparkModel"),
        speculators="dspark",
        tensors=(*_BLOCK_TENSORS, MARKOV_EMBEDDING),
        fields=_BLOCK
        | {"sample_from_anchor", "markov_rank", "markov_head_type"}
        | {"enable_confidence_head", "confidence_head_with_markov"},
        fixed={**_FIXED, "projector_type": "dspark"},
        defaults={**_BLOCK_DEFAULTS, "markov_rank": 256},
    ),
    head=replace(
        _DFLASH_HEAD,
        title="DSpark",
        parts={"markov_rank": "a Markov step"},
        read_parts=lambda raw, layer, size: (markov_of(raw),),
        token_table="Markov step",
        samples_from_anchor=True,
    ),
)
DFLASH2 = replace(
    DFLASH,
    name="DFLASH2",
    aliases=(),
    files=replace(
        _DFLASH_FILES,
        architectures=("DFlash2DraftModel",),
        speculators="dflash2",
        tensors=(*_BLOCK_TENSORS, SELECTOR_BEFORE),
        fields=_BLOCK
        | {"sample_from_anchor", "conv_kernel_size", "conv_group_size"}
        | {"selector_rank", "selector_top_k"},
        defaults={
            **_BLOCK_DEFAULTS,
            "sliding_window_non_causal": True,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 256,
            "selector_top_k": 16,
        },
    ),
    head=replace(
        _DFLASH_HEAD,
        title="DFlash2",
        parts={
            "conv_kernel_size": "a convolution",
            "selector_rank": "a selector of candidates",
        },
        read_parts=lambda raw, layer, size: (conv_of(raw, layer, size), selector_of(raw, layer)),
        token_table="selector",
        has_draft_vocab=False,
    ),
)
NAIVE_EAGLE = DrafterKind(
    name="NAIVE_EAGLE",
    source=Source.MTP_OR_HEAD,
    form=Form.TOKEN,
    flags=frozenset({TOKEN_MAP}),
    merges_ngrams=False,
)
STANDALONE = DrafterKind(
    name="STANDALONE",
    aliases=("draft_model", "draft_target", "draft_simple"),
    source=Source.MODEL,
    form=Form.TREE,
)
NGRAM = DrafterKind(
    name="NGRAM",
    aliases=("prompt_lookup", "prompt_lookup_decoding"),
    source=Source.NGRAMS,
    form=Form.NGRAM_TREE,
    merges_ngrams=False,
)

KINDS = {
    kind.name: kind
    for kind in (
        *(NEXTN, EAGLE, EAGLE3, ASSISTANT, DFLASH, DSPARK, DFLASH2),
        *(NAIVE_EAGLE, STANDALONE, NGRAM),
    )
}
"""Records by name."""

HEADS: dict[str, HeadTraits] = {
    name: kind.head for name, kind in KINDS.items() if kind.head is not None
}
"""Structures of draft heads by the name of their kind."""

FORMATS: dict[str, HeadFormat] = {
    kind.name: kind.files
    for kind in (*(KINDS[name] for name in HEADS), NEXTN)
    if kind.files is not None
}
"""Files of draft heads and MTP layers by the name of their kind.

A more specific kind follows the kinds that its tensors also match.
"""


BLOCK_KINDS = tuple(name for name, kind in KINDS.items() if kind.is_block)
"""Names of the kinds that fill a block in one pass."""
