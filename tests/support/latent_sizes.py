"""Sizes of latent attention layers in tests of kernels: tiny ones, and those of two models."""

from typing import NamedTuple

from shared.models.mixers import LatentAttentionConfig
from shared.models.rotary import RotaryConfig

EPS = 0.01
"""Epsilon of the norms; large, so that a kernel without it fails."""


class LatentSizes(NamedTuple):
    """Sizes of a layer; without `query_rank` there is no query latent."""

    heads: int
    nope: int
    rope: int
    value: int
    rank: int
    query_rank: int | None = None

    @property
    def input_columns(self) -> int:
        """Returns the columns of the input projection."""
        queries = self.query_rank or self.heads * (self.nope + self.rope)
        return queries + self.rank + self.rope

    @property
    def query_columns(self) -> int:
        """Returns the columns of rows with query heads: of their own projection, or of the input
        projection.
        """
        queries = self.heads * (self.nope + self.rope)
        return queries if self.query_rank else self.input_columns

    def config(self, is_interleaved: bool = True) -> LatentAttentionConfig:
        """Returns the config of the layer."""
        return LatentAttentionConfig(
            num_heads=self.heads,
            nope_size=self.nope,
            rope_size=self.rope,
            value_size=self.value,
            query_rank=self.query_rank,
            latent_rank=self.rank,
            has_bias=False,
            latent_eps=EPS,
            rotary=RotaryConfig(theta=1e4, width=self.rope, interleaved=is_interleaved),
            scale=1.0,
        )


ODD = LatentSizes(heads=3, nope=24, rope=8, value=20, rank=40)
EVEN = LatentSizes(heads=2, nope=48, rope=12, value=64, rank=80, query_rank=136)
GLM = LatentSizes(heads=20, nope=192, rope=64, value=256, rank=512, query_rank=768)
"""GLM-4.7-Flash."""
DEEPSEEK = LatentSizes(heads=128, nope=128, rope=64, value=128, rank=512, query_rank=1536)
"""DeepSeek-V3."""
DEEPSEEK_RANK = DEEPSEEK._replace(heads=16)
"""One of eight TP ranks."""
