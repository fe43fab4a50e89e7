"""Vision encoder over the patches of one image; same as `shared.spec.vision_encoder`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, UInt8

from jax_impl.model_weights import EncoderBlock, LayerNorm, VisionEncoderWeights
from jax_impl.ops import Place, scan
from jax_impl.ops.attention import attention
from jax_impl.ops.gemm import layers, linear
from shared.models.vision_config import EPS, VisionConfig


class Pixels(NamedTuple):
    """Same as the class of this name in the specification."""

    bytes: UInt8[jax.Array, " bytes"]
    sides: Int[jax.Array, " 2"]
    levels: Float[jax.Array, "3 256"]
    corners: Int[jax.Array, "lines 2"]
    shares: Float[jax.Array, "lines 2"]
    cos: Float[jax.Array, "lines quarter"]
    sin: Float[jax.Array, "lines quarter"]


class Patches(NamedTuple):
    """Same as the class of this name in the specification."""

    pixels: Float[jax.Array, "R numbers"]
    corners: Int[jax.Array, "R 4"]
    shares: Float[jax.Array, "R 4"]
    cos: Float[jax.Array, "R half"]
    sin: Float[jax.Array, "R half"]
    count: Int[jax.Array, " 1"]


class Begun(NamedTuple):
    """Same as the class of this name in the specification."""

    rows: Float[jax.Array, "R hidden"]
    cos: Float[jax.Array, "R half"]
    sin: Float[jax.Array, "R half"]
    count: Int[jax.Array, " 1"]


def patches(vision: VisionConfig, image: Pixels) -> Patches:
    """Cuts an image into patches; padding repeats the last patch."""
    size, merge = vision.patch_size, vision.merge_size
    rows, columns = jnp.maximum(image.sides, merge)
    number = jnp.arange(vision.num_patches(len(image.bytes)), dtype=jnp.int32)
    number = jnp.minimum(number, rows * columns - 1)
    block, within = number // merge**2, number % merge**2
    row = block // (columns // merge) * merge + within // merge
    column = block % (columns // merge) * merge + within % merge
    # The pixels of a patch in one row of the image are contiguous bytes.
    pieces = image.bytes[: len(number) * vision.patch_bytes].reshape(-1, size, 3)
    piece = (row[:, None] * size + jnp.arange(size)) * columns + column[:, None]
    by_channel = pieces[piece].transpose(0, 3, 1, 2).astype(jnp.int32)  # [R, 3, rows, columns]
    channel = jnp.arange(0, 3 * 256, 256)
    values = image.levels.reshape(-1)[by_channel + channel[:, None, None]]
    frames = jnp.repeat(values[:, :, None], vision.frames, axis=2)
    across = rows + column
    (top, left), (above, before) = ((x[row], x[across]) for x in (image.corners, image.shares))
    cos, sin = (jnp.concatenate([x[row], x[across]], axis=1) for x in (image.cos, image.sin))
    return Patches(
        pixels=frames.reshape(len(number), -1),
        corners=(top[:, :, None] * vision.table_side + left[:, None]).reshape(-1, 4),
        shares=(above[:, :, None] * before[:, None]).reshape(-1, 4),
        cos=cos,
        sin=sin,
        count=(rows * columns).reshape(1),
    )


def encoded(
    config: VisionConfig, weights: VisionEncoderWeights, image: Patches
) -> Float[jax.Array, "tokens out"]:
    """Computes the image embeddings, in the order of the image tokens in the prompt."""
    return project(
        config, weights, run_blocks(weights, embed_patches(weights, image), range(config.depth))
    )


def embed_patches(weights: VisionEncoderWeights, image: Patches) -> Begun:
    """Computes the activations before the first block."""
    x = linear.product(image.pixels.astype(weights.places.dtype), weights.patches)
    x = x + layers.bilinear_pos_embed(weights.places, image.corners, image.shares)
    return Begun(rows=x, cos=image.cos, sin=image.sin, count=image.count)


def run_blocks(weights: VisionEncoderWeights, image: Begun, blocks: range) -> Begun:
    """Runs the given blocks, which must be the next ones."""

    def block(x: jax.Array, place: Place) -> tuple[jax.Array, None]:
        return _block(_at(weights.blocks, place), x, image), None

    rows, _ = scan(block, image.rows, jnp.arange(blocks.start, blocks.stop))
    return image._replace(rows=rows)


def project(
    config: VisionConfig, weights: VisionEncoderWeights, image: Begun
) -> Float[jax.Array, "tokens out"]:
    """Computes the image embeddings from the activations after the last block."""
    merged = _normed(weights.merger_norm, image.rows).reshape(-1, config.merged * config.hidden)
    wide = layers.gelu(linear.product(merged, weights.merger_up))
    return linear.product(wide, weights.merger_down)


def _at(blocks: EncoderBlock, place: Place) -> EncoderBlock:
    """Returns the weights of one block; GEMM weights stay in the stack that kernels read."""

    def norm(stacks: LayerNorm) -> LayerNorm:
        return LayerNorm(stacks.weight[place], stacks.bias[place])

    return EncoderBlock(
        attention_norm=norm(blocks.attention_norm),
        inputs=blocks.inputs._replace(layer=place),
        out=blocks.out._replace(layer=place),
        mlp_norm=norm(blocks.mlp_norm),
        up=blocks.up._replace(layer=place),
        down=blocks.down._replace(layer=place),
    )


def _block(
    block: EncoderBlock, x: Float[jax.Array, "R hidden"], image: Begun
) -> Float[jax.Array, "R hidden"]:
    qkv = linear.product(_normed(block.attention_norm, x), block.inputs)
    mixed = attention.bidirectional_attention(qkv, image.cos, image.sin, image.count)
    x = x + linear.product(mixed, block.out)
    wide = layers.gelu_tanh(linear.product(_normed(block.mlp_norm, x), block.up))
    return x + linear.product(wide, block.down)


def _normed(norm: LayerNorm, x: Float[jax.Array, "R hidden"]) -> Float[jax.Array, "R hidden"]:
    return layers.layer_norm(x, norm.weight, norm.bias, EPS)
