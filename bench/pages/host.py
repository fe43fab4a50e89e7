"""Tables of adaptive speculation and of the host's share of a step."""

from collections.abc import Iterator, Sequence

from bench.pages.results import Found, Line, model_of, stamp, table
from bench.quality.accuracy_table import MISSING

WORKS = {
    "lines": "served",
    "imposed": "imposed",
    "own_texts": "own outputs",
    "real_time": "own outputs, host in real time",
}


def adaptive(found: Found) -> list[str]:
    """Returns the table of `bench.speculation.adaptive` and `adaptive_ngram_replay`."""
    head = ["drafts", "model", "backend", "device", "work", "of best", "worst phase"]
    worst = "worst phase"
    cells = [[*head, "of plain", worst, "greedy", worst, "probe", worst]]
    devices = dict[str, None]()
    for file in found.adaptive:
        for start in file["starts"]:
            device = start["device"] if start["device"] not in (None, "cpu") else "CPU"
            devices[device] = None
            for work, name in WORKS.items():
                if start.get(work):
                    place = [start["drafts"], model_of(file), start["backend"], device, name]
                    cells.append([*place, *_shares(start[work])])
    stamps = [stamp(file) for file in found.adaptive]
    return table("Adaptive speculation relative to static draft shapes", stamps, devices, cells)


def _shares(lines: Sequence[Line]) -> Iterator[str]:
    """Yields shares of the best shape and of plain decoding, then those of simpler policies."""
    *phases, total = lines
    for key in ("adaptive_by_best", "adaptive_by_off"):
        yield f"{total[key]:.3f}"
        yield f"{min(line[key] for line in phases):.3f}"
    for policy in ("greedy", "probe"):
        if policy not in total["tokens_per_s"]:
            yield from (MISSING, MISSING)
            continue
        yield f"{_by_best(total, policy):.3f}"
        yield f"{min(_by_best(line, policy) for line in phases):.3f}"


def _by_best(line: Line, policy: str) -> float:
    """Returns the speed of a simpler policy relative to the best static shape."""
    speeds = line["tokens_per_s"]
    return speeds[policy] / speeds["adaptive"] * line["adaptive_by_best"]


def block_trees(found: Found) -> list[str]:
    """Returns the table of `bench.speculation.adaptive_block_trees`."""
    cells = [["profile", "requests", "chain of 15", "tree of 32", "adaptive", "of the better"]]
    for file in found.blocks:
        for line in file["lines"]:
            speeds = [f"{line['tokens_per_s'][name]:.0f}" for name in ("chain", "tree", "adaptive")]
            share = f"{line['adaptive_by_best']:.3f}"
            cells.append([line["profile"], str(line["batch"]), *speeds, share])
    stamps = [stamp(file) for file in found.blocks]
    title = "Chain, tree or adaptive with a block head, in simulated tokens/s"
    return table(title, stamps, ["simulated H200"], cells)


def block_heads(found: Found) -> list[str]:
    """Returns the table of `bench.speculation.block_heads`, over all phases."""
    cells, devices = list[list[str]](), dict[str, None]()
    for file in found.heads:
        for line in file["lines"]:
            if line.get("phase") != "all":
                continue
            devices[line["device"]] = None
            steps, speeds = line["tokens_per_step"], line["tokens_per_s"]
            shapes = [f"{steps[shape]:.2f}, {speeds[shape]:.0f}/s" for shape in steps]
            cells.append([line["head"], line["backend"], *shapes])
    shapes = ["none", "chain", "tree of 16", "tree of 32", "tree of 64", "adaptive"]
    stamps = [stamp(file) for file in found.heads]
    title = "Block heads of the demo model: tokens per step, tokens/s"
    return table(title, stamps, devices, [["head", "backend", *shapes], *cells])


def host_times(found: Found) -> list[str]:
    """Returns the table of `bench.speculation.host_overhead`."""
    cells = [["controller", "prefix cache", "requests", "host, us", "device, ms", "share"]]
    for file in found.host:
        for line in file["lines"]:
            head = [line["controller"], line["cache"], str(line["rows"])]
            times = [f"{line['host_us']:.0f}", f"{line['device_ms']:.1f}", f"{line['share']:.1%}"]
            cells.append([*head, *times])
    cores = [f"one CPU core (Python {file['python']})" for file in found.host]
    stamps = [stamp(file) for file in found.host]
    return table("Host time to plan, submit and retire a decode step", stamps, cores, cells)


def http_shares(found: Found) -> list[str]:
    """Returns the table of `bench.serving.http_overhead`."""
    cells = [["served", "offline, tokens/s", "HTTP, tokens/s", "HTTP share", "lowest", "highest"]]
    for file in found.http:
        summary = file["summary"]
        speeds = [f"{summary[side]['tokens_per_s']:.0f}" for side in ("offline", "http")]
        shares = [f"{summary[name]:.1%}" for name in ("share", "low", "high")]
        cells.append([f"`{file['file']}`", *speeds, *shares])
    stamps = [stamp(file) for file in found.http]
    title = "Throughput over HTTP relative to the engine alone"
    return table(title, stamps, ["H200 and CPU"], cells)
