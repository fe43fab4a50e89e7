"""As `shared.spec.sampling`, in torch; what no row needs is skipped where that can be known."""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_impl.ops import any_row

ACCEPT_STREAM, RESIDUAL_STREAM, DRAFT_STREAM = 1, 2, 3

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA


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

    def rows(self, index: Int[Tensor, " R"]) -> "Sampling":
        """The parameters of the rows that `index` names, which may repeat."""
        return Sampling(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    @property
    def has_penalty(self) -> Bool[Tensor, " B"]:
        """Rows whose logits depend on what was seen."""
        return (self.repetition != 1) | (self.presence != 0) | (self.frequency != 0)


def threefry2x32(
    key: tuple[Int[Tensor, "..."], Int[Tensor, "..."]],
    counter: tuple[Int[Tensor, "..."], Int[Tensor, "..."]],
) -> tuple[Int[Tensor, "..."], Int[Tensor, "..."]]:
    """As the specification; a word is the bits of an int32, whose sums wrap."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x0, x1 = torch.broadcast_tensors(counter[0] + keys[0], counter[1] + keys[1])
    x0, x1 = x0.clone(), x1.clone()
    for group in range(5):
        for rotation in _ROTATIONS[4 * (group % 2) : 4 * (group % 2) + 4]:
            x0 += x1
            # The shift to the right copies the sign: the mask takes it off again.
            low = (x1 >> (32 - rotation)).bitwise_and_((1 << rotation) - 1)
            x1 = x1.bitwise_left_shift_(rotation).bitwise_or_(low).bitwise_xor_(x0)
        x0 += keys[(group + 1) % 3]
        x1 += keys[(group + 2) % 3] + (group + 1)
    return x0, x1


def uniform_of_words(words: Int[Tensor, "R words"]) -> Float[Tensor, "R words"]:
    """As the specification; a word is the bits of an int32."""
    uniform = words.view(torch.uint32).to(torch.float32)
    return uniform.mul_(2**-32).add_(2**-33).clamp_(max=1 - 2**-24)


def noise_of_words(words: Int[Tensor, "R vocab"]) -> Float[Tensor, "R vocab"]:
    """As the specification; a word is the bits of an int32."""
    return uniform_of_words(words).neg_().log1p_().neg_().log_().neg_()


def uniforms(
    seeds: Int[Tensor, " R"], positions: Int[Tensor, " R"], levels: int
) -> Float[Tensor, "R levels"]:
    """As the specification."""
    counter = torch.arange(levels, dtype=torch.int32, device=seeds.device)[None, :]
    key = (seeds[:, None], positions[:, None])
    words, _ = threefry2x32(key, (counter, torch.full_like(counter, ACCEPT_STREAM)))
    return uniform_of_words(words)


def draft_noise(
    seeds: Int[Tensor, " R"], positions: Int[Tensor, " R"], levels: int, vocab: int
) -> Float[Tensor, "R levels vocab"]:
    """As the specification."""
    level = torch.arange(levels, dtype=torch.int32, device=seeds.device)
    streams = (level + DRAFT_STREAM).repeat(len(seeds))[:, None]
    rows = (seeds.repeat_interleave(levels), positions.repeat_interleave(levels))
    return gumbel(*rows, vocab, streams).view(-1, levels, vocab)


def gumbel(
    seeds: Int[Tensor, " R"],
    positions: Int[Tensor, " R"],
    vocab: int,
    stream: int | Int[Tensor, "R 1"],
) -> Float[Tensor, "R vocab"]:
    """As the specification, by one stream or by one of each row."""
    counter = torch.arange(-(-vocab // 2), dtype=torch.int32, device=seeds.device)[None, :]
    key = (seeds[:, None], positions[:, None])
    words = threefry2x32(key, (counter, torch.zeros_like(counter) + stream))
    return noise_of_words(torch.stack(words, dim=-1).flatten(1)[:, :vocab].contiguous())


def path_seen(
    seen: Int[Tensor, "B vocab"], tokens: Int[Tensor, "B N"], parents: Int[Tensor, "B N"]
) -> Int[Tensor, "B N vocab"]:
    """As the specification."""
    B, N = tokens.shape
    rows = torch.arange(B, device=seen.device)
    after = seen[:, None, :].repeat(1, N, 1)
    for node in range(1, N):
        after[:, node] = seen_after(after[rows, parents[:, node].long()], tokens[:, node])
    return after


def seen_after(seen: Int[Tensor, "B vocab"], tokens: Int[Tensor, " B"]) -> Int[Tensor, "B vocab"]:
    """What `seen` is after one more output token in each row."""
    two = torch.full_like(tokens, 2)[:, None]
    return seen.scatter_add(1, tokens.long()[:, None], two)


def penalized(
    logits: Float[Tensor, "R vocab"], seen: Int[Tensor, "R vocab"], sampling: Sampling
) -> Float[Tensor, "R vocab"]:
    """As the specification."""
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
    """As the specification."""
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
    seen: Int[Tensor, "R vocab"] | None,
    positions: Int[Tensor, " R"],
    sampling: Sampling,
    allowed: Bool[Tensor, "R vocab"] | None,
) -> Float[Tensor, "R vocab"]:
    """As the specification; `seen` may be None where no row has a penalty."""
    if seen is not None:
        logits = penalized(logits, seen, sampling)
    if any_row(sampling.bias_values != 0):
        logits = logits.scatter_add(1, sampling.bias_ids.long(), sampling.bias_values)
    too_short = positions < sampling.min_length
    if any_row(too_short):
        logits = _without_stops(logits, sampling.stop_ids, too_short)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    sampled = sampling.temperature > 0
    if not any_row(sampled):
        return logits
    scaled = logits / torch.where(sampled, sampling.temperature, 1)[:, None]
    return _supported(scaled, sampled, sampling)


def _without_stops(
    logits: Float[Tensor, "R vocab"], stop_ids: Int[Tensor, "R M"], too_short: Bool[Tensor, " R"]
) -> Float[Tensor, "R vocab"]:
    is_stop = torch.zeros_like(logits, dtype=torch.bool)
    is_stop.scatter_(1, stop_ids.long(), too_short[:, None].expand_as(stop_ids))
    return logits.masked_fill(is_stop, -torch.inf)


def _supported(
    scaled: Float[Tensor, "R vocab"], sampled: Bool[Tensor, " R"], sampling: Sampling
) -> Float[Tensor, "R vocab"]:
    filters = (sampling.top_k < scaled.shape[1]) | (sampling.top_p < 1) | (sampling.min_p > 0)
    filters &= sampled
    if not any_row(filters):
        return scaled
    keep = support(scaled, sampling.top_k, sampling.top_p, sampling.min_p)
    return scaled.masked_fill(~keep & sampled[:, None], -torch.inf)


def perturbed(
    processed: Float[Tensor, "R vocab"],
    noise: Float[Tensor, "R vocab"] | None,
    temperature: Float[Tensor, " R"],
) -> Float[Tensor, "R vocab"]:
    """As the specification; `noise` may be None where no row has a temperature above 0."""
    if noise is None:
        return processed
    return processed + torch.where((temperature > 0)[:, None], noise, 0)


def choose(
    processed: Float[Tensor, "R vocab"],
    noise: Float[Tensor, "R vocab"] | None,
    temperature: Float[Tensor, " R"],
) -> Int[Tensor, " R"]:
    """As the specification; `torch.argmax` gives the first maximum."""
    return perturbed(processed, noise, temperature).argmax(dim=1).int()


def draft_weights(
    perturbed: Float[Tensor, "R vocab"], temperature: Float[Tensor, " R"], tau: float
) -> Float[Tensor, "R vocab"]:
    """As the specification."""
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
    """As the specification."""
    return torch.log_softmax(logits, dim=1)


def probabilities(processed: Float[Tensor, "R vocab"]) -> Float[Tensor, "R vocab"]:
    """As the specification."""
    return torch.softmax(processed, dim=1)


def logprobs(logits: Float[Tensor, "R vocab"], ids: Int[Tensor, " R"]) -> Float[Tensor, " R"]:
    """As the specification."""
    return log_softmax(logits).gather(1, ids.long()[:, None])[:, 0]


def top_logprobs(
    logits: Float[Tensor, "R vocab"], k: int
) -> tuple[Int[Tensor, "R k"], Float[Tensor, "R k"]]:
    """As the specification."""
    ids = top_candidates(logits, k)
    return ids, log_softmax(logits).gather(1, ids.long())


def reported(
    logits: Float[Tensor, "B W vocab"],
    tokens: Int[Tensor, "B W"],
    counts: Int[Tensor, " B"],
    k: int,
) -> tuple[Float[Tensor, "B W"], Int[Tensor, "B W k"], Float[Tensor, "B W k"]]:
    """Log-probabilities of emitted tokens, then the k best ids and theirs; 0 past the counts."""
    (B, W), flat = tokens.shape, logits.flatten(0, 1)
    is_emitted = torch.arange(W, device=tokens.device) < counts[:, None]
    chosen = logprobs(flat, tokens.flatten()).view(B, W)
    ids, values = (best.view(B, W, k) for best in top_logprobs(flat, k))
    is_top = is_emitted[:, :, None]
    return (
        torch.where(is_emitted, chosen, 0),
        torch.where(is_top, ids, 0),
        torch.where(is_top, values, 0),
    )
