"""Settings of a draft head that its tensors determine, whatever its config.json states."""

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from shared.drafts.block_part import BlockPart
from shared.drafts.checkpoint import EMBEDDING
from shared.drafts.config import DraftConfig
from shared.drafts.kinds import HEADS
from shared.models.checkpoint import Checkpoint
from shared.models.stacks import single


def infer_from_tensors(
    config: DraftConfig, checkpoint: Checkpoint, target: Checkpoint | None
) -> DraftConfig:
    """Returns a head's config corrected by its files: biases, QK norms, embedding, `lm_head` and
    confidence head.

    An embedding in the files is either a copy of the target's, which is then shared, or was
    trained, and is then the head's own. Both are read up to the first difference to decide.

    Args:
      config: Config of the head.
      checkpoint: Files of the head.
      target: Files of the target; None to treat an embedding of the target's width as its copy.

    Raises:
      CheckpointError: An embedding has another shape than in config.json.
    """
    names = checkpoint.names
    if config.traits.reads_target_kv:
        return config
    return replace(
        _with_layers(config, names),
        has_bias="fc.bias" in names,
        own_lm_head=_has_lm_head(config, names),
        own_embed=config.own_embed or _is_trained(config, checkpoint, target),
        block=config.block and replace(config.block, parts=_parts(config, checkpoint)),
    )


def _has_lm_head(config: DraftConfig, names: Collection[str]) -> bool:
    """Returns True if a head has its own LM head; otherwise it shares the target's, of the same
    size.
    """
    if not HEADS[config.kind].is_independent:
        return config.own_lm_head
    is_shareable = not config.has_draft_vocab and config.layer.hidden == config.target_hidden
    return "lm_head.weight" in names or not is_shareable


def _parts(config: DraftConfig, checkpoint: Checkpoint) -> tuple[BlockPart, ...]:
    def shape_of(name: str) -> tuple[int, ...] | None:
        return checkpoint.tensor(name).shape if name in checkpoint.names else None

    parts = config.block.parts if config.block else ()
    return tuple(part.inferred(shape_of, config.layer) for part in parts)


def _with_layers(config: DraftConfig, names: Collection[str]) -> DraftConfig:
    def has(tensor: str) -> bool:
        folders = ("layers.", "midlayer.")
        return any(x.startswith(folders) and x.endswith(f".{tensor}") for x in names)

    attention = config.layer.attention
    config = config.with_attention(
        input_bias=has("self_attn.q_proj.bias"),
        out_bias=has("self_attn.o_proj.bias"),
        qk_norm=attention.qk_norm or has("self_attn.q_norm.weight"),
    )
    fed = config.layer.dense
    assert fed is not None  # layers of a head are dense
    feed = replace(fed, bias=has("mlp.down_proj.bias"))
    layers = tuple(replace(each, mlp=feed) for each in config.layer.layers)
    return replace(config, layer=replace(config.layer, layers=layers))


def _is_trained(config: DraftConfig, checkpoint: Checkpoint, target: Checkpoint | None) -> bool:
    if target is None or EMBEDDING not in checkpoint.names:
        return False
    sizes, hidden = (config.stored_vocab, config.layer.vocab), config.layer.hidden
    common = range(min(sizes))  # tokens that both padded vocabularies contain
    tables = [single("embed", EMBEDDING, (size, hidden)).rows("embed", common) for size in sizes]
    own, theirs = (
        files.pieces(table, lambda num_bytes: None)
        for files, table in zip((checkpoint, target), tables, strict=True)
    )
    # Compared in the head's dtype: a copy in a narrower dtype counts as a copy.
    return any(
        not np.array_equal(mine, whole.astype(mine.dtype))
        for (_, mine), (_, whole) in zip(own, theirs, strict=True)
    )
