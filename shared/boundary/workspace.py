"""How much memory a step works on beside the pools; each backend brings what differs.

Counted are the largest arrays that live at once: a layer's, its attention's, the streams that are
kept for what drafts, the replay inputs of a verify, and the logits with all that is made of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shared.boundary.backend import Blueprint, Capacity
from shared.boundary.program import Extra, Program, Work
from shared.models import fp8_words
from shared.models.config import ModelConfig
from shared.models.kept import kept_bytes
from shared.models.layers import DenseConfig, ExpertsConfig
from shared.spec.attention import QUERIES
from shared.spec.logprobs import SCORED_ROWS
from shared.spec.numerics import ATTENTION

DRAFT_LAW_BYTES = 24
"""Of a logit where drafts are sampled: their noise and logits, both laws, the residual and its
logarithm."""

MASK_BYTES = 3
"""Of a logit whose token a mask allows or forbids, on its way from a bit to a byte."""

MOST_PARTS = 64
"""Most partial results that a kernel keeps of a row by split; of longer rows it keeps them by
span."""

PAIRS = 64
"""Of a row and a query head: a program's, spare ones too, where a kernel attends to more than half
as many by the wide matrix unit."""

AttentionBytes = Callable[[Program, ModelConfig, Capacity, int], int]


@dataclass(frozen=True)
class Costs:
    """What a backend holds where backends differ.

    Attributes:
      logit: Bytes for each logit that a token is chosen from: raw, processed, sorted, and the
        counts and noise that go with it.
      reported: More bytes for each logit whose logarithms are reported.
      attention: Bytes of one layer's attention.
    """

    logit: int
    reported: int
    attention: AttentionBytes


def step_bytes(program: Program, blueprint: Blueprint, costs: Costs) -> int:
    """Bytes that a step of the program needs beyond weights and pools."""
    if program.work is Work.COUNT:
        return 4 * program.batch * blueprint.capacity.vocab
    if program.work is Work.ENCODE:
        return _tower_bytes(program, blueprint)
    sizes, small = blueprint.config, blueprint.drafts.model
    model_bytes = _model_bytes(program, sizes, blueprint, costs)
    kept = _logit_bytes(program, blueprint, costs) + _stream_bytes(program, blueprint)
    kept += _widened_bytes(blueprint)
    if small is None:
        return model_bytes + kept
    # A small model runs after the target, or before it; each node of a level has its own states.
    nodes = program.batch * program.shape.width * small.num_gated_delta_layers
    states = 3 * nodes * state_layer_bytes(small, blueprint.item_bytes)
    return max(model_bytes, _model_bytes(program, small, blueprint, costs) + states) + kept


def _tower_bytes(program: Program, blueprint: Blueprint) -> int:
    """Of a picture: its patches, where it begins, and the widest part of a block.

    Where operations are plain they work in float32, and attention has the scores of some rows.
    """
    pictures = blueprint.capacity.pictures
    assert pictures is not None  # a model that sees has the program
    vision, rows = pictures.vision, program.tokens
    # Of attention: rows, the projection, heads in blocks, and the result.
    widest = max(9 * vision.hidden, 2 * vision.hidden + 2 * vision.intermediate)
    numbers = 0 if program.blocks.start else vision.patch_numbers
    patches = rows * (numbers + 2 * vision.head_size) * 4
    if blueprint.on_gpu and blueprint.dtype == "bfloat16":
        return patches + rows * widest * blueprint.item_bytes
    scores = vision.num_heads * min(rows, QUERIES) * rows * 12  # with weights, and their type's
    return patches + rows * widest * 4 + scores


def gathered_attention(program: Program, model: ModelConfig, capacity: Capacity, item: int) -> int:
    """Of plain attention: the keys and values of whole page tables, and the scores of all rows.

    Scores are float32 of float32 keys, which are a copy of narrower ones.
    """
    queries = program.tokens or program.shape.nodes  # a row is padded to the longest
    keys = program.pages * capacity.page_size
    bytes_each = 2 * item + (4 if item < 4 else 0)
    gathered = program.batch * keys * model.attention.key_size * bytes_each
    return gathered + 2 * program.batch * model.attention.num_heads * queries * keys * 4


def split_attention(
    most_pairs: int, program: Program, model: ModelConfig, capacity: Capacity, item: int
) -> int:
    """Of the kernels: queries and the output; where rows are few, partial results in float32.

    Those are sums, a peak and a total each. A prompt has few rows if their pairs with the query
    heads of a key head are no more than `most_pairs`.
    """
    attention = model.attention
    group, rows = attention.num_heads // attention.num_kv_heads, rows_of(program)
    size = 2 * rows * attention.num_heads * attention.head_size * item
    if program.tokens * group <= most_pairs:
        positions = program.pages * capacity.page_size
        splits, spans = -(-positions // ATTENTION.split), -(-positions // ATTENTION.span)
        pairs, most = rows * group, (program.tokens or rows // program.batch) * group
        by_span = pairs if most <= PAIRS // 2 else program.batch * (-(-most // PAIRS) * PAIRS)
        parts = max(min(splits, MOST_PARTS) * pairs, spans * by_span)
        size += attention.num_kv_heads * parts * (attention.head_size + 2) * 4
    return size


def rows_of(program: Program) -> int:
    """Most flat rows of a step's forward passes, the target's or the drafter's.

    A verify with fewer rows than nodes counts them all: what is kept of its nodes is.
    """
    return program.tokens or program.batch * max(program.shape.nodes, program.shape.block)


def state_layer_bytes(model: ModelConfig, item: int) -> int:
    """One request's state in one gated-delta layer."""
    delta = model.gated_delta
    return 0 if delta is None else kept_bytes(delta.kept, item)


def _model_bytes(program: Program, model: ModelConfig, blueprint: Blueprint, costs: Costs) -> int:
    """The widest layer of a forward pass, and what is kept of all gated-delta layers."""
    heads, item = model.attention.query_size, blueprint.item_bytes
    feed = max(_feed_row_bytes(each.feed, model.hidden, item) for each in model.layers)
    layer = rows_of(program) * ((4 * model.hidden + 4 * heads) * item + feed)
    attention = costs.attention(program, model, blueprint.capacity, item)
    return layer + attention + _delta_bytes(program, model, item)


def _feed_row_bytes(feed: DenseConfig | ExpertsConfig, hidden: int, item: int) -> int:
    """A row's gate, up and their product; of experts for each that it chooses, with its output.

    Outputs of experts are float32, as the router's logits are.
    """
    if isinstance(feed, DenseConfig):
        return 3 * feed.intermediate * item
    chosen = feed.num_chosen * (3 * feed.intermediate * item + 4 * hidden)
    shared = 3 * feed.shared_intermediate * item + 4 * hidden
    return chosen + shared + 4 * feed.num_scored


def _delta_bytes(program: Program, model: ModelConfig, item: int) -> int:
    """What a replay needs of every layer of a verify, and the states that a layer works on.

    Plain decoding keeps the convolution's inputs alone; of prompts it is what one layer works on.
    """
    delta = model.gated_delta
    if delta is None:
        return 0
    heads = 4 * delta.num_value_heads * (delta.key_size + delta.value_size + 2)
    if program.tokens:
        per_row = heads + 4 * delta.channels
    else:
        kept = delta.channels * item + heads * (not program.shape.is_plain)
        per_row = kept * model.num_gated_delta_layers
    states = 2 * program.batch * delta.num_value_heads * delta.key_size * delta.value_size
    return rows_of(program) * per_row + 4 * states


def _widened_bytes(blueprint: Blueprint) -> int:
    """A dense weight in FP8, which is widened in memory where rows are many."""
    dense, hidden = blueprint.config.dense, blueprint.config.hidden
    if dense is None or not any(name.endswith(fp8_words.DENSE) for name in blueprint.in_words):
        return 0
    return 2 * dense.intermediate * hidden * blueprint.item_bytes


def _stream_bytes(program: Program, blueprint: Blueprint) -> int:
    streams = len(blueprint.drafts.streams)
    return rows_of(program) * streams * blueprint.config.hidden * blueprint.item_bytes


def _logit_bytes(program: Program, blueprint: Blueprint, costs: Costs) -> int:
    rows = program.batch if program.tokens else rows_of(program)
    each = rows * costs.logit
    if blueprint.capacity.accept_rule != "match" and not program.shape.is_plain:
        each += rows * DRAFT_LAW_BYTES
    if program.has(Extra.MASK):
        each += rows * MASK_BYTES
    if program.has(Extra.LOGPROBS):
        each += program.batch * program.shape.max_tokens * costs.reported
    if program.has(Extra.SCORES):
        # A block of a prompt's rows is scored after another.
        each += min(program.tokens, SCORED_ROWS) * (costs.logit + costs.reported)
    return each * blueprint.capacity.vocab
