"""Decoding without a server: milliseconds a step, what the GPU does in it, and equal texts.

    python -m bench.steps.offline --backend torch jax --model bench/shapes/qwen3-8b --batch 1 8 32 \
        --drafts none EAGLE3:S=3 DFLASH --out bench/results/FILE.json

Every line is a batch that one drafter serves on one backend. Beside the time of a step stand its
limits: of what it must read, at the rate that a large copy reaches on the same device, and of what
it must multiply, at that of a large product of the framework; the share is of both one after the
other. Weights are dummies, with which no drafter agrees; `--accept-length` says how many tokens a
step shall give, and stands in the line. Texts are compared where they promise to be equal: those of
the backends, and a drafter's with plain decoding's. A drafter that remembers texts has seen the
round before. On a CPU nothing is known of kernels, clock and power; `--kernels` tells which take
the most of a step. `--tp-size 1 2` serves with two ranks as well, whose limits are a rank's share,
and compares their texts.
"""

import argparse
import json
import platform
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import import_module
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from bench.ground import card
from bench.ground.drafting import PLAIN, Draft, named_folder
from bench.ground.session import Load, Session, folders_of, peak_bytes
from shared.boundary.mailboxes import RankMissingError
from shared.process.ranks.followers import RankError
from tests.support.op_sides import SIDES

Line = dict[str, Any]
Texts = list[list[int]]
LONGEST = 40
"""Kernels that a line names, by the time that they take."""
LONGEST_WARM_UP = 4096
"""Tokens of a prompt: a longer one runs the same programs."""
LOT = "L"
"""The setting of a drafter whose drafts are accepted by lot."""

HEADER = (
    f"{'side':6}{'drafts':26}{'batch':>6}{'T':>5}{'ms':>9}{'low':>8}{'high':>8}{'tokens/s':>10}"
)
HEADER += f"{'length':>8}{'bytes':>8}{'products':>9}{'share':>7}{'kernels':>9}{'idle':>7}"
HEADER += f"{card.HEADER}  texts"


class Rates(NamedTuple):
    """How fast a device copies, in bytes a second, and multiplies, in products a second."""

    copied: float
    multiplied: float

    @property
    def teraflops(self) -> float:
        """Additions count too."""
        return 2 * self.multiplied / 1e12


class Report:
    """What is found, printed and written as it comes.

    Attributes:
      found: All of it, as the file has it.
    """

    def __init__(self, command: str, out: Path | None, tells_kernels: bool = False) -> None:
        versions = {"python": platform.python_version(), "numpy": version("numpy")}
        self.found: dict[str, Any] = {"command": command, "versions": versions, "sides": {}}
        self.found |= {"lines": [], "refused": []}
        self._out, self._texts = out, dict[tuple, Texts]()
        self._tells_kernels = tells_kernels

    def add_side(self, backend: str) -> Rates:
        """Says where a backend runs, and how fast it is there."""
        side = SIDES[backend]()
        rates = Rates(side.copy_rate(), side.product_rate())
        self.found["versions"][backend] = side.version
        where = {"device": side.device, "kernels": side.kernels}
        told = {"copy_gigabytes_per_s": rates.copied / 1e9, "teraflops": rates.teraflops}
        self.found["sides"][backend] = where | told
        side.release()
        copies = f"copies {rates.copied / 1e9:.0f} GB/s"
        self._say(f"{backend} on {side.device}, {copies}, products {rates.teraflops:.3g} TFLOP/s")
        return rates

    def refuse(self, backend: str, draft: Draft, error: Exception) -> None:
        """Notes what was not served, and why."""
        line = {"backend": backend, "drafts": str(draft), "error": str(error)}
        self.found["refused"].append(line)
        self._say(f"refused: {backend}, {draft}: {error}")

    def add(self, line: Line, texts: Texts, keeps_text: bool) -> None:
        """Takes a line over, with what its texts are compared with."""
        served = (line["batch"], line["temperature"], line["top_p"])
        drafts = line["drafts"] if not keeps_text else PLAIN
        known = self._texts.setdefault((served, drafts), texts)
        line["texts"] = compared(texts, known) if known is not texts else None
        self.found["lines"].append(line)
        longest = (line["trace"] or {}).get("longest", {}) if self._tells_kernels else {}
        self._say("\n".join([line_of(line), *kernels_of(longest)]))

    @property
    def has_other_texts(self) -> bool:
        """Whether a text that promised to be another's is not."""
        return any(not line["texts"]["equal"] for line in self.found["lines"] if line["texts"])

    def _say(self, text: str) -> None:
        print(text, flush=True)
        if self._out:
            self._out.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")


def compared(texts: Texts, others: Texts) -> Line:
    """How far two sets of texts agree; past the first difference a text is another one."""
    first = [_common(a, b) for a, b in zip(texts, others, strict=True)]
    differ = sum(length < len(text) for length, text in zip(first, texts, strict=True))
    return {
        "equal": not differ,
        "texts_that_differ": differ,
        "tokens": sum(map(len, texts)),
        "tokens_before_a_difference": sum(first),
    }


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def measure(session: Session, load: Load, rates: Rates, options: argparse.Namespace) -> Line:
    """One line, and the texts of its last round under `texts`."""
    # Warms up; drafters that remember texts learn them.
    prompt = load.prompt if session.draft.remembers else min(load.prompt, LONGEST_WARM_UP)
    session.round(replace(load, prompt=prompt))
    made = session.made
    with card.watched(session.served.device == "gpu") as watched:
        rounds = [session.round(load) for _ in range(options.rounds)]
    blocks = [ms for each in rounds for ms in each.blocks(options.steps)]
    if not blocks:
        raise ValueError(f"a round has fewer than {options.steps} steps; raise --output")
    steps = sum(len(each.step_s) for each in rounds)
    tokens, seconds = sum(r.tokens for r in rounds), sum(sum(r.step_s) for r in rounds)
    median, limit = statistics.median(blocks), 1e3 * session.bytes_of(load) / rates.copied
    products = 1e3 * session.products_of(load) / rates.multiplied
    memory = session.served.memory
    ranks = memory.blueprint.ranks.count
    limit, products = limit / ranks, products / ranks
    return {
        "backend": session.backend,
        "drafts": str(session.draft),
        **asdict(load),
        "ranks": ranks,
        "overlap": memory.capacity.overlap,
        "dtype": memory.settled.dtype,
        "load_format": memory.settled.told.model.load_format,
        "simulated_accept_length": memory.capacity.simulated_accept_length,
        "ms": round(median, 4),
        "ms_low": round(min(blocks), 4),
        "ms_high": round(max(blocks), 4),
        "blocks": len(blocks),
        "steps": steps,
        "tokens_per_s": round(tokens / seconds, 1),
        "accept_length": round(tokens / steps / load.batch, 3),
        "prompt_ms": round(1e3 * statistics.median(r.prompt_s for r in rounds), 2),
        "limit_ms": round(limit, 4),
        "products_ms": round(products, 4),
        "share_of_limit": round(limit / median, 4),
        "share_of_both": round((limit + products) / median, 4),
        "programs_made_while_timed": session.made - made,
        "rounds_are_equal": all(r.texts == rounds[0].texts for r in rounds),
        "card": watched,
        "trace": _trace(session, load, min(len(r.step_s) for r in rounds), median, options),
        "texts": rounds[-1].texts,
    }


def _trace(
    session: Session, load: Load, steps: int, step_ms: float, options: argparse.Namespace
) -> Line | None:
    """Kernels and idle share of a step; None on a CPU, and where no trace is wanted."""
    if session.served.device != "gpu" or options.no_trace:
        return None
    try:
        found = session.activity(load, max(1, steps // 3))
    except Exception as error:  # a profiler that fails must not cost a run its times
        return {"error": f"{type(error).__name__}: {error}"}
    rounded = {n: round(getattr(found, n), 4) for n in ("kernels", "copies", "busy_ms")}
    longest = {n: [round(x, 4) for x in each] for n, each in found.longest(LONGEST).items()}
    return rounded | {"idle_share": round(1 - found.busy_ms / step_ms, 4), "longest": longest}


def start_facts(session: Session) -> Line:
    """What a start took; the peak is of the framework since this or, in JAX, the first start."""
    served = session.served
    return {
        "load_s": round(served.load_s, 2),
        "prepare_s": round(served.prepare_s, 2),
        "programs": len(served.memory.blueprint.capacity.programs),
        "planned_bytes": served.memory.total_bytes,
        "peak_bytes": peak_bytes(session.backend),
    }


def line_of(line: Line) -> str:
    """A line for a terminal."""
    trace, texts = line["trace"] or {}, line["texts"]
    kernels = f"{trace['kernels']:9.1f}" if "kernels" in trace else f"{'-':>9}"
    idle = f"{trace['idle_share']:7.1%}" if "idle_share" in trace else f"{'-':>7}"
    told = "first" if texts is None else "equal" if texts["equal"] else "DIFFER"
    lot = line["simulated_accept_length"]
    notes = [] if lot is None else [f"by lot {lot:g}"]
    notes += [f"{line['ranks']} ranks"] * (line["ranks"] > 1)
    notes += ["NOT REPEATED"] * (not line["rounds_are_equal"])
    notes += ["MADE PROGRAMS"] * bool(line["programs_made_while_timed"])
    return (
        f"{line['backend']:6}{line['drafts']:26}{line['batch']:6}{line['temperature']:5g}"
        f"{line['ms']:9.3f}{line['ms_low']:8.3f}{line['ms_high']:8.3f}{line['tokens_per_s']:10.1f}"
        f"{line['accept_length']:8.3f}{line['limit_ms']:8.3f}{line['products_ms']:9.3f}"
        f"{line['share_of_both']:7.1%}{kernels}{idle}"
        f"{card.told_card(line['card'])}  {' '.join([told, *notes])}"
    )


def _short(name: str) -> str:
    """Both ends of a long name: what it is, and the blocks that it has."""
    return name if len(name) < 100 else f"{name[:70]} .. {name[-25:]}"


def kernels_of(longest: Mapping[str, tuple[float, float]]) -> list[str]:
    """The kernels that take the most: how often, and microseconds in all."""
    return [
        f"{1e3 * ms:12.1f} us {count:7.1f} x  {_short(n)}" for n, (count, ms) in longest.items()
    ]


@contextmanager
def begun(
    backend: str,
    draft: Draft,
    load: Load,
    options: argparse.Namespace,
    overlap: int | None,
    ranks: int,
) -> Iterator[Session]:
    """A session that ends.

    Args:
      overlap: None leaves it to the flags.
    """
    folders = folders_of(options.model, dict(map(named_folder, options.folders)))
    told = [*flags(options, overlap), "--tp-size", str(ranks)]
    session = Session.begin(backend, options.model, draft, folders, told, load)
    try:
        yield session
    finally:
        session.end()


def flags(options: argparse.Namespace, overlap: int | None) -> list[str]:
    """Of the server."""
    found = ["--load-format", options.load_format]
    found += [] if overlap is None else ["--overlap", str(overlap)]
    return found + ["--dtype", options.dtype, *shlex.split(options.flags)]


def with_lot(draft: Draft, length: str | None) -> Draft:
    """The drafter with its drafts accepted by lot, unless there is none or it says so itself."""
    if length is None or draft.algorithm == PLAIN or LOT in dict(draft.settings):
        return draft
    return replace(draft, settings=(*draft.settings, (LOT, length)))


def run(options: argparse.Namespace, command: str) -> Report:
    """Serves everything that the options name.

    Raises:
      ValueError: An option is wrong; one sentence.
    """
    report = Report(command, options.out, options.kernels)
    drafts = [with_lot(Draft.parse(text), options.accept_length) for text in options.drafts]
    # JAX takes most of a GPU's memory when it starts, so torch goes first.
    for backend in sorted(options.backend, key=list(SIDES).index):
        rates = report.add_side(backend)
        print(HEADER, flush=True)
        for draft in drafts:
            for batch, *how in product(options.batch, options.overlap, options.tp_size):
                _serve(report, backend, draft, batch, how, rates, options)
    return report


def _serve(
    report: Report,
    backend: str,
    draft: Draft,
    batch: int,
    how: Sequence[int],
    rates: Rates,
    options: argparse.Namespace,
) -> None:
    load = Load(batch=batch, prompt=options.input, output=options.output, temperature=0, top_p=1)
    try:
        with begun(backend, draft, load, options, *how) as session:
            for temperature, top_p in zip(options.temperature, _top_ps(options), strict=True):
                asked = replace(load, temperature=temperature, top_p=top_p)
                line = measure(session, asked, rates, options)
                texts = line.pop("texts")
                keeps_text = session.served.keeps_text_at(temperature)
                report.add(line | start_facts(session), texts, keeps_text)
    except (ValueError, RankError, RankMissingError) as error:
        report.refuse(backend, draft, error)


def _top_ps(options: argparse.Namespace) -> list[float]:
    """One for each temperature; greedy rows have no use for any."""
    return [options.top_p if temperature else 1.0 for temperature in options.temperature]


def model_options(description: str | None, output: int) -> argparse.ArgumentParser:
    """What every bench of steps takes: a model, how it is started, and where lines are written.

    Args:
      description: A docstring, whose first line is shown.
      output: Default of the tokens of an answer.
    """
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with a config.json")
    parser.add_argument("--load-format", choices=("dummy", "auto"), default="dummy")
    parser.add_argument("--output", type=int, default=output, help="tokens of an answer")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--accept-length", help="the flag --speculative-simulate-accept-length")
    parser.add_argument("--folders", nargs="*", default=[], metavar="ALGORITHM=DIR")
    parser.add_argument("--flags", default="", help="more flags of the server, in one word")
    parser.add_argument("--out", type=Path, help="JSON file, written after every line")
    return parser


def decode_options(description: str | None) -> argparse.ArgumentParser:
    """What this bench and `bench.steps.compare` share."""
    parser = model_options(description, output=128)
    parser.add_argument("--input", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=16, help="of a block")
    return parser


def side_options(parser: argparse.ArgumentParser) -> None:
    """Which backends are started, with which drafters."""
    parser.add_argument("--backend", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--drafts", nargs="+", default=[PLAIN], metavar="SPEC")


def options() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = decode_options(__doc__)
    side_options(parser)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--overlap", nargs="+", type=int, choices=(0, 1, 2), default=[1])
    parser.add_argument("--tp-size", nargs="+", type=int, default=[1], help="ranks, a GPU each")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0])
    parser.add_argument("--top-p", type=float, default=1.0, help="of rows with a temperature")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-trace", action="store_true", help="count no kernels")
    parser.add_argument("--kernels", action="store_true", help="tell which take the most time")
    parser.add_argument("--ops", choices=("bound", "plain"), default="bound")
    return parser


@contextmanager
def operations(ops: str, backends: list[str]) -> Iterator[None]:
    """Within it the operations of the backends are plain, or what `ops` has bound."""
    if ops == "bound" or not backends:
        yield
        return
    with import_module(f"{backends[0]}_impl.ops").plain(), operations(ops, backends[1:]):
        yield


def main() -> int:
    """Prints and writes the lines; the exit code is 1 where texts differ or nothing was served."""
    given = options().parse_args()
    with operations(given.ops, given.backend):
        report = run(given, shlex.join(["python", "-m", "bench.steps.offline", *sys.argv[1:]]))
    if report.has_other_texts:
        print("THE TEXTS ARE NOT EQUAL", file=sys.stderr)
    return 1 if report.has_other_texts or not report.found["lines"] else 0


if __name__ == "__main__":
    sys.exit(main())
