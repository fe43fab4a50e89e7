"""Vision encoder over the patches of one image; same as `shared.spec.vision_encoder`."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from shared.models.vision_config import EPS, VisionConfig
from torch_impl.model_weights import EncoderBlock, LayerNorm, VisionEncoderWeights
from torch_impl.ops.attention import attention
from torch_impl.ops.gemm import layers, linear


@dataclass(frozen=True)
class Pixels:
    """Same as the class of this name in the specification."""

    bytes: UInt8[Tensor, " bytes"]
    sides: Int[Tensor, " 2"]
    levels: Float[Tensor, "3 256"]
    corners: Int[Tensor, "lines 2"]
    shares: Float[Tensor, "lines 2"]
    cos: Float[Tensor, "lines quarter"]
    sin: Float[Tensor, "lines quarter"]


@dataclass(frozen=True)
class Patches:
    """Same as the class of this name in the specification."""

    pixels: Float[Tensor, "R numbers"]
    corners: Int[Tensor, "R 4"]
    shares: Float[Tensor, "R 4"]
    cos: Float[Tensor, "R half"]
    sin: Float[Tensor, "R half"]
    count: Int[Tensor, " 1"]


@dataclass(frozen=True)
class Begun:
    """Same as the class of this name in the specification."""

    rows: Float[Tensor, "R hidden"]
    cos: Float[Tensor, "R half"]
    sin: Float[Tensor, "R half"]
    count: Int[Tensor, " 1"]


def patches(vision: VisionConfig, image: Pixels) -> Patches:
    """Cuts an image into patches; padding repeats the last patch."""
    size, merge, device = vision.patch_size, vision.merge_size, image.bytes.device
    rows, columns = image.sides.clamp(min=merge)
    number = torch.arange(vision.num_patches(len(image.bytes)), device=device)
    number = torch.minimum(number, rows * columns - 1)
    block, within = number // merge**2, number % merge**2
    row = block // (columns // merge) * merge + within // merge
    column = block % (columns // merge) * merge + within % merge
    # The pixels of a patch in one row of the image are contiguous bytes.
    pieces = image.bytes[: len(number) * vision.patch_bytes].view(-1, size, 3)
    piece = (row[:, None] * size + torch.arange(size, device=device)) * columns + column[:, None]
    by_channel = pieces[piece].permute(0, 3, 1, 2).int()  # [R, 3, rows of pixels, columns]
    channel = torch.arange(0, 3 * 256, 256, dtype=torch.int32, device=device)
    values = image.levels.flatten()[by_channel + channel[:, None, None]]
    frames = values[:, :, None].expand(-1, -1, vision.frames, -1, -1)
    across = rows + column
    (top, left), (above, before) = ((x[row], x[across]) for x in (image.corners, image.shares))
    cos, sin = (torch.cat([x[row], x[across]], dim=1) for x in (image.cos, image.sin))
    return Patches(
        pixels=frames.reshape(len(number), -1),
        corners=(top[:, :, None] * vision.table_side + left[:, None]).flatten(1),
        shares=(above[:, :, None] * before[:, None]).flatten(1),
        cos=cos,
        sin=sin,
        count=(rows * columns).view(1),
    )


def encoded(
    config: VisionConfig, weights: VisionEncoderWeights, image: Patches
) -> Float[Tensor, "tokens out"]:
    """Computes the image embeddings, in the order of the image tokens in the prompt."""
    return project(
        config, weights, run_blocks(weights, embed_patches(weights, image), range(config.depth))
    )


def embed_patches(weights: VisionEncoderWeights, image: Patches) -> Begun:
    """Computes the activations before the first block."""
    x = linear.product(image.pixels.to(weights.places.dtype), weights.patches)
    x = x + layers.bilinear_pos_embed(weights.places, image.corners, image.shares)
    return Begun(rows=x, cos=image.cos, sin=image.sin, count=image.count)


def run_blocks(weights: VisionEncoderWeights, image: Begun, blocks: range) -> Begun:
    """Runs the given blocks, which must be the next ones."""
    x = image.rows
    for block in weights.blocks[blocks.start : blocks.stop]:
        # Two functions, so that each frees its arrays: the largest takes 141 MB for a large image.
        x = x + _mixed(block, x, image)
        x = x + _fed(block, x)
    return replace(image, rows=x)


def project(
    config: VisionConfig, weights: VisionEncoderWeights, image: Begun
) -> Float[Tensor, "tokens out"]:
    """Computes the image embeddings from the activations after the last block."""
    merged = _normed(weights.merger_norm, image.rows).reshape(-1, config.merged * config.hidden)
    wide = layers.gelu(linear.product(merged, weights.merger_up))
    return linear.product(wide, weights.merger_down)


def _mixed(
    block: EncoderBlock, x: Float[Tensor, "R hidden"], image: Begun
) -> Float[Tensor, "R hidden"]:
    """Computes the attention output of a block."""
    qkv = linear.product(_normed(block.attention_norm, x), block.inputs)
    mixed = attention.bidirectional_attention(qkv, image.cos, image.sin, image.count)
    return linear.product(mixed, block.out)


def _fed(block: EncoderBlock, x: Float[Tensor, "R hidden"]) -> Float[Tensor, "R hidden"]:
    """Computes the MLP output of a block."""
    wide = layers.gelu_tanh(linear.product(_normed(block.mlp_norm, x), block.up))
    return linear.product(wide, block.down)


def _normed(norm: LayerNorm, x: Float[Tensor, "R hidden"]) -> Float[Tensor, "R hidden"]:
    return layers.layer_norm(x, norm.weight, norm.bias, EPS)
