"""Config class of transformers: field defaults and aliases."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.models.config_fields import CONFIG, Json

NULLABLE = {"eos_token_id", "num_key_value_heads", "q_lora_rank", "sliding_window"}
"""Fields whose null has its own meaning, different from the class default."""

STRUCTURE = {
    *("decoder_sparse_step", "first_k_dense_replace", "full_attention_interval"),
    *("max_window_layers", "no_rope_layer_interval", "num_nextn_predict_layers"),
    *("in_channels", "n_group", "topk_group", "n_routed_experts", "n_shared_experts"),
    *("num_experts", "num_local_experts"),
}
"""Numeric fields whose null equals an absent field; null in any other numeric field is an error."""


@dataclass(frozen=True, eq=False)
class ConfigClass:
    """A config class of transformers, limited to the fields that are read.

    Attributes:
      name: Name of the class.
      fields: Default of each field that the class declares.
      aliases: Other names of fields, each with its name in `fields`.
      theta: Default base of the rotary frequencies.
      local_theta: The same of sliding-window layers, if those have another one: the default of
        `rope_local_base_freq`; None otherwise.
      rotated: Default fraction of a head that is rotated.
      sections: Default M-RoPE sections: rotated pairs by time, row and column of an image.
      extras: Default of each field that checkpoints contain and the class does not declare.
      names: Fields with another name than in other classes, each with that name.
    """

    name: str
    fields: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)
    theta: float = 10000.0
    local_theta: float | None = None
    rotated: float = 1.0
    sections: list[int] | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def defaults(self) -> dict[str, Any]:
        """Default of each field."""
        return {**self.extras, **self.fields}

    def completed(self, stated: Json, place: str = CONFIG) -> dict[str, Any]:
        """Returns the stated fields under their canonical names, with defaults for absent ones.

        Raises:
          ValueError: Two spellings of a field have different values.
        """
        defaults, named = self.defaults, self._renamed(stated, place)
        absent = {name for name, value in named.items() if value is None and self._fills(name)}
        found = defaults | {name: value for name, value in named.items() if name not in absent}
        return {self.names.get(name, name): value for name, value in found.items()}

    def _fills(self, name: str) -> bool:
        """Returns True if null in the field equals an absent field."""
        default = self.defaults.get(name)
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        is_filled = name in STRUCTURE or not is_number
        return name not in NULLABLE and default is not None and is_filled

    def _renamed(self, stated: Json, place: str) -> dict[str, Any]:
        named = {name: value for name, value in stated.items() if name not in self.aliases}
        for alias, name in self.aliases.items():
            if (value := stated.get(alias)) is None:
                continue
            if named.get(name) not in (None, value):
                raise ValueError(
                    f"{alias} and {name} in {place} are spellings of one field and must be "
                    f"equal, got {value!r:.60} and {named[name]!r:.60}; remove one of them"
                )
            if named.get(name) is None:
                named[name] = value
        return named


def declared(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: tuple[int, int | None]
) -> dict[str, Any]:
    """Returns the defaults of the fields that all classes declare, in the order of their files."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_parameters": None,
        "eos_token_id": None,
        "rms_norm_eps": 1e-6,
    }


BIASES = {"attention_bias": False, "mlp_bias": False}
"""Fields that enable biases."""
