"""The JAX implementation as a golden model; see `golden_models`.

Passes are padded to two sizes, so that a model compiles at most three programs.
"""

from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl import cache_pools, layers, model, weights
from jax_impl.adapters import Adapters, load, new_adapters
from jax_impl.backend import compiler_options
from jax_impl.drafters import DraftRequests, ExtendRows, Ranking, eagle, heads
from jax_impl.ops.attention import attention
from jax_impl.ops.gemm.layers import ImageEmbeds
from jax_impl.ops.recurrent import recurrent_layer
from jax_impl.ops.sampling.sampling import Sampling
from jax_impl.ops.trees import draft_tree
from shared.boundary.tp_group import SINGLE_RANK
from shared.engine.request import SamplingParams
from shared.models.checkpoint import load_all, open_checkpoint
from shared.models.families import config_from_folder
from shared.models.parameters import parameters
from shared.spec.draft_tree import TreeShape
from tests.support.equality import spec_sampling
from tests.support.golden_models import (
    NUM_PAGES,
    PAGE_SIZE,
    TABLE,
    Array,
    Images,
    Pass,
    golden_head_files,
    pool_of,
)
from tests.support.lora_files import adapter_pool, host_adapters
from tests.support.weight_formats import w8a8_of

TOKENS = 160  # of the longest prompt, and padding
NODES = 8
ROWS = NODES + 3  # some padding behind the last node
VOCAB = 256


def ints(values: Array) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.int32))


SINK = ints(np.zeros(1))  # the only slot, and the only snapshot, which is never read


def padded(values: Array | jax.Array, size: int) -> jax.Array:
    # By numpy: XLA would compile a program for each length.
    return jnp.asarray(np.pad(values, [(0, size - len(values))] + [(0, 0)] * (values.ndim - 1)))


def _adapters(adapter: Path | None, base: Path) -> Adapters:
    """Returns an adapter in slot 1, or none."""
    pool = adapter and adapter_pool([adapter], base)
    adapters = new_adapters(pool, 1, np.float32)
    if pool:
        (host,) = host_adapters(pool, {"": adapter}, base)
        for program, words in zip(pool.programs, host.words, strict=True):
            adapters = load(adapters, pool, SINGLE_RANK, program, ints([1]), jnp.asarray(words))
    return adapters


class JaxModel:
    """One request on one model."""

    def __init__(
        self,
        folder: Path,
        context_length: int | None = None,
        *,
        quantises: bool = False,
        adapter: Path | None = None,
    ) -> None:
        self._config = config_from_folder(folder, context_length)
        self._passes = passes(folder, context_length, quantises, adapter)
        pool = (NUM_PAGES, PAGE_SIZE)
        pools = self._config.cache_pools
        self._kv = cache_pools.new_pools(pools, pool, np.float32)
        self._mtp_kv = cache_pools.new_kv(self._config.draft_layer.mixer, 1, pool, np.float32)
        self._state = cache_pools.new_states(pools, 1, np.float32)
        self._length, self._delta = 0, None

    def prefill(self, tokens: Array, positions: Array | None, images: Images | None = None) -> Pass:
        count = len(tokens)
        turned = np.arange(self._length, self._length + count) if positions is None else positions
        words = (padded(ints(tokens), TOKENS), padded(ints(turned), TOKENS))
        if images is not None:
            self._delta = ints([images.delta])
        passed, self._kv, self._state = self._passes.prefill(
            self._kv, self._state, *words, count, self._length, _padded(images)
        )
        self._length += count
        return _cut(passed, count)

    def verify(self, tokens: Array, parents: Array) -> Pass:
        count = len(tokens)
        tree = (padded(ints(tokens), NODES)[None], padded(ints(parents), NODES)[None])
        passed, self._kv, self._kept = self._passes.verify(
            self._kv, self._state, *tree, count, self._length, self._delta
        )
        return _cut(passed, count)

    def commit(self, path: Array) -> None:
        count, nodes = len(path), padded(ints(path), NODES)[None]
        self._kv, self._state = self._passes.commit(
            self._kv, self._state, self._kept, nodes, count, self._length
        )
        self._length += count

    @property
    def pools(self) -> attention.Pools:
        """KV pools after the passes so far."""
        return self._kv

    def delta_state(self, layer: int) -> tuple[Array, Array]:
        return np.asarray(self._state.recurrent[layer, 0]), np.asarray(self._state.window[layer, 0])

    def kv(self, layer: int) -> tuple[Array, ...]:
        pool, index = pool_of(self._config, layer)
        pages = self._kv[pool][index]
        arrays = (np.asarray(attention.read(each, ints(TABLE))) for each in pages)
        return tuple(each[0, : self._length] for each in arrays)

    def mtp(
        self, tokens: Array, hidden: Array, first_position: int, images: Images | None = None
    ) -> tuple[Array, Array]:
        count = len(tokens)
        given = (padded(ints(tokens), TOKENS), padded(hidden, TOKENS))
        out, logits, self._mtp_kv = self._passes.mtp(
            self._mtp_kv, *given, count, first_position, _padded(images)
        )
        return np.asarray(out)[:count], np.asarray(logits)[:count]


class Passes:
    """The compiled passes of one model, which all tests of the session share."""

    def __init__(
        self, folder: Path, context_length: int | None, quantises: bool, adapter: Path | None
    ) -> None:
        self._config = config = config_from_folder(folder, context_length)
        self._streams = tuple(range(config.num_layers + 1))
        cpu = jax.devices("cpu")[0]
        if quantises:
            checkpoint = open_checkpoint(folder)
            formats = w8a8_of(checkpoint, parameters(config, False))
            how = (np.float32, cpu, lambda num_bytes: None, formats)
            self._arrays = weights.load(checkpoint, config, False, *how)
        else:
            arrays = load_all(folder, config, config.has_mtp)
            self._arrays = weights.from_arrays(arrays, config, np.float32, cpu)
        self._arrays = self._arrays, _adapters(adapter, folder)
        options = compiler_options(cpu, quick_compile=True)
        for name in ("prefill", "verify", "commit", "mtp"):
            jitted = jax.jit(getattr(self, f"_{name}"), compiler_options=options)
            setattr(self, name, partial(jitted, self._arrays))

    def _model(self, arrays) -> model.Model:
        arrays, adapters = arrays
        read = weights.weights_of(self._config, arrays, False)
        return model.Model.of(self._config, read, SINGLE_RANK, adapters)

    def _prefill(self, arrays, kv, state, tokens, positions, count, length, images):
        loaded, row_starts = self._model(arrays), jnp.stack([0, count])
        turns, shown = images
        rows = _causal_rows(count, length)._replace(positions=positions, mrope_positions=turns)
        mixer = None
        if state is not None:
            pools, where = (
                (state, recurrent_layer.take(state, SINK)),
                (SINK, row_starts, rows.request),
            )
            mixer = layers.PrefillMixer(self._config, SINGLE_RANK, *pools, *where, SINK, SINK)
        slots = jnp.ones_like(rows.request) if loaded.adapters else None
        passed = model.forward(loaded, tokens, shown, rows, kv, mixer, self._streams, slots)
        after = None if mixer is None else mixer.carry[0]
        return _pass(loaded, passed), passed.kv, after

    def _verify(self, arrays, kv, state, tokens, parents, count, length, delta):
        loaded, num_nodes = self._model(arrays), count[None]
        place = (num_nodes, length[None], ints(TABLE), ROWS)
        rows, node = attention.tree_rows(parents, *place, is_chain=False)
        if delta is not None:
            rows = attention.with_mrope(rows, delta)
        row_starts = jnp.stack([0, count])
        row_of = draft_tree.flat_rows(row_starts, num_nodes, NODES)
        mixer = None
        if state is not None:
            nodes = recurrent_layer.TreeNodes(parents, rows.row_starts, row_of, rows.request, node)
            mixer = layers.VerifyMixer(self._config, SINGLE_RANK, state, SINK, nodes, False)
        slots, tokens = jnp.ones_like(rows.request) if loaded.adapters else None, tokens[0, node]
        passed = model.forward(loaded, tokens, None, rows, kv, mixer, self._streams, slots)
        kept = None if mixer is None else mixer.carry[1].kept
        return _pass(loaded, passed), passed.kv, kept

    def _commit(self, _, kv, state, kept, path, count, length):
        counts = count[None]
        where = (ints(TABLE), length[None], path, counts)
        kv = tuple(attention.compact_accepted_kv(pool, *where) for pool in kv)
        if state is not None:
            pools, where = (
                (state, recurrent_layer.take(state, SINK)),
                (SINK, path, counts, SINK, SINK),
            )
            state, _ = recurrent_layer.commit(*pools, kept, *where)
        return kv, state

    def _mtp(self, arrays, kv, tokens, hidden, count, first, images):
        head, (turns, shown) = heads.mtp(self._model(arrays)), images
        rows = _causal_rows(count, first)._replace(mrope_positions=turns)
        out, kv = head.forward(rows, tokens, shown, hidden, kv)
        return out, head.logits(out), kv


def _padded(images: Images | None) -> tuple[jax.Array | None, ImageEmbeds | None]:
    """M-RoPE positions and image embeddings, padded to the rows of a pass."""
    if images is None:
        return None, None
    turns, sources = (padded(ints(x), TOKENS) for x in (images.turns, images.sources))
    return turns, ImageEmbeds(jnp.asarray(images.pool), sources)


class JaxHead:
    """The JAX implementation as a golden head."""

    def __init__(self, folder: Path, target: Path) -> None:
        cpu, config = jax.devices("cpu")[0], config_from_folder(target)
        loaded = weights.from_arrays(load_all(target, config, False), config, np.float32, cpu)
        own, files = golden_head_files(folder, target)
        read = weights.load_head(files, own, np.float32, cpu, lambda num_bytes: None)
        whole = model.Model.of(config, weights.weights_of(config, loaded, False), SINGLE_RANK)
        self._head = heads.HEADS[own.kind](whole, weights.head_of(own, read, False))
        self._aux = own.aux_streams
        pool = (NUM_PAGES, PAGE_SIZE)
        self._kv = cache_pools.new_kv(own.layer.attention, own.layer.num_layers, pool, np.float32)
        self._jit = partial(jax.jit, compiler_options=compiler_options(cpu, quick_compile=True))
        self._forward = self._jit(self._rows)

    def extend(self, tokens: Array, reads: Array) -> tuple[Array, Array]:
        return self._pass(tokens, self._head.read(self._passed(reads)), 0)

    def go_on(self, token: int, hidden: Array, position: int) -> tuple[Array, Array]:
        return self._pass(np.array([token]), hidden, position)

    def draft(self, tokens: Array, reads: Array, shape: TreeShape) -> tuple[Array, Array, Array]:
        drafted = self._jit(partial(self._draft, shape))
        return tuple(map(np.asarray, drafted(self._kv, ints(tokens), self._passed(reads))))

    def _passed(self, reads: Array) -> model.Forward:
        """A pass of the target with the inputs of the head."""
        streams = tuple(np.split(reads, len(self._aux) or 1, axis=1))
        return model.Forward(*jax.tree.map(jnp.asarray, (reads, streams, self._kv)))

    def _pass(
        self, tokens: Array, hidden: Array | jax.Array, first_position: int
    ) -> tuple[Array, Array]:
        count = len(tokens)
        given = (padded(ints(tokens), TOKENS), padded(hidden, TOKENS))
        out, logits, self._kv = self._forward(self._kv, *given, count, first_position)
        return np.asarray(out)[:count], np.asarray(logits)[:count]

    def _rows(self, kv, tokens, hidden, count, first):
        out, kv = self._head.forward(_causal_rows(count, first), tokens, None, hidden, kv)
        return out, self._head.logits(out), kv

    def _draft(self, shape, kv, tokens, passed):
        length, slot = jnp.full(1, len(tokens)), jnp.zeros(1, jnp.int32)
        ends, table = jnp.append(slot, length), ints(TABLE)
        rows = attention.causal_rows(ends, slot, slot, table, len(tokens))
        rank = greedy_ranking(length, shape)
        fed = ExtendRows(rows, tokens, tokens, None, passed, length - 1)
        relay, kv = eagle.relay_of(self._head, kv, fed, rank)
        requests = DraftRequests(
            slots=slot,
            newest=tokens[-1:],
            lengths=length,
            deltas=None,
            relay=relay,
            draft_from=slot,
            max_drafts=rank.sampling.max_drafts,
            page_table=table,
            window_page_tables={},
            adapters=None,
        )
        drafted, _ = eagle.draft(self._head, kv, requests, shape, rank)
        return drafted.tokens, drafted.parents, drafted.num_nodes


def greedy_ranking(lengths: jax.Array, shape: TreeShape) -> Ranking:
    """Ranks children of one request by their logits alone."""
    how = spec_sampling(SamplingParams(temperature=0.0), 0, VOCAB, 1)
    how = Sampling(*(jnp.asarray(getattr(how, name)) for name in Sampling._fields))
    how = how._replace(max_drafts=ints([shape.nodes - 1]))
    counts, slots = jnp.zeros((1, VOCAB), jnp.int32), jnp.zeros(1, jnp.int32)
    return Ranking(how, counts, slots, lengths, shape.width, False)


@cache
def passes(
    folder: Path, context_length: int | None, quantises: bool, adapter: Path | None
) -> Passes:
    """The compiled passes of a folder's model, which all tests of the session share."""
    return Passes(folder, context_length, quantises, adapter)


def _causal_rows(count: jax.Array, first: jax.Array) -> attention.AttentionRows:
    where = (jnp.stack([0, count]), first[None], jnp.zeros(1, jnp.int32), ints(TABLE))
    return attention.causal_rows(*where, TOKENS)


def _pass(loaded: model.Model, passed: model.Forward) -> tuple[jax.Array, ...]:
    return model.logits(loaded, passed.hidden), passed.hidden, jnp.stack(passed.streams)


def _cut(passed: tuple[jax.Array, ...], count: int) -> Pass:
    logits, hidden, streams = map(np.asarray, passed)
    return Pass(logits[:count], hidden[:count], streams[:, :count])
