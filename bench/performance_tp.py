"""The tables of `bench.performance` that say what several GPUs gain, and what each holds."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.quality.accuracy_table import MISSING
from tests.support.op_sides import SIDES

Line = dict[str, Any]
Lines = dict[tuple[str, int], Line]
"""By backend and number of ranks."""


def ranked_steps(lines: Sequence[Line]) -> Iterator[list[str]]:
    """A line for each drafter and batch: of each backend, milliseconds by ranks.

    Beside them what a rank's bytes take, at the rate of a large copy.

    Args:
      lines: Of one model, as `bench.steps.decode_steps` writes them.
    """
    counts = _counts(lines)
    limits = [f"bytes, {count}" for count in counts]
    yield [*_header(lines), *limits, "texts"]
    for row, same in _rows(lines, counts, _milliseconds):
        bytes_ms = [_bytes_ms(same, count) for count in counts]
        yield [*row, *bytes_ms, _texts(list(same.values()))]


def ranked_memory(lines: Sequence[Line]) -> Iterator[list[str]]:
    """A line for each drafter and batch: gigabytes of a GPU, as planned and as held.

    JAX counts the peak of a process, so that of a start which held less than one before it is not
    its own, and is left out.

    Args:
      lines: As of `ranked_steps`.
    """
    yield _header(lines)
    of_its_own = {line["peak_bytes"]: line for line in reversed(lines)}
    own = [line for line in lines if of_its_own[line["peak_bytes"]] is line]
    for row, _ in _rows(own, _counts(lines), _gigabytes):
        yield row


def _counts(lines: Sequence[Line]) -> list[int]:
    return sorted({line["ranks"] for line in lines})


def _header(lines: Sequence[Line]) -> list[str]:
    told = [f"{side}, {count}" for side in SIDES for count in _counts(lines)]
    return ["drafts", "batch", *told]


def _rows(
    lines: Sequence[Line], counts: Sequence[int], told: Callable[[Lines, str, int], str]
) -> Iterator[tuple[list[str], Lines]]:
    """A row of cells for each drafter and batch, and its lines."""
    found: dict[tuple[str, int], Lines] = {}
    for line in lines:
        same = found.setdefault((line["drafts"], line["batch"]), {})
        same[line["backend"], line["ranks"]] = line
    for (drafts, batch), same in sorted(found.items(), key=lambda item: item[0]):
        cells = [
            told(same, side, count) if (side, count) in same else MISSING
            for side in SIDES
            for count in counts
        ]
        yield [drafts, str(batch), *cells], same


def _milliseconds(same: Lines, side: str, count: int) -> str:
    line, alone = same[side, count], same.get((side, 1))
    gain = f" ({alone['ms'] / line['ms']:.2f} x)" if alone and count > 1 else ""
    return f"{line['ms']:.2f}{gain}"


def _gigabytes(same: Lines, side: str, count: int) -> str:
    line = same[side, count]
    return f"{line['planned_bytes'] / 1e9:.2f} / {line['peak_bytes'] / 1e9:.2f}"


def _bytes_ms(same: Lines, count: int) -> str:
    """By the rate of one backend: both copy alike."""
    told = [same[side, count]["limit_ms"] for side in SIDES if (side, count) in same]
    return f"{told[0]:.2f}" if told else MISSING


def _texts(lines: Sequence[Line]) -> str:
    compared = [line["texts"] for line in lines if line["texts"]]
    if not compared:
        return MISSING
    return "equal" if all(texts["equal"] for texts in compared) else "DIFFER"
