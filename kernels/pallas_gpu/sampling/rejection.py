"""Rejection sampling and block verification of draft chains (Pallas, Triton backend).

Four kernels. The first computes sums of exponentials of the target's and the drafter's logits, per
part of the vocabulary. The second combines the parts to a distribution per level. The third draws,
in each part, a replacement for a rejected draft token. The fourth accepts, and reduces the
replacements. Only levels that a chain has, of rows with a temperature, are computed.

Weights are summed as integers, see `logits_processing`. `kernels/__init__.py` lists what must stay
equal to the Triton twin.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int, UInt32

from kernels.pallas_gpu.sampling.gumbel_noise import (
    log,
    noise_of_words,
    threefry,
    uniform_of,
    words_of,
)
from kernels.pallas_gpu.sampling.logits_processing import (
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
    number_of,
    score_of,
    weight_of,
)

PART_GROUPS = 64  # groups of tokens in a part of the vocabulary
_WARPS = 8
_SMALLEST = 2.0**-126  # probability with a finite logarithm


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


def rejection_sample(
    tokens: Int[jax.Array, "B N"],
    num_nodes: Int[jax.Array, " B"],
    choices: Int[jax.Array, "B N"],
    row_of: Int[jax.Array, "B N"],
    scores: Float[jax.Array, "R vocab"],
    drafted: Float[jax.Array, "B S vocab"],
    temperature: Float[jax.Array, " B"],
    seeds: UInt32[jax.Array, " B"],
    lengths: Int[jax.Array, " B"],
    *,
    is_block: bool,
    accept_stream: int,
    residual_stream: int,
    interpret: bool = False,
) -> Int[jax.Array, "B N"]:
    """Implements `shared.spec.acceptance.rejection_choices` and `block_choices`, from logits.

    Args:
      tokens, num_nodes, choices, lengths: Same as in the specification.
      row_of: Row of `scores` of each node.
      scores, drafted: Processed logits of the target and the drafter.
      temperature, seeds: Temperature and RNG seed of each request.
      is_block: Chains are verified as a whole (block verification).
      accept_stream, residual_stream: RNG streams.
      interpret: Run on a CPU.
    """
    B, S, vocab = drafted.shape
    parts = pl.cdiv(vocab, PART_GROUPS * 2 * PAIRS)
    chains = Chains(
        tokens, num_nodes, choices, row_of, scores, drafted, temperature, seeds, lengths
    )

    launch = functools.partial(_launch, interpret=interpret)
    ints, floats, sides, places = jnp.int32, jnp.float32, (2, B, S), (B, S, parts)
    sums = launch(
        _masses_kernel,
        chains,
        [((*sides, parts), ints), ((*sides, parts), floats)],
        grid=(parts, B * S, 2),
        num_warps=_WARPS,
        name="partial_masses",
    )
    joined = launch(
        functools.partial(_distributions_kernel, is_block=is_block),
        (*chains, *sums),
        [*3 * [(sides, floats)], ((B, S + 1), floats)],
        grid=(B,),
        num_warps=4,
        name="join_distributions",
    )
    distributions = Distributions(*sums, *joined)
    residuals = launch(
        functools.partial(_draws_kernel, stream=residual_stream),
        (*chains, *distributions),
        [*4 * [(places, ints)], (places, floats)],
        grid=(parts, B * S),
        num_warps=_WARPS,
        name="sample_residuals",
    )
    (chosen,) = launch(
        functools.partial(_decide_kernel, stream=accept_stream, is_block=is_block),
        (*chains, *distributions, *residuals),
        [(choices.shape, ints)],
        grid=(B,),
        num_warps=4,
        name="accept_tokens",
    )
    return chosen


def _launch(kernel, given, results, *, grid, num_warps, interpret, name):
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=[jax.ShapeDtypeStruct(*result) for result in results],
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*given)


def _unpack_refs(refs, *kinds):
    """Groups references into records, in this order; returns them and the remaining references."""
    groups = []
    for kind in kinds:
        groups.append(kind(*refs[: len(kind._fields)]))
        refs = refs[len(kind._fields) :]
    return *groups, refs


def _has_draft(chains, request, level):
    """Returns whether a row has a temperature and its chain has a draft token at a level."""
    return (level + 1 < chains.num_nodes[request]) & (chains.temperature[request] > 0)


def _masses_kernel(*refs):
    """One program per part of the vocabulary, level and side."""
    chains, (peaks_ref, masses_ref) = _unpack_refs(refs, Chains)
    part, index, side = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    levels, vocab = peaks_ref.shape[2], chains.scores.shape[1]
    request, level = lax.div(index, levels), lax.rem(index, levels)

    @pl.when(_has_draft(chains, request, level))
    def _():
        _, ids = ids_of(part * PART_GROUPS + lax.iota(jnp.int32, PART_GROUPS))
        inside = ids < vocab
        target = chains.scores.at[chains.row_of[request, level], ids]
        draft_at = chains.drafted.at[request, level, ids]
        x = lax.cond(
            side == 0,
            lambda: pltriton.load(target, mask=inside, other=0.0),
            lambda: pltriton.load(draft_at, mask=inside, other=0.0),
        )
        peak = jnp.max(jnp.where(inside, key_of(x), LOWEST))
        high, low = halves_of(jnp.where(inside, weight_of(x, score_of(peak), 1.0), 0.0))
        peaks_ref[side, request, level, part] = peak
        sum = carried(jnp.int32(0), high.sum(), low.sum())
        masses_ref[side, request, level, part] = number_of(sum)


def _distributions_kernel(*refs, is_block):
    """One program per request; levels are its lanes."""
    chains, (peaks_ref, masses_ref, highest_ref, total_ref, of_draft_ref, weights_ref) = (
        _unpack_refs(refs, Chains)
    )
    distributions = Distributions(
        peaks_ref, masses_ref, highest_ref, total_ref, of_draft_ref, weights_ref
    )
    request, levels = pl.program_id(0), peaks_ref.shape[2]
    level = lax.iota(jnp.int32, pl.next_power_of_2(levels))
    has_draft = _has_draft(chains, request, level) & (level < levels)
    target = _store_distribution(chains, distributions, request, level, has_draft, 0)
    drafter = _store_distribution(chains, distributions, request, level, has_draft, 1)
    ratio = target / jnp.where(drafter > 0, drafter, 1e-30)
    weights_ref[request, 0] = jnp.float32(1)

    def step(number, weight):
        if is_block:
            # A lane is read by an integer sum of its bits, which is exact.
            bits = lax.bitcast_convert_type(ratio, jnp.int32)
            bits = jnp.where(level == number, bits, 0).sum()
            weight = jnp.minimum(weight * lax.bitcast_convert_type(bits, jnp.float32), 1.0)
        weights_ref[request, number + 1] = weight
        return weight

    lax.fori_loop(0, levels, step, jnp.float32(1))


def _store_distribution(chains, distributions, request, level, has_draft, side):
    """Stores each level's distribution on one side; returns the probability of its draft token."""
    levels, parts = distributions.peaks.shape[2:]
    part = lax.iota(jnp.int32, pl.next_power_of_2(parts))[None, :]
    inside = has_draft[:, None] & (part < parts)
    # Missing levels get an index outside the array, which the interpreter requires.
    level_at = jnp.where(has_draft, level, levels)
    read = (side, request, jnp.minimum(level, levels - 1)[:, None], jnp.minimum(part, parts - 1))
    peaks = pltriton.load(distributions.peaks.at[read], mask=inside, other=LOWEST)
    masses = pltriton.load(distributions.masses.at[read], mask=inside, other=0.0)
    key = peaks.max(axis=1)
    highest = score_of(key)
    # In units of 64 tokens, the sum over the vocabulary fits an integer.
    terms = masses * weight_of(score_of(peaks), highest[:, None], 1.0) * (1.0 / 64)
    high, low = halves_of(jnp.where(inside, terms, 0.0))
    total = number_of(carried(jnp.zeros_like(level), high.sum(axis=1), low.sum(axis=1))) * 64
    is_valid = (key > KEY_OF_NOTHING) & (key < KEY_OF_INFINITY)
    total = jnp.where(is_valid, total, 0.0)
    index = jnp.minimum(level, levels - 1)
    draft = pltriton.load(chains.tokens.at[request, index + 1], mask=has_draft, other=0)
    if side == 0:
        row = pltriton.load(chains.row_of.at[request, index], mask=has_draft, other=0)
        at = chains.scores.at[row, draft]
    else:
        at = chains.drafted.at[request, index, draft]
    x = pltriton.load(at, mask=has_draft, other=0.0)
    probability = _probability(x, draft, draft, highest, total)
    for ref, value in (
        (distributions.highest, highest),
        (distributions.total, total),
        (distributions.of_draft, probability),
    ):
        pltriton.store(ref.at[side, request, level_at], value, mask=has_draft)
    return probability


def _probability(x, ids, draft, highest, total):
    """Computes the probability of logits; an invalid distribution makes the draft token certain."""
    is_valid = total > 0
    probability = weight_of(x, highest, 1.0) / jnp.where(is_valid, total, 1.0)
    return jnp.where(is_valid, probability, (ids == draft).astype(jnp.float32))


def _draws_kernel(*refs, stream):
    """One program per part of the vocabulary and level."""
    chains, distributions, outputs = _unpack_refs(refs, Chains, Distributions)
    residuals = ResidualSamples(*outputs)
    part, index = pl.program_id(0), pl.program_id(1)
    levels, vocab = distributions.peaks.shape[2], chains.scores.shape[1]
    request, level = lax.div(index, levels), lax.rem(index, levels)

    @pl.when(_has_draft(chains, request, level))
    def _():
        pairs, ids = ids_of(part * PART_GROUPS + lax.iota(jnp.int32, PART_GROUPS))
        inside = ids < vocab
        draft, row = chains.tokens[request, level + 1], chains.row_of[request, level]
        x = pltriton.load(chains.scores.at[row, ids], mask=inside, other=0.0)
        y = pltriton.load(chains.drafted.at[request, level, ids], mask=inside, other=0.0)
        p, q = (
            _probability(
                *(
                    z,
                    ids,
                    draft,
                    distributions.highest[side, request, level],
                    distributions.total[side, request, level],
                )
            )
            for side, z in enumerate((x, y))
        )
        residual = distributions.weights[request, level] * p - q
        is_residual = inside & (residual >= _SMALLEST)
        key = (chains.seeds[request], chains.lengths[request].astype(jnp.uint32))
        noise = noise_of_words(words_of(*key, jnp.uint32(stream), pairs))
        drawn = log(jnp.where(is_residual, residual, 1.0)) + noise
        at = (request, level, part)
        best = first_token(jnp.where(is_residual, key_of(drawn), LOWEST), ids)
        residuals.keys[at], residuals.ids[at] = best
        fallback = first_token(jnp.where(inside, key_of(x + noise), LOWEST), ids)
        residuals.fallback_keys[at], residuals.fallback_ids[at] = fallback
        high, low = halves_of(jnp.where(is_residual, residual, 0.0))
        residuals.mass[at] = number_of(carried(jnp.int32(0), high.sum(), low.sum()))


def _decide_kernel(*refs, stream, is_block):
    """One program per request; levels are its lanes."""
    chains, distributions, residuals, (chosen_ref,) = _unpack_refs(
        refs, Chains, Distributions, ResidualSamples
    )
    request, (levels, parts) = pl.program_id(0), residuals.mass.shape[1:]
    level = lax.iota(jnp.int32, pl.next_power_of_2(levels))
    is_level, index = level < levels, jnp.minimum(level, levels - 1)
    has_draft = _has_draft(chains, request, level) & is_level
    part = lax.iota(jnp.int32, pl.next_power_of_2(parts))[None, :]
    inside, part = has_draft[:, None] & (part < parts), jnp.minimum(part, parts - 1)
    counter = level.astype(jnp.uint32)
    key = (chains.seeds[request], chains.lengths[request].astype(jnp.uint32))
    words, _ = threefry(*key, counter, jnp.zeros_like(counter) + jnp.uint32(stream))
    uniform = uniform_of(words)
    if is_block:
        is_last = level + 2 >= chains.num_nodes[request]
        after = jnp.minimum(level + 1, levels - 1)[:, None]
        has_next = inside & ~is_last[:, None]
        mass = pltriton.load(residuals.mass.at[request, after, part], mask=has_next, other=0.0)
        high, low = halves_of(mass)
        mass = number_of(carried(jnp.zeros_like(level), high.sum(axis=1), low.sum(axis=1)))
        weight = pltriton.load(
            distributions.weights.at[request, index + 1], mask=is_level, other=0.0
        )
        total = mass + 1 - weight
        share = jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), 1.0)
        passes = has_draft & (uniform < jnp.where(is_last, weight, share))
        # A draft token is accepted if some passing prefix includes it.
        is_accepted = level <= jnp.max(jnp.where(passes, level, -1))
    else:
        target, drafter = (
            pltriton.load(
                distributions.of_draft.at[side, request, index], mask=has_draft, other=0.0
            )
            for side in range(2)
        )
        is_accepted = uniform * drafter < target
    at = (request, index[:, None], part)
    best, drawn = _best_token(residuals.keys.at[at], residuals.ids.at[at], inside)
    _, fallback = _best_token(residuals.fallback_keys.at[at], residuals.fallback_ids.at[at], inside)
    drawn = jnp.minimum(jnp.where(best > LOWEST, drawn, fallback), chains.scores.shape[1] - 1)
    draft = pltriton.load(chains.tokens.at[request, index + 1], mask=is_level, other=0)
    choice = pltriton.load(chains.choices.at[request, index], mask=is_level, other=0)
    choice = jnp.where(has_draft, jnp.where(is_accepted, draft, drawn), choice)
    # Missing levels get an index outside the array, which the interpreter requires.
    level_at = jnp.where(is_level, level, levels + 1)
    pltriton.store(chosen_ref.at[request, level_at], choice, mask=is_level)
    chosen_ref[request, levels] = chains.choices[request, levels]


def _best_token(keys_at, ids_at, inside):
    """Returns the best token over the parts of each level."""
    keys = pltriton.load(keys_at, mask=inside, other=LOWEST)
    ids = pltriton.load(ids_at, mask=inside, other=HIGHEST)
    best = keys.max(axis=1)
    return best, jnp.where(keys == best[:, None], ids, HIGHEST).min(axis=1)
