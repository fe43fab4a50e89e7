"""As `shared.spec.eagle`, in torch: what all heads share, and how any drafter's tree grows."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.drafts.config import DraftSizes
from shared.spec.draft_tree import TreeShape
from torch_impl.device_state import DraftState, Plan, Relay
from torch_impl.drafters import Drafted, Fed, Prompts, Ranking
from torch_impl.drafters.heads import Head, Logits, Tokens
from torch_impl.layers import Pools
from torch_impl.ops import draft_tree
from torch_impl.ops.attention import Rows
from torch_impl.ops.sampling import Ranked

Expand = Callable[[Rows, Tokens, Int[Tensor, " R"]], Logits]
"""As the specification's; the KV is written in place."""


@dataclass(frozen=True)
class EagleDrafter:
    """A `torch_impl.drafters.Drafter` made of a head."""

    head: Head

    @property
    def streams(self) -> tuple[int, ...]:
        return self.head.streams

    @property
    def sizes(self) -> DraftSizes:
        return DraftSizes(self.head.config, 1, 0, True)

    def prefill(
        self, memory: DraftState, plan: Plan, prompts: Prompts, fed: Fed, rank: Ranking
    ) -> None:
        self._extend(memory, plan, fed, rank)

    def extend(
        self,
        memory: DraftState,
        plan: Plan,
        before: Int[Tensor, " B"],
        counts: Int[Tensor, " B"],
        fed: Fed,
        rank: Ranking,
    ) -> None:
        self._extend(memory, plan, fed, rank)

    def _extend(self, memory: DraftState, plan: Plan, fed: Fed, rank: Ranking) -> None:
        new, held = relay_of(self.head, memory.kv, fed, rank), memory.relay
        assert held is not None  # a head's memory has one
        held.tokens[plan.slots] = new.tokens
        held.weights[plan.slots] = new.weights
        held.hidden[plan.slots] = new.hidden

    def draft(
        self,
        memory: DraftState,
        plan: Plan,
        newest: Int[Tensor, " B"],
        lengths: Int[Tensor, " B"],
        shape: TreeShape,
        rank: Ranking,
    ) -> Drafted:
        slots, held = plan.slots, memory.relay
        assert held is not None  # a head's memory has one
        relay = Relay(held.tokens[slots], held.weights[slots], held.hidden[slots])
        return draft(
            self.head,
            memory.kv,
            relay,
            newest,
            lengths,
            memory.draft_from[slots],
            plan.sampling.max_drafts,
            plan.page_table,
            shape,
            rank,
        )


@dataclass(frozen=True)
class First:
    """The candidates below the roots.

    Attributes:
      processed: Processed logits that they were sampled from; None: they were not.
    """

    tokens: Int[Tensor, "B k"]
    weights: Float[Tensor, "B k"]
    processed: Float[Tensor, "B vocab"] | None

    @classmethod
    def of(cls, ranked: Ranked) -> "First":
        """Of the ranked children of one node a request, its root."""
        return cls(ranked.ids[:, 0], ranked.weights[:, 0], ranked.processed)


def first_of(head: Head, relay: Relay, shape: TreeShape, rank: Ranking) -> First:
    """The relay's candidates, or a draft sampled anew: a slot does not keep the law of one."""
    if not rank.is_sampled:
        return First(relay.tokens[:, : shape.width], relay.weights[:, : shape.width], None)
    return First.of(rank.roots(head.logits(relay.hidden)))


def relay_of(head: Head, kv: Pools, fed: Fed, rank: Ranking) -> Relay:
    """Extends the draft KV over committed rows, and makes the relay of each request's last."""
    ends = head.forward(fed.rows, fed.following, head.read(fed.passed), kv)[fed.last]
    ranked = rank.roots(head.logits(ends))
    return Relay(ranked.ids[:, 0], ranked.weights[:, 0], ends)


def draft(
    head: Head,
    kv: Pools,
    relay: Relay,
    newest: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    draft_from: Int[Tensor, " B"],
    max_drafts: Int[Tensor, " B"],
    page_table: Int[Tensor, "B P"],
    shape: TreeShape,
    rank: Ranking,
) -> Drafted:
    hidden = relay.hidden

    def expand(rows: Rows, tokens: Tokens, parent: Int[Tensor, " R"]) -> Logits:
        nonlocal hidden
        hidden = head.forward(rows, tokens, hidden[parent], kv)
        return head.logits(hidden)

    return grow(
        expand,
        first_of(head, relay, shape, rank),
        newest,
        lengths,
        draft_from,
        max_drafts,
        page_table,
        shape,
        rank,
        root_rows=0,
    )


def grow(
    expand: Expand,
    first: First,
    newest: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    draft_from: Int[Tensor, " B"],
    max_drafts: Int[Tensor, " B"],
    page_table: Int[Tensor, "B P"],
    shape: TreeShape,
    rank: Ranking,
    root_rows: int,
) -> Drafted:
    if shape.width == 1:
        bounds = (lengths, draft_from, max_drafts, page_table)
        return _grow_chain(expand, first, newest, *bounds, shape.depth, rank, root_rows)
    can_draft = draft_from < lengths
    found = [(first.tokens, first.weights, torch.zeros_like(first.tokens))]
    level = _first_level(first.tokens, first.weights, shape, root_rows)
    for s in range(1, shape.depth):
        rows = _expansion_rows(level.sees, s, lengths, draft_from, can_draft, page_table, root_rows)
        logits = expand(rows, level.tokens.flatten(), level.parents.flatten())
        ranked = rank(logits.unflatten(0, level.tokens.shape), level.paths, s)
        parents, weights = draft_tree.children(level.numbers, level.weights, ranked.weights)
        found.append((ranked.ids.flatten(1), weights, parents))
        level = level.next(found[-1][0], weights, s, root_rows)
    tokens, weights, parents = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    tokens, parents, num_nodes = draft_tree.keep_best(
        newest, tokens, weights, parents, max_drafts, can_draft, shape.nodes
    )
    return Drafted(tokens, parents, num_nodes, None)


def _grow_chain(
    expand: Expand,
    first: First,
    newest: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    draft_from: Int[Tensor, " B"],
    max_drafts: Int[Tensor, " B"],
    page_table: Int[Tensor, "B P"],
    depth: int,
    rank: Ranking,
    root_rows: int,
) -> Drafted:
    """As `grow`: a chain's drafts lie in the order of their weights, so none is sorted away."""
    can_draft = draft_from < lengths
    tokens, laws = [first.tokens], [first.processed]  # of each place, or None
    for s in range(1, depth):
        place = lengths + (root_rows + s - 1)
        rows = extend_rows(place, can_draft.int(), draft_from, page_table, 0)
        logits = expand(rows, tokens[-1].flatten(), rows.request)
        ranked = rank(logits[:, None], torch.cat(tokens, dim=1)[:, None], s)
        tokens.append(ranked.ids[:, 0])
        laws.append(ranked.processed)
    processed = [law for law in laws if law is not None]
    chains = draft_tree.chains(torch.cat(tokens, dim=1), newest, max_drafts, can_draft)
    return Drafted(*chains, torch.stack(processed, dim=1) if processed else None)


def extend_rows(
    lengths: Int[Tensor, " B"],
    counts: Int[Tensor, " B"],
    draft_from: Int[Tensor, " B"],
    page_table: Int[Tensor, "B P"],
    depth: int,
) -> Rows:
    B, W = len(lengths), depth + 1
    step = torch.arange(W, dtype=torch.int32, device=lengths.device)
    is_real = (step < counts[:, None]).flatten()
    positions = torch.where(is_real, (lengths[:, None] + step).flatten(), 0)
    return Rows(
        request=torch.arange(B, device=lengths.device)[:, None].expand(B, W).flatten(),
        positions=positions,
        places=positions,
        first=draft_from[:, None].expand(B, W).flatten(),
        until=torch.where(is_real, positions + 1, 0),
        window=is_real.new_zeros(B * W, 0),
        is_real=is_real,
        page_table=page_table,
        row_starts=_row_starts(B, W, lengths.device),
        most_rows=W,
    )


@dataclass(frozen=True)
class _Level:
    """The frontier that the next expansion runs on; as the specification's."""

    tokens: Int[Tensor, "B k"]
    weights: Float[Tensor, "B k"]
    parents: Int[Tensor, "B k"]
    numbers: Int[Tensor, "B k"]
    paths: Int[Tensor, "B k path"]
    sees: Bool[Tensor, "B k window"]

    def next(
        self,
        tokens: Int[Tensor, "B kk"],
        weights: Float[Tensor, "B kk"],
        s: int,
        root_rows: int,
    ) -> "_Level":
        """The best k of the candidates that expansion `s` found."""
        k = self.tokens.shape[1]
        first_number = 1 + k + (s - 1) * k * k
        chosen, best, numbers, parent = draft_tree.next_frontier(tokens, weights, first_number, k)
        rows = torch.arange(len(chosen), device=chosen.device)[:, None]
        sees = self.sees[rows, parent] | _itself(k, root_rows + s * k, self.sees)
        paths = torch.cat([self.paths[rows, parent], chosen[:, :, None]], dim=2)
        return _Level(chosen, best, rows * k + parent, numbers, paths, sees)


def _first_level(
    tokens: Int[Tensor, "B k"], weights: Float[Tensor, "B k"], shape: TreeShape, root_rows: int
) -> _Level:
    (B, k), window = tokens.shape, root_rows + tokens.shape[1] * (shape.depth - 1)
    requests = torch.arange(B, device=tokens.device)[:, None].expand(B, k)
    numbers = torch.arange(1, k + 1, dtype=torch.int32, device=tokens.device).expand(B, k)
    root = torch.arange(window, device=tokens.device) < root_rows
    sees = root.expand(B, k, window)
    sees = sees | _itself(k, root_rows, sees)
    return _Level(tokens, weights, requests, numbers, tokens[:, :, None], sees)


def _itself(k: int, first: int, sees: Bool[Tensor, "B k window"]) -> Bool[Tensor, "k window"]:
    place = torch.arange(sees.shape[2], device=sees.device)
    return place == first + torch.arange(k, device=sees.device)[:, None]


def _expansion_rows(
    sees: Bool[Tensor, "B k window"],
    s: int,
    lengths: Int[Tensor, " B"],
    draft_from: Int[Tensor, " B"],
    can_draft: Bool[Tensor, " B"],
    page_table: Int[Tensor, "B P"],
    root_rows: int,
) -> Rows:
    B, k, _ = sees.shape
    node = torch.arange(B * k, dtype=torch.int32, device=sees.device)
    request = torch.div(node, k, rounding_mode="floor").long()
    is_real = can_draft[request]
    length = torch.where(is_real, lengths[request], 0) + root_rows
    return Rows(
        request=request,
        positions=length + s - 1,
        places=length + (s - 1) * k + node - request * k,
        first=draft_from[request],
        until=length - root_rows,
        window=sees.flatten(0, 1) & is_real[:, None],
        is_real=is_real,
        page_table=page_table,
        row_starts=_row_starts(B, k, sees.device),
        most_rows=k,
    )


def _row_starts(requests: int, rows: int, device: torch.device) -> Int[Tensor, " B1"]:
    """Where every request has `rows` rows."""
    return torch.arange(requests + 1, dtype=torch.int32, device=device) * rows
