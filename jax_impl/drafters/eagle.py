"""Drafting with a head that reads the target's hidden states; as `shared.spec.eagle`.

Row i of a head pairs the hidden state of token i with the embedding of token i + 1 and stands at
position i. After a step the head is extended over the accepted path with hidden states of the
target; while drafting it goes on from its own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int

from jax_impl.device_state import DraftState, Relay
from jax_impl.drafters.heads import Head
from jax_impl.layers import KV
from jax_impl.model import Forward
from jax_impl.ops import draft_tree, sampling
from jax_impl.ops.attention import Rows
from jax_impl.ops.sampling import Sampling
from shared.spec.draft_tree import TreeShape
from shared.spec.sampling import DRAFT_TAU

Trees = tuple[Int[jax.Array, "B N"], Int[jax.Array, "B N"], Int[jax.Array, " B"]]


class Ranking(NamedTuple):
    """How a batch's candidates are ranked: as the target will choose, with its noise.

    Attributes:
      sampling: Parameters of the B rows.
      seen: What each row's text holds, the newest token included.
      lengths: Committed tokens of each row; its newest token stands there.
    """

    sampling: Sampling
    seen: Int[jax.Array, "B vocab"]
    lengths: Int[jax.Array, " B"]

    def rank(
        self,
        logits: Float[jax.Array, "B k vocab"],
        paths: Int[jax.Array, "B k path"],
        depth: Int[jax.Array, ""] | int,
        noise: Float[jax.Array, "B vocab"],
        width: int,
    ) -> tuple[Int[jax.Array, "B k width"], Float[jax.Array, "B k width"]]:
        """The best children of nodes at one depth, and the log weights of the edges to them.

        Args:
          paths: Drafts from below the root to each node; the first `depth` of them are real.
          noise: The target's, for the token after those nodes.
        """
        B, k, vocab = logits.shape
        flat, how = logits.reshape(B * k, vocab), self.sampling
        if k > 1:
            how = how.rows(jnp.repeat(jnp.arange(B), k))

        def seen() -> Int[jax.Array, "R vocab"]:
            is_real = jnp.broadcast_to(jnp.arange(paths.shape[2]) < depth, paths.shape)
            before = jnp.repeat(self.seen, k, axis=0)
            flat_paths = (part.reshape(B * k, -1) for part in (paths, is_real))
            return sampling.seen_along(before, *flat_paths)

        positions = jnp.repeat(self.lengths, k) + depth + 1
        scores = sampling.processed_after(flat, seen, positions, how, None)
        scores = sampling.perturbed(scores, jnp.repeat(noise, k, axis=0), how.temperature)
        ids = sampling.top_candidates(scores, width)
        weights = sampling.draft_weights(scores, how.temperature, DRAFT_TAU)
        weights = jnp.take_along_axis(weights, ids, axis=1)
        return ids.reshape(B, k, width), weights.reshape(B, k, width)


def feed(
    head: Head,
    rows: Rows,
    tokens: Int[jax.Array, " R"],
    passed: Forward,
    kv: KV,
    last: Int[jax.Array, " B"],
    ranking: Ranking,
    noise: Float[jax.Array, "B vocab"],
    width: int,
) -> tuple[Relay, KV]:
    """Runs the head over consecutive rows and makes the relay from each request's last row.

    Args:
      tokens: Each row's next token.
      passed: The target's pass over the rows.
      last: The flat row that is each request's last.
      ranking, noise: For the token after the newest, the rows' tokens counted.
      width: k_max, candidates of a relay.
    """
    out, kv = head.forward(rows, tokens, head.read(passed), kv)
    out = out[last]
    no_path = jnp.zeros((len(last), 1, 0), jnp.int32)
    ids, weights = ranking.rank(head.logits(out)[:, None], no_path, 0, noise, width)
    return Relay(ids[:, 0], weights[:, 0], out), kv


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
      hidden: What each node's row reads: the output of its parent's row.
      numbers: Candidate numbers.
      paths: Drafts from below the root to the node itself, then padding.
      sees: Which rows of the drafting window each node sees, its own included.
      kv: The head's pools.
    """

    tokens: Int[jax.Array, "B k"]
    weights: Float[jax.Array, "B k"]
    hidden: Float[jax.Array, "B k hidden"]
    numbers: Int[jax.Array, "B k"]
    paths: Int[jax.Array, "B k path"]
    sees: Bool[jax.Array, "B k window"]
    kv: KV


def draft(
    head: Head,
    state: DraftState,
    slots: Int[jax.Array, " B"],
    newest: Int[jax.Array, " B"],
    page_table: Int[jax.Array, "B table"],
    shape: TreeShape,
    ranking: Ranking,
    noise: Float[jax.Array, "B levels vocab"],
) -> tuple[Trees, KV]:
    """Grows one draft tree per request: the relay is its first level, then S - 1 expansions.

    Args:
      newest: The root's token.
      noise: The target's at the position after the newest token and those that follow.

    Returns:
      Tokens, parents and node counts as `draft_tree.keep_best`, and the head's KV.
    """
    B, k, S = len(newest), shape.width, shape.depth
    relay, start = Relay(*(field[slots] for field in state.relay)), state.start[slots]
    has_relay = start < ranking.lengths
    tokens, weights = relay.tokens[:, :k], relay.weights[:, :k]
    roots = jnp.zeros((B, k), jnp.int32)
    found, kv = [(tokens, weights, roots)], state.kv
    if S > 1:
        level = _first_level(relay, tokens, weights, shape, kv)

        def expand(level: _Level, at: tuple) -> tuple[_Level, tuple]:
            s, level_noise = at
            rows = _expansion_rows(level.sees, s, ranking.lengths, start, has_relay, page_table)
            hidden = level.hidden.reshape(B * k, -1)
            out, kv = head.forward(rows, level.tokens.reshape(-1), hidden, level.kv)
            scores = head.logits(out).reshape(B, k, -1)
            ids, edges = ranking.rank(scores, level.paths, s, level_noise, k)
            parents, weights = draft_tree.children(level.numbers, level.weights, edges)
            candidates = (ids.reshape(B, k * k), weights, parents)
            level = _next_level(level, *candidates[:2], out.reshape(B, k, -1), s)
            return level._replace(kv=kv), candidates

        steps = (jnp.arange(1, S, dtype=jnp.int32), jnp.moveaxis(noise[:, 1:S], 1, 0))
        level, candidates = lax.scan(expand, level, steps)
        kv = level.kv
        found.append(tuple(jnp.moveaxis(x, 0, 1).reshape(B, -1) for x in candidates))
    drafted = (jnp.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
    limits = (ranking.sampling.max_drafts, has_relay, shape.nodes)
    return draft_tree.keep_best(newest, *drafted, *limits), kv


def _first_level(
    relay: Relay,
    tokens: Int[jax.Array, "B k"],
    weights: Float[jax.Array, "B k"],
    shape: TreeShape,
    kv: KV,
) -> _Level:
    (B, k), expansions = tokens.shape, shape.depth - 1
    hidden = jnp.repeat(relay.hidden[:, None], k, axis=1)
    numbers = jnp.tile(jnp.arange(1, k + 1, dtype=jnp.int32), (B, 1))
    paths = jnp.zeros((B, k, expansions), jnp.int32).at[:, :, 0].set(tokens)
    own = jnp.eye(k, k * expansions, dtype=bool)
    sees = jnp.broadcast_to(own, (B, *own.shape))
    return _Level(tokens, weights, hidden, numbers, paths, sees, kv)


def _next_level(
    level: _Level,
    tokens: Int[jax.Array, "B kk"],
    weights: Float[jax.Array, "B kk"],
    hidden: Float[jax.Array, "B k hidden"],
    s: Int[jax.Array, ""],
) -> _Level:
    """The best k of the candidates that expansion `s` found, whose rows gave `hidden`."""
    k, window = level.sees.shape[1:]
    first_number = 1 + k + (s - 1) * k * k
    chosen, best, numbers, parent = draft_tree.next_frontier(tokens, weights, first_number, k)
    rows = jnp.arange(len(chosen))[:, None]
    own = jnp.arange(window) == s * k + jnp.arange(k)[:, None]
    is_own = jnp.arange(level.paths.shape[2]) == s
    paths = jnp.where(is_own, chosen[:, :, None], level.paths[rows, parent])
    return _Level(
        tokens=chosen,
        weights=best,
        hidden=hidden[rows, parent],
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
    has_relay: Bool[jax.Array, " B"],
    page_table: Int[jax.Array, "B table"],
) -> Rows:
    """Expansion `s` stands at `lengths + s - 1` and writes at `lengths + (s - 1) k` and on."""
    B, k, _ = sees.shape
    request = jnp.repeat(jnp.arange(B, dtype=jnp.int32), k)
    is_real = has_relay[request]
    length = jnp.where(is_real, lengths[request], 0)
    places = length + (s - 1) * k + jnp.tile(jnp.arange(k, dtype=jnp.int32), B)
    window = sees.reshape(B * k, -1) & is_real[:, None]
    row_starts = k * jnp.arange(B + 1, dtype=jnp.int32)
    where = (request, length + s - 1, places, start[request], length, window, is_real)
    return Rows(*where, page_table, row_starts, k)
