"""DFlash: fills a block of masks in one pass and drafts a chain; as `shared.spec.dflash`."""

from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int

from jax_impl import layers, model
from jax_impl.device_state import DraftState, Held
from jax_impl.drafters import Fed, Ranking, Trees
from jax_impl.layers import KV
from jax_impl.model import Forward
from jax_impl.ops import sampling
from jax_impl.ops.attention import Rows
from jax_impl.ops.layers import rms_norm
from jax_impl.ops.linear import linear
from jax_impl.weights import DraftModel, Model
from shared.drafts.block import BlockConfig
from shared.drafts.config import DraftConfig, DraftSizes
from shared.spec.draft_tree import TreeShape


class BlockDrafter(NamedTuple):
    """A `jax_impl.drafters.Drafter` made of a DFlash head, on its weights and its target's."""

    config: DraftConfig
    weights: DraftModel
    target: Model

    @property
    def sizes(self) -> DraftSizes:
        """See `Drafter`."""
        return self.config.sizes

    def prefill(
        self,
        memory: DraftState,
        plan: SimpleNamespace,
        held: Held,
        fed: Fed,
        ranking: Ranking,
        noise: Float[jax.Array, "B vocab"],
    ) -> DraftState:
        """See `Drafter`."""
        return self._extend(memory, fed)

    def extend(
        self,
        memory: DraftState,
        plan: SimpleNamespace,
        before: Int[jax.Array, " B"],
        counts: Int[jax.Array, " B"],
        fed: Fed,
        ranking: Ranking,
        noise: Float[jax.Array, "B vocab"],
    ) -> DraftState:
        """See `Drafter`."""
        return self._extend(memory, fed)

    def _extend(self, memory: DraftState, fed: Fed) -> DraftState:
        kv = write_context(self.config, self.weights, fed.rows, fed.passed, memory.kv)
        return memory._replace(kv=kv)

    def draft(
        self,
        memory: DraftState,
        plan: SimpleNamespace,
        newest: Int[jax.Array, " B"],
        shape: TreeShape,
        ranking: Ranking,
        noise: Float[jax.Array, "B levels vocab"],
    ) -> tuple[Trees, DraftState]:
        """See `Drafter`; the tree is a chain, and rows past the lengths hold the block's KV."""
        start, lengths, block = memory.start[plan.slots], ranking.lengths, _block_of(self.config)
        rows = block_rows(block, lengths, start, plan.page_table)
        embed = self.target.embed[...]
        hidden, kv = fill(self.config, self.weights, embed, newest, rows, memory.kv)
        logits = model.logits(self.target, hidden[:, 1:].reshape(-1, hidden.shape[2]))
        drafts = choose(logits.reshape(len(newest), block.size - 1, -1), ranking, noise)
        limits = (plan.sampling.max_drafts, start < lengths)
        return chains(drafts, newest, *limits), memory._replace(kv=kv)


def _block_of(config: DraftConfig) -> BlockConfig:
    assert config.block is not None  # a DFlash head has a block
    return config.block


def write_context(
    config: DraftConfig, weights: DraftModel, rows: Rows, passed: Forward, kv: KV
) -> KV:
    """Writes rows of context, committed tokens, to the pools of all layers.

    Args:
      passed: The target's pass over the rows.
    """
    layer, stack = config.layer, weights.layers.attention
    aux = jnp.concatenate([passed.streams[i] for i in config.aux_streams], axis=1)
    read = rms_norm(linear(aux, weights.fc[...]), weights.hidden_norm[...], layer.rms_eps)
    turn = layers.angles(layer, rows.positions)
    for number in range(layer.num_layers):
        kv = layers.write_keys(layer, stack, number, read, rows, turn, kv)
    return kv


def block_rows(
    block: BlockConfig,
    lengths: Int[jax.Array, " B"],
    start: Int[jax.Array, " B"],
    page_table: Int[jax.Array, "B table"],
) -> list[Rows]:
    """The B * size rows of the blocks, as each layer sees them."""
    B, size = len(lengths), block.size
    request = jnp.repeat(jnp.arange(B, dtype=jnp.int32), size)
    slot = jnp.tile(jnp.arange(size, dtype=jnp.int32), B)
    is_real = (start < lengths)[request]
    positions = jnp.where(is_real, lengths[request] + slot, 0)
    no_window = jnp.zeros((B * size, 0), bool)
    row_starts = size * jnp.arange(B + 1, dtype=jnp.int32)
    found = []
    for window, is_causal in zip(block.windows, block.causal, strict=True):
        first, until = start[request], lengths[request] + size
        if is_causal:
            until = positions + 1
        if window is not None:
            first = jnp.maximum(first, positions - window + 1)
            until = jnp.minimum(until, positions + window)
        until = jnp.where(is_real, until, 0)
        where = (request, positions, positions, first, until, no_window, is_real)
        found.append(Rows(*where, page_table, row_starts, size))
    return found


def fill(
    config: DraftConfig,
    weights: DraftModel,
    embed: Float[jax.Array, "vocab hidden"],
    newest: Int[jax.Array, " B"],
    rows: list[Rows],
    kv: KV,
) -> tuple[Float[jax.Array, "B size hidden"], KV]:
    """Runs the blocks: their hidden states after the final norm, and the pools with their rows.

    Args:
      embed: The target's.
      newest: The token of slot 0; the others hold masks.
      rows: Of `block_rows`.
    """
    layer, stack, block = config.layer, weights.layers, _block_of(config)
    turn = layers.angles(layer, rows[0].positions)
    tokens = jnp.full((len(newest), block.size), block.mask_id, jnp.int32).at[:, 0].set(newest)
    x = embed[tokens.reshape(-1)]
    for number, seen in enumerate(rows):
        y = rms_norm(x, stack.input_norm[number], layer.rms_eps)
        out, kv = layers.attention_layer(layer, stack.attention, number, y, seen, turn, kv)
        x = x + out
        normed = rms_norm(x, stack.post_attention_norm[number], layer.rms_eps)
        x = x + layers.mlp(stack, number, normed)
    out = rms_norm(x, weights.final_norm[...], layer.rms_eps)
    return out.reshape(*tokens.shape, -1), kv


def choose(
    logits: Float[jax.Array, "B S vocab"],
    ranking: Ranking,
    noise: Float[jax.Array, "B levels vocab"],
) -> Int[jax.Array, "B S"]:
    """The draft of each slot; one after another where a penalty counts those before it."""
    noise, keeps = noise[:, : logits.shape[1]], ranking.kept is not None
    drafts, scores = lax.cond(
        ranking.sampling.has_penalty,
        partial(_one_by_one, ranking, keeps, logits, noise),
        partial(_at_once, ranking, keeps, logits, noise),
    )
    if ranking.kept is not None:
        ranking.kept.extend(scores[:, slot] for slot in range(scores.shape[1]))
    return drafts


Chosen = tuple[Int[jax.Array, "B S"], Float[jax.Array, "B S vocab"] | None]
"""Drafts, and where they are sampled the processed logits that they are sampled from."""


def _one_by_one(
    ranking: Ranking,
    keeps: bool,
    logits: Float[jax.Array, "B S vocab"],
    noise: Float[jax.Array, "B S vocab"],
) -> Chosen:
    B, S, _ = logits.shape

    def body(drafts: Int[jax.Array, "B 1 S"], at: tuple) -> tuple:
        slot, slot_logits, slot_noise = at
        own = ranking._replace(kept=[])
        ids, _ = own.rank(slot_logits[:, None], drafts, slot, slot_noise, 1)
        return drafts.at[:, 0, slot].set(ids[:, 0, 0]), own.kept[0] if keeps else None

    along = (jnp.moveaxis(logits, 1, 0), jnp.moveaxis(noise, 1, 0))
    slots = (jnp.arange(S, dtype=jnp.int32), *along)
    drafts, scores = lax.scan(body, jnp.zeros((B, 1, S), jnp.int32), slots)
    return drafts[:, 0], jnp.moveaxis(scores, 0, 1) if keeps else None


def _at_once(
    ranking: Ranking,
    keeps: bool,
    logits: Float[jax.Array, "B S vocab"],
    noise: Float[jax.Array, "B S vocab"],
) -> Chosen:
    B, S, vocab = logits.shape
    request, slot = jnp.repeat(jnp.arange(B), S), jnp.tile(jnp.arange(S), B)
    how, positions = ranking.sampling.rows(request), ranking.lengths[request] + slot + 1
    flat = logits.reshape(B * S, vocab)
    nothing = partial(jnp.zeros, flat.shape, jnp.int32)
    scores = sampling.processed_after(flat, nothing, positions, how, None)
    chosen = sampling.choose(scores, noise.reshape(B * S, vocab), how.temperature)
    return chosen.reshape(B, S), scores.reshape(B, S, vocab) if keeps else None


def chains(
    drafts: Int[jax.Array, "B S"],
    newest: Int[jax.Array, " B"],
    max_drafts: Int[jax.Array, " B"],
    has_context: Bool[jax.Array, " B"],
) -> Trees:
    """The first `max_drafts` drafts of each request, none without context, below its root."""
    S = drafts.shape[1]
    num_drafts = jnp.where(has_context, jnp.clip(max_drafts, 0, S), 0)
    slot = jnp.arange(S, dtype=jnp.int32)
    is_real = slot < num_drafts[:, None]
    tokens = jnp.concatenate([newest[:, None], jnp.where(is_real, drafts, 0)], axis=1)
    parents = jnp.pad(jnp.where(is_real, slot, 0), ((0, 0), (1, 0)))
    return tokens, parents, (1 + num_drafts).astype(jnp.int32)
