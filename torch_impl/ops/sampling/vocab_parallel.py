"""Vocab-parallel sampling over TP ranks; same as `shared.spec.vocab_parallel`.

A shard is first expanded to all tokens, with the tokens of other ranks excluded, so penalties and
noise apply to it like to a whole row. The other functions exchange a few partial results per row.
With TP 1 rows are whole and nothing is exchanged.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kernels.peer_buffers import MOST_WHOLE_WORDS
from shared.boundary.tp_group import SINGLE_RANK, TPGroup
from shared.models.sharded_range import VOCAB_GROUP, vocab_section
from shared.spec.vocab_parallel import BITS, DIGIT, GROUP_BITS, KEY_OF_NOTHING, TINY
from torch_impl.ops.collectives import all_gather

_HALF = BITS // 2


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary of an LM head, and the TP group over which it is sharded."""

    size: int
    group: TPGroup

    @property
    def share(self) -> int:
        """Returns the padded shard size of a rank; the last ranks may have fewer tokens."""
        return vocab_section(self.size).share(self.group.count)


ALL = Vocabulary(0, SINGLE_RANK)
"""Vocabulary of rows that one rank has whole, of any size."""


def first_of(vocabulary: Vocabulary) -> int:
    """Returns the first token id of this rank's shard."""
    return vocabulary.group.rank * vocabulary.share


def local(ids: Int[Tensor, "..."], vocabulary: Vocabulary) -> Int[Tensor, "..."]:
    """Returns the index of tokens in this rank's shard; out of range for tokens of other ranks."""
    return ids if vocabulary.group.is_single else ids - first_of(vocabulary)


def num_tokens_of(vocabulary: Vocabulary) -> int:
    """Returns the number of tokens in this rank's shard, without padding."""
    first, end = vocab_section(vocabulary.size).run(vocabulary.group.rank, vocabulary.group.count)
    return end - first


def is_parted(vocabulary: Vocabulary, rows: int) -> bool:
    """Returns True if kernels sample this many rows from partial results, not from whole rows."""
    return not vocabulary.group.is_single and rows * vocabulary.share > MOST_WHOLE_WORDS


def whole(
    part: Float[Tensor, "... share"], vocabulary: Vocabulary = ALL
) -> Float[Tensor, "... size"]:
    """Gathers the logits of all tokens."""
    if vocabulary.group.is_single:
        return part
    return all_gather.all_gather(vocabulary.group, part)[..., : vocabulary.size]


def part(rows: Float[Tensor, "... size"], vocabulary: Vocabulary) -> Float[Tensor, "... share"]:
    """Returns this rank's shard of the logits of all tokens."""
    group = vocabulary.group
    if group.is_single:
        return rows
    return all_gather.local_columns(group, _resized(rows, vocabulary.share * group.count))


def spread(
    part: Float[Tensor, "... share"], vocabulary: Vocabulary = ALL
) -> Float[Tensor, "... size"]:
    """Expands a shard to all tokens, with the tokens of other ranks excluded."""
    group = vocabulary.group
    if group.is_single:
        return part
    first, end = vocab_section(vocabulary.size).run(group.rank, group.count)
    rows = part.new_full((*part.shape[:-1], vocabulary.size), -torch.inf)
    rows[..., first:end] = part[..., : end - first]
    return rows


def moved(
    rows: Float[Tensor, "R size"],
    columns: Int[Tensor, " size"] | None,
    vocabulary: Vocabulary,
    target: Vocabulary,
) -> Float[Tensor, "R vocab"]:
    """Converts expanded shards of the draft vocabulary to shards of the target vocabulary.

    Whole rows are gathered only if the two vocabularies differ.
    """
    if columns is None and vocabulary == target:
        return rows
    group = vocabulary.group
    if not group.is_single:
        rows = _resized(all_gather.all_gather(group, part(rows, vocabulary)), rows.shape[1])
    rows = over_tokens(rows, columns, target.size)
    if group.is_single:
        return rows
    first, end = vocab_section(target.size).run(group.rank, group.count)
    return spread(rows[:, first:end], target)


def over_tokens(
    logits: Float[Tensor, "... size"], columns: Int[Tensor, " size"] | None, vocab: int
) -> Float[Tensor, "... vocab"]:
    """Maps a drafter's logits to the target vocabulary; -inf for tokens that it does not have.

    Without `columns` ids are equal in both; tokens that the target does not have are dropped.
    """
    if columns is None:
        return _resized(logits, vocab)
    scores = logits.new_full((*logits.shape[:-1], vocab), -torch.inf)
    return scores.index_copy_(-1, columns.long(), logits)


def _resized(rows: Float[Tensor, "... size"], size: int) -> Float[Tensor, "... resized"]:
    """Pads rows with excluded tokens or cuts them; rows of the right size are not copied."""
    spare = size - rows.shape[-1]
    return torch.nn.functional.pad(rows, (0, spare), value=-torch.inf) if spare else rows


def all_of(flags: Bool[Tensor, " R"], vocabulary: Vocabulary = ALL) -> Bool[Tensor, " R"]:
    """Returns True for rows whose flag is set on all ranks."""
    if vocabulary.group.is_single:
        return flags
    return all_gather.all_gather(vocabulary.group, flags.int()[:, None]).bool().all(dim=1)


def any_of(flags: Bool[Tensor, " R"], vocabulary: Vocabulary = ALL) -> Bool[Tensor, " R"]:
    """Returns True for rows whose flag is set on any rank."""
    return ~all_of(~flags, vocabulary)


def at(
    scores: Float[Tensor, "R size"], ids: Int[Tensor, "R some"], vocabulary: Vocabulary = ALL
) -> Float[Tensor, "R some"]:
    """Returns the logits of given tokens, from rows expanded by `spread`."""
    return owned(scores.gather(1, ids.long()), vocabulary)


def owned(own: Float[Tensor, "R some"], vocabulary: Vocabulary = ALL) -> Float[Tensor, "R some"]:
    """Returns the maximum over ranks, which is the owner's: the others have minus infinity."""
    group = vocabulary.group
    if group.is_single:
        return own
    return all_gather.all_gather(group, own).unflatten(1, (group.count, -1)).amax(dim=1)


def added(numbers: Int[Tensor, "R some"], vocabulary: Vocabulary = ALL) -> Int[Tensor, "R some"]:
    """Sums integers over all shards."""
    if vocabulary.group.is_single:
        return numbers
    each = all_gather.all_gather(vocabulary.group, numbers).unflatten(1, (-1, numbers.shape[1]))
    return each.sum(dim=1, dtype=numbers.dtype)


def mass(terms: Float[Tensor, "R size"], vocabulary: Vocabulary = ALL) -> Float[Tensor, " R"]:
    """Sums the positive terms, whose total is about 1."""
    terms = torch.where(terms > 0, terms, 0)
    return _of_units(added(_in_units(terms).sum(dim=1, keepdim=True), vocabulary))[:, 0]


class Norm(NamedTuple):
    """Softmax normaliser of a row; same fields as in the specification."""

    highest: Float[Tensor, " R"]
    total: Float[Tensor, " R"]


def norm(scores: Float[Tensor, "R size"], vocabulary: Vocabulary = ALL) -> Norm:
    """Computes the normaliser from the groups of all shards; each rank computes its own groups."""
    group, most = vocabulary.group, -(-scores.shape[1] // VOCAB_GROUP) * VOCAB_GROUP
    if not group.is_single:
        most = vocabulary.share * group.count
    tokens = all_gather.local_columns(group, _resized(scores, most)).unflatten(1, (-1, VOCAB_GROUP))
    peaks = tokens.amax(dim=2)
    units = (_weights(tokens, peaks) * 2.0**GROUP_BITS + 0.5).floor().int()
    masses = units.sum(dim=2, dtype=torch.int32).float() * 2.0**-GROUP_BITS
    peaks, masses = all_gather.all_gather(group, torch.stack([peaks, masses]))
    highest = peaks.amax(dim=1)
    shares = masses * _weights(peaks, highest) * (1 / VOCAB_GROUP)
    return Norm(highest, _of_units(_in_units(shares).sum(dim=1)) * VOCAB_GROUP)


def log_probabilities(scores: Float[Tensor, "R some"], norm: Norm) -> Float[Tensor, "R some"]:
    return scores - norm.highest[:, None] - norm.total.log()[:, None]


def best_of(
    scores: Float[Tensor, "R size"], k: int, vocabulary: Vocabulary = ALL
) -> tuple[Float[Tensor, "R k"], Int[Tensor, "R k"]]:
    """Returns the top k logits and their ids, best first; ties go to the lower id.

    Raises:
      ValueError: With TP, k exceeds the tokens that the first rank is certain to have.
    """
    if not vocabulary.group.is_single and k > VOCAB_GROUP:
        raise ValueError(f"ranks leave at most {VOCAB_GROUP} tokens of a row, got {k}")
    ids = _top(scores, k)
    values, group = scores.gather(1, ids.long()), vocabulary.group
    if group.is_single:
        return values, ids
    left = torch.stack([values.view(torch.int32), ids], dim=1)
    left = all_gather.all_gather(group, left).contiguous()
    values, ids = left[:, 0].view(torch.float32), left[:, 1]
    # Ties are in the order of ranks, which is the order of ids.
    places = _top(values, k).long()
    return values.gather(1, places), ids.gather(1, places)


def _top(x: Float[Tensor, "R some"], k: int) -> Int[Tensor, "R k"]:
    """Returns the indices of the k largest numbers; k = 1 needs no ranking."""
    if k == 1:
        return x.argmax(dim=1, keepdim=True).int()
    return _ranked(x).topk(k, dim=1).indices.int()


def _ranked(x: Float[Tensor, "R some"]) -> Int[Tensor, "R some"]:
    """Returns distinct integers in the order of the values, NaN first; ties by lower index.

    `torch.topk` breaks ties in any order, so it gets distinct values; a stable sort takes longer.
    """
    return (_keys(x) - 2**31 << 32) - torch.arange(x.shape[1], device=x.device)


def support(
    scores: Float[Tensor, "R size"],
    top_k: Int[Tensor, " R"],
    top_p: Float[Tensor, " R"],
    min_p: Float[Tensor, " R"],
    vocabulary: Vocabulary = ALL,
) -> Bool[Tensor, "R size"]:
    """Returns the tokens that pass top-k, top-p and min-p; sorts tokens for the thresholds."""
    R, size = scores.shape
    highest, total = norm(scores, vocabulary)
    most = torch.where(top_k >= size, size + 1, top_k.clamp(min=1))[:, None]
    bound = torch.where(top_p >= 1, torch.inf, top_p.clamp(min=TINY) * total)[:, None]
    keys, near = _keys(scores), _weights(scores, highest)
    ascending, order = keys.sort(dim=1)
    behind = _in_units(near).gather(1, order).flip(1).cumsum(1)
    behind = torch.nn.functional.pad(behind, (1, 0))  # mass of the last 0, 1, ... tokens

    def above(
        borders: Int[Tensor, "R some"],
    ) -> tuple[Int[Tensor, "R some"], Float[Tensor, "R some"]]:
        borders = borders.clamp(min=KEY_OF_NOTHING)
        counts = size - torch.searchsorted(ascending, borders, right=True)
        left = torch.cat([counts, behind.gather(1, counts)], dim=1)
        counts, units = added(left, vocabulary).chunk(2, dim=1)
        return counts, _of_units(units)

    def reaches(
        counts: Int[Tensor, "#R some"], masses: Float[Tensor, "R some"]
    ) -> Int[Tensor, "R 1"]:
        """Counts the positions with too many tokens or too much mass above."""
        return ((counts >= most) | (masses >= bound)).sum(dim=1, keepdim=True)

    border = keys.new_zeros(R, 1)
    if vocabulary.group.is_single:
        # The lowest token within the limits, if any is outside. Ties count as above earlier ties,
        # which changes the index but not the value found there. With zero mass none is within.
        counts = torch.arange(size - 1, -1, -1, device=keys.device)[None]
        lowest = reaches(counts, _of_units(behind[:, :-1].flip(1))).clamp(max=size - 1)
        border = torch.where(reaches(*above(border)) > 0, ascending.gather(1, lowest), border)
    else:
        ways = torch.arange(1, 2**DIGIT, device=keys.device)
        for shift in range(32 - DIGIT, -1, -DIGIT):
            border += reaches(*above(border + (ways << shift) - 1)) << shift
    counts, masses = above(border)
    is_tie = keys == border
    earlier = is_tie.cumsum(1) - is_tie.int() + _before(is_tie.sum(1, keepdim=True), vocabulary)
    has_room = (counts + earlier < most) & (masses + earlier * near < bound)
    stays = (keys > border) | (is_tie & has_room)
    return stays & ((near >= min_p[:, None]) | (min_p <= 0)[:, None])


def _before(own: Int[Tensor, "R 1"], vocabulary: Vocabulary = ALL) -> Int[Tensor, "R 1"]:
    """Sums the values of the ranks before this one."""
    group = vocabulary.group
    if group.is_single:
        return torch.zeros_like(own)
    return all_gather.all_gather(group, own)[:, : group.rank].sum(dim=1, keepdim=True)


def _keys(x: Float[Tensor, "R some"]) -> Int[Tensor, "R some"]:
    """Returns 32-bit keys in the order of the numbers, NaN largest; both zeros are equal."""
    bits = torch.where(x.isnan(), torch.nan, x + 0.0).view(torch.int32)  # one NaN, one zero
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() + 2**31


def _weights(
    scores: Float[Tensor, "... some"], highest: Float[Tensor, "..."]
) -> Float[Tensor, "... some"]:
    weights = (scores - highest[..., None]).exp()
    return torch.where(weights <= 1, weights, 0)


def _in_units(masses: Float[Tensor, "..."]) -> Int[Tensor, "..."]:
    whole = (masses * 2.0**_HALF).floor()
    rest = ((masses * 2.0**_HALF - whole) * 2.0**_HALF + 0.5).floor()
    return (whole.long() << _HALF) + rest.long()


def _of_units(units: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    high = ((units >> _HALF) & (2**_HALF - 1)).float() * 2.0**-_HALF
    low = (units & (2**_HALF - 1)).float() * 2.0**-BITS
    return (units >> BITS).float() + (high + low)
