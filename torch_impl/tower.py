"""The vision tower over the patches of one picture; as `shared.spec.tower`."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from shared.models.vision import EPS, VisionConfig
from torch_impl.ops import attention, layers, linear
from torch_impl.records import LayerNorm, TowerBlock, TowerWeights


@dataclass(frozen=True)
class Patches:
    """As the specification's."""

    pixels: Float[Tensor, "R numbers"]
    corners: Int[Tensor, "R 4"]
    shares: Float[Tensor, "R 4"]
    cos: Float[Tensor, "R half"]
    sin: Float[Tensor, "R half"]
    count: Int[Tensor, " 1"]


def encoded(
    config: VisionConfig, weights: TowerWeights, picture: Patches
) -> Float[Tensor, "tokens out"]:
    """The rows that stand in the prompt in the place of a picture's tokens, in their order."""
    x = linear.product(picture.pixels.to(weights.places.dtype), weights.patches)
    x = x + _placed(weights.places, picture.corners, picture.shares)
    for block in weights.blocks:
        x = _block(config, block, x, picture)
    merged = _normed(weights.merger_norm, x).reshape(-1, config.merged * config.hidden)
    wide = layers.gelu(linear.product(merged, weights.merger_up))
    return linear.product(wide, weights.merger_down)


def _placed(
    table: Float[Tensor, "places hidden"],
    corners: Int[Tensor, "R 4"],
    shares: Float[Tensor, "R 4"],
) -> Float[Tensor, "R hidden"]:
    """The learned place of each patch, between the four rows of the table around it."""
    return (table[corners].float() * shares[..., None]).sum(dim=1).to(table.dtype)


def _block(
    config: VisionConfig, block: TowerBlock, x: Float[Tensor, "R hidden"], picture: Patches
) -> Float[Tensor, "R hidden"]:
    qkv = linear.product(_normed(block.attention_norm, x), block.inputs)
    q, k, v = qkv.reshape(len(x), 3, config.num_heads, config.head_size).unbind(1)
    q, k = (layers.apply_rotary(each, picture.cos, picture.sin) for each in (q, k))
    mixed = attention.attend_all(q, k, v, picture.count).reshape(x.shape)
    x = x + linear.product(mixed, block.out)
    wide = layers.gelu_tanh(linear.product(_normed(block.mlp_norm, x), block.up))
    return x + linear.product(wide, block.down)


def _normed(norm: LayerNorm, x: Float[Tensor, "R hidden"]) -> Float[Tensor, "R hidden"]:
    return layers.layer_norm(x, norm.weight, norm.bias, EPS)
