"""DFlash drafter: predicts a block of mask tokens in one pass; same as `shared.spec.dflash`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shared.boundary.tp_group import TPGroup
from shared.drafts.config import DraftStateSizes
from shared.drafts.dflash_config import BlockConfig
from shared.drafts.kinds import DFLASH2, DSPARK
from shared.spec.draft_tree import TreeShape
from torch_impl.device_state import DraftState, Plan
from torch_impl.drafters import (
    DraftRequests,
    DraftTrees,
    ExtendRows,
    PrefillChunks,
    Ranking,
    convolution,
    dflash2,
    dspark,
)
from torch_impl.drafters.heads import embedding
from torch_impl.layers import (
    AttentionContext,
    angles,
    attention,
    mlp,
    output_and_mlp,
    rotary_frequencies,
    write_keys,
)
from torch_impl.model import Forward, Model, embedding_factor, lm_head_input
from torch_impl.model_weights import BlockWeights
from torch_impl.ops.attention.attention import KV, AttentionRows
from torch_impl.ops.attention.attention_layer import PagedKV
from torch_impl.ops.collectives import all_gather
from torch_impl.ops.gemm import linear
from torch_impl.ops.gemm.layers import embed_tokens, rms_norm
from torch_impl.ops.gemm.linear import product, rmsnorm_linear
from torch_impl.ops.sampling import lm_head
from torch_impl.ops.sampling.lm_head import Projection
from torch_impl.ops.sampling.vocab_parallel import Vocabulary
from torch_impl.ops.trees import best_prefixes, draft_tree, verify_budget

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


@dataclass(frozen=True)
class BlockDrafter:
    """Drafter with a block head.

    Attributes:
      frequencies: RoPE frequencies of the head.
      select: Selects the draft tokens from the newest token, the hidden states of all slots, the
        logits of the draft tokens, the ranking and `is_weighed`; see `Ranking.chain`. None if all
        are selected at once.
      lists: Ranks the candidates of a tree, with the arguments of `select` but the last. None if
        the candidates of a slot do not depend on the token before.
    """

    target: Model
    weights: BlockWeights
    frequencies: Float[Tensor, " half"]
    select: Callable[..., Any] | None
    lists: Callable[..., Any] | None

    @classmethod
    def of(cls, model: Model, weights: BlockWeights) -> "BlockDrafter":
        """Builds the drafter from its target and the weights of its head."""
        kind, device = weights.config.kind, model.weights.embed.device
        select, lists = SELECTIONS.get(kind), RANKINGS.get(kind)
        frequencies = rotary_frequencies(weights.config.layer.attention, device)
        select, lists = select and select(weights), lists and lists(weights)
        return cls(model, weights, frequencies, select, lists)

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
    ) -> None:
        self._extend(memory, committed)

    def extend(
        self,
        memory: DraftState,
        plan: Plan,
        before: Int[Tensor, " B"],
        counts: Int[Tensor, " B"],
        committed: ExtendRows,
        rank: Ranking,
    ) -> None:
        self._extend(memory, committed)

    def _extend(self, memory: DraftState, committed: ExtendRows) -> None:
        rows, passed, group = committed.rows, committed.passed, self.target.group
        write_context(self.weights, self.frequencies, rows, passed, memory.kv[0], group)

    def draft(
        self, memory: DraftState, requests: DraftRequests, shape: TreeShape, rank: Ranking
    ) -> DraftTrees:
        """Drafts a chain or tree of the block's first slots; writes the block's KV past the
        lengths.
        """
        newest, block = requests.newest, _block_of(self.weights)
        rows = block_rows(block, requests.lengths, requests.draft_from, requests.page_table)
        embed, kv = embedding(self.target, self.weights), memory.kv[0]
        filled = fill(self.weights, embed, self.frequencies, newest, rows, kv, self.target.group)
        first, is_weighed = block.first_slot, shape.shares_rows(len(newest))
        hidden = filled[:, first : first + shape.depth]
        scored = head(self.target, self.weights, hidden.flatten(0, 1))
        rank = own_ranking(self.target, self.weights, rank)
        if shape.width > 1:
            ids, edges, lists = self._candidates(scored, newest, filled, shape.depth, rank)
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
            return DraftTrees(*grown, None)
        drafts, edges, processed = self._chosen(
            scored, newest, filled, shape.depth, rank, is_weighed
        )
        tokens, parents, num_nodes = draft_tree.chains(
            drafts, newest, requests.max_drafts, requests.can_draft
        )
        weights = None if edges is None else verify_budget.chain_weights(edges)
        return DraftTrees(tokens, parents, num_nodes, weights, processed)

    def _candidates(
        self,
        scored: Projection,
        newest: Int[Tensor, " B"],
        filled: Float[Tensor, "B size hidden"],
        S: int,
        rank: Ranking,
    ) -> tuple[Int[Tensor, "B S P K"], Float[Tensor, "B S P K"], Int[Tensor, "B S P K"] | None]:
        """Ranks the candidates of a tree; see `best_prefixes.grow`."""
        if self.lists is None:
            ids, edges = rank.block(scored, S)
            return ids[:, :, None], edges[:, :, None], None
        logits = lm_head.scores(scored).unflatten(0, (-1, S))
        return self.lists(newest, filled, logits, rank)

    def _chosen(
        self,
        scored: Projection,
        newest: Int[Tensor, " B"],
        filled: Float[Tensor, "B size hidden"],
        S: int,
        rank: Ranking,
        is_weighed: bool,
    ) -> tuple[Int[Tensor, "B S"], Float[Tensor, "B S"] | None, Float[Tensor, "B S vocab"] | None]:
        """Chooses the draft tokens; see `Ranking.chain`."""
        if self.select is None:
            return rank.chain(scored, S, is_weighed)
        logits = lm_head.scores(scored).unflatten(0, (-1, S))
        return self.select(newest, filled, logits, rank, is_weighed)


def head(target: Model, weights: BlockWeights, hidden: Float[Tensor, "R hidden"]) -> Projection:
    """Returns the LM-head projection of this rank's shard, by the head's or target's `lm_head`."""
    if weights.lm_head is None:
        return lm_head_input(target, hidden)
    return Projection(hidden, weights.lm_head)


def own_ranking(target: Model, weights: BlockWeights, rank: Ranking) -> Ranking:
    """Returns the ranking for logits over the head's vocabulary."""
    if weights.lm_head is None:
        return rank
    vocabulary = Vocabulary(weights.config.draft_vocab, target.group)
    return replace(rank, columns=weights.draft_ids, vocabulary=vocabulary)


def _block_of(weights: BlockWeights) -> BlockConfig:
    assert weights.config.block is not None  # a DFlash head has a block
    return weights.config.block


def write_context(
    weights: BlockWeights,
    frequencies: Float[Tensor, " half"],
    rows: AttentionRows,
    passed: Forward,
    kv: KV,
    group: TPGroup,
) -> None:
    """Writes the KV of context rows (committed tokens) to the pools of all layers.

    Args:
      passed: Target's forward pass over the rows, with the streams that the head reads.
      group: Tensor-parallel group of the head.
    """
    config = weights.config.layer
    joined = all_gather.all_gather(group, product(torch.cat(passed.streams, dim=1), weights.fc))
    read = rms_norm(joined, weights.hidden_norm, config.rms_eps)
    rope = angles(config.attention, frequencies, rows)
    for place, layer in enumerate(weights.layers):
        write_keys(config, layer, read, rope, rows, kv, place)


def block_rows(
    block: BlockConfig,
    lengths: Int[Tensor, " B"],
    draft_from: Int[Tensor, " B"],
    page_table: Int[Tensor, "B P"],
) -> list[AttentionRows]:
    B, size, device = len(lengths), block.size, lengths.device
    place = torch.arange(B * size, dtype=torch.int32, device=device)
    request = torch.div(place, size, rounding_mode="floor").long()
    is_real = (draft_from < lengths)[request]
    positions = torch.where(is_real, lengths[request] + place - request * size, 0).int()
    start, end = draft_from[request], lengths[request] + size
    row_starts = size * torch.arange(B + 1, dtype=torch.int32, device=device)
    rows_of = []
    for window, is_causal in zip(block.windows, block.causal, strict=True):
        first, until = start, positions + 1 if is_causal else end
        if window is not None and block.from_anchor:
            first = torch.maximum(first, lengths[request] - window)
        elif window is not None:
            first = torch.maximum(first, positions - window + 1)
            until = torch.minimum(until, positions + window)
        rows = AttentionRows(
            request=request,
            positions=positions,
            places=positions,
            first=first,
            until=torch.where(is_real, until, 0),
            window=is_real.new_zeros(B * size, 0),
            is_real=is_real,
            page_table=page_table,
            row_starts=row_starts,
            max_rows=size,
        )
        rows_of.append(rows)
    return rows_of


def fill(
    weights: BlockWeights,
    embed: Float[Tensor, "vocab hidden"],
    frequencies: Float[Tensor, " half"],
    newest: Int[Tensor, " B"],
    rows: list[AttentionRows],
    kv: KV,
    group: TPGroup,
) -> Float[Tensor, "B size hidden"]:
    """Runs the blocks and writes their KV; returns the hidden states after the final norm.

    Args:
      embed: Embedding table of the head or of the target.
      newest: Token of block position 0; the other positions are mask tokens.
      rows: Rows from `block_rows`.
      group: Tensor-parallel group of the head.
    """
    config, block = weights.config.layer, _block_of(weights)
    rope = angles(config.attention, frequencies, rows[0])
    masks = newest.new_full((len(newest), block.size - 1), block.mask_id)
    tokens = torch.cat([newest[:, None], masks], dim=1).flatten()
    x = embed_tokens(embed, tokens, None, embedding_factor(config, embed))
    if weights.around is not None:
        norms = [norm for each in weights.layers for norm in (each.input_norm, each.post_norm)]
        scales = [*(norm for norm in norms if norm is not None), weights.final_norm]
        out = rms_norm(x, scales[0], config.rms_eps)
        for place, (around, seen) in enumerate(zip(weights.around, rows, strict=True)):
            context = AttentionContext(rope, None, seen, PagedKV.of(kv, seen), group)
            following = (scales[2 * place + 1], scales[2 * place + 2])
            given = (config, weights.layers[place], around, following, place, block.size)
            x, out = convolution.layer(*given, x, out, context)
        return out.unflatten(0, (len(newest), block.size))
    norms = [*(layer.input_norm for layer in weights.layers), None]
    stream = linear.stream(x, norms[0], None, group)
    for place, (layer, seen) in enumerate(zip(weights.layers, rows, strict=True)):
        context = AttentionContext(rope, None, seen, PagedKV.of(kv, seen), group)
        qkv = rmsnorm_linear(stream, config.rms_eps, layer.mixer.inputs)
        mixed = attention(config, config.attention, context, place, layer.mixer, qkv)
        stream = output_and_mlp(config, layer, mlp, mixed, stream, norms[place + 1])
    out = rms_norm(stream.whole, weights.final_norm, config.rms_eps)
    return out.unflatten(0, (len(newest), block.size))
