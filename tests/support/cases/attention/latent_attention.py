"""Cases of latent attention: an input projection, weights, rows, and a pool of two layers."""

from dataclasses import dataclass, replace

import numpy as np

from shared.models.mixers import LatentAttentionConfig
from shared.models.rotary import RotaryConfig
from shared.spec import attention, latent_attention
from shared.spec.attention_layer import Angles
from shared.spec.linear import Matrix
from tests.support import attend_latent_cases
from tests.support.cases.attention.attention_layer import AttentionRows, prompt_case, tree_case
from tests.support.op_case import OpCase

LAYER = 1
"""Index of the layer in the pool."""


@dataclass(frozen=True)
class LatentCase:
    """Arguments of `latent_attention`, with rows of the device backends."""

    inputs: np.ndarray
    config: LatentAttentionConfig
    weights: latent_attention.LatentWeights
    angles: Angles
    rows: AttentionRows
    pool: np.ndarray

    @property
    def spec_rows(self) -> attention.AttentionRows:
        """Rows of the specification."""
        given = dict(vars(self.rows))
        return attention.AttentionRows(
            **{name: x for name, x in given.items() if name not in ("row_starts", "max_rows")}
        )

    def specified(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the result of the specification: outputs, and the pool of the layer."""
        return latent_attention.latent_attention(
            self.inputs, self.config, self.weights, self.angles, self.spec_rows, self.pool[LAYER, 0]
        )


def latent_config(
    query_rank: int | None = 24, *, interleaved: bool = True, num_heads: int = 4
) -> LatentAttentionConfig:
    return LatentAttentionConfig(
        num_heads=num_heads,
        nope_size=12,
        rope_size=8,
        value_size=20,
        query_rank=query_rank,
        latent_rank=16,
        has_bias=False,
        latent_eps=1e-6,
        rotary=RotaryConfig(theta=1e4, width=8, interleaved=interleaved),
        scale=0.3,
    )


def _case(config: LatentAttentionConfig, rows: AttentionRows, seed: int) -> LatentCase:
    rng, heads = np.random.default_rng(seed), config.num_heads
    size, R = config.nope_size + config.rope_size, len(rows.request)

    def drawn(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    rank = config.query_rank
    weights = latent_attention.LatentWeights(
        latent_norm=1 + drawn(config.latent_rank) / 4,
        query_norm=None if rank is None else 1 + drawn(rank) / 4,
        queries=None if rank is None else Matrix.plain(drawn(heads * size, rank) / rank**0.5),
        kv_b=Matrix.plain(drawn(heads * config.head_rows, config.latent_rank) / 4),
    )
    angle = rows.positions[:, None] * 0.5 ** np.arange(config.rope_size // 2)
    return LatentCase(
        inputs=drawn(R, (rank or heads * size) + config.head_size),
        config=config,
        weights=weights,
        angles=Angles(*(f(angle).astype(np.float32) for f in (np.cos, np.sin))),
        rows=rows,
        pool=drawn(2, 1, 1 + rows.page_table.size, 16, 1, config.head_size),
    )


_TREES = tree_case([7, 4, 1], [30, 17, 105])
_CHUNKS = prompt_case([(0, 7), (16, 37), (60, 61)])


def _rows(case: object) -> AttentionRows:
    return AttentionRows(**vars(case.rows), row_starts=case.row_starts, max_rows=case.max_rows)


CASES = {
    "trees": _case(latent_config(), _rows(_TREES), 0),
    "chunks": _case(latent_config(), _rows(_CHUNKS), 1),
    "queries without rank": _case(latent_config(None), _rows(_TREES), 2),
    "rotation in halves": _case(latent_config(interleaved=False), _rows(_CHUNKS), 3),
    "one head": _case(latent_config(num_heads=1), _rows(_TREES), 4),
}


def with_nan_in_unwritten_rows(case: LatentCase) -> LatentCase:
    """Returns the case with NaN in all rows of the pool that no committed position has."""
    pool, page = case.pool.copy(), case.pool.shape[3]
    lengths = np.full(len(case.rows.page_table), 0)
    first_new = np.where(case.rows.is_real, case.rows.places, 1 << 30)
    for b in range(len(lengths)):
        lengths[b] = first_new[case.rows.request == b].min(initial=1 << 30)
        positions = np.arange(lengths[b], case.rows.page_table.shape[1] * page)
        pool[:, :, case.rows.page_table[b, positions // page], positions % page] = np.nan
    return replace(case, pool=pool)


def _op_case(name: str, case: LatentCase) -> OpCase:
    arguments = {
        "inputs": case.inputs,
        "config": case.config,
        "weights": case.weights,
        "angles": case.angles,
        "rows": case.rows,
        "pools": case.pool,
        "layer": LAYER,
    }
    return OpCase(
        op="latent_attention",
        function="latent_attention",
        name=name,
        make=lambda seed: arguments,
        in_place=("pools",),
        real_rows=lambda given: np.flatnonzero(given["rows"].is_real),
        specify=lambda given, rows: [case.specified()[0][rows]],
    )


TABLE = [*(_op_case(name, case) for name, case in CASES.items()), *attend_latent_cases.TABLE]
