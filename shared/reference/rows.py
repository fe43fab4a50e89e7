"""Rows of a plan and their draft trees, in the form that the reference backend processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Bool, Float, Int, Int32, UInt32

from shared.boundary.backend import Prefill, StepPlan
from shared.boundary.buffers import SCORES
from shared.boundary.grammar_bitmask import GrammarBitmask
from shared.boundary.ngram_table import NgramScopes
from shared.boundary.snapshots import Snapshots
from shared.boundary.window_pools import WindowPool
from shared.models.groups import CachePool
from shared.reference.images import ImageContext
from shared.spec import (
    acceptance,
    attention,
    candidate_lists,
    grammar_bitmask,
    gumbel_noise,
    logprobs,
    merge_drafts,
    sampling,
    slot_state,
    verify_budget,
)
from shared.spec.attention import AttentionRows, WindowPageTables
from shared.spec.draft_tree import TreeShape
from shared.spec.lora import AdapterWeights, BatchAdapters
from shared.spec.merge_drafts import DraftedTrees, MergedTrees, NgramTrees
from shared.spec.model import Forward
from shared.spec.recurrent_state import RecurrentState
from shared.spec.sampling import Sampling, TokenCounts
from shared.spec.tree_growth import Lists, Tree


@dataclass(frozen=True)
class Batch:
    """Rows of a plan without padding; for the other fields see `StepPlan`.

    Attributes:
      index: Index of each row in the plan.
      num_padding: Number of padding rows in the plan.
      deltas: M-RoPE position delta of each row before the step; None for a text-only model.
      texts: N-gram scopes of the rows; None if no program drafts from the n-gram table.
      window_page_tables: Pages of each row in the window pools, by sliding window.
      adapters: Adapter slot of each row; None if the program takes none.
    """

    index: Int[np.ndarray, " B"]
    slots: Int32[np.ndarray, " B"]
    page_table: Int32[np.ndarray, "B P"]
    starts: Bool[np.ndarray, " B"]
    draft_from: Int32[np.ndarray, " B"]
    reports: Bool[np.ndarray, " B"]
    sampling: Sampling
    snapshots: Snapshots
    num_padding: int
    deltas: Int32[np.ndarray, " B"] | None
    texts: NgramScopes | None
    window_page_tables: WindowPageTables
    adapters: Int32[np.ndarray, " B"] | None

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        turn_deltas: Int32[np.ndarray, " slots"] | None,
        windows: Sequence[WindowPool],
    ) -> "Batch":
        """Returns the rows with a slot."""
        index = np.flatnonzero(plan.slots)
        snapshots, texts = plan.snapshots, plan.texts
        if texts is not None:
            before = None if texts.before is None else texts.before[index]
            texts = NgramScopes(texts.scopes[index], before)
        return cls(
            index=index,
            slots=plan.slots[index],
            page_table=plan.page_table[index],
            starts=plan.starts[index] != 0,
            draft_from=plan.draft_from[index],
            reports=plan.reports[index] != 0,
            sampling=plan.sampling.rows(index),
            snapshots=Snapshots(
                snapshots.restore[index], snapshots.save[index], snapshots.save_at[index]
            ),
            num_padding=len(plan.slots) - len(index),
            deltas=None if turn_deltas is None else turn_deltas[plan.slots[index]],
            texts=texts,
            window_page_tables={
                pool.window: table[index]
                for pool, table in zip(windows, plan.page_tables[1:], strict=True)
            },
            adapters=None if plan.adapters is None else plan.adapters[index],
        )

    def page_tables_of(self, pools: Sequence[CachePool]) -> list[Int32[np.ndarray, "B P"]]:
        """Returns the page table of each KV pool of the target."""
        windows = self.window_page_tables
        return [windows.get(pool.window or 0, self.page_table) for pool in pools]

    def lora(self, adapters: Mapping[str, AdapterWeights], rows: slice) -> BatchAdapters | None:
        """Returns the adapters of some rows; None if the program takes none."""
        return None if self.adapters is None else BatchAdapters(adapters, self.adapters[rows])

    def turned(self, rows: AttentionRows) -> AttentionRows:
        """Adds M-RoPE positions to text rows of a vision-language model."""
        return rows if self.deltas is None else attention.with_mrope(rows, self.deltas)

    def restored(self, state: RecurrentState, snapshots: RecurrentState) -> RecurrentState:
        """Returns the states of all slots, with those of starting rows reset to their snapshots."""
        restore = partial(
            slot_state.restore,
            slots=self.slots,
            sources=self.snapshots.restore,
            starts=self.starts,
        )
        return RecurrentState(
            restore(state.recurrent, snapshots.recurrent), restore(state.window, snapshots.window)
        )


@dataclass(frozen=True)
class ExtendRows:
    """Committed rows for draft extend: a chunk of one request, or all accepted paths.

    Attributes:
      first: Position of a chunk's first token; unused for paths.
      tokens: Token of each row.
      following: Token after each row's.
      passed: The target's pass over the rows.
      seen: Image inputs of a chunk, with the embeddings of its next tokens.
    """

    first: int
    tokens: Int[np.ndarray, " R"]
    following: Int[np.ndarray, " R"]
    passed: Forward
    seen: ImageContext


@dataclass(frozen=True)
class Trees:
    """Draft tree of each row.

    Attributes:
      tokens, parents, num_nodes: The trees.
      forced: True for rows whose chain is accepted whatever the target predicts.
      weights: Path weights of drafted nodes; None for trees from the host.
      drafted: Processed logits that a chain's draft tokens were sampled from; None if not sampled.
      origins: Sources of the nodes of merged trees, see `shared.spec.merge_drafts.MergedTrees`;
        else None.
    """

    tokens: Int[np.ndarray, "B N"]
    parents: Int[np.ndarray, "B N"]
    num_nodes: Int[np.ndarray, " B"]
    forced: Bool[np.ndarray, " B"]
    weights: Float[np.ndarray, "B N"] | None = None
    drafted: Float[np.ndarray, "B S vocab"] | None = None
    origins: MergedTrees | None = None

    @classmethod
    def drafted_as(cls, tree: Tree) -> "Trees":
        """Returns the trees of a drafter; none are forced."""
        tokens, parents, num_nodes, weights = tree
        return cls(tokens, parents, num_nodes, np.zeros(len(tokens), bool), weights)

    def shared(self, calibration: Float[np.ndarray, "B S_max"], rows: int) -> "Trees":
        """Returns the trees pruned to a verify budget."""
        assert self.weights is not None  # set for drafted trees
        ranked = verify_budget.log_acceptance(self.parents, self.weights, calibration)
        tokens, parents, num_nodes = verify_budget.prune_to_budget(
            self.tokens, self.parents, self.num_nodes, ranked, rows
        )
        return Trees(tokens, parents, num_nodes, self.forced)

    def joined(
        self,
        given: NgramTrees,
        calibration: Float[np.ndarray, "B S_max"],
        lengths: Int[np.ndarray, " B"],
        max_drafts: Int[np.ndarray, " B"],
        shape: TreeShape,
        rows: int,
    ) -> "Trees":
        """Returns the best nodes of these trees merged with n-gram drafts."""
        assert self.weights is not None  # set for drafted trees
        ranked = verify_budget.log_acceptance(self.parents, self.weights, calibration)
        grown = DraftedTrees(self.tokens, self.parents, self.num_nodes, ranked)
        merged = merge_drafts.merge(
            grown, given, lengths, max_drafts, shape.nodes, shape.depth, rows
        )
        return Trees(merged.tokens, merged.parents, merged.num_nodes, self.forced, origins=merged)

    def accepting(
        self,
        choices: Int[np.ndarray, "B N"],
        rates: tuple[float, ...] | None,
        seeds: UInt32[np.ndarray, " B"],
        lengths: Int[np.ndarray, " B"],
    ) -> tuple[Int[np.ndarray, "B N"], Int[np.ndarray, " B"]]:
        """Returns the choices and node counts for `acceptance.accept_greedy_path`: the target's,
        simulated, or forced ones.

        Args:
          choices: The target's choices.
          rates: Rates of simulated acceptance, or None; see `acceptance.simulate`.
          seeds, lengths: Seed and length of each row.
        """
        walked = self.num_nodes
        if rates is not None:
            choices, walked = acceptance.simulate(
                self.tokens, self.parents, self.num_nodes, choices, rates, seeds, lengths
            )
        choices, forced = acceptance.force_chain(self.tokens, self.num_nodes, choices, self.forced)
        return choices, np.where(self.forced, forced, walked)


def take(state: RecurrentState, index: Int[np.ndarray, " B"]) -> RecurrentState:
    """Returns the states of some slots or snapshots."""
    return RecurrentState(state.recurrent[:, index], state.window[:, index])


def put(state: RecurrentState, index: Int[np.ndarray, " B"], rows: RecurrentState) -> None:
    """Writes the states of some slots or snapshots."""
    state.recurrent[:, index] = rows.recurrent
    state.window[:, index] = rows.window


@dataclass(frozen=True)
class PenaltyRanking:
    """Ranking of a drafter's children with the penalties of the target; see `tree_growth.Rank`.

    Attributes:
      sampling, slots, lengths: Those of the batch's rows.
      counts: Token counts of all slots, see `sampling.TokenCounts`.
      width: Children of a node.
      columns: Target token id of each of the drafter's logits; None if the vocabularies are equal.
      kept: List that receives the processed logits of each level if draft tokens are sampled for
        rejection sampling, with their own noise. None to use the target's noise.
    """

    sampling: Sampling
    slots: Int32[np.ndarray, " B"]
    lengths: Int32[np.ndarray, " B"]
    counts: Int32[np.ndarray, "slots vocab"]
    width: int
    columns: Int[np.ndarray, " draft_vocab"] | None
    kept: list[Float[np.ndarray, "B vocab"]] | None

    def __call__(
        self, logits: Float[np.ndarray, "B k vocab"], paths: Int[np.ndarray, "B k path"]
    ) -> tuple[Int[np.ndarray, "B k width"], Float[np.ndarray, "B k width"]]:
        """Returns the best children of nodes, and the log weights of their edges."""
        B, k, level = paths.shape
        path = paths.reshape(B * k, level)
        seen = TokenCounts(self.counts, np.repeat(self.slots, k), path, np.ones(path.shape, bool))
        return self._ranked(logits, seen, level)

    def block(
        self, logits: Float[np.ndarray, "B S vocab"]
    ) -> tuple[Int[np.ndarray, "B S width"], Float[np.ndarray, "B S width"]]:
        """Returns the best tokens of S consecutive positions, independent of each other, and the
        log weights of their edges; see `dflash.Choose`.
        """
        B, S, _ = logits.shape
        no_path = np.zeros((B, 0), np.int32)
        seen = TokenCounts(self.counts, self.slots, no_path, no_path.astype(bool))
        ranked = [self._ranked(logits[:, level, None], seen, level) for level in range(S)]
        ids, edges = (np.concatenate(parts, axis=1) for parts in zip(*ranked, strict=True))
        return ids, edges

    def lists(self, logits: Float[np.ndarray, "B S P P"], some: Int[np.ndarray, "B S P"]) -> Lists:
        """Ranks the slots' candidates after each of those before; see `tree_growth.RankLists`."""
        B, S, P = some.shape
        request, place = np.repeat(np.arange(B), S), np.tile(np.arange(1, S + 1), B)
        ids, edges = candidate_lists.rank(
            logits.reshape(B * S, P, P),
            some.reshape(B * S, P),
            self.counts,
            self.slots[request],
            self.lengths[request] + place,
            self.sampling.rows(request),
            min(self.width, P),
        )
        ids, edges = (x.reshape(B, S, P, -1) for x in (ids, edges))
        is_same = ids[..., None] == some[:, :, None, None]
        return ids, edges, is_same.argmax(axis=4).astype(np.int32)

    def _ranked(
        self, logits: Float[np.ndarray, "B k vocab"], seen: TokenCounts, level: int
    ) -> tuple[Int[np.ndarray, "B k width"], Float[np.ndarray, "B k width"]]:
        positions = self.lengths + level + 1
        keys, stream = positions, gumbel_noise.TARGET_STREAM
        if self.kept is not None:
            keys, stream = self.lengths, gumbel_noise.DRAFT_STREAM + level
        if self.columns is not None:
            logits = logits[..., self.columns]
        ranked = sampling.rank(
            logits,
            seen,
            positions,
            self.sampling,
            keys,
            stream,
            self.width,
            self.kept is not None,
            self.columns,
        )
        if self.kept is not None and ranked.processed is not None:
            self.kept.append(ranked.processed)
        return ranked.ids, ranked.weights

    @property
    def drafted(self) -> Float[np.ndarray, "B S vocab"]:
        """Processed logits of all levels."""
        assert self.kept is not None  # set if draft tokens are sampled
        return np.stack(self.kept, axis=1)


def allowed_of(
    mask: GrammarBitmask | None, index: Int[np.ndarray, " B"], vocab: int
) -> Bool[np.ndarray, "B N vocab"] | None:
    """Returns the tokens that the grammar allows at each node; None without a grammar."""
    if mask is None:
        return None
    rows = mask.index[index]
    allowed = grammar_bitmask.allowed(mask.bits, rows.reshape(-1), vocab)
    return allowed.reshape((*rows.shape, vocab))


def roots(newest: Int32[np.ndarray, " B"]) -> Trees:
    """Returns trees without draft tokens: the newest token alone."""
    parents = np.zeros((len(newest), 1), np.int32)
    return Trees(newest[:, None], parents, np.ones_like(newest), np.zeros(len(newest), bool))


def tree_fields(trees: Trees) -> dict[str, np.ndarray]:
    """Returns the trees by field name of the result."""
    by_name = {"drafts": trees.tokens, "parents": trees.parents, "num_nodes": trees.num_nodes}
    if trees.origins is not None:
        by_name |= {"drafted": trees.origins.drafted, "copied": trees.origins.copied}
    return by_name


def logprob_fields(
    batch: Batch,
    logits: Float[np.ndarray, "R vocab"],
    row_of: Int[np.ndarray, "B W"],
    tokens: Int[np.ndarray, "B W"],
    counts: Int[np.ndarray, " B"],
    k: int,
) -> dict[str, np.ndarray]:
    """Returns output logprobs by field name of the result."""
    reported = logprobs.output_logprobs(logits, row_of, tokens, counts, batch.reports, k)
    return dict(zip(("chosen", "top_ids", "top_values"), reported, strict=True))


def score_fields(
    work: Prefill,
    index: Int[np.ndarray, " B"],
    logits: Sequence[Float[np.ndarray, "R vocab"]],
    newest: Int[np.ndarray, " B"],
    k: int,
) -> dict[str, np.ndarray]:
    """Returns prompt logprobs by field name of the result, for the chunk of each row of `index`."""
    T = len(work.tokens)
    floats, ints = np.zeros((T, 1 + k), np.float32), np.zeros((T, 1 + k), np.int32)
    for row, own_logits, after in zip(index, logits, newest, strict=True):
        span = slice(work.row_starts[row], work.row_starts[row + 1])
        ids = np.append(work.tokens[span][1:], after)
        chosen, ranks, top_ids, top_values = logprobs.prompt_logprobs(own_logits, ids, k)
        floats[span] = np.column_stack([chosen, top_values])
        ints[span] = np.column_stack([ranks, top_ids])
    return dict(zip(SCORES, (floats[:, 0], ints[:, 0], ints[:, 1:], floats[:, 1:]), strict=True))
