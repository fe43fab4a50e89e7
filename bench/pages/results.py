"""Result files of `bench/results`: lines with their model, card, revision and date."""

import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import markdown
from bench.quality.accuracy_table import MISSING
from shared.drafts.kinds import NGRAM

RESULTS = Path(__file__).parents[1] / "results"

Line = dict[str, Any]
File = dict[str, Any]
Peers = dict[str, dict[tuple[str, int], float]]
"""Milliseconds per step by engine and version, then by drafts and batch."""

PATTERNS = {
    "decode": ("offline_*", "blocks_*", "token_map_h200_*"),
    "long": ("long_*",),
    "tp": ("tp_*",),
    "tp_prefill": ("ranks_prefill_*",),
    "prefill": ("prefill_*",),
    "hits": ("hits_*",),
    "fused": ("fused_*",),
    "adaptive": ("adaptive_*",),
    "blocks": ("simulated_block_trees*",),
    "heads": ("block_heads_*",),
    "host": ("host_*",),
    "http": ("http_share_*",),
}
"""Names of the files behind each field of `Found`."""

FP8_ACTIVATIONS = "--fp8-activations"
"""Flag that changes steps and outputs like another model."""
METHODS = ("none", "NEXTN", "EAGLE", "EAGLE3", "DFLASH", "DSPARK", "DFLASH2", "STANDALONE", "NGRAM")
SIMULATED, INDEX = "L=", "index="
INDEX_FLAGS = {
    "speculative-ngram-backend=device": f"{INDEX}device",
    "speculative-ngram-backend=host": f"{INDEX}host",
    "speculative-ngram-index=table": f"{INDEX}device",
    "speculative-ngram-index=trie": f"{INDEX}host",
}
"""Short forms of the flag, in both spellings."""

DEVICE_INDEX_SINCE = "2026-11-29"
"""Date from which NGRAM without a flag has its index on the device; before, on the host."""
FROM_LOG = "*"
"""Follows a revision that was taken from the history of its file."""


class Subject(NamedTuple):
    """A model and the card that served it."""

    model: str
    card: str


class Key(NamedTuple):
    """Settings that make lines of two backends comparable."""

    drafts: str
    batch: int
    temperature: float
    overlap: int

    @property
    def baseline(self) -> "Key":
        """The greedy line of overlap 1 with the same drafts and batch."""
        return self._replace(temperature=0.0, overlap=1)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Measured results, file by file.

    Attributes:
      decode: Decode steps after prompts of one length, by `bench.steps.decode_steps`.
      long: The same after longer prompts.
      tp: The same with several GPUs, and with one of them.
      prefill, hits, adaptive, blocks, heads, host, http: Files of the bench of that subject.
      tp_prefill: Prefill with one GPU and with several.
      fused: Steps in one device program and in three.
      peers: Steps of other engines, a file for each engine and model.
    """

    decode: Sequence[File] = ()
    long: Sequence[File] = ()
    tp: Sequence[File] = ()
    tp_prefill: Sequence[File] = ()
    prefill: Sequence[File] = ()
    hits: Sequence[File] = ()
    fused: Sequence[File] = ()
    adaptive: Sequence[File] = ()
    blocks: Sequence[File] = ()
    heads: Sequence[File] = ()
    host: Sequence[File] = ()
    http: Sequence[File] = ()
    peers: Sequence[File] = field(default=())

    @classmethod
    def of_results(cls) -> "Found":
        """Reads all result files that pages show."""
        peers = [read(path) for path in sorted((RESULTS / "peers").glob("*.json"), reverse=True)]
        own = {name: list(map(read, _paths(patterns))) for name, patterns in PATTERNS.items()}
        counts = list(map(read, _paths(["experts_read_*"])))
        for name in ("decode", "tp"):
            own[name] = [with_counted_experts(file, counts) for file in own[name]]
        return cls(**own, peers=peers)

    def peers_of(
        self, subject: Subject, gpus: int = 1, *, with_equal_prompts: bool = True
    ) -> Peers:
        """Returns the steps of other engines for a model on a number of GPUs of a card.

        Files with equal prompts in all requests are optional; their title states it.
        """
        files = [file for file in self.peers if with_equal_prompts or not has_equal_prompts(file)]
        return {
            engine_of(file): {(line["drafts"], line["batch"]): line["ms"] for line in file["lines"]}
            for file in files
            if (file["model"], file["device"], file.get("gpus", 1)) == (*subject, gpus)
        }


def with_counted_experts(file: File, counts: Sequence[File]) -> File:
    """Returns a file of decode steps with limits for counted experts, where a model has counts.

    Without counts the limits assume that tokens choose experts evenly.
    """
    shares = {
        (line["drafts"], line["batch"], line["prompt"]): line["bytes"] / line["even_bytes"]
        for found in counts
        if model_of(found) == model_of(file)
        for line in found["lines"]
    }

    def corrected(line: Line) -> Line:
        share = shares.get((_bare(line["drafts"]), line["batch"], line["prompt"]), 1.0)
        return line | {name: line[name] * share for name in ("limit_ms", "share_of_limit")}

    return {**file, "lines": list(map(corrected, file["lines"]))} if shares else file


def _bare(drafts: str) -> str:
    """Returns the drafter without simulated acceptance."""
    return " ".join(word for word in drafts.split(" ") if not word.startswith(SIMULATED))


def has_equal_prompts(file: File) -> bool:
    """Returns whether all requests had one prompt, which makes GEMMs faster and n-grams repeat."""
    return file.get("prompts") == "equal"


def engine_of(file: File) -> str:
    """Returns name and version of the engine of a file, with equal prompts if it had them."""
    suffix = ", equal prompts" if has_equal_prompts(file) else ""
    return f"{file['engine']} {file['version']}{suffix}"


def _paths(patterns: Iterable[str]) -> list[Path]:
    return sorted(path for pattern in patterns for path in RESULTS.glob(f"{pattern}.json"))


def read(path: Path) -> File:
    """Reads a result file.

    Raises:
      ValueError: The file does not record its revision and date.
    """
    file = json.loads(path.read_text(encoding="utf-8"))
    for name in ("revision", "date"):
        if not file.get(name):
            raise ValueError(f"{path.name} has no {name}; add it to the file")
    return {**file, "file": path.name}


def model_of(file: File) -> str:
    """Returns the name of the served folder, with the flag that makes it another model."""
    words = shlex.split(file["command"])
    name = Path(words[words.index("--model") + 1]).name
    return f"{name} {FP8_ACTIVATIONS}" if any(FP8_ACTIVATIONS in word for word in words) else name


def subject_of(file: File) -> Subject:
    """Returns the model and the card of a file; a file has one card."""
    where = file["sides"] if "sides" in file else file["versions"]
    (card,) = {side["device"] for side in where.values()}
    return Subject(model_of(file), card)


def stamp(file: File) -> Line:
    """Returns the name, date and revision of a file, as each of its lines has them."""
    star = FROM_LOG if "revision_from" in file else ""
    return {"file": file.get("file"), "date": file["date"], "revision": file["revision"] + star}


def stamped(file: File) -> list[Line]:
    """Returns the lines of a file, each with the file's name, revision and date.

    Lines of NGRAM name the place of its index.
    """
    lines = [line | stamp(file) for line in file["lines"]]
    return [
        line | {"drafts": with_index(line["drafts"], file["date"])} if "drafts" in line else line
        for line in lines
    ]


def with_index(drafts: str, date: str) -> str:
    """Returns a drafter's settings with the place of its n-gram index in short."""
    words = [INDEX_FLAGS.get(word, word) for word in drafts.split(" ")]
    if words[0] == NGRAM.name and not any(word.startswith(INDEX) for word in words):
        words.append(f"{INDEX}{'host' if date < DEVICE_INDEX_SINCE else 'device'}")
    return " ".join(words)


def lines_of(files: Iterable[File], subject: Subject) -> list[Line]:
    """Returns the lines of a model on a card."""
    return [line for file in files if subject_of(file) == subject for line in stamped(file)]


def subjects_of(files: Iterable[File]) -> list[Subject]:
    """Returns each model and card once, in the order of the files."""
    return list(dict.fromkeys(map(subject_of, files)))


def by_key(lines: Iterable[Line]) -> dict[Key, dict[str, Line]]:
    """Groups lines by settings and backend; of equal settings the newest line counts.

    Of two lines of one day the traced one counts.
    """
    found: dict[Key, dict[str, Line]] = {}
    for line in sorted(lines, key=lambda line: (line["date"], bool(line.get("trace")))):
        key = Key(line["drafts"], line["batch"], line["temperature"], line["overlap"])
        found.setdefault(key, {})[line["backend"]] = line
    return dict(sorted(found.items(), key=lambda item: _place(item[0])))


def _place(key: Key) -> tuple[Any, ...]:
    method = key.drafts.split(" ")[0].partition("+")[0]
    place = METHODS.index(method) if method in METHODS else len(METHODS)
    return (place, key.drafts, key.batch, key.temperature, -key.overlap)


def is_one_revision(one: Line, other: Line) -> bool:
    """Returns whether two lines come from one file or from one clean revision."""
    if one["file"] == other["file"]:
        return True
    return one["revision"] == other["revision"] and "+" not in one["revision"]


def ratio(one: Line, other: Line, show: Callable[[float], str], name: str = "ms") -> str:
    """Shows `one` divided by `other`; empty for lines of two revisions."""
    return show(one[name] / other[name]) if is_one_revision(one, other) else ""


def measured(lines: Iterable[Line], cards: Iterable[str]) -> str:
    """Returns the line above a table: card, dates and revisions."""
    dates: dict[str, set[str]] = {}
    for line in lines:
        dates.setdefault(line["date"], set()).add(line["revision"])
    stamps = [f"{date} ({', '.join(sorted(names))})" for date, names in sorted(dates.items())]
    return f"Measured on {', '.join(dict.fromkeys(cards))}: {'; '.join(stamps)}."


def table(
    title: str, lines: Sequence[Line], cards: Iterable[str], cells: list[list[str]]
) -> list[str]:
    """Returns the parts of a page with a table, or none if the table has no lines."""
    if len(cells) < 2:
        return []
    return [f"### {title}", markdown.wrapped(measured(lines, cards)), markdown.table(cells)]


def cell(line: Line | None, show: Callable[[Line], str]) -> str:
    """Shows a line, or the mark of a missing one."""
    return MISSING if line is None else show(line)


def ms(line: Line) -> str:
    """Shows the milliseconds of a line."""
    return f"{line['ms']:.2f}"


def outputs(lines: Iterable[Line]) -> str:
    """Shows whether the outputs of the backends are equal."""
    compared = [line["texts"] for line in lines if line["texts"]]
    if not compared:
        return MISSING
    return "equal" if all(texts["equal"] for texts in compared) else "DIFFER"


def revisions(lines: Iterable[Line]) -> str:
    """Shows the revisions of a row, each once."""
    return ", ".join(dict.fromkeys(line["revision"] for line in lines))
