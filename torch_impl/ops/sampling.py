"""As `shared.spec.sampling`, in torch; what no row needs is skipped where that can be known.

On a GPU `choose` and `rank` are kernels; see `torch_impl.ops`.
"""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.boundary.ranks import ALONE, Ranks
from shared.models.ranks import vocab_section
from shared.spec.noise import TARGET_STREAM
from shared.spec.sampling import DRAFT_TAU
from torch_impl.ops import Kernels, any_row, draft_tree, kernel_or_plain, ranks
from torch_impl.ops.noise import gumbel


@dataclass(frozen=True)
class Sampling:
    """The parameters of each row; the fields are those of the specification.

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

    def rows(self, index: Int[Tensor, " R"]) -> "Sampling":
        """The parameters of the rows that `index` names, which may repeat."""
        return Sampling(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    @property
    def has_penalty(self) -> Bool[Tensor, " B"]:
        """Rows whose logits depend on what was seen."""
        return (self.repetition != 1) | (self.presence != 0) | (self.frequency != 0)


@dataclass(frozen=True)
class Seen:
    """What stands in the text before each row's choice; fields as in the specification."""

    counts: Int[Tensor, "slots vocab"]
    slots: Int[Tensor, " R"]
    path: Int[Tensor, "R path"]
    on_path: Bool[Tensor, "R path"]


def seen_alone(counts: Int[Tensor, "slots vocab"], slots: Int[Tensor, " R"]) -> Seen:
    nothing = slots.new_zeros(len(slots), 0)
    return Seen(counts, slots, nothing, nothing.bool())


def seen_in_trees(
    counts: Int[Tensor, "slots vocab"],
    slots: Int[Tensor, " B"],
    tokens: Int[Tensor, "B N"],
    parents: Int[Tensor, "B N"],
    request: Int[Tensor, " R"],
    node: Int[Tensor, " R"],
    is_chain: bool = False,
) -> Seen:
    """As the specification; on a chain all nodes before one are its ancestors."""
    if tokens.shape[1] == 1:
        return seen_alone(counts, slots[request])
    place = torch.arange(tokens.shape[1], device=tokens.device)
    on_path = place <= node[:, None] if is_chain else draft_tree.ancestors(parents)[request, node]
    return Seen(counts, slots[request], tokens[request], on_path & (place > 0))


def seen_rows(seen: Seen) -> Int[Tensor, "R vocab"]:
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


def support(
    logits: Float[Tensor, "R vocab"],
    top_k: Int[Tensor, " R"],
    top_p: Float[Tensor, " R"],
    min_p: Float[Tensor, " R"],
) -> Bool[Tensor, "R vocab"]:
    vocab = logits.shape[1]
    order = logits.sort(dim=1, descending=True, stable=True).indices
    ranked = log_softmax(logits).exp().gather(1, order)
    before = ranked.cumsum(1) - ranked
    rank = torch.arange(vocab, device=logits.device)[None, :]
    stays = (rank < top_k[:, None]) | (top_k >= vocab)[:, None]
    stays &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
    stays &= (ranked >= min_p[:, None] * ranked[:, :1]) | (min_p <= 0)[:, None]
    stays |= rank == 0
    return torch.zeros_like(stays).scatter(1, order, stays)


def processed(
    logits: Float[Tensor, "R vocab"],
    seen: Seen,
    positions: Int[Tensor, " R"],
    sampling: Sampling,
    request: Int[Tensor, " R"],
    allowed: Bool[Tensor, "R vocab"] | None,
) -> Float[Tensor, "R vocab"]:
    if any_row(sampling.has_penalty):
        logits = penalized(logits, seen_rows(seen), sampling.rows(request))
    if any_row(sampling.bias_values != 0):
        ids, values = sampling.bias_ids.long()[request], sampling.bias_values[request]
        logits = logits.scatter_add(1, ids, values)
    too_short = positions < sampling.min_length[request]
    if any_row(too_short):
        logits = _without_stops(logits, sampling.stop_ids[request], too_short)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    sampled = sampling.temperature > 0
    if not any_row(sampled):
        return logits
    scaled = logits / torch.where(sampled, sampling.temperature, 1)[request, None]
    return _supported(scaled, sampling, request)


def _without_stops(
    logits: Float[Tensor, "R vocab"], stop_ids: Int[Tensor, "R M"], too_short: Bool[Tensor, " R"]
) -> Float[Tensor, "R vocab"]:
    is_stop = torch.zeros_like(logits, dtype=torch.bool)
    is_stop.scatter_(1, stop_ids.long(), too_short[:, None].expand_as(stop_ids))
    return logits.masked_fill(is_stop, -torch.inf)


def _supported(
    scaled: Float[Tensor, "R vocab"], sampling: Sampling, request: Int[Tensor, " R"]
) -> Float[Tensor, "R vocab"]:
    sampled, top_k, top_p = sampling.temperature > 0, sampling.top_k, sampling.top_p
    if not any_row(_is_filtered(sampling, scaled.shape[1])):
        return scaled
    keep = support(scaled, top_k[request], top_p[request], sampling.min_p[request])
    return scaled.masked_fill(~keep & sampled[request, None], -torch.inf)


def _is_filtered(sampling: Sampling, vocab: int) -> Bool[Tensor, " B"]:
    filters = (sampling.top_k < vocab) | (sampling.top_p < 1) | (sampling.min_p > 0)
    return filters & (sampling.temperature > 0)


def perturbed(
    processed: Float[Tensor, "R vocab"],
    sampling: Sampling,
    request: Int[Tensor, " R"],
    keys: Int[Tensor, " R"],
    stream: int,
) -> Float[Tensor, "R vocab"]:
    warm = sampling.temperature > 0
    if not any_row(warm):
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
    """The noise of rows; nodes of one depth share theirs, which a CPU makes only once."""
    if keys.is_cuda:
        return gumbel(seeds[request], keys, vocab, stream)
    (owners, named), row = torch.stack([request.int(), keys]).unique(dim=1, return_inverse=True)
    return gumbel(seeds[owners], named, vocab, stream)[row]


def perturbed_alike(
    processed: Float[Tensor, "B k vocab"], sampling: Sampling, keys: Int[Tensor, " B"], stream: int
) -> Float[Tensor, "B k vocab"]:
    """As `perturbed`, where the k rows of a request share one row of noise."""
    warm = sampling.temperature > 0
    if not any_row(warm):
        return processed
    noise = gumbel(sampling.seed, keys, processed.shape[2], stream)
    return processed + torch.where(warm[:, None], noise, 0)[:, None]


@dataclass(frozen=True)
class Chosen:
    """The target's tokens; fields as in the specification."""

    ids: Int[Tensor, " R"]
    is_finite: Bool[Tensor, " R"]


def plain_choose(
    logits: Float[Tensor, "R vocab"],
    seen: Seen,
    positions: Int[Tensor, " R"],
    sampling: Sampling,
    request: Int[Tensor, " R"],
    allowed: Bool[Tensor, "R vocab"] | None,
    group: Ranks = ALONE,
) -> Chosen:
    """As the specification, of whole logits or of a rank's part of them.

    Args:
      logits: Of several ranks, the part of the one that calls; all parts are equally wide.
      group: The ranks. What a part leaves of a row, its best token and whether all of it is finite,
        is gathered; the parts themselves are only where a row has a filter.
    """
    if not group.is_alone:
        vocab = seen.counts.shape[1]
        if not any_row(_is_filtered(sampling, vocab)):
            how = (seen, positions, sampling, request, allowed)
            return _chosen_of_parts(logits, vocab, group, *how)
        logits = ranks.gathered(group, logits)[:, :vocab]
    scores = processed(logits, seen, positions, sampling, request, allowed)
    ids = best(perturbed(scores, sampling, request, positions, TARGET_STREAM))
    return Chosen(ids, is_finite(logits))


def _chosen_of_parts(
    part: Float[Tensor, "R share"],
    vocab: int,
    group: Ranks,
    seen: Seen,
    positions: Int[Tensor, " R"],
    sampling: Sampling,
    request: Int[Tensor, " R"],
    allowed: Bool[Tensor, "R vocab"] | None,
) -> Chosen:
    """The best of what the parts leave; of equals the first, whose id is lower."""
    first, end = vocab_section(vocab).run(group.rank, group.count)
    own = part[:, : end - first]
    # Tokens of others are none here: they stay below any of the part, whatever is added.
    logits = part.new_full((len(part), vocab), -torch.inf)
    logits[:, first:end] = own
    scores = processed(logits, seen, positions, sampling, request, allowed)
    noisy = perturbed(scores, sampling, request, positions, TARGET_STREAM)
    ids = best(noisy)
    value = noisy.gather(1, ids.long()[:, None])[:, 0]
    left = torch.stack([value.view(torch.int32), ids, is_finite(own).int()], dim=1)
    left = ranks.gathered(group, left).unflatten(1, (group.count, 3))
    values, ids, finite = (x.contiguous() for x in left.unbind(2))
    winner = values.view(torch.float32).argmax(dim=1, keepdim=True)  # a NaN before all others
    return Chosen(ids.gather(1, winner)[:, 0], finite.bool().all(dim=1))


def kernel_choose(
    kernels: Kernels,
    logits: Float[Tensor, "R vocab"],
    seen: Seen,
    positions: Int[Tensor, " R"],
    sampling: Sampling,
    request: Int[Tensor, " R"],
    allowed: Bool[Tensor, "R vocab"] | None,
    group: Ranks = ALONE,
) -> Chosen:
    chosen = kernels.sampling.choose(
        *(logits, seen, positions, sampling, request, allowed),
        stream=TARGET_STREAM,
        tiles=kernels.tiles.sampling.of(rows=len(logits)),
    )
    return Chosen(*chosen)


choose = kernel_or_plain(kernel_choose, plain_choose)


def is_finite(logits: Float[Tensor, "R vocab"]) -> Bool[Tensor, " R"]:
    return logits.isfinite().all(dim=1)


def best(perturbed: Float[Tensor, "R vocab"]) -> Int[Tensor, " R"]:
    """The first maximum of each row, which is the one that `torch.argmax` gives."""
    return perturbed.argmax(dim=1).int()


@dataclass(frozen=True)
class Ranked:
    """Candidates for the children of nodes; fields as in the specification."""

    ids: Int[Tensor, "B k width"]
    weights: Float[Tensor, "B k width"]
    processed: Float[Tensor, "R vocab"] | None


def plain_rank(
    logits: Float[Tensor, "B k vocab"],
    seen: Seen,
    positions: Int[Tensor, " B"],
    sampling: Sampling,
    keys: Int[Tensor, " B"],
    stream: int,
    width: int,
    is_sampled: bool,
    columns: Int[Tensor, " vocab"] | None,
) -> Ranked:
    B, k, _ = logits.shape
    request = torch.arange(B, device=logits.device).repeat_interleave(k)
    flat = over_tokens(logits.flatten(0, 1), columns, seen.counts.shape[1])
    scores = processed(flat, seen, positions[request], sampling, request, None)
    noisy = perturbed_alike(scores.unflatten(0, (B, k)), sampling, keys, stream).flatten(0, 1)
    ids = top_candidates(noisy if columns is None else noisy[:, columns], width)
    ids = ids if columns is None else columns[ids]
    weights = draft_weights(noisy, sampling.temperature[request], DRAFT_TAU).gather(1, ids.long())
    kept = scores if is_sampled else None
    return Ranked(ids.view(B, k, width), weights.view(B, k, width), kept)


def kernel_rank(
    kernels: Kernels,
    logits: Float[Tensor, "B k vocab"],
    seen: Seen,
    positions: Int[Tensor, " B"],
    sampling: Sampling,
    keys: Int[Tensor, " B"],
    stream: int,
    width: int,
    is_sampled: bool,
    columns: Int[Tensor, " vocab"] | None,
) -> Ranked:
    ranked = kernels.sampling.rank(
        *(logits, seen, positions, sampling, keys, stream, width, is_sampled, columns),
        tau=DRAFT_TAU,
        tiles=kernels.tiles.sampling.of(rows=logits.shape[0] * logits.shape[1]),
    )
    return Ranked(*ranked)


rank = kernel_or_plain(kernel_rank, plain_rank)


def over_tokens(
    logits: Float[Tensor, "R columns"], columns: Int[Tensor, " columns"] | None, vocab: int
) -> Float[Tensor, "R vocab"]:
    if columns is None:
        return logits
    scores = logits.new_full((len(logits), vocab), -torch.inf)
    return scores.index_copy_(1, columns.long(), logits)


def draft_weights(
    perturbed: Float[Tensor, "R vocab"], temperature: Float[Tensor, " R"], tau: float
) -> Float[Tensor, "R vocab"]:
    softness = torch.where(temperature > 0, tau, 1.0)
    return log_softmax(perturbed / softness[:, None])


def top_candidates(perturbed: Float[Tensor, "R vocab"], k: int) -> Int[Tensor, "R k"]:
    """As the specification; one candidate needs no ranking."""
    if k == 1:
        return perturbed.argmax(dim=1, keepdim=True).int()
    return _ranked(perturbed).topk(k, dim=1).indices.int()


def _ranked(x: Float[Tensor, "R vocab"]) -> Int[Tensor, "R vocab"]:
    """Whole numbers in the order of the values, NaN first, the lower id before its equals.

    `torch.topk` breaks ties in any order, and here are none; a stable sort of all takes longer.
    """
    bits = torch.where(x.isnan(), torch.nan, x + 0.0).view(torch.int32)  # one NaN, one zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << 32) - torch.arange(x.shape[1], device=x.device)


def log_softmax(logits: Float[Tensor, "R vocab"]) -> Float[Tensor, "R vocab"]:
    return torch.log_softmax(logits, dim=1)


def probabilities(processed: Float[Tensor, "R vocab"]) -> Float[Tensor, "R vocab"]:
    return torch.softmax(processed, dim=1)
