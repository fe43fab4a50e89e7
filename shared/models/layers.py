"""What a decoder layer is: what mixes its tokens, and what feeds them forward, as values.

A mixer also says what it keeps between steps.

A layer's parameters have the names of its kinds: `attention.inputs` is of an attention layer,
`gated_delta.inputs` of a gated-delta layer, `mlp.down` of a dense one, `experts.down` of one with a
mixture of experts (`shared.models.parameters`).
"""

from dataclasses import dataclass
from typing import ClassVar

from shared.models.kept import Per, Plane
from shared.models.rotary import RotaryConfig

CONV_WIDTH = 4


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention over the keys and values of all tokens before.

    Attributes:
      num_heads, num_kv_heads: Of queries, and of keys and values; whole groups of heads share one.
      head_size: Of each of them.
      qk_norm: Queries and keys get an RMS norm before the rotation.
      norms_all_heads: It is one over all heads of a row, and not one of each head.
      has_gate: The query projection carries an output gate per head (q rows, gate rows).
      input_bias, out_bias: The projections of queries, keys and values, and that of the heads'
        outputs, add a bias.
      rotary: How queries and keys turn with their position.
      query_growth: By how much queries grow with the logarithm of their position, counted in the
        rotation's original context; 0: they do not.
      window: A row sees so many positions, itself the last of them; None: all before it.
      scale: What the scores are multiplied by; None: the root of 1 / head_size.
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
    query_growth: float
    window: int | None
    scale: float | None

    def __post_init__(self) -> None:
        names = "num_attention_heads", "num_key_value_heads"
        _check_groups(names, self.num_heads, self.num_kv_heads)

    @property
    def query_size(self) -> int:
        """Numbers in the queries of a row."""
        return self.num_heads * self.head_size

    @property
    def key_size(self) -> int:
        """Numbers in the keys of a row, and as many in its values."""
        return self.num_kv_heads * self.head_size

    @property
    def kept(self) -> tuple[Plane, Plane]:
        """The keys and the values of each position."""
        shape = (self.num_kv_heads, self.head_size)
        keys, values = (Plane(name, Per.POSITION, shape, heads=0) for name in ("keys", "values"))
        return keys, values


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig:
    """A gated-delta net; value head h reads key head h // (value / key heads)."""

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
    def kept(self) -> tuple[Plane, Plane]:
        """The recurrent state, and the inputs that the convolution still reads, of each slot."""
        state = (self.num_value_heads, self.key_size, self.value_size)
        window = (self.conv_width - 1, self.channels)
        return (
            Plane("recurrent", Per.SLOT, state, heads=0, float32=True),
            Plane("window", Per.SLOT, window, heads=1),
        )


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """A gated MLP: of `intermediate` columns, silu(gate) * up, and back to the hidden size.

    Attributes:
      bias: All three projections add a bias.
    """

    kind: ClassVar[str] = "mlp"

    intermediate: int
    bias: bool


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts: gated MLPs, of which a router chooses some for each row.

    Attributes:
      num_experts: Among which the router chooses.
      num_chosen: For each row.
      intermediate: Columns of an expert.
      shared_intermediate: Columns of the expert that every row has besides; 0: there is none.
      shared_is_gated: What that one gives is multiplied by a share of its own for each row.
      scores: What the router's logits become: "softmax" over all experts, or a "sigmoid" of each.
      has_score_bias: The experts are chosen by their scores and a bias, which weighs none of them.
      num_groups, num_chosen_groups: Experts are chosen within the best groups of neighbours.
      is_renormalised: The weights of the chosen experts are divided by their sum.
      routed_factor: What the weights are multiplied by in the end.

    Raises:
      ValueError: The numbers do not fit each other; one sentence.
    """

    kind: ClassVar[str] = "experts"

    num_experts: int
    num_chosen: int
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
            raise ValueError("experts that a softmax scores have no biases and no groups")
        names = "the number of experts", "n_group"
        _check_groups(names, self.num_experts, self.num_groups)
        if not 1 <= self.num_chosen_groups <= self.num_groups:
            raise ValueError(
                f"topk_group must be 1 to {self.num_groups}, got {self.num_chosen_groups}"
            )
        most = self.group_size * self.num_chosen_groups
        if not 1 <= self.num_chosen <= most:
            raise ValueError(f"num_experts_per_tok must be 1 to {most}, got {self.num_chosen}")

    @property
    def group_size(self) -> int:
        """Experts of a group."""
        return self.num_experts // self.num_groups

    @property
    def shares_stacks(self) -> bool:
        """The shared expert is as wide as the others, and stands behind them in their stacks."""
        return self.shared_intermediate == self.intermediate

    @property
    def num_stacked(self) -> int:
        """Experts that stand in one stack."""
        return self.num_experts + self.shares_stacks

    @property
    def num_scored(self) -> int:
        """Outputs of the router: a logit for each expert, and that of the shared one's gate."""
        return self.num_experts + self.shared_is_gated


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """A decoder layer."""

    mixer: AttentionConfig | GatedDeltaConfig
    feed: DenseConfig | ExpertsConfig


def _check_groups(names: tuple[str, str], heads: int, groups: int) -> None:
    """Refuses heads that do not share the others in whole groups, by the fields' names."""
    if heads % groups:
        raise ValueError(f"{names[0]} ({heads}) must be a multiple of {names[1]} ({groups})")
