"""Separate LM heads of checkpoints whose config.json ties the LM head to the embedding."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from shared.models.config import ModelConfig
from shared.models.parameter import Parameter
from shared.models.stacks import head_of, single

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"


class LmHeadFiles(Protocol):
    """Protocol of model files that may contain an LM head."""

    def unties(self, config: ModelConfig) -> bool:
        """Returns True if the files contain an LM head that differs from the embedding, though the
        config ties them.
        """
        ...


class Tensors(Protocol):
    """Protocol of tensors by name without prefix, a subset of
    `shared.models.checkpoint.Checkpoint`.
    """

    def has(self, name: str) -> bool:
        """Returns True if a tensor exists."""
        ...

    def pieces(
        self, parameter: Parameter, progress: Callable[[int], None]
    ) -> Iterator[tuple[Any, Any]]:
        """Yields the indices and the values of the pieces of a parameter."""
        ...


def as_stored(config: ModelConfig, files: LmHeadFiles) -> ModelConfig:
    """Returns a model config with `tied` unset if the files contain a different LM head.

    transformers does the same: a fine-tune may have trained both under the flag of its base model.
    """
    return replace(config, tied=config.tied and not files.unties(config))


def has_own_head(config: ModelConfig, files: Tensors) -> bool:
    """Returns True if the LM head differs from the embedding; reads up to the first difference.

    Raises:
      CheckpointError: One of the two is missing or has another shape than in the config.
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
