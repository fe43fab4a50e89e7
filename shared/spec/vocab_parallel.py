"""Vocab-parallel sampling: choosing tokens when the vocabulary is split into shards.

TP ranks shard the tokens of an LM head (`shared.models.tp_sharding.vocab_section`), and a kernel
splits them into blocks (`projection`). Each shard reduces its logits to a few numbers, and these
combine
to the result of the whole row:

  partial result                used for
  ----------------------------  --------------------------------------------------------------
  top k, logits and ids         target's token (k = 1), children of nodes, top logprobs
  all-finite flag               failure of the row
  `GroupSummary`: peaks and masses    log-sum-exp: draft weights, rejection sampling, logprobs
  `CountsAbove`: counts and masses    top-k / top-p threshold, a few bits of it at a time
  logit of a named token        rejection of a draft token, logprob of an output token

Combining is order-independent or has a fixed order. Peaks are compared. Masses are integers in
fixed-point units and are added exactly. Of equal logits the shard with the lower ids wins. A row
therefore has the same bits however its tokens are split, if groups of 64 neighbouring tokens stay
together.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int, Int64, UInt32
from jaxtyping import Int32 as I32

from shared.models.sharded_range import VOCAB_GROUP
from shared.spec import sampling

DIGIT = 4
"""Bits of a threshold found per round over all shards; the result does not depend on it."""

GROUP_BITS = 24
"""Fixed-point unit of a group's mass: 2^-24 of its best token's weight."""

BITS = 30
"""Fixed-point unit of other masses: 2^-30 of the largest possible weight."""

TINY = 1e-30
"""Minimum of `top_p` times the total mass, so that the first token always passes."""

F32 = Float32
Part = F32[np.ndarray, "R share"]


class GroupSummary(NamedTuple):
    """Partial log-sum-exp of groups of 64 neighbouring tokens.

    Attributes:
      peaks: Largest logit of each group.
      masses: Sum of exp(logit - peak) of each group.
    """

    peaks: F32[np.ndarray, "R groups"]
    masses: F32[np.ndarray, "R groups"]


class Norm(NamedTuple):
    """Softmax normaliser of a row: probability = exp(score - highest) / total."""

    highest: F32[np.ndarray, " R"]
    total: F32[np.ndarray, " R"]


class CountsAbove(NamedTuple):
    """Number of tokens above each of some thresholds, and their mass in units."""

    counts: Int64[np.ndarray, "R borders"]
    masses: Int64[np.ndarray, "R borders"]


def weights(
    scores: F32[np.ndarray, "R ..."], highest: F32[np.ndarray, " R"]
) -> F32[np.ndarray, "R ..."]:
    """Returns exp(score - highest); 0 if either is NaN."""
    with np.errstate(invalid="ignore"):
        weight = np.exp(scores - highest.reshape(-1, *[1] * (scores.ndim - 1)))
        return np.where(weight <= 1, weight, np.float32(0))


def to_fixed_point(masses: F32[np.ndarray, "..."]) -> Int64[np.ndarray, "..."]:
    """Converts masses of at most 1 to fixed-point units, rounded to nearest."""
    whole = np.floor(masses * np.float32(2 ** (BITS // 2)))
    rest = masses * np.float32(2 ** (BITS // 2)) - whole
    rest = np.floor(rest * np.float32(2 ** (BITS // 2)) + np.float32(0.5))
    return (whole.astype(np.int64) << BITS // 2) + rest.astype(np.int64)


def of_units(units: Int64[np.ndarray, "..."]) -> F32[np.ndarray, "..."]:
    """Converts fixed-point units to a mass; the fractional parts are added first."""
    half = BITS // 2
    high = ((units >> half) & (2**half - 1)).astype(np.float32) * np.float32(2.0**-half)
    low = (units & (2**half - 1)).astype(np.float32) * np.float32(2.0**-BITS)
    return (units >> BITS).astype(np.float32) + (high + low)


def groups(scores: Part) -> GroupSummary:
    """Computes the groups of a shard, whose first token starts a group."""
    spare = -scores.shape[1] % VOCAB_GROUP
    padded = np.pad(scores, ((0, 0), (0, spare)), constant_values=-np.inf)
    tokens = padded.reshape(len(scores), -1, VOCAB_GROUP)
    peaks = tokens.max(axis=2)
    near = weights(tokens.reshape(-1, VOCAB_GROUP), peaks.reshape(-1))
    units = np.floor(near * np.float32(2**GROUP_BITS) + np.float32(0.5)).astype(np.int32)
    masses = units.sum(axis=1, dtype=np.int32).astype(np.float32) * np.float32(2.0**-GROUP_BITS)
    return GroupSummary(peaks, masses.reshape(peaks.shape))


def norm(parts: Sequence[GroupSummary]) -> Norm:
    """Combines the groups of all shards to the softmax normaliser."""
    peaks = np.concatenate([part.peaks for part in parts], axis=1)
    masses = np.concatenate([part.masses for part in parts], axis=1)
    highest = peaks.max(axis=1)
    shares = masses * weights(peaks, highest) * np.float32(1 / VOCAB_GROUP)
    return Norm(highest, of_units(to_fixed_point(shares).sum(axis=1)) * np.float32(VOCAB_GROUP))


def log_probabilities(scores: F32[np.ndarray, "R some"], norm: Norm) -> F32[np.ndarray, "R some"]:
    """Returns the log-probabilities of some tokens of each row."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return scores - norm.highest[:, None] - np.log(norm.total)[:, None]


def best(scores: Part, first: int, k: int) -> tuple[F32[np.ndarray, "R k"], I32[np.ndarray, "R k"]]:
    """Returns the k largest logits of a shard with their ids, best first; ties go to the lower id.

    A smaller shard returns all its tokens, so k is at most 64: the first shard has that many.
    """
    places = sampling.top_candidates(scores, k)
    return np.take_along_axis(scores, places, axis=1), places + np.int32(first)


def joined_best(
    parts: Sequence[tuple[F32[np.ndarray, "R some"], I32[np.ndarray, "R some"]]], k: int
) -> tuple[F32[np.ndarray, "R k"], I32[np.ndarray, "R k"]]:
    """Combines the top k of all shards; ties go to the earlier shard."""
    scores = np.concatenate([part[0] for part in parts], axis=1)
    ids = np.concatenate([part[1] for part in parts], axis=1)
    places = sampling.top_candidates(scores, k)
    return np.take_along_axis(scores, places, axis=1), np.take_along_axis(ids, places, axis=1)


def keys(scores: F32[np.ndarray, "R some"]) -> UInt32[np.ndarray, "R some"]:
    """Maps floats to uint32 in the same order, with NaN largest; both zeros map to one key."""
    plain = np.where(np.isnan(scores), np.float32(np.nan), scores)
    bits = np.where(plain == 0, np.float32(0), plain).view(np.uint32)
    return np.where(bits >> 31 > 0, ~bits, bits | np.uint32(1 << 31))


KEY_OF_NOTHING = 0x007FFFFF
"""Key of -inf, the logit of excluded tokens."""


def count_above(
    scores: Part, highest: F32[np.ndarray, " R"], borders: UInt32[np.ndarray, "R borders"]
) -> CountsAbove:
    """Counts the tokens of a shard above some thresholds; excluded tokens are never counted."""
    borders = np.maximum(borders, np.uint32(KEY_OF_NOTHING))
    is_above = keys(scores)[:, None, :] > borders[:, :, None]
    units = to_fixed_point(weights(scores, highest))[:, None, :]
    return CountsAbove(is_above.sum(axis=2), (is_above * units).sum(axis=2))


def support(
    parts: Sequence[F32[np.ndarray, "R _"]],
    top_k: I32[np.ndarray, " R"],
    top_p: F32[np.ndarray, " R"],
    min_p: F32[np.ndarray, " R"],
) -> list[Bool[np.ndarray, "R _"]]:
    """Returns, per shard, the tokens that `shared.spec.sampling.support` selects in the whole row.

    The threshold is the smallest logit with fewer than `top_k` tokens and less than `top_p` mass
    above it. It is found by a radix search from its highest bits. Of the tokens equal to it, the
    first ones pass while the bounds allow. Masses are rounded to units, so a token closer to its
    bound than that may pass or not.
    """
    vocab = sum(part.shape[1] for part in parts)
    highest, total = norm([groups(part) for part in parts])
    most = np.where(top_k >= vocab, vocab + 1, np.maximum(top_k, 1))[:, None]
    mass = np.maximum(top_p, np.float32(TINY)) * total
    mass = np.where(top_p >= 1, np.float32(np.inf), mass)[:, None]

    def all_above(borders: Int[np.ndarray, "R borders"]) -> CountsAbove:
        each = [count_above(part, highest, borders.astype(np.uint32)) for part in parts]
        counts, masses = np.sum([x.counts for x in each], axis=0), [x.masses for x in each]
        return CountsAbove(counts, np.sum(masses, axis=0))

    border = np.zeros((len(top_k), 1), np.int64)
    ways = np.arange(1, 2**DIGIT)
    for shift in range(32 - DIGIT, -1, -DIGIT):
        # The threshold is in the first range of keys whose last key has less above it than the
        # bounds.
        counts, masses = all_above(border + (ways << shift) - 1)
        reaches = (counts >= most) | (of_units(masses) >= mass)
        border += reaches.sum(axis=1, keepdims=True) << shift
    counts, masses = all_above(border)
    mass_above, kept, earlier = of_units(masses), [], np.zeros((len(top_k), 1), np.int64)
    for part in parts:
        is_tie, near = keys(part) == border, weights(part, highest)
        before = earlier + is_tie.cumsum(axis=1) - is_tie
        has_room = (counts + before < most) & (mass_above + before.astype(np.float32) * near < mass)
        stays = (keys(part) > border) | (is_tie & has_room)
        kept.append(stays & ((near >= min_p[:, None]) | (min_p <= 0)[:, None]))
        earlier = earlier + is_tie.sum(axis=1, keepdims=True)
    return kept
