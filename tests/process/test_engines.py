"""What chooses how requests decode, by what a start was told and what its steps take."""

from dataclasses import replace

import pytest

from shared.engine.controller import StaticController
from shared.engine.ngram.adaptive import AdaptiveNgramController
from shared.options.options import parse
from shared.process import engines
from shared.process.device import Device
from shared.process.notes import step_notes
from shared.process.start import prepare
from tests.support import reference_serve
from tests.support.tiny_models import write_tiny

SHORT, LONG = 0.0003, 0.002
"""Seconds of a plain step that does not wait for the one before."""


@pytest.mark.parametrize(
    ("plain_s", "on_gpu", "flags", "chooses"),
    [
        (SHORT, True, (), False),
        (LONG, True, (), True),
        (SHORT, False, (), True),
        (SHORT, True, ("--speculative-ngram-external-sam-budget", "2"), True),
    ],
)
def test_ngram_chooses_unless_a_gpus_step_is_too_short_for_the_host(
    plain_s, on_gpu, flags, chooses, tmp_path, monkeypatch
):
    """A start that was told of corpora drafts from them, however short its steps are."""
    write_tiny(tmp_path, "llama", 0)
    line = ["--model-path", str(tmp_path), "--speculative-algorithm", "NGRAM", *flags]
    line += ["--speculative-adaptive", "--max-running-requests", "1", "--context-length", "64"]
    told = parse(line)
    cpu = replace(reference_serve.PLATFORM, find_device=lambda: Device("cpu", "CPU", 1 << 31))
    start = prepare(told, cpu)
    backend = start.load(cpu, lambda num_bytes: None)
    tiers = len(start.memory.settled.candidates) + 1
    table = {1: [*[2 * plain_s] * tiers, plain_s]}
    monkeypatch.setattr(engines, "step_seconds", lambda *_, **__: table)
    controller = engines.make_controller(
        backend, start.memory.settled, on_gpu=on_gpu, has_experts=False, draft_share=0.0
    )
    expected = AdaptiveNgramController if chooses else StaticController
    assert isinstance(controller, expected)
    if not chooses:
        assert controller.shape_for(1).is_plain
    said = " ".join(step_notes(told, controller))
    assert ("NGRAM drafts nothing here" in said) is not chooses
