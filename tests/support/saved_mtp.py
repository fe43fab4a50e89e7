"""Greedy text and accepted drafts of a checkpoint with an MTP layer, computed by transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.support import saved_models


class SavedMtp:
    """Model and MTP layer of a folder, as transformers loads them.

    transformers drafts one token with each MTP layer. Here the first layer drafts all tokens, as in
    serving engines.
    """

    def __init__(self, folder: Path) -> None:
        self._model = saved_models.reloaded(folder)
        config = self._model.config
        first = config.num_hidden_layers
        # The class of some models lacks these fields, though their checkpoints have the layer.
        config.num_mtp_layers, config.mtp_mlp_layer_types = 1, ["sparse"]
        # transformers lists the layer numbers of released models only.
        self._model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{first}\..*"]
        self._layer = MtpModel.from_pretrained(self._model).eval()

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Returns the most likely tokens after a prompt."""
        return saved_models.greedy(self._model, list(prompt), num_tokens)

    @torch.no_grad()
    def accepted(self, prompt: Sequence[int], text: Sequence[int], num_steps: int) -> list[int]:
        """Returns the accepted drafts of each decode step of a text.

        Args:
          prompt, text: Tokens of the prompt, and greedy tokens after it. The prompt's own step
            outputs the first of them.
          num_steps: S, draft tokens of a step.
        """
        ids = torch.tensor([[*prompt, *text]])
        hidden = self._model.model(ids, use_cache=False).last_hidden_state
        length, counts = len(prompt), []
        while length + 1 < ids.shape[1]:
            rest, count = ids[0, length + 1 :].tolist(), 0
            for draft in self._drafts(ids[:, : length + 1], hidden[:, :length], num_steps):
                if count == len(rest) or draft != rest[count]:
                    break
                count += 1
            counts.append(count)
            length += count + 1
        return counts

    def _drafts(self, ids: torch.Tensor, hidden: torch.Tensor, num_steps: int) -> Iterator[int]:
        """Yields the drafts after some tokens; the newest has no hidden state yet."""
        cache = MtpCache(config=self._model.config.get_mtp_config())
        tokens, positions = ids[:, 1:], torch.arange(hidden.shape[1])[None]
        for _ in range(num_steps):
            hidden = self._layer.forward_layer(0, hidden, positions, cache, input_ids=tokens)
            hidden, positions = hidden[:, -1:], positions[:, -1:] + 1
            tokens = self._layer._project_to_logits(hidden).argmax(-1)
            yield int(tokens)
