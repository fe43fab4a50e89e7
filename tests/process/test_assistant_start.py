"""Start with a Gemma 4 assistant: memory plan, prefix cache, and the state of a rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.boundary.shm_allgather import ShmAllGather
from shared.boundary.tp_group import TPGroup
from shared.options.command_line import parse
from shared.process.caching import cache_policy
from shared.process.device import Device
from shared.process.start import ValidatedStartup, prepare
from tests.support.planned import GB
from tests.support.tensors import tensor_bytes
from tests.support.tiny_assistants import write_tiny_assistant
from tests.support.tiny_models import tiny_model, write_tiny
from torch_impl import platform as torch_platform
from torch_impl.weights import load_head

CPU = replace(torch_platform.PLATFORM, find_device=lambda: Device("cpu", "CPU", GB))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assistant")
    write_tiny(folder / "model", "gemma4", 0)
    write_tiny_assistant(folder / "draft", *tiny_model("gemma4", 0), 1)
    return folder


def started(folder: Path, *flags: str, drafts: bool = True) -> ValidatedStartup:
    line = ["--model-path", str(folder / "model"), "--max-total-tokens", "2048"]
    line += ["--context-length", "256", "--tool-call-parser", "none", *flags]
    if drafts:
        line += ["--speculative-algorithm", "NEXTN"]
        line += ["--speculative-draft-model-path", str(folder / "draft")]
    return prepare(parse(line), CPU)


def test_memory_plan_has_no_draft_kv(folder):
    plain, drafted = (started(folder, drafts=x).memory for x in (False, True))
    names = {line.name for line in drafted.lines} - {line.name for line in plain.lines}
    assert names == {"draft weights"}
    assert drafted.blueprint.drafts.kind == "ASSISTANT"


def test_prefix_cache_ignores_draft_kv(folder):
    policy = cache_policy(started(folder).memory)
    assert policy.is_on
    assert policy.key_lookahead == 0
    assert not policy.may_skip_draft_kv


def test_rank_memory_equals_plan(folder):
    start, of_ranks = started(folder, "--tp-size", "2"), ShmAllGather.create(2)
    plan = {line.name: line.num_bytes for line in start.memory.lines}
    state = ("KV", "KV of window 12", "token counts", "draft inputs")
    kept = sum(plan.get(name, 0) for name in state)
    for rank in range(2):
        of_rank = start.of_rank(TPGroup(rank, 2, of_ranks))
        assert tensor_bytes(of_rank.load(CPU, lambda num_bytes: None).state) == kept
        blueprint, files = of_rank.memory.blueprint, of_rank.draft_files
        assert files.checkpoint is not None
        assert files.drafts.head is not None
        loaded = load_head(
            files.checkpoint,
            files.drafts.head,
            blueprint.dtype,
            torch.device("cpu"),
            lambda num_bytes: None,
            blueprint.ranks,
        )
        clusters = 4 * blueprint.config.vocab
        assert plan["draft weights"] - clusters < tensor_bytes(loaded) <= plan["draft weights"]
    of_ranks.remove()
