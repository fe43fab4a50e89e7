"""Choice of the controller by options and measured step times."""

import math
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shared.engine.controller import StaticController
from shared.engine.ngram_controllers.adaptive import AdaptiveNgramController
from shared.models.checkpoint import SINGLE_FILE
from shared.models.families import config_from_folder
from shared.models.parameters import parameters
from shared.options.command_line import parse
from shared.process import engines
from shared.process.device import Device
from shared.process.start import prepare
from tests.support import serve_reference
from tests.support.tiny_heads import write_tiny_head
from tests.support.tiny_models import tiny_model, write_tiny

SHORT, LONG = 0.0003, 0.002
"""Seconds of a plain step with overlap."""


@pytest.mark.parametrize(
    ("plain_s", "on_gpu", "flags", "chooses"),
    [
        (SHORT, True, (), False),
        (LONG, True, (), True),
        (SHORT, False, (), True),
        (SHORT, True, ("--speculative-ngram-external-sam-budget", "2"), True),
    ],
)
def test_adaptive_ngram_disabled_for_short_gpu_steps(
    plain_s, on_gpu, flags, chooses, tmp_path, monkeypatch
):
    """With external corpora, drafting stays enabled for steps of any length."""
    write_tiny(tmp_path, "llama", 0)
    line = ["--model-path", str(tmp_path), "--speculative-algorithm", "NGRAM", *flags]
    line += ["--speculative-adaptive", "--max-running-requests", "1", "--context-length", "64"]
    given_options = parse(line)
    cpu = replace(serve_reference.PLATFORM, find_device=lambda: Device("cpu", "CPU", 1 << 31))
    start = prepare(given_options, cpu)
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
    notes = " ".join(controller.notes)
    assert ("NGRAM is disabled" in notes) is not chooses
    assert ("step time at batch 1: " in notes) is chooses


def test_drafter_cost_fraction_counts_lm_head_read(tmp_path):
    """Covers a shared and an own `lm_head`; of an own embedding one row is read."""
    target = tiny_model("llama", 0)
    write_tiny(tmp_path / "target", "llama", 0)
    vocab, passes = target[0].vocab, 3
    line = ["--model-path", str(tmp_path / "target"), "--speculative-algorithm", "EAGLE3+NGRAM"]
    line += ["--speculative-num-steps", str(passes + 1)]

    def share(name: str, size: int | None, **more: np.ndarray) -> float:
        folder = tmp_path / name
        write_tiny_head(folder, *target, "EAGLE3", 1, draft_vocab_size=size)
        save_file(load_file(folder / SINGLE_FILE) | more, folder / SINGLE_FILE)
        given_options = parse([*line, "--speculative-draft-model-path", str(folder)])
        memory = prepare(given_options, serve_reference.PLATFORM).memory
        return engines.drafter_cost_fraction(memory.blueprint, memory.settled)

    shared, own, half = share("shared", None), share("own", vocab), share("half", vocab // 2)
    trained = share("trained", vocab, **{"embed_tokens.weight": target[1]["embed"] + 1})
    assert own == trained == pytest.approx(shared)
    config = config_from_folder(tmp_path / "target")
    read = sum(math.prod(parameter.shape) for parameter in parameters(config, False))
    read -= vocab * config.hidden  # one row of the embedding
    assert own - half == pytest.approx(passes * vocab // 2 * config.hidden / read)
