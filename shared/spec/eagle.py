"""Draft heads that read the target's hidden states: NEXTN (MTP), EAGLE and EAGLE-3.

Row i of a head pairs the hidden state of token i with the embedding of token i + 1, stands at
position i, and its logits predict token i + 2. Its own KV shares the target's page table. After a
step the head is extended over the accepted path with hidden states of the target; while drafting it
goes on from its own. The rows it writes then lie past the request's length, and the next extend
overwrites them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from shared.drafts.config import DraftConfig, DraftHead
from shared.models.config import ModelConfig
from shared.models.layers import AttentionConfig
from shared.spec import draft_tree, layers, model
from shared.spec.attention import Rows
from shared.spec.draft_tree import Level, TreeShape
from shared.spec.layers import Shown
from shared.spec.linear import Stream
from shared.spec.model import KV, Forward, Hidden, Weights
from shared.spec.sampling import over_tokens

Logits = Float[np.ndarray, "R vocab"]
Tokens = Int[np.ndarray, " R"]
HeadWeights = Mapping[str, Shaped[np.ndarray, "..."]]

Head = Callable[[Rows, Tokens, Shown | None, Hidden, KV], tuple[Hidden, Logits, KV]]
"""A head bound to its weights: rows, each row's next token, what stands in the place of some of
them, each row's hidden state, and the head's KV; gives the hidden state that the next draft step
reads, the logits, and the KV."""

Rank = Callable[
    [Float[np.ndarray, "B k vocab"], Int[np.ndarray, "B k path"]],
    tuple[Int[np.ndarray, "B k width"], Float[np.ndarray, "B k width"]],
]
"""Picks the children of nodes: from their logits and the drafts on the path to each of them (itself
included, the root not), the best tokens, best first, and the log weights of the edges to them."""


def mtp(
    config: ModelConfig,
    weights: Weights,
    rows: Rows,
    tokens: Tokens,
    shown: Shown | None,
    hidden: Hidden,
    kv: KV,
) -> tuple[Hidden, Logits, KV]:
    """The MTP layer of a Qwen3.5 checkpoint; it shares embedding and head with the model.

    Args:
      tokens: The token after each row's.
      shown: Rows of pictures in the place of such tokens'.
      hidden: After the model's final norm; of a draft step, after the MTP layer's own.
    """
    fed = layers.embedded(weights["embed"], tokens, shown)
    fed = model.norm(config, fed, weights["mtp.embedding_norm"])
    normed = model.norm(config, hidden, weights["mtp.hidden_norm"])
    x = layers.linear(np.concatenate([fed, normed], axis=1), weights["mtp.fc"])
    y = model.norm(config, x, weights["mtp.layer.input_norm"][0])
    x, kv = _decoder_layer(config, weights, "mtp.layer.", x, y, rows, kv)
    out = model.norm(config, x, weights["mtp.final_norm"])
    return out, model.logits(config, weights, out), kv


def eagle(
    config: DraftConfig,
    weights: HeadWeights,
    target: Weights,
    rows: Rows,
    tokens: Tokens,
    shown: Shown | None,
    hidden: Hidden,
    kv: KV,
) -> tuple[Hidden, Logits, KV]:
    """An EAGLE-1 or EAGLE-2 head: its first layer has no input norm, and none stands at its end.

    Args:
      weights: The head's; what it lacks of `fc_bias` and `embed` is zero, or the target's.
      target: The model's, for the embedding and `lm_head`.
      hidden: After the model's final norm; of a draft step, the head's own output.

    Source: EAGLE, Li et al. 2024, arXiv:2401.15077.
    """
    fed = layers.embedded(embedding(weights, target), tokens, shown)
    x = _fc(weights, np.concatenate([fed, hidden], axis=1))
    x, kv = _layers(config.layer, weights, x, x, rows, kv)
    return x, model.logits(config.layer, target, x), kv


def eagle3_project(
    config: DraftConfig, weights: HeadWeights, aux: Float[np.ndarray, "R streams"]
) -> Float[np.ndarray, "R hidden"]:
    """The hidden state of target rows for an EAGLE-3 head.

    Args:
      weights: The head's; with `aux_norm` each stream is normed, with `input_norm` all of them as
        one, before `fc`.
      aux: The residual streams of the target that `config.aux_streams` names, side by side.
    """
    if config.norm_aux:
        streams = np.split(aux, len(config.aux_streams), axis=1)
        pairs = zip(streams, weights["aux_norm"], strict=True)
        aux = np.concatenate([layers.rms_norm(x, w, config.layer.rms_eps) for x, w in pairs], 1)
    if config.norm_input:
        aux = layers.rms_norm(aux, weights["input_norm"], config.layer.rms_eps)
    return _fc(weights, aux)


def eagle3(
    config: DraftConfig,
    weights: HeadWeights,
    target: Weights,
    rows: Rows,
    tokens: Tokens,
    shown: Shown | None,
    hidden: Hidden,
    kv: KV,
) -> tuple[Hidden, Logits, KV]:
    """An EAGLE-3 head: its first layer's attention reads embedding and hidden state side by side.

    With `config.norm_residual` what that layer adds to is the hidden state as its attention reads
    it, after the norm; else it is the hidden state itself.

    Args:
      weights: The head's; what it lacks of `embed` and `lm_head` it shares with the target.
      target: The model's.
      hidden: Of `eagle3_project`; of a draft step, the head's own output, before its final norm
        unless `config.norm_output`.

    Returns:
      As `Head`; logits are over the model's vocabulary, -inf where the head has no token.

    Source: EAGLE-3, Li et al. 2025, arXiv:2503.01840.
    """
    layer = config.layer
    fed = layers.embedded(embedding(weights, target), tokens, shown)
    fed = model.norm(layer, fed, weights["layer.input_norm"][0])
    normed = model.norm(layer, hidden, weights["layer.hidden_norm"][0])
    y, x = np.concatenate([fed, normed], axis=1), normed if config.norm_residual else hidden
    x, kv = _layers(layer, weights, x, y, rows, kv)
    out = model.norm(layer, x, weights["final_norm"])
    if config.own_lm_head:
        logits = layers.linear(out, weights["lm_head"])
    else:
        logits = model.logits(layer, target, out)
    logits = over_tokens(logits, weights.get("draft_ids"), layer.vocab)
    return out if config.norm_output else x, logits, kv


@dataclass(frozen=True)
class Drafter:
    """A draft head bound to its weights and its target's.

    Attributes:
      layer: Sizes of the head's layers and of its hidden state.
      num_layers: How many it has.
      run: The head.
      reads: The hidden states that the head reads of rows of the target.
    """

    layer: ModelConfig
    num_layers: int
    run: Head
    reads: Callable[[Forward], Hidden]

    @classmethod
    def nextn(cls, config: ModelConfig, weights: Weights) -> "Drafter":
        """The model's own MTP layer."""
        return cls(config, 1, partial(mtp, config, weights), lambda passed: passed.hidden)

    @classmethod
    def of_head(cls, head: DraftHead, target: Weights) -> "Drafter":
        """A head with weights of its own; `target` are the model's."""
        config, weights = head.config, head.weights
        if config.kind == "EAGLE":
            run = partial(eagle, config, weights, target)
            return cls(config.layer, config.layer.num_layers, run, lambda passed: passed.hidden)

        def project(passed: Forward) -> Hidden:
            aux = np.concatenate([passed.streams[i] for i in config.aux_streams], axis=1)
            return eagle3_project(config, weights, aux)

        run = partial(eagle3, config, weights, target)
        return cls(config.layer, config.layer.num_layers, run, project)


def embedding(weights: HeadWeights, target: Weights) -> Float[np.ndarray, "vocab hidden"]:
    """A head's own, or its target's."""
    return weights.get("embed", target["embed"])


def _fc(weights: HeadWeights, x: Float[np.ndarray, "R inputs"]) -> Hidden:
    projected = layers.linear(x, weights["fc"])
    return projected + weights["fc_bias"] if "fc_bias" in weights else projected


def _layers(
    config: ModelConfig,
    weights: Weights,
    x: Hidden,
    y: Float[np.ndarray, "R inputs"],
    rows: Rows,
    kv: KV,
) -> tuple[Hidden, KV]:
    """All layers of a head: the first reads `y` and adds to `x`, the later ones read the stream."""
    first, pools = KV(kv.k[:1], kv.v[:1]), KV(kv.k[1:], kv.v[1:])
    x, first = _decoder_layer(config, weights, "layer.", x, y, rows, first)
    stream = Stream(x)
    for place, each in enumerate(config.layers[1:]):
        y = model.norm(config, stream.rows, weights["later.input_norm"][place])
        attention, where = each.mixer, ("later.", place)
        assert isinstance(attention, AttentionConfig)  # a head has no other layers
        stream, pools = model.attention_layer(
            config, attention, weights, *where, y, stream, rows, pools
        )
        stream = model.feed(config, each.feed, weights, *where, place, stream)
    k, v = (np.concatenate(pair) for pair in ((first.k, pools.k), (first.v, pools.v)))
    return stream.rows, KV(k, v)


def _decoder_layer(
    config: ModelConfig,
    weights: Weights,
    prefix: str,
    x: Hidden,
    y: Float[np.ndarray, "R inputs"],
    rows: Rows,
    kv: KV,
) -> tuple[Hidden, KV]:
    """One layer with the residual `x`, whose attention reads `y`."""
    given = (config.attention, weights, prefix, 0, y, Stream(x), rows, kv)
    stream, kv = model.attention_layer(config, *given)
    fed = config.draft_layer.feed
    return model.feed(config, fed, weights, prefix, 0, 0, stream).rows, kv


@dataclass(frozen=True)
class Relay:
    """What a slot carries from one step's extend to the next step's draft.

    Attributes:
      tokens, weights: The best candidates for the token after the newest, and their log weights.
      hidden: The head's hidden state of the last extended row.
    """

    tokens: Int[np.ndarray, "B k"]
    weights: Float[np.ndarray, "B k"]
    hidden: Float[np.ndarray, "B hidden"]


def extend_rows(
    lengths: Int[np.ndarray, " B"],
    counts: Int[np.ndarray, " B"],
    draft_from: Int[np.ndarray, " B"],
    page_table: Int[np.ndarray, "B table"],
    depth: int,
) -> Rows:
    """The B * W rows that extend a head's KV over an accepted path, W = depth + 1 per request.

    Row j of a request stands at position `lengths + j`, pairs the hidden state of the path's node j
    with the step's token j, and is padding from `counts` on.
    """
    B, W = len(lengths), depth + 1
    request, step = np.repeat(np.arange(B), W), np.tile(np.arange(W), B)
    is_real = step < counts[request]
    positions = np.where(is_real, lengths[request] + step, 0)
    until = np.where(is_real, positions + 1, 0)
    window = np.zeros((B * W, 0), bool)
    first = draft_from[request]
    return Rows(request, positions, positions, first, until, window, is_real, page_table)


def relay_of(hidden: Hidden, logits: Logits, last: Int[np.ndarray, " B"], rank: Rank) -> Relay:
    """Makes the relay from each request's last extended row.

    Args:
      hidden, logits: Of all rows of the extend.
      last: The flat row that is each request's last.
      rank: Picks the candidates.
    """
    no_path = np.zeros((len(last), 1, 0), np.int32)
    tokens, weights = rank(logits[last][:, None], no_path)
    return Relay(tokens[:, 0], weights[:, 0], hidden[last])


Expand = Callable[[Rows, Tokens, Int[np.ndarray, " R"], KV], tuple[Logits, KV]]
"""Runs a drafter on the nodes of a level: their rows and tokens, and for each node the place of its
parent's row in the expansion before (of the first level, its request); gives their logits."""

Tree = tuple[
    Int[np.ndarray, "B N"],
    Int[np.ndarray, "B N"],
    Int[np.ndarray, " B"],
    Float[np.ndarray, "B N"],
]
"""As `draft_tree.keep_best` gives it: tokens, parents, node counts and path weights."""


def draft(
    head: Head,
    kv: KV,
    relay: Relay,
    newest: Int[np.ndarray, " B"],
    lengths: Int[np.ndarray, " B"],
    draft_from: Int[np.ndarray, " B"],
    max_drafts: Int[np.ndarray, " B"],
    page_table: Int[np.ndarray, "B table"],
    shape: TreeShape,
    rank: Rank,
) -> tuple[Tree, KV]:
    """Grows one draft tree per request: the relay is its first level, then S - 1 expansions.

    Args:
      kv: The head's KV, whole from `draft_from` to the length.
      relay: At least k candidates; of a request whose `draft_from` is its length it means nothing,
        and that request gets its root only.
      newest: The root's token.
      rank: Picks each node's k children.

    Returns:
      The trees, and the head's KV.

    Source: EAGLE-2, Li et al. 2024, arXiv:2406.16858.
    """
    hidden = relay.hidden

    def expand(
        rows: Rows, tokens: Tokens, parent: Int[np.ndarray, " R"], kv: KV
    ) -> tuple[Logits, KV]:
        nonlocal hidden
        hidden, logits, kv = head(rows, tokens, None, hidden[parent], kv)
        return logits, kv

    first = (relay.tokens[:, : shape.width], relay.weights[:, : shape.width])
    bounds = (lengths, draft_from, max_drafts, page_table)
    return grow(expand, kv, first, newest, *bounds, shape, rank, 0)


def grow(
    expand: Expand,
    kv: KV,
    first: tuple[Int[np.ndarray, "B k"], Float[np.ndarray, "B k"]],
    newest: Int[np.ndarray, " B"],
    lengths: Int[np.ndarray, " B"],
    draft_from: Int[np.ndarray, " B"],
    max_drafts: Int[np.ndarray, " B"],
    page_table: Int[np.ndarray, "B table"],
    shape: TreeShape,
    rank: Rank,
    root_rows: int,
) -> tuple[Tree, KV]:
    """Grows draft trees level by level, whatever the drafter is.

    Expansion s (from 1) runs the drafter on the k nodes of its frontier, at position
    `lengths + root_rows + s - 1`. It writes draft KV at `lengths + root_rows + (s - 1) k` and on; a
    node sees the draft KV from `draft_from` to the length, the root's row where there is one, and
    what its own ancestors and itself wrote.

    Args:
      kv: The drafter's KV, whole from `draft_from` to the length.
      first: The root's children and the log weights of the edges to them; of a request whose
        `draft_from` is its length they mean nothing.
      root_rows: 1 where the drafter has written a row for the root, at the length; else 0.

    Returns:
      The trees, and the drafter's KV.
    """
    tokens, weights = first
    B, k = tokens.shape
    can_draft = draft_from < lengths
    levels = [(tokens, weights, np.zeros((B, k), np.int32))]
    level = _first_level(tokens, weights, shape, root_rows)
    for s in range(1, shape.depth):
        where = (lengths, draft_from, can_draft, page_table)
        rows = _expansion_rows(level.sees, s, *where, root_rows)
        logits, kv = expand(rows, level.tokens.reshape(-1), level.parents.reshape(-1), kv)
        ids, edges = rank(logits.reshape(B, k, -1), level.paths)
        parents, weights, level = draft_tree.next_level(level, ids, edges, s, root_rows)
        levels.append((ids.reshape(B, k * k), weights, parents))
    ids, weights, parents = (np.concatenate(parts, axis=1) for parts in zip(*levels, strict=True))
    limits = (max_drafts, can_draft, shape.nodes)
    return draft_tree.keep_best(newest, ids, weights, parents, *limits), kv


def _first_level(
    tokens: Int[np.ndarray, "B k"],
    weights: Float[np.ndarray, "B k"],
    shape: TreeShape,
    root_rows: int,
) -> Level:
    B, k = tokens.shape
    sees = np.zeros((B, k, root_rows + k * (shape.depth - 1)), bool)
    sees[:, :, :root_rows] = True
    sees |= np.arange(sees.shape[2]) == root_rows + np.arange(k)[:, None]
    return Level(
        tokens=tokens,
        weights=weights,
        parents=np.repeat(np.arange(B)[:, None], k, axis=1),
        numbers=np.tile(np.arange(1, k + 1), (B, 1)),
        paths=tokens[:, :, None],
        sees=sees,
    )


def _expansion_rows(
    sees: Bool[np.ndarray, "B k window"],
    s: int,
    lengths: Int[np.ndarray, " B"],
    draft_from: Int[np.ndarray, " B"],
    can_draft: Bool[np.ndarray, " B"],
    page_table: Int[np.ndarray, "B table"],
    root_rows: int,
) -> Rows:
    B, k, _ = sees.shape
    request = np.repeat(np.arange(B), k)
    is_real = can_draft[request]
    length = np.where(is_real, lengths[request], 0)
    positions = length + root_rows + s - 1
    places = length + root_rows + (s - 1) * k + np.tile(np.arange(k), B)
    window = sees.reshape(B * k, -1) & is_real[:, None]
    first = draft_from[request]
    return Rows(request, positions, places, first, length, window, is_real, page_table)
