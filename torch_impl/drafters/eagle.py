"""As `shared.spec.eagle`, in torch: what all heads share, from drafting to extending."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.spec.draft_tree import TreeShape
from torch_impl.drafters import Rank
from torch_impl.drafters.heads import DraftKV, Head, Tokens
from torch_impl.model import Forward
from torch_impl.ops import draft_tree
from torch_impl.ops.attention import Rows


@dataclass(frozen=True)
class Relay:
    """As the specification's."""

    tokens: Int[Tensor, "B k"]
    weights: Float[Tensor, "B k"]
    hidden: Float[Tensor, "B hidden"]


@dataclass(frozen=True)
class EagleDrafter:
    """A drafter made of a head."""

    head: Head

    def extend(
        self,
        kv: DraftKV,
        rows: Rows,
        tokens: Tokens,
        passed: Forward,
        last: Int[Tensor, " B"],
        rank: Rank,
    ) -> Relay:
        """Extends the draft KV over committed rows, and makes the relay of each request's last.

        Args:
          tokens: The token after each row's.
          passed: The target's pass over these rows, with the streams that the head reads.
          last: The flat row that is each request's last.
        """
        ends = self.head.forward(rows, tokens, self.head.read(passed), kv)[last]
        no_path = last.new_zeros(len(last), 1, 0)
        ids, weights = rank(self.head.logits(ends)[:, None], no_path)
        return Relay(ids[:, 0], weights[:, 0], ends)

    def draft(
        self,
        kv: DraftKV,
        relay: Relay,
        newest: Int[Tensor, " B"],
        lengths: Int[Tensor, " B"],
        draft_from: Int[Tensor, " B"],
        max_drafts: Int[Tensor, " B"],
        page_table: Int[Tensor, "B P"],
        shape: TreeShape,
        rank: Rank,
    ) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B N"], Int[Tensor, " B"]]:
        """Grows one draft tree per request; see `shared.spec.eagle.draft`.

        Returns:
          Tokens, parents and node counts as `draft_tree.keep_best`.
        """
        k = shape.width
        has_relay = draft_from < lengths
        tokens, weights = relay.tokens[:, :k], relay.weights[:, :k]
        found = [(tokens, weights, torch.zeros_like(tokens))]
        level = _first_level(relay, tokens, weights, shape)
        for s in range(1, shape.depth):
            rows = _expansion_rows(level.sees, s, lengths, draft_from, has_relay, page_table)
            flat_hidden = level.hidden.flatten(0, 1)
            out = self.head.forward(rows, level.tokens.flatten(), flat_hidden, kv)
            logits = self.head.logits(out).unflatten(0, level.tokens.shape)
            ids, edges = rank(logits, level.paths)
            parents, weights = draft_tree.children(level.numbers, level.weights, edges)
            found.append((ids.flatten(1), weights, parents))
            level = level.next(found[-1][0], weights, out.unflatten(0, level.tokens.shape), s)
        drafted = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        return draft_tree.keep_best(newest, *drafted, max_drafts, has_relay, shape.nodes)


def extend_rows(
    lengths: Int[Tensor, " B"],
    counts: Int[Tensor, " B"],
    draft_from: Int[Tensor, " B"],
    page_table: Int[Tensor, "B P"],
    depth: int,
) -> Rows:
    """As the specification."""
    B, W = len(lengths), depth + 1
    place = torch.arange(B * W, dtype=torch.int32, device=lengths.device)
    request = torch.div(place, W, rounding_mode="floor").long()
    step = place - request * W
    is_real = step < counts[request]
    positions = torch.where(is_real, lengths[request] + step, 0)
    until = torch.where(is_real, positions + 1, 0)
    window, first = is_real.new_zeros(B * W, 0), draft_from[request]
    where = (request, positions, positions, first, until, window, is_real)
    return Rows(*where, page_table, _row_starts(B, W, lengths.device), W)


@dataclass(frozen=True)
class _Level:
    """The frontier that the next expansion runs on; as the specification's."""

    tokens: Int[Tensor, "B k"]
    weights: Float[Tensor, "B k"]
    hidden: Float[Tensor, "B k hidden"]
    numbers: Int[Tensor, "B k"]
    paths: Int[Tensor, "B k path"]
    sees: Bool[Tensor, "B k window"]

    def next(
        self,
        tokens: Int[Tensor, "B kk"],
        weights: Float[Tensor, "B kk"],
        hidden: Float[Tensor, "B k hidden"],
        s: int,
    ) -> "_Level":
        """The best k of the candidates that expansion `s` found, whose rows gave `hidden`."""
        k = self.tokens.shape[1]
        first_number = 1 + k + (s - 1) * k * k
        chosen, best, numbers, parent = draft_tree.next_frontier(tokens, weights, first_number, k)
        rows = torch.arange(len(chosen), device=chosen.device)[:, None]
        sees = self.sees[rows, parent] | _itself(k, s, self.sees)
        paths = torch.cat([self.paths[rows, parent], chosen[:, :, None]], dim=2)
        return _Level(chosen, best, hidden[rows, parent], numbers, paths, sees)


def _first_level(
    relay: Relay, tokens: Int[Tensor, "B k"], weights: Float[Tensor, "B k"], shape: TreeShape
) -> _Level:
    B, k = tokens.shape
    hidden = relay.hidden[:, None].expand(B, k, -1)
    numbers = torch.arange(1, k + 1, dtype=torch.int32, device=tokens.device).expand(B, k)
    nothing = torch.zeros(B, k, k * (shape.depth - 1), dtype=torch.bool, device=tokens.device)
    sees = nothing | _itself(k, 0, nothing)
    return _Level(tokens, weights, hidden, numbers, tokens[:, :, None], sees)


def _itself(k: int, s: int, sees: Bool[Tensor, "B k window"]) -> Bool[Tensor, "k window"]:
    """The rows that the k nodes of expansion `s + 1` write, each of which sees its own."""
    place = torch.arange(sees.shape[2], device=sees.device)
    return place == s * k + torch.arange(k, device=sees.device)[:, None]


def _expansion_rows(
    sees: Bool[Tensor, "B k window"],
    s: int,
    lengths: Int[Tensor, " B"],
    draft_from: Int[Tensor, " B"],
    has_relay: Bool[Tensor, " B"],
    page_table: Int[Tensor, "B P"],
) -> Rows:
    B, k, _ = sees.shape
    node = torch.arange(B * k, dtype=torch.int32, device=sees.device)
    request = torch.div(node, k, rounding_mode="floor").long()
    is_real = has_relay[request]
    length = torch.where(is_real, lengths[request], 0)
    places = length + (s - 1) * k + node - request * k
    window = sees.flatten(0, 1) & is_real[:, None]
    first = draft_from[request]
    where = (request, length + s - 1, places, first, length, window, is_real)
    return Rows(*where, page_table, _row_starts(B, k, sees.device), k)


def _row_starts(requests: int, rows: int, device: torch.device) -> Int[Tensor, " B1"]:
    """Where every request has `rows` rows."""
    return torch.arange(requests + 1, dtype=torch.int32, device=device) * rows
