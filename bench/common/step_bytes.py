"""Lower bounds of a decode step: bytes that it must move, and multiplications.

Weights are read once per pass over them; the embedding counts only if it is the LM head. The KV of
every row is read once per layer and pass. A recurrent state is read and written once, and once more
if accepted drafts are replayed. The number of experts read is the mean for rows that choose evenly
and independently, unless it was counted (`bench.steps.experts_read`). KV writes and activations are
omitted, as they are small.

Every row of a pass is multiplied with all weights, and its queries with all keys and values.
Padding, norms and recurrent states are omitted.
"""

from collections.abc import Mapping
from math import prod

from shared.boundary.backend import BackendSpec
from shared.drafts.checkpoint import draft_parameters
from shared.drafts.dflash2 import SELECTOR
from shared.drafts.dspark_config import MARKOV
from shared.models.active_parameters import EMBEDDING, active_numbers
from shared.models.cache_spec import CacheUnit, cache_bytes
from shared.models.config import ModelConfig
from shared.models.formats.weight_format import QuantizedFormat, plane_bytes
from shared.models.groups import pool_bytes
from shared.models.mixers import RecurrentConfig
from shared.models.parameter import EXPERTS, Parameter
from shared.models.parameters import parameters
from shared.spec.draft_tree import TreeShape

FLOAT32_BYTES = 4


def step_bytes(
    blueprint: BackendSpec, shape: TreeShape, batch: int, context: int, routed: float | None = None
) -> int:
    """Bytes of one step of a batch.

    Args:
      blueprint: What the backend was made from.
      shape: Of the draft trees.
      batch: Rows.
      context: Tokens that each row has seen.
      routed: Counted routed experts that a step reads, over all layers and passes; None for even
        choices.
    """
    if routed is not None:
        without = _step_bytes(blueprint, shape, batch, context, rows=0)
        return without + int(routed * expert_bytes(blueprint))
    return _step_bytes(blueprint, shape, batch, context, rows=batch)


def expert_bytes(blueprint: BackendSpec) -> float:
    """Returns the bytes of one routed expert of a layer."""
    stacks = [p for p in parameters(blueprint.config, False) if p.name.endswith(EXPERTS)]
    each = (
        _weight_bytes([p], blueprint.item_bytes, False, 1.0, blueprint.formats)
        / (p.shape[0] * p.shape[1])
        for p in stacks
    )
    return sum(each)


def _step_bytes(
    blueprint: BackendSpec, shape: TreeShape, batch: int, context: int, rows: int
) -> int:
    """Bytes of a step in which this number of requests choose experts."""
    config, item = blueprint.config, blueprint.item_bytes
    wanted = parameters(config, False)
    share = _read_share(config, rows * shape.nodes)
    moved = _weight_bytes(wanted, item, config.tied, share, blueprint.formats)
    for group in config.attention_groups:  # with those that read the KV of other layers
        kv = cache_bytes(group.config.with_kv.cache_specs, item) * len(group)
        moved += batch * context * kv
    for group in config.groups:
        if isinstance(group.config, RecurrentConfig):
            recurrent, _ = group.config.cache_specs
            touched = 2 if shape.is_plain else 3
            moved += touched * batch * recurrent.piece_bytes(item) * len(group)
    return moved + _draft_bytes(blueprint, shape, batch, context, rows)


def step_products(blueprint: BackendSpec, shape: TreeShape, batch: int, context: int) -> int:
    """Multiplications of one step of a batch, each with its addition; arguments as `step_bytes`."""
    config, rows = blueprint.config, batch * shape.nodes
    wanted = parameters(config, False)
    made = rows * (active_numbers(wanted, config, config.tied) + context * _attended(config))
    drafts = blueprint.drafts
    if drafts.sizes is None or shape.is_plain:
        return made
    own, is_tied = _draft_weights(blueprint)
    each = active_numbers(own, drafts.sizes.model, is_tied) + context * _attended(
        drafts.sizes.model
    )
    each += _target_head(own, is_tied, blueprint)
    passes, width = (1, drafts.block.size) if drafts.block else (shape.depth, shape.width)
    return made + passes * batch * width * each


def _attended(config: ModelConfig) -> int:
    """Multiplications of a row with the keys and values of one token, in all layers."""
    return sum(len(each) * each.config.products_per_position for each in config.attention_groups)


def _draft_bytes(
    blueprint: BackendSpec, shape: TreeShape, batch: int, context: int, rows: int
) -> int:
    """Returns the bytes of the drafter: each level is a pass; a block takes one pass in all.

    What a DSPARK head has for its choices is read for each of them. Of the S passes of an EAGLE
    kind one extends it, which also proposes the first level.
    """
    drafts, item = blueprint.drafts, blueprint.item_bytes
    if drafts.sizes is None or shape.is_plain:
        return 0
    passes = 1 if drafts.block else shape.depth
    own, is_tied = _draft_weights(blueprint)
    share = _read_share(drafts.sizes.model, rows * shape.width)
    once = _weight_bytes(own, item, is_tied, share, blueprint.formats if drafts.with_mtp else {})
    once += _target_head(own, is_tied, blueprint) * item
    kv = batch * context * pool_bytes(drafts.sizes.pools, CacheUnit.POSITION, item)
    choices = [p for p in own if p.name.startswith(MARKOV)]
    again = (shape.depth - 1) * _weight_bytes(choices, item, False, 1.0, {})
    return passes * (once + kv) + again


def _draft_weights(blueprint: BackendSpec) -> tuple[list[Parameter], bool]:
    """Returns the weights that a drafter pass reads, and whether its embedding is its LM head."""
    drafts = blueprint.drafts
    if drafts.with_mtp:
        every = parameters(blueprint.config, True)
        return [p for p in every if p.name.startswith("mtp.")], False
    is_tied = drafts.model is not None and drafts.model.tied
    every = draft_parameters(drafts, None)
    by_rows = (f"{MARKOV}{EMBEDDING}", f"{SELECTOR}before", f"{SELECTOR}after")
    return [p for p in every if p.name not in by_rows], is_tied  # of these some rows are read


def _target_head(own: list[Parameter], is_tied: bool, blueprint: BackendSpec) -> int:
    """Numbers of the target's LM head, where it scores the drafts of a drafter without one."""
    if is_tied or any(p.name == "lm_head" for p in own):
        return 0
    config, token_map = blueprint.config, blueprint.drafts.token_map
    return config.hidden * (config.vocab if token_map is None else len(token_map))


def _weight_bytes(
    wanted: list[Parameter],
    item: int,
    is_tied: bool,
    read_share: float,
    formats: Mapping[str, QuantizedFormat],
) -> int:
    moved = 0
    for parameter in wanted:
        if parameter.name == EMBEDDING and not is_tied:
            continue
        size = prod(parameter.shape) * (FLOAT32_BYTES if parameter.float32 else item)
        if (format := formats.get(parameter.name)) is not None:
            size = plane_bytes(format, parameter.shape)
        moved += int(size * (read_share if parameter.name.endswith(EXPERTS) else 1))
    return moved


def _read_share(config: ModelConfig, rows: int) -> float:
    """Returns the share of a stack's experts that rows read; a shared expert is always read."""
    sizes = config.experts
    if sizes is None:
        return 1.0
    chosen = sizes.num_experts * (1 - (1 - sizes.top_k / sizes.num_experts) ** rows)
    return (chosen + sizes.shares_stacks) / sizes.num_stacked
