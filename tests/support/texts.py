"""The texts of a start with some flags, on each backend."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from shared.engine.request import Request, SamplingParams
from shared.options.command_line import parse
from shared.process import engines
from shared.process.device import Device
from shared.process.start import prepare
from tests.support import serve_reference
from tests.support.in_process_engine import one_bucket
from tests.support.run_engine import drive

BACKENDS = {
    "reference": lambda: serve_reference.PLATFORM,
    "torch": lambda: import_module("torch_impl.platform").PLATFORM,
    "jax": lambda: import_module("jax_impl.platform").PLATFORM,
}
PROMPTS = ((5, 9, 5, 9, 11, 5, 9), (3, 200, 4))


def texts(backend: str, line: list[str]) -> list[list[int]]:
    """Greedy texts of both prompts, on a CPU; loading reads the bytes that the start names."""
    platform = replace(BACKENDS[backend](), find_device=lambda: Device("cpu", "CPU", 1 << 31))
    start = prepare(parse(line), platform)
    blueprint = replace(start.memory.blueprint, capacity=one_bucket(start.memory.capacity))
    start, read = replace(start, memory=replace(start.memory, blueprint=blueprint)), []
    made = start.load(platform, read.append)
    assert sum(read) == start.num_bytes
    made.prepare(made.capacity.programs, lambda program: None)
    engine = engines.make_engine(made, start.memory)
    sampling = SamplingParams(temperature=0.0, max_tokens=12)
    asked = [
        Request(request_id=number, prompt=prompt, sampling=sampling)
        for number, prompt in enumerate(PROMPTS)
    ]
    try:
        return [outcome.tokens for outcome in drive(engine, asked).values()]
    finally:
        engine.close()
