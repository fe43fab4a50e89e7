"""STANDALONE drafting: a whole small model with the target's tokenizer drafts on its own.

Its KV lies under the target's page tables: row p holds token p. A hybrid has recurrent states of
its own, which stand at the committed length like the target's. Between steps it carries nothing
else: drafting begins with the newest token, whose row it writes at the length, and after a step it
is extended over the accepted path with the true tokens. Drafting writes rows past the length only
and leaves the states as they are; each node of its tree goes on from its parent's.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from shared.models.config import ModelConfig
from shared.spec import attention, eagle, mamba_state, model
from shared.spec.attention import Rows
from shared.spec.draft_tree import TreeShape
from shared.spec.eagle import Logits, Rank, Tokens, Tree
from shared.spec.mamba_state import DeltaState
from shared.spec.model import KV


@dataclass(frozen=True, eq=False)
class SmallModel:
    """A model that drafts for another.

    Attributes:
      config: Its own.
      weights: By the names of `shared.models.parameters`.
      target_vocab: Of the model it drafts for.
    """

    config: ModelConfig
    weights: Mapping[str, Float[np.ndarray, "..."]]
    target_vocab: int

    def forward(self, kv: KV, rows: Rows, tokens: Tokens, mixer: model.DeltaMixer) -> model.Forward:
        """Runs the model; a token beyond its vocabulary counts as its last."""
        known = np.minimum(tokens, self.config.vocab - 1)
        return model.forward(self.config, self.weights, kv, rows, known, None, mixer)

    def logits(self, hidden: model.Hidden) -> Logits:
        """Scores over the target's vocabulary."""
        return over_target(model.logits(self.config, self.weights, hidden), self.target_vocab)


def over_target(
    logits: Float[np.ndarray, "R draft_vocab"], vocab: int
) -> Float[np.ndarray, "R vocab"]:
    """Scores over another vocabulary that begins with the same tokens: cut, or -inf at its end.

    Padded vocabularies of one tokenizer differ in length.
    """
    missing = max(vocab - logits.shape[1], 0)
    filled = np.pad(logits, ((0, 0), (0, missing)), constant_values=-np.inf)
    return filled[:, :vocab]


def context_of(
    state: DeltaState, draft_from: Int[np.ndarray, " B"], lengths: Int[np.ndarray, " B"]
) -> DeltaState:
    """The states that a drafter goes on from: zeros where its KV begins at the length.

    Plain steps do not feed the drafter, so a state from before them belongs to another text.
    """
    is_whole = np.less(draft_from, lengths)
    recurrent = np.where(is_whole[None, :, None, None, None], state.recurrent, 0)
    return DeltaState(recurrent, np.where(is_whole[None, :, None, None], state.window, 0))


def prefill(
    small: SmallModel,
    kv: KV,
    state: DeltaState,
    tokens: Int[np.ndarray, " T"],
    first: int,
    draft_from: Int[np.ndarray, " one"],
    page_table: Int[np.ndarray, "one table"],
) -> tuple[KV, DeltaState]:
    """Runs the model over one request's chunk of a prompt, from position `first` on."""
    row_starts, start = np.array([0, len(tokens)], np.int32), np.array([first], np.int32)
    rows = attention.causal_rows(row_starts, start, draft_from, page_table, len(tokens))
    state = context_of(state, draft_from, start)
    mixer = model.Chunks(small.config, small.weights, state, row_starts)
    passed = small.forward(kv, rows, tokens, mixer)
    return passed.kv, DeltaState(mixer.recurrent, mixer.window)


def extend(
    small: SmallModel,
    kv: KV,
    state: DeltaState,
    tokens: Int[np.ndarray, "B W"],
    lengths: Int[np.ndarray, " B"],
    counts: Int[np.ndarray, " B"],
    draft_from: Int[np.ndarray, " B"],
    page_table: Int[np.ndarray, "B table"],
    save_after: Int[np.ndarray, " B"],
) -> tuple[KV, DeltaState, DeltaState, Bool[np.ndarray, " B"]]:
    """Runs the model over accepted paths, from the lengths before the step on.

    Args:
      state: The states at the lengths.
      tokens: The path: the newest token, then accepted drafts.
      counts: How many of a path's tokens are real.
      save_after: See `mamba_state.replay`.

    Returns:
      The KV, then as `mamba_state.replay`.
    """
    B, W = tokens.shape
    rows = eagle.extend_rows(lengths, counts, draft_from, page_table, W - 1)
    state = context_of(state, draft_from, lengths)
    place = np.arange(W)
    parents = np.tile(np.maximum(place - 1, 0), (B, 1))
    row_of = np.arange(B * W).reshape(B, W)
    node = np.tile(place, B)
    chain = model.Tree(small.config, small.weights, state, parents, row_of, rows.request, node)
    flat = tokens.reshape(-1)
    passed = small.forward(kv, rows, flat, chain)
    path = np.tile(place, (B, 1))
    after = mamba_state.replay(state, chain.all_kept(), path, counts, save_after)
    return (passed.kv, *after)


def draft(
    small: SmallModel,
    kv: KV,
    state: DeltaState,
    newest: Int[np.ndarray, " B"],
    lengths: Int[np.ndarray, " B"],
    draft_from: Int[np.ndarray, " B"],
    max_drafts: Int[np.ndarray, " B"],
    page_table: Int[np.ndarray, "B table"],
    shape: TreeShape,
    rank: Rank,
) -> tuple[Tree, KV]:
    """Grows one draft tree per request in S expansions, the first of them on the root.

    Args:
      kv, state: The model's, whole from `draft_from` to the length; the states stay as they are.
      newest: The root's token, which neither of them holds yet.
      rank: Picks each node's k children.

    Returns:
      The trees, and the model's KV.
    """

    def expand(
        rows: Rows, tokens: Tokens, parent: Int[np.ndarray, " R"], kv: KV
    ) -> tuple[Logits, KV]:
        nonlocal state
        before = DeltaState(state.recurrent[:, parent], state.window[:, parent])
        logits, kv, state = _step(small, kv, before, rows, tokens)
        return logits, kv

    B = len(newest)
    can_draft = np.less(draft_from, lengths).astype(np.int32)
    rows = eagle.extend_rows(lengths, can_draft, draft_from, page_table, 0)
    logits, kv = expand(rows, newest, np.arange(B), kv)
    ids, weights = rank(logits[:, None], np.zeros((B, 1, 0), np.int32))
    bounds = (lengths, draft_from, max_drafts, page_table)
    first = (ids[:, 0], weights[:, 0])
    return eagle.grow(expand, kv, first, newest, *bounds, shape, rank, 1)


def _step(
    small: SmallModel, kv: KV, state: DeltaState, rows: Rows, tokens: Tokens
) -> tuple[Logits, KV, DeltaState]:
    """One token for each row, from the row's own state; gives the states after the tokens."""
    R = len(tokens)
    row, one = np.arange(R), np.ones(R, np.int32)
    parents = np.zeros((R, 1), np.int32)
    mixer = model.Tree(small.config, small.weights, state, parents, row[:, None], row, 0 * row)
    passed = small.forward(kv, rows, tokens, mixer)
    after, *_ = mamba_state.replay(state, mixer.all_kept(), parents, one, 0 * one)
    return small.logits(passed.hidden), passed.kv, after
