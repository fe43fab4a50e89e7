"""`python -m tests.support.jax_ranks FAMILY DRAFTER COUNTS WORKS`: JAX ranks equal one rank.

Its devices are virtual CPU devices. XLA needs their number at startup, so this is a process of its
own. COUNTS are numbers of ranks and WORKS some of `prefill`, `transfer`, `plain`, `chain` and
`tree` (over a block), separated by commas. The ranks of the first count start once more, and load
their programs from the cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from jax_impl.backend import JaxBackend
from shared.boundary.tp_group import TPGroup
from shared.engine.request import Request
from tests.support.backends import Drafter, PreparedOnUse, drafts_of
from tests.support.contract_host import (
    CHAIN,
    GREEDY,
    PLAIN,
    SAMPLED,
    TRANSFER_PAGES,
    Host,
    contract_capacity,
    prompt,
)
from tests.support.random_requests import FEW_BLOCK_TREE
from tests.support.random_serving import divided_drafter_of, target_of
from tests.support.ranks import SideBySide

ROOT = Path(__file__).parents[2]
TEXT = 10
"""Tokens of each text: several steps of chains with some accepted drafts."""


def main(argv: Sequence[str]) -> None:
    """Runs the works on one rank and on each count of ranks, step by step."""
    family, drafter, counts, works = argv
    config, weights = target_of(family, drafter)
    given: Drafter = divided_drafter_of(family, drafter)
    drafts, own = drafts_of(given, config)
    capacity = contract_capacity(config, drafts)
    if "tree" in works:
        chain = next(p for p in capacity.programs if p.shape == CHAIN)
        capacity = replace(
            capacity, programs=(*capacity.programs, replace(chain, shape=FEW_BLOCK_TREE))
        )
    made = (config, weights, capacity, drafts, own)
    how = {"dtype": "float32", "device": "cpu", "quick_compile": True}

    folder = TemporaryDirectory()

    def ranks(count: int) -> JaxBackend:
        kept_in = Path(folder.name) if count > 1 else None
        return JaxBackend(*made, **how, group=TPGroup(0, count, None), kept_in=kept_in)

    numbers = [int(count) for count in counts.split(",")]
    several = [ranks(count) for count in (*numbers, numbers[0])]
    backend = PreparedOnUse(SideBySide(ranks(1), several, folder.cleanup))
    host, shapes = Host(backend, {}), {"plain": PLAIN, "chain": CHAIN, "tree": FEW_BLOCK_TREE}
    for sampling in (GREEDY, SAMPLED):
        for work in works.split(","):
            request = host.request(prompt(1, 20), **sampling)
            result = host.prefill(request)
            if work == "transfer":
                transfer(host, request)
            elif work != "prefill":
                host.go_on(request, TEXT, shapes[work])
            assert result.counts[0] == 1
    assert several[0].compiles
    assert not several[-1].compiles, "what the first start compiled is not found"
    backend.close()
    print("the same bits")


def transfer(host: Host, request: Request) -> None:
    """Imports the pages of a request, and a state, into others, and exports these."""
    pages, others = host.allocator.pages.page_table[request.slot, :TRANSFER_PAGES], [300, 302, 301]
    words = host.export(pages.tolist()[: len(others)])
    host.run(host.import_plan(words, others))
    np.testing.assert_array_equal(host.export(others), words)
    state = np.arange(host.export([], 1).size, dtype=np.int32).reshape(host.export([], 1).shape)
    host.run(host.import_plan(state, [], 2))
    np.testing.assert_array_equal(host.export([], 2), state)


def check_ranks(family: str, drafter: str, counts: str, works: str) -> None:
    """Runs `main` in a process with the largest number of devices, and checks its exit code."""
    devices = max(map(int, counts.split(",")))
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, "-m", "tests.support.jax_ranks", family, drafter, counts, works]
    done = subprocess.run(
        command, env=os.environ | flags, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.strip().endswith("the same bits"), f"{done.stdout}\n{done.stderr[-4000:]}"


if __name__ == "__main__":
    main(sys.argv[1:])
