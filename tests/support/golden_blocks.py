"""Interface of golden tests of a DFlash head, and its implementations."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_impl import cache_pools
from jax_impl import weights as jax_weights
from jax_impl.backend import compiler_options
from jax_impl.drafters import dflash as jax_dflash
from jax_impl.model import Forward as JaxForward
from jax_impl.model import Model as JaxModel
from jax_impl.ops.attention import attention as jax_attention
from jax_impl.ops.sampling.lm_head import scores as jax_scores
from shared.boundary.tp_group import SINGLE_RANK
from shared.drafts.checkpoint import load_head, open_head
from shared.drafts.config import DraftConfig, DraftHead
from shared.drafts.infer_from_tensors import infer_from_tensors
from shared.models.checkpoint import Checkpoint, load_all, open_checkpoint
from shared.models.config import ModelConfig
from shared.models.families import config_from_folder
from shared.spec import attention, dflash
from shared.spec import cache_pools as spec_pools
from tests.support.golden_models import NUM_PAGES, PAGE_SIZE, TABLE, Array
from torch_impl import cache_pools as torch_pools
from torch_impl import model as torch_model
from torch_impl import weights as torch_weights
from torch_impl.drafters import dflash as torch_dflash
from torch_impl.layers import rotary_frequencies
from torch_impl.ops.attention import attention as torch_attention
from torch_impl.ops.sampling.lm_head import scores as torch_scores

GOLDEN = Path(__file__).parents[1] / "golden"
TARGET = GOLDEN / "qwen3"
POOL = (NUM_PAGES, PAGE_SIZE)
MOST_ROWS = 40

# Float32 on both sides, logits of magnitude 4 to 10: only the orders of the sums differ.
close = partial(np.testing.assert_allclose, rtol=0, atol=1e-4)


def golden_block_head(folder: Path, target: Path) -> tuple[DraftHead, dict[str, Array]]:
    """The head of a folder and its target; weights may be in the folder with the shorter name."""
    sizes = config_from_folder(target)
    config = DraftConfig.from_folder(folder, sizes)
    checkpoint = files_of(folder)
    config = infer_from_tensors(config, checkpoint, open_checkpoint(target))
    head = load_head(checkpoint, config, np.float32)
    return head, dict(load_all(target, sizes, False))


def files_of(folder: Path) -> Checkpoint:
    """The weights of a head that slides or is causal are those of one that is not."""
    name = {"jetspec": "dflash"}.get(folder.name, folder.name.removesuffix("_sliding"))
    return open_head(folder.parent / name)


class GoldenBlock(Protocol):
    """One request on one DFlash head, in float32."""

    def __init__(self, head: DraftHead, target: ModelConfig, weights: dict[str, Array]) -> None: ...

    def extend(self, features: Array) -> None:
        """Goes on with the context: the target's streams side by side, `[T, inputs]`."""
        ...

    def fill(self, newest: int, first: int = 1) -> tuple[Array, Array]:
        """The block behind the context: hidden states of all slots, and scores of those from
        `first` on over the head's vocabulary."""
        ...

    def context(self) -> tuple[Array, Array]:
        """Keys and values `[T, Hk, D]` of the first layer's context."""
        ...


class SpecBlock:
    """The specification as a golden block."""

    def __init__(self, head: DraftHead, target: ModelConfig, weights: dict[str, Array]) -> None:
        self._head, self._target, self._length = head, weights, 0
        layer = head.config.layer
        self._kv = spec_pools.new_kv(layer.attention, layer.num_layers, *POOL)

    def extend(self, features: Array) -> None:
        T, config, weights = len(features), self._head.config, self._head.weights
        where = (np.array([0, T]), np.array([self._length]), np.zeros(1, int), TABLE, T)
        rows = attention.causal_rows(*where)
        read = dflash.context(config, weights, features)
        self._kv = dflash.extend(config.layer, weights, rows, read, self._kv)
        self._length += T

    def fill(self, newest: int, first: int = 1) -> tuple[Array, Array]:
        config, weights = self._head.config, self._head.weights
        length = np.array([self._length])
        rows = dflash.block_rows(config.block, length, np.zeros(1, int), TABLE)
        hidden, _ = dflash.fill(config, weights, self._target, np.array([newest]), rows, self._kv)
        scored = dflash.scores(config, weights, self._target, hidden[0, first:])
        return hidden[0], scored[:, weights.get("draft_ids", slice(None))]

    def context(self) -> tuple[Array, Array]:
        pools = self._kv[0]
        k, v = (attention.read(pool, TABLE, self._length)[0] for pool in pools)
        return k, v


class TorchBlock:
    """The torch implementation as a golden block."""

    def __init__(self, head: DraftHead, target: ModelConfig, weights: dict[str, Array]) -> None:
        cpu, layer = torch.device("cpu"), head.config.layer
        loaded = torch_weights.from_arrays(target, weights, "float32", cpu)
        self._target = torch_model.Model.of(target, loaded, SINGLE_RANK)
        self._weights = torch_weights.head_from_arrays(head, "float32", cpu)
        self._frequencies = rotary_frequencies(layer.attention, cpu)
        self._kv = torch_pools.new_kv(layer.attention, layer.num_layers, POOL, torch.float32, cpu)
        self._length = 0
        self._table = torch.from_numpy(TABLE)

    def extend(self, features: Array) -> None:
        T, none = len(features), torch.zeros(1, dtype=torch.int32)
        ends = torch.tensor([0, T], dtype=torch.int32)
        rows = torch_attention.causal_rows(ends, none + self._length, none, self._table, T)
        streams = torch.from_numpy(features).chunk(len(self._weights.config.aux_streams), dim=1)
        passed = torch_model.Forward(streams[0], streams)
        torch_dflash.write_context(
            self._weights, self._frequencies, rows, passed, self._kv, SINGLE_RANK
        )
        self._length += T

    def fill(self, newest: int, first: int = 1) -> tuple[Array, Array]:
        none = torch.zeros(1, dtype=torch.int32)
        block, embed = self._weights.config.block, self._target.weights.embed
        rows = torch_dflash.block_rows(block, none + self._length, none, self._table)
        given = (embed, self._frequencies, none + newest, rows, self._kv, SINGLE_RANK)
        hidden = torch_dflash.fill(self._weights, *given)[0]
        scored = torch_scores(torch_dflash.head(self._target, self._weights, hidden[first:]))
        return hidden.numpy(), scored.numpy()

    def context(self) -> tuple[Array, Array]:
        k, v = self._kv[0][:, self._table[0]].flatten(1, 2)[:, : self._length].numpy()
        return k, v


class JaxBlock:
    """The JAX implementation as a golden block; with padded rows it compiles two programs."""

    def __init__(self, head: DraftHead, target: ModelConfig, weights: dict[str, Array]) -> None:
        cpu, layer = jax.devices("cpu")[0], head.config.layer
        self._length = 0
        loaded = jax_weights.from_arrays(weights, target, np.float32, cpu)
        self._target = JaxModel.of(
            target, jax_weights.weights_of(target, loaded, False), SINGLE_RANK
        )
        own = jax_weights.head_from_arrays(head, np.float32, cpu)
        self._weights = jax_weights.head_of(head.config, own, False)
        self._kv = cache_pools.new_kv(layer.attention, layer.num_layers, POOL, np.float32)
        self._table = jnp.asarray(TABLE, jnp.int32)
        how = {"compiler_options": compiler_options(cpu, quick_compile=True)}
        self._write, self._run = (
            jax.jit(self._written, **how),
            jax.jit(self._filled, static_argnums=3, **how),
        )

    def extend(self, features: Array) -> None:
        T = len(features)
        padded = np.pad(features, ((0, MOST_ROWS - T), (0, 0)))
        self._kv = self._write(self._kv, padded, T, self._length)
        self._length += T

    def _written(
        self, kv: jax.Array, features: jax.Array, count: jax.Array, length: jax.Array
    ) -> jax.Array:
        none = jnp.zeros(1, jnp.int32)
        where = (jnp.stack([none[0], count]), none + length, none, self._table)
        rows = jax_attention.causal_rows(*where, MOST_ROWS)
        streams = jnp.split(features, len(self._weights.config.aux_streams), axis=1)
        passed = JaxForward(streams[0], tuple(streams), kv)
        return jax_dflash.write_context(self._weights, rows, passed, kv, SINGLE_RANK)

    def fill(self, newest: int, first: int = 1) -> tuple[Array, Array]:
        hidden, scores, self._kv = self._run(self._kv, newest, self._length, first)
        return np.asarray(hidden), np.asarray(scores)

    def _filled(
        self, kv: jax.Array, newest: jax.Array, length: jax.Array, first: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        none = jnp.zeros(1, jnp.int32)
        block, embed = self._weights.config.block, self._target.weights.embed
        rows = jax_dflash.block_rows(block, none + length, none, self._table)
        given = (embed, none + newest, rows, kv, SINGLE_RANK)
        hidden, kv = jax_dflash.fill(self._weights, *given)
        scored = jax_scores(jax_dflash.head(self._target, self._weights, hidden[0, first:]))
        return hidden[0], scored, kv

    def context(self) -> tuple[Array, Array]:
        k, v = (np.asarray(jax_attention.read(self._kv[0, i], self._table))[0] for i in (0, 1))
        return k[: self._length], v[: self._length]


BLOCKS: dict[str, type[GoldenBlock]] = {"spec": SpecBlock, "torch": TorchBlock, "jax": JaxBlock}


def assert_golden_numbers(folder: str, block_of: Callable[[str], GoldenBlock]) -> None:
    """Starts follow each other, so context overwrites rows of an earlier block."""
    want, block, length = np.load(GOLDEN / folder / "vectors.npz"), block_of(folder), 0
    for start in want["starts"]:
        block.extend(want["feats"][length:start])
        length = start
        hidden, logits = block.fill(int(want["tokens"][start]))
        close(hidden, want[f"hidden_{start}"])
        close(logits, want[f"logits_{start}"])
        if (ids := f"draft_ids_{start}") in want:
            mapped = np.arange(logits.shape[1]) + files_of(GOLDEN / folder).tensor("d2t")
            np.testing.assert_array_equal(mapped[logits.argmax(1)], want[ids])
