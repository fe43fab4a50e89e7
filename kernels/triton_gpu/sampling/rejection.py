"""Rejection sampling and block verification of draft chains (Triton).

Four kernels. The first computes sums of exponentials of the target's and the drafter's logits, per
part of the vocabulary. The second combines the parts to a distribution per level. The third draws,
in each part, a replacement for a rejected draft token. The fourth accepts, and reduces the
replacements. Only levels that a chain has, of rows with a temperature, are computed.

Weights are summed as integers, see `logits_processing`. `kernels/__init__.py` lists what must stay
equal to the Pallas twin.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from kernels.triton_gpu.sampling.gumbel_noise import (
    log,
    noise_of_words,
    threefry,
    uniform_of,
    words_of,
)
from kernels.triton_gpu.sampling.logits_processing import (
    HIGHEST,
    KEY_OF_INFINITY,
    KEY_OF_NOTHING,
    LOWEST,
    PAIRS,
    carried,
    first_token,
    halves_of,
    ids_of,
    key_of,
    no_sum,
    number_of,
    score_of,
    weight_of,
)

PART_GROUPS = 64  # groups of tokens in a part of the vocabulary
_PART_GROUPS = tl.constexpr(PART_GROUPS)
_WARPS = 8
_SMALLEST = tl.constexpr(2.0**-126)  # probability with a finite logarithm


class Chains(NamedTuple):
    """Inputs of rejection sampling: chains, sampling parameters and logits of both models.

    Attributes:
      choices: Tokens sampled by the target.
      row_of: Row of `scores` of each node.
      scores, drafted: Processed logits, of the target's rows and of each level of the drafter.
    """

    tokens: Any
    num_nodes: Any
    choices: Any
    row_of: Any
    scores: Any
    drafted: Any
    temperature: Any
    seeds: Any
    lengths: Any


class Distributions(NamedTuple):
    """Distributions of each level: first the target's, then the drafter's.

    Attributes:
      peaks, masses: Largest key of each part of the vocabulary, and the part's weight relative to
        it.
      highest, total: Highest logit, and the weight of all tokens relative to it; 0: invalid.
      of_draft: Probability of the level's draft token.
      weights: Factor of the target distribution, before the draft distribution is subtracted; per
        node.
    """

    peaks: Any
    masses: Any
    highest: Any
    total: Any
    of_draft: Any
    weights: Any


class ResidualSamples(NamedTuple):
    """Replacement tokens that each part of the vocabulary draws for a level.

    Attributes:
      keys, ids: Best token of the residual distribution.
      fallback_keys, fallback_ids: Best token of the target distribution, for a level without a
        residual.
      mass: Weight of the residual distribution.
    """

    keys: Any
    ids: Any
    fallback_keys: Any
    fallback_ids: Any
    mass: Any


class Lengths(NamedTuple):
    """Array sizes: levels S and nodes of a chain, tokens, and parts of the vocabulary."""

    levels: int
    nodes: int
    vocab: int
    parts: int
    level_lanes: int
    part_lanes: int


def rejection_sample(
    tokens: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    choices: Int[Tensor, "B N"],
    row_of: Int[Tensor, "B N"],
    scores: Float[Tensor, "R vocab"],
    drafted: Float[Tensor, "B S vocab"],
    temperature: Float[Tensor, " B"],
    seeds: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    *,
    is_block: bool,
    accept_stream: int,
    residual_stream: int,
) -> Int[Tensor, "B N"]:
    """Implements `shared.spec.acceptance.rejection_choices` and `block_choices`, from logits.

    Args:
      tokens, num_nodes, choices, lengths: Same as in the specification.
      row_of: Row of `scores` of each node.
      scores, drafted: Processed logits of the target and the drafter.
      temperature, seeds: Temperature and RNG seed of each request.
      is_block: Chains are verified as a whole (block verification).
      accept_stream, residual_stream: RNG streams.
    """
    (B, S, vocab), new = drafted.shape, drafted.new_empty
    parts = triton.cdiv(vocab, PART_GROUPS * 2 * PAIRS.value)
    ints: dict[str, Any] = {"dtype": torch.int32}
    chains = Chains(
        tokens, num_nodes, choices, row_of, scores, drafted, temperature, seeds, lengths
    )
    chains = Chains(*(x.contiguous() for x in chains))
    distributions = Distributions(
        peaks=new(2, B, S, parts, **ints),
        masses=new(2, B, S, parts),
        highest=new(2, B, S),
        total=new(2, B, S),
        of_draft=new(2, B, S),
        weights=new(B, S + 1),
    )
    residuals = ResidualSamples(
        keys=new(B, S, parts, **ints),
        ids=new(B, S, parts, **ints),
        fallback_keys=new(B, S, parts, **ints),
        fallback_ids=new(B, S, parts, **ints),
        mass=new(B, S, parts),
    )
    lanes = triton.next_power_of_2(S), triton.next_power_of_2(parts)
    fixed = {"sizes": Lengths(S, S + 1, vocab, parts, *lanes), "enable_fp_fusion": False}
    chosen = torch.empty_like(chains.choices)
    _masses_kernel[(parts, B * S, 2)](chains, distributions, num_warps=_WARPS, **fixed)
    _distributions_kernel[(B,)](chains, distributions, is_block=is_block, num_warps=4, **fixed)
    _draws_kernel[(parts, B * S)](
        chains, distributions, residuals, word=residual_stream, num_warps=_WARPS, **fixed
    )
    _decide_kernel[(B,)](
        *(chains, distributions, residuals, chosen),
        word=accept_stream,  # `stream` is a launch argument of Triton
        is_block=is_block,
        num_warps=4,
        **fixed,
    )
    return chosen


@triton.jit
def _has_draft(chains, request, level):
    """Returns whether a row has a temperature and its chain has a draft token at a level."""
    is_sampled = tl.load(chains.temperature + request) > 0
    return level + 1 < tl.where(is_sampled, tl.load(chains.num_nodes + request), 0)


@triton.jit
def _row_at(chains, index, side, sizes: tl.constexpr):
    """Returns the offset of a level's logits: the target's, or on the other side the drafter's."""
    request, level = index // sizes.levels, index % sizes.levels
    at = chains.drafted + index.to(tl.int64) * sizes.vocab
    if side == 0:
        row = tl.load(chains.row_of + request * sizes.nodes + level).to(tl.int64)
        at = chains.scores + row * sizes.vocab
    return at


@triton.jit
def _masses_kernel(chains, distributions, sizes: tl.constexpr):
    """One program per part of the vocabulary, level and side."""
    part, index, side = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if _has_draft(chains, index // sizes.levels, index % sizes.levels):
        pairs, ids = ids_of(part * _PART_GROUPS + tl.arange(0, _PART_GROUPS))
        inside = ids < sizes.vocab
        x = tl.load(_row_at(chains, index, side, sizes) + ids, mask=inside, other=0.0)
        peak = tl.max(tl.where(inside, key_of(x), LOWEST))
        weights = tl.where(inside, weight_of(x, score_of(peak), 1.0), 0.0)
        high, low = halves_of(weights)
        whole, _, _ = no_sum()
        at = (side * tl.num_programs(1) + index) * sizes.parts + part
        tl.store(distributions.peaks + at, peak)
        tl.store(distributions.masses + at, number_of(carried(whole, tl.sum(high), tl.sum(low))))


@triton.jit
def _distributions_kernel(chains, distributions, is_block: tl.constexpr, sizes: tl.constexpr):
    """One program per request; levels are its lanes."""
    request, level = tl.program_id(0), tl.arange(0, sizes.level_lanes)
    has_draft = _has_draft(chains, request, level) & (level < sizes.levels)
    target = _store_distribution(chains, distributions, request, level, has_draft, 0, sizes)
    drafter = _store_distribution(chains, distributions, request, level, has_draft, 1, sizes)
    ratio = target / tl.where(drafter > 0, drafter, 1e-30)
    weight = tl.full((), 1.0, tl.float32)
    weights_at = distributions.weights + request * sizes.nodes
    tl.store(weights_at, weight)
    for step in range(sizes.levels):
        if is_block:
            # A lane is read by an integer sum of its bits, which is exact.
            bits = tl.where(level == step, ratio.to(tl.int32, bitcast=True), 0)
            factor = tl.sum(bits).to(tl.float32, bitcast=True)
            weight = tl.minimum(weight * factor, 1.0)
        tl.store(weights_at + step + 1, weight)


@triton.jit
def _store_distribution(
    chains, distributions, request, level, has_draft, side: tl.constexpr, sizes: tl.constexpr
):
    """Stores each level's distribution on one side; returns the probability of its draft token."""
    part = tl.arange(0, sizes.part_lanes)[None, :]
    index = request * sizes.levels + level
    law = side * tl.num_programs(0) * sizes.levels + index
    inside = has_draft[:, None] & (part < sizes.parts)
    peaks = tl.load(
        distributions.peaks + law[:, None] * sizes.parts + part, mask=inside, other=LOWEST
    )
    masses = tl.load(
        distributions.masses + law[:, None] * sizes.parts + part, mask=inside, other=0.0
    )
    key = tl.max(peaks, 1)
    highest = score_of(key)
    # In units of 64 tokens, the sum over the vocabulary fits an integer.
    terms = masses * weight_of(score_of(peaks), highest[:, None], 1.0) * (1.0 / 64)
    high, low = halves_of(tl.where(inside, terms, 0.0))
    total = number_of(carried(level * 0, tl.sum(high, 1), tl.sum(low, 1))) * 64
    is_valid = (key > KEY_OF_NOTHING) & (key < KEY_OF_INFINITY)
    total = tl.where(is_valid, total, 0.0)
    drafts_at = chains.tokens + request * sizes.nodes + 1
    draft = tl.load(drafts_at + level, mask=has_draft, other=0)
    row = index.to(tl.int64)
    if side == 0:
        row = tl.load(chains.row_of + request * sizes.nodes + level, mask=has_draft, other=0)
    scores_at = chains.scores if side == 0 else chains.drafted
    x = tl.load(scores_at + row.to(tl.int64) * sizes.vocab + draft, mask=has_draft, other=0.0)
    probability = _probability(x, draft, draft, highest, total)
    tl.store(distributions.highest + law, highest, mask=has_draft)
    tl.store(distributions.total + law, total, mask=has_draft)
    tl.store(distributions.of_draft + law, probability, mask=has_draft)
    return probability


@triton.jit
def _probability(x, ids, draft, highest, total):
    """Computes the probability of logits; an invalid distribution makes the draft token certain."""
    is_valid = total > 0
    probability = weight_of(x, highest, 1.0) / tl.where(is_valid, total, 1.0)
    return tl.where(is_valid, probability, tl.where(ids == draft, 1.0, 0.0))


@triton.jit
def _draws_kernel(chains, distributions, residuals, word: tl.constexpr, sizes: tl.constexpr):
    """One program per part of the vocabulary and level."""
    part, index = tl.program_id(0), tl.program_id(1)
    request, level, others = index // sizes.levels, index % sizes.levels, tl.num_programs(1)
    if _has_draft(chains, request, level):
        pairs, ids = ids_of(part * _PART_GROUPS + tl.arange(0, _PART_GROUPS))
        inside = ids < sizes.vocab
        node = request * sizes.nodes + level
        draft = tl.load(chains.tokens + node + 1)
        x = tl.load(_row_at(chains, index, 0, sizes) + ids, mask=inside, other=0.0)
        y = tl.load(_row_at(chains, index, 1, sizes) + ids, mask=inside, other=0.0)
        highest, total = (
            tl.load(distributions.highest + index),
            tl.load(distributions.total + index),
        )
        p = _probability(x, ids, draft, highest, total)
        highest, total = (
            tl.load(distributions.highest + others + index),
            tl.load(distributions.total + others + index),
        )
        q = _probability(y, ids, draft, highest, total)
        residual = tl.load(distributions.weights + node) * p - q
        is_residual = inside & (residual >= _SMALLEST)
        seed = tl.load(chains.seeds + request).to(tl.uint32, bitcast=True)
        position = tl.load(chains.lengths + request).to(tl.uint32)
        noise = noise_of_words(words_of(seed, position, word, pairs))
        drawn = log(tl.where(is_residual, residual, 1.0)) + noise
        at = index * sizes.parts + part
        key, winner = first_token(tl.where(is_residual, key_of(drawn), LOWEST), ids)
        tl.store(residuals.keys + at, key)
        tl.store(residuals.ids + at, winner)
        key, winner = first_token(tl.where(inside, key_of(x + noise), LOWEST), ids)
        tl.store(residuals.fallback_keys + at, key)
        tl.store(residuals.fallback_ids + at, winner)
        high, low = halves_of(tl.where(is_residual, residual, 0.0))
        whole, _, _ = no_sum()
        tl.store(residuals.mass + at, number_of(carried(whole, tl.sum(high), tl.sum(low))))


@triton.jit
def _decide_kernel(
    chains,
    distributions,
    residuals,
    decided_at,
    word: tl.constexpr,
    is_block: tl.constexpr,
    sizes: tl.constexpr,
):
    """One program per request; levels are its lanes."""
    request, level = tl.program_id(0), tl.arange(0, sizes.level_lanes)
    node, is_level = request * sizes.nodes + level, level < sizes.levels
    index = request * sizes.levels + level
    has_draft = _has_draft(chains, request, level) & is_level
    part = tl.arange(0, sizes.part_lanes)[None, :]
    inside = has_draft[:, None] & (part < sizes.parts)
    at = index[:, None] * sizes.parts + part
    counter = level.to(tl.uint32)
    seed = tl.load(chains.seeds + request).to(tl.uint32, bitcast=True)
    position = tl.load(chains.lengths + request).to(tl.uint32)
    words, _ = threefry(seed, position, counter, counter * 0 + word)
    uniform = uniform_of(words)
    if is_block:
        is_last = level + 2 >= tl.load(chains.num_nodes + request)
        has_next = inside & (~is_last)[:, None]
        mass = tl.load(residuals.mass + at + sizes.parts, mask=has_next, other=0.0)
        high, low = halves_of(mass)
        mass = number_of(carried(level * 0, tl.sum(high, 1), tl.sum(low, 1)))
        weight = tl.load(distributions.weights + node + 1, mask=is_level, other=0.0)
        total = mass + 1 - weight
        share = tl.where(total > 0, mass / tl.where(total > 0, total, 1.0), 1.0)
        passes = has_draft & (uniform < tl.where(is_last, weight, share))
        # A draft token is accepted if some passing prefix includes it.
        is_accepted = level <= tl.max(tl.where(passes, level, -1))
    else:
        target = tl.load(distributions.of_draft + index, mask=has_draft, other=0.0)
        drafters_at = distributions.of_draft + tl.num_programs(0) * sizes.levels
        is_accepted = uniform * tl.load(drafters_at + index, mask=has_draft, other=0.0) < target
    key, drawn = _best_token(residuals.keys + at, residuals.ids + at, inside)
    _, fallback = _best_token(residuals.fallback_keys + at, residuals.fallback_ids + at, inside)
    drawn = tl.minimum(tl.where(key > LOWEST, drawn, fallback), sizes.vocab - 1)
    draft = tl.load(chains.tokens + node + 1, mask=is_level, other=0)
    choice = tl.load(chains.choices + node, mask=is_level, other=0)
    choice = tl.where(has_draft, tl.where(is_accepted, draft, drawn), choice)
    tl.store(decided_at + node, choice, mask=is_level)
    last = request * sizes.nodes + sizes.levels
    tl.store(decided_at + last, tl.load(chains.choices + last))


@triton.jit
def _best_token(keys_at, ids_at, inside):
    """Returns the best token over the parts of each level."""
    keys = tl.load(keys_at, mask=inside, other=LOWEST)
    ids = tl.load(ids_at, mask=inside, other=HIGHEST)
    best = tl.max(keys, 1)
    return best, tl.min(tl.where(keys == best[:, None], ids, HIGHEST), 1)
