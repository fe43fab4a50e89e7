"""Kernels of GDN layers and of state replay: on a GPU, or interpreted.

The result of a node is bitwise equal to plain decoding, in every tree.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl

from kernels.pallas_gpu.gdn import gdn_tree
from kernels.recurrent_sizes import size_of_list
from shared.models.mixers import RecurrentConfig
from shared.spec import recurrent_mixer
from shared.spec import recurrent_state as spec
from tests.support.cases.gdn.recurrent_layer import (
    block_trees,
    parents_of,
)
from tests.support.gdn_layer_kernels import (
    APART,
    CASES,
    CUT,
    LAYER,
    MAMBA2,
    SHARED_KEYS,
    WHOLE,
    commit,
    found,
    make,
    mix,
    replay_case,
    replayed,
    specified,
)
from tests.support.kernels import (
    INTERPRET,
    KERNELS,
    in_languages,
    in_pallas,
    share_arithmetic,
)

pytestmark = pytest.mark.usefixtures("interpreted")

# The order of sums differs, and each exp2 errs by some 1e-7.
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}
# Results have 8 bits; all before them is float32.
HALF = {"rtol": 2**-8, "atol": 1e-5}
each_language = pytest.mark.parametrize("language", KERNELS)
each_mixer = pytest.mark.parametrize("sizes", [SHARED_KEYS, MAMBA2], ids=["GDN", "Mamba2"])
# Of Pallas: plain decoding, trees, and chains in the other sizes and precision.
COMPILED = (
    "plain decoding",
    "trees",
    "chains of up to 4, unshared keys, half precision",
    "Mamba2, plain decoding",
    "Mamba2, trees",
)


def these(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("language", "name"), in_languages(names, COMPILED))


@these(*CASES)
def test_gdn_layer_matches_spec(name: str, language: str) -> None:
    case, got = CASES[name], found(language, name)
    out, kept = specified(case)
    np.testing.assert_allclose(got.out, out, **(HALF if case.half else FLOAT32))
    assert not got.out[case.row_starts[-1] :].any()
    written = kept if case.has_fields else kept[-1:]
    is_node = np.arange(case.nodes) < case.counts[:, None]
    for mine, want in zip(got.kept, written, strict=True):
        np.testing.assert_allclose(mine[LAYER][is_node], want[is_node], **FLOAT32)
        assert np.isnan(mine[LAYER][~is_node]).all()
        assert np.isnan(mine[1 - LAYER]).all()
    np.testing.assert_array_equal(got.kept[-1][LAYER][is_node], kept[-1][is_node])
    if case.has_fields:
        # The smallest decay is some 1e-6: no tolerance but that of its digits.
        gates = (got.kept[2][LAYER][is_node], kept[2][is_node])
        np.testing.assert_allclose(*gates, rtol=1e-5)
        np.testing.assert_array_equal(got.recurrent, case.recurrent)


@these("plain decoding", "Mamba2, plain decoding")
def test_gdn_decode_advances_state_and_replay_conv_state(name: str, language: str) -> None:
    case, got = CASES[name], found(language, name)
    is_run = case.counts > 0
    slots = case.slots[is_run]
    held = (case.recurrent[LAYER, slots], case.window[LAYER, slots])
    rows = case.projected[: is_run.sum()]
    out, recurrent, window = recurrent_mixer.recurrent_decode(rows, case.weights, case.sizes, *held)
    np.testing.assert_allclose(got.out[: len(rows)], out, **FLOAT32)
    want = case.recurrent.copy()
    want[LAYER, slots] = recurrent
    np.testing.assert_allclose(got.recurrent, want, **FLOAT32)
    path = np.zeros((len(case.slots), 1))
    states = (got.recurrent, case.window, got.kept)
    after, moved = commit(language, case, states, path, case.counts)
    np.testing.assert_array_equal(after, got.recurrent)
    want = case.window.copy()
    want[LAYER, slots] = window
    np.testing.assert_array_equal(moved[LAYER], want[LAYER])


@each_language
def test_mamba2_inputs_rounded_to_row_dtype(language: str) -> None:
    got = mix(language, replace(CASES["Mamba2, trees"], half=True))
    k, inputs = got.kept[0][LAYER], got.kept[-1][LAYER]
    is_node = ~np.isnan(inputs[..., 0])
    half = np.float16 if language == "triton" and INTERPRET else ml_dtypes.bfloat16
    np.testing.assert_array_equal(k[is_node], k[is_node].astype(half).astype(np.float32))
    exact = found(language, "Mamba2, trees").kept[0][LAYER]
    np.testing.assert_allclose(k[is_node], exact[is_node], rtol=2**-8)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@these("chains of up to 5", "trees", "Mamba2, trees")
def test_gdn_layer_nan_request_preserves_other_requests(name: str, language: str) -> None:
    case, want = CASES[name], found(language, name)
    projected = case.projected.copy()
    projected[: case.counts[0]] = np.nan
    recurrent, window = case.recurrent.copy(), case.window.copy()
    recurrent[LAYER, case.slots[0]] = window[LAYER, case.slots[0]] = np.nan
    got = mix(language, replace(case, projected=projected, recurrent=recurrent, window=window))
    assert np.isnan(got.out[: case.counts[0]]).all()
    np.testing.assert_array_equal(got.out[case.counts[0] :], want.out[case.counts[0] :])
    for mine, theirs in zip(got.kept, want.kept, strict=True):
        np.testing.assert_array_equal(mine[:, 1:], theirs[:, 1:])


@these("chains of up to 5", "trees", "plain decoding", "Mamba2, trees")
def test_gdn_layer_row_is_batch_invariant(name: str, language: str) -> None:
    case, together = CASES[name], found(language, name)
    order = np.random.default_rng(3).permutation(len(case.counts))
    starts = case.row_starts
    rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order])
    rows = np.append(rows, np.arange(starts[-1], len(case.projected)))
    parents = None if case.parents is None else case.parents[order]
    others = {"slots": case.slots[order], "counts": case.counts[order], "parents": parents}
    got = mix(language, replace(case, projected=case.projected[rows], **others))
    np.testing.assert_array_equal(got.out, together.out[rows])
    np.testing.assert_array_equal(got.recurrent, together.recurrent)
    for mine, theirs in zip(got.kept, together.kept, strict=True):
        np.testing.assert_array_equal(mine, theirs[:, order])


# A tree has paths that are chains.
CHAIN_OF_A_TREE = pytest.param(False, marks=pytest.mark.matrix if INTERPRET else ())


def paths_of(parents: Sequence[int]) -> list[list[int]]:
    """The path to each leaf of a tree."""
    paths = []
    for leaf in set(range(len(parents))) - set(parents[1:]):
        path = [leaf]
        while path[0] > 0:
            path.insert(0, parents[path[0]])
        paths.append(path)
    return paths


@each_language
@pytest.mark.parametrize("is_tree", [CHAIN_OF_A_TREE, True], ids=["chain", "tree"])
@each_mixer
def test_gdn_verify_and_replay_bitwise_equal(
    sizes: RecurrentConfig, is_tree: bool, language: str
) -> None:
    parents = [0, 0, 1, 1, 2, 0, 5] if is_tree else [0, 0, 1, 2, 3]
    tree = make([len(parents)], 7, sizes, parents=[parents] if is_tree else None, padding=0)
    paths = paths_of(parents) if is_tree else [[0, 1, 2, 3, 4], [0, 1, 2], [0]]
    verified = mix(language, tree)
    # A slot for each path, with the state of the one that was verified.
    B, W = len(paths), 5
    # XLA takes the root of a single number otherwise on a CPU.
    room = 2 if INTERPRET and language == "pallas" else 1
    plain = make([1] * B, room, sizes, has_fields=False, padding=0)
    plain = replace(plain, weights=tree.weights)
    states = [plain.recurrent, plain.window]
    for mine, own in zip(states, (tree.recurrent, tree.window), strict=True):
        mine[LAYER, plain.slots] = own[LAYER, tree.slots]
    padded = np.array([path + [0] * (W - len(path)) for path in paths])
    of_paths = [np.repeat(x, B, axis=1) for x in verified.kept]
    lengths = [len(path) for path in paths]
    replayed = commit(language, plain, (*states, of_paths), padded, lengths)
    for depth in range(W):
        runs = [number for number in range(B) if depth < lengths[number]]
        rows = tree.projected[padded[:, depth]]
        counts = np.array([number in runs for number in range(B)], int)
        projected = np.concatenate([rows[runs], np.zeros_like(rows[len(runs) :])])
        case = replace(
            plain, projected=projected, recurrent=states[0], window=states[1], counts=counts
        )
        got = mix(language, case)
        np.testing.assert_array_equal(
            got.out[: len(runs)], verified.out[padded[runs, depth]], err_msg=f"at depth {depth}"
        )
        advanced = (got.recurrent, states[1], got.kept)
        states = commit(language, case, advanced, np.zeros((B, 1)), counts)
    np.testing.assert_array_equal(replayed[0], states[0])
    np.testing.assert_array_equal(replayed[1][LAYER], states[1][LAYER])


def visits_in_pallas(trees: np.ndarray, counts: np.ndarray, groups: int) -> list[list[list[int]]]:
    """Lists of the visits of each request and group."""

    def kernel(parents_ref, counts_ref, visits_ref):
        request, group = pl.program_id(0), pl.program_id(1)
        count = counts_ref[request]
        gdn_tree.list_visits(visits_ref, parents_ref, request, count, group, groups)

    grid = (len(trees), groups)
    out_shape = jax.ShapeDtypeStruct((*grid, size_of_list(trees.shape[1])), jnp.int32)
    run = pl.pallas_call(kernel, grid=grid, out_shape=out_shape, interpret=True)
    lists = np.asarray(run(jnp.asarray(trees), jnp.asarray(counts)))
    return [[own[1 : 1 + own[0]].tolist() for own in of_tree] for of_tree in lists]


@pytest.mark.parametrize("groups", [1, 4])
def test_gdn_visits_continue_from_parents(groups: int) -> None:
    trees = block_trees(6, 64, np.random.default_rng(0))
    trees[3] = parents_of(1, 64, np.random.default_rng(1))
    trees[4] = parents_of(1, 64)
    trees[5] = [*range(-1, 22), 0, *range(23, 42), *[42] * 21]  # most visits: 21 leaves below 20
    counts = np.array([64, 40, 1, 64, 64, 64], np.int32)
    lists = visits_in_pallas(np.maximum(trees, 0), counts, groups)
    for tree, count, of_tree in zip(trees, counts, lists, strict=True):
        tree[0] = -1  # the node before the root
        for visits in of_tree:
            last = trunk = -1
            for visit in visits:
                node = visit & gdn_tree.NODE
                assert tree[node] == (trunk if visit & gdn_tree.FROM_TRUNK else last)
                last = node
                trunk = node if visit & gdn_tree.TO_TRUNK else trunk
        assert {visit & gdn_tree.NODE for visits in of_tree for visit in visits} == {*range(count)}
    longest = [max(map(len, of_tree)) for of_tree in lists]
    assert longest[0] < 96 / groups + 8 * (groups > 1)
    assert longest[4] == 64
    assert longest[5] == 23 + (21 if groups == 1 else 5) * 21


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
def test_gdn_layer_of_64_nodes_matches_spec() -> None:
    trees = block_trees(2, 64, np.random.default_rng(0))
    trees[1] = parents_of(1, 64, np.random.default_rng(1))
    case = make([64, 40], 64, parents=trees.tolist())
    got, (out, _) = mix("triton", case), specified(case)
    np.testing.assert_allclose(got.out, out, **FLOAT32)
    for tiles in (APART, replace(CUT, groups=8)):
        np.testing.assert_array_equal(mix("triton", case, tiles).out, got.out)


@each_language
@each_mixer
def test_gdn_replay_matches_spec(sizes: RecurrentConfig, language: str) -> None:
    given = replay_case(sizes)
    held = spec.RecurrentState(given.recurrent[:, given.slots], given.window[:, given.slots])
    paths = (given.path, given.counts, given.save_after)
    k, v, log_decay, *beta, inputs = given.kept
    kept = spec.ReplayInputs(k, v, log_decay, beta[0] if beta else None, inputs)
    new, saved, passed = spec.replay(held, kept, *paths)
    passed &= given.save > 0
    np.testing.assert_array_equal(passed, [True, True, False, False, False, False])
    want = [x.copy() for x in given[:4]]
    for place, states, where in ((0, new, given.slots), (2, saved, given.save)):
        rows = np.flatnonzero(passed if states is saved else given.counts > 0)
        want[place][:, where[rows]] = states.recurrent[:, rows]
        want[place + 1][:, where[rows]] = states.window[:, rows]
    for x in given.kept:  # of the request that takes no node
        x[:, 3] = np.nan
    got = replayed(language, given)
    for mine, theirs, before in zip(got, want, given[:4], strict=True):
        np.testing.assert_allclose(mine, theirs, **FLOAT32)
        stays = (theirs == before).all(axis=(0, *range(2, before.ndim)))
        assert stays.sum() == before.shape[1] - (5 if before.shape[1] == 8 else 2)
        np.testing.assert_array_equal(mine[:, stays], before[:, stays])
    for place in (1, 3):
        np.testing.assert_array_equal(got[place], want[place])


@each_language
def test_gdn_replay_saves_advanced_states_unchanged(language: str) -> None:
    case = replay_case()
    one = {"path": case.path[:, :1], "counts": np.minimum(case.counts, 1)}
    kept = [case.kept[-1][:, :, :1]]
    given = case._replace(**one, kept=kept, save_after=np.array([1, 0, 2, 1, 1, 1], np.int32))
    recurrent, window, saved_recurrent, saved_window = replayed(language, given)
    np.testing.assert_array_equal(recurrent, given.recurrent)
    want = given.window.copy()
    moved = given.slots[given.counts > 0]
    want[:, moved, :2] = given.window[:, moved, 1:]
    want[:, moved, 2] = kept[0][:, given.counts > 0, 0]
    np.testing.assert_array_equal(window, want)
    for got, before, own in (
        (saved_recurrent, given.saved_recurrent, recurrent),
        (saved_window, given.saved_window, window),
    ):
        want = before.copy()
        want[:, [3, 2]] = own[:, given.slots[[0, 5]]]
        np.testing.assert_array_equal(got, want)


def sum_by_halves(x: np.ndarray) -> np.ndarray:
    """Sums the last axis but one."""
    while x.shape[-2] > 1:
        half = x.shape[-2] // 2
        x = x[..., :half, :] + x[..., half:, :]
    return x[..., 0, :]


CUT_OTHERWISE = {
    "chains of up to 4, unshared keys, half precision": WHOLE,
    **dict.fromkeys(("plain decoding", "chains of up to 5", "trees"), APART),
    **dict.fromkeys(("Mamba2, plain decoding", "Mamba2, trees"), APART),
    "single nodes, unshared keys": APART,
}


@pytest.mark.parametrize(
    ("language", "name"), in_languages(CUT_OTHERWISE, {"trees", "Mamba2, trees"})
)
def test_gdn_layer_bits_independent_of_tile_config(name: str, language: str) -> None:
    cut, other = found(language, name), mix(language, CASES[name], CUT_OTHERWISE[name])
    mine, theirs = ((x.out, x.recurrent, *x.kept) for x in (cut, other))
    for ours, others in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(ours, others)


@each_language
def test_gdn_replay_sums_keys_by_halves(language: str) -> None:
    given = replay_case()
    k, v, log_decay, beta, _ = given.kept
    log_decay[:] = 0  # other powers of 2 have bits of their own on each machine
    request, steps = 0, given.counts[0]
    state = given.recurrent[:, given.slots[request]]
    other = state
    for node in given.path[request, :steps]:
        key, share = k[:, request, node, :, :, None], beta[:, request, node, :, None]
        value = v[:, request, node]
        state = state + key * ((value - sum_by_halves(state * key)) * share)[:, :, None]
        in_a_row = np.add.accumulate(other * key, axis=2)[:, :, -1]
        other = other + key * ((value - in_a_row) * share)[:, :, None]
    got = replayed(language, given)[0][:, given.slots[request]]
    np.testing.assert_array_equal(got, state)
    assert (state != other).any()


@pytest.fixture
def one_arithmetic(monkeypatch) -> None:
    share_arithmetic(monkeypatch)


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@pytest.mark.parametrize("name", in_pallas([x for x in CASES if not CASES[x].half], COMPILED))
def test_gdn_layer_kernels_bitwise_equal(name: str, one_arithmetic) -> None:
    ours, theirs = found("pallas", name), mix("triton", CASES[name])
    np.testing.assert_array_equal(ours.out, theirs.out)
    np.testing.assert_array_equal(ours.recurrent, theirs.recurrent)
    for mine, other in zip(ours.kept, theirs.kept, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@each_mixer
def test_gdn_replay_kernels_bitwise_equal(sizes: RecurrentConfig, one_arithmetic) -> None:
    given = replay_case(sizes)
    for ours, theirs in zip(*(replayed(name, given) for name in KERNELS), strict=True):
        np.testing.assert_array_equal(ours, theirs)
