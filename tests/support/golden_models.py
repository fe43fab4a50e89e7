"""Interface of golden tests, and its implementation by the specification.

One object is one model with one request. Another implementation has the same methods on its own
arrays, returns numpy arrays, and is added to `IMPLEMENTATIONS` of `golden_implementations.py`.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from shared.drafts.checkpoint import load_head, open_head
from shared.drafts.config import DraftConfig, DraftHead
from shared.drafts.infer_from_tensors import infer_from_tensors
from shared.models.checkpoint import Checkpoint, load_all, open_checkpoint
from shared.models.config import ModelConfig
from shared.models.families import config_from_folder
from shared.models.parameters import parameters
from shared.spec import (
    attention,
    cache_pools,
    eagle,
    layers,
    model,
    recurrent_mixer,
    recurrent_state,
    sampling,
)
from shared.spec.draft_tree import TreeShape
from shared.spec.linear import Matrix
from shared.spec.tree_growth import DraftRequests
from tests.support.lora_files import batch_adapters
from tests.support.weight_formats import read_planes, w8a8_of

PAGE_SIZE = 16
NUM_PAGES = 20
KV = ("attention", "latent_attention")
TABLE = 1 + np.random.default_rng(0).permutation(NUM_PAGES - 1)[None]
"""Pages of the request, in no order, page 0 (the sink) left out."""

Array = np.ndarray


def pool_of(config: ModelConfig, number: int) -> tuple[int, int]:
    """Pool of an attention layer, and its index in it; `number` counts attention layers."""
    at = (x for each, x in zip(config.layers, config.places, strict=True) if each.mixer.kind in KV)
    return next((x.pool, x.pool_index) for i, x in enumerate(at) if i == number)


@dataclass(frozen=True)
class Pass:
    """Results of a forward pass over T tokens.

    Attributes:
      logits: `[T, vocab]`.
      hidden: `[T, hidden]`, after the final norm.
      streams: `[L + 1, T, hidden]`, the residual stream into each layer and out of the last.
    """

    logits: Array
    hidden: Array
    streams: Array


@dataclass(frozen=True)
class Images:
    """Image inputs of a prompt.

    Attributes:
      turns: `[T, 3]`, M-RoPE positions of the prompt's tokens.
      delta: Difference between M-RoPE positions and positions of later tokens.
      pool: `[rows, hidden]`, image embeddings; row 0 is unused.
      sources: `[T]`, the row that replaces each token's embedding; 0: none.
    """

    turns: Array
    delta: int
    pool: Array
    sources: Array

    def piece(self, at: slice) -> "Images":
        """Returns the inputs of a part of the prompt."""
        return replace(self, turns=self.turns[at], sources=self.sources[at])


class GoldenModel(Protocol):
    """One request on one model, in float32; where it quantises, rows are FP8 as weights are.

    With an adapter, the request has it.
    """

    def __init__(
        self,
        folder: Path,
        context_length: int | None = None,
        *,
        quantises: bool = False,
        adapter: Path | None = None,
    ) -> None: ...

    def prefill(self, tokens: Array, positions: Array | None, images: Images | None = None) -> Pass:
        """Goes on with the prompt; `positions` are the rotation's, None takes them as they come."""
        ...

    def verify(self, tokens: Array, parents: Array) -> Pass:
        """Runs one draft tree (node 0 the newest token) without committing anything."""
        ...

    def commit(self, path: Array) -> None:
        """Commits these nodes of the last verify."""
        ...

    def delta_state(self, layer: int) -> tuple[Array, Array]:
        """State `[H, K, V]` and window `[3, C]` of one gated-delta layer, counted in its kind."""
        ...

    def kv(self, layer: int) -> tuple[Array, ...]:
        """Committed rows `[T, Hk, D]` of one attention layer, counted in its kind: keys and values,
        or latents.
        """
        ...

    def mtp(
        self, tokens: Array, hidden: Array, first_position: int, images: Images | None = None
    ) -> tuple[Array, Array]:
        """Consecutive rows of the MTP layer: hidden states and logits, its KV grows.

        Args:
          images: Sources of `tokens`, each of which is the one after its row's.
        """
        ...


class GoldenHead(Protocol):
    """One request on one draft head of a target, in float32.

    What it reads of the target is `[T, hidden]` for EAGLE, `[T, 3 * hidden]` for EAGLE-3: the
    residual streams side by side.
    """

    def __init__(self, folder: Path, target: Path) -> None: ...

    def extend(self, tokens: Array, reads: Array) -> tuple[Array, Array]:
        """Rows at position 0 and on, each with its next token: hidden states and logits."""
        ...

    def go_on(self, token: int, hidden: Array, position: int) -> tuple[Array, Array]:
        """One row of drafting on the head's own hidden state `[1, hidden]`."""
        ...

    def draft(self, tokens: Array, reads: Array, shape: TreeShape) -> tuple[Array, Array, Array]:
        """Extends over rows as `extend`, then drafts greedily: tokens, parents, node counts."""
        ...


def _w8a8_weights(folder: Path, config: ModelConfig) -> dict[str, Matrix]:
    """The parameters of a checkpoint whose activations are quantised."""
    checkpoint, wanted = open_checkpoint(folder), parameters(config, False)
    formats = w8a8_of(checkpoint, wanted)
    return {
        p.name: Matrix(formats[p.name], read_planes(checkpoint, p, formats[p.name]))
        for p in wanted
        if p.name in formats
    }


class SpecModel:
    """The specification as a golden model."""

    def __init__(
        self,
        folder: Path,
        context_length: int | None = None,
        *,
        quantises: bool = False,
        adapter: Path | None = None,
    ) -> None:
        self.config = config_from_folder(folder, context_length)
        self._lora = None if adapter is None else batch_adapters([adapter], folder, [1])
        with_mtp = self.config.has_mtp
        self.weights = dict(load_all(folder, self.config, with_mtp))
        if quantises:
            self.weights |= _w8a8_weights(folder, self.config)
        self._kv = cache_pools.new_pools(self.config, NUM_PAGES, PAGE_SIZE)
        self._mtp_kv = cache_pools.new_kv(self.config.draft_layer.mixer, 1, NUM_PAGES, PAGE_SIZE)
        self._state = cache_pools.new_state(self.config, 1)
        self._length, self._delta = 0, None

    def prefill(self, tokens: Array, positions: Array | None, images: Images | None = None) -> Pass:
        row_starts, first = np.array([0, len(tokens)]), np.array([self._length])
        if positions is not None:
            return self._prefill_at(tokens, positions)
        shown = turns = None
        if images is not None:
            shown, turns = layers.ImageEmbeds(images.pool, images.sources), images.turns
            self._delta = np.array([images.delta])
        where = (tokens, row_starts, first, TABLE, shown, turns, {}, self._lora)
        passed, self._state = model.prefill(
            self.config, self.weights, self._kv, self._state, *where
        )
        self._kv = passed.kv
        self._length += len(tokens)
        return self._pass(passed, len(tokens))

    def _prefill_at(self, tokens: Array, positions: Array) -> Pass:
        row_starts, first = np.array([0, len(tokens)]), np.array([self._length])
        rows = attention.causal_rows(row_starts, first, np.zeros(1, int), TABLE, len(tokens))
        rows = replace(rows, positions=positions)
        mixer = recurrent_mixer.RecurrentPrefill(self.config, self.weights, self._state, row_starts)
        passed = model.forward(self.config, self.weights, self._kv, rows, tokens, None, mixer)
        return self._pass(passed, len(tokens))

    def verify(self, tokens: Array, parents: Array) -> Pass:
        rows = len(tokens) + 3  # some padding behind the last node
        passed, self._kept = model.verify(
            self.config,
            self.weights,
            self._kv,
            self._state,
            tokens[None],
            parents[None],
            np.array([len(tokens)]),
            np.array([self._length]),
            TABLE,
            rows,
            self._delta,
            {},
            self._lora,
        )
        self._kv = passed.kv
        return self._pass(passed, len(tokens))

    def commit(self, path: Array) -> None:
        counts, lengths = np.array([len(path)]), np.array([self._length])
        where = (TABLE, lengths, path[None], counts)
        move = attention.compact_accepted_kv
        self._kv = tuple(move(pool, *where) for pool in self._kv)
        nothing_saved = np.zeros(1, int)
        self._state, _, _ = recurrent_state.replay(
            self._state, self._kept, path[None], counts, nothing_saved
        )
        self._length += len(path)

    @property
    def pools(self) -> cache_pools.Pools:
        """KV pools after the passes so far."""
        return self._kv

    def delta_state(self, layer: int) -> tuple[Array, Array]:
        return self._state.recurrent[layer, 0], self._state.window[layer, 0]

    def kv(self, layer: int) -> tuple[Array, ...]:
        pool, index = pool_of(self.config, layer)
        return tuple(attention.read(each, TABLE, self._length)[0] for each in self._kv[pool][index])

    def mtp(
        self, tokens: Array, hidden: Array, first_position: int, images: Images | None = None
    ) -> tuple[Array, Array]:
        row_starts, first = np.array([0, len(tokens)]), np.array([first_position])
        rows = attention.causal_rows(row_starts, first, np.zeros(1, int), TABLE, len(tokens))
        shown = None
        if images is not None:
            rows = replace(rows, mrope_positions=images.turns)
            shown = layers.ImageEmbeds(images.pool, images.sources)
        out, logits, self._mtp_kv = eagle.mtp(
            self.config, self.weights, rows, tokens, shown, hidden, self._mtp_kv
        )
        return out, logits

    def _pass(self, passed: model.Forward, num_rows: int) -> Pass:
        logits = model.logits(self.config, self.weights, passed.hidden)
        return Pass(logits[:num_rows], passed.hidden[:num_rows], passed.streams[:, :num_rows])


def load_golden_head(folder: Path, target: Path) -> DraftHead:
    """A head of the golden folder and its settings for the target there."""
    config, checkpoint = golden_head_files(folder, target)
    return load_head(checkpoint, config, np.float32)


def golden_head_files(folder: Path, target: Path) -> tuple[DraftConfig, Checkpoint]:
    """A head's settings as its files have them, and the files."""
    config, checkpoint = (
        DraftConfig.from_folder(folder, config_from_folder(target)),
        open_head(folder),
    )
    return infer_from_tensors(config, checkpoint, open_checkpoint(target)), checkpoint


class SpecHead:
    """The specification as a golden head."""

    def __init__(self, folder: Path, target: Path) -> None:
        loaded = load_golden_head(folder, target)
        shared = load_all(target, config_from_folder(target), False)
        drafter = eagle.EagleHeadDrafter.of_head(loaded, shared)
        self._head, self._read = drafter.run, lambda reads: reads
        if loaded.config.kind == "EAGLE3":
            self._read = partial(eagle.eagle3_project, loaded.config, loaded.weights)
        self._kv = cache_pools.new_kv(
            drafter.layer.attention, drafter.num_layers, NUM_PAGES, PAGE_SIZE
        )

    def extend(self, tokens: Array, reads: Array) -> tuple[Array, Array]:
        return self._rows(tokens, self._read(reads), 0)

    def go_on(self, token: int, hidden: Array, position: int) -> tuple[Array, Array]:
        return self._rows(np.array([token]), hidden, position)

    def draft(self, tokens: Array, reads: Array, shape: TreeShape) -> tuple[Array, Array, Array]:
        hidden, logits = self.extend(tokens, reads)
        rank, length = partial(_max_likely, shape.width), np.array([len(tokens)])
        relay = eagle.relay_of(hidden, logits, length - 1, rank)
        most = np.array([shape.nodes - 1])
        requests = DraftRequests(tokens[-1:], length, np.array([0]), most, TABLE)
        return eagle.draft(self._head, self._kv, relay, requests, shape, rank)[0][:3]

    def _rows(self, tokens: Array, hidden: Array, first_position: int) -> tuple[Array, Array]:
        starts, first = np.array([0, len(tokens)]), np.array([first_position])
        rows = attention.causal_rows(starts, first, np.zeros(1, int), TABLE, len(tokens))
        out, logits, self._kv = self._head(rows, tokens, None, hidden, self._kv)
        return out, logits


def _max_likely(width: int, logits: Array, paths: Array) -> tuple[Array, Array]:
    """Ranks greedily: the `width` most likely children of each node."""
    B, k, vocab = logits.shape
    log_probability = sampling.log_softmax(logits.reshape(B * k, vocab))
    ids = sampling.top_candidates(log_probability, width)
    edges = np.take_along_axis(log_probability, ids, axis=1)
    return ids.reshape(B, k, width), edges.reshape(B, k, width)
