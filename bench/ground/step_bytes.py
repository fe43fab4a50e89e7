"""Bytes that a decode step must at least move, and so the time that it must at least take.

Weights are read once for each pass over them, the embedding only where it is the LM head. The KV of
every row is read once a layer and pass, a recurrent state read and written once, and once more
where drafts are replayed. Of experts are read as many as rows choose on average that choose evenly
and apart from each other. What a step writes of KV, and activations, are left out: they are small.
"""

from math import prod

from shared.boundary.backend import Blueprint
from shared.drafts.checkpoint import draft_parameters
from shared.drafts.drafts import MODEL, MTP
from shared.models.config import ModelConfig
from shared.models.fp8 import Granularity
from shared.models.fp8_words import InWords, bytes_of_words
from shared.models.kept import kept_bytes
from shared.models.parameters import Parameter, parameters
from shared.spec.draft_tree import TreeShape

FLOAT32_BYTES = 4
EMBEDDING = "embed"
EXPERTS = ("experts.gate_up", "experts.down")


def step_bytes(blueprint: Blueprint, shape: TreeShape, batch: int, context: int) -> int:
    """Bytes of one step of a batch.

    Args:
      blueprint: What the backend was made from.
      shape: Of the draft trees.
      batch: Rows.
      context: Tokens that each row has seen.
    """
    config, item = blueprint.config, blueprint.item_bytes
    wanted = parameters(config, False)
    share, in_words = _read_share(config, batch * shape.nodes), _in_fp8(blueprint)
    moved = _weight_bytes(wanted, item, config.tied, share, in_words)
    moved += batch * context * _kv_row(config, config.num_attention_layers, item)
    delta = config.gated_delta
    if delta:
        recurrent, _ = delta.kept
        state = recurrent.piece_bytes(item)
        touched = 2 if shape.is_plain else 3
        moved += touched * batch * state * config.num_gated_delta_layers
    return moved + _draft_bytes(blueprint, shape, batch, context)


def _draft_bytes(blueprint: Blueprint, shape: TreeShape, batch: int, context: int) -> int:
    """Of the device's drafter: each level is a pass, but a DFLASH head's, which has one for all.

    Of the S passes of an EAGLE kind one extends it, which also proposes the first level.
    """
    drafts, item, config = blueprint.drafts, blueprint.item_bytes, blueprint.config
    if drafts.sizes is None or shape.is_plain:
        return 0
    passes = 1 if drafts.block else shape.depth
    if drafts.kind == MTP:
        own = [p for p in parameters(config, True) if p.name.startswith("mtp.")]
    else:
        own = draft_parameters(drafts, None)
    is_tied = drafts.kind == MODEL and drafts.model is not None and drafts.model.tied
    share = _read_share(drafts.sizes.model, batch * shape.width)
    once = _weight_bytes(own, item, is_tied, share, _in_fp8(blueprint) if drafts.with_mtp else {})
    if not is_tied and not any(p.name == "lm_head" for p in own):
        once += config.vocab * config.hidden * item  # the target's LM head scores its drafts
    kv = batch * context * _kv_row(drafts.sizes.model, drafts.sizes.num_attention_layers, item)
    return passes * (once + kv)


def _in_fp8(blueprint: Blueprint) -> InWords:
    return {**blueprint.in_words, **dict.fromkeys(blueprint.in_codes, Granularity.BLOCK)}


def _weight_bytes(
    wanted: list[Parameter], item: int, is_tied: bool, read_share: float, in_words: InWords
) -> int:
    moved = 0
    for parameter in wanted:
        if parameter.name == EMBEDDING and not is_tied:
            continue
        size = prod(parameter.shape) * (FLOAT32_BYTES if parameter.float32 else item)
        if parameter.name in in_words:
            size = bytes_of_words(parameter.shape, in_words[parameter.name])
        moved += int(size * (read_share if parameter.name.endswith(EXPERTS) else 1))
    return moved


def _read_share(config: ModelConfig, rows: int) -> float:
    """Of the experts in a stack, those that any of the rows reads; a shared one is always read."""
    sizes = config.experts
    if sizes is None:
        return 1.0
    chosen = sizes.num_experts * (1 - (1 - sizes.num_chosen / sizes.num_experts) ** rows)
    return (chosen + sizes.shares_stacks) / sizes.num_stacked


def _kv_row(config: ModelConfig, num_layers: int, item: int) -> int:
    """Keys and values of one token in all layers."""
    return num_layers * kept_bytes(config.attention.kept, item)
