"""N-gram drafting in the reference backend."""

import numpy as np
from jaxtyping import Int

from shared.boundary.backend import Prefill
from shared.reference.rows import Batch, Trees
from shared.spec import ngram
from shared.spec.draft_tree import TreeShape
from shared.spec.ngram import NgramState


def grown(memory: NgramState, batch: Batch, shape: TreeShape, accept_rule: str) -> Trees:
    """Drafts a tree for each row from the n-gram table."""
    assert batch.texts is not None
    trees = ngram.draft(
        memory.table,
        memory.tails[batch.slots],
        batch.texts.scopes,
        batch.sampling.max_drafts,
        shape.nodes,
        shape.depth,
        ngram.width_of(shape.nodes, accept_rule),
    )
    none_forced = np.zeros(len(batch.slots), bool)
    return Trees(trees.tokens, trees.parents, trees.num_nodes, none_forced, trees.weights)


def learn_prompts(
    memory: NgramState, batch: Batch, work: Prefill, newest: Int[np.ndarray, " B"]
) -> NgramState:
    """Inserts the chunks of a prefill into the n-gram table, except image tokens.

    Args:
      memory: N-gram state.
      batch, work: Rows and inputs of the plan.
      newest: Token after each chunk.
    """
    assert batch.texts is not None
    assert batch.texts.before is not None  # set in a prefill
    spans = [slice(*work.row_starts[row : row + 2]) for row in batch.index]
    chunks = [work.tokens[span] for span in spans]
    counts = np.array([len(chunk) for chunk in chunks])
    request = np.repeat(np.arange(len(chunks)), counts)
    row_starts = np.concatenate([[0], np.cumsum(counts)])
    following = [np.append(chunk[1:], token) for chunk, token in zip(chunks, newest, strict=True)]
    is_real = np.ones(len(request), bool)
    if work.images is not None:
        own = [work.images.sources[span] for span in spans]
        after = work.images.next_embed_sources[batch.index]
        later = [np.append(each[1:], last) for each, last in zip(own, after, strict=True)]
        is_real = (np.concatenate(own) == 0) & (np.concatenate(later) == 0)
    windows = ngram.prompt_windows(np.concatenate(chunks), row_starts, request, batch.texts.before)
    return ngram.learn_prompts(
        memory,
        batch.slots,
        windows,
        np.concatenate(following),
        request,
        row_starts[1:] - 1,
        batch.texts.scopes,
        is_real,
    )


def learn_outputs(
    memory: NgramState,
    batch: Batch,
    tokens: Int[np.ndarray, "B W"],
    counts: Int[np.ndarray, " B"],
) -> NgramState:
    """Inserts the tokens that a step has committed."""
    assert batch.texts is not None
    return ngram.learn_outputs(memory, batch.slots, tokens, counts, batch.texts.scopes)
