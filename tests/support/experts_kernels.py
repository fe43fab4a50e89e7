"""Cases of a block of experts, the same in numpy, and its kernels as both languages run them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

from kernels.kernel_limits import arrivals_of_experts
from kernels.routing import RoutingSettings
from kernels.tiles import ExpertsTiles
from shared.models.activation import Activation
from shared.models.formats.fp8_w8a16 import FP8_BLOCK
from shared.models.formats.plain import Plain
from shared.models.formats.weight_format import PLAIN, SCALES, WeightFormat
from shared.spec.layers import activated
from shared.spec.linear import widened
from shared.spec.reduction_order import ROUTER, SHRINK, SQUARES, chunks_of_squares
from tests.support.cases.gemm.linear import QUANTIZED
from tests.support.kernels import AS_WRITTEN, INTERPRET, KERNELS, ON_GPU, OPTIONS

EPS = 1e-6
HALF = ml_dtypes.bfloat16 if ON_GPU else np.float32
"""Dtype of rows and weights: the interpreters are faster, and closer, in float32."""


def routing(experts: int, top: int, **changed: Any) -> RoutingSettings:
    usual = {
        "groups": 1,
        "top_groups": 1,
        "is_sigmoid": False,
        "is_renormalised": True,
        "factor": 1.0,
        "output_factor": 1.0,
    }
    shared = {"is_shared": False, "is_gated": False}
    return RoutingSettings(experts=experts, top=top, **(usual | shared | changed))


def tiles(**changed: Any) -> ExpertsTiles:
    how = {"slots": 16, "swapped": True, "columns": 32, "depth": 32, "warps": 4, "stages": 2}
    how |= {"down_columns": 64, "down_depth": 32, "down_warps": 4, "down_stages": 2}
    how |= {"sum_columns": 128, "sum_warps": 2, "group_rows": 16}
    how |= {"router_rows": 4, "router_depth": 32, "router_warps": 4, "router_stages": 2}
    return ExpertsTiles(**({"grouped": False} | how | changed))


class Case(NamedTuple):
    """A block of experts; whether scores have a bias, and the next norm a scale.

    Attributes:
      quantized: Format of the weights, of `cases.gemm.linear.QUANTIZED`; None: they are numbers.
      activation: Of the experts.
      has_biases: Whether the router and the experts have biases.
      is_parallel: Whether the router reads rows of a norm of its own, and experts have scales.
      is_latent: Whether experts read rows of their own, without a norm.
    """

    R: int
    hidden: int
    inner: int
    routing: RoutingSettings
    quantized: str | None = None
    is_biased: bool = False
    is_scaled: bool = True
    activation: Activation = Activation()
    has_biases: bool = False
    is_parallel: bool = False
    is_latent: bool = False

    @property
    def is_packed(self) -> bool:
        return self.quantized is not None

    @property
    def format(self) -> WeightFormat:
        """Format of the weights as stored."""
        if self.quantized is None:
            return Plain("bfloat16")
        return QUANTIZED[self.quantized](np.zeros((FP8_BLOCK, FP8_BLOCK), np.float32)).format


class Block(NamedTuple):
    """Arguments of a MoE block; weights as numbers, and as stored."""

    rows: np.ndarray
    scaled: np.ndarray
    squares: np.ndarray
    router: np.ndarray
    router_bias: np.ndarray | None
    bias: np.ndarray | None
    scored: np.ndarray | None
    latents: np.ndarray | None
    expert_scale: np.ndarray | None
    gate_up: np.ndarray
    gate_up_bias: np.ndarray | None
    down: np.ndarray
    down_bias: np.ndarray | None
    norm: np.ndarray | None
    stored: dict[str, np.ndarray | None]


class Found(NamedTuple):
    """Results of a MoE block, with the chosen experts."""

    ids: np.ndarray
    weights: np.ndarray
    rows: np.ndarray
    scaled: np.ndarray
    squares: np.ndarray


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random numbers, repeated in a large array, which would take a while to draw."""
    size = int(np.prod(shape))
    return np.resize(rng.standard_normal(min(size, 2**20 - 3), np.float32), shape)


def _rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(HALF).astype(np.float32)


@cache
def block_of(case: Case) -> Block:
    rng, choice = np.random.default_rng(0), case.routing
    R, hidden, inner = case[:3]
    rows = _rounded(_normal(rng, R, hidden))
    scaled = _rounded(rows * (1 + _normal(rng, hidden) / 10))
    router = _rounded(_normal(rng, choice.outputs, hidden) * np.float32(2 / hidden**0.5))
    wide = case.activation.num_projections * inner
    shapes = {"gate_up": (wide, hidden), "down": (hidden, inner)}
    stored: dict[str, np.ndarray | None] = {}
    for name, shape in shapes.items():
        drawn = _normal(rng, choice.stored, *shape)
        numbers = _rounded(drawn / np.float32(shape[1] ** 0.5))
        if case.quantized is not None:
            matrix = QUANTIZED[case.quantized](numbers)
            numbers, scales = _rounded(widened(matrix)), matrix.scales
            plane = matrix.format.planes(shape)[SCALES]
            scales = scales.astype(HALF) if plane.dtype == "bfloat16" else scales
            stored |= {name: matrix.values, f"{name}_scales": scales}
        else:
            stored |= {name: numbers.astype(HALF), f"{name}_scales": None}
        shapes[name] = numbers

    def biases(*shape: int) -> np.ndarray | None:
        return _rounded(rng.standard_normal(shape, np.float32)) if case.has_biases else None

    return Block(
        rows=rows,
        scaled=scaled,
        squares=chunks_of_squares(rows),
        router=router,
        router_bias=biases(choice.outputs),
        bias=_normal(rng, choice.experts) / 4 if case.is_biased else None,
        scored=_rounded(rows * (1 + _normal(rng, hidden) / 2)) if case.is_parallel else None,
        latents=_rounded(_normal(rng, R, hidden)) if case.is_latent else None,
        expert_scale=1 + _normal(rng, choice.experts) / 4 if case.is_parallel else None,
        gate_up=shapes["gate_up"],
        gate_up_bias=biases(choice.stored, wide),
        down=shapes["down"],
        down_bias=biases(choice.stored, hidden),
        norm=1 + _normal(rng, hidden) / 10 if case.is_scaled else None,
        stored=stored,
    )


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@cache
def reference(case: Case) -> Found:
    """The block in float32, row by row."""
    block, choice = block_of(case), case.routing
    mean = np.square(block.rows).mean(axis=1, keepdims=True)
    x = block.scaled / np.sqrt(mean + np.float32(EPS))
    scored = x if block.scored is None else block.scored / np.sqrt(mean + np.float32(EPS))
    logits = scored @ block.router.T + (0 if block.router_bias is None else block.router_bias)
    logits, gates = np.split(logits, [choice.experts], axis=1)
    scores = _sigmoid(logits) if choice.is_sigmoid else logits
    keys = scores if block.bias is None else scores + block.bias
    if choice.groups > 1:
        keys = _within_groups(keys, choice)
    ids = np.sort(np.argsort(-keys, axis=1, kind="stable")[:, : choice.top], axis=1)
    all_weights = scores if choice.is_sigmoid else np.exp(scores - scores.max(1, keepdims=True))
    weights = np.take_along_axis(all_weights, ids, axis=1)
    if choice.is_renormalised:
        weights = weights / weights.sum(axis=1, keepdims=True)
    elif not choice.is_sigmoid:
        weights = weights / all_weights.sum(axis=1, keepdims=True)
    weights = weights * np.float32(choice.factor)
    if block.expert_scale is not None:
        weights = weights * block.expert_scale[ids]
    if choice.is_shared:
        own = _sigmoid(gates) if choice.is_gated else np.ones((case.R, 1), np.float32)
        ids = np.concatenate([ids, np.full((case.R, 1), choice.experts)], axis=1)
        weights = np.concatenate([weights, own], axis=1)
    inputs = x if block.latents is None else block.latents
    added = [
        sum(
            w * _expert(block, case.activation, e, inputs[row])
            for e, w in zip(ids[row], weights[row], strict=True)
        )
        for row in range(case.R)
    ]
    rows = _rounded(block.rows + np.float32(choice.output_factor) * np.stack(added))
    scaled = rows if block.norm is None else _rounded(rows * block.norm)
    return Found(ids, weights, rows, scaled, chunks_of_squares(rows))


def _within_groups(keys: np.ndarray, choice: RoutingSettings) -> np.ndarray:
    """The keys of the chosen groups, and less than all of them elsewhere."""
    groups = keys.reshape(len(keys), choice.groups, -1)
    sums = np.sort(groups, axis=2)[:, :, -2:].sum(axis=2)
    chosen = np.argsort(-sums, axis=1, kind="stable")[:, : choice.top_groups]
    is_left = np.zeros(sums.shape, bool)
    np.put_along_axis(is_left, chosen, True, axis=1)
    return np.where(is_left[:, :, None], groups, -np.inf).reshape(keys.shape)


def _expert(block: Block, activation: Activation, number: int, x: np.ndarray) -> np.ndarray:
    stored = (block.gate_up_bias, block.down_bias)
    first, second = (np.float32(0) if each is None else each[number] for each in stored)
    inner = activated(block.gate_up[number] @ x + first, activation)
    return block.down[number] @ _rounded(inner) + second


def check_equal(one: Found, other: Found, count: int | None = None) -> None:
    for name, x, y in zip(Found._fields, one, other, strict=True):
        np.testing.assert_array_equal(x[:count], y[:count], err_msg=name)


def _same(inner: Any) -> Any:
    """Returns its argument: a single rank has all inner columns."""
    return inner


class Share(NamedTuple):
    """Results of a rank for its columns."""

    rows: np.ndarray
    scaled: np.ndarray
    squares: np.ndarray


def run(
    language: str,
    case: Case,
    *,
    cut: ExpertsTiles,
    rows: list[int] | slice = slice(None),
    live: int | None = None,
    changed: dict[str, np.ndarray] | None = None,
    is_as_written: bool = False,
) -> Found:
    """Runs the kernels on some of a case's rows, or with other arrays.

    Args:
      live: How many rows are real; None: all.
      is_as_written: Pallas' interpreter fuses nothing, for its bits.
    """
    block = block_of(case)._replace(**(changed or {}))
    given: dict[str, Any] = {name: getattr(block, name)[rows] for name in block._fields[:3]}
    R = len(given["rows"])
    given = {k: v if k == "squares" else v.astype(HALF) for k, v in given.items()}
    given |= {"router": block.router.astype(HALF), "bias": block.bias, "next_norm": block.norm}
    for name in ("router_bias", "gate_up_bias", "down_bias"):
        biases = getattr(block, name)
        given[name] = None if biases is None else biases.astype(HALF)
    scored = None if block.scored is None else block.scored[rows].astype(HALF)
    latents = None if block.latents is None else block.latents[rows].astype(HALF)
    given |= {"scored": scored, "latents": latents, "expert_scale": block.expert_scale}
    given |= block.stored | {"live": np.array([R if live is None else live], np.int32)}
    given["arrivals"] = np.zeros(arrivals_of_experts(R, case.hidden), np.int32)
    how = {"eps": EPS, "routing": case.routing, "activation": case.activation, "tiles": cut}
    how |= {"order": ROUTER, "squares_order": SQUARES, "shrink_order": SHRINK, "gathered": _same}
    is_packed = block.stored["gate_up_scales"] is not None
    how["formats"] = (case.format.name if is_packed else PLAIN,) * 2
    if language == "triton":
        return _in_triton(given, how)
    return _in_pallas(given, tuple(how.items()), is_as_written)


def run_ranks(language: str, case: Case, count: int, *, cut: ExpertsTiles) -> list[Share]:
    """Returns the result of each rank for a case with unquantised weights and a next norm.

    Each runs twice: what it would send is known when it has run once.
    """
    block = block_of(case)
    assert block.norm is not None
    framework: Any = torch if language == "triton" else jnp
    module, each = KERNELS[language]["experts"], []
    how = {"eps": EPS, "routing": case.routing, "activation": case.activation, "tiles": cut}
    how |= {
        "order": ROUTER,
        "squares_order": SQUARES,
        "shrink_order": SHRINK,
        "formats": (PLAIN, PLAIN),
    }
    for rank in range(count):
        columns = slice(rank * case.hidden // count, (rank + 1) * case.hidden // count)
        inner = slice(rank * case.inner // count, (rank + 1) * case.inner // count)
        gate, up = np.split(block.stored["gate_up"], 2, axis=1)
        each.append(
            {
                "rows": block.rows[:, columns].astype(HALF),
                "scaled": block.scaled.astype(HALF),
                "squares": block.squares,
                "router": block.router.astype(HALF),
                "router_bias": None,
                "scored": None,
                "latents": None,
                "expert_scale": None,
                "bias": block.bias,
                "gate_up_bias": None,
                "down_bias": None,
                "gate_up": np.concatenate([gate[:, inner], up[:, inner]], axis=1),
                "gate_up_scales": None,
                "down": block.stored["down"][:, columns],
                "down_scales": None,
                "next_norm": block.norm[columns],
                "live": np.array([case.R], np.int32),
                "arrivals": np.zeros(arrivals_of_experts(case.R, case.hidden), np.int32),
            }
        )

    def run_rank(given: dict[str, Any], every: Any) -> tuple[Any, Any]:
        """Returns the columns that a rank sends, and its result after gathering `every`."""
        sent: list[Any] = []

        def gathered(inner: Any) -> Any:
            sent.append(inner)
            return every

        found = module.experts(**given, gathered=gathered, **how)
        return sent[0], found if language == "triton" else found[0]

    if language == "triton":
        given = [{k: None if v is None else _tensor(v.copy()) for k, v in x.items()} for x in each]
    else:
        how |= {"layer": jnp.int32(0), "norm_layer": jnp.int32(0), "interpret": INTERPRET}
        given = [
            {
                k: v if v is None else jnp.asarray(v[None] if k in STACKS else v)
                for k, v in x.items()
            }
            for x in each
        ]
        run_rank = jax.jit(run_rank, compiler_options=OPTIONS)
    rows, shape = given[0]["rows"], (case.R * case.routing.slots, case.inner)
    nothing = framework.zeros(shape, dtype=rows.dtype, device=rows.device)
    every = framework.concatenate([run_rank(x, nothing)[0] for x in given], 1)
    found = [run_rank(x, every)[1] for x in given]
    return [
        Share(*(np.asarray(x.float().cpu() if language == "triton" else x, np.float32) for x in y))
        for y in found
    ]


def _in_triton(given: dict[str, Any], how: dict[str, Any]) -> Found:
    given = {k: None if v is None else _tensor(v) for k, v in given.items()}
    module = KERNELS["triton"]["experts"]
    with _kept_choice(module) as choices:
        stream = module.experts(**given, **how)
    assert not given["arrivals"].any()
    return Found(*(x.float().cpu().numpy() for x in (*choices[0], *stream)))


@contextmanager
def _kept_choice(module: ModuleType) -> Iterator[list[Any]]:
    """Within it a block's choice is kept, which it does not give back."""
    choices: list[Any] = []

    chosen = module.route

    def route(*args: Any, **how: Any) -> Any:
        choices.append(chosen(*args, **how))
        return choices[-1]

    with patch.object(module, "route", route):
        yield choices


def _tensor(x: np.ndarray) -> torch.Tensor:
    device = "cuda" if ON_GPU else "cpu"
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(x).to(device)


BIASES = ("router_bias", "gate_up_bias", "down_bias")
STACKS = (
    *(
        "router",
        "bias",
        "expert_scale",
        "gate_up",
        "gate_up_scales",
        "down",
        "down_scales",
        "next_norm",
    ),
    *BIASES,
)


def _in_pallas(given: dict[str, Any], how: tuple, is_as_written: bool) -> Found:
    given = {
        k: jnp.asarray(np.stack([_other(v), v]) if k in STACKS else v)
        for k, v in given.items()
        if v is not None
    }
    chosen, stream, arrivals = _program(how, is_as_written)(given)
    assert not arrivals.any()
    return Found(*(np.asarray(x, np.float32) for x in (*chosen, *stream)))


def _other(x: np.ndarray) -> np.ndarray:
    """Another layer's, which must not be read."""
    return np.full_like(x, -1 if x.dtype == np.int32 else np.nan)


@cache
def _program(how: tuple, is_as_written: bool) -> Callable:
    module = KERNELS["pallas"]["experts"]

    def program(given: dict[str, jax.Array]) -> tuple:
        given = dict.fromkeys((*STACKS, "scored", "latents")) | given
        with _kept_choice(module) as choices:
            stream, arrivals = module.experts(
                **given,
                **dict(how),
                layer=jnp.int32(1),
                norm_layer=jnp.int32(1),
                interpret=INTERPRET,
            )
        return choices[0][0], stream, arrivals

    return jax.jit(program, compiler_options=AS_WRITTEN if is_as_written else OPTIONS)
