"""Whole steps of ranks on GPUs, in bfloat16 with the kernels, beside those of one GPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from shared.boundary.mailboxes import Mailboxes
from shared.boundary.program import CAPTURED
from shared.boundary.ranks import Ranks
from shared.models.families import config_from_dict
from tests.support.backends import PreparedOnUse, drafts_of
from tests.support.contract_host import (
    CHAIN,
    GREEDY,
    PLAIN,
    SAMPLED,
    Host,
    contract_capacity,
    prompt,
)
from tests.support.gpu_ranks import Rank
from tests.support.ranks import SideBySide
from tests.support.tiny_heads import tiny_head
from tests.support.tiny_models import DIVIDED, tiny_config, tiny_weights

TEXT = 10
"""Tokens of each text."""
_WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
MODELS = {
    "dense": ("qwen3", _WIDE, "none"),
    "fed by EAGLE3": ("llama", _WIDE, "EAGLE3"),
    "hybrid": (DIVIDED["qwen3_5"], {}, "NEXTN"),
}
"""Families, what is changed of them, and what drafts: squares of whole chunks on a rank, or not."""


def _made(name: str) -> tuple[Any, ...]:
    """What a backend is made from."""
    family, changed, drafter = MODELS[name]
    of_family = tiny_config(family, nested=False, with_mtp=True, tied=False)
    config = config_from_dict(of_family | changed)
    weights = tiny_weights(config, 3)
    given: Any = drafter
    if drafter == "EAGLE3":
        given = tiny_head(
            config, weights, "EAGLE3", 5, num_attention_heads=8, num_key_value_heads=2
        )
    return config, weights, contract_capacity(config), *drafts_of(given, config)


def _run(backend: Any, name: str) -> None:
    """Prompts and texts; each step is compared as it ends."""
    host = Host(PreparedOnUse(backend), {})
    for number, sampling in enumerate((GREEDY, SAMPLED)):
        request = host.request(prompt(number, 20 + 9 * number), **sampling)
        result = host.prefill(request)
        assert result.counts[0] == 1
        host.go_on(request, TEXT, PLAIN if MODELS[name][2] == "none" else CHAIN)


def steps_of_torch(rank: Rank, name: str) -> int:
    """Steps that had the bits of one GPU, captured and not.

    Raises:
      AssertionError: One has not; says which field.
    """
    from torch_impl.backend import TorchBackend

    device = torch.device("cuda", rank.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    mailboxes = rank.meet(Mailboxes.create(rank.count, wait_s=90.0) if rank.rank == 0 else None)[0]
    made, steps = _made(name), 0
    with mock.patch("torch_impl.backend.check_ranks"):
        for captured in ((), CAPTURED):
            how = {"dtype": "bfloat16", "device": device, "captured": captured}
            alone = TorchBackend(*made, **how)
            several = TorchBackend(*made, **how, group=Ranks(rank.rank, rank.count, mailboxes))
            backend = SideBySide(alone, [several], lambda: None)
            _run(backend, name)
            backend.close()
            steps += 1
    rank.meet()
    if rank.rank == 0:
        mailboxes.remove()
    return steps
