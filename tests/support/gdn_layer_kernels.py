"""GDN and Mamba2 layers and replays by the kernels of both languages, on random requests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from kernels.gdn_tiles import MOST_TREE_GROUPS, GDNLayerTiles
from shared.models.mixers import GatedDeltaConfig, Mamba2Config, RecurrentConfig
from shared.models.mixers.mamba2 import OutputNorm
from shared.spec import recurrent_mixer
from shared.spec import recurrent_state as spec
from shared.spec.reduction_order import SQUARES
from tests.support.kernels import AS_WRITTEN, INTERPRET, KERNELS, ON_GPU

EPS = 1e-6
LAYER, LAYERS = 1, 2
HALVES = ("projected", "window", "conv", "conv_bias")
WEIGHTS = ("conv", "conv_bias", "a_log", "dt_bias", "skip", "norm")
SHARED_KEYS = GatedDeltaConfig(num_key_heads=2, num_value_heads=4, key_size=32, value_size=16)
OWN_KEYS = GatedDeltaConfig(num_key_heads=4, num_value_heads=4, key_size=16, value_size=32)
MAMBA2 = Mamba2Config(
    num_heads=4,
    head_size=16,
    num_groups=2,
    state_size=32,
    conv_bias=True,
    input_bias=False,
    out_bias=False,
    norm=OutputNorm.AFTER_GATE,
    norm_size=32,
)
CUT, WHOLE = (
    GDNLayerTiles(
        columns=columns,
        warps=2,
        tree_warps=4,
        groups=1,
        prepare_warps=0,
        prepare_nodes=64,
        commit_columns=columns,
        commit_warps=2,
    )
    for columns in (16, 32)
)
APART = replace(CUT, columns=8, warps=1, tree_warps=1, groups=4, prepare_warps=4, prepare_nodes=2)
HOW = {"tiles": CUT}
MIX = HOW | {"eps": EPS, "digits": SQUARES.digits}


@dataclass(frozen=True)
class Case:
    """Requests with trees, or with chains where there are no parents.

    Attributes:
      counts: Nodes of each request.
      nodes: Maximum number of nodes.
      has_fields: Whether all is kept that a replay needs; else the state is advanced.
      half: Whether rows and windows are in half precision.
    """

    sizes: RecurrentConfig
    projected: np.ndarray
    weights: recurrent_mixer.RecurrentWeights
    recurrent: np.ndarray
    window: np.ndarray
    slots: np.ndarray
    counts: np.ndarray
    nodes: int
    parents: np.ndarray | None = None
    has_fields: bool = True
    half: bool = False

    @property
    def row_starts(self) -> np.ndarray:
        return np.append(0, np.cumsum(self.counts)).astype(np.int32)

    def kept(self) -> list[np.ndarray]:
        """Returns arrays for the replay inputs, filled with NaN."""
        heads, K, V = self.sizes.state_shape
        fields = ((heads, K), (heads, V), (heads,), *[(heads,)] * self.sizes.has_delta)
        shapes = (*(fields if self.has_fields else ()), (self.sizes.channels,))
        lead = (LAYERS, len(self.counts), self.nodes)
        return [np.full((*lead, *shape), np.nan, np.float32) for shape in shapes]

    def arrays(self) -> dict[str, np.ndarray | list[np.ndarray] | None]:
        """All arrays by the kernels' names."""
        names = ("projected", "recurrent", "window", "slots", "row_starts", "parents")
        weights = {name: getattr(self.weights, name) for name in WEIGHTS}
        own = {name: getattr(self, name) for name in names}
        arrivals = np.zeros(
            (len(self.counts), self.sizes.state_shape[0], MOST_TREE_GROUPS), np.int32
        )
        return own | weights | {"kept": self.kept(), "arrivals": arrivals}


class Found(NamedTuple):
    """Results of a kernel."""

    out: np.ndarray
    recurrent: np.ndarray
    kept: list[np.ndarray]


def rounded(x: np.ndarray) -> np.ndarray:
    """With so few digits that both kinds of half precision have them all."""
    return np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32))


def make(
    counts: Sequence[int],
    nodes: int,
    sizes: RecurrentConfig = SHARED_KEYS,
    *,
    parents: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
    padding: int = 2,
    **how: bool,
) -> Case:
    """Random numbers; outside the layer and the slots of the requests there are none."""
    rng = np.random.default_rng(seed)
    (H, K, V), C, has_delta = sizes.state_shape, sizes.channels, sizes.has_delta
    B = len(counts)
    slots = (1 + rng.permutation(B + 1)[:B]).astype(np.int32)
    recurrent = np.full((LAYERS, B + 2, H, K, V), np.nan, np.float32)
    window = np.full((LAYERS, B + 2, spec.WINDOW, C), np.nan, np.float32)
    recurrent[LAYER, slots] = rng.standard_normal((B, H, K, V)) / 4
    window[LAYER, slots] = rounded(rng.standard_normal((B, spec.WINDOW, C)))
    width = C + H * V + (1 + has_delta) * H
    projected = rng.standard_normal((sum(counts) + padding, width), np.float32)
    weights = recurrent_mixer.RecurrentWeights(
        conv=rounded(rng.standard_normal((C, 4), np.float32)),
        conv_bias=None if has_delta else rounded(rng.standard_normal(C, np.float32)),
        a_log=rng.uniform(-2, 1, H).astype(np.float32),
        # So that the log of the decay is small, medium and linear.
        dt_bias=np.linspace(-11, 25, H, dtype=np.float32),
        skip=None if has_delta else rng.standard_normal(H).astype(np.float32),
        norm=rng.standard_normal(V).astype(np.float32) if has_delta else None,
        eps=EPS,
    )
    # A spare node's parent means nothing: it is one that does not exist.
    trees = None
    if parents is not None:
        trees = np.full((B, nodes), 2 * nodes, np.int32)
        for row, tree in enumerate(parents):
            trees[row, : len(tree)] = tree
    return Case(
        *(sizes, rounded(projected), weights, recurrent, window, slots, np.array(counts), nodes),
        parents=trees,
        **how,
    )


def random_tree(rng: np.random.Generator, count: int) -> list[int]:
    return [0, *(int(rng.integers(node)) for node in range(1, count))]


def tree_case(sizes: RecurrentConfig = SHARED_KEYS) -> Case:
    """A chain and a star among random trees."""
    rng = np.random.default_rng(1)
    trees = [random_tree(rng, 7), [0, 0, 0, 0, 0], [0, 0, 1, 2, 3, 4, 5], [0], [], [0, 0, 1, 1, 0]]
    return make([len(tree) for tree in trees], 7, sizes, parents=trees)


def deep_tree(count: int) -> list[int]:
    rng = np.random.default_rng(2)
    return [max(0, node - 1 - int(rng.integers(3))) for node in range(count)]


CASES = {
    "plain decoding": make([1, 1, 0, 1], 1, has_fields=False),
    "single nodes, unshared keys": make([1, 1], 1, OWN_KEYS),
    "chains of up to 5": make([5, 2, 0, 4, 3, 1], 5),
    "chains of up to 4, unshared keys, half precision": make([4, 3], 4, OWN_KEYS, half=True),
    "trees": tree_case(),
    "a tree of 40 in half precision": make([40], 40, parents=[deep_tree(40)], half=True),
    "Mamba2, plain decoding": make([1, 0, 1], 1, MAMBA2, has_fields=False),
    "Mamba2, chains of up to 4": make([4, 3], 4, MAMBA2),
    "Mamba2, trees": tree_case(MAMBA2),
}


KERNEL_OF = {
    language: {"verify": own["gdn_layer"].verify, "commit": own["gdn_commit"].commit}
    for language, own in KERNELS.items()
}


@cache
def pallas_program(name: str, tiles: GDNLayerTiles = CUT) -> Callable:
    how = (MIX if name == "verify" else HOW) | {"tiles": tiles}
    kernel = partial(KERNEL_OF["pallas"][name], **how, interpret=INTERPRET)
    return jax.jit(kernel, compiler_options=AS_WRITTEN)


def stacks_of(own: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights of all layers, of which only one has numbers."""
    found = {k: own[k] for k in WEIGHTS if own[k] is not None}
    return {k: np.stack([np.full_like(x, np.nan), x]) for k, x in found.items()}


def mix_in_pallas(case: Case, tiles: GDNLayerTiles) -> Found:
    own = case.arrays()
    given = jax.tree.map(jnp.asarray, own | stacks_of(own))
    if case.half:
        given |= {k: given[k].astype(jnp.bfloat16) for k in HALVES if given[k] is not None}
        given["kept"][-1] = given["kept"][-1].astype(jnp.bfloat16)
    layer = jnp.full(1, LAYER, jnp.int32)
    out, recurrent, kept, arrivals = pallas_program("verify", tiles)(layer=layer, **given)
    assert not arrivals.any()
    found = jax.tree.map(lambda x: np.asarray(x, np.float32), (out, recurrent, list(kept)))
    return Found(*found)


def on_device(x: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.tensor(x, device="cuda" if ON_GPU else "cpu", dtype=dtype)


def mix_in_triton(case: Case, tiles: GDNLayerTiles) -> Found:
    # Triton's interpreter computes nonsense in bfloat16.
    half = (torch.bfloat16 if ON_GPU else torch.float16) if case.half else None
    own = case.arrays()
    *fields, inputs = own.pop("kept")
    given = {
        k: None if v is None else on_device(v, half if k in HALVES else None)
        for k, v in own.items()
    }
    kept = [*map(on_device, fields), on_device(inputs, half)]
    how = MIX | {"tiles": tiles}
    out = KERNEL_OF["triton"]["verify"](layer=LAYER, kept=kept, **given, **how)
    assert not given["arrivals"].any()
    numbers = lambda x: x.float().cpu().numpy()  # noqa: E731
    np.testing.assert_array_equal(numbers(given["window"]), case.window)
    return Found(numbers(out), numbers(given["recurrent"]), [numbers(x) for x in kept])


def mix(language: str, case: Case, tiles: GDNLayerTiles = CUT) -> Found:
    return {"pallas": mix_in_pallas, "triton": mix_in_triton}[language](case, tiles)


@cache
def found(language: str, name: str) -> Found:
    """Returns the result of a kernel for a case, cached for several tests."""
    return mix(language, CASES[name])


class Replay(NamedTuple):
    """Arguments of `commit`, by name."""

    recurrent: np.ndarray
    window: np.ndarray
    saved_recurrent: np.ndarray
    saved_window: np.ndarray
    kept: list[np.ndarray]
    slots: np.ndarray
    path: np.ndarray
    counts: np.ndarray
    save_after: np.ndarray
    save: np.ndarray


def replayed(language: str, given: Replay) -> list[np.ndarray]:
    """The states and the snapshots after a replay."""
    if language == "pallas":
        arrays = jax.tree.map(jnp.asarray, given._asdict())
        return [np.asarray(x) for x in pallas_program("commit")(**arrays)]
    arrays = {k: on_device(v) for k, v in given._asdict().items() if k != "kept"}
    kept = [on_device(x) for x in given.kept]
    KERNEL_OF["triton"]["commit"](**arrays, kept=kept, **HOW)
    return [arrays[name].cpu().numpy() for name in Replay._fields[:4]]


def commit(language: str, case: Case, states: Sequence[np.ndarray], path, counts) -> list:
    """The states of a case after `counts` nodes of each path; `states` has the replay inputs."""
    recurrent, window, kept = states
    none = [np.zeros_like(x[:, :1]) for x in (recurrent, window)]
    zeros = np.zeros(len(case.slots), np.int32)
    rows = (case.slots, np.array(path, np.int32), np.array(counts, np.int32), zeros, zeros)
    # What is no number stays so in the layer that nothing was kept of.
    return replayed(language, Replay(recurrent, window, *none, kept, *rows))[:2]


def specified(case: Case) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns outputs, zeros for padding, and replay inputs of all nodes, [B, N, ...]."""
    B, N, starts = len(case.counts), case.nodes, case.row_starts
    node = np.minimum(np.arange(N), np.maximum(case.counts, 1)[:, None] - 1)
    row_of = np.minimum(starts[:-1, None] + node, len(case.projected) - 1)
    rows = np.arange(len(case.projected))
    request = np.minimum(np.searchsorted(starts, rows, side="right") - 1, B - 1)
    of_row = np.minimum(rows - starts[request], N - 1)
    parents = np.tile(np.maximum(np.arange(N) - 1, 0), (B, 1))
    if case.parents is not None:
        parents = np.where(np.arange(N) < case.counts[:, None], case.parents, 0)
    held = (case.recurrent[LAYER, case.slots], case.window[LAYER, case.slots])
    weights, where = (case.weights, case.sizes), (parents, row_of, request, of_row)
    out, kept = recurrent_mixer.recurrent_verify_tree(case.projected, *weights, *held, *where)
    kept = [x[0] for x in vars(kept).values() if x is not None]
    return np.where((rows < starts[-1])[:, None], out, 0), kept


def replay_case(sizes: RecurrentConfig = SHARED_KEYS) -> Replay:
    """Paths of trees of 6 nodes, with snapshots on the way, past its end, and of nowhere."""
    rng, (H, K, V), C = np.random.default_rng(5), sizes.state_shape, sizes.channels
    B, N, states, snapshots = 6, 6, 8, 4
    draw = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    k = draw(LAYERS, B, N, H, K)
    beta = rng.uniform(0, 1, (LAYERS, B, N, H)).astype(np.float32)
    ints = {
        "slots": [3, 1, 6, 2, 5, 7],
        "path": [[0, 1, 4, 5], [0, 2, 5, 0], [0, 3, 0, 0], 4 * [0], [0, 2, 3, 4], [0, 1, 0, 0]],
        "counts": [4, 3, 2, 0, 2, 2],
        "save_after": [2, 3, 0, 1, 1, 3],
        "save": [3, 1, 2, 2, 0, 2],
    }
    return Replay(
        recurrent=draw(LAYERS, states, H, K, V),
        window=draw(LAYERS, states, spec.WINDOW, C),
        saved_recurrent=draw(LAYERS, snapshots, H, K, V),
        saved_window=draw(LAYERS, snapshots, spec.WINDOW, C),
        kept=[
            k / np.linalg.norm(k, axis=-1, keepdims=True),
            draw(LAYERS, B, N, H, V),
            -rng.uniform(0, 1, (LAYERS, B, N, H)).astype(np.float32),
            *[beta][: sizes.has_delta],
            draw(LAYERS, B, N, C),
        ],
        **{name: np.array(x, np.int32) for name, x in ints.items()},
    )
