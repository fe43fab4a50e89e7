"""Sampling from logits; same as `shared.spec.sampling`.

On a CPU, penalties, filters and noise that no row needs are skipped. On a GPU `choose` and `rank`
are kernels; see `torch_impl.ops`.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.spec.gumbel_noise import TARGET_STREAM
from shared.spec.sampling import DRAFT_TAU
from torch_impl.ops import Kernels, any_row_set, kernel_or_reference
from torch_impl.ops.collectives import all_gather
from torch_impl.ops.sampling.gumbel_noise import gumbel
from torch_impl.ops.sampling.vocab_parallel import (
    ALL,
    Vocabulary,
    all_of,
    best_of,
    first_of,
    is_parted,
    log_probabilities,
    moved,
    norm,
    over_tokens,
    spread,
    support,
    whole,
)
from torch_impl.ops.trees import draft_tree


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of each row; same fields as in the specification.

    `seed` holds the bits of the unsigned seed.
    """

    temperature: Float[Tensor, " B"]
    top_p: Float[Tensor, " B"]
    top_k: Int[Tensor, " B"]
    min_p: Float[Tensor, " B"]
    seed: Int[Tensor, " B"]
    presence: Float[Tensor, " B"]
    frequency: Float[Tensor, " B"]
    repetition: Float[Tensor, " B"]
    prompt_length: Int[Tensor, " B"]
    min_length: Int[Tensor, " B"]
    max_drafts: Int[Tensor, " B"]
    stop_ids: Int[Tensor, "B M"]
    bias_ids: Int[Tensor, "B K"]
    bias_values: Float[Tensor, "B K"]
    calibration: Float[Tensor, "B S_max"]
    branch_calibration: Float[Tensor, "B S_max"]

    def rows(self, index: Int[Tensor, " R"]) -> "Sampling":
        """Returns the parameters of the rows in `index`, which may repeat."""
        return Sampling(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    @property
    def unasked(self) -> "Sampling":
        """Returns neutral parameters, with which the best token has the highest logit."""
        ask = ("temperature", "presence", "frequency", "min_length", "bias_values")
        nothing = {name: torch.zeros_like(getattr(self, name)) for name in ask}
        return replace(self, **nothing, repetition=torch.ones_like(self.repetition))

    @property
    def has_penalty(self) -> Bool[Tensor, " B"]:
        """Returns True for rows with a penalty, whose logits depend on token counts."""
        return (self.repetition != 1) | (self.presence != 0) | (self.frequency != 0)


@dataclass(frozen=True)
class TokenCounts:
    """Token counts before each row's choice; same fields as in the specification."""

    counts: Int[Tensor, "slots vocab"]
    slots: Int[Tensor, " R"]
    path: Int[Tensor, "R path"]
    on_path: Bool[Tensor, "R path"]


def counts_alone(counts: Int[Tensor, "slots vocab"], slots: Int[Tensor, " R"]) -> TokenCounts:
    nothing = slots.new_zeros(len(slots), 0)
    return TokenCounts(counts, slots, nothing, nothing.bool())


def counts_in_trees(
    counts: Int[Tensor, "slots vocab"],
    slots: Int[Tensor, " B"],
    tokens: Int[Tensor, "B N"],
    parents: Int[Tensor, "B N"],
    request: Int[Tensor, " R"],
    node: Int[Tensor, " R"],
    is_chain: bool = False,
) -> TokenCounts:
    """Returns the token counts of draft-tree nodes; in a chain all earlier nodes are ancestors."""
    if tokens.shape[1] == 1:
        return counts_alone(counts, slots[request])
    place = torch.arange(tokens.shape[1], device=tokens.device)
    on_path = place <= node[:, None] if is_chain else draft_tree.ancestors(parents)[request, node]
    return TokenCounts(counts, slots[request], tokens[request], on_path & (place > 0))


def counts_of_rows(seen: TokenCounts) -> Int[Tensor, "R vocab"]:
    return seen.counts[seen.slots].scatter_add_(1, seen.path.long(), 2 * seen.on_path.int())


def penalized(
    logits: Float[Tensor, "R vocab"], seen: Int[Tensor, "R vocab"], sampling: Sampling
) -> Float[Tensor, "R vocab"]:
    repetition = sampling.repetition[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen > 0, repeated, logits)
    counts = seen >> 1
    logits = logits - sampling.presence[:, None] * (counts > 0)
    return logits - sampling.frequency[:, None] * counts


def processed(
    logits: Float[Tensor, "R vocab"],
    seen: TokenCounts,
    positions: Int[Tensor, " R"],
    sampling: Sampling,
    request: Int[Tensor, " R"],
    allowed: Bool[Tensor, "R vocab"] | None,
    vocabulary: Vocabulary = ALL,
) -> Float[Tensor, "R vocab"]:
    """Applies all logits processing except the noise; with TP, tokens of other ranks are -inf."""
    logits = _edited(logits, seen, positions, sampling, request, allowed)
    return supported(logits, sampling, request, vocabulary)


def _edited(
    logits: Float[Tensor, "R vocab"],
    seen: TokenCounts,
    positions: Int[Tensor, " R"],
    sampling: Sampling,
    request: Int[Tensor, " R"],
    allowed: Bool[Tensor, "R vocab"] | None,
) -> Float[Tensor, "R vocab"]:
    """Applies penalties, biases and masks, which precede the division by the temperature."""
    if any_row_set(sampling.has_penalty):
        logits = penalized(logits, counts_of_rows(seen), sampling.rows(request))
    if any_row_set(sampling.bias_values != 0):
        ids, values = sampling.bias_ids.long()[request], sampling.bias_values[request]
        logits = logits.scatter_add(1, ids, values)
    too_short = positions < sampling.min_length[request]
    if any_row_set(too_short):
        logits = _without_stops(logits, sampling.stop_ids[request], too_short)
    return logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)


def _without_stops(
    logits: Float[Tensor, "R vocab"], stop_ids: Int[Tensor, "R M"], too_short: Bool[Tensor, " R"]
) -> Float[Tensor, "R vocab"]:
    is_stop = torch.zeros_like(logits, dtype=torch.bool)
    is_stop.scatter_(1, stop_ids.long(), too_short[:, None].expand_as(stop_ids))
    return logits.masked_fill(is_stop, -torch.inf)


def supported(
    logits: Float[Tensor, "R vocab"],
    sampling: Sampling,
    request: Int[Tensor, " R"],
    vocabulary: Vocabulary,
) -> Float[Tensor, "R vocab"]:
    """Divides by the temperature and excludes tokens outside the top-k, top-p and min-p filters."""
    sampled, top_k, top_p = sampling.temperature > 0, sampling.top_k, sampling.top_p
    if not any_row_set(sampled):
        return logits
    scaled = logits / torch.where(sampled, sampling.temperature, 1)[request, None]
    filters = (top_k < scaled.shape[1]) | (top_p < 1) | (sampling.min_p > 0)
    if not any_row_set(filters & sampled):
        return scaled
    keep = support(scaled, top_k[request], top_p[request], sampling.min_p[request], vocabulary)
    return scaled.masked_fill(~keep & sampled[request, None], -torch.inf)


def add_gumbel_noise(
    processed: Float[Tensor, "R vocab"],
    sampling: Sampling,
    request: Int[Tensor, " R"],
    keys: Int[Tensor, " R"],
    stream: int,
) -> Float[Tensor, "R vocab"]:
    warm = sampling.temperature > 0
    if not any_row_set(warm):
        return processed
    noise = _noise(sampling.seed, request, keys, processed.shape[1], stream)
    return processed + torch.where(warm[request, None], noise, 0)


def _noise(
    seeds: Int[Tensor, " B"],
    request: Int[Tensor, " R"],
    keys: Int[Tensor, " R"],
    vocab: int,
    stream: int,
) -> Float[Tensor, "R vocab"]:
    """Returns the noise of rows; a CPU computes the shared noise of nodes at one depth once."""
    if keys.is_cuda:
        return gumbel(seeds[request], keys, vocab, stream)
    (owners, named), row = torch.stack([request.int(), keys]).unique(dim=1, return_inverse=True)
    return gumbel(seeds[owners], named, vocab, stream)[row]


def add_shared_gumbel_noise(
    processed: Float[Tensor, "B k vocab"],
    sampling: Sampling,
    keys: Int[Tensor, "B ..."],
    stream: int,
) -> Float[Tensor, "B k vocab"]:
    """Same as `add_gumbel_noise`, with a key and a row of noise per request, or per node."""
    warm = sampling.temperature > 0
    if not any_row_set(warm):
        return processed
    seeds = sampling.seed.repeat_interleave(keys.numel() // len(keys))
    noise = gumbel(seeds, keys.flatten(), processed.shape[2], stream).unflatten(0, (len(keys), -1))
    return processed + torch.where(warm[:, None, None], noise, 0)


@dataclass(frozen=True)
class SampledTokens:
    """Tokens chosen by the target; same fields as in the specification."""

    ids: Int[Tensor, " R"]
    is_finite: Bool[Tensor, " R"]


def plain_choose(
    logits: Float[Tensor, "R share"],
    seen: TokenCounts,
    positions: Int[Tensor, " R"],
    sampling: Sampling,
    request: Int[Tensor, " R"],
    allowed: Bool[Tensor, "R vocab"] | None,
    vocabulary: Vocabulary = ALL,
) -> SampledTokens:
    """Chooses the target's token of each row, from whole logits or this rank's shard."""
    scores = spread(logits, vocabulary)
    scores = processed(scores, seen, positions, sampling, request, allowed, vocabulary)
    noisy = add_gumbel_noise(scores, sampling, request, positions, TARGET_STREAM)
    return SampledTokens(best(noisy, vocabulary), is_finite(logits, vocabulary))


def kernel_choose(
    kernels: Kernels,
    logits: Float[Tensor, "R share"],
    seen: TokenCounts,
    positions: Int[Tensor, " R"],
    sampling: Sampling,
    request: Int[Tensor, " R"],
    allowed: Bool[Tensor, "R vocab"] | None,
    vocabulary: Vocabulary = ALL,
) -> SampledTokens:
    """Same as `plain_choose`."""
    given = (seen, positions, sampling, request, allowed)
    if is_parted(vocabulary, len(logits)):
        return choose_parts(kernels, logits, *given, vocabulary)
    chosen = kernels.sampling.choose(
        *(whole(logits, vocabulary), *given),
        stream=TARGET_STREAM,
        tiles=kernels.tiles.sampling.of(rows=len(logits)),
    )
    return SampledTokens(*chosen)


def of_parts(
    kernels: Kernels,
    logits: Float[Tensor, "R share"],
    seen: TokenCounts,
    positions: Int[Tensor, "named ..."],
    sampling: Sampling,
    request: Int[Tensor, "named ..."],
    allowed: Bool[Tensor, "R vocab"] | None,
    keys: Int[Tensor, "named ..."],
    columns: Int[Tensor, " size"] | None,
    vocabulary: Vocabulary,
    **how: Any,
) -> tuple[Int[Tensor, "R width"], Float[Tensor, "R width"], Bool[Tensor, " R"]]:
    """Combines the partial results of all vocabulary shards with
    `kernels.vocab_parallel.merge_topk`.

    Args:
      logits, seen, positions, sampling, request, allowed, keys, columns: See `sampling.leave`.
      how: RNG stream, and `width`, `tau`, `nodes` and `leaves` of `sampling.leave`.
    """
    group, size = vocabulary.group, vocabulary.size
    rows = kernels.vocab_parallel.rows_with_filters(
        sampling, request, len(logits), how["nodes"], size
    )
    every = all_gather.gathered_rows(group, logits, rows)
    part = kernels.sampling.VocabShard(size, group.count, first_of(vocabulary), every)
    left, *held = kernels.sampling.shard_partials(
        *(logits, seen, positions, sampling, request, allowed, keys, columns, part),
        tiles=kernels.tiles.sampling.of(rows=len(logits)),
        **how,
    )
    left, totals = all_gather.all_gather(group, left), None
    same = {"ranks": group.count} | {name: how[name] for name in ("width", "tau", "nodes")}
    if how["tau"] is not None:
        of_groups = (left, *held, sampling.temperature, part.first)
        totals = kernels.vocab_parallel.sum_exp(*of_groups, share=vocabulary.share, **same)
        totals = all_gather.all_gather(group, totals)
    joined = (left, totals, sampling.temperature, columns)
    return kernels.vocab_parallel.merge_topk(*joined, vocab=size, **same)


def choose_parts(
    kernels: Kernels,
    logits: Float[Tensor, "R share"],
    seen: TokenCounts,
    positions: Int[Tensor, " R"],
    sampling: Sampling,
    request: Int[Tensor, " R"],
    allowed: Bool[Tensor, "R vocab"] | None,
    vocabulary: Vocabulary,
    leaves: Any = None,
) -> SampledTokens:
    """Same as `plain_choose`, with TP; `leaves` are the partial results of the LM-head epilogue."""
    given = (logits, seen, positions, sampling, request, allowed, positions, None, vocabulary)
    how = {"stream": TARGET_STREAM, "width": 1, "tau": None, "nodes": 0, "leaves": leaves}
    ids, _, is_finite = of_parts(kernels, *given, **how)
    return SampledTokens(ids[:, 0], is_finite)


choose = kernel_or_reference(kernel_choose, plain_choose)


def is_finite(logits: Float[Tensor, "R share"], vocabulary: Vocabulary = ALL) -> Bool[Tensor, " R"]:
    return all_of(logits.isfinite().all(dim=1), vocabulary)


def best(perturbed: Float[Tensor, "R vocab"], vocabulary: Vocabulary = ALL) -> Int[Tensor, " R"]:
    """Returns the first argmax of each row, as `torch.argmax` does."""
    return best_of(perturbed, 1, vocabulary)[1][:, 0]


@dataclass(frozen=True)
class RankedCandidates:
    """Candidates for the children of nodes; same fields as in the specification."""

    ids: Int[Tensor, "B k width"]
    weights: Float[Tensor, "B k width"]
    processed: Float[Tensor, "R vocab"] | None


def plain_rank(
    logits: Float[Tensor, "B k share"],
    seen: TokenCounts,
    positions: Int[Tensor, "B ..."],
    sampling: Sampling,
    keys: Int[Tensor, "B ..."],
    stream: int,
    width: int,
    is_sampled: bool,
    columns: Int[Tensor, " size"] | None,
    vocabulary: Vocabulary = ALL,
) -> RankedCandidates:
    """Ranks the children of k nodes of each request as the target will choose among them.

    With TP, the returned draft logits are this rank's shard of the target vocabulary.
    """
    (B, k, _), vocab = logits.shape, seen.counts.shape[1]
    request = torch.arange(B, device=logits.device).repeat_interleave(k)
    at = positions.reshape(B, -1).expand(B, k).flatten()
    tokens = over_tokens(spread(logits.flatten(0, 1), vocabulary), columns, vocab)
    edited = _edited(tokens, seen, at, sampling, request, None)
    edited = edited if columns is None else edited[:, columns]
    scores = supported(edited, sampling, request, vocabulary)
    by_node = over_tokens(scores, columns, vocab).unflatten(0, (B, k))
    noisy = add_shared_gumbel_noise(by_node, sampling, keys, stream).flatten(0, 1)
    noisy = noisy if columns is None else noisy[:, columns]
    values, ids = best_of(noisy, width, vocabulary)
    temperature = sampling.temperature[request]
    weights = draft_weights(noisy, values, temperature, DRAFT_TAU, vocabulary)
    ids = ids if columns is None else columns[ids]
    target = Vocabulary(vocab, vocabulary.group)
    kept = moved(scores, columns, vocabulary, target) if is_sampled else None
    return RankedCandidates(ids.view(B, k, width), weights.view(B, k, width), kept)


def kernel_rank(
    kernels: Kernels,
    logits: Float[Tensor, "B k share"],
    seen: TokenCounts,
    positions: Int[Tensor, "B ..."],
    sampling: Sampling,
    keys: Int[Tensor, "B ..."],
    stream: int,
    width: int,
    is_sampled: bool,
    columns: Int[Tensor, " size"] | None,
    vocabulary: Vocabulary = ALL,
) -> RankedCandidates:
    """Same as `plain_rank`, but the returned draft logits are not sharded.

    Logits are gathered for sampled drafts, or if the draft vocabulary has another size.
    """
    (B, k, _), target = logits.shape, seen.counts.shape[1]
    is_whole = is_sampled or (columns is None and vocabulary.size != target)
    if is_parted(vocabulary, B * k) and not is_whole:
        own = logits.flatten(0, 1).contiguous()
        given = (own, seen, positions, sampling, positions, None, keys, columns, vocabulary)
        how = {"stream": stream, "width": width, "tau": DRAFT_TAU, "nodes": k}
        ids, weights, _ = of_parts(kernels, *given, **how)
        return RankedCandidates(ids.view(B, k, width), weights.view(B, k, width), None)
    tokens = whole(logits, vocabulary)
    if columns is None:
        tokens = over_tokens(tokens, None, target)
    ranked = kernels.sampling.rank(
        *(tokens, seen, positions, sampling, keys, stream, width, is_sampled, columns),
        tau=DRAFT_TAU,
        tiles=kernels.tiles.sampling.of(rows=B * k),
    )
    return RankedCandidates(*ranked)


rank = kernel_or_reference(kernel_rank, plain_rank)


def draft_weights(
    perturbed: Float[Tensor, "R size"],
    some: Float[Tensor, "R some"],
    temperature: Float[Tensor, " R"],
    tau: float,
    vocabulary: Vocabulary = ALL,
) -> Float[Tensor, "R some"]:
    """Computes log weights: the drafter's estimate that a token is the target's choice."""
    softness = torch.where(temperature > 0, tau, 1.0)[:, None]
    return log_probabilities(some / softness, norm(perturbed / softness, vocabulary))


def log_softmax(
    logits: Float[Tensor, "R vocab"], vocabulary: Vocabulary = ALL
) -> Float[Tensor, "R vocab"]:
    return log_probabilities(logits, norm(logits, vocabulary))


def probabilities(
    processed: Float[Tensor, "R vocab"], vocabulary: Vocabulary = ALL
) -> Float[Tensor, "R vocab"]:
    highest, total = norm(processed, vocabulary)
    return (processed - highest[:, None]).exp() / total[:, None]
