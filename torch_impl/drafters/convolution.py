"""As `shared.spec.convolution`, in torch: a layer of a DFlash2 head."""

from collections.abc import Callable
from functools import partial

from shared.models.config import ModelConfig
from torch_impl.layers import Hidden, Sight, attention
from torch_impl.ops import convolution, linear, ranks
from torch_impl.ops.layers import rms_norm
from torch_impl.ops.linear import Stream, product
from torch_impl.records import Around, Conv, Layer


def layer(
    sizes: ModelConfig,
    weights: Layer,
    around: Around,
    place: int,
    size: int,
    x: Hidden,
    sight: Sight,
) -> Hidden:
    """As the specification; every rank makes whole convolutions, and of its products its share.

    Args:
      place: The layer's number.
      size: Rows of a block.
    """
    group = sight.group
    normed = rms_norm(x, weights.input_norm, sizes.rms_eps)
    read, behind = _around(around.attention, normed, size)
    qkv = product(read, weights.mixer.inputs)
    mixed = ranks.gathered(group, attention(sizes, sight, place, weights.mixer, qkv))
    x = behind(ranks.gathered(group, product(mixed, weights.mixer.out)), x)
    normed = rms_norm(x, weights.post_norm, sizes.rms_eps)
    read, behind = _around(around.mlp, normed, size)
    fed = linear.gated_product(Stream(read, group=group), None, weights.feed.gate_up)
    return behind(ranks.gathered(group, product(fed, weights.feed.down)), x)


def _around(
    conv: Conv, normed: Hidden, size: int
) -> tuple[Hidden, Callable[[Hidden, Hidden], Hidden]]:
    """As the specification's."""
    moved = product(normed, conv.moved).view(len(normed), 2, conv.base.shape[1], -1)

    def side(at: int, values: Hidden, added: Hidden | None) -> Hidden:
        total = convolution.convolved(values, conv.base[at], moved[:, at], size, added)
        return total.to(values.dtype)

    return side(0, normed, None), partial(side, 1)
