"""Drafters on held-out tasks of the demo model: acceptance, accuracy, speed, equal outputs."""

import argparse
import copy
import itertools
import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.common.draft_config import PLAIN, Draft
from bench.common.environment import write_results
from bench.common.options import Settings, settings_of
from bench.quality import self_corpus
from bench.quality.scoring import Row, Texts, text_hash
from shared.engine.request import Request, SamplingParams
from shared.models.checkpoint import load_all
from shared.models.families import config_from_folder
from shared.process import gc_freeze
from shared.spec.gumbel_noise import derive_seed
from shared.text.tokenizer import Tokenizer
from tests.support.equality import Oracle
from tests.support.in_process_engine import Run, Served, acceptance, start, timed
from tests.support.tasks import Tasks, is_right

CPU_BATCH, GPU_BATCH = 8, 64
CONTEXT_MULTIPLE = 64


class Measurement:
    """Serves the tasks with every drafter.

    Attributes:
      rows: A line for each backend, drafter, temperature and kind.
      refusals: A line for each unsupported combination of backend and drafter.
      texts: What was compared.

    Raises:
      ValueError: The model has no tokenizer with a chat template, or the device is another one.
    """

    def __init__(self, settings: Settings, report: Callable[["Measurement"], None]) -> None:
        """Args: `report` is called after every line."""
        self.settings, self._report = settings, report
        self.rows: list[Row] = []
        self.refusals: list[Row] = []
        self.machines: dict[str, str] = {}
        tokenizer = Tokenizer.from_folder(settings.model)
        if tokenizer is None or not tokenizer.has_chat_template:
            raise ValueError(f"{settings.model} has no tokenizer with a chat template")
        self._tokenizer = tokenizer
        self._tasks = [
            Tasks.of(kind, settings.count, settings.seed, tokenizer) for kind in settings.kinds
        ]
        self.texts = Texts(_oracle(settings.model) if settings.dtype == "float32" else None)
        self._other_outputs: dict[str, list[list[int]]] = {}  # by kind, for `own_corpus`
        for backend in settings.backends:
            self.machines[backend] = _machine(backend, settings.device)

    def run(self) -> None:
        """Measures every backend with every drafter."""
        for backend in self.settings.backends:
            for draft in self.settings.drafts:
                self._draft(backend, draft)

    def _draft(self, backend: str, draft: Draft) -> None:
        served = None
        for temperature, tasks in itertools.product(self.settings.temperatures, self._tasks):
            if served is None or draft.remembers:
                served = self._restarted(served, backend, draft, tasks)
            if served is None:
                return
            self._measure(served, backend, draft, temperature, tasks)
        _close(served)

    def _restarted(
        self, served: Served | None, backend: str, draft: Draft, tasks: Tasks
    ) -> Served | None:
        _close(served)
        try:
            outputs = self._outputs_before(backend, tasks) if draft.has_own_corpus else None
            served = self._started(backend, draft)
            if outputs is not None:
                self_corpus.add(served, outputs)
            return served
        except ValueError as error:
            line = {"backend": backend, "algorithm": str(draft), "refused": str(error)}
            self.refusals.append(line)
            print(f"unsupported: {backend}, {draft}: {error}", flush=True)
            self._report(self)
            return None

    def _started(self, backend: str, draft: Draft) -> Served:
        flags = ["--model-path", str(self.settings.model), "--dtype", self.settings.dtype]
        flags += draft.flags(self.settings.folders)
        batch, context = self._batch(backend), self._context
        return start(backend, flags, batch=batch, context=context, radix_cache=False)

    def _outputs_before(self, backend: str, tasks: Tasks) -> list[list[int]]:
        """Returns the outputs of the tasks in another run; see `self_corpus`."""
        if tasks.kind not in self._other_outputs:
            plain, most = self._started(backend, Draft.parse(PLAIN)), self.settings.max_tokens
            found = self_corpus.other_outputs(plain, tasks.prompts, most)
            self._other_outputs[tasks.kind] = found
            _close(plain)
        return self._other_outputs[tasks.kind]

    def _batch(self, backend: str) -> int:
        on_cpu = self.machines[backend].startswith("CPU")
        return self.settings.batch or (CPU_BATCH if on_cpu else GPU_BATCH)

    @property
    def _context(self) -> int:
        longest = max(len(prompt) for tasks in self._tasks for prompt in tasks.prompts)
        needed = longest + self.settings.max_tokens
        return -(-needed // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE

    def _measure(
        self, served: Served, backend: str, draft: Draft, temperature: float, tasks: Tasks
    ) -> None:
        times = 1 if draft.remembers else self.settings.repeat
        requests = self._requests(tasks, temperature, served.eos_ids, draft.max_drafts)
        runs = [timed(served, list(map(copy.deepcopy, requests))) for _ in range(times)]
        run = min(runs, key=lambda run: run.seconds)
        outputs = [outcome.tokens for outcome in run.outcomes]
        row: Row = {"backend": backend, "machine": self.machines[backend]}
        row |= {"batch": self._batch(backend), "algorithm": str(draft)}
        row |= {"temperature": temperature, "kind": tasks.kind, "count": len(requests)}
        row |= {"accuracy": self._accuracy(tasks, outputs), "text_hash": text_hash(outputs)}
        row |= acceptance(run.outcomes, served.max_depth) | _speed(run)
        row["load"] = round(os.getloadavg()[0], 2)
        row["simulated_accept_length"] = served.backend.capacity.simulated_accept_length
        row["keeps_text"] = served.keeps_text_at(temperature)
        row["excused"], row["wrong"] = self.texts.compare(row, requests, outputs)
        self.rows.append(row)
        print(line_of(row), flush=True)
        self._report(self)

    def _requests(
        self, tasks: Tasks, temperature: float, eos_ids: tuple[int, ...], max_drafts: int | None
    ) -> list[Request]:
        def sampling(index: int) -> SamplingParams:
            return SamplingParams(
                temperature=temperature,
                seed32=derive_seed(index, 0),
                max_tokens=self.settings.max_tokens,
                stop_token_ids=eos_ids,
                max_draft_tokens=max_drafts,
            )

        return [
            Request(request_id=index, prompt=prompt, sampling=sampling(index))
            for index, prompt in enumerate(tasks.prompts)
        ]

    def _accuracy(self, tasks: Tasks, outputs: list[list[int]]) -> float:
        texts = map(self._tokenizer.decode, outputs)
        answers = [example.answer for example in tasks.examples]
        right = [is_right(tasks.kind, *pair) for pair in zip(texts, answers, strict=True)]
        return round(sum(right) / len(right), 4)

    def to_json(self, module: str) -> dict[str, Any]:
        """Everything that was measured, and how."""
        versions = {name: version(name) for name in ("numpy", *self.settings.backends)}
        flags = os.environ.get("XLA_FLAGS")
        environment = [f"XLA_FLAGS={flags}"] if flags else []
        return {
            "command": " ".join([*environment, f"python -m {module}", *sys.argv[1:]]),
            "model": self.settings.model.name,
            "dtype": self.settings.dtype,
            "versions": {"python": platform.python_version(), **versions},
            "machines": self.machines,
            "tokens": self.texts.tokens,
            "excused": self.texts.excused,
            "wrong": self.texts.wrong,
            "rows": self.rows,
            "refusals": self.refusals,
        }


def _oracle(model: Path) -> Oracle:
    config = config_from_folder(model)
    return Oracle(config, load_all(model, config, with_mtp=False))


def _close(served: Served | None) -> None:
    """Ends an engine and lets go of its memory before the next one takes its own."""
    if served is not None:
        served.engine.close()
        gc_freeze.unfreeze_gc()


def _machine(backend: str, device: str | None) -> str:
    """Returns a description of the backend's machine; imports only its framework."""
    if backend == "torch":
        import torch

        on_gpu = torch.cuda.is_available()
        name = torch.cuda.get_device_name() if on_gpu else ""
    else:
        import jax

        on_gpu = jax.devices()[0].platform != "cpu"
        name = jax.devices()[0].device_kind
    if device is not None and (device == "cuda") != on_gpu:
        raise ValueError(
            f"--device {device} is not where {backend} runs; "
            "CUDA_VISIBLE_DEVICES= and JAX_PLATFORMS=cpu hide a GPU"
        )
    return name if on_gpu else f"CPU, {os.cpu_count()} cores"


def _speed(run: Run) -> Row:
    num_tokens = sum(len(outcome.tokens) for outcome in run.outcomes)
    return {
        "tokens": num_tokens,
        "seconds": round(run.seconds, 3),
        "tokens_per_s": round(num_tokens / run.seconds, 1),
        "compiles": run.compiles,
    }


def line_of(row: Row) -> str:
    """A row for a terminal."""
    shares = " ".join(f"{share:.2f}" for share in row["per_position"])
    compiled = f"  {row['compiles']} COMPILED WHILE TIMED" if row["compiles"] else ""
    return (
        f"{row['backend']:6}{row['algorithm']:24} T={row['temperature']:g} {row['kind']:9}"
        f" accept {row['accept_length']:.3f}  accuracy {row['accuracy']:.3f}"
        f"  {row['tokens_per_s']:8.1f} tokens/s  {row['text_hash']}  {shares}{compiled}"
    )


def verdict(measurement: Measurement) -> int:
    """Prints compared outputs and unsupported settings; the exit code is 1 if an output changed."""
    texts = measurement.texts
    print(f"{len(measurement.refusals)} unsupported; {texts.tokens} tokens compared, ", end="")
    print(f"{texts.excused} texts excused as near ties, {texts.wrong} changed", flush=True)
    if not measurement.rows:
        print("NOTHING WAS MEASURED: every drafter is unsupported", file=sys.stderr)
        return 1
    if not texts.are_equal:
        print("THE TEXTS ARE NOT EQUAL: a drafter changed the output", file=sys.stderr)
        return 1
    return 0


def measured(args: argparse.Namespace, module: str) -> Measurement:
    """Measures as the options specify, and writes the file after every line.

    Raises:
      ValueError: An option is wrong; one sentence.
    """

    def report(measurement: Measurement) -> None:
        if args.out:
            write_results(args.out, measurement.to_json(module))

    measurement = Measurement(settings_of(args), report)
    measurement.run()
    return measurement
