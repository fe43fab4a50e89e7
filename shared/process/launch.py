"""The start of a server: flags, checkpoint, memory plan, weights, engine, HTTP.

Whatever the user can put right ends the start with exit code 2 and one sentence as the last line.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from shared.boundary.backend import Backend, Limits
from shared.drafts.block import stated_block
from shared.drafts.checkpoint import (
    HeadFiles,
    ModelFiles,
    check_head,
    is_head,
    kind_of,
    open_head,
)
from shared.drafts.config import DraftConfig
from shared.drafts.tokenizer import check_same_tokenizer
from shared.engine.controller import Controller, StaticController
from shared.engine.engine import Engine
from shared.engine.ngram.controller import NgramController
from shared.engine.ngram.index import NgramIndex
from shared.models.checkpoint import Checkpoint, Parameter, parameters
from shared.models.config import ModelConfig, read_json
from shared.options.capabilities import refusals
from shared.options.options import BLOCK_ALGORITHM, ConfigError, Options, parse
from shared.options.setup import Setup
from shared.process import loop
from shared.process.frames import ModelFacts
from shared.process.memory_plan import Device, MemoryPlan, draft_shape, plan

REPORT_S = 2.0  # between two lines of progress where there is no terminal to draw a bar on

ProgressCall = Callable[[int], None]
DraftFiles = HeadFiles | ModelFiles | None
LoadBackend = Callable[[Options, Any, ModelConfig, DraftFiles, Limits, ProgressCall], Backend]
"""Its second argument is what `open_checkpoint` gave."""


class Weights(Protocol):
    """What the start needs of an opened checkpoint, say a `shared.models.checkpoint.Checkpoint`."""

    @property
    def has_mtp(self) -> bool:
        """Whether the files hold an mtp layer."""
        ...

    def check(self, config: ModelConfig, with_mtp: bool) -> None:
        """Raises `CheckpointError` for the first fault that the headers show."""
        ...

    def num_bytes(self, wanted: Sequence[Parameter]) -> int:
        """Stored bytes of these parameters."""
        ...


def launch(
    argv: Sequence[str],
    load_backend: LoadBackend,
    *,
    open_checkpoint: Callable[[str], Weights],
    find_device: Callable[[], Device],
) -> int:
    """Serves until it is told to stop.

    Args:
      argv: The command line without the program's name.
      load_backend: Makes the backend from options without open values, checkpoint, model config,
        draft head or model (None where none drafts) and limits; it calls its last argument with the
        number of stored bytes after each tensor.
      open_checkpoint: Opens the model folder; its files are checked before any weight is read.
      find_device: Where the backend will run; called after the flags are known to be right.

    Returns:
      The process's exit code: 0 after a signal, 2 where the start was refused, else 1.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        options = parse(argv)
        listener = loop.bind(options.server.host, options.server.port)
        model, checkpoint, head, memory = prepare(options, open_checkpoint, find_device)
    except ValueError as error:  # ConfigError, CheckpointError, and what ModelConfig refuses
        return _refuse(error)
    _print_plan(console, memory)
    try:
        with_mtp = memory.options.speculative.with_mtp
        stored_bytes = checkpoint.num_bytes(parameters(model, with_mtp))
        stored_bytes += head.num_bytes if head else 0
        with _progress(console, stored_bytes) as progress:
            backend = load_backend(memory.options, checkpoint, model, head, memory.limits, progress)
    except ValueError as error:  # CheckpointError, and what the backend refuses
        return _refuse(error)
    engine = make_engine(backend, memory.options)
    controller = engine.controller
    index = controller.index if isinstance(controller, NgramController) else None
    return loop.run(engine, _facts(memory, model), listener, index)


def prepare(
    options: Options,
    open_checkpoint: Callable[[str], Weights],
    find_device: Callable[[], Device],
) -> tuple[ModelConfig, Weights, DraftFiles, MemoryPlan]:
    """Everything that can be refused before memory is taken.

    Args:
      options: As the flags say.
      open_checkpoint, find_device: See `launch`.

    Returns:
      The target's settings, its opened files, those of what drafts, and the memory plan, whose
      options have no open values.

    Raises:
      ValueError: A flag or a file is refused; `ConfigError` and `CheckpointError` are such.
    """
    options = _expanded(options)
    draft, folder = options.speculative, options.model.model_path
    model, checkpoint = ModelConfig.from_folder(folder), open_checkpoint(folder)
    path = draft.head_path
    stored = open_head(path) if path else None
    is_model = draft.drafts_with_a_model and stored is not None and not is_head(stored.names)
    head_kind = kind_of(stored.names) if stored and not is_model else None
    setup = Setup(
        options=options,
        model=model,
        has_mtp=checkpoint.has_mtp,
        head_kind=head_kind,
        block=_block(path) if path and head_kind == BLOCK_ALGORITHM else None,
    )
    if refused := refusals(setup):
        raise ConfigError("\n".join(refused))
    corpus = options.ngram.speculative_ngram_external_corpus_path
    if corpus and not os.path.isfile(corpus):
        raise ConfigError(f"--speculative-ngram-external-corpus-path {corpus} is no file")
    checkpoint.check(model, draft.with_mtp)
    head = _draft_files(options, model, stored) if stored else None
    memory = plan(options, model, head.config if head else None, find_device())
    return model, checkpoint, head, memory


def _draft_files(
    options: Options, model: ModelConfig, stored: Checkpoint
) -> HeadFiles | ModelFiles:
    """The draft model's settings and files, held against each other and against the target."""
    draft = options.speculative
    path = draft.head_path
    assert path is not None  # the files lie there
    if draft.drafts_with_a_model:
        small = ModelFiles(_small_config(path), stored)
        stored.check(small.config, with_mtp=False)
        check_same_tokenizer(options.model.model_path, model, path, small.config)
        return small
    config = DraftConfig.from_folder(path, model)
    head = HeadFiles(config.with_window(draft.speculative_draft_window_size), stored)
    check_head(stored, head.config)
    return head


def _block(path: str) -> int | None:
    """The block that a DFLASH head states; None where its settings cannot be read."""
    try:
        return stated_block(read_json(Path(path) / "config.json"))
    except (OSError, ValueError):
        return None  # `DraftConfig` says what is wrong


def _small_config(path: str) -> ModelConfig:
    try:
        return ModelConfig.from_folder(path)
    except ValueError as error:
        raise ConfigError(f"the draft model cannot be served: {error}") from error


def _expanded(options: Options) -> Options:
    """With `~` replaced in the paths."""
    model, draft, ngram = options.model, options.speculative, options.ngram
    folder, path = os.path.expanduser(model.model_path), draft.speculative_draft_model_path
    draft = replace(draft, speculative_draft_model_path=path and os.path.expanduser(path))
    if corpus := ngram.speculative_ngram_external_corpus_path:
        # The server's process reads it, from a folder of its own.
        corpus = os.path.abspath(os.path.expanduser(corpus))
        ngram = replace(ngram, speculative_ngram_external_corpus_path=corpus)
    model = replace(model, model_path=folder)
    return replace(options, model=model, speculative=draft, ngram=ngram)


def _refuse(error: ValueError) -> int:
    print(error, file=sys.stderr, flush=True)
    return loop.EXIT_REFUSED


def make_engine(backend: Backend, options: Options) -> Engine:
    """The engine of a backend; `options` are those of its memory plan."""
    return Engine(
        backend,
        make_controller(backend.limits, options),
        overlap=options.engine.overlap_depth,
        chunked_prefill_size=options.engine.chunked_prefill_size or 0,
    )


def make_controller(limits: Limits, options: Options) -> Controller:
    """What chooses how requests decode; what it has to compile is compiled."""
    shape = draft_shape(options, 1)
    if not options.speculative.drafts_on_host:
        return StaticController(limits, nodes=shape.nodes, depth=shape.depth, width=shape.width)
    index = NgramIndex(
        options.ngram,
        nodes=shape.nodes,
        depth=shape.depth,
        vocab=limits.vocab,
        chain=limits.accept_rule != "match",
    )
    index.warm_up()
    return NgramController(limits, index)


def _facts(memory: MemoryPlan, model: ModelConfig) -> ModelFacts:
    options, limits = memory.options, memory.limits
    folder = Path(options.model.model_path).resolve()
    return ModelFacts(
        model_name=options.server.served_model_name or folder.name,
        model_folder=str(folder),
        context_length=limits.context_length,
        max_request_tokens=memory.max_request_tokens,
        vocab=model.vocab,
        eos_ids=model.eos_ids,
        max_stop_ids=limits.max_stop_ids,
        max_bias=limits.max_bias,
        max_logprobs=limits.max_logprobs,
        max_draft_depth=limits.max_depth,
        admin_api_key=options.server.admin_api_key,
        corpus_path=options.ngram.speculative_ngram_external_corpus_path,
    )


def _print_plan(console: Console, memory: MemoryPlan) -> None:
    """The parts of the memory plan and their sum, in bytes."""
    limits = memory.limits
    console.print(
        f"{memory.options.model.dtype} on {memory.device.name}: context {limits.context_length}, "
        f"{limits.num_slots - 1} requests at once, at most {memory.max_request_tokens} tokens each"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("memory plan")
    table.add_column("")
    table.add_column("bytes", justify="right")
    for line in memory.lines:
        table.add_row(line.name, line.detail, f"{line.num_bytes:,}")
    free = f"of {memory.device.free_bytes:,} that are free"
    table.add_row("total", free, f"{memory.total_bytes:,}")
    console.print(table)


@contextmanager
def _progress(console: Console, total_bytes: int) -> Iterator[ProgressCall]:
    """A bar in bytes on a terminal, else a line every few seconds and one at the end."""
    if not console.is_terminal:
        yield _Lines(console, total_bytes).add
        console.print(f"loaded {total_bytes:,} bytes")
        return
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("loading", total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)


class _Lines:
    """Progress as plain lines."""

    def __init__(self, console: Console, total_bytes: int) -> None:
        self._console, self._total, self._read = console, total_bytes, 0
        self._next = time.monotonic() + REPORT_S

    def add(self, num_bytes: int) -> None:
        """Notes bytes that were read."""
        self._read += num_bytes
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REPORT_S
            self._console.print(f"loading {self._read:,} of {self._total:,} bytes")
