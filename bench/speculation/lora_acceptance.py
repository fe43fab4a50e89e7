"""Acceptance of drafters on the task of a LoRA adapter, next to the base model's.

    python -m bench.speculation.lora_acceptance --model models/demo/target --adapter ADAPTER
    python -m bench.speculation.lora_acceptance --table FILE.json... --into docs/lora.md

Each drafter serves four lines in one engine: the base model on its own prompts and on those of the
new task, then the adapter on the new task without and with its tensors of the MTP layer. Only
NEXTN reads the latter. The outputs of a drafter are compared with those of plain decoding, and the
exit code is 1 if one differs. The second form renders the table of some files between the markers
`<!-- lora_acceptance -->` of a document.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.numpy import load_file, save_file

from bench.common.draft_config import PLAIN, Draft, folders_beside, named_folder
from bench.common.environment import versions, write_results
from bench.common.markdown import between, table
from bench.common.options import FRAMEWORKS
from models.demo.data import KINDS
from shared.engine.request import Request, SamplingParams
from shared.models.file_kind import ADAPTER_FILE
from shared.models.lora import ADAPTER_WEIGHTS
from shared.process import gc_freeze
from shared.spec.gumbel_noise import derive_seed
from shared.text.tokenizer import Tokenizer
from tests.support.in_process_engine import Outcome, Served, acceptance, start, timed
from tests.support.tasks import Tasks, is_right

DRAFTS = (PLAIN, "NEXTN:S=3", "EAGLE3:S=5,k=4,N=16")
TARGET_ONLY, WHOLE = "adapter", "adapter-mtp"
"""Names of the adapter without and with its tensors of the MTP layer."""

MTP_LAYER = ".mtp."
BEGIN, END = "<!-- lora_acceptance -->", "<!-- /lora_acceptance -->"
MAX_TOKENS = 192
Row = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """Requests of one kind.

    Attributes:
      adapter: Name of the adapter; empty for the base model.
      tasks: The prompts.
    """

    adapter: str
    tasks: Tasks

    @property
    def key(self) -> str:
        """Name of the line."""
        return f"{self.adapter or 'base'}, {self.tasks.kind}"


def without_mtp(adapter: Path, folder: Path) -> Path:
    """Writes a copy of an adapter without its tensors of the MTP layer.

    Raises:
      ValueError: It has none.
    """
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    kept = {name: values for name, values in tensors.items() if MTP_LAYER not in name}
    if len(kept) == len(tensors):
        raise ValueError(
            f"{adapter} has no tensors of an MTP layer; use an adapter that "
            "was trained with --mtp-weight above 0"
        )
    folder.mkdir()
    save_file(kept, folder / ADAPTER_WEIGHTS)
    shutil.copyfile(adapter / ADAPTER_FILE, folder / ADAPTER_FILE)
    return folder


def requests_of(line: Line, temperature: float, eos_ids: tuple[int, ...]) -> list[Request]:
    """Returns the requests of a line."""
    return [
        Request(
            request_id=index,
            prompt=prompt,
            sampling=SamplingParams(
                temperature=temperature,
                seed32=derive_seed(index, 0),
                max_tokens=MAX_TOKENS,
                stop_token_ids=eos_ids,
                lora=line.adapter,
            ),
        )
        for index, prompt in enumerate(line.tasks.prompts)
    ]


class Measurement:
    """Serves the lines with every drafter.

    Attributes:
      rows: A line for each backend, drafter, temperature and kind of requests.
      changed: Number of outputs that differ from those of plain decoding.
      tokens: Number of compared tokens.
    """

    def __init__(self, args: argparse.Namespace, adapters: dict[str, Path]) -> None:
        tokenizer = Tokenizer.from_folder(args.model)
        if tokenizer is None or not tokenizer.has_chat_template:
            raise ValueError(f"{args.model} has no tokenizer with a chat template")
        self._args, self._adapters, self._tokenizer = args, adapters, tokenizer
        own, new = (
            Tasks.of(kind, args.count, args.seed, tokenizer) for kind in (args.own, args.kind)
        )
        adapted = [Line(name, new) for name in adapters]
        self._lines = [Line("", own), Line("", new), *adapted]
        self._plain: dict[tuple[str, float, str], list[list[int]]] = {}
        self._versions: dict[str, Any] = {}
        self.rows: list[Row] = []
        self.changed = self.tokens = 0

    def run(self) -> None:
        """Measures every backend with every drafter; plain decoding is first."""
        for backend in self._args.backend:
            for draft in self._args.drafts:
                served = self._started(backend, draft)
                self._versions[backend] = versions(
                    backend, "cuda" if served.device == "gpu" else "cpu"
                )
                for temperature in self._args.temperature:
                    for line in self._lines:
                        self._measure(served, backend, draft, temperature, line)
                served.engine.close()
                gc_freeze.unfreeze_gc()

    def _started(self, backend: str, draft: Draft) -> Served:
        longest = max(len(prompt) for line in self._lines for prompt in line.tasks.prompts)
        named = [f"{name}={folder}" for name, folder in self._adapters.items()]
        flags = ["--model-path", str(self._args.model), "--dtype", self._args.dtype]
        flags += ["--lora-paths", *named, *draft.flags(self._args.folders)]
        context = -(-(longest + MAX_TOKENS) // 64) * 64
        return start(backend, flags, batch=self._args.batch, context=context, radix_cache=False)

    def _measure(
        self, served: Served, backend: str, draft: Draft, temperature: float, line: Line
    ) -> None:
        run = timed(served, requests_of(line, temperature, served.eos_ids))
        outputs = [outcome.tokens for outcome in run.outcomes]
        first = self._plain.setdefault((backend, temperature, line.key), outputs)
        changed = sum(a != b for a, b in zip(first, outputs, strict=True))
        row: Row = {"backend": backend, "algorithm": str(draft), "temperature": temperature}
        row |= {"adapter": line.adapter, "kind": line.tasks.kind, "count": len(outputs)}
        row |= {"accuracy": self._accuracy(line.tasks, run.outcomes), "changed": changed}
        row |= acceptance(run.outcomes, served.max_depth)
        row |= {"tokens": sum(map(len, outputs)), "load": round(os.getloadavg()[0], 2)}
        self.rows.append(row)
        self.changed, self.tokens = self.changed + changed, self.tokens + row["tokens"]
        print(
            f"{backend:6}{draft!s:24} T={temperature:g} {line.key:28} accept "
            f"{row['accept_length']:.3f}  accuracy {row['accuracy']:.3f}  changed {changed}",
            flush=True,
        )
        if self._args.out:
            write_results(self._args.out, self.to_json())

    def _accuracy(self, tasks: Tasks, outcomes: Sequence[Outcome]) -> float:
        pairs = zip(outcomes, tasks.examples, strict=True)
        right = [
            is_right(tasks.kind, self._tokenizer.decode(outcome.tokens), example.answer)
            for outcome, example in pairs
        ]
        return round(sum(right) / len(right), 4)

    def to_json(self) -> dict[str, Any]:
        """Returns everything that was measured, and how."""
        return {
            "command": f"python -m bench.speculation.lora_acceptance {' '.join(sys.argv[1:])}",
            "model": self._args.model.name,
            "adapter": json.loads((self._args.adapter / ADAPTER_FILE).read_text("utf-8")),
            "dtype": self._args.dtype,
            "batch": self._args.batch,
            "versions": self._versions,
            "tokens": self.tokens,
            "changed": self.changed,
            "rows": self.rows,
        }


def rendered(files: Sequence[dict[str, Any]]) -> str:
    """Returns the table of result files: acceptance length, and accuracy in parentheses."""
    rows = [row for file in files for row in file["rows"]]
    kinds = list(dict.fromkeys((row["adapter"], row["kind"]) for row in rows))
    head = [f"{name or 'base'}: {kind}" for name, kind in kinds]
    lines = [["drafter", "T", "backend", *head]]
    for key in dict.fromkeys((x["algorithm"], x["temperature"], x["backend"]) for x in rows):
        found = {
            (x["adapter"], x["kind"]): f"{x['accept_length']:.2f} ({100 * x['accuracy']:.0f} %)"
            for x in rows
            if (x["algorithm"], x["temperature"], x["backend"]) == key
        }
        algorithm, temperature, backend = key
        lines.append([algorithm, f"{temperature:g}", backend, *(found.get(x, "") for x in kinds)])
    return table(lines)


def show(paths: Sequence[Path], into: Path | None) -> int:
    """Renders the table of some files; the exit code is 1 if a drafter changed an output."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    text = rendered(files)
    print(text)
    if into:
        page = between(into.read_text(encoding="utf-8"), BEGIN, END, text)
        into.write_text(page, encoding="utf-8")
    return int(any(file["changed"] for file in files))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, or renders the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.speculation.lora_acceptance")
    parser.add_argument("--model", type=Path, help="folder of the base model")
    parser.add_argument("--adapter", type=Path, help="folder of the adapter")
    parser.add_argument("--backend", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--drafts", nargs="+", default=list(DRAFTS), help="none and drafters")
    parser.add_argument("--folders", nargs="*", default=[], metavar="ALGORITHM=DIR")
    parser.add_argument("--kind", choices=KINDS, default="sql", help="task of the adapter")
    parser.add_argument("--own", choices=KINDS, default="problems", help="task of the base model")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--count", type=int, default=50, help="prompts of each line")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts")
    parser.add_argument("--batch", type=int, default=8, help="requests at once")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path, help="JSON file, written after every line")
    parser.add_argument("--table", nargs="+", type=Path, help="render these files instead")
    parser.add_argument("--into", type=Path, help="document to insert the table into")
    args = parser.parse_args(arguments)
    if args.table:
        return show(args.table, args.into)
    if args.model is None or args.adapter is None:
        parser.error("--model and --adapter are required")
    try:
        args.drafts = [Draft.parse(text) for text in args.drafts]
        if str(args.drafts[0]) != PLAIN:
            raise ValueError(f"--drafts must begin with {PLAIN}, with which others are compared")
        args.folders = folders_beside(args.model) | dict(map(named_folder, args.folders))
        with TemporaryDirectory() as folder:
            target_only = without_mtp(args.adapter, Path(folder) / "target")
            found = Measurement(args, {TARGET_ONLY: target_only, WHOLE: args.adapter})
            found.run()
    except ValueError as error:
        parser.error(str(error))
    print(f"{found.tokens} tokens compared, {found.changed} outputs changed")
    return int(found.changed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
