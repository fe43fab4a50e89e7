"""Checkpoint of a draft head: its parameters, and the detection of its kind from tensor names.

A head of another kind often loads without an error and then drafts tokens that are never accepted,
so the kind is checked.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from jaxtyping import Int32, Shaped

from shared.drafts.assistant import (
    CENTROIDS,
    TOKEN_CLUSTERS,
    TOKEN_ORDERING,
    clusters_of_rank,
    clusters_of_tokens,
)
from shared.drafts.config import DRAFT_FOLDER, DraftConfig, DraftHead
from shared.drafts.dflash_config import BlockConfig
from shared.drafts.drafter_spec import DrafterSpec
from shared.drafts.kinds import FORMATS, HEADS, KINDS, EmbeddingInput
from shared.models.checkpoint import (
    Checkpoint,
    CheckpointError,
    open_checkpoint,
)
from shared.models.config import ModelConfig
from shared.models.dummy_weights import DummyCheckpoint, Stored
from shared.models.parameter import Parameter
from shared.models.parameters import decoder_parameters, parameters, unread_kv
from shared.models.sentence_list import sentence_list
from shared.models.stacks import BIAS, by_columns, head_of, norms_of, single, single_norm

Read = TypeVar("Read")
"""Weights in the format of a backend."""

STREAM_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
"""Older names of the norms of auxiliary hidden states; the newer ones are `fc_norm.0` and
following."""

SPECULATORS_MTP = "mtp_layers."
"""Prefix of the tensors of an MTP layer in the speculators format."""

MARKS = {
    "a Medusa head": ("medusa_head.", "0.linear.weight", "0.0.linear.weight"),
    "an MTP layer": ("mtp.",),
    "a hidden-state MLP speculator": ("speculator.", "emb.0.weight"),
}
"""Prefixes of tensors of other drafters."""

RELATIVES = {
    "a P-EAGLE head": ("mask_hidden",),
    "a Domino draft model": ("domino", "projector"),
    "a JetSpec head with an adapter of the hidden size": ("hidden_dim_adapter",),
}
"""Substrings of tensor names of unsupported models that have all tensors of a DFlash model and
more."""

EMBEDDING = "embed_tokens.weight"

INPUTS = ("fc.weight", "pre_projection.weight")
"""Tensors of which each draft head of a format of its own has one."""

COPIES = (EMBEDDING, "lm_head.weight", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors of the target that a head's files may repeat."""

IGNORED = (*COPIES, "t2d", "d2t", TOKEN_ORDERING)

TOKEN_MAPS = ("draft_ids", TOKEN_CLUSTERS)
"""Names of the integer arrays of heads."""


@dataclass(frozen=True)
class DraftFiles:
    """Drafter of a server with its opened and checked files.

    Attributes:
      drafts: The drafter.
      checkpoint: Its files; None if it has no files of its own.
    """

    drafts: DrafterSpec
    checkpoint: Stored | None

    @property
    def num_bytes(self) -> int:
        """Stored bytes that loading it reads."""
        if self.checkpoint is None:
            return 0
        return self.checkpoint.num_bytes(draft_parameters(self.drafts, self.checkpoint.names))

    def read(
        self,
        read_head: Callable[[Stored, DraftConfig], Read],
        read_model: Callable[[Stored, ModelConfig], Read],
    ) -> Read | None:
        """Reads the weights with the reader for its kind; returns None if it has no files of its
        own.
        """
        if self.checkpoint is None:
            return None
        if self.drafts.head is not None:
            return read_head(self.checkpoint, self.drafts.head)
        assert self.drafts.model is not None  # only heads and models have files
        return read_model(self.checkpoint, self.drafts.model)


def draft_parameters(drafts: DrafterSpec, names: Collection[str] | None) -> list[Parameter]:
    """Returns the parameters in the drafter's own files; empty if it has none.

    Args:
      drafts: The drafter.
      names: See `head_parameters`.
    """
    if drafts.head is not None:
        return head_parameters(drafts.head, names)
    return parameters(drafts.model, False) if drafts.model is not None else []


def is_head(names: Collection[str]) -> bool:
    """Returns True if these tensor names are of a draft head of any kind, not of a whole model."""
    is_own = any(name in names for name in INPUTS)
    return is_own or any(name.startswith(SPECULATORS_MTP) for name in names)


def kind_of(names: Collection[str]) -> str:
    """Returns the kind of a draft head by its tensor names; "NEXTN" for a speculators MTP layer.

    Raises:
      CheckpointError: The tensors are of another drafter, or of a whole model.
    """
    _refuse_relatives(names)
    if found := [kind for kind, files in FORMATS.items() if files.matches(names)]:
        return found[-1]  # the most specific kind
    kinds = [what for what, marks in MARKS.items() if any(name.startswith(marks) for name in names)]
    what = kinds[0] if kinds else "not an EAGLE head (no fc.weight)"
    raise CheckpointError(
        f"the draft model is {what}; give {_SUPPORTED} as --speculative-draft-model-path, or a "
        "small model with --speculative-algorithm STANDALONE"
    )


_SUPPORTED = f"an {sentence_list(head.title for head in HEADS.values())} head"


def _refuse_relatives(names: Collection[str]) -> None:
    if "fc.weight" not in names:
        return
    for what, words in RELATIVES.items():
        for name in sorted(names):
            if any(word in name for word in words):
                raise CheckpointError(
                    f"the draft model is {what} (it has the tensor {name}), which is not "
                    f"supported; give {_SUPPORTED} as --speculative-draft-model-path"
                )


def head_parameters(config: DraftConfig, names: Collection[str] | None) -> list[Parameter]:
    """Returns the parameters of a head in loading order.

    Args:
      config: Config of the head.
      names: Tensor names, which select between two spellings; None before the files are opened.
    """
    if config.traits.reads_target_kv:
        return _assistant_parameters(config)
    names = names or ()
    tensors = [by_columns("fc", "fc.weight", (config.layer.hidden, config.fc_inputs))]
    if config.has_bias:
        tensors.append(single("fc_bias", "fc.bias", (config.layer.hidden,)))
    tensors += _block_parameters(config) if config.block else _eagle_parameters(config, names)
    if config.own_embed:
        tensors.append(embedding(config))
    if config.own_lm_head:
        table = (config.draft_vocab, config.layer.hidden)
        tensors.append(head_of("lm_head", "lm_head.weight", table))
    return tensors


def embedding(config: DraftConfig) -> Parameter:
    """Returns a head's own embedding without padding beyond the target's vocabulary.

    Raises:
      CheckpointError: It has fewer tokens than the target, so that requests could contain unknown
        tokens.
    """
    stored, vocab = config.stored_vocab, config.layer.vocab
    table = single("embed", EMBEDDING, (stored, config.layer.hidden))
    if stored == vocab:
        return table
    if stored < vocab:
        raise CheckpointError(
            f"the draft model's embedding has {stored} tokens, but the target has {vocab}; use a "
            "head with all of them"
        )
    return replace(table.rows("embed", range(vocab)), sections=())


def _eagle_parameters(config: DraftConfig, names: Collection[str]) -> list[Parameter]:
    """Returns the parameters of an EAGLE head; the first layer is separate, because its input is
    wider.
    """
    hidden, sizes, settings = config.layer.hidden, config.layer, config.stack_settings
    is_wide = config.traits.embedding is EmbeddingInput.ATTENTION
    in_list = any(name.startswith("layers.0.") for name in names) or not is_wide
    layer = ["layers.0" if in_list else "midlayer"]
    tensors: list[Parameter] = []
    if is_wide:
        tensors += _stream_norms(config, names)
        tensors.append(_norms("layer.input_norm", layer, "input_layernorm.weight", hidden))
        tensors.append(_norms("layer.hidden_norm", layer, "hidden_norm.weight", hidden))
    tensors += [
        _norms("layer.post_attention_norm", layer, "post_attention_layernorm.weight", hidden),
        *sizes.layers[0].mlp.parameters("layer.mlp.", layer, settings),
        *sizes.attention.parameters("layer.attention.", layer, settings),
    ]
    if later := [f"layers.{i}" for i in range(1, sizes.num_layers)]:
        tensors += decoder_parameters("later.", sizes, later, sizes.layers[1:])
    if is_wide:
        tensors.append(_norm("final_norm", "norm.weight", hidden))
    return tensors


_norm, _norms = partial(single_norm, centre=0.0), partial(norms_of, centre=0.0)
"""Norms of heads, which scale by the stored weight."""


def _block_parameters(config: DraftConfig) -> list[Parameter]:
    sizes, hidden, settings = config.layer, config.layer.hidden, config.stack_settings
    block = config.block
    assert block is not None  # required for this kind
    folders = [f"layers.{i}" for i in range(sizes.num_layers)]
    return [
        _norm("hidden_norm", "hidden_norm.weight", hidden),
        _norms("layer.input_norm", folders, "input_layernorm.weight", hidden),
        _norms("layer.post_attention_norm", folders, "post_attention_layernorm.weight", hidden),
        *sizes.layers[0].mlp.parameters("layer.mlp.", folders, settings),
        *sizes.attention.parameters("layer.attention.", folders, settings),
        _norm("final_norm", "norm.weight", hidden),
        *part_parameters(block, sizes, config.draft_vocab),
    ]


def part_parameters(block: BlockConfig, layer: ModelConfig, draft_vocab: int) -> list[Parameter]:
    """Returns the parameters that a block head has in addition to a DFlash head.

    Args:
      block: Block of the head.
      layer: Config of its layers.
      draft_vocab: Size of its output vocabulary.
    """
    parameters = []
    for tensor in (each for part in block.parts for each in part.tensors(layer, draft_vocab)):
        of = head_of if tensor.is_lm_head else single
        parameters.append(of(tensor.name, tensor.tensor, tensor.shape))
        if tensor.bias is not None:
            parameters.append(single(f"{tensor.name}{BIAS}", tensor.bias, tensor.shape[:1]))
    return parameters


def part_names(config: DraftConfig) -> list[str]:
    """Returns the names of the parameters of a block head's parts."""
    block = config.block
    found = part_parameters(block, config.layer, config.draft_vocab) if block else []
    return [parameter.name for parameter in found]


def _assistant_parameters(config: DraftConfig) -> list[Parameter]:
    layer, clusters = config.layer, config.clusters
    folders = [f"layers.{i}" for i in range(layer.num_layers)]
    tensors = [
        by_columns("fc", "pre_projection.weight", (layer.hidden, config.fc_inputs)),
        *decoder_parameters("", layer, folders),
        _norm("final_norm", "norm.weight", layer.hidden),
        by_columns("post", "post_projection.weight", (config.target_hidden, layer.hidden)),
        head_of("lm_head", EMBEDDING, (layer.vocab, layer.hidden)),
    ]
    if clusters is not None:
        tensors.append(single("centroids", CENTROIDS, (clusters.num_clusters, layer.hidden)))
    return tensors


def _stream_norms(config: DraftConfig, names: Collection[str]) -> list[Parameter]:
    norms, width = [], config.target_hidden
    if config.norm_aux:
        older = f"{STREAM_NORMS[0]}.weight" in names
        chunks = STREAM_NORMS if older else [f"fc_norm.{i}" for i in range(len(config.aux_streams))]
        norms.append(_norms("aux_norm", chunks, "weight", width))
    if config.norm_input:
        norms.append(_norm("input_norm", "input_norm.weight", config.fc_inputs))
    return norms


def open_head(folder: str | Path) -> Checkpoint:
    """Opens the safetensors files of a draft model's folder; raises `CheckpointError` if it
    cannot.
    """
    return open_checkpoint(folder, DRAFT_FOLDER)


def dummy_head(config: DraftConfig) -> DummyCheckpoint:
    """Returns dummy weights of a head; a draft vocabulary is spread evenly over the target's.

    Args:
      config: Config of the head.
    """
    ids = np.arange(config.draft_vocab, dtype=np.int64)
    offsets = (ids * config.layer.vocab // config.draft_vocab - ids).astype(np.int32)
    maps = {"d2t": offsets} if config.has_draft_vocab else {}
    if config.clusters is not None:
        maps[TOKEN_ORDERING] = np.arange(config.layer.vocab, dtype=np.int32)
    return DummyCheckpoint(head_parameters(config, None), maps, None)


def check_head(checkpoint: Stored, config: DraftConfig) -> list[Parameter]:
    """Checks kind, presence, dtype and shape of a head's tensors before any is read.

    Args:
      checkpoint: Files of the head.
      config: Config of the head.

    Returns:
      The parameters to load.

    Raises:
      CheckpointError: The first fault; unused tensors are a fault too.
    """
    kind = kind_of(checkpoint.names)
    if kind != config.kind:
        raise CheckpointError(
            f"the draft model's tensors are those of {KINDS[kind].described}, but its config.json "
            f"describes {KINDS[config.kind].described}; use a config.json that belongs to the "
            "tensors"
        )
    wanted = head_parameters(config, checkpoint.names)
    checkpoint.check_parameters(wanted)
    for name in sorted(set(checkpoint.names) - checkpoint.known(wanted)):
        if not _is_ignored(name, config):
            raise CheckpointError(
                f"tensor {name} is not part of {KINDS[kind].described}; use a head without it"
            )
    if not config.has_draft_vocab:
        _check_whole(checkpoint)
    token_maps(checkpoint, config)
    return wanted


def _is_ignored(name: str, config: DraftConfig) -> bool:
    """Returns True if a tensor is a copy of another, has no effect, or is read as a token map."""
    is_copy = name.removeprefix("model.") in IGNORED or name.endswith("rotary_emb.inv_freq")
    return is_copy or name.startswith(tuple(unread_kv(config.layer)))


def token_maps(checkpoint: Stored, config: DraftConfig) -> dict[str, Int32[np.ndarray, " tokens"]]:
    """Returns the integer arrays of a head by name: the target ids of a draft vocabulary, and the
    clusters of the tokens.

    Raises:
      CheckpointError: A tensor is missing or invalid.
    """
    maps = {"draft_ids": draft_ids(checkpoint, config)} if config.has_draft_vocab else {}
    if config.clusters is not None:
        ordering = checkpoint.tensor(TOKEN_ORDERING)
        try:
            maps[TOKEN_CLUSTERS] = clusters_of_tokens(ordering, config.clusters, config.layer.vocab)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
    return maps


def _check_whole(checkpoint: Stored) -> None:
    """Checks that the vocabulary maps of a head without a draft vocabulary are the identity."""
    is_moved = checkpoint.has("d2t") and checkpoint.tensor("d2t").any()
    is_cut = checkpoint.has("t2d") and not checkpoint.tensor("t2d").astype(bool).all()
    if is_moved or is_cut:
        raise CheckpointError(
            f"tensor {'d2t' if is_moved else 't2d'} maps a draft vocabulary, but the draft "
            "model's config.json has no draft_vocab_size below vocab_size"
        )


def maps_of_rank(
    arrays: Mapping[str, Shaped[np.ndarray, "..."]], rank: int, count: int
) -> dict[str, Int32[np.ndarray, " tokens"]]:
    """Returns the integer arrays of `token_maps` among arrays, as a TP rank needs them."""
    maps = {name: np.asarray(arrays[name]) for name in TOKEN_MAPS if name in arrays}
    if TOKEN_CLUSTERS in maps:
        maps[TOKEN_CLUSTERS] = clusters_of_rank(maps[TOKEN_CLUSTERS], rank, count)
    return maps


def draft_ids(checkpoint: Stored, config: DraftConfig) -> Int32[np.ndarray, " draft_vocab"]:
    """Returns the target token id of each draft token; `d2t` stores target id minus draft id.

    A map of ids instead of differences is an error: the sums would exceed the vocabulary.

    Raises:
      CheckpointError: `d2t` is missing or not a map into the vocabulary, or `t2d` contradicts it.
    """
    offsets = checkpoint.tensor("d2t")
    vocab, draft_vocab = config.layer.vocab, config.draft_vocab
    if offsets.shape != (draft_vocab,) or offsets.dtype.kind != "i":
        raise CheckpointError(
            f"tensor d2t must contain {draft_vocab} integers, one per draft token, got "
            f"{offsets.dtype} {list(offsets.shape)}"
        )
    ids = np.arange(draft_vocab) + offsets
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) < draft_vocab:
        raise CheckpointError(
            f"tensor d2t must map the draft tokens to different tokens below {vocab}"
        )
    if checkpoint.has("t2d"):
        kept = checkpoint.tensor("t2d").reshape(-1).astype(bool)
        if not np.array_equal(np.flatnonzero(kept), np.sort(ids)):
            raise CheckpointError("tensors t2d and d2t select different tokens")
    return ids.astype(np.int32)


def load_head(
    checkpoint: Stored,
    config: DraftConfig,
    dtype: np.dtype | type,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> DraftHead:
    """Reads a head into main memory.

    Raises:
      CheckpointError: See `check_head`.
    """
    wanted = check_head(checkpoint, config)
    weights = {p.name: checkpoint.load(p, dtype, progress) for p in wanted}
    return DraftHead(config, weights | token_maps(checkpoint, config))
