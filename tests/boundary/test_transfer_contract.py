"""Export and import steps on every backend: exact, in order, and confined to what they name."""

from __future__ import annotations

import numpy as np
import pytest

from shared.boundary.program import StepKind
from shared.engine.rows import Chunk
from tests.support.contract_host import (
    CHAIN,
    PAGE_SIZE,
    PLAIN,
    TRANSFER_PAGES,
    Host,
    emitted,
    prompt,
)
from tests.support.mutations import prover

TOKENS = prompt(31, 70)
SAVED = 64
SNAPSHOT, OTHER = 2, 3


def pages_of(host: Host, request) -> list[int]:
    return host.allocator.pages.page_table[request.slot].tolist()


def prefilled(host: Host, tokens=TOKENS):
    """A request with a snapshot at position 64."""
    request = host.request(tokens)
    plan = host.prefill_plan(request)
    plan.snapshots.save[0], plan.snapshots.save_at[0] = SNAPSHOT, SAVED
    assert host.run(plan).snapshot_saved[0]
    return request


def test_pages_survive_export_and_import_bitwise(host):
    request = prefilled(host)
    source = pages_of(host, request)[:TRANSFER_PAGES]
    words, into = host.export(source), [300, 302, 301, 305]
    assert np.any(words)
    host.run(host.import_plan(words, into))
    np.testing.assert_array_equal(host.export(into), words)
    np.testing.assert_array_equal(host.export(source), words)


def test_snapshot_survives_export_and_import_bitwise(host):
    prefilled(host)
    words = host.export([], SNAPSHOT)
    assert np.any(words)
    host.run(host.import_plan(words, [], OTHER))
    np.testing.assert_array_equal(host.export([], OTHER), words)


def test_import_writes_only_named_pages(host):
    request = prefilled(host)
    words = host.export(pages_of(host, request)[:2])
    before = [host.export([page]) for page in range(298, 306)]
    states = [host.export([], each) for each in (1, SNAPSHOT, OTHER)]
    host.run(host.import_plan(words, [301, 304]))
    after = [host.export([page]) for page in range(298, 306)]
    changed = [a.tobytes() != b.tobytes() for a, b in zip(before, after, strict=True)]
    assert [298 + i for i, each in enumerate(changed) if each] == [301, 304]
    for each, state in zip((1, SNAPSHOT, OTHER), states, strict=True):
        np.testing.assert_array_equal(host.export([], each), state)


def test_import_writes_only_named_snapshot(host):
    request = prefilled(host)
    pages = pages_of(host, request)[:TRANSFER_PAGES]
    held, words = host.export(pages), host.export([], SNAPSHOT)
    before = {each: host.export([], each) for each in (1, SNAPSHOT)}
    host.run(host.import_plan(words + 1, [], OTHER))
    for each, state in before.items():
        np.testing.assert_array_equal(host.export([], each), state)
    np.testing.assert_array_equal(host.export(pages), held)


def test_transfers_take_effect_in_submission_order(host):
    """Nothing is waited for: a prompt, its export, and a prompt that gets the same pages."""
    first = host.request(TOKENS)
    pages = pages_of(host, first)[:TRANSFER_PAGES]
    futures = [
        host.backend.submit(plan)
        for plan in (host.prefill_plan(first), host.transfer_plan(StepKind.EXPORT_KV, pages))
    ]
    heir = host.heir(first, prompt(32, 70))
    assert pages_of(host, heir)[:TRANSFER_PAGES] == pages
    futures.append(host.backend.submit(host.prefill_plan(heir)))
    futures.append(host.backend.submit(host.transfer_plan(StepKind.EXPORT_KV, pages)))
    words = [futures[i].result().words.pages for i in (1, 3)]
    again = prefilled(host)
    np.testing.assert_array_equal(words[0], host.export(pages_of(host, again)[:TRANSFER_PAGES]))
    assert np.any(words[0] != words[1])


@pytest.mark.parametrize(
    "shape",
    [pytest.param(PLAIN, id="plain", marks=pytest.mark.matrix), pytest.param(CHAIN, id="chain")],
)
def test_imported_prefix_continues_as_original(host, shape):
    """Other pages and another snapshot, imported right before the request that starts there."""
    owner = prefilled(host)
    held, count = pages_of(host, owner), SAVED // PAGE_SIZE
    state = host.export([], SNAPSHOT)
    parts = [held[i : i + TRANSFER_PAGES] for i in range(0, count, TRANSFER_PAGES)]
    words = [host.export(pages) for pages in parts]
    texts = []
    for is_imported in (False, True):
        request = host.request(TOKENS)
        if is_imported:
            own = pages_of(host, request)
            for i, part in enumerate(words):
                first = i * TRANSFER_PAGES
                pages = own[first : first + len(part)]
                host.backend.submit(host.import_plan(part, pages))
            host.backend.submit(host.import_plan(state, [], OTHER))
        else:
            host.share(owner, request, SAVED)
        plan = host.prefill_plan(Chunk(request, SAVED, len(TOKENS)))
        plan.starts[0], plan.snapshots.restore[0] = 1, OTHER if is_imported else SNAPSHOT
        first_step = host.run(plan)
        steps = [host.decode(request, shape=shape) for _ in range(6)]
        texts.append([first_step.tokens[0].tolist(), *[emitted(step, 0) for step in steps]])
    assert texts[0] == texts[1]


def test_imported_nan_harms_no_later_owner(host):
    request = prefilled(host)
    pages = pages_of(host, request)[:TRANSFER_PAGES]
    poison = np.full_like(host.export(pages), np.float32(np.nan).view(np.int32))
    host.run(host.import_plan(poison, pages))
    state = np.full_like(host.export([], 1), np.float32(np.nan).view(np.int32))
    host.run(host.import_plan(state, [], 1))
    heir = host.heir(request, TOKENS)
    assert host.text(heir, 8, CHAIN) == host.alone(TOKENS, 8)


def test_padding_of_import_changes_no_output(host):
    """The sinks take the words of padding."""
    request = host.request(TOKENS)
    words = np.full_like(host.export([1]), np.float32(np.nan).view(np.int32))
    plan = host.import_plan(np.repeat(words, TRANSFER_PAGES, axis=0), [300])
    host.run(plan)
    host.run(host.import_plan(np.full_like(host.export([], 1), -1), [], 0))
    assert host.text(request, 8, CHAIN) == host.alone(TOKENS, 8)


def test_export_reads_no_unnamed_snapshot(host):
    """Two snapshots differ, so an export of the wrong one is found."""
    prefilled(host)
    words = host.export([], SNAPSHOT)
    host.run(host.import_plan(words + 1, [], OTHER))
    np.testing.assert_array_equal(host.export([], SNAPSHOT), words)
    np.testing.assert_array_equal(host.export([], OTHER), words + 1)


test_planted_fault_is_detected = prover("boundary/test_transfer_contract", globals())
