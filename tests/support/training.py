"""Helpers of the tests of training passes: quick compiles, and golden models as modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl import weights
from jax_impl.backend import compiler_options
from jax_impl.training import init
from jax_impl.training.examples import Batches, RaggedRows, Row
from jax_impl.training.loop import Schedule, Task, train
from jax_impl.training.nnx_modules import DraftModel, ModelModule
from shared.drafts.config import DraftConfig
from shared.models.checkpoint import load_all
from shared.models.config import ModelConfig
from shared.models.families import config_from_dict, config_from_folder
from tests.support.golden_models import load_golden_head
from tests.support.tiny_models import tiny_config

GOLDEN = Path(__file__).parents[1] / "golden"
CPU = jax.devices("cpu")[0]


def jitted(function: Callable[..., Any], *fixed: Any, **named: Any) -> Callable[..., Any]:
    """The function with its first arguments fixed, as one program that is compiled quickly."""
    options = compiler_options(CPU, quick_compile=True)
    return jax.jit(partial(function, *fixed, **named), compiler_options=options)


def vectors(folder: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / folder / "vectors.npz"))


def golden_model(folder: str) -> tuple[ModelConfig, ModelModule]:
    config = config_from_folder(GOLDEN / folder)
    arrays = load_all(GOLDEN / folder, config, config.has_mtp)
    return config, ModelModule(weights.from_arrays(arrays, config, np.float32, CPU).named)


def small_hybrid() -> tuple[ModelConfig, ModelModule]:
    """A fresh model with as few layers as show everything, for these take long to compile."""
    fields = tiny_config("qwen3_5", nested=False, with_mtp=True, tied=True)
    fields |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    config = config_from_dict(fields)
    return config, init.fresh_model(config, 0, True)


def golden_head(folder: str, target: str) -> tuple[DraftConfig, DraftModel]:
    head = load_golden_head(GOLDEN / folder, GOLDEN / target)
    return head.config, DraftModel(weights.head_from_arrays(head, np.float32, CPU).named)


def padded(tokens: np.ndarray, length: int) -> jax.Array:
    """One row, with padding on the right."""
    return jnp.asarray(np.pad(tokens, (0, length - len(tokens))), jnp.int32)[None]


def lowered(
    loss: Callable[[Any], Any], module: ModelModule | DraftModel | Any
) -> tuple[float, float]:
    """The loss before and after one step of gradient descent on a module's parameters."""
    graded = jitted(jax.value_and_grad(lambda own: loss(own)[0], allow_int=True))
    before, slope = graded(module)
    floats = [x for x in jax.tree.leaves(slope) if jnp.issubdtype(x.dtype, jnp.floating)]
    scale = 1e-2 / jnp.sqrt(sum((x * x).sum() for x in floats))
    moved = jax.tree.map(
        lambda own, by: own - scale * by if jnp.issubdtype(own.dtype, jnp.floating) else own,
        module,
        slope,
    )
    return float(before), float(graded(moved)[0])


def rows_of(*lengths: int) -> RaggedRows:
    return RaggedRows.of(
        [Row([i + 1] * n, [True] * n) for i, n in enumerate(lengths)], max_tokens=1000
    )


def shared_run(folder: Path) -> np.ndarray:
    """Each row pulls the matrix to its own token; the rows of a batch weigh the same."""
    batches = Batches(rows_of(*[64] * 12), batch_tokens=256, seed=1, prompt_weight=0.0, shares=2)

    def loss(matrix, frozen, batch, key):
        pulls = (matrix - batch.tokens[:, :1] - frozen) ** 2
        return pulls.mean(), {"loss": pulls.mean()}

    task = Task(params=jnp.ones(3), frozen=jnp.ones(()), loss=loss)
    schedule = Schedule(steps=8, minutes=None, learning_rate=0.1, warmup=2, save_minutes=9.0)
    return np.asarray(train(task, batches, schedule, 7, folder))
