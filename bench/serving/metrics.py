"""Metrics of a run, counted as in the benches of SGLang and vLLM.

TTFT is the time to the first event with text, E2E the time to the end, ITL the time between two
such events (one may contain several tokens), TPOT the time per token after the first event.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.serving.client import Reply, Run

SPREAD = ("mean", "median", "p90", "p99")
TIMES = {
    "ttft_ms": "Time to first token (TTFT)",
    "itl_ms": "Inter-token latency (ITL)",
    "tpot_ms": "Time per output token (TPOT)",
    "e2e_ms": "End-to-end latency (E2E)",
}
"""Timed metrics, with their names for a reader."""

Counters = tuple[float, float] | None


def times_of(reply: Reply, streams: bool) -> dict[str, list[float]]:
    """The times of a reply by name, in milliseconds; what it has none of is empty."""
    found = {name: list[float]() for name in TIMES}
    found["e2e_ms"] = [1e3 * reply.ended_s]
    if not streams or not reply.times_s:
        return found
    first = reply.times_s[0]
    found["ttft_ms"] = [1e3 * first]
    found["itl_ms"] = (1e3 * np.diff(reply.times_s)).tolist()
    if reply.tokens > 1:
        found["tpot_ms"] = [1e3 * (reply.ended_s - first) / (reply.tokens - 1)]
    return found


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles; None of nothing."""
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    found = zip(SPREAD, (np.mean(values), p50, p90, p99), strict=True)
    return {name: round(float(value), 3) for name, value in found}


def summary(run: Run, streams: bool, before: Counters, after: Counters) -> dict[str, Any]:
    """All numbers of a run.

    Args:
      before, after: The server's acceptance counters, for responses without acceptance figures.
    """
    good = [reply for reply in run.replies if reply.error is None]
    times: dict[str, list[float]] = {name: [] for name in TIMES}
    for reply in good:
        for name, values in times_of(reply, streams).items():
            times[name] += values
    prompt, output = sum(r.prompt_tokens for r in good), sum(r.tokens for r in good)
    return {
        "completed": len(good),
        "errors": _errors(run.replies),
        "seconds": round(run.seconds, 3),
        "requests_per_s": round(len(good) / run.seconds, 3),
        "output_tokens_per_s": round(output / run.seconds, 1),
        "total_tokens_per_s": round((prompt + output) / run.seconds, 1),
        "concurrency": round(sum(r.ended_s for r in run.replies) / run.seconds, 2),
        "prompt_tokens": prompt,
        "output_tokens": output,
        **_acceptance(good, before, after),
        **{name: spread(values) for name, values in times.items()},
    }


def _errors(replies: Sequence[Reply]) -> dict[str, dict[str, Any]]:
    """Returns the number of errors of each kind, with the first message."""
    counts = Counter(reply.error for reply in replies if reply.error)
    first = {reply.error: reply.reason for reply in reversed(replies) if reply.error}
    return {kind: {"count": n, "first": first[kind]} for kind, n in counts.most_common()}


def _acceptance(good: Sequence[Reply], before: Counters, after: Counters) -> dict[str, Any]:
    """Returns the tokens per verify step with the bonus token, and the source of the number."""
    counts = [reply.histogram for reply in good if reply.histogram is not None]
    if counts:
        width = max(map(len, counts))
        sums = np.sum([np.pad(each, (0, width - len(each))) for each in counts], axis=0)
        steps = int(sums.sum())
        length = 1 + float(sums @ np.arange(len(sums))) / steps if steps else None
        found = {"source": "answers", "histogram": sums.tolist() if steps else None}
    elif before and after and after[0] > before[0]:
        length = 1 + (after[1] - before[1]) / (after[0] - before[0])
        found = {"source": "metrics", "histogram": None}
    else:
        length, found = None, {"source": None, "histogram": None}
    rounded = None if length is None else round(length, 4)
    return {"accept_length": rounded, "accepted": found}
