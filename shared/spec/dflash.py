"""DFlash: a small draft model that fills a block of mask tokens in one pass.

It reads the target through injected keys and values: one context row per committed token with known
hidden states, computed from those alone. The block is the newest token followed by masks. Its rows
attend to the context and to each other, and the logits of slot j predict the token at slot j's own
position. The block's KV is stored past the request's length and is overwritten before it counts as
context.

The drafts are a chain of one token per slot, or a tree of several (`shared.spec.best_prefixes`).
The block of a JetSpec head is causal: its rows do not attend to later rows.

Source: DFlash, arXiv:2602.06036.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from shared.drafts.config import DraftConfig, DraftHead
from shared.drafts.dflash2 import ConvConfig
from shared.drafts.dflash_config import BlockConfig
from shared.models.config import ModelConfig
from shared.spec import best_prefixes, convolution, draft_tree, layers, linear, model, verify_budget
from shared.spec.attention import AttentionRows
from shared.spec.attention_layer import Heads, write_kv
from shared.spec.cache_pools import KV
from shared.spec.draft_tree import TreeShape
from shared.spec.eagle import HeadWeights, embedding
from shared.spec.linear import NormedStream
from shared.spec.model import Hidden, Weights
from shared.spec.sampling import over_tokens
from shared.spec.tree_growth import DraftRequests, Tree

Chain = tuple[Int[np.ndarray, "B S"], Float[np.ndarray, "B S"]]
"""Draft tokens of each request, and the log weight of each."""

Choose = Callable[[Float[np.ndarray, "B size hidden"], Float[np.ndarray, "B S vocab"]], Chain]
"""Selects each request's draft tokens from the hidden states of its block and the logits of its
slots.

DSpark and DFlash2 select one token after the other. DFlash selects all at once: the logits of a
slot do not depend on earlier draft tokens, and penalties do not either, because that would
serialise S selections over the vocabulary. Accepted tokens are the target's choice in any case.
"""


Candidates = tuple[
    Int[np.ndarray, "B S P K"], Float[np.ndarray, "B S P K"], Int[np.ndarray, "B S P K"] | None
]
"""Candidates of the slots of a block: tokens, log weights and lists; see `best_prefixes.grow`."""

RankSlots = Callable[
    [Float[np.ndarray, "B size hidden"], Float[np.ndarray, "B S vocab"]], Candidates
]
"""Ranks the candidates of each slot; the arguments are those of `Choose`."""


def context(
    config: DraftConfig, weights: HeadWeights, aux: Float[np.ndarray, "R inputs"]
) -> Hidden:
    """Computes the context input of all layers from hidden states of the target.

    Args:
      config, weights: Config and weights of the head.
      aux: Auxiliary hidden states named by `config.aux_streams`, concatenated.
    """
    projected = layers.linear(aux, weights["fc"])
    return layers.rms_norm(projected, weights["hidden_norm"], config.layer.rms_eps)


def extend(
    config: ModelConfig, weights: HeadWeights, rows: AttentionRows, read: Hidden, kv: KV
) -> KV:
    """Draft extend: writes context KV to the pools of all layers; layers use only their K and V
    projections.

    Args:
      config: Config of the draft model's layers.
      weights: Weights of the head.
      rows: Committed tokens with known hidden states.
      read: Result of `context` for these rows.
      kv: Pools of all layers.
    """
    keys, pools = config.attention.key_size, []
    angles, heads = model.angles(config.attention, rows), Heads.of(config.attention)
    for layer in range(config.num_layers):
        weight = model.matrix(weights, "layer.attention.inputs", layer)
        norms = model.head_norms(config, weights, "layer.attention.", layer)
        assert norms is not None  # required for DFlash
        written = linear.product(read, weight, weight.num_outputs - 2 * keys)
        pools.append(write_kv(written, heads, norms, angles, rows, *kv[layer]))
    return np.array(pools)


def block_rows(
    block: BlockConfig,
    lengths: Int[np.ndarray, " B"],
    draft_from: Int[np.ndarray, " B"],
    page_table: Int[np.ndarray, "B table"],
) -> list[AttentionRows]:
    """Returns the B * size rows of the blocks, with the visibility of each layer.

    Slot j has position `lengths + j`. A request whose `draft_from` equals its length has no
    context, and its rows are padding.
    """
    B, size = len(lengths), block.size
    request, slot = np.repeat(np.arange(B), size), np.tile(np.arange(size), B)
    is_real = (draft_from < lengths)[request]
    positions = np.where(is_real, lengths[request] + slot, 0)
    start, end = draft_from[request], lengths[request] + size
    no_window = np.zeros((B * size, 0), bool)
    rows = []
    for window, is_causal in zip(block.windows, block.causal, strict=True):
        until = positions + 1 if is_causal else end
        first = start
        if window is not None and block.from_anchor:
            first = np.maximum(start, lengths[request] - window)
        elif window is not None:
            first = np.maximum(start, positions - window + 1)
            until = np.minimum(until, positions + window)
        rows.append(
            AttentionRows(
                request=request,
                positions=positions,
                places=positions,
                first=first,
                until=np.where(is_real, until, 0),
                window=no_window,
                is_real=is_real,
                page_table=page_table,
            )
        )
    return rows


def fill(
    config: DraftConfig,
    weights: HeadWeights,
    target: Weights,
    newest: Int[np.ndarray, " B"],
    rows: list[AttentionRows],
    kv: KV,
) -> tuple[Float[np.ndarray, "B size hidden"], KV]:
    """Runs the blocks; returns the hidden states after the final norm, and the KV with the blocks'
    rows.

    Args:
      config, weights: Config and weights of the head.
      target: The target's weights, for the embedding if the head has none.
      newest: Token of slot 0; the others are masks.
      rows: Result of `block_rows`.
      kv: Draft KV, complete from `draft_from` to the length.

    Source: DFlash, arXiv:2602.06036.
    """
    block, sizes = config.block, config.layer
    assert block is not None  # a DFlash head has a block
    tokens = np.full((len(newest), block.size), block.mask_id)
    tokens[:, 0] = newest
    table, factor = embedding(weights, target), sizes.embedding_factor
    x = layers.embed_tokens(table, tokens.reshape(-1), None, factor)
    if block.part(ConvConfig) is not None:
        out = model.norm(sizes, x, weights["layer.input_norm"][0])
        for layer, layer_rows in enumerate(rows):
            x, out, kv = convolution.layer(sizes, block, weights, layer, x, out, layer_rows, kv)
        return out.reshape(len(newest), block.size, -1), kv
    stream = NormedStream(x)
    for layer, layer_rows in enumerate(rows):
        y = model.norm(sizes, stream.rows, weights["layer.input_norm"][layer])
        stream, kv = model.attention_layer(
            sizes, sizes.attention, weights, "layer.", layer, y, stream, layer_rows, kv
        )
        mlp = sizes.layers[layer].mlp
        stack = f"layer.{mlp.kind}.", layer
        stream = model.mlp_layer(sizes, mlp, weights, "layer.", layer, stack, stream)
    out = model.norm(sizes, stream.rows, weights["final_norm"])
    return out.reshape(len(newest), block.size, -1), kv


def scores(
    config: DraftConfig, weights: HeadWeights, target: Weights, hidden: Hidden
) -> Float[np.ndarray, "R vocab"]:
    """Computes logits over the target's vocabulary, -inf for tokens outside the draft vocabulary.

    Args:
      config, weights: Config and weights of the head; without an `lm_head` the target's is used.
      target: The target's weights.
      hidden: Hidden states from `fill`.
    """
    if "lm_head" not in weights:
        return model.logits(config.layer, target, hidden)
    scored = layers.linear(hidden, weights["lm_head"])
    return over_tokens(scored, weights.get("draft_ids"), config.layer.vocab)


@dataclass(frozen=True)
class BlockHeadDrafter:
    """A DFlash head bound to its weights and its target's."""

    head: DraftHead
    target: Weights

    @property
    def layer(self) -> ModelConfig:
        """Config of the head's layers."""
        return self.head.config.layer

    def reads(self, passed: model.Forward) -> Hidden:
        """Returns the `context` of the rows of a target pass."""
        config = self.head.config
        aux = np.concatenate([passed.streams[i] for i in config.aux_streams], axis=1)
        return context(config, self.head.weights, aux)

    def extend(self, rows: AttentionRows, read: Hidden, kv: KV) -> KV:
        """Applies the function `extend` to the bound head."""
        return extend(self.layer, self.head.weights, rows, read, kv)

    def draft(self, kv: KV, requests: DraftRequests, depth: int, choose: Choose) -> Tree:
        """Drafts a chain for each request; does not change the pools.

        Args:
          kv: Draft KV of the head.
          requests: Requests of the step.
          depth: S, the number of the block's first draft tokens to use. The whole block is always
            computed, because its rows attend to all of it.
          choose: Selects the draft tokens.
        """
        hidden = self.filled(kv, requests)
        drafts, edges = choose(hidden, self.scores(hidden, depth))
        chains = draft_tree.chains(drafts, requests.newest, requests.max_drafts, requests.can_draft)
        return (*chains, verify_budget.chain_weights(edges))

    def grow(
        self,
        kv: KV,
        requests: DraftRequests,
        shape: TreeShape,
        rank: RankSlots,
        branch_calibration: Float[np.ndarray, "B S_max"],
    ) -> Tree:
        """Drafts a tree of the best prefixes for each request; does not change the pools.

        Args:
          kv, requests: See `draft`.
          shape: Shape of the trees.
          rank: Ranks the candidates of the first `depth` draft tokens.
          branch_calibration: See `best_prefixes.grow`.
        """
        hidden = self.filled(kv, requests)
        tokens, edges, lists = rank(hidden, self.scores(hidden, shape.depth))
        return best_prefixes.grow(
            newest=requests.newest,
            tokens=tokens,
            edges=edges,
            lists=lists,
            branch_calibration=branch_calibration,
            max_drafts=requests.max_drafts,
            can_draft=requests.can_draft,
            nodes=shape.nodes,
        )

    def filled(self, kv: KV, requests: DraftRequests) -> Float[np.ndarray, "B size hidden"]:
        """Computes the hidden states of each request's block; does not change the pools."""
        config = self.head.config
        assert config.block is not None  # a DFlash head has a block
        rows = block_rows(config.block, requests.lengths, requests.draft_from, requests.page_table)
        hidden, _ = fill(config, self.head.weights, self.target, requests.newest, rows, kv)
        return hidden

    def scores(
        self, hidden: Float[np.ndarray, "B size hidden"], depth: int
    ) -> Float[np.ndarray, "B S vocab"]:
        """Computes the logits of the first `depth` draft tokens of each block."""
        config = self.head.config
        assert config.block is not None  # a DFlash head has a block
        first = config.block.first_slot
        weights, slots = self.head.weights, range(first, first + depth)
        scored = [scores(config, weights, self.target, hidden[:, slot]) for slot in slots]
        return np.stack(scored, axis=1)
