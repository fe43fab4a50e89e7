"""Choice of the token after each node of a batch's trees."""

import numpy as np
from jaxtyping import Bool, Float, Int32

from shared.reference.device_state import DeviceState
from shared.reference.rows import Batch, Trees
from shared.spec import acceptance, draft_tree, sampling


def chosen(
    batch: Batch,
    trees: Trees,
    logits: Float[np.ndarray, "B N vocab"],
    allowed: Bool[np.ndarray, "B N vocab"] | None,
    state: DeviceState,
    rule: str,
) -> Int32[np.ndarray, "B N"]:
    """Returns the target's tokens, or the results of rejection sampling for sampled draft
    tokens.
    """
    B, N, vocab = logits.shape
    request, node = np.repeat(np.arange(B), N), np.tile(np.arange(N), B)
    seen = sampling.counts_in_trees(
        state.seen, batch.slots, trees.tokens, trees.parents, request, node
    )
    lengths = state.lengths[batch.slots]
    positions = lengths[:, None] + draft_tree.depths(trees.parents) + 1
    flat, at = logits.reshape(B * N, vocab), positions.reshape(-1)
    mask = None if allowed is None else allowed.reshape(B * N, vocab)
    if trees.drafted is None:
        return sampling.choose(flat, seen, at, batch.sampling, request, mask).ids.reshape(B, N)
    choices, _ = acceptance.rejection_sample(
        flat,
        seen,
        at,
        batch.sampling,
        request,
        row_of=np.arange(B * N).reshape(B, N),
        tokens=trees.tokens,
        num_nodes=trees.num_nodes,
        lengths=lengths,
        drafted=trees.drafted,
        allowed=mask,
        rule=rule,
    )
    return choices
