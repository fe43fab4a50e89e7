"""How drafts are made; all drafters rank their candidates in the same way."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jax_impl.device_state import DraftState, Plan
from jax_impl.model import Forward
from jax_impl.ops import scan
from jax_impl.ops.attention import attention
from jax_impl.ops.attention.attention import Rows
from jax_impl.ops.gemm.layers import Shown
from jax_impl.ops.sampling import lm_head, sampling, vocab_parallel
from jax_impl.ops.sampling.lm_head import Projection
from jax_impl.ops.sampling.sampling import Ranked, Sampling, Seen
from jax_impl.ops.sampling.vocab_parallel import ALL, Vocabulary
from shared.boundary.program import Program
from shared.drafts.config import DraftSizes
from shared.spec.draft_tree import TreeShape
from shared.spec.gumbel_noise import DRAFT_STREAM, TARGET_STREAM


class Drafted(NamedTuple):
    """Draft trees, as `draft_tree.keep_best` builds them.

    Attributes:
      weights: Path weights; None where there is a verify row for each node.
      processed: The processed logits that the draft of each level of a chain was sampled from; None
        where drafts are not sampled.
    """

    tokens: Int[jax.Array, "B N"]
    parents: Int[jax.Array, "B N"]
    num_nodes: Int[jax.Array, " B"]
    weights: Float[jax.Array, "B N"] | None
    processed: Float[jax.Array, "B S vocab"] | None


class Prompts(NamedTuple):
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

    tokens: Int[jax.Array, " T"]
    row_starts: Int[jax.Array, " B1"]
    first: Int[jax.Array, " B"]
    lengths: Int[jax.Array, " B"]
    last: Int[jax.Array, " B"]
    rows: Rows
    sources: Int[jax.Array, " T"] | None

    @classmethod
    def of(cls, plan: Plan, program: Program) -> "Prompts":
        prompt = plan.prompt
        assert prompt is not None  # a prefill has one
        row_starts, first = prompt.row_starts, prompt.first_positions
        no_bound, sources = jnp.zeros_like(first), None
        rows = attention.causal_rows(row_starts, first, no_bound, plan.page_table, program.tokens)
        if prompt.pictures is not None:
            rows, sources = rows._replace(turns=prompt.pictures.turns), prompt.pictures.sources
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
    """How a batch's candidates are ranked: as the target will choose, with its noise.

    Attributes:
      sampling: Parameters of the B requests.
      counts: Of all slots, see `sampling.Seen`; the newest tokens included.
      slots: Of the requests.
      lengths: Committed tokens of each request; its newest token stands there.
      width: Children of a node.
      is_sampled: Drafts are sampled, to be judged by a rejection rule; their noise is their own.
      vocabulary: Of the drafter's head, whose scores each rank has a part of.
      columns: The target's token of each score of the drafter; None where they are the same.
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
    ) -> Ranked:
        """The best children of k nodes of each request at one depth.

        Args:
          scored: What scores the tokens after each node, or those that this rank has.
          paths: Drafts from below the root to each node; the first `depth` of them are real.
        """
        return lm_head.rank(scored, *self._given(paths, depth))

    def of_scores(
        self,
        logits: Float[jax.Array, "B k share"],
        paths: Int[jax.Array, "B k path"],
        depth: Int[jax.Array, ""] | int,
    ) -> Ranked:
        """As for what scores tokens, from the scores."""
        return sampling.rank(logits, *self._given(paths, depth))

    def _given(
        self, paths: Int[jax.Array, "B k path"], depth: Int[jax.Array, ""] | int
    ) -> tuple[Any, ...]:
        """What candidates are ranked by, as `sampling.rank` takes it."""
        B, k, length = paths.shape
        path = paths.reshape(B * k, length)
        on_path = jnp.broadcast_to(jnp.arange(length) < depth, path.shape)
        seen = Seen(self.counts, jnp.repeat(self.slots, k), path, on_path)
        positions = self.lengths + depth + 1
        keys, stream = positions, TARGET_STREAM
        if self.is_sampled:
            keys, stream = self.lengths, DRAFT_STREAM + depth
        how = (keys, stream, self.width, self.is_sampled, self.columns, self.vocabulary)
        return seen, positions, self.sampling, *how

    def roots(self, scored: Projection) -> Ranked:
        """The best children of each request's root."""
        return self(scored, jnp.zeros((len(self.lengths), 1, 0), jnp.int32), 0)

    def candidates(
        self, logits: Float[jax.Array, "B S share"], k: int
    ) -> tuple[Float[jax.Array, "B S k"], Int[jax.Array, "B S k"]]:
        """The k best tokens of S places and their scores, whatever the requests ask for.

        Args:
          logits: The drafter's, or this rank's part of them.
        """
        B, S, share = logits.shape
        seen = sampling.seen_alone(self.counts, jnp.repeat(self.slots, S))
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
        """Drafts at S places in a row.

        They are made at once, so a place's penalties do not count the drafts before it.

        Args:
          scored: What scores them, in the order of the requests.
          is_weighed: The log weights of their edges are asked for; of drafts that are not sampled.

        Returns:
          The drafts, those weights, and the processed logits that they are sampled from, if so.
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
        request = jnp.repeat(jnp.arange(B, dtype=jnp.int32), S)
        positions = (self.lengths[:, None] + 1 + jnp.arange(S, dtype=jnp.int32)).reshape(-1)
        seen = sampling.seen_alone(self.counts, self.slots[request])
        if is_weighed or self.columns is not None:
            params = self.sampling.rows(request)
            given = (scored, seen, positions, params, positions, TARGET_STREAM, 1)
            ranked = lm_head.rank(*given, False, self.columns, self.vocabulary)
            weights = ranked.weights.reshape(B, S) if is_weighed else None
            return ranked.ids.reshape(B, S), weights, None
        given = (seen, positions, self.sampling, request, None, self.vocabulary)
        ids = lm_head.choose(scored, *given).ids
        return ids.reshape(B, S), None, None


class Fed(NamedTuple):
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
    tokens: Int[jax.Array, " R"]
    following: Int[jax.Array, " R"]
    shown: Shown | None
    passed: Forward
    last: Int[jax.Array, " B"]


class Drafter(Protocol):
    """What a step asks of a drafter, whose memory is the draft part of `DeviceState`."""

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
    ) -> DraftState:
        """Extends the drafter over prompt chunks.

        Args:
          rank: Of the token after each row's newest, which the relay holds.
        """
        ...

    def extend(
        self,
        memory: DraftState,
        plan: Plan,
        before: Int[jax.Array, " B"],
        counts: Int[jax.Array, " B"],
        fed: Fed,
        rank: Ranking,
    ) -> DraftState:
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
        newest: Int[jax.Array, " B"],
        lengths: Int[jax.Array, " B"],
        deltas: Int[jax.Array, " B"] | None,
        shape: TreeShape,
        rank: Ranking,
    ) -> tuple[Drafted, DraftState]:
        """Drafts a tree for each request; one whose `draft_from` is its length gets its root.

        The memory's committed rows stay as they are.

        Args:
          deltas: What the turns of rows are above their positions; None: the model sees nothing.
        """
        ...
