"""Training pass of block draft heads: many blocks per sequence, each after its own anchor token.

A block is [anchor, mask, mask, ..]. Its rows attend to one another and to the context before the
anchor; rows of a JetSpec head do not attend to later rows of the block. Each layer projects the
keys and values of the context from the target's hidden states. Slot j of a DFlash head predicts the
token j positions after the anchor. The Markov head of DSpark and the selector of DFlash2 read the
true token before each slot (`jax_impl.training.candidate_loss`).

Source: DFlash, arXiv:2602.06036; DSpark, arXiv:2607.05147; DFlash2, z-lab; JetSpec, hao-ai-lab.
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
from jax_impl.training.candidate_loss import KL, Objective
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
from shared.drafts.dflash2 import ConvConfig
from shared.drafts.dflash_config import BlockConfig
from shared.models.config import ModelConfig

Anchors = Int[jax.Array, "B A"]


class BlockHeadConfig(NamedTuple):
    """Sizes of a block draft head for training.

    Attributes:
      layer: Sizes of its layers.
      aux_streams: Auxiliary hidden states of the target that it reads, by layer.
      config: Sizes of the block; its windows are ignored.
    """

    layer: ModelConfig
    aux_streams: tuple[int, ...]
    config: BlockConfig

    @classmethod
    def of(cls, head: DraftConfig) -> "BlockHeadConfig":
        """Returns the sizes of a block draft head."""
        assert head.block is not None
        return cls(head.layer, head.aux_streams, head.block)

    @property
    def size(self) -> int:
        """Rows of a block, including the anchor."""
        return self.config.size

    @property
    def drafts(self) -> int:
        """Slots that predict a token."""
        return self.config.nodes - 1


class FilledBlocks(NamedTuple):
    """Blocks after some anchors of each sequence, with the tokens that follow.

    Attributes:
      slots: Hidden states of the slots that predict a token, after the final norm.
      before, labels: The token before each slot's label, and the label.
      teacher: Target's hidden states before each label; their logits are its choice of the label.
      label_mask: Weight of each label; 0 past the end and for positions that are no anchors.
    """

    slots: Float[jax.Array, "B A slots hidden"]
    before: Int[jax.Array, "B A slots"]
    labels: Int[jax.Array, "B A slots"]
    teacher: Float[jax.Array, "B A slots hidden"]
    label_mask: Float[jax.Array, "B A slots"]

    @property
    def is_answer(self) -> Bool[jax.Array, "B A slots"]:
        """True for a slot if its label and all labels before it have weight 1."""
        return jnp.cumprod(self.label_mask >= 1, axis=-1).astype(bool)


def fill_blocks(
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
) -> FilledBlocks:
    """Runs the frozen target, and the head on blocks after random anchors.

    Args:
      loss_mask: Same as in `losses`; the token after an anchor has weight 1.
      key: Random key of the anchors.
      num_anchors: Blocks per sequence.
    """
    frozen = jax.tree.map(lax.stop_gradient, target)
    passed = jax.tree.map(
        lax.stop_gradient, forward(target_config, frozen, tokens, compute_dtype, remat)
    )
    anchors, is_real = draw_anchors(loss_mask, key, num_anchors)
    hidden = fill(block, head, frozen, passed, tokens, anchors, compute_dtype, remat)
    labels = _following(tokens, anchors, block.drafts)
    newest = jnp.take_along_axis(tokens, anchors, axis=1)
    at = jnp.minimum(anchors[..., None] + jnp.arange(block.drafts), tokens.shape[1] - 1)
    return FilledBlocks(
        slots=hidden[:, :, block.config.first_slot :],
        before=jnp.concatenate([newest[..., None], labels[..., :-1]], axis=2),
        labels=labels,
        teacher=passed.hidden[jnp.arange(len(tokens))[:, None, None], at],
        label_mask=_following(loss_mask, anchors, block.drafts) * is_real[..., None],
    )


def block_loss(
    block: BlockHeadConfig,
    head: DraftModel,
    target: ModelModule,
    filled: FilledBlocks,
    objective: Objective,
    compute_dtype: DTypeLike,
) -> tuple[Scalar, Metrics]:
    """Computes the loss of filled blocks, with the terms of the head in `candidate_loss`.

    Args:
      head: The trained head; the target is frozen.
      objective: See `candidate_loss.Objective` and `slot_weights`.

    Returns:
      The loss, and metrics by the names of `losses.chain_loss`. `agreement_i` is the share of
      blocks in which the first i slots predict the tokens of the sequence.
    """
    frozen = jax.tree.map(lax.stop_gradient, target)
    losses, agrees = _scored(block, head, frozen, filled, objective, compute_dtype)
    counts, alive = filled.is_answer, jnp.cumprod(agrees, axis=-1)
    rates = [mean(alive[..., j], counts[..., j]) for j in range(block.drafts)]
    loss = mean(losses, slot_weights(block, filled.label_mask, objective))
    return loss, acceptance(rates) | {"loss": loss}


def slot_weights(
    block: BlockHeadConfig, label_mask: Float[jax.Array, "B A slots"], objective: Objective
) -> Float[jax.Array, "B A slots"]:
    """Returns the weight of each slot.

    With cross-entropy the weight of the label decays with the depth of the slot: a slot of a chain
    is used only if all slots before it are accepted. With the KL divergence all depths weigh the
    same, because a tree contains candidates of several ranks at each depth.
    """
    if objective == KL:
        return label_mask
    return label_mask * jnp.exp(-jnp.arange(block.drafts) / (block.size / 2))


def draw_anchors(
    loss_mask: Mask, key: jax.Array, num_anchors: int
) -> tuple[Anchors, Bool[jax.Array, "B A"]]:
    """Draws `num_anchors` distinct positions per sequence, each before a token of weight 1.

    Returns:
      The positions, and False for positions beyond the number of such tokens.
    """
    is_candidate = jnp.pad(loss_mask[:, 1:] >= 1, ((0, 0), (0, 1)))
    noise = jnp.where(is_candidate, jax.random.uniform(key, loss_mask.shape), -1)
    best, anchors = lax.top_k(noise, num_anchors)
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
    """Returns the hidden states of the blocks after the final norm, float32."""
    (B, T), (_, A), size = tokens.shape, anchors.shape, block.size
    config, eps = block.layer, block.layer.rms_eps
    aux = jnp.concatenate([passed.streams[i] for i in block.aux_streams], axis=-1)
    read = layers.linear_float32(aux.reshape(B * T, -1).astype(compute_dtype), head.fc[...])
    context = normed(read, head.hidden_norm[...], eps, compute_dtype)
    context_angles = angles(config.attention, layers.flat_positions(B, T))
    block_angles = angles(config.attention, (anchors[..., None] + jnp.arange(size)).reshape(-1))
    is_visible = jnp.repeat(jnp.arange(T) < anchors[..., None], size, axis=1)  # [B, A * size, T]
    filled = jnp.full((B, A, size), block.config.mask_id)
    filled = filled.at[:, :, 0].set(jnp.take_along_axis(tokens, anchors, axis=1))
    x = embedded(target.embed[...], filled.reshape(-1))
    for layer in range(config.num_layers):

        def run(x: Rows, layer: int = layer) -> Rows:
            stack = head.layers
            context_kv = layers.keys_and_values(
                config, stack.attention, layer, context, context_angles
            )
            k, v = (part.reshape(B, T, *part.shape[1:]) for part in context_kv)
            y = normed(x, stack.input_norm[layer], eps, compute_dtype)
            y, after = _convolution(block, head, f"{layer}.attention", y)
            q, own_k, own_v, gate = layers.project(config, stack.attention, layer, y, block_angles)
            causal = block.config.causal[layer]
            out = _attend(q, k, v, own_k, own_v, is_visible, size, causal)
            x = x + after(layers.merge(stack.attention, layer, out, gate))
            y = normed(x, stack.post_attention_norm[layer], eps, compute_dtype)
            y, after = _convolution(block, head, f"{layer}.mlp", y)
            return x + after(layers.mlp(stack, layer, y))

        x = jax.checkpoint(run)(x) if remat else run(x)
    return plain_rms_norm(x, head.final_norm[...], eps).reshape(B, A, size, -1)


def _convolution(
    block: BlockHeadConfig, head: DraftModel, part: str, y: Rows
) -> tuple[Rows, Callable[[Rows], Rows]]:
    """Returns the convolved input of a mixer or MLP, and the convolution of its output.

    Without a convolution both are the identity. See `convolved`.
    """
    if (conv := block.config.part(ConvConfig)) is None:
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
    is_visible: Bool[jax.Array, "B rows T"],
    size: int,
    is_causal: bool,
) -> Float[jax.Array, "R Hq D"]:
    """Attends each row of a block to the context before its anchor and to its own block.

    With `is_causal` a row does not attend to later rows of its block.
    """
    B, T = context_k.shape[:2]
    near_q, near_k, near_v = (x.reshape(-1, size, *x.shape[1:]) for x in (q, k, v))
    far = layers.scores(q.reshape(B, -1, *q.shape[1:]), context_k)
    far = jnp.where(is_visible[:, None, None], far, layers.NEVER)  # [B, Hk, group, A * size, T]
    near = layers.scores(near_q, near_k)  # [B * A, Hk, group, size, size]
    if is_causal:
        near = jnp.where(jnp.tri(size, dtype=bool), near, layers.NEVER)
    near = jnp.moveaxis(near.reshape(B, -1, *near.shape[1:]), 1, 3).reshape(*far.shape[:4], size)
    shares = jax.nn.softmax(jnp.concatenate([far, near], axis=-1), axis=-1)
    of_block = shares[..., T:].reshape(*far.shape[:3], -1, size, size)
    of_block = jnp.moveaxis(of_block, 3, 1).reshape(-1, *far.shape[1:3], size, size)
    read = layers.read(shares[..., :T], context_v).reshape(q.shape)
    return read + layers.read(of_block, near_v).reshape(q.shape)


def _following(rows: Float[jax.Array, "B T"] | Tokens, anchors: Anchors, most: int) -> jax.Array:
    """Returns the `most` values that follow each anchor; zeros past the end."""
    T = rows.shape[1]
    at = anchors[..., None] + jnp.arange(1, most + 1)
    targets = rows[jnp.arange(len(rows))[:, None, None], jnp.minimum(at, T - 1)]
    return jnp.where(at < T, targets, 0)


def _scored(
    block: BlockHeadConfig,
    head: DraftModel,
    target: ModelModule,
    filled: FilledBlocks,
    objective: Objective,
    compute_dtype: DTypeLike,
) -> tuple[Float[jax.Array, "B A slots"], Bool[jax.Array, "B A slots"]]:
    """Returns the loss of each slot, and True if its draft token equals the label."""
    teacher = filled.teacher if objective == KL else None

    def score(
        rows: tuple[Hidden, Tokens, Tokens, Hidden | None],
    ) -> tuple[Float[jax.Array, " R"], Bool[jax.Array, " R"]]:
        hidden, before, labels, teacher = rows
        return candidate_loss.loss(
            block.config, head, target, hidden, before, labels, teacher, compute_dtype
        )

    rows = (filled.slots, filled.before, filled.labels, teacher)
    flat = jax.tree.map(lambda x: x.reshape(len(x), -1, *x.shape[3:]), rows)
    vocab = len(target.head[...]) * (2 if objective == KL else 1)
    scored = by_blocks(score, flat, block_rows(vocab))
    return jax.tree.map(lambda x: x.reshape(filled.labels.shape), scored)
