"""LM heads that a config.json ties to the embedding and whose files have another one."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from shared.models.config import ModelConfig
from shared.models.parameters import head_of, single
from shared.models.pieces import Parameter

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"


class Files(Protocol):
    """Files of a model, which may have an LM head."""

    def unties(self, config: ModelConfig) -> bool:
        """Returns whether they have an LM head of its own, though the config ties it."""
        ...


class Tensors(Protocol):
    """Tensors by their names without prefix, as `shared.models.checkpoint.Checkpoint` has them."""

    def has(self, name: str) -> bool:
        """Returns whether a tensor is there."""
        ...

    def pieces(
        self, parameter: Parameter, progress: Callable[[int], None]
    ) -> Iterator[tuple[Any, Any]]:
        """The places and the values of the pieces of a parameter."""
        ...


def as_stored(config: ModelConfig, files: Files) -> ModelConfig:
    """Returns a model's settings with the LM head of its files, if they have another one.

    transformers does the same: a fine-tune may have trained both under the flag of its base model.
    """
    return replace(config, tied=config.tied and not files.unties(config))


def has_own_head(config: ModelConfig, files: Tensors) -> bool:
    """Returns whether an LM head differs from the embedding, read up to the first difference.

    Raises:
      CheckpointError: One of the two is missing or has another shape than the config has.
    """
    if not files.has(LM_HEAD):
        return False
    table = (config.vocab, config.hidden)
    embedding, head = (
        files.pieces(parameter, lambda num_bytes: None)
        for parameter in (single("embed", EMBEDDING, table), head_of("lm_head", LM_HEAD, table))
    )
    pairs = zip(embedding, head, strict=True)
    return any(not np.array_equal(ours, theirs) for (_, ours), (_, theirs) in pairs)
