"""Mamba2 (state-space duality): a recurrent state with scalar decay, behind a short convolution."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, Self

from shared.models.cache_spec import CacheArraySpec, CacheUnit
from shared.models.head_groups import check_groups
from shared.models.mixers.gated_delta import CONV_WIDTH
from shared.models.parameter import Parameter
from shared.models.sharded_range import ShardedRange
from shared.models.stacks import StackSettings, bias, norms_of, stack


class OutputNorm(Enum):
    """Norm of the output of a Mamba2 layer, which the gate silu(z) multiplies."""

    NONE = "no norm: the gate alone"
    AFTER_GATE = "RMS norm of the gated output"
    BEFORE_GATE = "RMS norm, then the gate"


@dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    """Mamba2 layer; head h reads B and C of group h // (heads / groups).

    The input projection has the rows of the gate z, of the convolution channels (x of all heads, B
    of all groups, C of all groups), and of the time step of each head.

    Attributes:
      num_heads, head_size: Heads, and channels x of a head.
      num_groups: Groups of B and C.
      state_size: Columns of B and of C in a group, which are the keys of a head's state.
      conv_bias: True if the convolution has a bias.
      input_bias, out_bias: True if the input projection, and the output projection, have a bias.
      norm: Output norm.
      norm_size: Columns of a group of the output norm, of which TP ranks may have a part.
      input_factors: Multipliers of z, x, B, C and the time step in the input projection.
      out_factor: Multiplier of the output.
    """

    kind: ClassVar[str] = "mamba2"
    window: ClassVar[None] = None
    """No sliding window: the recurrent state covers all positions."""
    has_delta: ClassVar[bool] = False
    begins_with_gate: ClassVar[bool] = True

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    conv_bias: bool
    input_bias: bool
    out_bias: bool
    norm: OutputNorm
    norm_size: int
    input_factors: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    out_factor: float = 1.0
    conv_width: int = CONV_WIDTH

    def __post_init__(self) -> None:
        check_groups(("Mamba2 heads", "Mamba2 groups"), self.num_heads, self.num_groups)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Heads, keys and values of the recurrent state."""
        return self.num_heads, self.state_size, self.head_size

    @property
    def values(self) -> int:
        """Output columns of all heads."""
        return self.num_heads * self.head_size

    @property
    def has_cut_norm(self) -> bool:
        """True if TP ranks share the columns of a group of the output norm."""
        return self.norm is not OutputNorm.NONE and self.values % self.norm_size > 0

    def has_whole_chunks(self, chunk: int) -> bool:
        """Returns True if a rank's columns and the groups of the output norm are whole chunks."""
        return self.values % chunk == 0 == self.norm_size % chunk

    @property
    def channels(self) -> int:
        """Convolution channels: x of all heads, B of all groups, C of all groups."""
        return self.values + 2 * self.num_groups * self.state_size

    @property
    def input_sections(self) -> tuple[int, int, int, int, int]:
        """Columns of z, x, B, C and the time steps in the input projection."""
        groups = self.num_groups * self.state_size
        return self.values, self.values, groups, groups, self.num_heads

    @property
    def cache_specs(self) -> tuple[CacheArraySpec, CacheArraySpec]:
        """Cache arrays: the recurrent state, and the latest convolution inputs, per slot."""
        window = (self.conv_width - 1, self.channels)
        ranges = self._channel_sections
        return (
            CacheArraySpec("recurrent", CacheUnit.SLOT, self.state_shape, heads=0, float32=True),
            CacheArraySpec("window", CacheUnit.SLOT, window, heads=1, ranges=ranges),
        )

    @property
    def sizes(self) -> Self:
        """The config itself: all layers of a group are equal."""
        return self

    @property
    def divided(self) -> Iterator[tuple[str, int]]:
        """Sizes that must be multiples of the number of TP ranks, with their names."""
        yield "the number of Mamba2 heads", self.num_heads

    def local(self, count: int) -> Self:
        """Returns the config of one of `count` TP ranks.

        Groups fewer than ranks are replicated, each copy with some of its heads.

        Raises:
          ValueError: The groups are neither a multiple nor a divisor of `count`.
        """
        groups = self.num_groups
        if max(groups, count) % min(groups, count):
            raise ValueError(
                f"the number of Mamba2 groups ({groups}) must be a multiple or a divisor of the "
                f"number of ranks ({count})"
            )
        return replace(self, num_heads=self.num_heads // count, num_groups=max(1, groups // count))

    def parameters(
        self, prefix: str, layers: Sequence[str], settings: StackSettings
    ) -> list[Parameter]:
        """Returns the stacks of some layers; see `shared.models.mixers.attention`."""
        hidden, heads, channels = settings.hidden, self.num_heads, self._channel_sections
        rows = self.values + self.channels + heads
        inputs = {"mamba.in_proj.weight": (rows, settings.inputs)}
        out = {"mamba.out_proj.weight": (hidden, self.values)}
        conv = {"mamba.conv1d.weight": (self.channels, 1, self.conv_width)}
        by_head, by_columns = ShardedRange(heads), (ShardedRange(hidden),)
        by_inputs = (channels[0], *channels, by_head)
        wide = (self.channels, self.conv_width)
        tensors = [
            stack(f"{prefix}inputs", layers, inputs, sections=by_inputs),
            stack(f"{prefix}conv", layers, conv, shape=wide, sections=channels),
            *(
                stack(
                    f"{prefix}{name}",
                    layers,
                    {f"mamba.{stored}": (heads,)},
                    float32=True,
                    sections=(by_head,),
                    axis=-1,
                )
                for name, stored in (("a_log", "A_log"), ("dt_bias", "dt_bias"), ("skip", "D"))
            ),
            stack(f"{prefix}out", layers, out, sections=by_columns),
        ]
        if self.conv_bias:
            tensors.append(bias(f"{prefix}conv", layers, conv, channels))
        if self.input_bias:
            tensors.append(bias(f"{prefix}inputs", layers, inputs, by_inputs))
        if self.out_bias:
            tensors.append(bias(f"{prefix}out", layers, out, by_columns))
        if self.norm is not OutputNorm.NONE:
            norm = norms_of(f"{prefix}norm", layers, "mamba.norm.weight", self.values, 0.0)
            tensors.append(replace(norm, sections=channels[:1], axis=-1))
        return tensors

    @property
    def _channel_sections(self) -> tuple[ShardedRange, ...]:
        """TP sections of the convolution channels: x by head, B and C by group."""
        of_groups = ShardedRange(self.num_groups * self.state_size, self.state_size, repeats=True)
        return ShardedRange(self.values, self.head_size), of_groups, of_groups
