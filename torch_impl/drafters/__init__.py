"""How drafts are made; all drafters rank their candidates in the same way."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shared.boundary.program import Program
from shared.drafts.config import DraftSizes
from shared.spec.draft_tree import TreeShape
from shared.spec.gumbel_noise import DRAFT_STREAM, TARGET_STREAM
from torch_impl.device_state import DraftState, Plan
from torch_impl.model import Forward
from torch_impl.ops.attention import attention
from torch_impl.ops.attention.attention import Rows
from torch_impl.ops.gemm.layers import Shown
from torch_impl.ops.sampling import lm_head, sampling, vocab_parallel
from torch_impl.ops.sampling.lm_head import Projection
from torch_impl.ops.sampling.sampling import Ranked, Sampling, Seen
from torch_impl.ops.sampling.vocab_parallel import ALL, Vocabulary


@dataclass(frozen=True)
class Ranking:
    """Ranks the children of nodes as the target would choose: the same processing and noise.

    Attributes:
      sampling, slots, lengths: Of the requests.
      counts: What all slots have seen; see `Seen`.
      width: Children of a node.
      is_sampled: Drafts are sampled, to be judged by a rejection rule: their noise is their own.
      vocabulary: Of the drafter's head, whose scores each rank has a part of.
      columns: The target's token of each score of the drafter; None where they are the same.
    """

    sampling: Sampling
    counts: Int[Tensor, "slots vocab"]
    slots: Int[Tensor, " B"]
    lengths: Int[Tensor, " B"]
    width: int
    is_sampled: bool
    vocabulary: Vocabulary = ALL
    columns: Int[Tensor, " draft_vocab"] | None = None

    def __call__(self, scored: Projection, paths: Int[Tensor, "B k path"], depth: int) -> Ranked:
        """The best children of nodes, which all stand at one depth.

        Args:
          scored: What scores the tokens after each node, or those that this rank has.
          paths: The drafts from below the root to each node, `depth` of them.
        """
        return lm_head.rank(scored, *self._given(paths, depth))

    def of_scores(
        self, logits: Float[Tensor, "B k share"], paths: Int[Tensor, "B k path"], depth: int
    ) -> Ranked:
        """As for what scores tokens, from the scores."""
        return sampling.rank(logits, *self._given(paths, depth))

    def _given(self, paths: Int[Tensor, "B k path"], depth: int) -> tuple[Any, ...]:
        """What candidates are ranked by, as `sampling.rank` takes it."""
        k, path = paths.shape[1], paths.flatten(0, 1)
        is_real = torch.ones_like(path, dtype=torch.bool)
        slots = self.slots if k == 1 else self.slots.repeat_interleave(k)
        seen = Seen(self.counts, slots, path, is_real)
        positions = self.lengths + (depth + 1)
        keys, stream = positions, TARGET_STREAM
        if self.is_sampled:
            keys, stream = self.lengths, DRAFT_STREAM + depth
        how = (keys, stream, self.width, self.is_sampled, self.columns, self.vocabulary)
        return seen, positions, self.sampling, *how

    def roots(self, scored: Projection) -> Ranked:
        """The best children of each request's root."""
        return self(scored, self.lengths.new_zeros(len(self.lengths), 1, 0), 0)

    def candidates(
        self, logits: Float[Tensor, "B S share"], k: int
    ) -> tuple[Float[Tensor, "B S k"], Int[Tensor, "B S k"]]:
        """The k best tokens of S places and their scores, whatever the requests ask for.

        Args:
          logits: The drafter's, or this rank's part of them.
        """
        seen = sampling.seen_alone(self.counts, self.slots.repeat_interleave(logits.shape[1]))
        params, at, of = self.sampling.unasked, self.lengths, self.vocabulary
        given = (logits, seen, at, params, at, TARGET_STREAM, k, False, None, of)
        ids = sampling.rank(*given).ids
        rows = vocab_parallel.spread(logits.flatten(0, 1), of)
        return vocab_parallel.at(rows, ids.flatten(0, 1), of).view(ids.shape), ids

    def chain(
        self, scored: Projection, S: int, is_weighed: bool
    ) -> tuple[Int[Tensor, "B S"], Float[Tensor, "B S"] | None, Float[Tensor, "B S vocab"] | None]:
        """Drafts at S places in a row.

        They are made at once, so a place's penalties do not count the drafts before it.

        Args:
          scored: What scores them, in the order of the requests.
          is_weighed: The log weights of their edges are asked for; of drafts that are not sampled.

        Returns:
          The drafts, those weights, and the processed logits that they are sampled from, if so.
        """
        B, device = len(self.lengths), self.lengths.device
        if self.is_sampled:
            logits = lm_head.scores(scored).unflatten(0, (B, S))
            no_path = self.lengths.new_zeros(B, 1, 0)
            levels = [self.of_scores(logits[:, i, None], no_path, i) for i in range(S)]
            laws = [ranked.processed for ranked in levels if ranked.processed is not None]
            drafts = torch.cat([ranked.ids[:, 0] for ranked in levels], dim=1)
            return drafts, None, torch.stack(laws, 1)
        request = torch.arange(B, device=device).repeat_interleave(S)
        place = torch.arange(1, S + 1, dtype=torch.int32, device=device)
        positions = (self.lengths[:, None] + place).flatten()
        seen = sampling.seen_alone(self.counts, self.slots[request])
        if is_weighed or self.columns is not None:
            params = self.sampling.rows(request)
            given = (scored, seen, positions, params, positions, TARGET_STREAM, 1)
            ranked = lm_head.rank(*given, False, self.columns, self.vocabulary)
            weights = ranked.weights.view(B, S) if is_weighed else None
            return ranked.ids.view(B, S), weights, None
        given = (seen, positions, self.sampling, request, None, self.vocabulary)
        ids = lm_head.choose(scored, *given).ids
        return ids.view(B, S), None, None


@dataclass(frozen=True)
class Prompts:
    """The prompt chunks of a prefill.

    Attributes:
      tokens: All chunks, then padding.
      row_starts: First token of each chunk, and the end.
      first: Position of each chunk's first token.
      lengths: Of the slots after the chunks.
      last: The flat row of each chunk's last token.
      rows: Where the tokens stand and what they see.
      sources: Of the pool of pictures, the row in the place of each token's; None: there is none.
    """

    tokens: Int[Tensor, " T"]
    row_starts: Int[Tensor, " B1"]
    first: Int[Tensor, " B"]
    lengths: Int[Tensor, " B"]
    last: Int[Tensor, " B"]
    rows: Rows
    sources: Int[Tensor, " T"] | None

    @classmethod
    def of(cls, plan: Plan, program: Program) -> "Prompts":
        prompt = plan.prompt
        assert prompt is not None  # a prefill has one
        row_starts, first = prompt.row_starts, prompt.first_positions
        rows = attention.causal_rows(
            row_starts, first, torch.zeros_like(first), plan.page_table, program.tokens
        )
        count, sources = len(rows.request), None
        if prompt.pictures is not None:
            rows = replace(rows, turns=prompt.pictures.turns[:count])
            sources = prompt.pictures.sources[:count]
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
class Fed:
    """Committed rows that a drafter is extended over.

    Attributes:
      rows: Where they stand; they see draft KV from `draft_from` on.
      tokens: Each row's own token.
      following: The token after each row's.
      shown: What stands in the place of some of those; None of text.
      passed: The target's pass over the rows, with the streams that the drafter reads.
      last: The flat row that is each request's last.
    """

    rows: Rows
    tokens: Int[Tensor, " R"]
    following: Int[Tensor, " R"]
    shown: Shown | None
    passed: Forward
    last: Int[Tensor, " B"]


@dataclass(frozen=True)
class Drafted:
    """Drafted trees, as `draft_tree.keep_best` gives them.

    Attributes:
      weights: Path weights; None where there is a verify row for each node.
      processed: Processed logits that each level of a chain was sampled from; None: it was not.
    """

    tokens: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    num_nodes: Int[Tensor, " B"]
    weights: Float[Tensor, "B N"] | None
    processed: Float[Tensor, "B S vocab"] | None


class Drafter(Protocol):
    """What a step asks of a drafter; it writes its memory but for `draft_from`."""

    @property
    def streams(self) -> tuple[int, ...]:
        """The residual streams of the target that it reads, ascending."""
        ...

    @property
    def sizes(self) -> DraftSizes:
        """What it keeps between steps; only with a relay is `rank` used while it is extended."""
        ...

    def prefill(
        self, memory: DraftState, plan: Plan, prompts: Prompts, fed: Fed, rank: Ranking
    ) -> None:
        """Extends the drafter over prompt chunks.

        Args:
          rank: Of the token after each row's newest, which the relay holds.
        """
        ...

    def extend(
        self,
        memory: DraftState,
        plan: Plan,
        before: Int[Tensor, " B"],
        counts: Int[Tensor, " B"],
        fed: Fed,
        rank: Ranking,
    ) -> None:
        """Extends the drafter over accepted paths, of W rows a request.

        Args:
          before: Lengths before the path.
          counts: How many of a request's rows are real.
        """
        ...

    def draft(
        self,
        memory: DraftState,
        plan: Plan,
        newest: Int[Tensor, " B"],
        lengths: Int[Tensor, " B"],
        deltas: Int[Tensor, " B"] | None,
        shape: TreeShape,
        rank: Ranking,
    ) -> Drafted:
        """Drafts a tree for each request; one whose `draft_from` is its length gets its root.

        Args:
          deltas: What the turns of rows are above their positions; None: the model sees nothing.
        """
        ...
