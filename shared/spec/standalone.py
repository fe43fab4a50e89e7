"""STANDALONE drafting: a small draft model with the target's tokenizer drafts autoregressively.

Its KV uses the target's page tables: row p is token p. A hybrid draft model has its own recurrent
states at the committed length, like the target's. Nothing else is carried between steps. Drafting
starts with the newest token, whose row it writes at the length. After a step, draft extend runs the
model over the accepted path. Drafting writes only rows past the length and does not change the
states; each node of its tree continues from its parent's state.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from shared.models.config import ModelConfig
from shared.spec import attention, eagle, model, recurrent_state, tree_growth
from shared.spec.attention import AttentionRows
from shared.spec.cache_pools import Pools
from shared.spec.draft_tree import TreeShape
from shared.spec.recurrent_mixer import RecurrentMixer, RecurrentPrefill, RecurrentVerify
from shared.spec.recurrent_state import RecurrentState
from shared.spec.tree_growth import DraftRequests, Logits, Rank, Tokens, Tree


@dataclass(frozen=True, eq=False)
class SmallModel:
    """A draft model.

    Attributes:
      config: Its own config.
      weights: Arrays by the names of `shared.models.parameters`.
      target_vocab: Vocabulary size of the target.
    """

    config: ModelConfig
    weights: Mapping[str, Float[np.ndarray, "..."]]
    target_vocab: int

    def forward(
        self, kv: Pools, rows: AttentionRows, tokens: Tokens, mixer: RecurrentMixer
    ) -> model.Forward:
        """Runs the model; tokens beyond its vocabulary are clamped to the last."""
        known = np.minimum(tokens, self.config.vocab - 1)
        return model.forward(self.config, self.weights, kv, rows, known, None, mixer)

    def logits(self, hidden: model.Hidden) -> Logits:
        """Computes logits over the target's vocabulary."""
        return over_target(model.logits(self.config, self.weights, hidden), self.target_vocab)


def over_target(
    logits: Float[np.ndarray, "R draft_vocab"], vocab: int
) -> Float[np.ndarray, "R vocab"]:
    """Converts logits to a vocabulary that starts with the same tokens: truncated, or padded with
    -inf.

    Padded vocabularies of one tokenizer may differ in length.
    """
    missing = max(vocab - logits.shape[1], 0)
    filled = np.pad(logits, ((0, 0), (0, missing)), constant_values=-np.inf)
    return filled[:, :vocab]


def context_of(
    state: RecurrentState, draft_from: Int[np.ndarray, " B"], lengths: Int[np.ndarray, " B"]
) -> RecurrentState:
    """Returns the states from which a drafter continues: zeros if its KV starts at the length.

    Plain steps do not run draft extend, so a state from before them does not match the sequence.
    """
    is_whole = np.less(draft_from, lengths)
    recurrent = np.where(is_whole[None, :, None, None, None], state.recurrent, 0)
    return RecurrentState(recurrent, np.where(is_whole[None, :, None, None], state.window, 0))


def prefill(
    small: SmallModel,
    kv: Pools,
    state: RecurrentState,
    tokens: Int[np.ndarray, " T"],
    first: int,
    draft_from: Int[np.ndarray, " one"],
    page_table: Int[np.ndarray, "one table"],
) -> tuple[Pools, RecurrentState]:
    """Runs the model over one request's prompt chunk, from position `first` on."""
    row_starts, start = np.array([0, len(tokens)], np.int32), np.array([first], np.int32)
    rows = attention.causal_rows(row_starts, start, draft_from, page_table, len(tokens))
    state = context_of(state, draft_from, start)
    mixer = RecurrentPrefill(small.config, small.weights, state, row_starts)
    passed = small.forward(kv, rows, tokens, mixer)
    return passed.kv, RecurrentState(mixer.recurrent, mixer.window)


def extend(
    small: SmallModel,
    kv: Pools,
    state: RecurrentState,
    tokens: Int[np.ndarray, "B W"],
    lengths: Int[np.ndarray, " B"],
    counts: Int[np.ndarray, " B"],
    draft_from: Int[np.ndarray, " B"],
    page_table: Int[np.ndarray, "B table"],
    save_after: Int[np.ndarray, " B"],
) -> tuple[Pools, RecurrentState, RecurrentState, Bool[np.ndarray, " B"]]:
    """Draft extend: runs the model over accepted paths, from the lengths before the step on.

    Args:
      small: The draft model.
      kv: Its KV.
      state: States at the lengths.
      tokens: The path: the newest token, then accepted draft tokens.
      lengths: Lengths before the step.
      counts: Number of real tokens of each path.
      draft_from: First position with draft KV.
      page_table: Pages of each request.
      save_after: See `recurrent_state.replay`.

    Returns:
      The KV, then the results of `recurrent_state.replay`.
    """
    B, W = tokens.shape
    rows = eagle.extend_rows(lengths, counts, draft_from, page_table, depth=W - 1)
    state = context_of(state, draft_from, lengths)
    place = np.arange(W)
    parents = np.tile(np.maximum(place - 1, 0), (B, 1))
    row_of = np.arange(B * W).reshape(B, W)
    node = np.tile(place, B)
    chain = RecurrentVerify(small.config, small.weights, state, parents, row_of, rows.request, node)
    flat = tokens.reshape(-1)
    passed = small.forward(kv, rows, flat, chain)
    path = np.tile(place, (B, 1))
    after = recurrent_state.replay(state, chain.all_kept(), path, counts, save_after)
    return (passed.kv, *after)


def draft(
    small: SmallModel,
    kv: Pools,
    state: RecurrentState,
    requests: DraftRequests,
    shape: TreeShape,
    rank: Rank,
) -> tuple[Tree, Pools]:
    """Grows one draft tree per request in S expansions, the first of them on the root.

    Args:
      small: The draft model.
      kv, state: Its KV and states, which do not include the newest token; the states do not
        change.
      requests: Requests of the step.
      shape: Shape of the trees.
      rank: Selects each node's k children.

    Returns:
      The trees, and the model's KV.
    """

    def expand(
        rows: AttentionRows, tokens: Tokens, parent: Int[np.ndarray, " R"], kv: Pools
    ) -> tuple[Logits, Pools]:
        nonlocal state
        before = RecurrentState(state.recurrent[:, parent], state.window[:, parent])
        logits, kv, state = _step(small, kv, before, rows, tokens)
        return logits, kv

    B, counts = len(requests.newest), requests.can_draft.astype(np.int32)
    rows = eagle.extend_rows(
        requests.lengths, counts, requests.draft_from, requests.page_table, depth=0
    )
    logits, kv = expand(rows, requests.newest, np.arange(B), kv)
    ids, weights = rank(logits[:, None], np.zeros((B, 1, 0), np.int32))
    first = (ids[:, 0], weights[:, 0])
    return tree_growth.grow(expand, kv, first, requests, shape, rank, root_rows=1)


def _step(
    small: SmallModel, kv: Pools, state: RecurrentState, rows: AttentionRows, tokens: Tokens
) -> tuple[Logits, Pools, RecurrentState]:
    """Runs one token for each row from the row's own state; returns the states after the tokens."""
    R = len(tokens)
    row, one = np.arange(R), np.ones(R, np.int32)
    parents = np.zeros((R, 1), np.int32)
    mixer = RecurrentVerify(small.config, small.weights, state, parents, row[:, None], row, 0 * row)
    passed = small.forward(kv, rows, tokens, mixer)
    after, *_ = recurrent_state.replay(state, mixer.all_kept(), parents, one, 0 * one)
    return small.logits(passed.hidden), passed.kv, after
