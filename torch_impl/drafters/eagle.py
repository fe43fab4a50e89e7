"""EAGLE drafter and the tree expansion of all autoregressive drafters; same as `shared.spec.eagle`.

Row i of a head has position i and combines the hidden state of token i with the embedding of token
i + 1. After a step the head is extended over the accepted path with hidden states of the target.
While drafting it reads its own hidden states.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from shared.drafts.config import DraftStateSizes
from shared.spec.draft_tree import TreeShape
from torch_impl.device_state import DraftInput, DraftState, Plan
from torch_impl.drafters import DraftRequests, DraftTrees, ExtendRows, PrefillChunks, Ranking
from torch_impl.drafters.heads import Head, Tokens
from torch_impl.layers import Hidden
from torch_impl.ops.attention.attention import KV, AttentionRows, with_mrope
from torch_impl.ops.sampling.lm_head import Projection
from torch_impl.ops.sampling.sampling import RankedCandidates
from torch_impl.ops.trees import draft_tree, verify_budget
from torch_impl.ops.trees.draft_tree import Level

Expand = Callable[[AttentionRows, Tokens, Int[Tensor, " R"]], Projection]
"""Same as the specification; the KV is written in place."""


@dataclass(frozen=True)
class EagleDrafter:
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
    ) -> None:
        self._extend(memory, plan, committed, rank)

    def extend(
        self,
        memory: DraftState,
        plan: Plan,
        before: Int[Tensor, " B"],
        counts: Int[Tensor, " B"],
        committed: ExtendRows,
        rank: Ranking,
    ) -> None:
        self._extend(memory, plan, committed, rank)

    def _extend(self, memory: DraftState, plan: Plan, committed: ExtendRows, rank: Ranking) -> None:
        head, held = self.head.adapted(plan.adapters), memory.relay
        assert held is not None  # a head has a relay
        held.put(plan.slots, relay_of(head, memory.kv[0], committed, rank))

    def draft(
        self, memory: DraftState, requests: DraftRequests, shape: TreeShape, rank: Ranking
    ) -> DraftTrees:
        return draft(self.head.adapted(requests.adapters), memory.kv[0], requests, shape, rank)


def relay_of(head: Head, kv: KV, committed: ExtendRows, rank: Ranking) -> DraftInput:
    """Extends the draft KV over committed rows; returns the relay of each request's last row."""
    ends = head.forward(
        committed.rows, committed.following, committed.shown, head.read(committed.passed), kv
    )[committed.last]
    rank = replace(rank, columns=head.columns, vocabulary=head.vocabulary)
    ranked = rank.roots(head.projected(ends))
    return DraftInput(ranked.ids[:, 0], ranked.weights[:, 0], ends)


@dataclass(frozen=True)
class FirstLevel:
    """First level of a tree: the candidates below its root.

    Attributes:
      processed: Processed logits that a chain's first draft was sampled from; None if not sampled.
    """

    tokens: Int[Tensor, "B k"]
    weights: Float[Tensor, "B k"]
    processed: Float[Tensor, "B vocab"] | None

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
    if not rank.is_sampled:
        return FirstLevel(relay.tokens[:, : shape.width], relay.weights[:, : shape.width], None)
    return FirstLevel.of(rank.roots(projected(relay.hidden)))


def draft(
    head: Head,
    kv: KV,
    requests: DraftRequests,
    shape: TreeShape,
    rank: Ranking,
) -> DraftTrees:
    """Builds one draft tree per request: first level from the relay, then S - 1 expansions."""
    relay = requests.relay
    assert relay is not None  # a head has a relay
    hidden = relay.hidden

    def expand(rows: AttentionRows, tokens: Tokens, parent: Int[Tensor, " R"]) -> Projection:
        nonlocal hidden
        rows = rows if requests.deltas is None else with_mrope(rows, requests.deltas)
        hidden = head.forward(rows, tokens, None, hidden[parent], kv)
        return head.projected(hidden)

    rank = replace(rank, columns=head.columns, vocabulary=head.vocabulary)
    first = first_of(head.projected, relay, shape, rank)
    return grow(expand, first, requests, shape, rank, root_rows=0)


def extend_rows(
    lengths: Int[Tensor, " B"],
    counts: Int[Tensor, " B"],
    draft_from: Int[Tensor, " B"],
    page_table: Int[Tensor, "B P"],
    depth: int,
) -> AttentionRows:
    """Returns the B * (depth + 1) rows of a draft extend over accepted paths.

    Row j of a request has position `lengths + j` and is padding from `counts` on.
    """
    B, W = len(lengths), depth + 1
    step = torch.arange(W, dtype=torch.int32, device=lengths.device)
    is_real = (step < counts[:, None]).flatten()
    positions = torch.where(is_real, (lengths[:, None] + step).flatten(), 0)
    return AttentionRows(
        request=_each(torch.arange(B, device=lengths.device), W),
        positions=positions,
        places=positions,
        first=_each(draft_from, W),
        until=positions + is_real,
        window=is_real.new_zeros(B * W, 0),
        is_real=is_real,
        page_table=page_table,
        row_starts=_row_starts(B, W, lengths.device),
        max_rows=W,
    )


def grow(
    expand: Expand,
    first: FirstLevel,
    requests: DraftRequests,
    shape: TreeShape,
    rank: Ranking,
    root_rows: int,
) -> DraftTrees:
    """Builds trees from their first level; the first `root_rows` of the window are the root's."""
    if shape.width == 1:
        return _grow_chain(expand, first, requests, shape, rank, root_rows)
    can_draft = requests.can_draft
    levels = [(first.tokens, first.weights, torch.zeros_like(first.tokens))]
    level = _first_level(first.tokens, first.weights, shape, root_rows)
    rows = _expansion_rows(level.sees, requests, can_draft, root_rows)
    for s in range(1, shape.depth):
        if s > 1:
            rows = _next_rows(rows, level.sees)
        scored = expand(rows, level.tokens.flatten(), level.parents.flatten())
        ranked = rank(scored, level.paths, s)
        parents, weights, level = draft_tree.next_level(
            level, ranked.ids, ranked.weights, s, root_rows
        )
        levels.append((ranked.ids.flatten(1), weights, parents))
    tokens, weights, parents = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    kept = draft_tree.keep_best(
        newest=requests.newest,
        tokens=tokens,
        weights=weights,
        parents=parents,
        max_drafts=requests.max_drafts,
        has_relay=can_draft,
        nodes=shape.nodes,
    )
    return DraftTrees(*kept, None)


def _grow_chain(
    expand: Expand,
    first: FirstLevel,
    requests: DraftRequests,
    shape: TreeShape,
    rank: Ranking,
    root_rows: int,
) -> DraftTrees:
    """Same as `grow`, for chains: drafts are already ordered by weight, so none is dropped."""
    lengths, can_draft = requests.lengths, requests.can_draft
    tokens, edges = [first.tokens], [first.weights]
    laws = [first.processed]  # of each position, or None
    rows: AttentionRows | None = None
    for s in range(1, shape.depth):
        if rows is None:
            place = lengths + root_rows if root_rows else lengths
            draft_from, table = requests.draft_from, requests.page_table
            rows = extend_rows(place, can_draft.int(), draft_from, table, depth=0)
        else:
            rows = _next_link(rows)
        scored = expand(rows, tokens[-1].flatten(), rows.request)
        ranked = rank(scored, torch.cat(tokens, dim=1)[:, None], s)
        tokens.append(ranked.ids[:, 0])
        edges.append(ranked.weights[:, 0])
        laws.append(ranked.processed)
    processed = [law for law in laws if law is not None]
    drafts, newest = torch.cat(tokens, dim=1), requests.newest
    chains = draft_tree.chains(drafts, newest, requests.max_drafts, can_draft)
    is_weighed = shape.shares_rows(len(newest))
    weights = verify_budget.chain_weights(torch.cat(edges, dim=1)) if is_weighed else None
    return DraftTrees(*chains, weights, torch.stack(processed, dim=1) if processed else None)


def _next_link(rows: AttentionRows) -> AttentionRows:
    """Returns the rows of a chain's next expansion; padding stays padding."""
    positions = rows.positions + rows.is_real
    return replace(rows, positions=positions, places=positions, until=rows.until + rows.is_real)


def _first_level(
    tokens: Int[Tensor, "B k"], weights: Float[Tensor, "B k"], shape: TreeShape, root_rows: int
) -> Level:
    (B, k), window = tokens.shape, root_rows + tokens.shape[1] * (shape.depth - 1)
    device = tokens.device
    place = torch.arange(window, device=device)
    sees = place == torch.arange(root_rows, root_rows + k, device=device)[:, None]
    if root_rows:
        sees |= place < root_rows
    return Level(
        tokens=tokens,
        weights=weights,
        parents=torch.arange(B, device=device)[:, None].expand(B, k),
        numbers=torch.arange(1, k + 1, dtype=torch.int32, device=device).expand(B, k),
        paths=tokens[:, :, None],
        sees=sees.expand(B, k, window),
    )


def _expansion_rows(
    sees: Bool[Tensor, "B k window"],
    requests: DraftRequests,
    can_draft: Bool[Tensor, " B"],
    root_rows: int,
) -> AttentionRows:
    """Returns the rows of the first expansion: one position, k rows of the window; see `grow`."""
    B, k, _ = sees.shape
    until, is_real = _each(torch.where(can_draft, requests.lengths, 0), k), _each(can_draft, k)
    node = torch.arange(root_rows, root_rows + k, dtype=torch.int32, device=sees.device)
    return AttentionRows(
        request=_each(torch.arange(B, device=sees.device), k),
        positions=until + root_rows if root_rows else until,
        places=(until.view(B, k) + node).flatten(),
        first=_each(requests.draft_from, k),
        until=until,
        window=sees.flatten(0, 1) & is_real[:, None],
        is_real=is_real,
        page_table=requests.page_table,
        row_starts=_row_starts(B, k, sees.device),
        max_rows=k,
    )


def _next_rows(rows: AttentionRows, sees: Bool[Tensor, "B k window"]) -> AttentionRows:
    """Returns the rows of the next expansion: the next position, after the rows written so far."""
    return replace(
        rows,
        positions=rows.positions + 1,
        places=rows.places + rows.max_rows,
        window=sees.flatten(0, 1) & rows.is_real[:, None],
    )


def _each(values: Shaped[Tensor, " B"], rows: int) -> Shaped[Tensor, " R"]:
    """Repeats each request's value for all of its rows."""
    return values[:, None].expand(len(values), rows).flatten()


def _row_starts(requests: int, rows: int, device: torch.device) -> Int[Tensor, " B1"]:
    return torch.arange(0, requests * rows + 1, rows, dtype=torch.int32, device=device)
