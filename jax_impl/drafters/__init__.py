"""Drafters: the interface of a step, and the ranking of candidates that all drafters share."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jax_impl.device_state import DraftInput, DraftState, Plan
from jax_impl.model import Forward
from jax_impl.ops import scan
from jax_impl.ops.attention import attention
from jax_impl.ops.attention.attention import AttentionRows, WindowPageTables
from jax_impl.ops.gemm.layers import ImageEmbeds
from jax_impl.ops.sampling import candidate_lists, lm_head, sampling, vocab_parallel
from jax_impl.ops.sampling.lm_head import Projection
from jax_impl.ops.sampling.sampling import RankedCandidates, Sampling, TokenCounts
from jax_impl.ops.sampling.vocab_parallel import ALL, Vocabulary
from shared.boundary.program import Program
from shared.drafts.config import DraftStateSizes
from shared.spec.draft_tree import TreeShape
from shared.spec.gumbel_noise import DRAFT_STREAM, TARGET_STREAM

Lists = tuple[Int[jax.Array, "B S P K"], Float[jax.Array, "B S P K"], Int[jax.Array, "B S P K"]]
"""Candidates of the slots of a block: tokens, log weights and lists; see `best_prefixes.grow`."""


class DraftRequests(NamedTuple):
    """Requests of a step that drafts; see `shared.spec.tree_growth.DraftRequests`.

    Attributes:
      slots: Slot of each request.
      deltas: M-RoPE position delta of each request; None for a text-only model.
      relay: Draft input of each request; None for a drafter without one.
      window_page_tables: See `AttentionRows`; read by a drafter that reads the target's KV.
      adapters: Adapter slot of each request, 0 for none; None for a step without adapters.
    """

    slots: Int[jax.Array, " B"]
    newest: Int[jax.Array, " B"]
    lengths: Int[jax.Array, " B"]
    deltas: Int[jax.Array, " B"] | None
    relay: DraftInput | None
    draft_from: Int[jax.Array, " B"]
    max_drafts: Int[jax.Array, " B"]
    page_table: Int[jax.Array, "B table"]
    window_page_tables: WindowPageTables
    adapters: Int[jax.Array, " B"] | None

    @classmethod
    def of(
        cls,
        memory: DraftState,
        plan: Plan,
        newest: Int[jax.Array, " B"],
        lengths: Int[jax.Array, " B"],
        deltas: Int[jax.Array, " B"] | None,
    ) -> "DraftRequests":
        """Reads the requests of a plan, and what the drafter's state has of their slots."""
        return cls(
            slots=plan.slots,
            newest=newest,
            lengths=lengths,
            deltas=deltas,
            relay=jax.tree.map(lambda values: values[plan.slots], memory.relay),
            draft_from=memory.draft_from[plan.slots],
            max_drafts=plan.sampling.max_drafts,
            page_table=plan.page_table,
            window_page_tables=plan.window_page_tables,
            adapters=plan.adapters,
        )

    @property
    def can_draft(self) -> Bool[jax.Array, " B"]:
        """True for requests with draft KV."""
        return self.draft_from < self.lengths


class DraftTrees(NamedTuple):
    """Draft trees, built by `draft_tree.keep_best`.

    Attributes:
      weights: Path weights; None if there is a verify row for each node.
      processed: Processed logits that each level of a chain was sampled from; None if drafts are
        not sampled.
    """

    tokens: Int[jax.Array, "B N"]
    parents: Int[jax.Array, "B N"]
    num_nodes: Int[jax.Array, " B"]
    weights: Float[jax.Array, "B N"] | None
    processed: Float[jax.Array, "B S vocab"] | None


class PrefillChunks(NamedTuple):
    """Prompt chunks of a prefill.

    Attributes:
      tokens: Tokens of all chunks, then padding.
      row_starts: First flat row of each chunk, and the end.
      first: Position of each chunk's first token.
      lengths: Lengths of the slots after the chunks.
      last: Flat row of each chunk's last token.
      rows: Positions and visible KV of the tokens.
      sources: Encoder-cache row that replaces each token's embedding; None for a text-only model.
    """

    tokens: Int[jax.Array, " T"]
    row_starts: Int[jax.Array, " B1"]
    first: Int[jax.Array, " B"]
    lengths: Int[jax.Array, " B"]
    last: Int[jax.Array, " B"]
    rows: AttentionRows
    sources: Int[jax.Array, " T"] | None

    @classmethod
    def of(cls, plan: Plan, program: Program) -> "PrefillChunks":
        prompt = plan.prompt
        assert prompt is not None  # a prefill has one
        row_starts, first = prompt.row_starts, prompt.first_positions
        no_bound, sources = jnp.zeros_like(first), None
        rows = attention.causal_rows(row_starts, first, no_bound, plan.page_table, program.tokens)
        if prompt.images is not None:
            rows = rows._replace(mrope_positions=prompt.images.mrope_positions)
            sources = prompt.images.sources
        return cls(
            tokens=prompt.tokens,
            row_starts=row_starts,
            first=first,
            lengths=first + row_starts[1:] - row_starts[:-1],
            last=jnp.maximum(row_starts[1:] - 1, 0),
            rows=rows,
            sources=sources,
        )


class Ranking(NamedTuple):
    """Ranks draft candidates with the logits processing and Gumbel noise of the target.

    Attributes:
      sampling: Sampling parameters of the B requests.
      counts: Token counts of all slots, see `sampling.TokenCounts`; they include the newest tokens.
      slots: Slots of the requests.
      lengths: Committed tokens of each request, which is the position of its newest token.
      width: Number of children of a node.
      is_sampled: True if drafts are sampled for rejection sampling, with separate noise.
      vocabulary: Vocabulary of the drafter's LM head; each rank has a shard of its logits.
      columns: Target token of each logit of the drafter; None if the vocabularies are equal.
    """

    sampling: Sampling
    counts: Int[jax.Array, "slots vocab"]
    slots: Int[jax.Array, " B"]
    lengths: Int[jax.Array, " B"]
    width: int
    is_sampled: bool
    vocabulary: Vocabulary = ALL
    columns: Int[jax.Array, " draft_vocab"] | None = None

    def __call__(
        self, scored: Projection, paths: Int[jax.Array, "B k path"], depth: Int[jax.Array, ""] | int
    ) -> RankedCandidates:
        """Returns the top children of k nodes of each request, all at one depth.

        Args:
          scored: LM-head projection of each node, or this rank's shard of it.
          paths: Draft tokens from below the root to each node; the first `depth` are valid.
        """
        return lm_head.rank(scored, *self._given(paths, depth))

    def of_scores(
        self,
        logits: Float[jax.Array, "B k share"],
        paths: Int[jax.Array, "B k path"],
        depth: Int[jax.Array, ""] | int,
    ) -> RankedCandidates:
        """Same as `__call__`, for logits instead of a projection."""
        return sampling.rank(logits, *self._given(paths, depth))

    def _given(
        self, paths: Int[jax.Array, "B k path"], depth: Int[jax.Array, ""] | int
    ) -> tuple[Any, ...]:
        """Returns the ranking inputs of candidates, in the order of `sampling.rank`."""
        B, k, length = paths.shape
        path = paths.reshape(B * k, length)
        on_path = jnp.broadcast_to(jnp.arange(length) < depth, path.shape)
        seen = TokenCounts(self.counts, jnp.repeat(self.slots, k), path, on_path)
        positions = self.lengths + depth + 1
        keys, stream = positions, TARGET_STREAM
        if self.is_sampled:
            keys, stream = self.lengths, DRAFT_STREAM + depth
        how = (keys, stream, self.width, self.is_sampled, self.columns, self.vocabulary)
        return seen, positions, self.sampling, *how

    def roots(self, scored: Projection) -> RankedCandidates:
        """Returns the top children of each request's root."""
        return self(scored, jnp.zeros((len(self.lengths), 1, 0), jnp.int32), 0)

    def candidates(
        self, logits: Float[jax.Array, "B S share"], k: int
    ) -> tuple[Float[jax.Array, "B S k"], Int[jax.Array, "B S k"]]:
        """Returns the top k tokens of S positions and their logits, without logits processing.

        Args:
          logits: Logits of the drafter, or this rank's shard of them.
        """
        B, S, share = logits.shape
        seen = sampling.counts_alone(self.counts, jnp.repeat(self.slots, S))
        params, at, of = self.sampling.unasked, self.lengths, self.vocabulary
        given = (logits, seen, at, params, at, TARGET_STREAM, k, False, None, of)
        ids = sampling.rank(*given).ids
        rows = vocab_parallel.spread(logits.reshape(B * S, share), of)
        return vocab_parallel.at(rows, ids.reshape(B * S, k), of).reshape(ids.shape), ids

    def chain(
        self, scored: Projection, S: int, is_weighed: bool
    ) -> tuple[
        Int[jax.Array, "B S"],
        Float[jax.Array, "B S"] | None,
        Float[jax.Array, "B S vocab"] | None,
    ]:
        """Drafts S consecutive tokens in one pass.

        Penalties at a position therefore do not count the drafts before it.

        Args:
          scored: LM-head projection of the positions, in the order of the requests.
          is_weighed: True if log edge weights are required; only for drafts that are not sampled.

        Returns:
          Draft tokens, log edge weights or None, and processed logits of sampled drafts or None.
        """
        B = len(self.lengths)
        if self.is_sampled:
            logits = lm_head.scores(scored).reshape(B, S, -1)
            no_path = jnp.zeros((B, 1, 0), jnp.int32)

            def body(_: None, at: tuple) -> tuple[None, tuple]:
                place, of_place = at
                ranked = self.of_scores(of_place[:, None], no_path, place)
                return None, (ranked.ids[:, 0, 0], ranked.processed)

            places = (jnp.arange(S, dtype=jnp.int32), jnp.moveaxis(logits, 1, 0))
            _, (drafts, processed) = scan(body, None, places)
            return drafts.T, None, jnp.moveaxis(processed, 0, 1)
        if is_weighed or self.columns is not None:
            ids, weights = self.block(scored, S)
            return ids[:, :, 0], weights[:, :, 0] if is_weighed else None, None
        request, positions, seen = self._slots(S)
        given = (seen, positions, self.sampling, request, None, self.vocabulary)
        ids = lm_head.choose(scored, *given).ids
        return ids.reshape(B, S), None, None

    def block(
        self, scored: Projection, S: int
    ) -> tuple[Int[jax.Array, "B S width"], Float[jax.Array, "B S width"]]:
        """Returns the best tokens of S consecutive positions and the log weights of their edges.

        Args:
          scored, S: See `chain`.
        """
        _, positions, seen = self._slots(S)
        positions = positions.reshape(-1, S)
        ranked = lm_head.rank(
            scored,
            seen,
            positions,
            self.sampling,
            positions,
            TARGET_STREAM,
            self.width,
            False,
            self.columns,
            self.vocabulary,
        )
        shape = (len(self.lengths), S, self.width)
        return ranked.ids.reshape(shape), ranked.weights.reshape(shape)

    def lists(self, logits: Float[jax.Array, "B S P P"], some: Int[jax.Array, "B S P"]) -> Lists:
        """Ranks the slots' candidates after each of those before; see `tree_growth.RankLists`."""
        B, S, P = some.shape
        request, positions, seen = self._slots(S)
        ids, edges = candidate_lists.rank(
            logits.reshape(B * S, P, P),
            some.reshape(B * S, P),
            self.counts,
            seen.slots,
            positions,
            self.sampling.rows(request),
            min(self.width, P),
        )
        ids, edges = (x.reshape(B, S, P, -1) for x in (ids, edges))
        is_same = ids[..., None] == some[:, :, None, None]
        return ids, edges, is_same.argmax(axis=4).astype(jnp.int32)

    def _slots(self, S: int) -> tuple[Int[jax.Array, " BS"], Int[jax.Array, " BS"], TokenCounts]:
        """Returns request, position and token counts of S consecutive positions of each request."""
        request = jnp.repeat(jnp.arange(len(self.lengths), dtype=jnp.int32), S)
        place = jnp.arange(1, S + 1, dtype=jnp.int32)
        positions = (self.lengths[:, None] + place).reshape(-1)
        return request, positions, sampling.counts_alone(self.counts, self.slots[request])


class ExtendRows(NamedTuple):
    """Committed rows of a draft extend.

    Attributes:
      rows: Positions of the rows; draft KV from `draft_from` on is visible.
      tokens: Token of each row.
      following: Token after each row's token.
      shown: Image embeddings that replace embeddings of `following`; None for text.
      passed: Target's forward pass over the rows, with the streams that the drafter reads.
      last: Flat row of each request's last token.
    """

    rows: AttentionRows
    tokens: Int[jax.Array, " R"]
    following: Int[jax.Array, " R"]
    shown: ImageEmbeds | None
    passed: Forward
    last: Int[jax.Array, " B"]


class Drafter(Protocol):
    """Interface of a drafter for a step. Its state is the draft part of `DeviceState`."""

    @property
    def streams(self) -> tuple[int, ...]:
        """Returns the residual streams of the target that the drafter reads, ascending."""
        ...

    @property
    def sizes(self) -> DraftStateSizes:
        """Returns the sizes of its state; draft extend uses `rank` only if there is a relay."""
        ...

    def prefill(
        self,
        memory: DraftState,
        plan: Plan,
        prompts: PrefillChunks,
        committed: ExtendRows,
        rank: Ranking,
    ) -> DraftState:
        """Extends the drafter over prompt chunks.

        Args:
          rank: Ranking of the candidates for the token after the newest, stored in the relay.
        """
        ...

    def extend(
        self,
        memory: DraftState,
        plan: Plan,
        before: Int[jax.Array, " B"],
        counts: Int[jax.Array, " B"],
        committed: ExtendRows,
        rank: Ranking,
    ) -> DraftState:
        """Extends the drafter over accepted paths, with W rows per request.

        Args:
          before: Lengths before the path.
          counts: Number of valid rows of each request.
        """
        ...

    def draft(
        self, memory: DraftState, requests: DraftRequests, shape: TreeShape, rank: Ranking
    ) -> tuple[DraftTrees, DraftState]:
        """Drafts a tree for each request; only the root if `draft_from` equals its length.

        Committed rows of the state are not changed.
        """
        ...
