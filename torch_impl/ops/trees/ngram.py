"""N-gram hash table and its draft trees; same as `shared.spec.ngram`."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.spec.ngram import LATEST, LENGTHS, MOST_AGE, MULTIPLIERS, UNITS, WAYS, WINDOW, cost
from torch_impl.ops import Kernels, kernel_or_reference

_NONE = 2**30
"""The cost of no candidate."""


@dataclass(frozen=True)
class NgramTable:
    """Table entries by n-gram length, group and index; same fields as in the specification."""

    tokens: Int[Tensor, "lengths groups ways"]
    checks: Int[Tensor, "lengths groups ways"]
    stamps: Int[Tensor, "lengths groups ways"]
    clocks: Int[Tensor, " lengths"]


@dataclass(frozen=True)
class NgramState:
    """N-gram state between steps; same fields as in the specification."""

    tails: Int[Tensor, "slots window"]
    table: NgramTable


@dataclass(frozen=True)
class BuiltTrees:
    """Draft trees; same fields as in the specification."""

    tokens: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    num_nodes: Int[Tensor, " B"]
    weights: Float[Tensor, "B N"]


def hash_mix(values: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Mixes all 32 bits of a hash; the mask clears the sign bits that the shift copies in."""
    mixed = (values ^ ((values >> 16) & 0xFFFF)) * (0x85EBCA6B - 2**32)
    mixed = (mixed ^ ((mixed >> 13) & 0x7FFFF)) * (0xC2B2AE35 - 2**32)
    return mixed ^ ((mixed >> 16) & 0xFFFF)


def keys(
    contexts: Int[Tensor, "n window"], scopes: Int[Tensor, "n 2"]
) -> tuple[Int[Tensor, "n lengths"], Int[Tensor, "n lengths"], Bool[Tensor, "n lengths"]]:
    """Returns two hashes of the last n tokens for each n, and True if n tokens exist.

    A hash is a polynomial in its multiplier, so that those of all lengths are suffix sums of one
    product, modulo 2^32.
    """
    begins = WINDOW - torch.tensor(LENGTHS, device=contexts.device)
    found = []
    for scope, multiplier in zip(scopes.unbind(dim=1), MULTIPLIERS, strict=True):
        powers = [pow(multiplier, WINDOW - place, 2**32) for place in range(WINDOW + 1)]
        power = torch.tensor(powers, device=contexts.device).int()  # wraps around
        terms = (contexts + 1) * power[1:]
        sums = terms.flip(1).cumsum(1, dtype=torch.int32).flip(1)
        found.append(hash_mix(scope[:, None] * power[begins] + sums[:, begins]))
    return found[0], found[1], contexts[:, begins] >= 0


def plain_insert(
    table: NgramTable,
    contexts: Int[Tensor, "n window"],
    following: Int[Tensor, " n"],
    scopes: Int[Tensor, "n 2"],
    is_real: Bool[Tensor, " n"],
) -> None:
    groups, n = table.tokens.shape[1], len(contexts)
    first, second, is_there = keys(contexts, scopes)
    length = torch.arange(len(LENGTHS), device=contexts.device)
    entry = (length * groups + (first & (groups - 1))) * WAYS
    entry = entry + (hash_mix(following + 1) & (WAYS - 1))[:, None]
    order = torch.arange(n, dtype=torch.int32, device=contexts.device)[:, None]
    stamp = (table.clocks + order) & LATEST
    is_written = is_there & is_real[:, None]
    # After sorting by entry, the last write to an entry is the last of its run.
    at, sorted_by = torch.where(is_written, entry, -1).T.flatten().sort(stable=True)
    is_last = at != at.roll(-1)
    is_last[-1] = True
    kept = sorted_by[is_last & (at >= 0)]
    token = (following + 1).repeat(len(LENGTHS))
    at = entry.T.flatten()[kept].long()
    for held, new in (
        (table.tokens, token),
        (table.checks, second.T.flatten()),
        (table.stamps, stamp.T.flatten()),
    ):
        held.view(-1)[at] = new[kept]
    table.clocks.copy_((table.clocks + n) & LATEST)


def kernel_insert(
    kernels: Kernels,
    table: NgramTable,
    contexts: Int[Tensor, "n window"],
    following: Int[Tensor, " n"],
    scopes: Int[Tensor, "n 2"],
    is_real: Bool[Tensor, " n"],
) -> None:
    held = (table.tokens, table.checks, table.stamps, table.clocks)
    kernels.ngram.insert(*held, contexts, following, scopes, is_real)


insert = kernel_or_reference(kernel_insert, plain_insert)


def _children(
    table: NgramTable, contexts: Int[Tensor, "B window"], scopes: Int[Tensor, "B 2"], width: int
) -> tuple[Int[Tensor, "B k"], Int[Tensor, "B k"]]:
    """Returns the most likely tokens after contexts and their costs; `_NONE` for missing ones."""
    groups, (first, second, is_there) = table.tokens.shape[1], keys(contexts, scopes)
    length = torch.arange(len(LENGTHS), dtype=torch.int32, device=contexts.device)
    group = (length * groups + (first & (groups - 1))).long()
    tokens, checks, stamps = (
        x.flatten(0, 1)[group] for x in (table.tokens, table.checks, table.stamps)
    )
    is_found = is_there[:, :, None] & (tokens > 0) & (checks == second[:, :, None])
    age = ((table.clocks[:, None] - stamps) & LATEST).clamp(max=MOST_AGE)
    rank = length[:, None] * (MOST_AGE + 1) + MOST_AGE - age
    rank = torch.where(is_found, rank, -1).flatten(1)
    entry, found, costs = tokens.flatten(1), [], []
    for elders in range(width):
        best = rank.argmax(dim=1, keepdim=True)
        value, token = rank.gather(1, best), entry.gather(1, best)
        place = torch.div(value.clamp(min=0), MOST_AGE + 1, rounding_mode="floor")
        after = cost(len(LENGTHS) - 1, elders) + 23 * (len(LENGTHS) - 1 - place) ** 2
        found.append(token - 1)
        costs.append(torch.where(value >= 0, after, _NONE))
        rank = torch.where(entry == token, -1, rank)
    return torch.cat(found, dim=1), torch.cat(costs, dim=1).int()


def plain_draft(
    table: NgramTable,
    contexts: Int[Tensor, "B window"],
    scopes: Int[Tensor, "B 2"],
    max_drafts: Int[Tensor, " B"],
    nodes: int,
    depth: int,
    width: int,
) -> BuiltTrees:
    B, device = len(contexts), contexts.device
    row = torch.arange(B, device=device)
    tokens, parents, costs, levels = torch.zeros(4, B, nodes, dtype=torch.int32, device=device)
    texts = contexts[:, None].repeat(1, nodes, 1)
    open_costs = torch.full((B, (nodes - 1) * width), _NONE, dtype=torch.int32, device=device)
    open_tokens, num_nodes = torch.zeros_like(open_costs), torch.ones_like(max_drafts)
    tokens[:, 0] = contexts[:, -1]
    for node in range(1, nodes):
        found, more = _children(table, texts[:, node - 1], scopes, width)
        is_open = (num_nodes == node) & (levels[:, node - 1] < depth)
        below = slice((node - 1) * width, node * width)
        more = costs[:, node - 1, None] + more
        open_costs[:, below] = torch.where(is_open[:, None], more.clamp(max=_NONE), _NONE)
        open_tokens[:, below] = found
        best = open_costs.argmin(dim=1)
        price, token = open_costs[row, best], open_tokens[row, best]
        parent = torch.div(best, width, rounding_mode="floor")
        grows = (num_nodes == node) & (price < _NONE) & (node <= max_drafts)
        tokens[:, node] = torch.where(grows, token, 0)
        parents[:, node] = torch.where(grows, parent, 0)
        costs[:, node], levels[:, node] = price, levels[row, parent] + 1
        texts[:, node] = torch.cat([texts[row, parent, 1:], token[:, None]], dim=1)
        open_costs[row, best] = _NONE
        num_nodes = num_nodes + grows.int()
    is_node = torch.arange(nodes, device=device) < num_nodes[:, None]
    weights = torch.where(is_node, -costs.float() / UNITS, -torch.inf)
    return BuiltTrees(tokens, parents, num_nodes, weights)


def kernel_draft(
    kernels: Kernels,
    table: NgramTable,
    contexts: Int[Tensor, "B window"],
    scopes: Int[Tensor, "B 2"],
    max_drafts: Int[Tensor, " B"],
    nodes: int,
    depth: int,
    width: int,
) -> BuiltTrees:
    held = (table.tokens, table.checks, table.stamps, table.clocks)
    return BuiltTrees(
        *kernels.ngram.draft(*held, contexts, scopes, max_drafts, nodes, depth, width)
    )


draft = kernel_or_reference(kernel_draft, plain_draft)


def windows(
    tails: Int[Tensor, "B window"], tokens: Int[Tensor, "B W"]
) -> Int[Tensor, "B W window"]:
    """Returns the context window before each of the new tokens."""
    stream = torch.cat([tails, tokens], dim=1)
    return stream.unfold(1, WINDOW, 1)[:, : tokens.shape[1]]


def update_tails(
    tails: Int[Tensor, "B window"], tokens: Int[Tensor, "B W"], counts: Int[Tensor, " B"]
) -> Int[Tensor, "B window"]:
    """Returns the last tokens of each row after the new tokens."""
    stream = torch.cat([tails, tokens], dim=1)
    at = counts[:, None] + torch.arange(WINDOW, device=counts.device)
    return stream.gather(1, at)


def prompt_windows(
    tokens: Int[Tensor, " T"],
    row_starts: Int[Tensor, " B1"],
    request: Int[Tensor, " T"],
    before: Int[Tensor, "B window"],
) -> Int[Tensor, "T window"]:
    """Returns the context window that ends with each token of the prompt chunks."""
    window = torch.arange(WINDOW, dtype=torch.int32, device=tokens.device)
    place = torch.arange(len(tokens), dtype=torch.int32, device=tokens.device)
    starts = row_starts[request]
    at = (place - starts)[:, None] - (WINDOW - 1) + window
    own = tokens[(starts[:, None] + at).clamp(min=0)]
    return torch.where(at >= 0, own, before[request[:, None], (WINDOW + at).clamp(max=WINDOW - 1)])


def learn_prompts(
    memory: NgramState,
    slots: Int[Tensor, " B"],
    windows: Int[Tensor, "T window"],
    following: Int[Tensor, " T"],
    request: Int[Tensor, " T"],
    last: Int[Tensor, " B"],
    scopes: Int[Tensor, "B 2"],
    is_real: Bool[Tensor, " T"],
) -> None:
    insert(memory.table, windows, following, scopes[request], is_real)
    newest = following[last][:, None]
    memory.tails[slots] = torch.cat([windows[last][:, 1:], newest], dim=1)


def learn_outputs(
    memory: NgramState,
    slots: Int[Tensor, " B"],
    tokens: Int[Tensor, "B W"],
    counts: Int[Tensor, " B"],
    scopes: Int[Tensor, "B 2"],
) -> None:
    W, held = tokens.shape[1], memory.tails[slots]
    is_real = torch.arange(W, device=tokens.device) < counts[:, None]
    before, of_rows = windows(held, tokens).flatten(0, 1), scopes.repeat_interleave(W, dim=0)
    insert(memory.table, before, tokens.flatten(), of_rows, is_real.flatten())
    memory.tails[slots] = update_tails(held, tokens, counts)
