"""Records checksums of logits, for `bench.quality.logit_bits`.

A checksum is the sum of the bit patterns of a row as integers, each times an odd number of its
place in the vocabulary, modulo 2^32. The checksums of shards add up to that of the row, so each
rank records its own shard and no logits are gathered.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kernels.rooms import module_in

FOLDER = "TANDEM_NOTED_SUMS"
"""Environment variable: the folder where processes of ranks write their sums when they end."""
_ODD = 2654435761
"""Multiplier of the weights of positions: the bits of the golden ratio."""
_BITS = 0xFFFFFFFF

Sums = list[int]


def torch_sum(logits: Any, first: int = 0, size: int = 0) -> Any:
    """The sum of each row, of int64 below 2^32.

    Args:
      logits: `[R, share]`, of any float type: what the first place holds is number `first`.
      size: Tokens of the whole row; further positions are not counted. 0: all count.
    """
    torch = import_module("torch")
    bits = logits.float().contiguous().view(torch.int32).long() & _BITS
    place = first + torch.arange(bits.shape[1], device=bits.device)
    weight = (2 * place + 1) * _ODD & _BITS
    if size:
        weight = weight * (place < size)
    # Two factors of 32 bits do not fit into 63: the high half of one is multiplied apart.
    low, high = bits & 0xFFFF, bits >> 16
    terms = low * weight + ((high * weight & 0xFFFF) << 16)
    return (terms & _BITS).sum(1) & _BITS


def jax_sum(logits: Any, first: Any = 0, size: int = 0) -> Any:
    """Same as `torch_sum`, of uint32."""
    jax = import_module("jax")
    numpy, uint32 = jax.numpy, "uint32"
    bits = jax.lax.bitcast_convert_type(logits.astype("float32"), numpy.uint32)
    place = numpy.asarray(first).astype(uint32) + numpy.arange(bits.shape[1], dtype=uint32)
    weight = (2 * place + 1) * numpy.uint32(_ODD)
    if size:
        weight = weight * (place < size)
    return numpy.sum(bits * weight, axis=1, dtype=uint32)


@contextmanager
def noted(backend: str, ranks: int = 1) -> Iterator[Callable[[], list[Sums]]]:
    """Within it every choice notes the sum of its first row.

    A head that a table joins with the choice is taken apart, for it leaves no logits of most rows;
    `bench.kernels.lm_head` holds the tokens of both against each other.

    Yields:
      What reads the sums so far, in the order of the choices, of each rank that this process has.
    """
    sampling, projection = (
        module_in(f"{backend}_impl.ops", name) for name in ("sampling", "lm_head")
    )
    choose, found = sampling.choose, [list[Any]() for _ in range(ranks)]

    def vocabulary_of(*rest: Any) -> Any:
        return rest[5] if len(rest) > 5 else sampling.ALL

    def in_torch(logits: Any, *rest: Any) -> Any:
        vocabulary = vocabulary_of(*rest)
        first = vocabulary.group.rank * logits.shape[1]
        found[0].append(torch_sum(logits[:1], first, vocabulary.size)[0])
        return choose(logits, *rest)

    def in_jax(logits: Any, *rest: Any) -> Any:
        jax, vocabulary, rank = import_module("jax"), vocabulary_of(*rest), 0
        if not vocabulary.group.is_single:
            rank = import_module("jax_impl.ops.collectives.all_gather").number(vocabulary.group)
        sums = jax_sum(logits[:1], rank * logits.shape[1], vocabulary.size)
        jax.debug.callback(lambda rank, sums: found[int(rank)].append(sums[0]), rank, sums)
        return choose(logits, *rest)

    def apart(projected: Any, *given: Any) -> Any:
        return sampling.choose(projection.scores(projected), *given)

    def read() -> list[Sums]:
        if backend == "jax":
            import_module("jax").effects_barrier()
        return [[int(x) for x in sums] for sums in found]

    with ExitStack() as patches:
        noting = in_torch if backend == "torch" else in_jax
        patches.enter_context(patch.object(sampling, "choose", noting))
        patches.enter_context(patch.object(projection, "choose", apart))
        if backend == "jax":  # programs that an earlier start has kept note nothing, nor can these
            kept = import_module("jax_impl.compilation_cache").CompilationCache
            for name in ("find", "keep"):
                patches.enter_context(patch.object(kept, name, lambda *_: None))
        yield read


def leave(read: Callable[[], list[Sums]]) -> None:
    """Writes what a process of a rank has noted where rank 0 looks for it."""
    path = Path(os.environ[FOLDER]) / f"{os.getpid()}.json"
    path.write_text(json.dumps(read()), encoding="utf-8")


def left(folder: Path) -> list[Sums]:
    """Returns the checksums that the other ranks' processes wrote."""
    return [sums for path in folder.iterdir() for sums in json.loads(path.read_text("utf-8"))]


def of_all(parts: list[Sums]) -> Sums:
    """The sums of whole rows.

    Raises:
      ValueError: Ranks have not noted the same number of choices.
    """
    return [sum(of_ranks) & _BITS for of_ranks in zip(*parts, strict=True)]
