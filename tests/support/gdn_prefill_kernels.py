"""Prompts through GDN and Mamba2 layers by the kernels of both languages, on random requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from unittest.mock import patch

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from jax.experimental.pallas import triton as pltriton

from kernels.gdn_tiles import GDNPrefillTiles
from shared.models.mixers import RecurrentConfig
from shared.spec import recurrent_layer as spec
from shared.spec import recurrent_mixer
from shared.spec.recurrent_mixer import RecurrentWeights
from shared.spec.recurrent_state import WINDOW, RecurrentState, conv
from shared.spec.reduction_order import SQUARES
from tests.support.gdn_layer_kernels import EPS, LAYER, LAYERS, MAMBA2, OWN_KEYS, SHARED_KEYS
from tests.support.kernels import AS_WRITTEN, INTERPRET, KERNELS, ON_GPU

TILES = GDNPrefillTiles(columns=32, warps=4, stages=2, prepare_warps=4, rows=64, row_warps=4)
WEIGHTS = ("conv", "a_log", "dt_bias")
STATES = ("recurrent", "window", "saved_recurrent", "saved_window")
HALVES = ("projected", "conv", "conv_bias", "window", "saved_window")


@dataclass(frozen=True)
class Case:
    """Requests with prompts; outside the layer and the slots of the requests there are no numbers.

    Attributes:
      lengths: Rows of each request.
    """

    sizes: RecurrentConfig
    lengths: np.ndarray
    projected: np.ndarray
    weights: RecurrentWeights
    recurrent: np.ndarray
    window: np.ndarray
    saved_recurrent: np.ndarray
    saved_window: np.ndarray
    slots: np.ndarray
    save_after: np.ndarray
    save: np.ndarray

    @property
    def row_starts(self) -> np.ndarray:
        """First flat row of each request, and the end."""
        return np.append(0, np.cumsum(self.lengths)).astype(np.int32)

    @property
    def weight_names(self) -> tuple[str, ...]:
        """Weights that the kernels of the mixer read."""
        return (*WEIGHTS, "norm") if self.sizes.has_delta else (*WEIGHTS, "conv_bias", "skip")

    def rows(self, request: int) -> slice:
        return slice(*self.row_starts[request : request + 2])

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by the kernels' names."""
        names = ("projected", *STATES, "slots", "row_starts", "save_after", "save")
        own = {name: getattr(self, name) for name in names}
        return own | {name: getattr(self.weights, name) for name in self.weight_names}


@dataclass(frozen=True)
class Found:
    """Results of the kernels."""

    out: np.ndarray
    recurrent: np.ndarray
    window: np.ndarray
    saved_recurrent: np.ndarray
    saved_window: np.ndarray


def in_half(x: np.ndarray) -> np.ndarray:
    """The numbers that bfloat16 has."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def make(
    lengths: Sequence[int],
    sizes: RecurrentConfig = SHARED_KEYS,
    *,
    saves: Sequence[tuple[int, int]] = (),
    padding: int = 3,
    alike: float = 0.0,
    max_gate: float = 14,
    seed: int = 0,
) -> Case:
    """Random prompts.

    Args:
      saves: After how many rows a state is saved, and where, for each request.
      alike: How much of a key all rows share, up to 1: neighbours' keys of real prompts are alike.
      max_gate: Of a head, on which the log of its decay depends linearly; 14 is some 1e-6 a token.
    """
    rng = np.random.default_rng(seed)
    (H, K, V), C, has_delta = sizes.state_shape, sizes.channels, sizes.has_delta
    B = len(lengths)
    slots = (1 + rng.permutation(B + 1)[:B]).astype(np.int32)
    recurrent, saved_recurrent = np.full((2, LAYERS, B + 2, H, K, V), np.nan, np.float32)
    window, saved_window = np.full((2, LAYERS, B + 2, WINDOW, C), np.nan, np.float32)
    recurrent[LAYER, slots] = rng.standard_normal((B, H, K, V)) / 4
    window[LAYER, slots] = in_half(rng.standard_normal((B, WINDOW, C)))
    R = sum(lengths) + padding
    projected = rng.standard_normal((R, C + H * V + (1 + has_delta) * H)).astype(np.float32)
    key_columns = (C - H * V) // 2
    keys = slice(key_columns, 2 * key_columns)
    projected[:, keys] += alike * (2 * projected[:1, keys] - projected[:, keys])
    weights = RecurrentWeights(
        conv=in_half(rng.standard_normal((C, 4))),
        conv_bias=None if has_delta else in_half(rng.standard_normal(C)),
        a_log=rng.uniform(-1, 0, H).astype(np.float32),
        # The first head's decays are nearly 1.
        dt_bias=np.linspace(-11, max_gate, H, dtype=np.float32),
        skip=None if has_delta else rng.standard_normal(H).astype(np.float32),
        norm=rng.standard_normal(V).astype(np.float32) if has_delta else None,
        eps=EPS,
    )
    saves = [*saves, *[(0, 0)] * (B - len(saves))]
    return Case(
        sizes=sizes,
        lengths=np.array(lengths, np.int32),
        projected=in_half(projected),
        weights=weights,
        recurrent=recurrent,
        window=window,
        saved_recurrent=saved_recurrent,
        saved_window=saved_window,
        slots=slots,
        save_after=np.array([after for after, _ in saves], np.int32),
        save=np.array([place for _, place in saves], np.int32),
    )


RAGGED = (70, 1, 0, 130, 64, 2)
SAVES = ((64, 3), (1, 5), (0, 2), (128, 0), (64, 1))
CASES = {
    "ragged": make(RAGGED, saves=SAVES),
    "similar keys": make(RAGGED, saves=SAVES, alike=0.9),
    "strong decay": make(RAGGED, saves=SAVES, max_gate=500),
    "unshared keys": make((65, 20), OWN_KEYS, saves=((65, 1), (0, 2))),
    "a long prompt": make((512,), saves=((256, 1),), padding=0),
    "Mamba2, ragged": make(RAGGED, MAMBA2, saves=SAVES),
    "Mamba2, strong decay": make(RAGGED, MAMBA2, saves=SAVES, max_gate=500),
    "Mamba2, a long prompt": make((512,), MAMBA2, saves=((256, 1),), padding=0),
}


def feed(language: str, case: Case, tiles: GDNPrefillTiles = TILES) -> Found:
    """Runs the kernels of a language on a case."""
    return {"pallas": _in_pallas, "triton": _in_triton}[language](case, tiles)


@cache
def found(language: str, name: str) -> Found:
    """Returns the result for a case, cached for several tests."""
    return feed(language, CASES[name])


def kernel_of(language: str, has_delta: bool) -> Callable:
    """The kernels of a mixer, with their settings."""
    name = "gdn_prefill" if has_delta else "mamba2_prefill"
    settings = {"eps": EPS, "digits": SQUARES.digits} if has_delta else {}
    return partial(KERNELS[language][name].prefill, **settings)


@cache
def pallas_program(tiles: GDNPrefillTiles, has_delta: bool, dot: Callable) -> Callable:
    """The kernels as one program, traced with a product of matrices that tests may replace."""
    assert dot is pltriton.dot
    kernel = partial(kernel_of("pallas", has_delta), tiles=tiles, interpret=INTERPRET)
    return jax.jit(lambda **given: kernel(**given), compiler_options=AS_WRITTEN)


def _in_pallas(case: Case, tiles: GDNPrefillTiles) -> Found:
    own = case.arrays()
    # Weights of all layers.
    own |= {k: np.stack([np.full_like(own[k], np.nan), own[k]]) for k in case.weight_names}
    given = {k: jnp.asarray(x, jnp.bfloat16 if k in HALVES else None) for k, x in own.items()}
    program = pallas_program(tiles, case.sizes.has_delta, pltriton.dot)
    got = program(layer=jnp.full(1, LAYER, jnp.int32), **given)
    return Found(*(np.asarray(x, np.float32) for x in got))


def _in_triton(case: Case, tiles: GDNPrefillTiles) -> Found:
    device = "cuda" if ON_GPU else "cpu"
    given = {k: torch.tensor(x, device=device) for k, x in case.arrays().items()}
    given |= {k: given[k].to(torch.bfloat16) for k in given.keys() & HALVES}
    out = kernel_of("triton", case.sizes.has_delta)(layer=LAYER, **given, tiles=tiles)
    return Found(*(x.float().cpu().numpy() for x in (out, *(given[name] for name in STATES))))


def specified(case: Case) -> Found:
    """Returns the specification's results: zeros for padding, and snapshots if requested.

    The channels of Mamba2 are rounded after the convolution, as in both backends.
    """
    if case.sizes.has_delta:
        return _specified(case)

    def rounded_conv(*given: np.ndarray) -> np.ndarray:
        return in_half(conv(*given))

    with patch.object(recurrent_mixer, "conv", rounded_conv):
        return _specified(case)


def _specified(case: Case) -> Found:
    starts = case.row_starts
    recurrent, window, saved_recurrent, saved_window = (getattr(case, x).copy() for x in STATES)
    out = np.zeros((len(case.projected), case.sizes.values))
    states = RecurrentState(case.recurrent, case.window)
    for request, slot in enumerate(case.slots):
        whole, save = case.lengths[request], case.save[request]
        for count in {case.save_after[request], whole} if save else {whole}:
            rows = case.projected[starts[request] :][:count]
            given = (
                rows,
                case.weights,
                case.sizes,
                states,
                LAYER,
                slot[None],
                np.array([0, count]),
            )
            got, after = spec.prefill(*given) if count else (out[:0], states)
            if count == whole:
                out[case.rows(request)] = got
                recurrent[LAYER, slot] = after.recurrent[LAYER, slot]
                window[LAYER, slot] = after.window[LAYER, slot]
            if save and count == case.save_after[request]:
                saved_recurrent[LAYER, save] = after.recurrent[LAYER, slot]
                saved_window[LAYER, save] = after.window[LAYER, slot]
    return Found(out, recurrent, window, saved_recurrent, saved_window)


def alone(case: Case, request: int, rows: slice = slice(None)) -> Case:
    """Some rows of one request of a case, which come first; of the others there are none.

    All others' rows are padding, so that one compiled program takes what a test compares.
    """
    place = np.arange(len(case.projected))
    own = place[case.rows(request)][rows]
    lengths = np.zeros_like(case.lengths)
    lengths[request] = len(own)
    order = np.concatenate([own, np.setdiff1d(place, own)])
    save = np.zeros_like(case.save)
    return replace(case, lengths=lengths, projected=case.projected[order], save=save)
