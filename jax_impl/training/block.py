"""The training pass of a head with blocks: many of each sequence, each behind its own anchor.

A block is [anchor, mask, mask, ..]; its rows see one another and the context before the anchor, of
which each layer has keys and values straight from the target's hidden states. Slot j of a DFlash
head predicts the token j places after the anchor. What a DSpark or a DFlash2 head chooses by is
told the true token before each slot (`jax_impl.training.candidate_loss`).

Source: DFlash, arXiv:2602.06036; DSpark, arXiv:2607.05147; DFlash2, z-lab.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from jax_impl.layers import angles
from jax_impl.ops.gemm.convolution import convolved
from jax_impl.ops.gemm.layers import plain_rms_norm
from jax_impl.training import candidate_loss, layers
from jax_impl.training.forward import Hidden, Passed, Tokens, embedded, forward
from jax_impl.training.layers import Rows, normed
from jax_impl.training.losses import (
    Mask,
    Metrics,
    Scalar,
    acceptance,
    block_rows,
    by_blocks,
    mean,
)
from jax_impl.training.nnx_modules import DraftModel, ModelModule
from shared.drafts.config import DraftConfig
from shared.drafts.dflash_config import BlockConfig
from shared.models.config import ModelConfig

Anchors = Int[jax.Array, "B A"]


class BlockHeadConfig(NamedTuple):
    """What training needs to know of a head with blocks; all of its layers are bidirectional.

    Attributes:
      layer: Sizes of its layers.
      aux_streams: Residual streams of the target that it reads.
      config: Of the block; its windows mean nothing.
    """

    layer: ModelConfig
    aux_streams: tuple[int, ...]
    config: BlockConfig

    @classmethod
    def of(cls, head: DraftConfig) -> "BlockHeadConfig":
        """Of a head with blocks."""
        assert head.block is not None
        return cls(head.layer, head.aux_streams, head.block)

    @property
    def size(self) -> int:
        """Rows of a block, the anchor's included."""
        return self.config.size

    @property
    def drafts(self) -> int:
        """Slots that predict a token."""
        return self.config.nodes - 1


def block_loss(
    block: BlockHeadConfig,
    head: DraftModel,
    target_config: ModelConfig,
    target: ModelModule,
    tokens: Tokens,
    loss_mask: Mask,
    key: jax.Array,
    num_anchors: int,
    compute_dtype: DTypeLike,
    remat: bool,
) -> tuple[Scalar, Metrics]:
    """Cross-entropy of the tokens in blocks behind random anchors; near slots weigh more.

    Beside it stands what trains how a DSpark or a DFlash2 head chooses.

    Args:
      head: What is trained; the target stays as it is.
      loss_mask: As in `losses`; a block begins before a token of weight 1.
      key: Draws the anchors.
      num_anchors: Blocks of each sequence.

    Returns:
      The loss and the names of `losses.chain_loss`: shares of blocks whose first i slots hold the
      sequence's tokens.
    """
    frozen = jax.tree.map(lax.stop_gradient, target)
    passed = jax.tree.map(
        lax.stop_gradient, forward(target_config, frozen, tokens, compute_dtype, remat)
    )
    anchors, is_real = draw_anchors(loss_mask, key, num_anchors)
    hidden = fill(block, head, frozen, passed, tokens, anchors, compute_dtype, remat)
    labels = _behind(tokens, anchors, block.drafts)
    newest = jnp.take_along_axis(tokens, anchors, axis=1)
    before = jnp.concatenate([newest[..., None], labels[..., :-1]], axis=2)
    slots = hidden[:, :, block.config.first_slot :]
    losses, agrees = _scored(block, head, frozen, slots, before, labels, compute_dtype)
    is_answer = is_real[..., None] & (_behind(loss_mask, anchors, block.drafts) >= 1)
    counts = jnp.cumprod(is_answer, axis=-1)
    alive = jnp.cumprod(agrees, axis=-1)
    rates = [mean(alive[..., j], counts[..., j]) for j in range(block.drafts)]
    loss = mean(losses, slot_weights(block, loss_mask, anchors, is_real))
    return loss, acceptance(rates) | {"loss": loss}


def slot_weights(
    block: BlockHeadConfig, loss_mask: Mask, anchors: Anchors, is_real: Bool[jax.Array, "B A"]
) -> Float[jax.Array, "B A slots"]:
    """Each slot's weight: its token's, less the further it is, for it is used if all before fit."""
    decay = jnp.exp(-jnp.arange(block.drafts) / (block.size / 2))
    return _behind(loss_mask, anchors, block.drafts) * is_real[..., None] * decay


def draw_anchors(
    loss_mask: Mask, key: jax.Array, num_anchors: int
) -> tuple[Anchors, Bool[jax.Array, "B A"]]:
    """Different positions before tokens of weight 1; False where there are too few of them."""
    may_be = jnp.pad(loss_mask[:, 1:] >= 1, ((0, 0), (0, 1)))
    lots = jnp.where(may_be, jax.random.uniform(key, loss_mask.shape), -1)
    best, anchors = lax.top_k(lots, num_anchors)
    return anchors, best >= 0


def fill(
    block: BlockHeadConfig,
    head: DraftModel,
    target: ModelModule,
    passed: Passed,
    tokens: Tokens,
    anchors: Anchors,
    compute_dtype: DTypeLike,
    remat: bool,
) -> Float[jax.Array, "B A size hidden"]:
    """The hidden states of the blocks after the final norm, float32."""
    (B, T), (_, A), size = tokens.shape, anchors.shape, block.size
    config, eps = block.layer, block.layer.rms_eps
    aux = jnp.concatenate([passed.streams[i] for i in block.aux_streams], axis=-1)
    read = layers.linear_float32(aux.reshape(B * T, -1).astype(compute_dtype), head.fc[...])
    context = normed(read, head.hidden_norm[...], eps, compute_dtype)
    whole_turn = angles(config.attention, layers.flat_positions(B, T))
    turn = angles(config.attention, (anchors[..., None] + jnp.arange(size)).reshape(-1))
    sees = jnp.repeat(jnp.arange(T) < anchors[..., None], size, axis=1)  # [B, A * size, T]
    filled = jnp.full((B, A, size), block.config.mask_id)
    filled = filled.at[:, :, 0].set(jnp.take_along_axis(tokens, anchors, axis=1))
    x = embedded(target.embed[...], filled.reshape(-1))
    for layer in range(config.num_layers):

        def run(x: Rows, layer: int = layer) -> Rows:
            stack = head.layers
            context_kv = layers.keys_and_values(config, stack.attention, layer, context, whole_turn)
            k, v = (part.reshape(B, T, *part.shape[1:]) for part in context_kv)
            y = normed(x, stack.input_norm[layer], eps, compute_dtype)
            y, behind = _around(block, head, f"{layer}.attention", y)
            q, own_k, own_v, gate = layers.project(config, stack.attention, layer, y, turn)
            out = _attend(q, k, v, own_k, own_v, sees, size)
            x = x + behind(layers.merge(stack.attention, layer, out, gate))
            y = normed(x, stack.post_attention_norm[layer], eps, compute_dtype)
            y, behind = _around(block, head, f"{layer}.mlp", y)
            return x + behind(layers.mlp(stack, layer, y))

        x = jax.checkpoint(run)(x) if remat else run(x)
    return plain_rms_norm(x, head.final_norm[...], eps).reshape(B, A, size, -1)


def _around(
    block: BlockHeadConfig, head: DraftModel, part: str, y: Rows
) -> tuple[Rows, Callable[[Rows], Rows]]:
    """What a part of a layer reads, and what is made of what it gives; see `convolved`."""
    if (conv := block.config.conv) is None:
        return y, lambda x: x
    base = head.conv[f"{part}.base"].astype(y.dtype)
    moved = layers.linear(y, head.conv[f"{part}.moved"]).reshape(len(y), 2, conv.taps, -1)

    def side(at: int, x: Rows) -> Rows:
        return convolved(x, base[at], moved[:, at], block.size, None)

    return side(0, y).astype(y.dtype), partial(side, 1)


def _attend(
    q: Float[jax.Array, "R Hq D"],
    context_k: Float[jax.Array, "B T Hk D"],
    context_v: Float[jax.Array, "B T Hk D"],
    k: Float[jax.Array, "R Hk D"],
    v: Float[jax.Array, "R Hk D"],
    sees: Bool[jax.Array, "B rows T"],
    size: int,
) -> Float[jax.Array, "R Hq D"]:
    """What the rows of the blocks read of the context before their anchor and of their block."""
    B, T = context_k.shape[:2]
    near_q, near_k, near_v = (x.reshape(-1, size, *x.shape[1:]) for x in (q, k, v))
    far = layers.scores(q.reshape(B, -1, *q.shape[1:]), context_k)
    far = jnp.where(sees[:, None, None], far, layers.NEVER)  # [B, Hk, group, A * size, T]
    near = layers.scores(near_q, near_k)  # [B * A, Hk, group, size, size]
    near = jnp.moveaxis(near.reshape(B, -1, *near.shape[1:]), 1, 3).reshape(*far.shape[:4], size)
    shares = jax.nn.softmax(jnp.concatenate([far, near], axis=-1), axis=-1)
    of_block = shares[..., T:].reshape(*far.shape[:3], -1, size, size)
    of_block = jnp.moveaxis(of_block, 3, 1).reshape(-1, *far.shape[1:3], size, size)
    read = layers.read(shares[..., :T], context_v).reshape(q.shape)
    return read + layers.read(of_block, near_v).reshape(q.shape)


def _behind(rows: Float[jax.Array, "B T"] | Tokens, anchors: Anchors, most: int) -> jax.Array:
    """What lies 1 to `most` places after each anchor, zeros past the end."""
    T = rows.shape[1]
    at = anchors[..., None] + jnp.arange(1, most + 1)
    targets = rows[jnp.arange(len(rows))[:, None, None], jnp.minimum(at, T - 1)]
    return jnp.where(at < T, targets, 0)


def _scored(
    block: BlockHeadConfig,
    head: DraftModel,
    target: ModelModule,
    hidden: Float[jax.Array, "B A slots hidden"],
    before: Int[jax.Array, "B A slots"],
    labels: Int[jax.Array, "B A slots"],
    compute_dtype: DTypeLike,
) -> tuple[Float[jax.Array, "B A slots"], Bool[jax.Array, "B A slots"]]:
    """Each slot's loss, and whether its draft is the label.

    Args:
      before: The token before each label.
    """
    flat: tuple[Hidden, Tokens, Tokens] = (
        hidden.reshape(len(hidden), -1, hidden.shape[-1]),
        before.reshape(len(before), -1),
        labels.reshape(len(labels), -1),
    )

    def score(
        rows: tuple[Hidden, Tokens, Tokens],
    ) -> tuple[Float[jax.Array, " R"], Bool[jax.Array, " R"]]:
        return candidate_loss.loss(block.config, head, target, *rows, compute_dtype)

    scored = by_blocks(score, flat, block_rows(len(target.head[...])))
    return jax.tree.map(lambda x: x.reshape(labels.shape), scored)
