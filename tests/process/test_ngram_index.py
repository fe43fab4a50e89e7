"""The n-gram backend of a server, and overlap of steps with the device table."""

from dataclasses import replace
from pathlib import Path

import pytest

from shared.boundary.backend import StepFuture, StepPlan
from shared.boundary.ngram_table import ENTRY_BYTES
from shared.engine.cache_policy import NO_CACHE
from shared.engine.engine import Engine
from shared.engine.request import NGRAM, PREFILL, Request, SamplingParams
from shared.options.command_line import parse
from shared.process import engines
from shared.process.device import Device
from shared.process.start import ValidatedStartup, prepare
from shared.process.startup_report import start_notes
from tests.support import serve_reference
from tests.support.run_engine import drive
from tests.support.tiny_models import write_tiny

SIZES = ["--max-running-requests", "2", "--context-length", "64", "--chunked-prefill-size", "64"]


CAPACITY = "--speculative-ngram-capacity"


def started(folder: Path, kind: str, flags: str, free_bytes: int = 1 << 31) -> ValidatedStartup:
    write_tiny(folder, "llama", 0)
    line = ["--model-path", str(folder), "--speculative-algorithm", "NGRAM", *SIZES]
    line += ["--dtype", "float32"]
    device = Device(kind, kind.upper(), free_bytes)
    platform = replace(serve_reference.PLATFORM, find_device=lambda: device)
    return prepare(parse([*line, *flags.split()]), platform)


@pytest.mark.parametrize(
    ("kind", "flags", "is_table"),
    [
        ("gpu", "", True),
        ("cpu", "", True),
        ("cpu", "--speculative-adaptive", False),
        ("gpu", "--speculative-ngram-backend host", False),
        ("gpu", "--speculative-ngram-backend device", True),
        ("cpu", "--speculative-ngram-backend device", True),
        ("gpu", "--speculative-ngram-scope request", True),
    ],
)
def test_ngram_backend_flag_selects_device_table(
    kind: str, flags: str, is_table: bool, tmp_path: Path
) -> None:
    memory = started(tmp_path, kind, f"{CAPACITY} 70000 {flags}").memory
    table = memory.capacity.texts
    assert memory.blueprint.drafts.uses_ngrams is is_table is (table is not None)
    lines = {line.name: line for line in memory.lines}
    if table is not None:
        assert table.groups == 1024
        assert table.by_request is ("request" in flags)
        assert 12 * 65536 < lines["n-grams"].num_bytes < 12 * 66000
    else:
        assert ("n-grams" in lines) is (kind == "cpu")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--speculative-adaptive", "--speculative-adaptive"),
        ("--speculative-ngram-external-sam-budget 2", "--speculative-ngram-external-sam-budget"),
        (
            "--speculative-adaptive --speculative-ngram-match-type PROB",
            "--speculative-ngram-match-type, --speculative-adaptive",
        ),
        ("--speculative-ngram-backend host", None),
        ("--speculative-ngram-backend device", None),
        ("", None),
    ],
)
def test_startup_report_names_flags_that_require_host(
    flags: str, named: str | None, tmp_path: Path
) -> None:
    start = started(tmp_path, "cpu", flags)
    notes = list(start_notes(start))
    matching = [note for note in notes if "--speculative-ngram-backend" in note]
    assert matching == (
        [] if named is None else [f"--speculative-ngram-backend host: required by {named}"]
    )


@pytest.mark.parametrize(
    ("free_bytes", "capacity", "entries"),
    [(1 << 40, None, 1 << 23), (1 << 30, None, 1 << 20), (1 << 30, 10_000_000, 1 << 23)],
)
def test_default_ngram_capacity_fits_small_devices(
    free_bytes: int, capacity: int | None, entries: int, tmp_path: Path
) -> None:
    """An explicit capacity is not reduced."""
    flags = "" if capacity is None else f"{CAPACITY} {capacity}"
    memory = started(tmp_path, "gpu", flags, free_bytes).memory
    (line,) = (line for line in memory.lines if line.name == "n-grams")
    assert line.detail == f"at most {entries:,}, on the device"
    assert line.num_bytes - ENTRY_BYTES * entries < 1000
    assert (line.num_bytes <= 0.02 * free_bytes) is (capacity is None)
    assert memory.total_bytes <= free_bytes


def test_device_ngram_steps_overlap_and_report_ngram_source(
    tmp_path: Path,
) -> None:
    start = started(tmp_path, "cpu", f"{CAPACITY} 70000")
    backend = start.load(serve_reference.PLATFORM, lambda num_bytes: None)
    settled = start.memory.settled
    controller = engines.make_controller(
        backend, settled, on_gpu=False, has_experts=False, draft_share=0.0
    )
    engine = Engine(
        backend,
        controller,
        overlap=1,
        chunked_prefill_size=settled.prefill_chunk_size,
        cache=NO_CACHE,
    )
    backend.prepare(backend.capacity.programs, lambda program: None)
    submit, in_flight = backend.submit, list[int]()

    def counted(plan: StepPlan) -> StepFuture:
        in_flight.append(len(engine.flights))
        return submit(plan)

    vars(backend)["submit"] = counted
    sampling = SamplingParams(max_tokens=20, traces=True)
    texts = []
    for number in range(2):
        in_flight.clear()
        asked = Request(request_id=number, prompt=(3, 4, 5, 6), sampling=sampling)
        texts.append(drive(engine, [asked])[number])
    backend.close()
    assert texts[0].tokens == texts[1].tokens
    assert sum(texts[1].accepted) > 10
    steps = [event.step for event in texts[1].traced]
    assert {step.source for step in steps if step is not None} == {PREFILL, NGRAM}
    assert in_flight[0] == 0
    assert set(in_flight[1 : len(steps)]) == {1}
