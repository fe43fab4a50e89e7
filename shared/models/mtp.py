"""MTP layers of checkpoints: their number, and the names of their tensors.

The layer combines the embedding of the next token with a hidden state of the target and runs one
decoder layer. Embedding and LM head are the target's.
"""

from collections.abc import Collection
from dataclasses import dataclass

MTP = "mtp."
"""Prefix of the parameters of the layer."""

MTP_LAYER = f"{MTP}layer."
"""Prefix of the parameters of its decoder layer."""

MTP_FC = f"{MTP}fc"
"""Projection of the concatenated embedding and hidden state."""


@dataclass(frozen=True, kw_only=True)
class MtpFormat:
    """Storage of MTP layers in the checkpoints of a model family.

    Attributes:
      count_field: Field of config.json with the number of layers.
      prefix: Prefix of all tensors of a layer; `{number}` is its number after the decoder layers.
      layer: Prefix of its decoder layer after `prefix`.
      mlp: Prefix of the MLP of that layer, if it is stored as a layer of its own.
      fc: Projection of the concatenated embedding and hidden state.
      embedding_norm, hidden_norm: Norms of both inputs of `fc`.
      final_norm: Norm before the LM head.
      copies: Tensors of the target that the layer repeats.
    """

    count_field: str
    prefix: str
    layer: str
    fc: str
    embedding_norm: str
    hidden_norm: str
    final_norm: str
    mlp: str | None = None
    copies: tuple[str, ...] = ()


QWEN = MtpFormat(
    count_field="mtp_num_hidden_layers",
    prefix="mtp.",
    layer="layers.0",
    fc="fc.weight",
    embedding_norm="pre_fc_norm_embedding.weight",
    hidden_norm="pre_fc_norm_hidden.weight",
    final_norm="norm.weight",
)
DEEPSEEK = MtpFormat(
    count_field="num_nextn_predict_layers",
    prefix="layers.{number}.",
    layer="",
    fc="eh_proj.weight",
    embedding_norm="enorm.weight",
    hidden_norm="hnorm.weight",
    final_norm="shared_head.norm.weight",
    copies=("embed_tokens.weight", "shared_head.head.weight"),
)

NEMOTRON = MtpFormat(
    count_field="num_nextn_predict_layers",
    prefix="mtp.",
    layer="layers.0",
    mlp="layers.1",
    fc="layers.0.eh_proj.weight",
    embedding_norm="layers.0.enorm.weight",
    hidden_norm="layers.0.hnorm.weight",
    final_norm="layers.1.final_layernorm.weight",
)


@dataclass(frozen=True)
class MtpLayers:
    """MTP layers that a config.json names; the checkpoint may lack their tensors.

    The first layer drafts all tokens. Further layers are not loaded.

    Attributes:
      format: Names of their tensors.
      first: Number of the first layer, equal to the number of decoder layers.
      count: Number of layers, at least 1.
    """

    format: MtpFormat
    first: int
    count: int

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Prefixes of the tensors of each layer."""
        numbers = range(self.first, self.first + self.count)
        return tuple(self.format.prefix.format(number=number) for number in numbers)

    @property
    def mlp(self) -> str:
        """Prefix of the MLP of the decoder layer, without the dot at its end."""
        return self.layer if self.format.mlp is None else self.tensor(self.format.mlp)

    @property
    def layer(self) -> str:
        """Prefix of the decoder layer, without the dot at its end."""
        return self.tensor(self.format.layer).removesuffix(".")

    def tensor(self, name: str) -> str:
        """Returns the whole name of a tensor of the first layer."""
        return f"{self.prefixes[0]}{name}"

    def is_in(self, names: Collection[str]) -> bool:
        """Returns True if these tensor names contain the first layer."""
        return any(name.startswith(self.prefixes[0]) for name in names)

    def unused(self, with_mtp: bool) -> tuple[str, ...]:
        """Returns the prefixes of stored tensors that are not loaded.

        Args:
          with_mtp: True if the first layer is loaded.
        """
        if not with_mtp:
            return self.prefixes
        return (*map(self.tensor, self.format.copies), *self.prefixes[1:])
