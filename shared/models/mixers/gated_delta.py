"""Gated DeltaNet (GDN): linear attention with a recurrent state, behind a short convolution."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from shared.models.cache_spec import CacheArraySpec, CacheUnit
from shared.models.head_groups import check_groups
from shared.models.parameter import Parameter
from shared.models.sharded_range import ShardedRange, section_ranges
from shared.models.stacks import StackSettings, norms_of, stack

CONV_WIDTH = 4


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig:
    """Gated DeltaNet (GDN); value head h uses key head h // (value heads / key heads).

    Attributes:
      num_key_heads, num_value_heads: Heads of queries and keys, and heads of values.
      key_size, value_size: Size of each head.
      has_fused_inputs: True if a checkpoint has two input projections that are stored by key head:
        q, k, v and the gate z, and the rates b and a.
      conv_width: Width of the convolution.
    """

    kind: ClassVar[str] = "gated_delta"
    window: ClassVar[None] = None
    """No sliding window: the recurrent state covers all positions."""
    has_delta: ClassVar[bool] = True
    """The update of the state replaces the value stored under a key, instead of adding to it."""
    begins_with_gate: ClassVar[bool] = False
    """The rows of the gate z follow those of the convolution channels in the input projection."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    has_fused_inputs: bool = False
    conv_width: int = CONV_WIDTH

    def __post_init__(self) -> None:
        names = "linear_num_value_heads", "linear_num_key_heads"
        check_groups(names, self.num_value_heads, self.num_key_heads)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Heads, keys and values of the recurrent state."""
        return self.num_value_heads, self.key_size, self.value_size

    @property
    def values(self) -> int:
        """Output columns of all heads."""
        return self.num_value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Convolution channels: all q heads, then all k heads, then all v heads."""
        return 2 * self.num_key_heads * self.key_size + self.values

    @property
    def cache_specs(self) -> tuple[CacheArraySpec, CacheArraySpec]:
        """Cache arrays: the recurrent state, and the latest convolution inputs, per slot."""
        window = (self.conv_width - 1, self.channels)
        return (
            CacheArraySpec("recurrent", CacheUnit.SLOT, self.state_shape, heads=0, float32=True),
            CacheArraySpec(
                "window", CacheUnit.SLOT, window, heads=1, ranges=self._channel_sections
            ),
        )

    @property
    def sizes(self) -> Self:
        """The config itself: all layers of a group are equal."""
        return self

    @property
    def divided(self) -> Iterator[tuple[str, int]]:
        """Sizes that must be multiples of the number of TP ranks, with their config.json fields."""
        yield "linear_num_key_heads", self.num_key_heads

    def local(self, count: int) -> Self:
        """Returns the config of one of `count` TP ranks."""
        return replace(
            self,
            num_key_heads=self.num_key_heads // count,
            num_value_heads=self.num_value_heads // count,
        )

    def parameters(
        self, prefix: str, layers: Sequence[str], settings: StackSettings
    ) -> list[Parameter]:
        """Returns the stacks of some layers; see `shared.models.mixers.attention`."""
        hidden, heads = settings.hidden, self.num_value_heads
        conv = {"linear_attn.conv1d.weight": (self.channels, 1, self.conv_width)}
        channels, by_heads = self._channel_sections, ShardedRange(heads)
        by_inputs = (*channels, channels[-1], by_heads, by_heads)
        by_head = {"sections": (by_heads,), "axis": -1, "float32": True}
        wide = (self.channels, self.conv_width)
        out = {"linear_attn.out_proj.weight": (hidden, self.values)}
        return [
            replace(self._inputs(f"{prefix}inputs", layers, hidden), sections=by_inputs),
            stack(f"{prefix}conv", layers, conv, shape=wide, sections=channels),
            stack(f"{prefix}a_log", layers, {"linear_attn.A_log": (heads,)}, **by_head),
            stack(f"{prefix}dt_bias", layers, {"linear_attn.dt_bias": (heads,)}, **by_head),
            norms_of(f"{prefix}norm", layers, "linear_attn.norm.weight", self.value_size, 0.0),
            stack(f"{prefix}out", layers, out, sections=(ShardedRange(hidden),)),
        ]

    def _inputs(self, name: str, layers: Sequence[str], hidden: int) -> Parameter:
        """Returns the fused input projections: q, k, v, z, b and a, each for all heads."""
        keys, heads = self.num_key_heads, self.num_value_heads
        values, each = heads * self.value_size, heads // keys
        if not self.has_fused_inputs:
            rows = {"qkv": self.channels, "z": values, "b": heads, "a": heads}
            return stack(
                name, layers, {_input(part): (count, hidden) for part, count in rows.items()}
            )
        wide = {"qkvz": self.channels + values, "ba": 2 * heads}
        inputs = {_input(part): (count, hidden) for part, count in wide.items()}
        by_head = (self.key_size, self.key_size, *[each * self.value_size] * 2)
        order = {
            _input("qkvz"): section_ranges(by_head, keys),
            _input("ba"): section_ranges((each, each), keys),
        }
        return stack(name, layers, inputs, order=order)

    @property
    def _channel_sections(self) -> tuple[ShardedRange, ...]:
        """TP sections of the convolution channels: all q heads, k heads, v heads."""
        keys = ShardedRange(self.num_key_heads * self.key_size, self.key_size)
        return keys, keys, ShardedRange(self.values, self.value_size)


def _input(part: str) -> str:
    """Returns the name of an input projection in a checkpoint."""
    return f"linear_attn.in_proj_{part}.weight"
