"""What a golden test asks of an implementation, and the specification's answer to it.

One object is one model with one request. Another implementation offers the same methods on its own
arrays, gives numpy back, and is added to `IMPLEMENTATIONS` of `test_golden.py`.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from shared.checkpoint import load_all
from shared.model_config import ModelConfig
from shared.spec import attention, eagle, mamba_state, model

PAGE_SIZE = 16
NUM_PAGES = 20
TABLE = 1 + np.random.default_rng(0).permutation(NUM_PAGES - 1)[None]
"""Pages of the request, in no order, page 0 (the sink) left out."""

Array = np.ndarray


@dataclass(frozen=True)
class Pass:
    """What a forward pass over T tokens gave.

    Attributes:
      logits: `[T, vocab]`.
      hidden: `[T, hidden]`, after the final norm.
      streams: `[L + 1, T, hidden]`, the residual stream into each layer and out of the last.
    """

    logits: Array
    hidden: Array
    streams: Array


class GoldenModel(Protocol):
    """One request on one model, in float32."""

    def __init__(self, folder: Path) -> None: ...

    def prefill(self, tokens: Array, positions: Array | None) -> Pass:
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

    def kv(self, layer: int) -> tuple[Array, Array]:
        """Committed keys and values `[T, Hk, D]` of one attention layer, counted in its kind."""
        ...

    def mtp(self, tokens: Array, hidden: Array, first_position: int) -> tuple[Array, Array]:
        """Consecutive rows of the MTP layer: hidden states and logits, its KV grows."""
        ...


class SpecModel:
    """The specification as a golden model."""

    def __init__(self, folder: Path) -> None:
        self.config = ModelConfig.from_folder(folder)
        self.weights = load_all(folder, self.config, self.config.has_mtp)
        num_layers = self.config.num_attention_layers
        self._kv = model.new_kv(self.config, num_layers, NUM_PAGES, PAGE_SIZE)
        self._mtp_kv = model.new_kv(self.config, 1, NUM_PAGES, PAGE_SIZE)
        self._state = model.new_state(self.config, 1)
        self._length = 0

    def prefill(self, tokens: Array, positions: Array | None) -> Pass:
        """See `GoldenModel`."""
        row_starts, first = np.array([0, len(tokens)]), np.array([self._length])
        if positions is not None:
            return self._prefill_at(tokens, positions)
        passed, self._state = model.prefill(
            self.config, self.weights, self._kv, self._state, tokens, row_starts, first, TABLE
        )
        self._kv = passed.kv
        self._length += len(tokens)
        return self._pass(passed, len(tokens))

    def _prefill_at(self, tokens: Array, positions: Array) -> Pass:
        row_starts, first = np.array([0, len(tokens)]), np.array([self._length])
        rows = attention.causal_rows(row_starts, first, np.zeros(1, int), TABLE, len(tokens))
        rows = replace(rows, positions=positions)
        mixer = model.Chunks(self.config, self.weights, self._state, row_starts)
        passed = model.forward(self.config, self.weights, self._kv, rows, tokens, mixer)
        return self._pass(passed, len(tokens))

    def verify(self, tokens: Array, parents: Array) -> Pass:
        """See `GoldenModel`."""
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
        )
        self._kv = passed.kv
        return self._pass(passed, len(tokens))

    def commit(self, path: Array) -> None:
        """See `GoldenModel`."""
        counts, lengths = np.array([len(path)]), np.array([self._length])
        moved = [
            np.stack([attention.commit_window(p, TABLE, lengths, path[None], counts) for p in pool])
            for pool in (self._kv.k, self._kv.v)
        ]
        self._kv = model.KV(*moved)
        nothing_saved = np.zeros(1, int)
        self._state, _, _ = mamba_state.replay(
            self._state, self._kept, path[None], counts, nothing_saved
        )
        self._length += len(path)

    def delta_state(self, layer: int) -> tuple[Array, Array]:
        """See `GoldenModel`."""
        return self._state.recurrent[layer, 0], self._state.window[layer, 0]

    def kv(self, layer: int) -> tuple[Array, Array]:
        """See `GoldenModel`."""
        k, v = (attention.read(p[layer], TABLE, self._length) for p in (self._kv.k, self._kv.v))
        return k[0], v[0]

    def mtp(self, tokens: Array, hidden: Array, first_position: int) -> tuple[Array, Array]:
        """See `GoldenModel`."""
        row_starts, first = np.array([0, len(tokens)]), np.array([first_position])
        rows = attention.causal_rows(row_starts, first, np.zeros(1, int), TABLE, len(tokens))
        out, logits, self._mtp_kv = eagle.mtp(
            self.config, self.weights, rows, tokens, hidden, self._mtp_kv
        )
        return out, logits

    def _pass(self, passed: model.Forward, num_rows: int) -> Pass:
        logits = model.logits(self.weights, passed.hidden)
        return Pass(logits[:num_rows], passed.hidden[:num_rows], passed.streams[:, :num_rows])
