"""Cases of `delta_mix`: projections of chains and trees, and the states that they start from."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from kernels.gdn_tiles import MOST_TREE_GROUPS
from shared.models.mixers import GatedDeltaConfig, Mamba2Config, RecurrentConfig
from shared.models.mixers.mamba2 import OutputNorm
from shared.spec import best_prefixes, draft_tree
from shared.spec import recurrent_layer as spec
from shared.spec.recurrent_mixer import RecurrentWeights
from shared.spec.recurrent_state import WINDOW, RecurrentState, ReplayInputs
from tests.support.op_case import Arguments, OpCase, as_list

EPS = 1e-6


@dataclass(frozen=True)
class TreeNodes:
    """Record with the fields of the backends' `TreeNodes`:

    `parents` is None if all trees are chains.
    """

    parents: np.ndarray | None
    row_starts: np.ndarray
    row_of: np.ndarray
    request: np.ndarray
    node: np.ndarray

    @property
    def specified(self) -> spec.TreeNodes:
        """Converts to the specification's record."""
        parents = self.parents
        if parents is None:
            parents = parents_of(*self.row_of.shape)
        return spec.TreeNodes(parents, self.row_starts, self.row_of, self.request, self.node)


@dataclass(frozen=True)
class VerifyScratch:
    """Record with the fields of the backends' `VerifyScratch`."""

    kept: ReplayInputs | np.ndarray
    arrivals: np.ndarray


def weights_of(rng: np.random.Generator, sizes: RecurrentConfig) -> RecurrentWeights:
    (heads, _, size), has_delta = sizes.state_shape, sizes.has_delta
    norm = size if has_delta else sizes.values
    drawn = RecurrentWeights(
        conv=rng.standard_normal((sizes.channels, 4), np.float32) / 2,
        conv_bias=None,
        a_log=rng.uniform(-2, 2, heads).astype(np.float32),
        dt_bias=rng.uniform(-3, 1, heads).astype(np.float32),
        skip=None,
        norm=(1 + rng.standard_normal(norm, np.float32) / 4).astype(np.float32),
        eps=EPS,
    )
    if has_delta:
        return drawn
    skip = rng.standard_normal(heads, np.float32)
    return replace(drawn, conv_bias=rng.standard_normal(sizes.channels, np.float32), skip=skip)


def width_of(sizes: RecurrentConfig) -> int:
    """Columns of a projected row."""
    return sizes.channels + sizes.values + (1 + sizes.has_delta) * sizes.state_shape[0]


def states_of(
    rng: np.random.Generator, sizes: RecurrentConfig, layers: int, count: int
) -> RecurrentState:
    """States of some slots, of the size that decoding leaves them in."""
    heads = sizes.state_shape
    recurrent = rng.standard_normal((layers, count, *heads), np.float32) / 8
    return RecurrentState(
        recurrent, rng.standard_normal((layers, count, WINDOW, sizes.channels), np.float32)
    )


def parents_of(B: int, N: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """Random trees; chains without a generator."""
    if rng is None:
        return np.tile(np.maximum(np.arange(N) - 1, 0), (B, 1)).astype(np.int32)
    drawn = [[int(rng.integers(max(node, 1))) for node in range(N)] for _ in range(B)]
    return np.array(drawn, np.int32)


def nodes_of(num_nodes: np.ndarray, nodes: int, rows: int, parents: np.ndarray | None) -> TreeNodes:
    """The flat rows of the trees, followed by padding."""
    row_starts, request, node, _ = draft_tree.flatten(num_nodes, rows)
    row_of = draft_tree.flat_rows(row_starts, num_nodes, nodes)
    return TreeNodes(parents, row_starts, row_of, request, node)


def verify_scratch(states: RecurrentState, sizes: RecurrentConfig, B: int, N: int) -> ReplayInputs:
    """Returns empty scratch arrays for a verify step."""
    (L, _, H, K, V), C = states.recurrent.shape, states.window.shape[3]
    shapes = ((H, K), (H, V), (H,), (H,) if sizes.has_delta else None, (C,))
    return ReplayInputs(
        *(None if x is None else np.zeros((L, B, N, *x), np.float32) for x in shapes)
    )


def block_trees(B: int, N: int, rng: np.random.Generator) -> np.ndarray:
    """Trees of a block head of 15 depths, some of which are certain and some are not."""
    spread = rng.choice([1.5, 4, 8], (B, 15, 1, 1), p=[0.2, 0.25, 0.55])
    scores = np.sort(spread * rng.standard_normal((B, 15, 1, 400)))[..., ::-1]
    edges = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    zeros, ones = np.zeros(B, np.int32), np.ones(B, bool)
    tokens = np.zeros((B, 15, 1, 16), np.int32)
    edges = edges[..., :16].astype(np.float32)
    known = np.zeros((B, 15), np.float32)
    return best_prefixes.grow(zeros, tokens, edges, None, known, zeros + N, ones, N)[1]


def arguments(
    seed: int,
    *,
    B: int,
    N: int,
    sizes: RecurrentConfig,
    trees: Callable[..., np.ndarray] | None,
    layers: int = 2,
) -> Arguments:
    """B trees of N nodes in one layer of some; chains without `trees`."""
    rng = np.random.default_rng(seed)
    states = states_of(rng, sizes, layers, B + 2)
    heads, advances = sizes.state_shape[0], N == 1
    kept = verify_scratch(states, sizes, B, N)
    parents = None if trees is None else trees(B, N, rng)
    return {
        "inputs": rng.standard_normal((B * N, width_of(sizes)), np.float32),
        "weights": weights_of(rng, sizes),
        "sizes": sizes,
        "states": states,
        "layer": layers - 1,
        "slots": (1 + rng.permutation(B + 1)[:B]).astype(np.int32),
        "nodes": nodes_of(np.full(B, N, np.int32), N, B * N, parents),
        "scratch": VerifyScratch(
            kept.inputs if advances else kept, np.zeros((B, heads, MOST_TREE_GROUPS), np.int32)
        ),
    }


def commit_arguments(
    seed: int, *, B: int, N: int, sizes: RecurrentConfig, layers: int
) -> Arguments:
    """Paths of all lengths down chains of which all layers have kept something."""
    rng = np.random.default_rng(seed)
    states = states_of(rng, sizes, layers, B + 2)
    (L, _, H, K, V), C = states.recurrent.shape, sizes.channels
    k = rng.standard_normal((L, B, N, H, K), np.float32)
    counts = rng.integers(1, N + 1, B).astype(np.int32)
    return {
        "states": states,
        "snapshots": states_of(rng, sizes, layers, B + 1),
        "kept": ReplayInputs(
            k=k / np.linalg.norm(k, axis=-1, keepdims=True),
            v=rng.standard_normal((L, B, N, H, V), np.float32),
            log_decay=-rng.uniform(0, 1, (L, B, N, H)).astype(np.float32),
            beta=rng.uniform(0, 1, (L, B, N, H)).astype(np.float32) if sizes.has_delta else None,
            inputs=rng.standard_normal((L, B, N, C), np.float32),
        ),
        "slots": (1 + rng.permutation(B + 1)[:B]).astype(np.int32),
        "path": np.tile(np.arange(N, dtype=np.int32), (B, 1)),
        "counts": counts,
        "save_after": counts,
        "save": 1 + np.arange(B, dtype=np.int32),
    }


def _specified(function: str, arguments: Arguments, chosen: np.ndarray) -> list[np.ndarray]:
    """The outputs of some rows."""
    names = ("inputs", "weights", "sizes", "states", "layer", "slots")
    given = [arguments[name] for name in names]
    if function == "verify":
        given.append(arguments["nodes"].specified)
    return [as_list(getattr(spec, function)(*given))[0][chosen]]


def _bytes(arguments: Arguments, item_bytes: int) -> int:
    """The states, once or twice; the rows, and what is kept of them."""
    states, slots, rows = arguments["states"], arguments["slots"], arguments["inputs"]
    memory = arguments["scratch"].kept
    advances = isinstance(memory, np.ndarray)
    held = (1 + advances) * states.recurrent[0, 0].nbytes + states.window[0, 0].nbytes
    kept = sum(x[0].nbytes for x in as_list(memory))
    return len(slots) * held + 2 * rows.size * item_bytes + kept


def _commit_bytes(arguments: Arguments, item_bytes: int) -> int:
    """States read and written once and saved once, and what was kept."""
    states, slots = arguments["states"], arguments["slots"]
    per_slot = sum(x[:, 0].nbytes for x in (states.recurrent, states.window))
    return 3 * per_slot * len(slots) + sum(x.nbytes for x in as_list(arguments["kept"]))


def _op_case(
    name: str, make: Callable[[int], Arguments], function: str, dtype: str, is_large: bool
) -> OpCase:
    return OpCase(
        op="recurrent_layer",
        function=function,
        name=name,
        make=make,
        dtype=dtype,
        wide=("weights", "states", "scratch"),
        in_place=("states", "scratch"),
        is_large=is_large,
        tiled="gdn_layer",
        real_rows=lambda arguments: np.arange(len(arguments["inputs"])),
        specify=partial(_specified, function),
        num_bytes=_bytes,
    )


def _commit_case(name: str, is_large: bool, **sizes: Any) -> OpCase:
    return OpCase(
        op="recurrent_layer",
        function="commit",
        name=name,
        make=partial(commit_arguments, **sizes),
        in_place=("states", "snapshots"),
        is_large=is_large,
        tiled="gdn_layer",
        num_bytes=_commit_bytes,
    )


SMALL = GatedDeltaConfig(num_key_heads=2, num_value_heads=4, key_size=16, value_size=32)
MODEL = GatedDeltaConfig(num_key_heads=16, num_value_heads=32, key_size=128, value_size=128)
"""Heads of Qwen3.5-9B."""
SMALL_MAMBA2 = Mamba2Config(
    num_heads=4,
    head_size=32,
    num_groups=2,
    state_size=16,
    conv_bias=True,
    input_bias=False,
    out_bias=False,
    norm=OutputNorm.AFTER_GATE,
    norm_size=64,
)
NEMOTRON = replace(
    SMALL_MAMBA2, num_heads=64, head_size=64, num_groups=8, state_size=128, norm_size=512
)
"""Heads of Nemotron 3 Nano."""
FALCON_H1 = replace(
    NEMOTRON, num_heads=32, head_size=128, num_groups=2, state_size=256, norm=OutputNorm.NONE
)
"""Heads of Falcon-H1-34B."""


def _cases() -> list[OpCase]:
    made = []
    kinds = {"chain": None, "tree": parents_of, "block tree": block_trees}
    names = {NEMOTRON: ", Mamba2", SMALL_MAMBA2: ", Mamba2", FALCON_H1: ", keys of 256"}
    for B, N, sizes, kind in (
        *((3, 1, SMALL, "chain"), (3, 4, SMALL, "chain"), (3, 6, SMALL, "tree")),
        *((B, N, MODEL, "chain") for N in (1, 4) for B in (1, 8, 32)),
        *((B, 16, MODEL, "tree") for B in (1, 8, 32)),
        *((B, 8, MODEL, "tree") for B in (1, 8, 32)),
        (1, 40, MODEL, "tree"),
        (2, 16, SMALL, "block tree"),
        *((B, N, MODEL, "block tree") for N in (16, 32, 64) for B in (1, 4, 8)),
        *((3, 1, SMALL_MAMBA2, "chain"), (3, 6, SMALL_MAMBA2, "tree")),
        *((B, N, NEMOTRON, "chain") for N in (1, 4) for B in (1, 8, 32)),
        *((B, N, NEMOTRON, "tree") for B, N in ((1, 8), (8, 8), (8, 16), (4, 64))),
        *((B, N, FALCON_H1, "chain") for B, N in ((1, 1), (8, 1), (8, 4))),
        *((B, N, FALCON_H1, "tree") for B, N in ((1, 8), (8, 16))),
    ):
        function = "decode" if N == 1 else "verify"
        make = partial(arguments, B=B, N=N, sizes=sizes, trees=kinds[kind])
        is_large = sizes not in (SMALL, SMALL_MAMBA2)
        dtype = "bfloat16" if is_large else "float32"
        name = f"{B} x {kind} of {N}{names.get(sizes, '')}"
        made.append(_op_case(name, make, function, dtype, is_large))
    return made


TABLE = [
    *_cases(),
    _commit_case("3 x paths of 4", False, B=3, N=4, sizes=SMALL, layers=2),
    *(
        _commit_case(f"{B} x paths of 4, 24 layers", True, B=B, N=4, sizes=MODEL, layers=24)
        for B in (1, 8)
    ),
    _commit_case("3 x paths of 4, Mamba2", False, B=3, N=4, sizes=SMALL_MAMBA2, layers=2),
    _commit_case("8 x paths of 4, Mamba2", True, B=8, N=4, sizes=NEMOTRON, layers=23),
    _commit_case("8 x paths of 4, keys of 256", True, B=8, N=4, sizes=FALCON_H1, layers=8),
]
