"""The torch implementation as a golden model; see `golden_models`."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from shared.checkpoint import load_all
from shared.model_config import ModelConfig
from tests.golden_models import NUM_PAGES, PAGE_SIZE, TABLE, Array, Pass
from torch_impl import model, weights
from torch_impl.drafters import eagle
from torch_impl.layers import Chunks, Tree
from torch_impl.ops import attention, draft_tree, mamba_state
from torch_impl.ops.mamba_state import DeltaState

CPU = torch.device("cpu")


def ints(values: Array) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.int32))


class TorchModel:
    """One request on one model."""

    def __init__(self, folder: Path) -> None:
        config = ModelConfig.from_folder(folder)
        loaded = weights.from_arrays(
            config, load_all(folder, config, config.has_mtp), "float32", CPU
        )
        self._model = model.Model.of(config, loaded)
        pools = (2, NUM_PAGES, PAGE_SIZE, config.num_kv_heads, config.head_size)
        self._kv = torch.zeros(config.num_attention_layers, *pools)
        self._mtp_kv = torch.zeros(1, *pools)
        self._table, self._length = ints(TABLE), 0
        self._streams = tuple(range(config.num_layers + 1))
        if sizes := config.gated_delta:
            heads = (sizes.num_value_heads, sizes.key_size, sizes.value_size)
            self._state = DeltaState(
                torch.zeros(config.num_gated_delta_layers, 1, *heads),
                torch.zeros(config.num_gated_delta_layers, 1, 3, sizes.channels),
            )

    def prefill(self, tokens: Array, positions: Array | None) -> Pass:
        """See `GoldenModel`."""
        count, row_starts = len(tokens), ints([0, len(tokens)])
        rows = self._causal_rows(count, self._length)
        if positions is not None:
            rows = replace(rows, positions=ints(positions))
        mixer = None
        if self._model.config.gated_delta:
            nothing_saved = ints([0])
            mixer = Chunks(self._model.config, self._state, row_starts, rows, nothing_saved)
        passed = self._forward(ints(tokens), rows, mixer)
        if mixer is not None:
            self._state = DeltaState(*(torch.stack(x) for x in zip(*mixer.new, strict=True)))
        self._length += count
        return passed

    def verify(self, tokens: Array, parents: Array) -> Pass:
        """See `GoldenModel`."""
        num_nodes, parents = ints([len(tokens)]), ints(parents)[None]
        lengths, rows = ints([self._length]), len(tokens) + 3  # some padding behind the last node
        flat, node = attention.tree_rows(parents, num_nodes, lengths, self._table, rows)
        self._mixer = None
        if self._model.config.gated_delta:
            starts, *_ = draft_tree.flatten(num_nodes, rows)
            row_of = draft_tree.flat_rows(starts, num_nodes, len(tokens))
            place = (row_of, flat.request, node)
            self._mixer = Tree(self._model.config, self._state, parents, *place)
        passed = self._forward(ints(tokens)[node], flat, self._mixer)
        count = len(tokens)
        return Pass(passed.logits[:count], passed.hidden[:count], passed.streams[:, :count])

    def commit(self, path: Array) -> None:
        """See `GoldenModel`."""
        path, counts = ints(path)[None], ints([len(path)])
        attention.commit_window(self._kv, self._table, ints([self._length]), path, counts)
        if self._mixer is not None:
            kept, nothing_saved = self._mixer.kept(), ints([0])
            self._state, _, _ = mamba_state.replay(self._state, kept, path, counts, nothing_saved)
        self._length += path.shape[1]

    def delta_state(self, layer: int) -> tuple[Array, Array]:
        """See `GoldenModel`."""
        return self._state.recurrent[layer, 0].numpy(), self._state.window[layer, 0].numpy()

    def kv(self, layer: int) -> tuple[Array, Array]:
        """See `GoldenModel`."""
        pages = self._kv[layer][:, self._table[0]].flatten(1, 2)[:, : self._length]
        return pages[0].numpy(), pages[1].numpy()

    def mtp(self, tokens: Array, hidden: Array, first_position: int) -> tuple[Array, Array]:
        """See `GoldenModel`."""
        rows = self._causal_rows(len(tokens), first_position)
        given = torch.from_numpy(np.ascontiguousarray(hidden))
        out = eagle.mtp(self._model, rows, ints(tokens), given, self._mtp_kv)
        return out.numpy(), model.logits(self._model, out).numpy()

    def _causal_rows(self, count: int, first_position: int) -> attention.Rows:
        where = (ints([0, count]), ints([first_position]), ints([0]))
        return attention.causal_rows(*where, self._table, count)

    def _forward(
        self, tokens: torch.Tensor, rows: attention.Rows, mixer: Chunks | Tree | None
    ) -> Pass:
        passed = model.forward(self._model, tokens, rows, self._kv, mixer, self._streams)
        logits = model.logits(self._model, passed.hidden)
        return Pass(logits.numpy(), passed.hidden.numpy(), torch.stack(passed.streams).numpy())
