"""GEMMs of a layer with their all-gathers in JAX, on ranks of absent GPUs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered

from bench.kernels.aot_target import DESCRIPTION
from kernels.pallas_gpu.collectives import all_gather
from kernels.pallas_gpu.gemm import linear
from kernels.peer_buffers import BufferLayout
from kernels.tiles import MEASURED, Tiles
from shared.models.formats.weight_format import PLAIN
from shared.spec.reduction_order import SQUARES

HIDDEN, INNER = 4096, 12288
"""Sizes of Qwen3-8B."""
BLOCK_BYTES = 1 << 26


def lowered_layer(count: int, rows: int) -> Lowered:
    """Lowers a layer after attention as one program, for a number of ranks and rows."""
    described = topologies.get_topology_desc(
        "absent",
        "cuda",
        target_config=DESCRIPTION.read_text(encoding="utf-8"),
        topology=f"1x1x{count}",
    )
    mesh = Mesh(np.array(described.devices), ("ranks",))
    boxes, tables = BufferLayout(count, BLOCK_BYTES), Tiles.load("pallas_gpu", MEASURED).linear

    def multiply(x: Any, weight: Any, gather: Any, *, is_gated: bool = False, **how: Any) -> Any:
        outputs = weight.shape[1] // (2 if is_gated else 1)
        sizes = {"rows": rows, "outputs": outputs, "gated": int(is_gated), "one_segment": 1}
        zero = jnp.int32(0)
        how = {"squares": None, "added": None, "norm": None} | how
        how |= {"tiles": tables.of(item_bytes=2, **sizes), "gather": gather}
        how |= {"first": 0, "out_type": jnp.bfloat16, "eps": 1e-6, "bias": None, "factor": 1.0}
        how |= {"is_gated": is_gated, "norm_layer": zero, "order": SQUARES, "format": PLAIN}
        return linear.product(x, weight, None, zero, **how)

    def layer(weights: Any, attended: Any, stream: Any, norm: Any, place: Any) -> Any:
        gather = all_gather.AllGatherArgs(place, boxes)
        every, _ = all_gather.all_gather(attended, None, gather)
        stream, read, sums, _ = multiply(every, weights[0], gather, added=stream, norm=norm)
        inner, *_ = multiply(read, weights[1], gather, is_gated=True, squares=sums)
        stream, read, sums, _ = multiply(inner, weights[2], gather, added=stream, norm=norm)
        return stream, read, sums, all_gather.missed(gather, read)

    columns, outputs = PartitionSpec(None, "ranks"), PartitionSpec(None, "ranks", None)
    each = PartitionSpec("ranks")
    specs = ([outputs] * 3, columns, columns, columns, each)
    program = jax.shard_map(
        layer,
        mesh=mesh,
        in_specs=specs,
        out_specs=(columns, columns, columns, each),
        check_vma=False,
    )

    def shape(spec: PartitionSpec, dtype: Any, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    weight = partial(shape, outputs, jnp.bfloat16, 1)
    return jax.jit(program).lower(
        [weight(HIDDEN, HIDDEN), weight(2 * INNER, HIDDEN), weight(HIDDEN, INNER)],
        shape(columns, jnp.bfloat16, rows, HIDDEN),
        shape(columns, jnp.bfloat16, rows, HIDDEN),
        shape(columns, jnp.float32, 1, HIDDEN),
        shape(each, jnp.int32, count * (2 * count + 2)),
    )
