"""Drafters: the interface of a step, and the ranking of candidates that all drafters share."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.boundary.program import Program
from shared.drafts.config import DraftStateSizes
from shared.spec.draft_tree import TreeShape
from shared.spec.gumbel_noise import DRAFT_STREAM, TARGET_STREAM
from torch_impl.device_state import DraftInput, DraftState, Plan
from torch_impl.model import Forward
from torch_impl.ops.attention import attention
from torch_impl.ops.attention.attention import AttentionRows, WindowPageTables
from torch_impl.ops.gemm.layers import ImageEmbeds
from torch_impl.ops.sampling import candidate_lists, lm_head, sampling, vocab_parallel
from torch_impl.ops.sampling.lm_head import Projection
from torch_impl.ops.sampling.sampling import RankedCandidates, Sampling, TokenCounts
from torch_impl.ops.sampling.vocab_parallel import ALL, Vocabulary

Lists = tuple[Int[Tensor, "B S P K"], Float[Tensor, "B S P K"], Int[Tensor, "B S P K"]]
"""Candidates of the slots of a block: tokens, log weights and lists; see `best_prefixes.grow`."""


@dataclass(frozen=True)
class DraftRequests:
    """Requests of a step that drafts; see `shared.spec.tree_growth.DraftRequests`.

    Attributes:
      slots: Slot of each request.
      deltas: M-RoPE position delta of each request; None for a text-only model.
      relay: Draft input of each request; None for a drafter without one.
      window_page_tables: See `AttentionRows`; read by a drafter that reads the target's KV.
      adapters: Adapter slot of each request, 0 for none; None for a step without adapters.
    """

    slots: Int[Tensor, " B"]
    newest: Int[Tensor, " B"]
    lengths: Int[Tensor, " B"]
    deltas: Int[Tensor, " B"] | None
    relay: DraftInput | None
    draft_from: Int[Tensor, " B"]
    max_drafts: Int[Tensor, " B"]
    page_table: Int[Tensor, "B P"]
    window_page_tables: WindowPageTables
    adapters: Int[Tensor, " B"] | None

    @classmethod
    def of(
        cls,
        memory: DraftState,
        plan: Plan,
        newest: Int[Tensor, " B"],
        lengths: Int[Tensor, " B"],
        deltas: Int[Tensor, " B"] | None,
    ) -> "DraftRequests":
        """Reads the requests of a plan, and what the drafter's state has of their slots."""
        slots, held = plan.slots, memory.relay
        relay = held and DraftInput(held.tokens[slots], held.weights[slots], held.hidden[slots])
        return cls(
            slots=slots,
            newest=newest,
            lengths=lengths,
            deltas=deltas,
            relay=relay,
            draft_from=memory.draft_from[slots],
            max_drafts=plan.sampling.max_drafts,
            page_table=plan.page_table,
            window_page_tables=plan.window_page_tables,
            adapters=plan.adapters,
        )

    @property
    def can_draft(self) -> Bool[Tensor, " B"]:
        """True for requests with draft KV."""
        return self.draft_from < self.lengths


@dataclass(frozen=True)
class DraftTrees:
    """Draft trees, built by `draft_tree.keep_best`.

    Attributes:
      weights: Path weights; None if there is a verify row for each node.
      processed: Processed logits that each level of a chain was sampled from; None if drafts are
        not sampled.
    """

    tokens: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    num_nodes: Int[Tensor, " B"]
    weights: Float[Tensor, "B N"] | None
    processed: Float[Tensor, "B S vocab"] | None


@dataclass(frozen=True)
class PrefillChunks:
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

    tokens: Int[Tensor, " T"]
    row_starts: Int[Tensor, " B1"]
    first: Int[Tensor, " B"]
    lengths: Int[Tensor, " B"]
    last: Int[Tensor, " B"]
    rows: AttentionRows
    sources: Int[Tensor, " T"] | None

    @classmethod
    def of(cls, plan: Plan, program: Program) -> "PrefillChunks":
        prompt = plan.prompt
        assert prompt is not None  # a prefill has one
        row_starts, first = prompt.row_starts, prompt.first_positions
        rows = attention.causal_rows(
            row_starts, first, torch.zeros_like(first), plan.page_table, program.tokens
        )
        count, sources = len(rows.request), None
        if prompt.images is not None:
            rows = replace(rows, mrope_positions=prompt.images.mrope_positions[:count])
            sources = prompt.images.sources[:count]
        return cls(
            tokens=prompt.tokens[:count],
            row_starts=row_starts,
            first=first,
            lengths=first + row_starts[1:] - row_starts[:-1],
            last=(row_starts[1:] - 1).clamp(min=0),
            rows=rows,
            sources=sources,
        )


@dataclass(frozen=True)
class Ranking:
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
    counts: Int[Tensor, "slots vocab"]
    slots: Int[Tensor, " B"]
    lengths: Int[Tensor, " B"]
    width: int
    is_sampled: bool
    vocabulary: Vocabulary = ALL
    columns: Int[Tensor, " draft_vocab"] | None = None

    def __call__(
        self, scored: Projection, paths: Int[Tensor, "B k path"], depth: int
    ) -> RankedCandidates:
        """Returns the top children of k nodes of each request, all at one depth.

        Args:
          scored: LM-head projection of each node, or this rank's shard of it.
          paths: Draft tokens from below the root to each node, `depth` of them.
        """
        return lm_head.rank(scored, *self._given(paths, depth))

    def of_scores(
        self, logits: Float[Tensor, "B k share"], paths: Int[Tensor, "B k path"], depth: int
    ) -> RankedCandidates:
        """Same as `__call__`, for logits instead of a projection."""
        return sampling.rank(logits, *self._given(paths, depth))

    def _given(self, paths: Int[Tensor, "B k path"], depth: int) -> tuple[Any, ...]:
        """Returns the ranking inputs of candidates, in the order of `sampling.rank`."""
        k, path = paths.shape[1], paths.flatten(0, 1)
        is_real = torch.ones_like(path, dtype=torch.bool)
        slots = self.slots if k == 1 else self.slots.repeat_interleave(k)
        seen = TokenCounts(self.counts, slots, path, is_real)
        positions = self.lengths + (depth + 1)
        keys, stream = positions, TARGET_STREAM
        if self.is_sampled:
            keys, stream = self.lengths, DRAFT_STREAM + depth
        how = (keys, stream, self.width, self.is_sampled, self.columns, self.vocabulary)
        return seen, positions, self.sampling, *how

    def roots(self, scored: Projection) -> RankedCandidates:
        """Returns the top children of each request's root."""
        return self(scored, self.lengths.new_zeros(len(self.lengths), 1, 0), 0)

    def candidates(
        self, logits: Float[Tensor, "B S share"], k: int
    ) -> tuple[Float[Tensor, "B S k"], Int[Tensor, "B S k"]]:
        """Returns the top k tokens of S positions and their logits, without logits processing.

        Args:
          logits: Logits of the drafter, or this rank's shard of them.
        """
        seen = sampling.counts_alone(self.counts, self.slots.repeat_interleave(logits.shape[1]))
        params, at, of = self.sampling.unasked, self.lengths, self.vocabulary
        given = (logits, seen, at, params, at, TARGET_STREAM, k, False, None, of)
        ids = sampling.rank(*given).ids
        rows = vocab_parallel.spread(logits.flatten(0, 1), of)
        return vocab_parallel.at(rows, ids.flatten(0, 1), of).view(ids.shape), ids

    def chain(
        self, scored: Projection, S: int, is_weighed: bool
    ) -> tuple[Int[Tensor, "B S"], Float[Tensor, "B S"] | None, Float[Tensor, "B S vocab"] | None]:
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
            logits = lm_head.scores(scored).unflatten(0, (B, S))
            no_path = self.lengths.new_zeros(B, 1, 0)
            levels = [self.of_scores(logits[:, i, None], no_path, i) for i in range(S)]
            laws = [ranked.processed for ranked in levels if ranked.processed is not None]
            drafts = torch.cat([ranked.ids[:, 0] for ranked in levels], dim=1)
            return drafts, None, torch.stack(laws, 1)
        if is_weighed or self.columns is not None:
            ids, weights = self.block(scored, S)
            return ids[:, :, 0], weights[:, :, 0] if is_weighed else None, None
        request, positions, seen = self._slots(S)
        given = (seen, positions, self.sampling, request, None, self.vocabulary)
        ids = lm_head.choose(scored, *given).ids
        return ids.view(B, S), None, None

    def block(
        self, scored: Projection, S: int
    ) -> tuple[Int[Tensor, "B S width"], Float[Tensor, "B S width"]]:
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
        return ranked.ids.view(shape), ranked.weights.view(shape)

    def lists(self, logits: Float[Tensor, "B S P P"], some: Int[Tensor, "B S P"]) -> Lists:
        """Ranks the slots' candidates after each of those before; see `tree_growth.RankLists`."""
        S, P = some.shape[1:]
        request, positions, seen = self._slots(S)
        ids, edges = candidate_lists.rank(
            logits.flatten(0, 1),
            some.flatten(0, 1),
            self.counts,
            seen.slots,
            positions,
            self.sampling.rows(request),
            min(self.width, P),
        )
        ids, edges = ids.unflatten(0, (-1, S)), edges.unflatten(0, (-1, S))
        is_same = ids[..., None] == some[:, :, None, None]
        return ids, edges, is_same.int().argmax(dim=4).int()

    def _slots(self, S: int) -> tuple[Int[Tensor, " BS"], Int[Tensor, " BS"], TokenCounts]:
        """Returns request, position and token counts of S consecutive positions of each request."""
        device = self.lengths.device
        request = torch.arange(len(self.lengths), device=device).repeat_interleave(S)
        place = torch.arange(1, S + 1, dtype=torch.int32, device=device)
        positions = (self.lengths[:, None] + place).flatten()
        return request, positions, sampling.counts_alone(self.counts, self.slots[request])


@dataclass(frozen=True)
class ExtendRows:
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
    tokens: Int[Tensor, " R"]
    following: Int[Tensor, " R"]
    shown: ImageEmbeds | None
    passed: Forward
    last: Int[Tensor, " B"]


class Drafter(Protocol):
    """Interface of a drafter for a step. It writes its state in place, except `draft_from`."""

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
    ) -> None:
        """Extends the drafter over prompt chunks.

        Args:
          rank: Ranking of the candidates for the token after the newest, stored in the relay.
        """
        ...

    def extend(
        self,
        memory: DraftState,
        plan: Plan,
        before: Int[Tensor, " B"],
        counts: Int[Tensor, " B"],
        committed: ExtendRows,
        rank: Ranking,
    ) -> None:
        """Extends the drafter over accepted paths, with W rows per request.

        Args:
          before: Lengths before the path.
          counts: Number of valid rows of each request.
        """
        ...

    def draft(
        self, memory: DraftState, requests: DraftRequests, shape: TreeShape, rank: Ranking
    ) -> DraftTrees:
        """Drafts a tree for each request; only the root if `draft_from` equals its length."""
        ...
