"""`docs/performance.md`: what `bench.steps.decode_steps` found, as tables.

python -m bench.performance > docs/performance.md
python -m bench.performance --readme
"""

import itertools
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from bench.performance_tp import ranked_memory, ranked_steps
from bench.quality.accuracy_table import MISSING, insert, markdown
from tests.support.op_sides import SIDES

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[1] / "README.md"
Peers = dict[str, dict[tuple[str, int], float]]
"""Milliseconds a step by the engine's name and version, then by drafts and batch."""

Line = dict[str, Any]
File = dict[str, Any]

HEAD = """# Performance

Made by `python -m bench.performance` of `bench/results/offline_*.json`, `long_*.json`,
`tp_*.json`, `prefill_*.json`, `hits_*.json`, `fused_*.json`, `adaptive_*.json` and `host_*.json`,
which hold commands and versions, and where steps were traced the kernels that take the most of one.

Weights are random, so drafts are accepted by lot: `L` is the mean of the tokens that a step gives.
A step's limit is the time that its bytes take at the rate of a large copy on the same device. Texts
are compared token for token with those that promise to be equal, where they were served in the same
run. Idle is the share of a step in which the device runs nothing; it may come out a little below 0,
since steps are timed in other rounds than they are traced in.
"""


CHANGING = """Phases of work follow each other on one engine, which serves them with every draft
shape, without drafts, and with the adaptive choice; the JSON files have the tokens a second of each
phase. *Served* work are tasks of the model that ships, which is so small that the host's time
counts. *Imposed* work takes the measured seconds of steps in simulated time
(`tests/support/simulation`): rates of acceptance are high, low, or drawn for each request or each
part of one, and NGRAM drafts for texts that repeat their prompts. *Own texts* are the model's
answers, in simulated time as well, or in real time on a CPU that is host to a device of measured
costs: there the host counts as it does with a small model. Shares are of the best static shape over
all phases, and of plain decoding; `worst` is the worst phase. `greedy` always takes the shape that
it believes to be the fastest, and `probe` gives 3 steps in 100 of it to the others in turn."""

IN_CODES = "--fp8-activations"
"""Texts and times under it are those of another model than of the same folder without."""

WORKS = {
    "lines": "served",
    "imposed": "imposed",
    "own_texts": "own texts",
    "real_time": "own texts, host in real time",
}


class Subject(NamedTuple):
    """A model, and the card that it was served on."""

    model: str
    card: str


class Key(NamedTuple):
    """What makes lines of two backends comparable."""

    drafts: str
    batch: int
    temperature: float
    overlap: int

    @property
    def usual(self) -> "Key":
        """Of the greedy line of overlap 1 that it stands beside."""
        return self._replace(temperature=0.0, overlap=1)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was measured, file by file.

    Attributes:
      offline: As `bench.steps.decode_steps` writes them, of prompts of one length.
      long: The same of longer prompts.
      tp: The same on several GPUs, and on one of them.
      prefill, hits, adaptive, host: As the bench of the name writes them.
      fused: Of steps in one program and in three.
      peers: Steps of other engines, a file for each engine and model.
    """

    offline: Sequence[File]
    long: Sequence[File] = ()
    tp: Sequence[File] = ()
    prefill: Sequence[File] = ()
    hits: Sequence[File] = ()
    fused: Sequence[File] = ()
    adaptive: Sequence[File] = ()
    host: Sequence[File] = ()
    peers: Sequence[File] = ()

    @classmethod
    def of_results(cls) -> "Found":
        """All that is kept."""
        peers = [_read(path) for path in sorted((RESULTS / "peers").glob("*.json"), reverse=True)]
        own = [bench.name for bench in fields(cls) if bench.name != "peers"]
        return cls(**{name: _files(name) for name in own}, peers=peers)

    def peers_of(self, subject: Subject) -> Peers:
        """What other engines take for a model on a card."""
        return {
            f"{file['engine']} {file['version']}": {
                (line["drafts"], line["batch"]): line["ms"] for line in file["lines"]
            }
            for file in self.peers
            if (file["model"], file["device"]) == subject
        }


def render(found: Found) -> str:
    """The page: a chapter for each model and card of decode steps, or of prompts alone."""
    parts = [HEAD.strip()]
    files = [*found.offline, *found.prefill, *found.tp]
    for subject in dict.fromkeys(map(subject_of, files)):
        lines = _lines_of(found.offline, subject)
        by_key = _by_key(lines)
        sizes = {(line["dtype"], line["prompt"]) for line in lines}
        told = [f"{dtype}, {prompt} tokens in" for dtype, prompt in sorted(sizes)]
        parts += ["## " + ", ".join([*subject, *told])]
        steps = list(_steps(by_key, found.peers_of(subject)))
        parts += _table("Milliseconds a decode step, greedy.", steps)
        parts += _table("Beside the same step, greedy with overlap 1.", list(_variants(by_key)))
        parts += _table(
            "Seconds until every program is ready, and gigabytes of memory.", list(_starts(by_key))
        )
        parts += _table(
            "Milliseconds until the first token of one prompt; beside them what the products with "
            "the layers' weights alone take by the framework's own, and torch without its CUDA "
            "graphs. The answers are the same in both ways.",
            list(_prompts(_lines_of(found.prefill, subject))),
        )
        parts += _table(
            "The same where all but the end of the prompt is in the prefix cache, and where "
            "nothing is.",
            list(_hits(_lines_of(found.hits, subject))),
        )
        parts += _table(
            "Milliseconds a decode step behind long prompts, greedy; no draft is accepted.",
            list(_behind(_lines_of(found.long, subject))),
        )
        ranked = _lines_of(found.tp, subject)
        parts += _table(
            "Milliseconds a decode step on one GPU and on several, greedy, and what the bytes of a "
            "GPU take.",
            list(ranked_steps(ranked)),
        )
        parts += _table(
            "Gigabytes that such a start plans on each GPU / that were held at most.",
            list(ranked_memory(ranked)),
        )
        lines = _lines_of(found.fused, subject)
        parts += _table(
            "A step in one device program beside the same step in three (draft; verify and commit; "
            "draft-extend), and requests a second of a closed loop that keeps the batch full.",
            list(_fused(lines)),
        )
    parts += _changing(found.adaptive)
    parts += _host(found.host)
    return "\n\n".join(parts) + "\n"


def _by_key(lines: Sequence[Line]) -> dict[Key, dict[str, Line]]:
    """Lines by what makes them comparable and by backend, drafter by drafter as they were run."""
    order = list(dict.fromkeys(line["drafts"] for line in lines))
    found: dict[Key, dict[str, Line]] = {}
    # Of two lines of the same a traced one tells more: it comes last.
    ranked = sorted(lines, key=lambda line: (line["batch"], line["trace"] is not None))
    for line in sorted(ranked, key=lambda line: order.index(line["drafts"])):
        key = Key(line["drafts"], line["batch"], line["temperature"], line["overlap"])
        found.setdefault(key, {})[line["backend"]] = line
    return found


def model_of(file: File) -> str:
    """The name of the folder that was served, and a flag that makes another model of it."""
    words = shlex.split(file["command"])
    name = Path(words[words.index("--model") + 1]).name
    return f"{name} {IN_CODES}" if any(IN_CODES in word for word in words) else name


def subject_of(file: File) -> Subject:
    """What was measured; a file names one card."""
    where = file["sides"] if "sides" in file else file["versions"]
    (card,) = {side["device"] for side in where.values()}
    return Subject(model_of(file), card)


def _lines_of(files: Sequence[File], subject: Subject) -> list[Line]:
    return [line for file in files if subject_of(file) == subject for line in file["lines"]]


def _table(title: str, lines: list[list[str]]) -> list[str]:
    return [title, markdown(lines)] if len(lines) > 1 else []


def _steps(by_key: dict[Key, dict[str, Line]], peers: Peers) -> Iterator[list[str]]:
    each = [f"{what}, {name}" for what in ("kernels", "idle") for name in SIDES]
    yield ["drafts", "batch", "limit", *SIDES, *peers, "share of the limit", *each, "texts"]
    for key, found in by_key.items():
        if key != key.usual:
            continue
        fastest = min(found.values(), key=lambda line: line["ms"])
        own = key.drafts.rpartition(" L=")[0] or key.drafts
        yield [
            key.drafts,
            str(key.batch),
            f"{fastest['limit_ms']:.2f}",
            *(_cell(found.get(name), lambda line: f"{line['ms']:.2f}") for name in SIDES),
            *(_number(known.get((own, key.batch))) for known in peers.values()),
            f"{fastest['share_of_limit']:.0%}",
            *(_cell(found.get(name), _kernels) for name in SIDES),
            *(_cell(found.get(name), _idle) for name in SIDES),
            _texts(found),
        ]


def _variants(by_key: dict[Key, dict[str, Line]]) -> Iterator[list[str]]:
    """Lines of a temperature, or of another overlap, beside the greedy line of overlap 1."""
    yield ["drafts", "batch", "temperature", "overlap", *SIDES, "texts"]
    for key, found in by_key.items():
        usual = by_key.get(key.usual)
        if usual is None or key == key.usual:
            continue
        cells = []
        for name in SIDES:
            line, other = found.get(name), usual.get(name)
            ratio = f" ({line['ms'] / other['ms'] - 1:+.1%})" if line and other else ""
            cells.append(_cell(line, lambda line, ratio=ratio: f"{line['ms']:.2f}{ratio}"))
        temperature = f"{key.temperature:g}"
        if key.temperature:
            temperature += f", top-p {next(iter(found.values()))['top_p']:g}"
        yield [key.drafts, str(key.batch), temperature, str(key.overlap), *cells, _texts(found)]


def _starts(by_key: dict[Key, dict[str, Line]]) -> Iterator[list[str]]:
    yield ["drafts", "batch", *(f"start, {name}" for name in SIDES), "planned", "peak, torch"]
    for key, found in by_key.items():
        if key != key.usual:
            continue
        planned = next(iter(found.values()))["planned_bytes"] / 1e9
        seconds = (
            _cell(found.get(name), lambda line: f"{line['load_s'] + line['prepare_s']:.1f}")
            for name in SIDES
        )
        # JAX counts its peak from the start of the process, over all lines.
        peak = _cell(found.get("torch"), lambda line: f"{line['peak_bytes'] / 1e9:.2f}")
        yield [key.drafts, str(key.batch), *seconds, f"{planned:.2f}", peak]


def _prompts(lines: Sequence[Line]) -> Iterator[list[str]]:
    yield [
        *("drafts", "tokens", *SIDES, "torch, no graphs", "products"),
        *(*(f"products' share, {name}" for name in SIDES), "answers"),
    ]
    by_key: dict[tuple[str, int], dict[str, Line]] = {}
    for line in lines:
        way = "eager" if line["flags"] else line["backend"]
        by_key.setdefault((line["drafts"], line["prompt"]), {})[way] = line
    for (drafts, tokens), found in by_key.items():
        each = (
            _cell(found.get(way), lambda line: f"{line['ms']:.1f}") for way in (*SIDES, "eager")
        )
        shares = (
            _cell(found.get(name), lambda line: f"{line['products_ms'] / line['ms']:.0%}")
            for name in SIDES
        )
        products = min(line["products_ms"] for line in found.values())
        same = "same" if all(line["is_same"] for line in found.values()) else "DIFFER"
        yield [drafts, str(tokens), *each, f"{products:.1f}", *shares, same]


def _hits(lines: Sequence[Line]) -> Iterator[list[str]]:
    yield ["drafts", "backend", "tokens", "cached", "without", "with", "faster", "answers"]
    for line in lines:
        yield [
            *(line["drafts"], line["backend"], str(line["prefix"]), str(line["cached_tokens"])),
            *(f"{line['ms']:.1f}", f"{line['hit_ms']:.1f}", f"{line['times']:.1f}x"),
            "same" if line["is_same"] else "DIFFER",
        ]


def _behind(lines: Sequence[Line]) -> Iterator[list[str]]:
    yield ["drafts", "batch", "tokens in", "limit", *SIDES, "share of the limit", "texts"]
    by_key: dict[tuple[int, str, int], dict[str, Line]] = {}
    for line in lines:
        key = (line["prompt"], line["drafts"], line["batch"])
        by_key.setdefault(key, {})[line["backend"]] = line
    for (prompt, drafts, batch), found in sorted(by_key.items(), key=lambda item: item[0][0]):
        share = max(line["share_of_limit"] for line in found.values())
        yield [
            *(drafts, str(batch), str(prompt)),
            f"{min(line['limit_ms'] for line in found.values()):.2f}",
            *(_cell(found.get(name), lambda line: f"{line['ms']:.2f}") for name in SIDES),
            *(f"{share:.0%}", _texts(found)),
        ]


def _fused(lines: Sequence[Line]) -> Iterator[list[str]]:
    yield ["drafts", "batch", "backend", "one", "three", "none/s", "three/s", "one/s", "texts"]
    for line in lines:
        each = [f"{line[f'{way}_requests_per_s']:.2f}" for way in ("none", "split", "fused")]
        yield [
            *(line["drafts"], str(line["batch"]), line["backend"], f"{line['fused_ms']:.2f}"),
            f"{line['split_ms']:.2f} ({line['split_to_fused']['median'] - 1:+.1%})",
            *each,
            "equal" if line["texts_are_equal"] else "DIFFER",
        ]


def _changing(files: Sequence[File]) -> list[str]:
    """Returns the tables of `bench.speculation.adaptive` and `adaptive_ngram_replay`."""
    head = ["drafts", "model", "backend", "device", "work", "of the best", "worst"]
    head += ["of off", "worst", "greedy", "probe", "file"]
    cells = [
        [
            *(start["drafts"], model_of(file), start["backend"], start["device"] or "a CPU", name),
            *_shares(start[work]),
            f"`{file['file']}`",
        ]
        for file in files
        for start in file["starts"]
        for work, name in WORKS.items()
        if start.get(work)
    ]
    parts = _table("The adaptive choice, over all phases and in its worst one.", [head, *cells])
    return ["## Work that changes, and --speculative-adaptive", CHANGING, *parts] if cells else []


def _shares(lines: Sequence[Line]) -> Iterator[str]:
    """Of the best shape and of off, over all phases and the worst; then the simpler choices'."""
    *phases, total = lines
    for key in ("adaptive_by_best", "adaptive_by_off"):
        yield f"{total[key]:.3f}"
        yield f"{min(line[key] for line in phases):.3f}"
    speeds = total["tokens_per_s"]
    best = speeds["adaptive"] / total["adaptive_by_best"]
    for policy in ("greedy", "probe"):
        yield f"{speeds[policy] / best:.3f}" if policy in speeds else MISSING


def _host(files: Sequence[File]) -> list[str]:
    """What `bench.speculation.host_overhead` found, file by file."""
    parts = []
    for file in files:
        head = ["controller", "cache", "rows", "host, us", "device, ms", "share"]
        cells = [
            [
                *(line["controller"], line["cache"], str(line["rows"]), f"{line['host_us']:.0f}"),
                *(f"{line['device_ms']:.1f}", f"{line['share']:.1%}"),
            ]
            for line in file["lines"]
        ]
        parts += _table(
            "Microseconds that the host takes to plan, submit and retire a decode step, on one "
            f"core (Python {file['python']}), beside the step of a device.",
            [head, *cells],
        )
    return ["## The host's part of a step", *parts] if parts else []


def _number(ms: float | None) -> str:
    return MISSING if ms is None else f"{ms:g}"


def _cell(line: Line | None, tell: Any) -> str:
    return MISSING if line is None else tell(line)


def _kernels(line: Line) -> str:
    trace = line["trace"] or {}
    return f"{trace['kernels']:.0f}" if "kernels" in trace else MISSING


def _idle(line: Line) -> str:
    trace = line["trace"] or {}
    return f"{trace['idle_share']:.1%}" if "idle_share" in trace else MISSING


def _texts(found: dict[str, Line]) -> str:
    """Whether the texts of the backends are equal."""
    compared = [line["texts"] for line in found.values() if line["texts"]]
    if not compared:
        return MISSING
    return "equal" if all(texts["equal"] for texts in compared) else "DIFFER"


def _files(bench: str) -> list[File]:
    return list(map(_read, sorted(RESULTS.glob(f"{bench}_*.json"))))


def _read(path: Path) -> File:
    return {**json.loads(path.read_text(encoding="utf-8")), "file": path.name}


def speed(found: Found) -> str:
    """The table of the README: a line for each model and drafter that others were measured with."""
    cells = []
    for subject in dict.fromkeys(map(subject_of, found.offline)):
        peers, by_key = found.peers_of(subject), _by_key(_lines_of(found.offline, subject))
        asked: dict[str, list[int]] = {}
        for drafts, batch in dict.fromkeys(itertools.chain(*peers.values())):
            asked.setdefault(drafts, []).append(batch)
        for drafts, batches in asked.items():
            ours = [
                [line.get(side) for key, line in by_key.items() if _is_of(key, drafts, batch)]
                for side in SIDES
                for batch in batches
            ]
            told = [f"{line['ms']:.2f}" if line else MISSING for (line, *_) in ours]
            theirs = [_number(known.get((drafts, b))) for known in peers.values() for b in batches]
            all_cells = iter([*told, *theirs])
            sides = [" / ".join(itertools.islice(all_cells, len(batches))) for _ in range(4)]
            cells.append([subject.model, drafts, " / ".join(map(str, batches)), *sides])
    names = dict.fromkeys(f"{file['engine']} {file['version']}" for file in found.peers)
    return markdown([["model", "drafts", "requests", *SIDES, *names], *cells])


def _is_of(key: Key, drafts: str, batch: int) -> bool:
    """Whether a line is the usual one of a drafter as other engines have it."""
    own = key.drafts.rpartition(" L=")[0] or key.drafts
    return key == key.usual and (own, key.batch) == (drafts, batch)


def main(words: Sequence[str]) -> None:
    """Prints the page, or puts the README's table between its markers."""
    found = Found.of_results()
    if "--readme" in words:
        insert(README, speed(found), "speed")
    else:
        print(render(found), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
