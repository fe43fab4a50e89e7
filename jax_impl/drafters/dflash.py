"""DFlash drafter: predicts a block of mask tokens in one pass; same as `shared.spec.dflash`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jax_impl.device_state import DraftState, Plan
from jax_impl.drafters import (
    DraftRequests,
    DraftTrees,
    ExtendRows,
    PrefillChunks,
    Ranking,
    convolution,
    dflash2,
    dspark,
)
from jax_impl.drafters.heads import embedding
from jax_impl.layers import AttentionContext, angles, attention, mlp, output_and_mlp, write_keys
from jax_impl.model import Forward, Model, embedding_factor, lm_head_input
from jax_impl.model_weights import BlockWeights
from jax_impl.ops import alone
from jax_impl.ops.attention.attention import KV, AttentionRows
from jax_impl.ops.attention.attention_layer import PagedKV
from jax_impl.ops.collectives import all_gather
from jax_impl.ops.gemm import linear
from jax_impl.ops.gemm.layers import embed_tokens, rms_norm
from jax_impl.ops.gemm.linear import product, rmsnorm_linear
from jax_impl.ops.sampling import lm_head
from jax_impl.ops.sampling.lm_head import Projection
from jax_impl.ops.sampling.vocab_parallel import Vocabulary
from jax_impl.ops.trees import best_prefixes, draft_tree, verify_budget
from shared.boundary.tp_group import TPGroup
from shared.drafts.config import DraftConfig, DraftStateSizes
from shared.drafts.dflash_config import BlockConfig
from shared.drafts.kinds import DFLASH2, DSPARK
from shared.spec.draft_tree import TreeShape

SELECTIONS: dict[str, Callable[[BlockWeights], Callable[..., Any]]] = {
    DSPARK.name: dspark.selection,
    DFLASH2.name: dflash2.selection,
}
"""Selections of draft tokens one after the other, by kind; other kinds select all at once."""

RANKINGS: dict[str, Callable[[BlockWeights], Callable[..., Any]]] = {
    DSPARK.name: dspark.ranking,
    DFLASH2.name: dflash2.ranking,
}
"""Rankings of the candidates of a tree after each token before, by kind; other kinds have one list
per slot."""


class BlockDrafter(NamedTuple):
    """Drafter with a block head.

    Attributes:
      select: Selects the draft tokens from the newest token, the hidden states of all slots, the
        logits of the draft tokens, the ranking and `is_weighed`; see `Ranking.chain`. None if all
        are selected at once.
      lists: Ranks the candidates of a tree, with the arguments of `select` but the last. None if
        the candidates of a slot do not depend on the token before.
    """

    target: Model
    weights: BlockWeights
    select: Callable[..., Any] | None
    lists: Callable[..., Any] | None

    @classmethod
    def of(cls, model: Model, weights: BlockWeights) -> "BlockDrafter":
        """Builds the drafter from its target and the weights of its head."""
        kind = weights.config.kind
        select, lists = SELECTIONS.get(kind), RANKINGS.get(kind)
        return cls(model, weights, select and select(weights), lists and lists(weights))

    @property
    def streams(self) -> tuple[int, ...]:
        return self.weights.config.aux_streams

    @property
    def sizes(self) -> DraftStateSizes:
        return self.weights.config.sizes

    def prefill(
        self,
        memory: DraftState,
        plan: Plan,
        prompts: PrefillChunks,
        committed: ExtendRows,
        rank: Ranking,
    ) -> DraftState:
        return self._extend(memory, committed)

    def extend(
        self,
        memory: DraftState,
        plan: Plan,
        before: Int[jax.Array, " B"],
        counts: Int[jax.Array, " B"],
        committed: ExtendRows,
        rank: Ranking,
    ) -> DraftState:
        return self._extend(memory, committed)

    def _extend(self, memory: DraftState, committed: ExtendRows) -> DraftState:
        rows, passed, group = committed.rows, committed.passed, self.target.group
        kv = write_context(self.weights, rows, passed, memory.kv[0], group)
        return memory._replace(kv=(kv,))

    def draft(
        self, memory: DraftState, requests: DraftRequests, shape: TreeShape, rank: Ranking
    ) -> tuple[DraftTrees, DraftState]:
        """Drafts a chain or tree of the block's first slots; writes the block's KV past the
        lengths.
        """
        newest, block = requests.newest, _block_of(self.weights.config)
        rows = block_rows(block, requests.lengths, requests.draft_from, requests.page_table)
        embed = embedding(self.target, self.weights)
        hidden, kv = fill(self.weights, embed, newest, rows, memory.kv[0], self.target.group)
        first, is_weighed = block.first_slot, shape.shares_rows(len(newest))
        taken = hidden[:, first : first + shape.depth]
        scored = head(self.target, self.weights, taken.reshape(-1, hidden.shape[2]))
        rank, memory = own_ranking(self.target, self.weights, rank), memory._replace(kv=(kv,))
        if shape.width > 1:
            ids, edges, lists = self._candidates(scored, newest, hidden, shape.depth, rank)
            grown = best_prefixes.grow(
                newest,
                ids,
                edges,
                lists,
                rank.sampling.branch_calibration,
                requests.max_drafts,
                requests.can_draft,
                shape.nodes,
            )
            return DraftTrees(*grown, None), memory
        drafts, edges, processed = self._chosen(
            scored, newest, hidden, shape.depth, rank, is_weighed
        )
        tokens, parents, num_nodes = draft_tree.chains(
            drafts, newest, requests.max_drafts, requests.can_draft
        )
        weights = None if edges is None else verify_budget.chain_weights(edges)
        return DraftTrees(tokens, parents, num_nodes, weights, processed), memory

    def _candidates(
        self,
        scored: Projection,
        newest: Int[jax.Array, " B"],
        filled: Float[jax.Array, "B size hidden"],
        S: int,
        rank: Ranking,
    ) -> tuple[
        Int[jax.Array, "B S P K"], Float[jax.Array, "B S P K"], Int[jax.Array, "B S P K"] | None
    ]:
        """Ranks the candidates of a tree; see `best_prefixes.grow`."""
        if self.lists is None:
            ids, edges = rank.block(scored, S)
            return ids[:, :, None], edges[:, :, None], None
        logits = lm_head.scores(scored).reshape(len(newest), S, -1)
        return self.lists(newest, filled, logits, rank)

    def _chosen(
        self,
        scored: Projection,
        newest: Int[jax.Array, " B"],
        filled: Float[jax.Array, "B size hidden"],
        S: int,
        rank: Ranking,
        is_weighed: bool,
    ) -> tuple[
        Int[jax.Array, "B S"], Float[jax.Array, "B S"] | None, Float[jax.Array, "B S vocab"] | None
    ]:
        """Chooses the draft tokens; see `Ranking.chain`."""
        if self.select is None:
            return rank.chain(scored, S, is_weighed)
        logits = lm_head.scores(scored).reshape(len(newest), S, -1)
        return self.select(newest, filled, logits, rank, is_weighed)


def head(target: Model, weights: BlockWeights, hidden: Float[jax.Array, "R hidden"]) -> Projection:
    """Returns the LM-head projection of this rank's shard, by the head's or target's `lm_head`."""
    if weights.lm_head is None:
        return lm_head_input(target, hidden)
    return Projection(hidden, weights.lm_head)


def own_ranking(target: Model, weights: BlockWeights, rank: Ranking) -> Ranking:
    """Returns the ranking for logits over the head's vocabulary."""
    if weights.lm_head is None:
        return rank
    vocabulary = Vocabulary(weights.config.draft_vocab, target.group)
    return rank._replace(columns=weights.draft_ids, vocabulary=vocabulary)


def _block_of(config: DraftConfig) -> BlockConfig:
    assert config.block is not None  # a DFlash head has a block
    return config.block


def write_context(
    weights: BlockWeights, rows: AttentionRows, passed: Forward, kv: KV, group: TPGroup
) -> KV:
    """Writes the KV of context rows (committed tokens) to the pools of all layers.

    Args:
      passed: Target's forward pass over the rows, with the streams that the head reads.
      group: Tensor-parallel group of the head.
    """
    config = weights.config.layer
    joined = product(jnp.concatenate(passed.streams, axis=1), weights.fc)
    joined = all_gather.all_gather(group, joined)
    read = rms_norm(joined, weights.hidden_norm, config.rms_eps)
    rope = angles(config.attention, rows.positions)
    for place, layer in enumerate(weights.layers):
        kv = write_keys(config, layer, read, rope, rows, kv, place)
    return kv


def block_rows(
    block: BlockConfig,
    lengths: Int[jax.Array, " B"],
    draft_from: Int[jax.Array, " B"],
    page_table: Int[jax.Array, "B table"],
) -> list[AttentionRows]:
    """Returns the B * size rows of the blocks for each layer."""
    B, size = len(lengths), block.size
    request = jnp.repeat(jnp.arange(B, dtype=jnp.int32), size)
    slot = jnp.tile(jnp.arange(size, dtype=jnp.int32), B)
    is_real = (draft_from < lengths)[request]
    positions = jnp.where(is_real, lengths[request] + slot, 0)
    no_window = jnp.zeros((B * size, 0), bool)
    row_starts = size * jnp.arange(B + 1, dtype=jnp.int32)
    rows_of = []
    for window, is_causal in zip(block.windows, block.causal, strict=True):
        first, until = draft_from[request], lengths[request] + size
        if is_causal:
            until = positions + 1
        if window is not None and block.from_anchor:
            first = jnp.maximum(first, lengths[request] - window)
        elif window is not None:
            first = jnp.maximum(first, positions - window + 1)
            until = jnp.minimum(until, positions + window)
        rows = AttentionRows(
            request=request,
            positions=positions,
            places=positions,
            first=first,
            until=jnp.where(is_real, until, 0),
            window=no_window,
            is_real=is_real,
            page_table=page_table,
            row_starts=row_starts,
            max_rows=size,
        )
        rows_of.append(rows)
    return rows_of


def fill(
    weights: BlockWeights,
    embed: Float[jax.Array, "vocab hidden"],
    newest: Int[jax.Array, " B"],
    rows: list[AttentionRows],
    kv: KV,
    group: TPGroup,
) -> tuple[Float[jax.Array, "B size hidden"], KV]:
    """Runs the blocks; returns the hidden states after the final norm and the updated pools.

    Args:
      embed: Embedding table of the head or of the target.
      newest: Token of block position 0; the other positions are mask tokens.
      rows: Rows from `block_rows`.
      group: Tensor-parallel group of the head.
    """
    config, block = weights.config.layer, _block_of(weights.config)
    rope = angles(config.attention, rows[0].positions)
    tokens = jnp.full((len(newest), block.size), block.mask_id, jnp.int32).at[:, 0].set(newest)
    x = embed_tokens(embed, tokens.reshape(-1), None, embedding_factor(config, embed))
    if weights.around is not None:
        norms = [norm for each in weights.layers for norm in (each.input_norm, each.post_norm)]
        scales = [*(norm for norm in norms if norm is not None), weights.final_norm]
        out = rms_norm(x, alone(scales[0]), config.rms_eps)
        for place, (around, seen) in enumerate(zip(weights.around, rows, strict=True)):
            context = AttentionContext(rope, None, seen, PagedKV.of(kv, seen), group)
            following = (scales[2 * place + 1], scales[2 * place + 2])
            given = (config, weights.layers[place], around, following, place, block.size)
            x, out, paged = convolution.layer(*given, x, out, context)
            kv = paged.pools
        return out.reshape(*tokens.shape, -1), kv
    norms = [*(layer.input_norm for layer in weights.layers), None]
    stream = linear.stream(x, norms[0], None, group)
    for place, (layer, seen) in enumerate(zip(weights.layers, rows, strict=True)):
        context = AttentionContext(rope, None, seen, PagedKV.of(kv, seen), group)
        qkv = rmsnorm_linear(stream, config.rms_eps, layer.mixer.inputs)
        mixed, paged = attention(
            config, config.attention, context, place, layer.mixer, qkv, context.kv
        )
        stream = output_and_mlp(config, layer, mlp, mixed, stream, norms[place + 1])
        kv = paged.pools
    out = rms_norm(stream.whole, weights.final_norm, config.rms_eps)
    return out.reshape(*tokens.shape, -1), kv
