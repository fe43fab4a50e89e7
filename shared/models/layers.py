"""Config of a decoder layer: its token mixer (attention or GDN) and its MLP or MoE block.

A mixer also specifies its cache arrays. A layer's parameters are named by its kinds:
`attention.inputs` of an attention layer, `gated_delta.inputs` of a GDN layer, `mlp.down` of a dense
MLP, `experts.down` of an MoE block (`shared.models.parameters`).
"""

from dataclasses import dataclass
from typing import ClassVar

from shared.models.cache_spec import CacheArraySpec, CacheUnit
from shared.models.rotary import RotaryConfig

CONV_WIDTH = 4


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Causal self-attention with grouped KV heads.

    Attributes:
      num_heads, num_kv_heads: Query heads, and key/value heads; each KV head is shared by a group
        of query heads.
      head_size: Size of each head.
      qk_norm: True if queries and keys are RMS-normalised before the rotation.
      norms_all_heads: True if that norm spans all heads of a token instead of each head.
      has_gate: True if the query projection contains an output gate per head (q rows, gate rows).
      input_bias, out_bias: True if the QKV projection, and the output projection, have a bias.
      rotary: Rotary embedding of queries and keys.
      query_scaling_beta: Factor of long-context query scaling, by the logarithm of the position in
        units of the original context; 0 for none.
      window: Sliding window in tokens, including the token itself; None for full attention.
      scale: Multiplier of attention scores; None for head_size ** -0.5.
    """

    kind: ClassVar[str] = "attention"

    num_heads: int
    num_kv_heads: int
    head_size: int
    qk_norm: bool
    norms_all_heads: bool
    has_gate: bool
    input_bias: bool
    out_bias: bool
    rotary: RotaryConfig
    query_scaling_beta: float
    window: int | None
    scale: float | None

    def __post_init__(self) -> None:
        names = "num_attention_heads", "num_key_value_heads"
        _check_groups(names, self.num_heads, self.num_kv_heads)

    @property
    def query_size(self) -> int:
        """Elements in the queries of a token."""
        return self.num_heads * self.head_size

    @property
    def key_size(self) -> int:
        """Elements in the keys of a token, and in its values."""
        return self.num_kv_heads * self.head_size

    @property
    def kept(self) -> tuple[CacheArraySpec, CacheArraySpec]:
        """Cache arrays: keys and values per position."""
        shape = (self.num_kv_heads, self.head_size)
        keys, values = (
            CacheArraySpec(name, CacheUnit.POSITION, shape, heads=0) for name in ("keys", "values")
        )
        return keys, values


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig:
    """Gated DeltaNet (GDN); value head h uses key head h // (value heads / key heads)."""

    kind: ClassVar[str] = "gated_delta"

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    conv_width: int = CONV_WIDTH

    def __post_init__(self) -> None:
        names = "linear_num_value_heads", "linear_num_key_heads"
        _check_groups(names, self.num_value_heads, self.num_key_heads)

    @property
    def channels(self) -> int:
        """Convolution channels: all q heads, then all k heads, then all v heads."""
        return 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size

    @property
    def kept(self) -> tuple[CacheArraySpec, CacheArraySpec]:
        """Cache arrays: the recurrent state, and the latest convolution inputs, per slot."""
        state = (self.num_value_heads, self.key_size, self.value_size)
        window = (self.conv_width - 1, self.channels)
        return (
            CacheArraySpec("recurrent", CacheUnit.SLOT, state, heads=0, float32=True),
            CacheArraySpec("window", CacheUnit.SLOT, window, heads=1),
        )


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Gated MLP: silu(gate) * up with `intermediate` columns, then a projection to the hidden size.

    Attributes:
      intermediate: Width of gate and up.
      bias: True if all three projections have a bias.
    """

    kind: ClassVar[str] = "mlp"

    intermediate: int
    bias: bool


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts (MoE): a router selects top-k gated MLPs for each token.

    Attributes:
      num_experts: Routed experts.
      top_k: Top-k: experts per token.
      intermediate: Width of an expert.
      shared_intermediate: Width of the shared expert, which every token uses; 0 for none.
      shared_is_gated: True if the shared expert's output is multiplied by a gate per token.
      scores: Score function of the router: "softmax" over all experts, or "sigmoid" of each logit.
      has_score_bias: True if a bias is added to the scores for selection but not for the weights.
      num_groups, num_chosen_groups: Groups of neighbouring experts; experts are selected within the
        best groups.
      is_renormalised: True if the weights of selected experts are divided by their sum.
      routed_factor: Final multiplier of the weights.

    Raises:
      ValueError: The numbers are inconsistent.
    """

    kind: ClassVar[str] = "experts"

    num_experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int
    shared_is_gated: bool
    scores: str
    has_score_bias: bool
    num_groups: int
    num_chosen_groups: int
    is_renormalised: bool
    routed_factor: float

    def __post_init__(self) -> None:
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(f"scores of experts must be softmax or sigmoid, got {self.scores!r}")
        if self.scores == "softmax" and (self.has_score_bias or self.num_groups > 1):
            raise ValueError("softmax scores are not supported with score biases or expert groups")
        names = "the number of experts", "n_group"
        _check_groups(names, self.num_experts, self.num_groups)
        if not 1 <= self.num_chosen_groups <= self.num_groups:
            raise ValueError(
                f"topk_group must be 1 to {self.num_groups}, got {self.num_chosen_groups}"
            )
        most = self.group_size * self.num_chosen_groups
        if not 1 <= self.top_k <= most:
            raise ValueError(f"num_experts_per_tok must be 1 to {most}, got {self.top_k}")

    @property
    def group_size(self) -> int:
        """Experts of a group."""
        return self.num_experts // self.num_groups

    @property
    def shares_stacks(self) -> bool:
        """True if the shared expert has the width of the others and is the last entry of their
        stack.
        """
        return self.shared_intermediate == self.intermediate

    @property
    def num_stacked(self) -> int:
        """Experts in one stack."""
        return self.num_experts + self.shares_stacks

    @property
    def num_scored(self) -> int:
        """Router outputs: a logit for each expert, and one for the shared expert's gate."""
        return self.num_experts + self.shared_is_gated


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """A decoder layer."""

    mixer: AttentionConfig | GatedDeltaConfig
    mlp: MLPConfig | MoEConfig


def _check_groups(names: tuple[str, str], heads: int, groups: int) -> None:
    """Checks that heads divide evenly into groups; `names` are the fields in the message."""
    if heads % groups:
        raise ValueError(f"{names[0]} ({heads}) must be a multiple of {names[1]} ({groups})")
