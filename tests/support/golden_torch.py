"""The torch implementation as a golden model; see `golden_models`."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import torch

from shared.boundary.tp_group import SINGLE_RANK
from shared.engine.request import SamplingParams
from shared.models.checkpoint import load_all, open_checkpoint
from shared.models.config import ModelConfig
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
from torch_impl import cache_pools, model, weights
from torch_impl.adapters import Adapters, load, new_adapters
from torch_impl.drafters import DraftRequests, ExtendRows, Ranking, eagle, heads
from torch_impl.layers import PrefillMixer, VerifyMixer
from torch_impl.ops.attention import attention
from torch_impl.ops.gemm import layers
from torch_impl.ops.recurrent import recurrent_layer
from torch_impl.ops.recurrent.recurrent_layer import TreeNodes
from torch_impl.ops.sampling.sampling import Sampling
from torch_impl.ops.trees import draft_tree

CPU = torch.device("cpu")


def ints(values: Array) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.int32))


def new_kv(config: ModelConfig, num_layers: int) -> torch.Tensor:
    mixer = config.draft_layer.mixer
    return cache_pools.new_kv(mixer, num_layers, (NUM_PAGES, PAGE_SIZE), torch.float32, CPU)


def causal_rows(table: torch.Tensor, count: int, first_position: int) -> attention.AttentionRows:
    where = (ints([0, count]), ints([first_position]), ints([0]))
    return attention.causal_rows(*where, table, count)


def _loaded(folder: Path, config: ModelConfig, quantises: bool) -> weights.Weights:
    if not quantises:
        arrays = load_all(folder, config, config.has_mtp)
        return weights.from_arrays(config, arrays, "float32", CPU)
    checkpoint = open_checkpoint(folder)
    formats = w8a8_of(checkpoint, parameters(config, False))
    return weights.load(checkpoint, config, False, "float32", CPU, lambda num_bytes: None, formats)


def _adapters(adapter: Path | None, base: Path) -> Adapters:
    """Returns an adapter in slot 1, or none."""
    pool = adapter and adapter_pool([adapter], base)
    adapters = new_adapters(pool, 1, torch.float32, CPU)
    if pool:
        (host,) = host_adapters(pool, {"": adapter}, base)
        for program, words in zip(pool.programs, host.words, strict=True):
            load(adapters, pool, SINGLE_RANK, program, ints([1]), torch.from_numpy(words))
    return adapters


class TorchModel:
    """One request on one model."""

    def __init__(
        self,
        folder: Path,
        context_length: int | None = None,
        *,
        quantises: bool = False,
        adapter: Path | None = None,
    ) -> None:
        config = config_from_folder(folder, context_length)
        loaded = _loaded(folder, config, quantises)
        adapters = _adapters(adapter, folder)
        self._model = model.Model.of(config, loaded, SINGLE_RANK, adapters)
        size = (NUM_PAGES, PAGE_SIZE)
        self._kv = cache_pools.new_pools(config.cache_pools, size, torch.float32, CPU)
        self._mtp_kv = new_kv(config, 1)
        self._table, self._length, self._delta = ints(TABLE), 0, None
        self._streams = tuple(range(config.num_layers + 1))
        self._state = cache_pools.new_states(config.cache_pools, 1, torch.float32, CPU)
        if self._state is not None:
            self._no_snapshot = recurrent_layer.take(self._state, ints([0]))  # the sink

    def prefill(self, tokens: Array, positions: Array | None, images: Images | None = None) -> Pass:
        count, row_starts = len(tokens), ints([0, len(tokens)])
        rows = causal_rows(self._table, count, self._length)
        if positions is not None:
            rows = replace(rows, positions=ints(positions))
        rows, shown = _seen(rows, images)
        if images is not None:
            self._delta = ints([images.delta])
        mixer = None
        if self._model.config.recurrent:
            where = (ints([0]), row_starts, rows.request, ints([0]), ints([0]))
            pools = self._state, self._no_snapshot
            mixer = PrefillMixer(self._model.config, SINGLE_RANK, *pools, *where)
        passed = self._forward(ints(tokens), shown, rows, mixer)
        self._length += count
        return passed

    def verify(self, tokens: Array, parents: Array) -> Pass:
        num_nodes, parents = ints([len(tokens)]), ints(parents)[None]
        lengths, rows = ints([self._length]), len(tokens) + 3  # some padding behind the last node
        flat, node = attention.tree_rows(
            parents, num_nodes, lengths, self._table, rows, is_chain=False
        )
        if self._delta is not None:
            flat = attention.with_mrope(flat, self._delta)
        self._mixer = None
        if self._model.config.recurrent:
            starts, *_ = draft_tree.flatten(num_nodes, rows)
            row_of = draft_tree.flat_rows(starts, num_nodes, len(tokens))
            nodes = TreeNodes(parents, flat.row_starts, row_of, flat.request, node)
            given = (self._state, ints([0]), nodes, False)
            self._mixer = VerifyMixer(self._model.config, SINGLE_RANK, *given)
        passed = self._forward(ints(tokens)[node], None, flat, self._mixer)
        count = len(tokens)
        return Pass(passed.logits[:count], passed.hidden[:count], passed.streams[:, :count])

    def commit(self, path: Array) -> None:
        path, counts = ints(path)[None], ints([len(path)])
        for pool in self._kv:
            attention.compact_accepted_kv(pool, self._table, ints([self._length]), path, counts)
        if self._mixer is not None:
            self._mixer.commit(self._no_snapshot, path, counts, ints([0]), ints([0]))
        self._length += path.shape[1]

    @property
    def target(self) -> model.Model:
        """The model, as a target of drafters."""
        return self._model

    @property
    def pools(self) -> attention.Pools:
        """KV pools after the passes so far."""
        return self._kv

    def delta_state(self, layer: int) -> tuple[Array, Array]:
        return self._state.recurrent[layer, 0].numpy(), self._state.window[layer, 0].numpy()

    def kv(self, layer: int) -> tuple[Array, ...]:
        pool, index = pool_of(self._model.config, layer)
        pages = self._kv[pool][index][:, self._table[0]].flatten(1, 2)[:, : self._length]
        return tuple(each.numpy() for each in pages)

    def mtp(
        self, tokens: Array, hidden: Array, first_position: int, images: Images | None = None
    ) -> tuple[Array, Array]:
        head, rows = heads.mtp(self._model), causal_rows(self._table, len(tokens), first_position)
        rows, shown = _seen(rows, images)
        given = torch.from_numpy(np.ascontiguousarray(hidden))
        out = head.forward(rows, ints(tokens), shown, given, self._mtp_kv)
        return out.numpy(), head.logits(out).numpy()

    def _forward(
        self,
        tokens: torch.Tensor,
        shown: layers.ImageEmbeds | None,
        rows: attention.AttentionRows,
        mixer: PrefillMixer | VerifyMixer | None,
    ) -> Pass:
        given = (tokens, shown, rows, self._kv)
        slots = torch.ones_like(rows.request) if self._model.adapters else None
        passed = model.forward(self._model, *given, mixer, self._streams, slots)
        logits = model.logits(self._model, passed.hidden)
        return Pass(logits.numpy(), passed.hidden.numpy(), torch.stack(passed.streams).numpy())


def _seen(
    rows: attention.AttentionRows, images: Images | None
) -> tuple[attention.AttentionRows, layers.ImageEmbeds | None]:
    """Rows with M-RoPE positions and image embeddings."""
    if images is None:
        return rows, None
    shown = layers.ImageEmbeds(torch.from_numpy(images.pool), ints(images.sources))
    return replace(rows, mrope_positions=ints(images.turns)), shown


class TorchHead:
    """The torch implementation as a golden head."""

    def __init__(self, folder: Path, target: Path) -> None:
        config = config_from_folder(target)
        loaded = weights.from_arrays(config, load_all(target, config, False), "float32", CPU)
        own, files = golden_head_files(folder, target)
        head = weights.load_head(files, own, "float32", CPU, progress=lambda num_bytes: None)
        self._head = heads.HEADS[head.config.kind](
            model.Model.of(config, loaded, SINGLE_RANK), head
        )
        layer, self._vocab = self._head.config, config.vocab
        self._kv, self._table = new_kv(layer, self._head.num_layers), ints(TABLE)

    def extend(self, tokens: Array, reads: Array) -> tuple[Array, Array]:
        return self._rows(tokens, self._head.read(self._passed(reads)), 0)

    def go_on(self, token: int, hidden: Array, position: int) -> tuple[Array, Array]:
        return self._rows(np.array([token]), torch.from_numpy(hidden), position)

    def draft(self, tokens: Array, reads: Array, shape: TreeShape) -> tuple[Array, Array, Array]:
        length, none, vocab = ints([len(tokens)]), ints([0]), self._vocab
        rank = Ranking(
            sampling=_greedy(vocab),
            counts=torch.zeros(1, vocab, dtype=torch.int32),
            slots=torch.zeros(1, dtype=torch.int64),
            lengths=length,
            width=shape.width,
            is_sampled=False,
        )
        rows = causal_rows(self._table, len(tokens), 0)
        fed = ExtendRows(rows, ints(tokens), ints(tokens), None, self._passed(reads), length - 1)
        relay = eagle.relay_of(self._head, self._kv, fed, rank)
        requests = DraftRequests(
            slots=none,
            newest=ints(tokens[-1:]),
            lengths=length,
            deltas=None,
            relay=relay,
            draft_from=none,
            max_drafts=ints([shape.nodes - 1]),
            page_table=self._table,
            window_page_tables={},
            adapters=None,
        )
        drafted = eagle.draft(self._head, self._kv, requests, shape, rank)
        return drafted.tokens.numpy(), drafted.parents.numpy(), drafted.num_nodes.numpy()

    def _passed(self, reads: Array) -> model.Forward:
        """A pass of the target with the inputs of the head."""
        given = torch.from_numpy(reads)
        num_streams = max(len(self._head.streams), 1)
        return model.Forward(given, given.chunk(num_streams, dim=1))

    def _rows(
        self, tokens: Array, hidden: torch.Tensor, first_position: int
    ) -> tuple[Array, Array]:
        head, rows = self._head, causal_rows(self._table, len(tokens), first_position)
        out = head.forward(rows, ints(tokens), None, hidden, self._kv)
        return out.numpy(), head.logits(out).numpy()


def _greedy(vocab: int) -> Sampling:
    """The parameters of one request that takes the likeliest tokens."""
    params = spec_sampling(SamplingParams(temperature=0.0), 1, vocab, 1)
    given = {f.name: torch.from_numpy(getattr(params, f.name)) for f in fields(Sampling)}
    return Sampling(**given | {"seed": given["seed"].view(torch.int32)})
