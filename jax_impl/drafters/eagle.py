"""EAGLE drafter and the tree expansion of all autoregressive drafters; same as `shared.spec.eagle`.

Row i of a head has position i and combines the hidden state of token i with the embedding of token
i + 1. After a step the head is extended over the accepted path with hidden states of the target.
While drafting it reads its own hidden states.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jax_impl.device_state import DraftInput, DraftState, Plan
from jax_impl.drafters import DraftRequests, DraftTrees, ExtendRows, PrefillChunks, Ranking
from jax_impl.drafters.heads import Head, Tokens
from jax_impl.layers import Hidden
from jax_impl.ops import scan
from jax_impl.ops.attention.attention import KV, AttentionRows, with_mrope
from jax_impl.ops.sampling.lm_head import Projection
from jax_impl.ops.sampling.sampling import RankedCandidates
from jax_impl.ops.trees import draft_tree, verify_budget
from jax_impl.ops.trees.draft_tree import Level
from shared.drafts.config import DraftStateSizes
from shared.spec.draft_tree import TreeShape

Carried = Any
"""Inputs of a node's children that the drafter computes at the node: a pytree of arrays."""

DraftKV = Any
"""KV of a drafter: the pages of a head, or the pools of a draft model."""


class Expand(NamedTuple):
    """Functions with which a drafter expands nodes.

    Attributes:
      run: Runs the nodes of a level, each with its parent's carry. Returns the LM-head projection
        for their children, their carry, and the drafter's pools.
      pick: Selects the carry of some rows of a level.
      carried: Carry of each request's root.
    """

    run: Callable[[AttentionRows, Tokens, Carried, DraftKV], tuple[Projection, Carried, DraftKV]]
    pick: Callable[[Carried, Int[jax.Array, " R"]], Carried]
    carried: Carried


class EagleDrafter(NamedTuple):
    """Drafter with a NEXTN, EAGLE or EAGLE-3 head."""

    head: Head

    @property
    def streams(self) -> tuple[int, ...]:
        return self.head.streams

    @property
    def sizes(self) -> DraftStateSizes:
        return DraftStateSizes.of_layers(self.head.config, self.head.num_layers)

    def prefill(
        self,
        memory: DraftState,
        plan: Plan,
        prompts: PrefillChunks,
        committed: ExtendRows,
        rank: Ranking,
    ) -> DraftState:
        return self._extend(memory, plan, committed, rank)

    def extend(
        self,
        memory: DraftState,
        plan: Plan,
        before: Int[jax.Array, " B"],
        counts: Int[jax.Array, " B"],
        committed: ExtendRows,
        rank: Ranking,
    ) -> DraftState:
        return self._extend(memory, plan, committed, rank)

    def _extend(
        self, memory: DraftState, plan: Plan, committed: ExtendRows, rank: Ranking
    ) -> DraftState:
        assert memory.relay is not None  # a head has a relay
        new, kv = relay_of(self.head.adapted(plan.adapters), memory.kv[0], committed, rank)
        return memory._replace(kv=(kv,), relay=memory.relay.put(plan.slots, new))

    def draft(
        self, memory: DraftState, requests: DraftRequests, shape: TreeShape, rank: Ranking
    ) -> tuple[DraftTrees, DraftState]:
        head = self.head.adapted(requests.adapters)
        drafted, kv = draft(head, memory.kv[0], requests, shape, rank)
        return drafted, memory._replace(kv=(kv,))


def relay_of(head: Head, kv: KV, committed: ExtendRows, rank: Ranking) -> tuple[DraftInput, KV]:
    """Extends the draft KV over committed rows; returns the relay of each request's last row."""
    out, kv = head.forward(
        committed.rows, committed.following, committed.shown, head.read(committed.passed), kv
    )
    ends = out[committed.last]
    rank = rank._replace(columns=head.columns, vocabulary=head.vocabulary)
    ranked = rank.roots(head.projected(ends))
    return DraftInput(ranked.ids[:, 0], ranked.weights[:, 0], ends), kv


class FirstLevel(NamedTuple):
    """First level of a tree: the candidates below its root.

    Attributes:
      processed: Processed logits that a chain's first draft was sampled from; None if not sampled.
    """

    tokens: Int[jax.Array, "B k"]
    weights: Float[jax.Array, "B k"]
    processed: Float[jax.Array, "B vocab"] | None

    @classmethod
    def of(cls, ranked: RankedCandidates) -> "FirstLevel":
        """Builds the first level from the ranked children of the roots."""
        return cls(ranked.ids[:, 0], ranked.weights[:, 0], ranked.processed)


def first_of(
    projected: Callable[[Hidden], Projection], relay: DraftInput, shape: TreeShape, rank: Ranking
) -> FirstLevel:
    """Returns the relay's candidates; for rejection sampling the draft is sampled again, from the
    projection of the relay's hidden state.

    A slot does not store the draft distribution.
    """
    if rank.is_sampled:
        return FirstLevel.of(rank.roots(projected(relay.hidden)))
    return FirstLevel(relay.tokens[:, : shape.width], relay.weights[:, : shape.width], None)


def draft(
    head: Head,
    kv: KV,
    requests: DraftRequests,
    shape: TreeShape,
    rank: Ranking,
) -> tuple[DraftTrees, KV]:
    """Builds one draft tree per request: first level from the relay, then S - 1 expansions."""
    relay = requests.relay
    assert relay is not None  # a head has a relay

    def run(
        rows: AttentionRows, tokens: Tokens, hidden: Carried, kv: KV
    ) -> tuple[Projection, Carried, KV]:
        rows = rows if requests.deltas is None else with_mrope(rows, requests.deltas)
        out, kv = head.forward(rows, tokens, None, hidden, kv)
        return head.projected(out), out, kv

    def pick(hidden: Carried, rows: Int[jax.Array, " R"]) -> Carried:
        return hidden[rows]

    rank = rank._replace(columns=head.columns, vocabulary=head.vocabulary)
    expand, first = Expand(run, pick, relay.hidden), first_of(head.projected, relay, shape, rank)
    return grow(expand, kv, first, requests, shape, rank, root_rows=0)


def extend_rows(
    lengths: Int[jax.Array, " B"],
    counts: Int[jax.Array, " B"],
    draft_from: Int[jax.Array, " B"],
    page_table: Int[jax.Array, "B table"],
    depth: int,
) -> AttentionRows:
    """Returns the B * (depth + 1) rows of a draft extend over accepted paths.

    Row j of a request has position `lengths + j` and is padding from `counts` on.
    """
    B, W = len(lengths), depth + 1
    request = jnp.repeat(jnp.arange(B, dtype=jnp.int32), W)
    number = jnp.tile(jnp.arange(W, dtype=jnp.int32), B)
    is_real = number < counts[request]
    positions = jnp.where(is_real, lengths[request] + number, 0)
    return AttentionRows(
        request=request,
        positions=positions,
        places=positions,
        first=draft_from[request],
        until=jnp.where(is_real, positions + 1, 0),
        window=jnp.zeros((B * W, 0), bool),
        is_real=is_real,
        page_table=page_table,
        row_starts=W * jnp.arange(B + 1, dtype=jnp.int32),
        max_rows=W,
    )


class _Frontier(NamedTuple):
    """Inputs of the next expansion of a tree.

    Attributes:
      carried: Carry of each node's parent.
      kv: Pools of the drafter.
    """

    level: Level
    carried: Carried
    kv: DraftKV


class _TreeCandidates(NamedTuple):
    """The k * k candidates of an expansion."""

    tokens: Int[jax.Array, "B kk"]
    weights: Float[jax.Array, "B kk"]
    parents: Int[jax.Array, "B kk"]


class _ChainFrontier(NamedTuple):
    """Inputs of the next expansion of a chain; see `_Frontier`."""

    tokens: Int[jax.Array, " B"]
    carried: Carried
    paths: Int[jax.Array, "B 1 path"]
    kv: DraftKV


class _ChainExpansion(NamedTuple):
    """Result of one expansion of a chain.

    Attributes:
      edge: Log weight of the edge to the token; None if not requested.
      law: Processed logits that the token was sampled from; None if not sampled.
    """

    token: Int[jax.Array, " B"]
    edge: Float[jax.Array, " B"] | None
    law: Float[jax.Array, "B vocab"] | None


def grow(
    expand: Expand,
    kv: DraftKV,
    first: FirstLevel,
    requests: DraftRequests,
    shape: TreeShape,
    rank: Ranking,
    root_rows: int,
) -> tuple[DraftTrees, DraftKV]:
    """Builds trees from their first level; the first `root_rows` of the window are the root's."""
    B, k, S = len(requests.newest), shape.width, shape.depth
    if k == 1:
        return _grow_chain(expand, kv, first, requests, shape, rank, root_rows)
    can_draft = requests.can_draft
    levels_of = [_TreeCandidates(first.tokens, first.weights, jnp.zeros((B, k), jnp.int32))]
    if S > 1:

        def body(at: _Frontier, s: Int[jax.Array, ""]) -> tuple[_Frontier, _TreeCandidates]:
            rows = _expansion_rows(at.level.sees, s, requests, can_draft, root_rows)
            tokens = at.level.tokens.reshape(-1)
            scored, carried, kv = expand.run(rows, tokens, at.carried, at.kv)
            ranked = rank(scored, at.level.paths, s)
            parents, weights, level = draft_tree.next_level(
                at.level, ranked.ids, ranked.weights, s, root_rows
            )
            candidates = _TreeCandidates(ranked.ids.reshape(B, k * k), weights, parents)
            carried = expand.pick(carried, level.parents.reshape(-1))
            return _Frontier(level, carried, kv), candidates

        level = _first_level(first, shape, root_rows)
        carried = expand.pick(expand.carried, level.parents.reshape(-1))
        steps = jnp.arange(1, S, dtype=jnp.int32)
        end, levels = scan(body, _Frontier(level, carried, kv), steps)
        kv = end.kv
        levels_of.append(jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(B, -1), levels))
    kept = draft_tree.keep_best(
        newest=requests.newest,
        tokens=jnp.concatenate([each.tokens for each in levels_of], axis=1),
        weights=jnp.concatenate([each.weights for each in levels_of], axis=1),
        parents=jnp.concatenate([each.parents for each in levels_of], axis=1),
        max_drafts=requests.max_drafts,
        has_relay=can_draft,
        nodes=shape.nodes,
    )
    return DraftTrees(*kept, None), kv


def _grow_chain(
    expand: Expand,
    kv: DraftKV,
    first: FirstLevel,
    requests: DraftRequests,
    shape: TreeShape,
    rank: Ranking,
    root_rows: int,
) -> tuple[DraftTrees, DraftKV]:
    """Same as `grow`, for chains: drafts are already ordered by weight, so none is dropped."""
    (B, depth), can_draft = (len(requests.newest), shape.depth), requests.can_draft
    tokens, edges, is_weighed = first.tokens, first.weights, shape.shares_rows(B)
    processed = [] if first.processed is None else [first.processed[:, None]]
    if depth > 1:

        def body(
            end: _ChainFrontier, s: Int[jax.Array, ""]
        ) -> tuple[_ChainFrontier, _ChainExpansion]:
            place, counts = requests.lengths + root_rows + s - 1, can_draft.astype(jnp.int32)
            rows = extend_rows(place, counts, requests.draft_from, requests.page_table, 0)
            scored, carried, kv = expand.run(rows, end.tokens, end.carried, end.kv)
            ranked = rank(scored, end.paths, s)
            token = ranked.ids[:, 0, 0]
            is_own = jnp.arange(depth - 1) == s
            paths = jnp.where(is_own, token[:, None, None], end.paths)
            edge = ranked.weights[:, 0, 0] if is_weighed else None
            return _ChainFrontier(token, carried, paths, kv), _ChainExpansion(
                token, edge, ranked.processed
            )

        paths = jnp.zeros((B, 1, depth - 1), jnp.int32).at[:, :, 0].set(tokens)
        end = _ChainFrontier(tokens[:, 0], expand.carried, paths, kv)
        end, more = scan(body, end, jnp.arange(1, depth, dtype=jnp.int32))
        tokens, kv = jnp.concatenate([tokens, more.token.T], axis=1), end.kv
        if more.edge is not None:
            edges = jnp.concatenate([edges, more.edge.T], axis=1)
        if more.law is not None:
            processed.append(jnp.moveaxis(more.law, 0, 1))
    chains = draft_tree.chains(tokens, requests.newest, requests.max_drafts, can_draft)
    weights = verify_budget.chain_weights(edges) if is_weighed else None
    laws = jnp.concatenate(processed, axis=1) if processed else None
    return DraftTrees(*chains, weights, laws), kv


def _first_level(first: FirstLevel, shape: TreeShape, root_rows: int) -> Level:
    (B, k), expansions = first.tokens.shape, shape.depth - 1
    window = jnp.arange(root_rows + k * expansions)
    sees = (window < root_rows) | (window == root_rows + jnp.arange(k)[:, None])
    request = jnp.arange(B, dtype=jnp.int32)[:, None]
    return Level(
        tokens=first.tokens,
        weights=first.weights,
        parents=jnp.broadcast_to(request, (B, k)),
        numbers=jnp.tile(jnp.arange(1, k + 1, dtype=jnp.int32), (B, 1)),
        paths=jnp.zeros((B, k, expansions), jnp.int32).at[:, :, 0].set(first.tokens),
        sees=jnp.broadcast_to(sees, (B, *sees.shape)),
    )


def _expansion_rows(
    sees: Bool[jax.Array, "B k window"],
    s: Int[jax.Array, ""],
    requests: DraftRequests,
    can_draft: Bool[jax.Array, " B"],
    root_rows: int,
) -> AttentionRows:
    """Returns the rows of expansion `s`: one position, k rows of the window; see `grow`."""
    B, k, _ = sees.shape
    request = jnp.repeat(jnp.arange(B, dtype=jnp.int32), k)
    is_real = can_draft[request]
    until = jnp.where(is_real, requests.lengths[request], 0)
    number = jnp.tile(jnp.arange(k, dtype=jnp.int32), B)
    return AttentionRows(
        request=request,
        positions=until + root_rows + s - 1,
        places=until + root_rows + (s - 1) * k + number,
        first=requests.draft_from[request],
        until=until,
        window=sees.reshape(B * k, -1) & is_real[:, None],
        is_real=is_real,
        page_table=requests.page_table,
        row_starts=k * jnp.arange(B + 1, dtype=jnp.int32),
        max_rows=k,
    )
