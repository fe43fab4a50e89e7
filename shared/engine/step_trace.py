"""Step trace of a request: draft tokens, accepted path and times."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shared.boundary.backend import StepResult
from shared.boundary.program import StepKind
from shared.engine.request import CORPUS, DRAFT, MERGED, NGRAM, PLAIN, PREFILL, StepTrace
from shared.engine.rows import ScheduledRows


def trace_of(
    rows: ScheduledRows,
    result: StepResult,
    row: int,
    tokens: Sequence[int],
    number: int,
    began: float,
) -> StepTrace:
    """Returns the trace of one row of a finished step.

    Args:
      rows, result, row: The step, its result, and the row.
      tokens: Tokens of the row before truncation.
      number: Number of the step.
      began: Time of submission, by the monotonic clock.
    """
    now, request = time.monotonic(), rows.requests[row]
    device = result.device_seconds
    source, drafts, parents, origins = PREFILL, [], [], []
    if rows.work is StepKind.DECODE:
        count = int(result.num_nodes[row])
        drafts = result.drafts[row, 1:count].tolist()
        parents = result.parents[row, 1:count].tolist()
        source, origins = PLAIN, origins_of(rows, result, row)
        if drafts:
            source = DRAFT if rows.corpus_nodes is None else MERGED if DRAFT in origins else NGRAM
    return StepTrace(
        number=number,
        source=source,
        num_rows=len(rows.requests),
        at_ms=1e3 * (now - request.began),
        host_ms=1e3 * (now - began),
        device_ms=None if device is None else 1e3 * device,
        drafts=drafts,
        parents=parents,
        path=accepted_path(drafts, parents, tokens[:-1]),
        origins=origins,
    )


def origins_of(rows: ScheduledRows, result: StepResult, row: int) -> list[str]:
    """Returns the source of each draft node of a row's tree, see `StepTrace`."""
    count = int(result.num_nodes[row])
    if rows.corpus_nodes is None:
        return [DRAFT] * (count - 1)
    of_corpora, copied = set(rows.corpus_nodes(row)), list(range(count))
    drafted = [0] * count
    if result.origins is not None:  # n-gram drafts were merged into the drafter's trees
        copied = result.origins.copied[row, :count].tolist()
        drafted = result.origins.drafted[row, :count].tolist()
    return [
        DRAFT if drafted[node] else CORPUS if copied[node] in of_corpora else NGRAM
        for node in range(1, count)
    ]


def accepted_path(
    drafts: Sequence[int], parents: Sequence[int], tokens: Sequence[int]
) -> list[int]:
    """Returns the nodes with these tokens, from the root on; siblings have different tokens.

    It ends where no node has the next token, without an error, because tracing must not fail a
    step.
    """
    path, node = [], 0
    for token in tokens:
        # A child comes after its parent; entry n - 1 of the lists belongs to node n.
        children = range(node + 1, len(drafts) + 1)
        below = (n for n in children if parents[n - 1] == node and drafts[n - 1] == token)
        node = next(below, 0)
        if node == 0:
            break
        path.append(node)
    return path
