"""Gated DeltaNet (GDN): linear attention with a recurrent state, behind a short convolution."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from shared.models.cache_spec import CacheArraySpec, CacheUnit
from shared.models.head_groups import check_groups
from shared.models.parameter import Parameter
from shared.models.sharded_range import ShardedRange
from shared.models.stacks import StackSettings, norms_of, stack

CONV_WIDTH = 4


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig:
    """Gated DeltaNet (GDN); value head h uses key head h // (value heads / key heads)."""

    kind: ClassVar[str] = "gated_delta"
    window: ClassVar[None] = None
    """No sliding window: the recurrent state covers all positions."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    conv_width: int = CONV_WIDTH

    def __post_init__(self) -> None:
        names = "linear_num_value_heads", "linear_num_key_heads"
        check_groups(names, self.num_value_heads, self.num_key_heads)

    @property
    def channels(self) -> int:
        """Convolution channels: all q heads, then all k heads, then all v heads."""
        return 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size

    @property
    def cache_specs(self) -> tuple[CacheArraySpec, CacheArraySpec]:
        """Cache arrays: the recurrent state, and the latest convolution inputs, per slot."""
        state = (self.num_value_heads, self.key_size, self.value_size)
        window = (self.conv_width - 1, self.channels)
        ranges = tuple(section.size for section in self._channel_sections)
        return (
            CacheArraySpec("recurrent", CacheUnit.SLOT, state, heads=0, float32=True),
            CacheArraySpec("window", CacheUnit.SLOT, window, heads=1, ranges=ranges),
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
        values = heads * self.value_size
        inputs = {
            "linear_attn.in_proj_qkv.weight": (self.channels, hidden),
            "linear_attn.in_proj_z.weight": (values, hidden),
            "linear_attn.in_proj_b.weight": (heads, hidden),
            "linear_attn.in_proj_a.weight": (heads, hidden),
        }
        conv = {"linear_attn.conv1d.weight": (self.channels, 1, self.conv_width)}
        channels, by_heads = self._channel_sections, ShardedRange(heads)
        by_inputs = (*channels, channels[-1], by_heads, by_heads)
        by_head = {"sections": (by_heads,), "axis": -1, "float32": True}
        wide = (self.channels, self.conv_width)
        out = {"linear_attn.out_proj.weight": (hidden, values)}
        return [
            stack(f"{prefix}inputs", layers, inputs, sections=by_inputs),
            stack(f"{prefix}conv", layers, conv, shape=wide, sections=channels),
            stack(f"{prefix}a_log", layers, {"linear_attn.A_log": (heads,)}, **by_head),
            stack(f"{prefix}dt_bias", layers, {"linear_attn.dt_bias": (heads,)}, **by_head),
            norms_of(f"{prefix}norm", layers, "linear_attn.norm.weight", self.value_size, 0.0),
            stack(f"{prefix}out", layers, out, sections=(ShardedRange(hidden),)),
        ]

    @property
    def _channel_sections(self) -> tuple[ShardedRange, ...]:
        """TP sections of the convolution channels: all q heads, k heads, v heads."""
        keys = ShardedRange(self.num_key_heads * self.key_size, self.key_size)
        return keys, keys, ShardedRange(self.num_value_heads * self.value_size, self.value_size)
