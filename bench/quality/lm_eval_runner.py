"""Scores of the shipped tasks by lm-evaluation-harness, for every drafter and backend.

    python -m bench.quality.lm_eval_runner --backend torch jax --drafts none NGRAM NEXTN EAGLE3 \
        --limit 64 --lm-eval .venv-lm/bin/lm_eval --out FILE

Each server is started in turn and receives many requests at once from the harness's completions
client. The harness is not a dependency: `--lm-eval` is its command, in an environment of its own
(bench/lm_eval/README.md). The exit code is 1 if a score or an output differs from the first
server's.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from bench.common.draft_config import PLAIN, Draft, folders_of, named_folder
from bench.common.environment import write_results
from bench.common.options import FRAMEWORKS
from bench.common.server import HIDDEN
from bench.common.waiting import CONSOLE
from models.demo import data
from tests.support.http_fixtures import Server, serving

ROOT = Path(__file__).resolve().parents[2]
TASKS = Path("bench/lm_eval")  # as the tasks name their data, from where the harness runs
KINDS = ("problems", "copying", "choices")
DATA = {"choices": "problems"}
"""Kinds that use the data of another kind with other questions."""

SCORED = ("choices",)
"""Kinds with given answers, which are scored by their logprobs (the harness's `loglikelihood`)."""

DEMO = ROOT / "models" / "demo" / "target"

FAILED = 2

Line = dict[str, Any]
Answers = list[Any]


def prepare(folder: Path, kind: str, count: int) -> None:
    """Writes the task and its data into the folder in which the harness runs."""
    inside = folder / TASKS
    inside.mkdir(parents=True, exist_ok=True)
    for file in (ROOT / TASKS).glob("*.yaml"):
        shutil.copy(file, inside)
    made = DATA.get(kind, kind)
    target = inside / f"{made}.jsonl"
    words = ["--split", "held_out", "--kind", made, "--count", str(count), "--out", str(target)]
    data.main(words)


def score(server: Server, folder: Path, kind: str, options: argparse.Namespace) -> Line:
    """Runs the harness against a server.

    Raises:
      RuntimeError: The harness failed; its last words.
    """
    out = Path(tempfile.mkdtemp(dir=folder))
    model = {
        "model": "default",
        "base_url": f"{server.url}/v1/completions",
        "num_concurrent": options.max_concurrency,
        **_tokenizing(kind, options.model),
    }
    command = [str(options.lm_eval), "--model", "local-completions", "--tasks", task_of(kind)]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in model.items())]
    command += ["--include_path", str(TASKS), "--output_path", str(out), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "OPENAI_API_KEY": "none"}
    ran = subprocess.run(
        command, cwd=folder, env=os.environ | offline, capture_output=True, text=True
    )
    if ran.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed: {ran.stderr[-2000:]}")
    return read_score(out, kind)


def _tokenizing(kind: str, model: Path) -> dict[str, object]:
    """Returns the harness's tokenizer settings: the server's, unless it must find prompt ends."""
    if kind not in SCORED:
        return {"tokenizer_backend": None, "tokenized_requests": False}
    return {"tokenizer_backend": "huggingface", "tokenizer": model.resolve()}


def task_of(kind: str) -> str:
    """Returns the task of a kind with completion prompts."""
    return f"tandem_{kind}_completions"


def read_score(out: Path, kind: str) -> Line:
    """The score, and every answer in the order of the tasks, of what the harness wrote."""
    (results,) = out.rglob("results_*.json")
    (samples,) = out.rglob("samples_*.jsonl")
    found = json.loads(results.read_text(encoding="utf-8"))["results"][task_of(kind)]
    metric = "acc," if kind in SCORED else "exact_match,"
    (value,) = (v for name, v in found.items() if name.startswith(metric))
    lines = map(json.loads, samples.read_text(encoding="utf-8").splitlines())
    answer = _ranked if kind in SCORED else _said
    answers = {line["doc_id"]: answer(line["resps"]) for line in lines}
    return {"score": value, "answers": [answers[index] for index in sorted(answers)]}


def _said(answers: Answers) -> str:
    """Returns the text of a generation task."""
    return answers[0][0]


def _ranked(answers: Answers) -> str:
    """The numbers of the given answers, the likeliest first; each has a logprob."""
    logprobs = [float(answer[0][0]) for answer in answers]
    return " ".join(map(str, sorted(range(len(logprobs)), key=lambda i: -logprobs[i])))


def compared(line: Line, first: Line) -> Line:
    """A line without its answers, beside the first server's."""
    differ = sum(a != b for a, b in zip(line["answers"], first["answers"], strict=True))
    others = {key: value for key, value in line.items() if key != "answers"}
    is_equal = not differ and line["score"] == first["score"]
    return {**others, "count": len(line["answers"]), "differ": differ, "is_equal": is_equal}


def measure(options: argparse.Namespace) -> list[Line]:
    """A line for each backend, drafter and kind.

    Raises:
      RuntimeError: The harness failed.
    """
    folders = folders_of(options.model, dict(map(named_folder, options.folders)))
    first, found = dict[str, Line](), list[Line]()
    with tempfile.TemporaryDirectory() as name:
        for kind in options.kinds:
            prepare(Path(name), kind, options.limit)
        for backend, text in product(options.backend, options.drafts):
            draft = Draft.parse(text)
            command = ["-m", f"{backend}_impl.serve", "--port", "0"]
            command += ["--model-path", str(options.model), *draft.flags(folders)]
            command += ["--max-prompt-logprobs", "1"] * bool(set(options.kinds) & set(SCORED))
            with serving([*command, *shlex.split(options.flags)], threads=None) as server:
                for kind in options.kinds:
                    line = {"backend": backend, "drafts": str(draft), "kind": kind}
                    CONSOLE.print(f"{backend} {draft}: {kind}, {options.limit} tasks")
                    line |= score(server, Path(name), kind, options)
                    found.append(compared(line, first.setdefault(kind, line)))
                    print(line_of(found[-1]), flush=True)
    return found


def line_of(line: Line) -> str:
    """A line for a terminal."""
    same = "equal" if line["is_equal"] else f"{line['differ']} ANSWERS DIFFER"
    where = f"{line['backend']:6}{line['drafts']:16}{line['kind']:10}"
    return f"{where} score {line['score']:.4f} of {line['count']}  {same}"


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.quality.lm_eval_runner", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--lm-eval", type=Path, default=Path("lm_eval"), help="the harness's command")
    add("--backend", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    add("--drafts", nargs="+", default=[PLAIN, "NGRAM", "NEXTN", "EAGLE3"], metavar="SPEC")
    add("--folders", nargs="*", default=[], metavar="ALGORITHM=DIR")
    add("--kinds", nargs="+", choices=KINDS, default=["problems"])
    add("--model", type=Path, default=DEMO, help=f"default: {DEMO}")
    add("--limit", type=int, default=200, help="tasks of each kind")
    add("--max-concurrency", type=int, default=64, help="requests at once")
    add("--concurrent", dest="max_concurrency", type=int, default=HIDDEN, help=HIDDEN)
    add("--num-prompts", dest="limit", type=int, default=HIDDEN, help=HIDDEN)
    add("--flags", default="", help="more server flags, as one quoted word")
    add("--out", type=Path, help="JSON file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Prints and writes the lines."""
    words = sys.argv[1:] if arguments is None else arguments
    options = parse(words)
    try:
        found = measure(options)
    except (RuntimeError, ValueError, OSError) as error:
        print(f"Nothing was measured to the end: {error}", file=sys.stderr)
        return FAILED
    if options.out:
        command = shlex.join(["python", "-m", "bench.quality.lm_eval_runner", *words])
        write_results(options.out, {"command": command, "lines": found})
    return 0 if all(line["is_equal"] for line in found) else 1


if __name__ == "__main__":
    sys.exit(main())
