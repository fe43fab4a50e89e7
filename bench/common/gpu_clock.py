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
"""`sm_mhz` and `watts`: medians of every GPU, by index."""


@contextmanager
def watched(on_gpu: bool) -> Iterator[Watched]:
    """Records all GPUs of the machine; the yielded record is filled at the end.

    It stays empty without a GPU, without nvidia-smi, and if nvidia-smi reports no numbers.
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


def medians(output: str) -> Watched:
    """Returns medians of lines `index, MHz, watts`; skips incomplete lines and invalid numbers."""
    seen: dict[int, list[tuple[float, float]]] = {}
    for line in output.splitlines():
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
    """Returns the lowest clock and the total power, for a terminal."""
    if not found:
        return f"{'-':>6}{'-':>6}"
    return f"{min(found['sm_mhz']):6}{sum(found['watts']):6}"


HEADER = f"{'MHz':>6}{'watts':>6}"
