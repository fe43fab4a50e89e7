"""What a part of the vocabulary leaves of a row, and how the parts' make what the whole row gives.

Ranks divide the tokens of a head among them (`shared.models.ranks.vocab_section`), and a kernel
divides them into blocks (`projection`). Whoever has a part needs no logit of another's to choose
among all tokens:

  leaves                        what is chosen by it
  ----------------------------  --------------------------------------------------------------
  the best k, scores and ids    the target's token (k = 1), children of nodes, best logprobs
  whether all are finite        whether the row fails
  `Groups`: peaks and masses    log-probabilities: weights of drafts, laws of rules, logprobs
  `Above`: counts and masses    the border of the support, a few bits of it at a time
  the score of a named token    a rule's draft, the logprob of an emitted token: its owner's

What is joined has no order, or a fixed one: peaks are compared, masses are whole numbers of units
and are added exactly, and of equal scores the part with the lower ids comes first. So a row has the
same bits however its tokens are divided, as long as groups of 64 neighbours stay together.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int, Int64, UInt32
from jaxtyping import Int32 as I32

from shared.models.ranks import VOCAB_GROUP
from shared.spec import sampling

DIGIT = 4
"""Bits of a border that one question to all parts finds; the border is the same for any number."""

GROUP_BITS = 24
"""A unit of a group's mass is 2^-24 of its best token's weight."""

BITS = 30
"""A unit of any other mass is 2^-30 of the largest weight that there can be."""

TINY = 1e-30
"""The least mass that `top_p` keeps, so that the first token stays."""

F32 = Float32
Part = F32[np.ndarray, "R share"]


class Groups(NamedTuple):
    """What groups of 64 neighbouring tokens hold.

    Attributes:
      peaks: The largest score of each.
      masses: How likely a group is beside its own best token alone.
    """

    peaks: F32[np.ndarray, "R groups"]
    masses: F32[np.ndarray, "R groups"]


class Norm(NamedTuple):
    """What makes probabilities of a row's scores: exp(score - highest) / total."""

    highest: F32[np.ndarray, " R"]
    total: F32[np.ndarray, " R"]


class Above(NamedTuple):
    """How many tokens lie above each of some borders, and their mass in units."""

    counts: Int64[np.ndarray, "R borders"]
    masses: Int64[np.ndarray, "R borders"]


def weights(
    scores: F32[np.ndarray, "R ..."], highest: F32[np.ndarray, " R"]
) -> F32[np.ndarray, "R ..."]:
    """How likely scores are beside a row's highest; 0 where either is no number."""
    with np.errstate(invalid="ignore"):
        weight = np.exp(scores - highest.reshape(-1, *[1] * (scores.ndim - 1)))
        return np.where(weight <= 1, weight, np.float32(0))


def in_units(masses: F32[np.ndarray, "..."]) -> Int64[np.ndarray, "..."]:
    """Masses of at most 1 in whole units, rounded to the nearest."""
    whole = np.floor(masses * np.float32(2 ** (BITS // 2)))
    rest = masses * np.float32(2 ** (BITS // 2)) - whole
    rest = np.floor(rest * np.float32(2 ** (BITS // 2)) + np.float32(0.5))
    return (whole.astype(np.int64) << BITS // 2) + rest.astype(np.int64)


def of_units(units: Int64[np.ndarray, "..."]) -> F32[np.ndarray, "..."]:
    """The mass that so many units are; the fractions are added first."""
    half = BITS // 2
    high = ((units >> half) & (2**half - 1)).astype(np.float32) * np.float32(2.0**-half)
    low = (units & (2**half - 1)).astype(np.float32) * np.float32(2.0**-BITS)
    return (units >> BITS).astype(np.float32) + (high + low)


def groups(scores: Part) -> Groups:
    """What the groups of a part hold, whose first token is the first of a group."""
    spare = -scores.shape[1] % VOCAB_GROUP
    padded = np.pad(scores, ((0, 0), (0, spare)), constant_values=-np.inf)
    tokens = padded.reshape(len(scores), -1, VOCAB_GROUP)
    peaks = tokens.max(axis=2)
    near = weights(tokens.reshape(-1, VOCAB_GROUP), peaks.reshape(-1))
    units = np.floor(near * np.float32(2**GROUP_BITS) + np.float32(0.5)).astype(np.int32)
    masses = units.sum(axis=1, dtype=np.int32).astype(np.float32) * np.float32(2.0**-GROUP_BITS)
    return Groups(peaks, masses.reshape(peaks.shape))


def norm(parts: Sequence[Groups]) -> Norm:
    """Joins what the groups of all parts hold."""
    peaks = np.concatenate([part.peaks for part in parts], axis=1)
    masses = np.concatenate([part.masses for part in parts], axis=1)
    highest = peaks.max(axis=1)
    shares = masses * weights(peaks, highest) * np.float32(1 / VOCAB_GROUP)
    return Norm(highest, of_units(in_units(shares).sum(axis=1)) * np.float32(VOCAB_GROUP))


def log_probabilities(scores: F32[np.ndarray, "R some"], norm: Norm) -> F32[np.ndarray, "R some"]:
    """Natural logarithms of the probabilities of some tokens of each row."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return scores - norm.highest[:, None] - np.log(norm.total)[:, None]


def best(scores: Part, first: int, k: int) -> tuple[F32[np.ndarray, "R k"], I32[np.ndarray, "R k"]]:
    """The k largest scores of a part and their ids, best first and of equals the lower id.

    A part with fewer tokens leaves all, so at most 64 are asked for: the first part has as many.
    """
    places = sampling.top_candidates(scores, k)
    return np.take_along_axis(scores, places, axis=1), places + np.int32(first)


def joined_best(
    parts: Sequence[tuple[F32[np.ndarray, "R some"], I32[np.ndarray, "R some"]]], k: int
) -> tuple[F32[np.ndarray, "R k"], I32[np.ndarray, "R k"]]:
    """The k best of what all parts leave; of equals the earlier part's."""
    scores = np.concatenate([part[0] for part in parts], axis=1)
    ids = np.concatenate([part[1] for part in parts], axis=1)
    places = sampling.top_candidates(scores, k)
    return np.take_along_axis(scores, places, axis=1), np.take_along_axis(ids, places, axis=1)


def keys(scores: F32[np.ndarray, "R some"]) -> UInt32[np.ndarray, "R some"]:
    """Unsigned words in the order of the scores, the largest NaN; both zeros are one."""
    plain = np.where(np.isnan(scores), np.float32(np.nan), scores)
    bits = np.where(plain == 0, np.float32(0), plain).view(np.uint32)
    return np.where(bits >> 31 > 0, ~bits, bits | np.uint32(1 << 31))


KEY_OF_NOTHING = 0x007FFFFF
"""The key of -inf, which what is excluded has."""


def above(
    scores: Part, highest: F32[np.ndarray, " R"], borders: UInt32[np.ndarray, "R borders"]
) -> Above:
    """What lies above some borders in a part; tokens that are excluded never do."""
    borders = np.maximum(borders, np.uint32(KEY_OF_NOTHING))
    is_above = keys(scores)[:, None, :] > borders[:, :, None]
    units = in_units(weights(scores, highest))[:, None, :]
    return Above(is_above.sum(axis=2), (is_above * units).sum(axis=2))


def support(
    parts: Sequence[F32[np.ndarray, "R _"]],
    top_k: I32[np.ndarray, " R"],
    top_p: F32[np.ndarray, " R"],
    min_p: F32[np.ndarray, " R"],
) -> list[Bool[np.ndarray, "R _"]]:
    """Of each part, the tokens that `shared.spec.sampling.support` keeps of the whole row.

    The border is the smallest score with fewer than `top_k` tokens and less than `top_p` above it.
    It is asked for from its highest bits on; of the tokens that share it the first ones stay, as
    many as the bounds have room for. Masses are rounded to units, so a token whose bound is nearer
    than that may stay or go.
    """
    vocab = sum(part.shape[1] for part in parts)
    highest, total = norm([groups(part) for part in parts])
    most = np.where(top_k >= vocab, vocab + 1, np.maximum(top_k, 1))[:, None]
    mass = np.maximum(top_p, np.float32(TINY)) * total
    mass = np.where(top_p >= 1, np.float32(np.inf), mass)[:, None]

    def all_above(borders: Int[np.ndarray, "R borders"]) -> Above:
        each = [above(part, highest, borders.astype(np.uint32)) for part in parts]
        counts, masses = np.sum([x.counts for x in each], axis=0), [x.masses for x in each]
        return Above(counts, np.sum(masses, axis=0))

    border = np.zeros((len(top_k), 1), np.int64)
    ways = np.arange(1, 2**DIGIT)
    for shift in range(32 - DIGIT, -1, -DIGIT):
        # The border is in the first run of keys above whose last one too little lies for a bound.
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
