"""Decoder layer of a DFlash2 head with its convolutions; same as `shared.spec.convolution`."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from shared.models.config import ModelConfig
from torch_impl.layers import AttentionContext, Hidden, attention
from torch_impl.model_weights import ConvWeights, Layer, LayerConvs
from torch_impl.ops.collectives import all_gather
from torch_impl.ops.gemm import convolution, linear
from torch_impl.ops.gemm.linear import NormedStream, product

Scale = Float[Tensor, " hidden"]


def layer(
    sizes: ModelConfig,
    weights: Layer,
    around: LayerConvs,
    norms: tuple[Scale, Scale],
    place: int,
    size: int,
    x: Hidden,
    normed: Hidden,
    context: AttentionContext,
) -> tuple[Hidden, Hidden]:
    """Runs attention and MLP, each between two convolutions, and adds them to the stream.

    Each rank computes the whole convolutions and its shard of the GEMMs.

    Args:
      norms: Scales of the layer's second norm and of the norm after the layer.
      place: Index of the layer.
      size: Rows of a block.
    """
    group = context.group
    read, added = _around(sizes, around.attention, size, normed)
    qkv = product(read, weights.mixer.inputs)
    mixed = attention(sizes, sizes.attention, context, place, weights.mixer, qkv)
    mixed = all_gather.all_gather(group, mixed)
    x, normed = added(all_gather.all_gather(group, product(mixed, weights.mixer.out)), x, norms[0])
    read, added = _around(sizes, around.mlp, size, normed)
    activated = linear.act_and_mul_linear(
        NormedStream(read, group=group), None, weights.feed.gate_up
    )
    down = all_gather.all_gather(group, product(activated, weights.feed.down))
    return added(down, x, norms[1])


def _around(
    sizes: ModelConfig, conv: ConvWeights, size: int, normed: Hidden
) -> tuple[Hidden, Callable[[Hidden, Hidden, Scale], tuple[Hidden, Hidden]]]:
    """Returns the input of attention or MLP, and a function that adds its output to the stream.

    The function also applies the next norm. The coefficient offsets of both convolutions are
    computed before attention or MLP.
    """
    moved = product(normed, conv.moved).view(len(normed), 2, conv.base.shape[1], -1)

    def added(given: Hidden, x: Hidden, norm: Scale) -> tuple[Hidden, Hidden]:
        return convolution.behind(given, conv.base, moved, size, x, norm, sizes.rms_eps)

    return convolution.before(normed, conv.base, moved, size), added
