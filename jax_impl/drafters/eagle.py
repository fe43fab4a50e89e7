"""Drafting with a head that reads the target's hidden states; as `shared.spec.eagle`.

Row i of a head pairs the hidden state of token i with the embedding of token i + 1 and stands at
position i. After a step the head is extended over the accepted path with hidden states of the
target; while drafting it goes on from its own. How its tree grows is how any drafter's does.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jax_impl.device_state import DraftState, Held, Relay
from jax_impl.drafters import Fed, Ranking, Trees
from jax_impl.drafters.heads import Head, Logits, Tokens
from jax_impl.layers import KV
from jax_impl.ops import draft_tree
from jax_impl.ops.attention import Rows
from shared.drafts.config import DraftSizes
from shared.models.config import ModelConfig
from shared.spec.draft_tree import TreeShape

Carried = Any
"""What a drafter hands on from a row to the rows of its children: a pytree of arrays."""

Expand = Callable[[Rows, Tokens, Carried, KV], tuple[Logits, Carried, KV]]
"""Runs a drafter on the nodes of a level, each with what its parent's row handed on."""

Pick = Callable[[Carried, Int[jax.Array, " R"]], Carried]
"""What some rows handed on."""


class EagleDrafter(NamedTuple):
    """A `jax_impl.drafters.Drafter` made of a head; `layer` are the sizes of its one layer."""

    head: Head
    layer: ModelConfig

    @property
    def sizes(self) -> DraftSizes:
        """See `Drafter`."""
        return DraftSizes(self.layer, 1, 0, True)

    def prefill(
        self,
        memory: DraftState,
        plan: SimpleNamespace,
        held: Held,
        fed: Fed,
        ranking: Ranking,
        noise: Float[jax.Array, "B vocab"],
    ) -> DraftState:
        """See `Drafter`."""
        return self._extend(memory, plan, fed, ranking, noise)

    def extend(
        self,
        memory: DraftState,
        plan: SimpleNamespace,
        before: Int[jax.Array, " B"],
        counts: Int[jax.Array, " B"],
        fed: Fed,
        ranking: Ranking,
        noise: Float[jax.Array, "B vocab"],
    ) -> DraftState:
        """See `Drafter`."""
        return self._extend(memory, plan, fed, ranking, noise)

    def _extend(
        self,
        memory: DraftState,
        plan: SimpleNamespace,
        fed: Fed,
        ranking: Ranking,
        noise: Float[jax.Array, "B vocab"],
    ) -> DraftState:
        assert memory.relay is not None  # a head's memory has one
        width = memory.relay.tokens.shape[1]
        new, kv = feed(self.head, memory.kv, fed, ranking, noise, width)
        relay = jax.tree.map(lambda old, rows: old.at[plan.slots].set(rows), memory.relay, new)
        return memory._replace(kv=kv, relay=relay)

    def draft(
        self,
        memory: DraftState,
        plan: SimpleNamespace,
        newest: Int[jax.Array, " B"],
        shape: TreeShape,
        ranking: Ranking,
        noise: Float[jax.Array, "B levels vocab"],
    ) -> tuple[Trees, DraftState]:
        """See `Drafter`."""
        assert memory.relay is not None  # a head's memory has one
        relay = jax.tree.map(lambda values: values[plan.slots], memory.relay)
        if ranking.kept is not None:
            relay = sampled_relay(self.head, relay, ranking, noise[:, 0])
        where = (newest, memory.start[plan.slots], plan.page_table)
        trees, kv = draft(self.head, memory.kv, relay, *where, shape, ranking, noise)
        return trees, memory._replace(kv=kv)


def feed(
    head: Head,
    kv: KV,
    fed: Fed,
    ranking: Ranking,
    noise: Float[jax.Array, "B vocab"],
    width: int,
) -> tuple[Relay, KV]:
    """Runs the head over committed rows and makes the relay from each request's last.

    Args:
      ranking, noise: For the token after the newest, the rows' tokens counted.
      width: k_max, candidates of a relay.
    """
    out, kv = head.forward(fed.rows, fed.following, head.read(fed.passed), kv)
    out = out[fed.last]
    no_path = jnp.zeros((len(out), 1, 0), jnp.int32)
    ids, weights = ranking.rank(head.logits(out)[:, None], no_path, 0, noise, width)
    return Relay(ids[:, 0], weights[:, 0], out), kv


def sampled_relay(
    head: Head, relay: Relay, ranking: Ranking, noise: Float[jax.Array, "B vocab"]
) -> Relay:
    """The relay with a draft sampled anew: a slot does not keep the law that one comes from."""
    no_path = jnp.zeros((len(relay.hidden), 1, 0), jnp.int32)
    ids, weights = ranking.rank(head.logits(relay.hidden)[:, None], no_path, 0, noise, 1)
    return Relay(ids[:, 0], weights[:, 0], relay.hidden)


def draft(
    head: Head,
    kv: KV,
    relay: Relay,
    newest: Int[jax.Array, " B"],
    start: Int[jax.Array, " B"],
    page_table: Int[jax.Array, "B table"],
    shape: TreeShape,
    ranking: Ranking,
    noise: Float[jax.Array, "B levels vocab"],
) -> tuple[Trees, KV]:
    """Grows one draft tree per request: the relay is its first level, then S - 1 expansions."""

    def expand(rows: Rows, tokens: Tokens, hidden: Carried, kv: KV) -> tuple[Logits, Carried, KV]:
        out, kv = head.forward(rows, tokens, hidden, kv)
        return head.logits(out), out, kv

    def pick(hidden: Carried, rows: Int[jax.Array, " R"]) -> Carried:
        return hidden[rows]

    first = (relay.tokens[:, : shape.width], relay.weights[:, : shape.width])
    how = (page_table, shape, ranking, noise, 0)
    return grow(expand, pick, relay.hidden, kv, first, newest, start, *how)


def extend_rows(
    lengths: Int[jax.Array, " B"],
    counts: Int[jax.Array, " B"],
    start: Int[jax.Array, " B"],
    page_table: Int[jax.Array, "B table"],
    max_tokens: int,
) -> tuple[Rows, Int[jax.Array, " B"]]:
    """The B * W rows that extend a head over an accepted path, and the last real one of each.

    Row j of a request stands at position `lengths + j` and is padding from `counts` on.
    """
    B, W = len(lengths), max_tokens
    request = jnp.repeat(jnp.arange(B, dtype=jnp.int32), W)
    number = jnp.tile(jnp.arange(W, dtype=jnp.int32), B)
    is_real = number < counts[request]
    positions = jnp.where(is_real, lengths[request] + number, 0)
    until = jnp.where(is_real, positions + 1, 0)
    window = jnp.zeros((B * W, 0), bool)
    row_starts = W * jnp.arange(B + 1, dtype=jnp.int32)
    where = (request, positions, positions, start[request], until, window, is_real)
    rows = Rows(*where, page_table, row_starts, W)
    return rows, row_starts[:-1] + jnp.maximum(counts - 1, 0)


class _Level(NamedTuple):
    """The frontier that the next expansion runs on.

    Attributes:
      carried: What each node's parent handed on.
      numbers: Candidate numbers.
      paths: Drafts from below the root to the node itself, then padding.
      sees: Which rows of the drafting window each node sees, its own included.
      kv: The drafter's pools.
    """

    tokens: Int[jax.Array, "B k"]
    weights: Float[jax.Array, "B k"]
    carried: Carried
    numbers: Int[jax.Array, "B k"]
    paths: Int[jax.Array, "B k path"]
    sees: Bool[jax.Array, "B k window"]
    kv: KV


def grow(
    expand: Expand,
    pick: Pick,
    carried: Carried,
    kv: KV,
    first: tuple[Int[jax.Array, "B k"], Float[jax.Array, "B k"]],
    newest: Int[jax.Array, " B"],
    start: Int[jax.Array, " B"],
    page_table: Int[jax.Array, "B table"],
    shape: TreeShape,
    ranking: Ranking,
    noise: Float[jax.Array, "B levels vocab"],
    root_rows: int,
) -> tuple[Trees, KV]:
    """As the specification.

    Args:
      carried: What each request's root hands on.
      noise: The target's at the position after the newest token and those that follow.
    """
    (tokens, weights), k, S = first, shape.width, shape.depth
    B, can_draft = len(newest), start < ranking.lengths
    found = [(tokens, weights, jnp.zeros((B, k), jnp.int32))]
    if S > 1:
        requests = jnp.repeat(jnp.arange(B), k)
        level = _first_level(tokens, weights, pick(carried, requests), shape, root_rows, kv)

        def step(level: _Level, at: tuple) -> tuple[_Level, tuple]:
            s, level_noise = at
            where = (ranking.lengths, start, can_draft, page_table)
            rows = _expansion_rows(level.sees, s, *where, root_rows)
            logits, carried, kv = expand(rows, level.tokens.reshape(-1), level.carried, level.kv)
            ids, edges = ranking.rank(logits.reshape(B, k, -1), level.paths, s, level_noise, k)
            parents, weights = draft_tree.children(level.numbers, level.weights, edges)
            candidates = (ids.reshape(B, k * k), weights, parents)
            level = level._replace(carried=carried, kv=kv)
            return _next_level(level, *candidates[:2], s, root_rows, pick), candidates

        steps = (jnp.arange(1, S, dtype=jnp.int32), jnp.moveaxis(noise[:, 1:S], 1, 0))
        level, candidates = ranking.along(step, level, steps)
        kv = level.kv
        found.append(tuple(jnp.moveaxis(x, 0, 1).reshape(B, -1) for x in candidates))
    drafted = (jnp.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
    limits = (ranking.sampling.max_drafts, can_draft, shape.nodes)
    return draft_tree.keep_best(newest, *drafted, *limits), kv


def _first_level(
    tokens: Int[jax.Array, "B k"],
    weights: Float[jax.Array, "B k"],
    carried: Carried,
    shape: TreeShape,
    root_rows: int,
    kv: KV,
) -> _Level:
    (B, k), expansions = tokens.shape, shape.depth - 1
    numbers = jnp.tile(jnp.arange(1, k + 1, dtype=jnp.int32), (B, 1))
    paths = jnp.zeros((B, k, expansions), jnp.int32).at[:, :, 0].set(tokens)
    window = jnp.arange(root_rows + k * expansions)
    sees = (window < root_rows) | (window == root_rows + jnp.arange(k)[:, None])
    sees = jnp.broadcast_to(sees, (B, *sees.shape))
    return _Level(tokens, weights, carried, numbers, paths, sees, kv)


def _next_level(
    level: _Level,
    tokens: Int[jax.Array, "B kk"],
    weights: Float[jax.Array, "B kk"],
    s: Int[jax.Array, ""],
    root_rows: int,
    pick: Pick,
) -> _Level:
    """The best k of the candidates that expansion `s` found; `level` carries what its rows gave."""
    k, window = level.sees.shape[1:]
    first_number = 1 + k + (s - 1) * k * k
    chosen, best, numbers, parent = draft_tree.next_frontier(tokens, weights, first_number, k)
    rows = jnp.arange(len(chosen))[:, None]
    own = jnp.arange(window) == root_rows + s * k + jnp.arange(k)[:, None]
    is_own = jnp.arange(level.paths.shape[2]) == s
    paths = jnp.where(is_own, chosen[:, :, None], level.paths[rows, parent])
    return _Level(
        tokens=chosen,
        weights=best,
        carried=pick(level.carried, (rows * k + parent).reshape(-1)),
        numbers=numbers,
        paths=paths,
        sees=level.sees[rows, parent] | own,
        kv=level.kv,
    )


def _expansion_rows(
    sees: Bool[jax.Array, "B k window"],
    s: Int[jax.Array, ""],
    lengths: Int[jax.Array, " B"],
    start: Int[jax.Array, " B"],
    can_draft: Bool[jax.Array, " B"],
    page_table: Int[jax.Array, "B table"],
    root_rows: int,
) -> Rows:
    """Expansion `s` stands at one position and writes k rows of the window; see `grow`."""
    B, k, _ = sees.shape
    request = jnp.repeat(jnp.arange(B, dtype=jnp.int32), k)
    is_real = can_draft[request]
    until = jnp.where(is_real, lengths[request], 0)
    positions = until + root_rows + s - 1
    places = until + root_rows + (s - 1) * k + jnp.tile(jnp.arange(k, dtype=jnp.int32), B)
    window = sees.reshape(B * k, -1) & is_real[:, None]
    row_starts = k * jnp.arange(B + 1, dtype=jnp.int32)
    where = (request, positions, places, start[request], until, window, is_real)
    return Rows(*where, page_table, row_starts, k)
