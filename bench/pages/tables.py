"""Tables of decode steps, prompts and prefix-cache hits, backends side by side."""

from collections.abc import Iterator, Sequence

from bench.pages.results import (
    INDEX,
    SIMULATED,
    Found,
    Key,
    Line,
    Peers,
    Subject,
    by_key,
    cell,
    lines_of,
    ms,
    outputs,
    ratio,
    revisions,
    table,
)
from bench.quality.accuracy_table import MISSING
from tests.support.op_sides import SIDES


def bare(drafts: str) -> str:
    """Returns the drafter without simulated acceptance and without the place of its index."""
    return " ".join(word for word in drafts.split(" ") if not word.startswith((SIMULATED, INDEX)))


def number(value: float | None) -> str:
    """Shows a number of another engine."""
    return MISSING if value is None else f"{value:g}"


def greedy_steps(found: Found, subject: Subject) -> list[str]:
    """Returns the table of greedy decode steps of a model on a card."""
    lines = lines_of(found.decode, subject)
    cells = list(_greedy(by_key(lines), found.peers_of(subject)))
    return table("Decode step, greedy, ms", _usual(lines), [subject.card], cells)


def _usual(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line["temperature"] == 0 and line["overlap"] == 1]


def _greedy(keys: dict[Key, dict[str, Line]], peers: Peers) -> Iterator[list[str]]:
    yield ["drafts", "batch", "limit", *SIDES, *peers, "share of limit", "outputs", "revision"]
    for key, found in keys.items():
        if key != key.baseline:
            continue
        fastest = min(found.values(), key=lambda line: line["ms"])
        yield [
            *(key.drafts, str(key.batch), f"{fastest['limit_ms']:.2f}"),
            *(cell(found.get(side), ms) for side in SIDES),
            *(number(known.get((bare(key.drafts), key.batch))) for known in peers.values()),
            *(f"{fastest['share_of_limit']:.0%}", outputs(found.values())),
            revisions(found.values()),
        ]


def activity(found: Found, subject: Subject) -> list[str]:
    """Returns the table of kernels and idle time of traced steps."""
    traced = [line for line in lines_of(found.decode, subject) if line.get("trace")]
    each = [f"{what}, {side}" for what in ("kernels", "idle") for side in SIDES]
    cells = [["drafts", "batch", *each, "revision"]]
    for key, sides in by_key(traced).items():
        if key == key.baseline:
            kernels = (cell(sides.get(side), _kernels) for side in SIDES)
            idle = (cell(sides.get(side), _idle) for side in SIDES)
            cells.append([key.drafts, str(key.batch), *kernels, *idle, revisions(sides.values())])
    return table(
        "Kernels per step and idle share of the GPU", _usual(traced), [subject.card], cells
    )


def _kernels(line: Line) -> str:
    trace = line["trace"]
    return f"{trace['kernels']:.0f}" if "kernels" in trace else MISSING


def _idle(line: Line) -> str:
    trace = line["trace"]
    return f"{trace['idle_share']:.1%}" if "idle_share" in trace else MISSING


def variants(found: Found, subject: Subject) -> list[str]:
    """Returns the table of sampled steps and of other overlap depths.

    The change from the greedy step with overlap 1 is shown for lines of one revision.
    """
    lines = lines_of(found.decode, subject)
    shown = [line for line in lines if line not in _usual(lines)]
    cells = list(_variants(by_key(lines)))
    return table(
        "Decode step, sampled or with another overlap depth, ms", shown, [subject.card], cells
    )


def _variants(keys: dict[Key, dict[str, Line]]) -> Iterator[list[str]]:
    yield ["drafts", "batch", "temperature", "overlap", *SIDES, "outputs", "revision"]
    for key, found in keys.items():
        if key == key.baseline:
            continue
        usual = keys.get(key.baseline, {})
        temperature = f"{key.temperature:g}"
        if key.temperature:
            temperature += f", top-p {next(iter(found.values()))['top_p']:g}"
        cells = [_beside(found.get(side), usual.get(side)) for side in SIDES]
        head = [key.drafts, str(key.batch), temperature, str(key.overlap)]
        yield [*head, *cells, outputs(found.values()), revisions(found.values())]


def _beside(line: Line | None, other: Line | None) -> str:
    if line is None:
        return MISSING
    change = ratio(line, other, lambda times: f" ({times - 1:+.1%})") if other else ""
    return f"{ms(line)}{change}"


def long_contexts(found: Found, subject: Subject) -> list[str]:
    """Returns the table of decode steps after long prompts."""
    lines = lines_of(found.long, subject)
    keys: dict[tuple[int, str, int], dict[str, Line]] = {}
    for line in lines:
        key = (line["prompt"], line["drafts"], line["batch"])
        keys.setdefault(key, {})[line["backend"]] = line
    cells = [["drafts", "batch", "context", "limit", *SIDES, "share of limit", "outputs"]]
    for (prompt, drafts, batch), sides in sorted(keys.items(), key=lambda item: item[0][0]):
        share = max(line["share_of_limit"] for line in sides.values())
        limit = f"{min(line['limit_ms'] for line in sides.values()):.2f}"
        each = [cell(sides.get(side), ms) for side in SIDES]
        end = [f"{share:.0%}", outputs(sides.values())]
        cells.append([drafts, str(batch), str(prompt), limit, *each, *end])
    title = "Decode step after long prompts, greedy, no draft accepted, ms"
    return table(title, lines, [subject.card], cells)


def fused(found: Found, subject: Subject) -> list[str]:
    """Returns the table of steps in one device program and in three."""
    lines = lines_of(found.fused, subject)
    cells = [["drafts", "batch", "backend", "one program", "three", "plain/s", "three/s", "one/s"]]
    for line in lines:
        each = [f"{line[f'{way}_requests_per_s']:.2f}" for way in ("none", "split", "fused")]
        change = f"{line['split_to_fused']['median'] - 1:+.1%}"
        head = [line["drafts"], str(line["batch"]), line["backend"], f"{line['fused_ms']:.2f}"]
        cells.append([*head, f"{line['split_ms']:.2f} ({change})", *each])
    return table(
        "Step in one device program, ms, and requests per second", lines, [subject.card], cells
    )


def prompts(found: Found, subject: Subject) -> list[str]:
    """Returns the table of times to first token."""
    lines = lines_of(found.prefill, subject)
    keys: dict[tuple[str, int], dict[str, Line]] = {}
    for line in sorted(lines, key=lambda line: line["date"]):
        way = "eager" if line["flags"] else line["backend"]
        keys.setdefault((line["drafts"], line["prompt"]), {})[way] = line
    shares = [f"GEMM share, {side}" for side in SIDES]
    cells = [["drafts", "tokens", *SIDES, "torch, eager", "GEMMs", *shares, "outputs", "revision"]]
    for (drafts, tokens), ways in sorted(
        keys.items(), key=lambda item: (item[0][0] != "none", item[0])
    ):
        each = [cell(ways.get(way), lambda line: f"{line['ms']:.1f}") for way in (*SIDES, "eager")]
        gemms = f"{min(line['products_ms'] for line in ways.values()):.1f}"
        parts = [cell(ways.get(side), _gemm_share) for side in SIDES]
        same = "same" if all(line["is_same"] for line in ways.values()) else "DIFFER"
        cells.append([drafts, str(tokens), *each, gemms, *parts, same, revisions(ways.values())])
    return table("Time to first token, one prompt, ms", lines, [subject.card], cells)


def _gemm_share(line: Line) -> str:
    return f"{line['products_ms'] / line['ms']:.0%}"


def hits(found: Found, subject: Subject) -> list[str]:
    """Returns the table of prompts with and without a prefix-cache hit."""
    lines = lines_of(found.hits, subject)
    cells = [["drafts", "backend", "tokens", "cached", "miss", "hit", "speedup", "outputs"]]
    for line in lines:
        times = [f"{line['ms']:.1f}", f"{line['hit_ms']:.1f}", f"{line['times']:.1f}x"]
        head = [line["drafts"], line["backend"], str(line["prefix"]), str(line["cached_tokens"])]
        cells.append([*head, *times, "same" if line["is_same"] else "DIFFER"])
    return table("Time to first token with a prefix-cache hit, ms", lines, [subject.card], cells)


def tp_steps(found: Found, subject: Subject) -> list[str]:
    """Returns the table of decode steps by number of GPUs, with the speedup over one GPU."""
    lines = lines_of(found.tp, subject)
    counts = sorted({line["ranks"] for line in lines})
    head = [f"{side}, TP {count}" for side in SIDES for count in counts]
    cells = [["drafts", "batch", *head, *(f"limit, TP {n}" for n in counts), "outputs", "revision"]]
    for (drafts, batch), same in _by_drafts(lines).items():
        each = [_tp_cell(same, side, count) for side in SIDES for count in counts]
        limits = [_tp_limit(same, count) for count in counts]
        end = [outputs(same.values()), revisions(same.values())]
        cells.append([drafts, str(batch), *each, *limits, *end])
    return table("Decode step by number of GPUs, greedy, ms", lines, [subject.card], cells)


def _by_drafts(lines: Sequence[Line]) -> dict[tuple[str, int], dict[tuple[str, int], Line]]:
    """Groups lines by drafts and batch, then by backend and number of GPUs."""
    found: dict[tuple[str, int], dict[tuple[str, int], Line]] = {}
    for line in sorted(lines, key=lambda line: line["date"]):
        same = found.setdefault((line["drafts"], line["batch"]), {})
        same[line["backend"], line["ranks"]] = line
    return dict(sorted(found.items(), key=lambda item: (item[0][0] != "none", item[0])))


def _tp_cell(same: dict[tuple[str, int], Line], side: str, count: int) -> str:
    line, alone = same.get((side, count)), same.get((side, 1))
    if line is None or alone is None or count == 1:
        return cell(line, ms)
    return f"{ms(line)}{ratio(alone, line, lambda times: f' ({times:.2f}x)')}"


def _tp_limit(same: dict[tuple[str, int], Line], count: int) -> str:
    """Returns the limit by the copy rate of one backend: both copy alike."""
    limits = [same[side, count]["limit_ms"] for side in SIDES if (side, count) in same]
    return f"{limits[0]:.2f}" if limits else MISSING


def tp_prompts(found: Found, subject: Subject) -> list[str]:
    """Returns the table of times to first token by number of GPUs."""
    keys: dict[tuple[str, int], dict[tuple[str, int], Line]] = {}
    lines = []
    for file in found.tp_prefill:
        count = 2 if "--tp-size=2" in file["command"] else 1
        for line in (line for line in lines_of([file], subject) if not line["flags"]):
            lines.append(line)
            same = keys.setdefault((line["drafts"], line["prompt"]), {})
            same[line["backend"], count] = line
    head = [f"{side}, TP {count}" for side in SIDES for count in (1, 2)]
    cells = [["drafts", "tokens", *head, "revision"]]
    for (drafts, tokens), same in keys.items():
        each = [_tp_cell(same, side, count) for side in SIDES for count in (1, 2)]
        cells.append([drafts, str(tokens), *each, revisions(same.values())])
    return table("Time to first token by number of GPUs, ms", lines, [subject.card], cells)
