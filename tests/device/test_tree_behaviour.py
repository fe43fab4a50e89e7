"""Invariance of draft trees: the output does not depend on the node that carries a token.

The tests on `host` run on every backend with the trees that the host makes; those on `grown` with
trees of the device's drafter, in shapes of which JAX would compile too many.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from shared.boundary.backend import StepResult
from shared.spec import acceptance, draft_tree
from tests.support import contract_host
from tests.support.closing_fixture import closing_fixture
from tests.support.contract_host import (
    GREEDY,
    PAGE_SIZE,
    POISON,
    SAMPLED,
    Host,
    either_sampling,
    emitted,
    prompt,
)
from tests.support.equality import MARGIN, Oracle
from tests.support.mutations import prover
from tests.support.tree_subjects import CHAIN, DRAFTED, NARROW, TAKING_TURNS, TREE, Served, name_of
from torch_impl.ops.sampling import acceptance as torch_acceptance

either_tree = pytest.mark.parametrize("shape", [TREE, NARROW], ids=name_of)


served = closing_fixture(Served)


@pytest.fixture(params=DRAFTED)
def drafted(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["reference", "torch"])
def grown(request: pytest.FixtureRequest, served: Served, drafted: str) -> Host:
    """A host on a backend with a drafter that grows trees of every shape."""
    return Host(served.backend(request.param, drafted), {})


def wrong(tokens: int) -> int:
    """Another token, and not the poisoned one."""
    return (tokens + 1) % 200 + POISON + 1


# Trees of the host's


@either_sampling
def test_tree_without_branches_accepts_same_as_chain(host, how):
    """The chain's own drafts, verified by a program for any tree."""
    tokens = prompt(2, 20)
    chained, treed = (host.request(tokens, **how, max_draft_tokens=2) for _ in range(2))
    host.prefill(chained, treed)
    counts = []
    for _ in range(8):
        chain = host.decode(chained, shape=contract_host.CHAIN)
        assert chain.num_nodes[0] == 3
        plan = host.tree_plan(treed, chain.drafts[0, 1:3].tolist(), [0, 1])
        tree = host.run(plan)
        assert emitted(tree, 0) == emitted(chain, 0)
        counts.append(int(tree.counts[0]))
    assert len(set(counts)) > 1, "all steps accepted alike, so nothing was tested"


def arrangements() -> list[tuple[int, int, int]]:
    """The parents of nodes 1 to 3 in every tree of the contract's shape, which is 2 deep."""
    found = [(0, *rest) for rest in product((0, 1), (0, 1, 2))]
    return [p for p in found if draft_tree.depths(np.array([[0, *p]])).max() <= 2]


@either_sampling
def test_tree_node_sampling_independent_of_node_index(host, how):
    """In each tree, each node with its ancestors carries the next tokens of the output once."""
    tokens = prompt(2, 20)
    whole = host.alone(tokens, 80, **how)
    request = host.request(tokens, **how)
    text = emitted(host.prefill(request), 0)
    for parents, last in product(arrangements(), (1, 2, 3)):
        path = [last] if parents[last - 1] == 0 else [parents[last - 1], last]
        nodes = tree_on_the_way(parents, path, whole[len(text) :])
        result = host.run(host.tree_plan(request, nodes, parents))
        assert result.counts[0] == len(path) + 1, (parents, path)
        text += emitted(result, 0)
        assert text == whole[: len(text)], (parents, path)
        if len(text) > 70:
            request = host.request(tokens, **how)
            text = emitted(host.prefill(request), 0)


def tree_on_the_way(parents: tuple[int, ...], path: list[int], coming: list[int]) -> list[int]:
    """Tokens of nodes 1 and on: the coming ones along the path, and off it none that is right."""
    nodes = [wrong(coming[0] + coming[1] + number) for number in range(len(parents))]
    for token, node in zip(coming, path, strict=False):
        nodes[node - 1] = token
    for node, token in enumerate(nodes):
        taken = {nodes[other] for other in range(len(nodes)) if other != node} | {*coming[:3]}
        while node + 1 not in path and token in taken:
            token = nodes[node] = wrong(token)
    return nodes


@either_sampling
def test_tree_with_all_drafts_rejected_preserves_output(host, how):
    tokens = prompt(1, 20)
    whole = host.alone(tokens, 24, **how)
    request = host.request(tokens, **how)
    text = emitted(host.prefill(request), 0)
    while len(text) < 16:
        right, after = whole[len(text) : len(text) + 2]
        others = [wrong(right), wrong(wrong(right)), wrong(after)]
        result = host.run(host.tree_plan(request, others, [0, 0, 1]))
        assert result.counts[0] == 1
        text += emitted(result, 0)
    text += host.go_on(request, 8, contract_host.CHAIN)
    assert text[:24] == whole


# Trees of the device's drafter


@either_sampling
@either_tree
def test_grown_tree_preserves_output_and_accepts_branches(grown, shape, how):
    tokens = prompt(11, 20)
    request = grown.request(tokens, **how)
    futures = grown.submit_text(request, 14, shape)
    results = [future.result() for future in futures]
    text = [token for result in results for token in emitted(result, 0)]
    assert text == grown.alone(tokens, len(text), **how)
    counts = [int(result.counts[0]) for result in results[1:]]
    assert 2 < max(counts) <= shape.max_tokens
    branches = [off_the_first_branch(result) for result in results[1:]]
    assert any(branches), "only chains were accepted, so no window was moved"


def off_the_first_branch(result: StepResult) -> bool:
    """Returns whether a step accepted a node whose index is not its parent's plus one."""
    node, tokens = 0, emitted(result, 0)
    for token in tokens[:-1]:
        child = next(
            i
            for i in range(1, result.num_nodes[0])
            if result.parents[0, i] == node and result.drafts[0, i] == token
        )
        if child != node + 1:
            return True
        node = child
    return False


class Walks:
    """The choices at all nodes of the steps that ran, as the acceptance walk got them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[np.ndarray, ...]] = []
        for owner in (acceptance, torch_acceptance):
            patch.setattr(owner, "accept_greedy_path", self._noting(owner.accept_greedy_path))

    def _noting(self, walk: Callable) -> Callable:
        def noted(*arguments):
            self.seen.append(tuple(np.asarray(each)[0].copy() for each in arguments[:4]))
            return walk(*arguments)

        return noted


@pytest.mark.parametrize(
    "how", [GREEDY, SAMPLED, TAKING_TURNS], ids=["greedy", "sampled", "counted"]
)
@either_tree
def test_every_tree_node_samples_as_plain_decoding(grown, drafted, shape, how, monkeypatch):
    """Position, noise, penalties and mask of a node are those of its path, accepted or not."""
    walks, oracle = Walks(monkeypatch), Oracle(*DRAFTED[drafted].model())
    request = grown.request(prompt(3, 20), **how)
    text = emitted(grown.prefill(request), 0)
    for _ in range(3):
        result = grown.decode(request, shape=shape)
        tokens, parents, num_nodes, choices = walks.seen[-1]
        paths = {0: []}
        for node in range(1, num_nodes):
            paths[node] = [*paths[parents[node]], int(tokens[node])]
        for node, path in paths.items():
            output = [*text, *path, int(choices[node])]
            chosen, margins = oracle.choose(request.prompt, output, request.sampling)
            assert chosen[-1] == choices[node] or margins[-1] < MARGIN, (node, path)
        text += emitted(result, 0)


@either_sampling
def test_tree_best_child_equals_chain_draft(grown, how):
    """A node's children are sorted best first, and the best child is the chain's token.

    A node's children are kept best first, and the best one is the chain's.
    """
    tokens = prompt(4, 20)
    text = grown.alone(tokens, 16, **how)
    depths = []
    for known in range(1, 13):
        twins = [grown.request(tokens, output=text[:known], **how) for _ in range(2)]
        grown.prefill(*twins)
        tree, chain = (
            grown.decode(twin, shape=shape)
            for twin, shape in zip(twins, (TREE, CHAIN), strict=True)
        )
        depths.append(common_depth(tree, chain.drafts[0]))
        for twin in twins:
            grown.allocator.free(twin.slot)
    assert max(depths) == CHAIN.depth, "the chain never lay in the tree, so nothing was tested"


def common_depth(tree: StepResult, chain: np.ndarray) -> int:
    """Returns the depth to which the tree contains the chain; fails if the tree goes on
    differently.
    """
    node, tokens, parents = 0, tree.drafts[0], tree.parents[0]
    for depth, token in enumerate(chain[1:].tolist()):
        children = [i for i in range(1, tree.num_nodes[0]) if parents[i] == node]
        if not children:
            return depth
        found = [child for child in children if tokens[child] == token]
        assert found, f"{tokens[children]} go on without {token}, the chain's draft {depth + 1}"
        node = found[0]
    return len(chain) - 1


def test_tree_drafting_writes_within_scratch(grown):
    """Traps: room for N rows, where a level's k nodes are written S - 1 times (here 33 against 8).

    After the reserved pages the page table continues with a neighbour's draft memory.
    """
    neighbour, twin = (grown.request(prompt(5, 60), positions=110) for _ in range(2))
    grown.prefill(neighbour)
    grown.prefill(twin)
    tokens = prompt(6, 21)
    request = grown.request(tokens, positions=len(tokens))
    text = emitted(grown.prefill(request), 0)
    for _ in range(5):
        reserved = len(tokens) + len(text) - 1 + NARROW.scratch
        grown.allocator.reserve(request.slot, reserved)
        plan = grown.decode_plan(request, shape=NARROW)
        held = -(-reserved // PAGE_SIZE)
        plan.page_table[0, held : held + 14] = grown.allocator.pages.page_table[neighbour.slot, :14]
        text += emitted(grown.run(plan), 0)
    assert text == grown.alone(tokens, len(text))
    for _ in range(4):
        disturbed, whole = (grown.decode(each, shape=NARROW) for each in (neighbour, twin))
        np.testing.assert_array_equal(disturbed.drafts[0], whole.drafts[0])
        np.testing.assert_array_equal(disturbed.parents[0], whole.parents[0])
        assert emitted(disturbed, 0) == emitted(whole, 0)


test_planted_fault_is_detected = prover("device/test_tree_behaviour", globals())
