"""Causal self-attention with grouped KV heads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from shared.models.cache_spec import CacheArraySpec, CacheUnit
from shared.models.head_groups import check_groups
from shared.models.parameter import Parameter
from shared.models.rotary import RotaryConfig
from shared.models.sharded_range import ShardedRange
from shared.models.stacks import StackSettings, bias, norms_of, stack


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
      has_kv: False if the layer has queries only and reads the KV of another layer (KV sharing);
        see `LayerConfig`.
      has_sinks: True if each query head has an attention sink: a learned logit, without a value,
        in the softmax of each row.
      value_norm: True if each value head is RMS-normalised, without a learned scale.
      keys_as_values: True if the values are the keys before their norm and rotation (K = V).
      out_factor: Multiplier of the output of the heads.
      softcap: Soft cap of attention scores: capped * tanh(score / capped); None for none.
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
    has_kv: bool
    has_sinks: bool
    value_norm: bool
    keys_as_values: bool
    softcap: float | None
    out_factor: float = 1.0

    def __post_init__(self) -> None:
        names = "num_attention_heads", "num_key_value_heads"
        check_groups(names, self.num_heads, self.num_kv_heads)
        if self.keys_as_values and not self.value_norm:
            raise ValueError("keys_as_values requires value_norm, which separates both")

    @property
    def query_size(self) -> int:
        """Elements in the queries of a token."""
        return self.num_heads * self.head_size

    @property
    def key_size(self) -> int:
        """Elements in the keys of a token, and in its values."""
        return self.num_kv_heads * self.head_size

    @property
    def products_per_position(self) -> int:
        """Multiplications of a token's queries with one position: keys, and values."""
        return 2 * self.query_size

    @property
    def cache_specs(self) -> tuple[CacheArraySpec, ...]:
        """Cache arrays: keys and values per position; none without KV of its own."""
        shape = (self.num_kv_heads, self.head_size)
        names = ("keys", "values") if self.has_kv else ()
        return tuple(CacheArraySpec(name, CacheUnit.POSITION, shape, heads=0) for name in names)

    @property
    def with_kv(self) -> Self:
        """The config with KV of its own; a layer that it reads has the same cache arrays."""
        return replace(self, has_kv=True)

    @property
    def sizes(self) -> Self:
        """The config without the settings that may differ within a group."""
        return replace(self, rotary=RotaryConfig(theta=1.0, width=0), window=None)

    @property
    def divided(self) -> Iterator[tuple[str, int]]:
        """Sizes that must be multiples of the number of TP ranks, with their config.json fields."""
        yield "num_attention_heads", self.num_heads

    def local(self, count: int) -> Self:
        """Returns the config of one of `count` TP ranks.

        KV heads fewer than ranks are replicated, each copy with some of its queries.

        Raises:
          ValueError: The KV heads are neither a multiple nor a divisor of `count`.
        """
        kv_heads = self.num_kv_heads
        if max(kv_heads, count) % min(kv_heads, count):
            raise ValueError(
                f"num_key_value_heads ({kv_heads}) must be a multiple or a divisor of the number "
                f"of ranks ({count})"
            )
        return replace(
            self, num_heads=self.num_heads // count, num_kv_heads=max(1, kv_heads // count)
        )

    def parameters(
        self, prefix: str, layers: Sequence[str], settings: StackSettings
    ) -> list[Parameter]:
        """Returns the stacks of some layers; with an output gate the q rows are [q | gate] per
        head.

        Args:
          prefix: Prefix of the parameter names.
          layers: Prefixes of the layers in the checkpoint.
          settings: Settings of the model.
        """
        inputs, hidden, keys = settings.inputs, settings.hidden, self.key_size
        qkv = {
            "self_attn.q_proj.weight": (self.query_size * (2 if self.has_gate else 1), inputs),
            **{f"self_attn.{x}_proj.weight": (keys, inputs) for x in self._projected},
        }
        if settings.fused_qkv:
            qkv = {"self_attn.qkv_proj.weight": (sum(rows for rows, _ in qkv.values()), inputs)}
        out = {"self_attn.o_proj.weight": (hidden, self.query_size)}
        by_heads, by_columns = self._qkv_sections, (ShardedRange(hidden),)
        tensors = [
            stack(f"{prefix}inputs", layers, qkv, sections=by_heads),
            stack(f"{prefix}out", layers, out, sections=by_columns),
        ]
        if self.input_bias:
            tensors.append(bias(f"{prefix}inputs", layers, qkv, by_heads))
        if self.out_bias:
            tensors.append(bias(f"{prefix}out", layers, out, by_columns))
        if self.has_sinks:
            sinks = {"self_attn.sinks": (self.num_heads,)}
            cut = (ShardedRange(self.num_heads),)
            name = f"{prefix}sinks"
            tensors.append(stack(name, layers, sinks, float32=True, sections=cut, axis=-1))
        return tensors + self._norms(prefix, layers, settings.norm_centre)

    def _norms(self, prefix: str, layers: Sequence[str], centre: float) -> list[Parameter]:
        if not self.qk_norm:
            return []
        sizes = {"q": self.head_size, "k": self.head_size}
        if self.norms_all_heads:
            sizes = {"q": self.query_size, "k": self.key_size}
        return [
            norms_of(f"{prefix}{x}_norm", layers, f"self_attn.{x}_norm.weight", width, centre)
            for x, width in sizes.items()
            if self.has_kv or x == "q"
        ]

    @property
    def _projected(self) -> str:
        """Letters of the projections beside the queries'."""
        return ("k" if self.keys_as_values else "kv") if self.has_kv else ""

    @property
    def _qkv_sections(self) -> tuple[ShardedRange, ...]:
        query = self.head_size * (2 if self.has_gate else 1)
        queries = ShardedRange(query * self.num_heads, query)
        keys = ShardedRange(self.key_size, self.head_size, repeats=True)
        return (queries, *[keys] * len(self._projected))
