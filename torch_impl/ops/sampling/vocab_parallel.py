"""As `shared.spec.vocab_parallel`, in torch: a rank's part of a row, and what all parts make
together.

A part is spread over all tokens first: those of other ranks are excluded in it, so whatever is
done to a row, such as penalties and noise, is done to a part alike. The rest exchanges what is
left, in few words a row. One rank alone has whole rows and exchanges nothing.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kernels.peer_buffers import MOST_WHOLE_WORDS
from shared.boundary.tp_group import ALONE, Ranks
from shared.models.tp_sharding import VOCAB_GROUP, vocab_section
from shared.spec.vocab_parallel import BITS, DIGIT, GROUP_BITS, KEY_OF_NOTHING, TINY
from torch_impl.ops.collectives import all_gather

_HALF = BITS // 2


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a head, and the ranks that score them between them."""

    size: int
    group: Ranks

    @property
    def share(self) -> int:
        """Tokens of a rank; the last ones may have less, filled up with scores of no token."""
        return vocab_section(self.size).share(self.group.count)


ALL = Vocabulary(0, ALONE)
"""Of rows that one rank has whole, however many tokens there are."""


def first_of(vocabulary: Vocabulary) -> int:
    """The first token of this rank's part, if there were as many as places."""
    return vocabulary.group.rank * vocabulary.share


def num_tokens_of(vocabulary: Vocabulary) -> int:
    """How many of this rank's places are tokens."""
    first, end = vocab_section(vocabulary.size).run(vocabulary.group.rank, vocabulary.group.count)
    return end - first


def is_parted(vocabulary: Vocabulary, rows: int) -> bool:
    """Whether kernels choose so many rows from what parts leave, and not from whole rows."""
    return not vocabulary.group.is_alone and rows * vocabulary.share > MOST_WHOLE_WORDS


def whole(
    part: Float[Tensor, "... share"], vocabulary: Vocabulary = ALL
) -> Float[Tensor, "... size"]:
    """The scores of all tokens."""
    if vocabulary.group.is_alone:
        return part
    return all_gather.gathered(vocabulary.group, part)[..., : vocabulary.size]


def part(rows: Float[Tensor, "... size"], vocabulary: Vocabulary) -> Float[Tensor, "... share"]:
    """This rank's part of the scores of all tokens."""
    group = vocabulary.group
    if group.is_alone:
        return rows
    return all_gather.own(group, _resized(rows, vocabulary.share * group.count))


def spread(
    part: Float[Tensor, "... share"], vocabulary: Vocabulary = ALL
) -> Float[Tensor, "... size"]:
    """A part in its place among all tokens, of which those of other ranks are excluded."""
    group = vocabulary.group
    if group.is_alone:
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
    """What ranks have spread of a drafter's tokens, each with its part of the target's instead.

    Whole rows are gathered only where a drafter's vocabulary is not the target's.
    """
    if columns is None and vocabulary == target:
        return rows
    group = vocabulary.group
    if not group.is_alone:
        rows = _resized(all_gather.gathered(group, part(rows, vocabulary)), rows.shape[1])
    rows = over_tokens(rows, columns, target.size)
    if group.is_alone:
        return rows
    first, end = vocab_section(target.size).run(group.rank, group.count)
    return spread(rows[:, first:end], target)


def over_tokens(
    logits: Float[Tensor, "... size"], columns: Int[Tensor, " size"] | None, vocab: int
) -> Float[Tensor, "... vocab"]:
    """A drafter's logits over the target's vocabulary; -inf where it has no token.

    Without columns a token has the same id in both; those that the target lacks are left out.
    """
    if columns is None:
        return _resized(logits, vocab)
    scores = logits.new_full((*logits.shape[:-1], vocab), -torch.inf)
    return scores.index_copy_(-1, columns.long(), logits)


def _resized(rows: Float[Tensor, "... size"], size: int) -> Float[Tensor, "... resized"]:
    """Filled up with what is excluded, or cut; rows of that size are not copied."""
    spare = size - rows.shape[-1]
    return torch.nn.functional.pad(rows, (0, spare), value=-torch.inf) if spare else rows


def all_of(flags: Bool[Tensor, " R"], vocabulary: Vocabulary = ALL) -> Bool[Tensor, " R"]:
    """Rows whose parts all have the flag."""
    if vocabulary.group.is_alone:
        return flags
    return all_gather.gathered(vocabulary.group, flags.int()[:, None]).bool().all(dim=1)


def any_of(flags: Bool[Tensor, " R"], vocabulary: Vocabulary = ALL) -> Bool[Tensor, " R"]:
    """Rows of which some part has the flag."""
    return ~all_of(~flags, vocabulary)


def at(
    scores: Float[Tensor, "R size"], ids: Int[Tensor, "R some"], vocabulary: Vocabulary = ALL
) -> Float[Tensor, "R some"]:
    """The scores of named tokens, which are the largest that a rank has of them: their owner's."""
    own, group = scores.gather(1, ids.long()), vocabulary.group
    if group.is_alone:
        return own
    return all_gather.gathered(group, own).unflatten(1, (group.count, -1)).amax(dim=1)


def added(numbers: Int[Tensor, "R some"], vocabulary: Vocabulary = ALL) -> Int[Tensor, "R some"]:
    """Whole numbers of all parts, added."""
    if vocabulary.group.is_alone:
        return numbers
    each = all_gather.gathered(vocabulary.group, numbers).unflatten(1, (-1, numbers.shape[1]))
    return each.sum(dim=1, dtype=numbers.dtype)


def mass(terms: Float[Tensor, "R size"], vocabulary: Vocabulary = ALL) -> Float[Tensor, " R"]:
    """The sum of terms that together are about 1, but for those that are not above 0."""
    terms = torch.where(terms > 0, terms, 0)
    return _of_units(added(_in_units(terms).sum(dim=1, keepdim=True), vocabulary))[:, 0]


class Norm(NamedTuple):
    """What makes probabilities of a row's scores; fields as in the specification."""

    highest: Float[Tensor, " R"]
    total: Float[Tensor, " R"]


def norm(scores: Float[Tensor, "R size"], vocabulary: Vocabulary = ALL) -> Norm:
    """Of the groups of all parts, of which each rank makes its own."""
    group, most = vocabulary.group, -(-scores.shape[1] // VOCAB_GROUP) * VOCAB_GROUP
    if not group.is_alone:
        most = vocabulary.share * group.count
    tokens = all_gather.own(group, _resized(scores, most)).unflatten(1, (-1, VOCAB_GROUP))
    peaks = tokens.amax(dim=2)
    units = (_weights(tokens, peaks) * 2.0**GROUP_BITS + 0.5).floor().int()
    masses = units.sum(dim=2, dtype=torch.int32).float() * 2.0**-GROUP_BITS
    peaks, masses = all_gather.gathered(group, torch.stack([peaks, masses]))
    highest = peaks.amax(dim=1)
    shares = masses * _weights(peaks, highest) * (1 / VOCAB_GROUP)
    return Norm(highest, _of_units(_in_units(shares).sum(dim=1)) * VOCAB_GROUP)


def log_probabilities(scores: Float[Tensor, "R some"], norm: Norm) -> Float[Tensor, "R some"]:
    return scores - norm.highest[:, None] - norm.total.log()[:, None]


def best_of(
    scores: Float[Tensor, "R size"], k: int, vocabulary: Vocabulary = ALL
) -> tuple[Float[Tensor, "R k"], Int[Tensor, "R k"]]:
    """The k largest scores and their ids, best first and of equals the lower id.

    Raises:
      ValueError: Of several ranks, more are asked for than the first of them has for certain.
    """
    if not vocabulary.group.is_alone and k > VOCAB_GROUP:
        raise ValueError(f"ranks leave at most {VOCAB_GROUP} tokens of a row, got {k}")
    ids = _top(scores, k)
    values, group = scores.gather(1, ids.long()), vocabulary.group
    if group.is_alone:
        return values, ids
    left = torch.stack([values.view(torch.int32), ids], dim=1)
    left = all_gather.gathered(group, left).contiguous()
    values, ids = left[:, 0].view(torch.float32), left[:, 1]
    # Equals stand in the order of the ranks, so in that of their ids.
    places = _top(values, k).long()
    return values.gather(1, places), ids.gather(1, places)


def _top(x: Float[Tensor, "R some"], k: int) -> Int[Tensor, "R k"]:
    """The places of the k largest numbers; one needs no ranking."""
    if k == 1:
        return x.argmax(dim=1, keepdim=True).int()
    return _ranked(x).topk(k, dim=1).indices.int()


def _ranked(x: Float[Tensor, "R some"]) -> Int[Tensor, "R some"]:
    """Whole numbers in the order of the values, NaN first, the earlier place before its equals.

    `torch.topk` breaks ties in any order, and here are none; a stable sort of all takes longer.
    """
    return (_keys(x) - 2**31 << 32) - torch.arange(x.shape[1], device=x.device)


def support(
    scores: Float[Tensor, "R size"],
    top_k: Int[Tensor, " R"],
    top_p: Float[Tensor, " R"],
    min_p: Float[Tensor, " R"],
    vocabulary: Vocabulary = ALL,
) -> Bool[Tensor, "R size"]:
    """As the specification; what lies above a border is found among sorted tokens."""
    R, size = scores.shape
    highest, total = norm(scores, vocabulary)
    most = torch.where(top_k >= size, size + 1, top_k.clamp(min=1))[:, None]
    bound = torch.where(top_p >= 1, torch.inf, top_p.clamp(min=TINY) * total)[:, None]
    keys, near = _keys(scores), _weights(scores, highest)
    ascending, order = keys.sort(dim=1)
    behind = _in_units(near).gather(1, order).flip(1).cumsum(1)
    behind = torch.nn.functional.pad(behind, (1, 0))  # of the last 0, 1, ... tokens

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
        """How often too much lies above."""
        return ((counts >= most) | (masses >= bound)).sum(dim=1, keepdim=True)

    border = keys.new_zeros(R, 1)
    if vocabulary.group.is_alone:
        # The lowest token with room, if not all have. Equals count as above those before them here,
        # which changes the place and not the number that is found there. Without any mass none has.
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
    """What the ranks before this one have together."""
    group = vocabulary.group
    if group.is_alone:
        return torch.zeros_like(own)
    return all_gather.gathered(group, own)[:, : group.rank].sum(dim=1, keepdim=True)


def _keys(x: Float[Tensor, "R some"]) -> Int[Tensor, "R some"]:
    """Words of 32 bits in the order of the numbers, the largest NaN; both zeros are one."""
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
