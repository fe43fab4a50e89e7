"""Cases of `delta_mix.prefill`: prompts, alone and several at once."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from shared.models.mixers import RecurrentConfig
from shared.spec import draft_tree
from shared.spec import recurrent_layer as spec
from tests.support.cases.gdn.recurrent_layer import (
    FALCON_H1,
    MODEL,
    NEMOTRON,
    SMALL,
    SMALL_MAMBA2,
    states_of,
    weights_of,
    width_of,
)
from tests.support.op_case import Arguments, OpCase, as_list


def arguments(
    seed: int, *, lengths: Sequence[int], sizes: RecurrentConfig, layers: int = 2
) -> Arguments:
    """Prompts in one layer of some; the first is saved after its first chunk."""
    rng = np.random.default_rng(seed)
    B, R = len(lengths), sum(lengths)
    row_starts, request, _, _ = draft_tree.flatten(np.array(lengths, np.int32), R)
    save_after, save = np.zeros((2, B), np.int32)
    save_after[0], save[0] = 64, lengths[0] >= 64
    return {
        "inputs": rng.standard_normal((R, width_of(sizes)), np.float32),
        "weights": weights_of(rng, sizes),
        "sizes": sizes,
        "states": states_of(rng, sizes, layers, B + 2),
        "snapshots": states_of(rng, sizes, layers, 2),
        "layer": layers - 1,
        "slots": (1 + rng.permutation(B + 1)[:B]).astype(np.int32),
        "row_starts": row_starts,
        "request": request,
        "save_after": save_after,
        "save": save,
    }


def _specified(arguments: Arguments, chosen: np.ndarray) -> list[np.ndarray]:
    """The outputs of some rows."""
    names = ("inputs", "weights", "sizes", "states", "layer", "slots", "row_starts")
    return [as_list(spec.prefill(*(arguments[name] for name in names)))[0][chosen]]


def _bytes(arguments: Arguments, item_bytes: int) -> int:
    """The states twice; the rows, and their outputs."""
    states, sizes, rows = arguments["states"], arguments["sizes"], arguments["inputs"]
    held = states.recurrent[0, 0].nbytes + states.window[0, 0].nbytes
    outputs = len(rows) * sizes.values
    return 2 * len(arguments["slots"]) * held + (rows.size + outputs) * item_bytes


def _case(name: str, lengths: Sequence[int], sizes: RecurrentConfig, is_large: bool) -> OpCase:
    return OpCase(
        op="recurrent_layer",
        function="prefill",
        name=name,
        make=partial(arguments, lengths=lengths, sizes=sizes),
        dtype="bfloat16" if is_large else "float32",
        wide=("weights", "states", "snapshots"),
        in_place=("states", "snapshots"),
        is_large=is_large,
        tiled="gdn_prefill",
        real_rows=lambda arguments: np.arange(len(arguments["inputs"])),
        specify=_specified,
        num_bytes=_bytes,
    )


TABLE = [
    _case("3 ragged prompts", (70, 1, 130), SMALL, False),
    *(_case(f"a prompt of {T}", (T,), MODEL, True) for T in (64, 512, 2048)),
    _case("8 ragged prompts, 2,048 rows", (700, 3, 64, 411, 129, 640, 100, 1), MODEL, True),
    _case("3 ragged prompts, Mamba2", (70, 1, 130), SMALL_MAMBA2, False),
    *(_case(f"a prompt of {T}, Mamba2", (T,), NEMOTRON, True) for T in (512, 2048)),
    _case("8 ragged prompts, Mamba2", (700, 3, 64, 411, 129, 640, 100, 1), NEMOTRON, True),
    _case("a prompt of 512, keys of 256", (512,), FALCON_H1, True),
]
