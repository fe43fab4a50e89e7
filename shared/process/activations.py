"""How much memory a step works on while it runs: an estimate for the memory plan."""

from shared.boundary.backend import Limits, Program
from shared.drafts.config import DraftConfig
from shared.models.config import ModelConfig

Drafting = DraftConfig | ModelConfig | None
"""What drafts: a head, a small model, or nothing with files of its own."""

LOGIT_COPIES = 6
"""Raw, processed, noise, perturbed, and the sorted values and ids of a support."""

LOGPROB_COPIES = 3
"""Log probabilities, and their sorted values and ids."""

LAW_COPIES = 6
"""Where drafts are sampled: their noise and logits, both laws, the residual and its logarithm."""


def activation_bytes(
    program: Program, model: ModelConfig, head: Drafting, limits: Limits, item: int
) -> int:
    """Largest arrays that live at once in a step.

    They are a layer's, the streams that a head reads, all kept replay inputs, and the logits.
    """
    B, N = program.batch, program.shape.nodes
    rows = program.tokens or B * N
    queries = program.tokens or N  # a row of plain attention is padded to the longest
    keys = program.pages * limits.page_size
    heads = model.num_heads * model.head_size
    layer = rows * (4 * model.hidden + 3 * model.intermediate + 4 * heads) * item
    gathered = 2 * B * keys * model.num_kv_heads * model.head_size * item
    scores = 2 * B * model.num_heads * queries * keys * 4
    is_head = isinstance(head, DraftConfig)
    streams = rows * len(head.aux_streams) * model.hidden * item if is_head else 0
    chosen = B * program.shape.max_tokens * program.logprobs
    logits = (LOGIT_COPIES * (B if program.tokens else rows) + LOGPROB_COPIES * chosen) * 4
    if limits.accept_rule != "match" and not program.shape.is_plain:
        logits += 4 * LAW_COPIES * rows
    kept = streams + logits * model.vocab + _delta_bytes(program, model, rows)
    largest = layer + gathered + scores + kept
    if not isinstance(head, ModelConfig):
        return largest
    # A small model runs after the target, or before it; each node of a level has its own states.
    small = activation_bytes(program, head, None, limits, item)
    nodes = B * program.shape.width * head.num_gated_delta_layers
    return max(largest, small + 3 * nodes * state_layer_bytes(head, item))


def state_layer_bytes(model: ModelConfig, item: int) -> int:
    """One request's state in one gated-delta layer."""
    delta = model.gated_delta
    if delta is None:
        return 0
    state = delta.num_value_heads * delta.key_size * delta.value_size * 4
    return state + (delta.conv_width - 1) * delta.channels * item


def _delta_bytes(program: Program, model: ModelConfig, rows: int) -> int:
    """Replay inputs of every layer of a verify, and the states that a layer works on."""
    delta = model.gated_delta
    if delta is None:
        return 0
    kept = delta.num_value_heads * (delta.key_size + delta.value_size + 2) + delta.channels
    layers = 1 if program.tokens else model.num_gated_delta_layers
    states = 2 * program.batch * delta.num_value_heads * delta.key_size * delta.value_size
    return 4 * (rows * kept * layers + states)
