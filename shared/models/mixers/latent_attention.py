"""Multi-head latent attention (MLA): keys and values are projections of one latent per position.

Layers run in absorbed form: queries are multiplied with the key rows of `kv_b_proj`, so that the
attention is multi-query attention over the cached latents.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from shared.models.cache_spec import CacheArraySpec, CacheUnit
from shared.models.parameter import Parameter
from shared.models.rotary import RotaryConfig
from shared.models.sharded_range import ShardedRange
from shared.models.stacks import StackSettings, bias, norms_of, stack


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Multi-head latent attention (MLA).

    Attributes:
      num_heads: Query heads.
      nope_size, rope_size: Dimensions of a query and of a key without and with rotary embedding.
      value_size: Size of a head's values.
      query_rank: Size of the latent that queries are projected from; None if they are projected
        from the input of the layer.
      latent_rank: Size of the latent that keys and values are projected from.
      has_bias: True if the projections to latents, and the output projection, have a bias.
      latent_eps: Epsilon of the RMS norms of latents.
      rotary: Rotary embedding of the rope part.
      scale: Multiplier of attention scores.
    """

    kind: ClassVar[str] = "latent_attention"
    window: ClassVar[None] = None
    """No sliding window."""
    num_kv_heads: ClassVar[int] = 1
    """Key heads in absorbed form: the cached row is the key of all query heads."""

    num_heads: int
    nope_size: int
    rope_size: int
    value_size: int
    query_rank: int | None
    latent_rank: int
    has_bias: bool
    latent_eps: float
    rotary: RotaryConfig
    scale: float

    @property
    def head_size(self) -> int:
        """Size of queries and keys in absorbed form, which is that of a cached row."""
        return self.latent_rank + self.rope_size

    @property
    def head_rows(self) -> int:
        """Rows of `kv_b` of a head: key rows, then value rows."""
        return self.nope_size + self.value_size

    @property
    def query_size(self) -> int:
        """Elements in the queries of a token in absorbed form."""
        return self.num_heads * self.head_size

    @property
    def products_per_position(self) -> int:
        """Multiplications of a token's queries with one position: keys, and values."""
        return self.num_heads * (self.head_size + self.latent_rank)

    @property
    def key_size(self) -> int:
        """Elements in the keys of a token in absorbed form; values are a part of them."""
        return self.head_size

    @property
    def cache_specs(self) -> tuple[CacheArraySpec]:
        """Cache array: the normed latent and the rotated rope key per position."""
        return (CacheArraySpec("latent", CacheUnit.POSITION, (1, self.head_size), heads=None),)

    @property
    def with_kv(self) -> Self:
        """The config itself: every layer has a cache of its own."""
        return self

    @property
    def sizes(self) -> Self:
        """The config itself: all layers of a group are equal."""
        return self

    @property
    def divided(self) -> Iterator[tuple[str, int]]:
        """Sizes that must be multiples of the number of TP ranks, with their config.json fields."""
        yield "num_attention_heads", self.num_heads

    def local(self, count: int) -> Self:
        """Returns the config of one of `count` TP ranks; latents are replicated."""
        return replace(self, num_heads=self.num_heads // count)

    def parameters(
        self, prefix: str, layers: Sequence[str], settings: StackSettings
    ) -> list[Parameter]:
        """Returns the stacks of some layers.

        `kv_b` has the rows of each head together, keys first.

        Args:
          prefix: Prefix of the parameter names.
          layers: Prefixes of the layers in the checkpoint.
          settings: Settings of the model.
        """
        hidden, keys, values = settings.hidden, self.nope_size + self.rope_size, self.value_size
        inputs, cut = self._inputs(settings.inputs)
        heads = ShardedRange(self.num_heads * self.head_rows, self.head_rows)
        kv_b = {"self_attn.kv_b_proj.weight": (heads.size, self.latent_rank)}
        out = {"self_attn.o_proj.weight": (hidden, self.num_heads * values)}
        columns, centre = (ShardedRange(hidden),), settings.norm_centre
        stored = stack(f"{prefix}kv_b", layers, kv_b, sections=(heads,))
        tensors = [
            stack(f"{prefix}inputs", layers, inputs, sections=cut),
            replace(stored, is_dequantized=True),
            stack(f"{prefix}out", layers, out, sections=columns),
            self._norm(f"{prefix}latent_norm", layers, "kv_a", self.latent_rank, centre),
        ]
        if self.has_bias:
            tensors.append(bias(f"{prefix}inputs", layers, inputs, cut))
            tensors.append(bias(f"{prefix}out", layers, out, columns))
        if self.query_rank is not None:
            rows = ShardedRange(self.num_heads * keys, keys)
            queries = {"self_attn.q_b_proj.weight": (rows.size, self.query_rank)}
            tensors.append(stack(f"{prefix}queries", layers, queries, sections=(rows,)))
            tensors.append(
                self._norm(f"{prefix}query_norm", layers, "q_a", self.query_rank, centre)
            )
        return tensors

    def _inputs(self, width: int) -> tuple[Mapping[str, tuple[int, ...]], tuple[ShardedRange, ...]]:
        """Returns the tensors of the input projection, and its TP sections: none if all ranks have
        the whole of it.
        """
        latent = {"self_attn.kv_a_proj_with_mqa.weight": (self.head_size, width)}
        if self.query_rank is not None:
            return {"self_attn.q_a_proj.weight": (self.query_rank, width), **latent}, ()
        size = self.nope_size + self.rope_size
        queries = ShardedRange(self.num_heads * size, size)
        replicated = ShardedRange(self.head_size, self.head_size, repeats=True)
        weights = {"self_attn.q_proj.weight": (queries.size, width), **latent}
        return weights, (queries, replicated)

    @staticmethod
    def _norm(name: str, layers: Sequence[str], part: str, width: int, centre: float) -> Parameter:
        return norms_of(name, layers, f"self_attn.{part}_layernorm.weight", width, centre)
