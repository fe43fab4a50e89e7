"""The differences between the layers of model families, as values."""

from dataclasses import dataclass
from enum import Enum

from shared.models.config_classes import ConfigClass
from shared.models.experts import Routing


class Slides(Enum):
    """Fields that switch sliding windows on in a family, and the layers concerned."""

    NEVER = "nothing; it is refused where it is asked for"
    BY_SIZE = "`sliding_window` alone, in all layers"
    BY_TYPES = "`layer_types`, or three of four layers without it"
    WHOLE_BY_FLAG = "`use_sliding_window`, in all layers"
    BY_FLAG = "`use_sliding_window`, in those that `layer_types` or `max_window_layers` names"


@dataclass(frozen=True)
class Family:
    """Properties that distinguish one family's layers from another's.

    Attributes:
      name: What sentences to users call it.
      of: The fields of its config.json, with their defaults and other spellings.
      qk_norm: See `AttentionConfig`.
      is_hybrid: Has gated-delta layers, gates, zero-centred norms, and maybe an MTP layer.
      drafts_trees, stores_joined: See `ModelConfig`.
      input_bias: Queries, keys and values have biases that no field names.
      biases: Fields that switch other biases on.
      slides: What switches windows on.
      has_factors: Multiplies embeddings, scores, outputs and logits by fields of its own.
      skips_rotation: Some layers do not turn with positions.
      grows_queries: Queries grow with their position where the rotary settings say so.
      norms_behind: See `ModelConfig`; queries and keys are normed over all heads.
      scales_full_layers: Layers that slide turn without what `rope_scaling` says.
      routing: How its experts are found and chosen; None: it has none.
      norms_by_flag: Queries and keys are normed where `use_qk_norm` says it.
      plain_out: The outputs of the heads have no bias, whatever the inputs have.
      sees: A checkpoint may have a vision tower.
    """

    name: str
    of: ConfigClass
    qk_norm: bool = False
    is_hybrid: bool = False
    drafts_trees: bool = False
    stores_joined: bool = False
    input_bias: bool = False
    biases: tuple[str, ...] = ()
    slides: Slides = Slides.NEVER
    has_factors: bool = False
    skips_rotation: bool = False
    grows_queries: bool = False
    norms_behind: bool = False
    scales_full_layers: bool = False
    routing: Routing | None = None
    norms_by_flag: bool = False
    plain_out: bool = False
    sees: bool = False


BIASES = ("attention_bias", "mlp_bias")
"""Fields that switch biases on."""
