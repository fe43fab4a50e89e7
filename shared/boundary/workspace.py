"""Workspace of a step: memory beyond weights and pools; each backend adds its own costs.

Counts the largest arrays that are live at once: those of one layer and its attention, the auxiliary
hidden states for the drafter, the replay inputs of a verify step, and the logits with everything
computed from them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from shared.boundary.backend import BackendLimits, BackendSpec
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.boundary.transfer_spec import TRANSFERS
from shared.models.cache_spec import CacheUnit
from shared.models.config import ModelConfig
from shared.models.groups import pool_bytes
from shared.models.mixers import LatentAttentionConfig, RecurrentConfig, SelfAttentionConfig
from shared.models.mlp import FeedForwardConfig, MLPConfig, NoMLP
from shared.models.parameter import EXPERTS
from shared.models.parameters import parameters
from shared.spec.attention import QUERIES
from shared.spec.logprobs import SCORED_ROWS
from shared.spec.reduction_order import ATTENTION, LATENT_ATTENTION

DRAFT_DISTRIBUTION_BYTES = 24
"""Bytes per logit if draft tokens are sampled: their noise and logits, both distributions, the
residual and its logarithm."""

LOGIT_BYTES, LOGPROB_BYTES = 41, 4
"""Measured costs of the JAX and torch backends: counts of each node twice, noise, the processed and
the sorted logits, and ids of 8 bytes."""

MASK_BYTES = 3
"""Bytes per logit under a grammar mask, from the bit to the byte."""

MOST_PARTS = 64
"""Maximum partial results that a split-KV kernel stores per row and split; for longer rows it
stores them per span."""

PAIRS = 64
"""(Row, query head) pairs of one attention program on WGMMA, including padding; used if more than
half of them are real."""

LatentBytes = Callable[[int, int, int, int, int, int, int, int], int]
"""Maximum bytes of partial results in latent attention: `kernels.latent_tiles.latent_bytes`."""

AttentionBytes = Callable[[Program, SelfAttentionConfig, BackendLimits, int], int]


@dataclass(frozen=True)
class WorkspaceCosts:
    """Memory costs that differ between backends.

    Attributes:
      logit: Bytes per logit that a token is sampled from: raw, processed and sorted values, counts
        and noise.
      reported: Additional bytes per logit if logprobs are returned.
      attention: Function for the bytes of one layer's attention.
    """

    logit: int
    reported: int
    attention: AttentionBytes

    @classmethod
    def of_framework(cls, attention: AttentionBytes) -> "WorkspaceCosts":
        """Returns the costs of a JAX or torch backend, which differ only in attention."""
        return cls(logit=LOGIT_BYTES, reported=LOGPROB_BYTES, attention=attention)


def step_bytes(program: Program, blueprint: BackendSpec, costs: WorkspaceCosts) -> int:
    """Returns the bytes that a step of the program needs beyond weights and pools."""
    if program.work is StepKind.COUNT:
        return 4 * program.batch * blueprint.capacity.vocab
    if program.work is StepKind.ENCODE:
        return _tower_bytes(program, blueprint)
    if program.work in TRANSFERS:
        return _transfer_bytes(program, blueprint)
    if program.work is StepKind.LOAD_ADAPTER:
        return _load_bytes(program, blueprint)
    sizes, small = blueprint.config, blueprint.drafts.model
    model_bytes = _model_bytes(program, sizes, blueprint, costs)
    kept = _logit_bytes(program, blueprint, costs) + _stream_bytes(program, blueprint)
    kept += _widened_bytes(blueprint)
    if small is None:
        return model_bytes + kept
    # A small draft model runs before or after the target; each node of a level has its own states.
    nodes = program.batch * program.shape.width
    states = 3 * nodes * pool_bytes(small.cache_pools, CacheUnit.SLOT, blueprint.item_bytes)
    return max(model_bytes, _model_bytes(program, small, blueprint, costs) + states) + kept


def _transfer_bytes(program: Program, blueprint: BackendSpec) -> int:
    """Returns the bytes of an export or import: the entries in the order of the pools, gathered,
    as words, and the words in the result or the plan.
    """
    spec = blueprint.capacity.transfer
    assert spec is not None  # otherwise the program does not exist
    return 4 * 4 * sum(rows * words for _, (rows, words) in spec.fields(program))


def _load_bytes(program: Program, blueprint: BackendSpec) -> int:
    """Returns the bytes of a load step: its words in the plan, and those of the rank's outputs."""
    pool = blueprint.capacity.adapters
    assert pool is not None  # otherwise the program does not exist
    return 2 * 4 * pool.num_words(program)


def _tower_bytes(program: Program, blueprint: BackendSpec) -> int:
    """Returns the bytes of an encode step: patches, embedding inputs, and the widest part of a
    block.

    Fallback operations compute in float32, and their attention stores the scores of some rows.
    """
    images = blueprint.capacity.images
    assert images is not None  # only a vision-language model has the program
    vision, rows = images.vision, program.tokens
    # Attention: input rows, the projection, heads in blocks, and the output.
    widest = max(9 * vision.hidden, 2 * vision.hidden + 2 * vision.intermediate)
    numbers = 0 if program.blocks.start else vision.patch_numbers
    patches = rows * (numbers + 2 * vision.head_size) * 4
    if blueprint.on_gpu and blueprint.dtype == "bfloat16":
        return patches + rows * widest * blueprint.item_bytes
    scores = vision.num_heads * min(rows, QUERIES) * rows * 12  # scores, weights, a copy
    return patches + rows * widest * 4 + scores


def gathered_attention(
    program: Program, attention: SelfAttentionConfig, capacity: BackendLimits, item: int
) -> int:
    """Returns the bytes of fallback attention: gathered keys and values, and the scores of all
    rows.

    Scores are float32. Keys of a narrower dtype are copied to float32 first.
    """
    queries = program.tokens or program.shape.nodes  # a row is padded to the longest
    keys = program.pages * capacity.page_size
    bytes_each = 2 * item + (4 if item < 4 else 0)
    gathered = program.batch * keys * attention.key_size * bytes_each
    return gathered + 2 * program.batch * attention.num_heads * queries * keys * 4


def split_attention(
    max_pairs: int,
    latent_partials: LatentBytes,
    program: Program,
    attention: SelfAttentionConfig,
    capacity: BackendLimits,
    item: int,
) -> int:
    """Returns the bytes of split-KV attention: queries, the output, and partial results if rows are
    few.

    A partial result has an accumulator, a max and a sum, in float32. A prompt has few rows if its
    (row, query head) pairs per key head are at most `max_pairs`.
    """
    if isinstance(attention, LatentAttentionConfig):
        return _latent_bytes(latent_partials, program, attention, capacity, item)
    group, rows = attention.num_heads // attention.num_kv_heads, rows_of(program)
    size = 2 * rows * attention.num_heads * attention.head_size * item
    if program.tokens * group <= max_pairs:
        positions = program.pages * capacity.page_size
        splits, spans = -(-positions // ATTENTION.split), -(-positions // ATTENTION.span)
        pairs, most = rows * group, (program.tokens or rows // program.batch) * group
        by_span = pairs if most <= PAIRS // 2 else program.batch * (-(-most // PAIRS) * PAIRS)
        parts = max(min(splits, MOST_PARTS) * pairs, spans * by_span)
        size += attention.num_kv_heads * parts * (attention.head_size + 2) * 4
    return size


def _latent_bytes(
    latent_bytes: LatentBytes,
    program: Program,
    attention: LatentAttentionConfig,
    capacity: BackendLimits,
    item: int,
) -> int:
    """Returns the bytes of latent attention: queries, the output, and partial results or totals.

    Passes of fewer rows may have more partial results: with many rows, no programs share positions.
    """
    shape, order = program.shape, LATENT_ATTENTION.sizes_for(item)
    longest = program.tokens or max(shape.nodes, shape.block)
    passes = {longest} if program.tokens else {longest, shape.depth + 1, shape.width or 1, 1}
    near, split, far_split = order["near"], order["split"], order["far_split"]
    heads, positions = attention.num_heads, program.pages * capacity.page_size
    parts = max(
        latent_bytes(
            (program.tokens or program.batch * rows) * heads,
            rows * heads,
            program.batch,
            positions,
            attention.latent_rank,
            near,
            split,
            far_split,
        )
        for rows in passes
    )
    return heads * rows_of(program) * (attention.head_size + attention.latent_rank) * item + parts


def rows_of(program: Program) -> int:
    """Returns the maximum flat rows of a step's forward passes, of the target or the drafter.

    All nodes of a verify step are counted, also under a smaller verify budget, because data is
    stored for each node.
    """
    return program.tokens or program.batch * max(program.shape.nodes, program.shape.block)


def _model_bytes(
    program: Program, model: ModelConfig, blueprint: BackendSpec, costs: WorkspaceCosts
) -> int:
    """Returns the bytes of the widest layer of a forward pass, plus those stored for all GDN
    layers.
    """
    groups, item = model.attention_groups, blueprint.item_bytes
    heads = max(each.config.query_size for each in groups)
    feed = max(_feed_row_bytes(each.mlp, model.hidden, item) for each in model.layers)
    # Per-layer embeddings: both embeddings of all layers, and a sum in float32.
    parts = model.num_layers * model.per_layer_size * (2 * item + 4)
    layer = rows_of(program) * ((4 * model.hidden + 4 * heads) * item + feed + parts)
    capacity = blueprint.capacity
    attention = max(costs.attention(program, each.config, capacity, item) for each in groups)
    return layer + attention + _delta_bytes(program, model, item)


def _feed_row_bytes(feed: FeedForwardConfig, hidden: int, item: int) -> int:
    """Returns a row's bytes for gate, up and their product; for MoE, per selected expert, with its
    output.

    Expert outputs and router logits are float32.
    """
    if isinstance(feed, NoMLP):
        return 0
    if isinstance(feed, MLPConfig):
        return 3 * feed.intermediate * item
    chosen = feed.top_k * (3 * feed.intermediate * item + 4 * hidden)
    shared = 3 * feed.shared_intermediate * item + 4 * hidden
    if feed.parallel is not None:  # its own output, and the scaled rows of router and experts
        shared += 3 * feed.parallel.intermediate * item + 4 * hidden * item
    return chosen + shared + 4 * feed.num_scored + 2 * feed.latent * item


def _delta_bytes(program: Program, model: ModelConfig, item: int) -> int:
    """Returns the bytes of state replay inputs of all GDN layers, and of the states of one layer.

    Plain decoding stores only the convolution inputs. A prefill needs only one layer's arrays.
    """
    delta = model.recurrent
    if delta is None:
        return 0
    num_heads, keys, values = delta.state_shape
    heads = 4 * num_heads * (keys + values + 1 + delta.has_delta)
    if program.tokens:
        per_row = heads + 4 * delta.channels
    else:
        kept = delta.channels * item + heads * (not program.shape.is_plain)
        per_row = kept * sum(len(x) for x in model.groups if isinstance(x.config, RecurrentConfig))
    states = 2 * program.batch * math.prod(delta.state_shape)
    return rows_of(program) * per_row + 4 * states


def _widened_bytes(blueprint: BackendSpec) -> int:
    """Returns the bytes of one dense weight that kernels dequantise in memory for many rows."""
    expanded = (name for name, format in blueprint.formats.items() if format.expands_dense)
    # Kernels never dequantise experts in memory.
    dense = frozenset(name for name in expanded if not name.endswith(EXPERTS))
    return _largest(blueprint.config, dense) * blueprint.item_bytes if dense else 0


@lru_cache(maxsize=16)
def _largest(config: ModelConfig, names: frozenset[str]) -> int:
    """Returns the elements of a layer's largest matrix among parameters."""
    wanted = parameters(config, config.mtp is not None)
    return max((math.prod(p.shape[1:]) for p in wanted if p.name in names), default=0)


def _stream_bytes(program: Program, blueprint: BackendSpec) -> int:
    streams = len(blueprint.drafts.streams)
    return rows_of(program) * streams * blueprint.config.hidden * blueprint.item_bytes


def _logit_bytes(program: Program, blueprint: BackendSpec, costs: WorkspaceCosts) -> int:
    rows = program.batch if program.tokens else rows_of(program)
    each = rows * costs.logit
    if blueprint.capacity.accept_rule != "exact" and not program.shape.is_plain:
        each += rows * DRAFT_DISTRIBUTION_BYTES
    if program.has(ProgramFeature.MASK):
        each += rows * MASK_BYTES
    if program.has(ProgramFeature.LOGPROBS):
        each += program.batch * program.shape.max_tokens * costs.reported
    if program.has(ProgramFeature.PROMPT_LOGPROBS):
        # Prompt logprobs are computed block by block.
        each += min(program.tokens, SCORED_ROWS) * (costs.logit + costs.reported)
    return each * blueprint.capacity.vocab
