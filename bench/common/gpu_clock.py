"""Clock and power of a GPU while something is timed.

A GPU at its power limit lowers its clock, so times of long products need both numbers beside them.
They come from `nvidia-smi`, which ships with the driver and delays no kernel.
"""

import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

QUERY = ("index", "clocks.sm", "power.draw.instant")
PERIOD_MS = 50

Watched = dict[str, list[int]]
"""`sm_mhz` and `watts`: the medians of every card that was seen, in the order of their numbers."""


@contextmanager
def watched(on_gpu: bool) -> Iterator[Watched]:
    """Watches all cards of the machine; what it yields is filled at its end.

    It stays empty without a GPU, where nvidia-smi is not there, and where it tells no number.
    """
    found: Watched = {}
    process = _begun() if on_gpu else None
    try:
        yield found
    finally:
        if process is not None:
            process.terminate()
            found |= medians(process.communicate()[0])


def _begun() -> subprocess.Popen[str] | None:
    words = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    try:
        return subprocess.Popen([*words, f"--loop-ms={PERIOD_MS}"], **how)
    except OSError:
        return None


def medians(told: str) -> Watched:
    """Returns medians of lines `index, MHz, watts`; skips incomplete lines and invalid numbers."""
    seen: dict[int, list[tuple[float, float]]] = {}
    for line in told.splitlines():
        try:
            index, clock, power = map(float, line.split(","))
        except ValueError:
            continue
        seen.setdefault(int(index), []).append((clock, power))
    if not seen:
        return {}
    cards = [zip(*seen[index], strict=True) for index in sorted(seen)]
    clocks, powers = zip(
        *([round(statistics.median(x)) for x in card] for card in cards), strict=True
    )
    return {"sm_mhz": list(clocks), "watts": list(powers)}


def format_card(found: Watched) -> str:
    """For a terminal: the slowest clock, and the power of all."""
    if not found:
        return f"{'-':>6}{'-':>6}"
    return f"{min(found['sm_mhz']):6}{sum(found['watts']):6}"


HEADER = f"{'MHz':>6}{'watts':>6}"
