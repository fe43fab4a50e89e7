"""Vocab-parallel sampling over TP ranks; same as `shared.spec.vocab_parallel`.

A shard is first expanded to all tokens, with the tokens of other ranks excluded, so penalties and
noise apply to it like to a whole row. The other functions exchange a few partial results per row.
With TP 1 rows are whole and nothing is exchanged.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int, UInt32

from jax_impl.ops import scan
from jax_impl.ops.collectives import all_gather
from kernels.peer_buffers import MOST_WHOLE_WORDS
from shared.boundary.tp_group import SINGLE_RANK, TPGroup
from shared.models.sharded_range import VOCAB_GROUP, vocab_section
from shared.spec.vocab_parallel import BITS, DIGIT, GROUP_BITS, KEY_OF_NOTHING, TINY

_BLOCK = 128
_HALF = BITS // 2
_LOW = 2**_HALF - 1

Border = UInt32[jax.Array, "R 1"]

Words = tuple[Int[jax.Array, "..."], Int[jax.Array, "..."], Int[jax.Array, "..."]]
"""A mass in units, as 64 bits would have it: whole, then two parts of `_HALF` bits."""


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary of an LM head, and the TP group over which it is sharded."""

    size: int
    group: TPGroup

    @property
    def share(self) -> int:
        """Returns the padded shard size of a rank; the last ranks may have fewer tokens."""
        return vocab_section(self.size).share(self.group.count)


# Static: it determines the traced program, like `TPGroup`.
jax.tree_util.register_dataclass(Vocabulary, data_fields=["group"], meta_fields=["size"])

ALL = Vocabulary(0, SINGLE_RANK)
"""Vocabulary of rows that one rank has whole, of any size."""


def first_of(vocabulary: Vocabulary) -> Int[jax.Array, ""]:
    """Returns the first token id of this rank's shard."""
    return all_gather.number(vocabulary.group) * vocabulary.share


def local(ids: Int[jax.Array, "..."], vocabulary: Vocabulary) -> Int[jax.Array, "..."]:
    """Returns the index of tokens in this rank's shard; out of range for tokens of other ranks."""
    return ids if vocabulary.group.is_single else ids - first_of(vocabulary)


def num_tokens_of(vocabulary: Vocabulary) -> Int[jax.Array, ""]:
    """Returns the number of tokens in this rank's shard, without padding."""
    return jnp.clip(vocabulary.size - first_of(vocabulary), 0, vocabulary.share)


def is_parted(vocabulary: Vocabulary, rows: int) -> bool:
    """Returns True if kernels sample this many rows from partial results, not from whole rows."""
    return not vocabulary.group.is_single and rows * vocabulary.share > MOST_WHOLE_WORDS


def whole(
    part: Float[jax.Array, "... share"], vocabulary: Vocabulary
) -> Float[jax.Array, "... size"]:
    """Gathers the logits of all tokens."""
    if vocabulary.group.is_single:
        return part
    return all_gather.all_gather(vocabulary.group, part)[..., : vocabulary.size]


def part(
    rows: Float[jax.Array, "... size"], vocabulary: Vocabulary
) -> Float[jax.Array, "... share"]:
    """Returns this rank's shard of the logits of all tokens."""
    group = vocabulary.group
    if group.is_single:
        return rows
    return all_gather.local_columns(group, _resized(rows, vocabulary.share * group.count))


def spread(
    part: Float[jax.Array, "... share"], vocabulary: Vocabulary
) -> Float[jax.Array, "... size"]:
    """Expands a shard to all tokens, with the tokens of other ranks excluded."""
    if vocabulary.group.is_single:
        return part
    shape = (*part.shape[:-1], vocabulary.share * vocabulary.group.count)
    rows, first = jnp.full(shape, -jnp.inf, part.dtype), first_of(vocabulary)
    rows = lax.dynamic_update_slice_in_dim(rows, part, first, axis=-1)
    return rows[..., : vocabulary.size]


def moved(
    rows: Float[jax.Array, "R size"],
    columns: Int[jax.Array, " size"] | None,
    vocabulary: Vocabulary,
    target: Vocabulary,
) -> Float[jax.Array, "R vocab"]:
    """Converts expanded shards of the draft vocabulary to shards of the target vocabulary.

    Whole rows are gathered only if the two vocabularies differ.
    """
    if columns is None and vocabulary.size == target.size:
        return rows
    group = vocabulary.group
    if group.is_single:
        return over_tokens(rows, columns, target.size)
    every = _resized(all_gather.all_gather(group, part(rows, vocabulary)), rows.shape[1])
    every = over_tokens(every, columns, target.size)
    from_first = jnp.arange(target.size) - first_of(target)
    return jnp.where((from_first >= 0) & (from_first < target.share), every, -jnp.inf)


def over_tokens(
    logits: Float[jax.Array, "... size"], columns: Int[jax.Array, " size"] | None, vocab: int
) -> Float[jax.Array, "... vocab"]:
    """Maps a drafter's logits to the target vocabulary; -inf for tokens that it does not have.

    Without `columns` ids are equal in both; tokens that the target does not have are dropped.
    """
    if columns is None:
        return _resized(logits, vocab)
    nothing = jnp.full((*logits.shape[:-1], vocab), -jnp.inf, logits.dtype)
    return nothing.at[..., columns].set(logits)


def _resized(rows: Float[jax.Array, "... size"], size: int) -> Float[jax.Array, "... resized"]:
    missing = size - rows.shape[-1]
    if missing <= 0:
        return rows[..., :size]
    filled = [(0, 0)] * (rows.ndim - 1) + [(0, missing)]
    return jnp.pad(rows, filled, constant_values=-jnp.inf)


def all_of(flags: Bool[jax.Array, " R"], vocabulary: Vocabulary = ALL) -> Bool[jax.Array, " R"]:
    """Returns True for rows whose flag is set on all ranks."""
    if vocabulary.group.is_single:
        return flags
    return (all_gather.all_gather(vocabulary.group, flags.astype(jnp.int32)[:, None]) > 0).all(
        axis=1
    )


def any_of(flags: Bool[jax.Array, " R"], vocabulary: Vocabulary = ALL) -> Bool[jax.Array, " R"]:
    """Returns True for rows whose flag is set on any rank."""
    return ~all_of(~flags, vocabulary)


def at(
    scores: Float[jax.Array, "R size"], ids: Int[jax.Array, "R some"], vocabulary: Vocabulary = ALL
) -> Float[jax.Array, "R some"]:
    """Returns the logits of given tokens, from rows expanded by `spread`."""
    return owned(jnp.take_along_axis(scores, ids, axis=1), vocabulary)


def owned(
    own: Float[jax.Array, "R some"], vocabulary: Vocabulary = ALL
) -> Float[jax.Array, "R some"]:
    """Returns the maximum over ranks, which is the owner's: the others have minus infinity."""
    group = vocabulary.group
    if group.is_single:
        return own
    return all_gather.all_gather(group, own).reshape(len(own), group.count, -1).max(axis=1)


def added(
    numbers: Int[jax.Array, "R some"], vocabulary: Vocabulary = ALL
) -> Int[jax.Array, "R some"]:
    """Sums integers over all shards."""
    if vocabulary.group.is_single:
        return numbers
    every = all_gather.all_gather(vocabulary.group, numbers)
    return every.reshape(len(numbers), -1, numbers.shape[1]).sum(axis=1)


def mass(terms: Float[jax.Array, "R size"], vocabulary: Vocabulary = ALL) -> Float[jax.Array, " R"]:
    """Sums the positive terms, whose total is about 1."""
    words = _sum(*_in_units(jnp.where(terms > 0, terms, 0)))
    left = added(jnp.stack(words, axis=1), vocabulary)
    return _of_units(_carried(left[:, 0], left[:, 1], left[:, 2]))


class Norm(NamedTuple):
    """Softmax normaliser of a row; same fields as in the specification."""

    highest: Float[jax.Array, " R"]
    total: Float[jax.Array, " R"]


def norm(scores: Float[jax.Array, "R size"], vocabulary: Vocabulary = ALL) -> Norm:
    """Computes the normaliser from the groups of all shards; each rank computes its own groups."""
    group, most = vocabulary.group, -(-scores.shape[1] // VOCAB_GROUP) * VOCAB_GROUP
    if not group.is_single:
        most = vocabulary.share * group.count
    tokens = all_gather.local_columns(group, _resized(scores, most)).reshape(
        len(scores), -1, VOCAB_GROUP
    )
    peaks = tokens.max(axis=2)
    units = jnp.floor(_weights(tokens, peaks) * 2.0**GROUP_BITS + 0.5).astype(jnp.int32)
    masses = units.sum(axis=2).astype(jnp.float32) * 2.0**-GROUP_BITS
    peaks, masses = all_gather.all_gather(group, jnp.stack([peaks, masses]))
    highest = peaks.max(axis=1)
    shares = masses * _weights(peaks, highest) * (1 / VOCAB_GROUP)
    return Norm(highest, _of_units(_sum(*_in_units(shares))) * VOCAB_GROUP)


def log_probabilities(scores: Float[jax.Array, "R some"], norm: Norm) -> Float[jax.Array, "R some"]:
    """Computes the log probabilities of some tokens of each row."""
    return scores - norm.highest[:, None] - jnp.log(norm.total)[:, None]


def best_of(
    scores: Float[jax.Array, "R size"], k: int, vocabulary: Vocabulary = ALL
) -> tuple[Float[jax.Array, "R k"], Int[jax.Array, "R k"]]:
    """Returns the top k logits and their ids, best first; ties go to the lower id.

    Raises:
      ValueError: With TP, k exceeds the tokens that the first rank is certain to have.
    """
    group = vocabulary.group
    if not group.is_single and k > VOCAB_GROUP:
        raise ValueError(f"ranks leave at most {VOCAB_GROUP} tokens of a row, got {k}")
    ids = _top(scores, k)
    values = jnp.take_along_axis(scores, ids, axis=1)
    if group.is_single:
        return values, ids
    values, ids = all_gather.all_gather(group, values), all_gather.all_gather(group, ids)
    # Ties are in the order of ranks, which is the order of ids.
    places = _top(values, k)
    return jnp.take_along_axis(values, places, axis=1), jnp.take_along_axis(ids, places, axis=1)


def _top(x: Float[jax.Array, "R some"], k: int) -> Int[jax.Array, "R k"]:
    """Returns the indices of the k largest numbers, NaN first; nine times faster than argmax."""
    if k > 1:
        return lax.top_k(x, k)[1].astype(jnp.int32)
    # XLA's maximum may drop NaN if all other values are -inf.
    plain, size = jnp.where(jnp.isnan(x), jnp.inf, x), x.shape[1]
    is_first = plain == plain.max(axis=1, keepdims=True)
    return jnp.where(is_first, jnp.arange(size, dtype=jnp.int32), size).min(axis=1)[:, None]


def support(
    scores: Float[jax.Array, "R size"],
    top_k: Int[jax.Array, " R"],
    top_p: Float[jax.Array, " R"],
    min_p: Float[jax.Array, " R"],
    vocabulary: Vocabulary = ALL,
) -> Bool[jax.Array, "R size"]:
    """Returns the tokens that pass top-k, top-p and min-p, each of the full distribution."""
    size = scores.shape[1]
    highest, total = norm(scores, vocabulary)
    most = jnp.where(top_k >= size, size + 1, jnp.maximum(top_k, 1))[:, None]
    bound = jnp.where(top_p >= 1, jnp.inf, jnp.maximum(top_p, TINY) * total)[:, None]
    keys, near = _keys(scores), _weights(scores, highest)
    units = _in_units(near)

    def above(
        borders: UInt32[jax.Array, "R some"],
    ) -> tuple[Int[jax.Array, "R some"], Float[jax.Array, "R some"]]:
        borders = jnp.maximum(borders, KEY_OF_NOTHING)
        is_above = keys[:, None] > borders[:, :, None]
        words = _sum(*(jnp.where(is_above, half[:, None], 0) for half in units))
        left = jnp.concatenate([is_above.sum(axis=2, dtype=jnp.int32), *words], axis=1)
        counts, *words = jnp.split(added(left, vocabulary), 4, axis=1)
        return counts, _of_units(_carried(*words))

    # A round costs an exchange with TP, and without TP a pass over the tokens per threshold.
    digit = 1 if vocabulary.group.is_single else DIGIT
    ways = jnp.arange(1, 2**digit, dtype=jnp.uint32)

    def find(border: Border, shift: UInt32[jax.Array, ""]) -> tuple[Border, None]:
        counts, masses = above(border + (ways << shift) - 1)
        reaches = (counts >= most) | (masses >= bound)
        return border + (reaches.sum(axis=1, keepdims=True, dtype=jnp.uint32) << shift), None

    shifts = jnp.arange(32 - digit, -1, -digit).astype(jnp.uint32)
    border, _ = scan(find, jnp.zeros((len(scores), 1), jnp.uint32), shifts)
    counts, masses = above(border)
    is_tie = keys == border
    ties = is_tie.astype(jnp.float32)
    earlier = _running_sum(ties) - ties
    earlier += _before(is_tie.sum(axis=1, keepdims=True, dtype=jnp.int32), vocabulary)
    has_room = (counts + earlier < most) & (masses + earlier * near < bound)
    stays = (keys > border) | (is_tie & has_room)
    return stays & ((near >= min_p[:, None]) | (min_p <= 0)[:, None])


def _running_sum(x: Float[jax.Array, "R size"]) -> Float[jax.Array, "R size"]:
    """Computes the cumulative sum over axis 1 in blocks, with few operations for any vocabulary."""
    R, size = x.shape
    num_blocks = -(-size // _BLOCK)
    blocks = jnp.pad(x, ((0, 0), (0, num_blocks * _BLOCK - size))).reshape(R, num_blocks, _BLOCK)
    upto = jnp.triu(jnp.ones((_BLOCK, _BLOCK), jnp.float32))
    sums = jnp.einsum("rbi,ij->rbj", blocks, upto, precision=lax.Precision.HIGHEST)
    if num_blocks > 1:
        earlier = _running_sum(sums[:, :, -1]) - sums[:, :, -1]
        sums = sums + earlier[:, :, None]
    return sums.reshape(R, -1)[:, :size]


def _before(own: Int[jax.Array, "R 1"], vocabulary: Vocabulary) -> Int[jax.Array, "R 1"]:
    """Sums the values of the ranks before this one."""
    group = vocabulary.group
    if group.is_single:
        return jnp.zeros_like(own)
    is_before = jnp.arange(group.count) < all_gather.number(group)
    return jnp.where(is_before, all_gather.all_gather(group, own), 0).sum(axis=1, keepdims=True)


def _keys(x: Float[jax.Array, "R some"]) -> UInt32[jax.Array, "R some"]:
    """Returns uint32 keys in the order of the numbers, NaN largest; both zeros are equal."""
    plain = jnp.where(jnp.isnan(x), jnp.nan, jnp.where(x == 0, 0, x))
    bits = lax.bitcast_convert_type(plain, jnp.uint32)
    return jnp.where(bits >> 31 > 0, ~bits, bits | jnp.uint32(1 << 31))


def _weights(
    scores: Float[jax.Array, "... some"], highest: Float[jax.Array, "..."]
) -> Float[jax.Array, "... some"]:
    """Computes weights relative to the highest logit; 0 if either is NaN."""
    weights = jnp.exp(scores - highest[..., None])
    return jnp.where(weights <= 1, weights, 0)


def _in_units(
    masses: Float[jax.Array, "*shape"],
) -> tuple[Int[jax.Array, "*shape"], Int[jax.Array, "*shape"]]:
    """Splits masses of at most 1 into the upper half of their bits (at most 2^15) and the lower."""
    scaled = masses * 2.0**_HALF
    high = jnp.floor(scaled)
    low = jnp.floor((scaled - high) * 2.0**_HALF + 0.5)
    return high.astype(jnp.int32), low.astype(jnp.int32)


def _sum(high: Int[jax.Array, "*rows n"], low: Int[jax.Array, "*rows n"]) -> Words:
    """Sums over the last axis in runs whose sums fit in 32 bits."""
    run = min(2**_HALF, high.shape[-1])
    filled = [(0, 0)] * (high.ndim - 1) + [(0, -high.shape[-1] % run)]
    by_run = [jnp.pad(x, filled).reshape(*x.shape[:-1], -1, run) for x in (high, low)]
    zero = jnp.zeros(by_run[0].shape[:-1], jnp.int32)
    words = _carried(zero, *(x.sum(axis=-1, dtype=jnp.int32) for x in by_run))
    return _carried(*(word.sum(axis=-1, dtype=jnp.int32) for word in words))


def _carried(
    whole: Int[jax.Array, "..."], high: Int[jax.Array, "..."], low: Int[jax.Array, "..."]
) -> Words:
    high += low >> _HALF
    return whole + (high >> _HALF), high & _LOW, low & _LOW


def _of_units(words: Words) -> Float[jax.Array, "..."]:
    whole, high, low = (word.astype(jnp.float32) for word in words)
    return whole + (high * 2.0**-_HALF + low * 2.0**-BITS)
