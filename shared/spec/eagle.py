"""Draft heads on the target's hidden states: EAGLE, EAGLE-2, EAGLE-3, and MTP layers (NEXTN).

Row i of a head combines the hidden state of token i with the embedding of token i + 1. It has
position i, and its logits predict token i + 2. The head's KV uses the target's page table. After a
step, draft extend runs the head over the accepted path with hidden states of the target. While
drafting, the head reads its own hidden states. The rows it writes then are past the request's
length, and the next extend overwrites them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from jaxtyping import Float, Int, Shaped

from shared.drafts.config import DraftConfig, DraftHead
from shared.models.config import ModelConfig
from shared.models.mixers import SelfAttentionConfig
from shared.models.mtp import MTP_FC
from shared.spec import layers, linear, model
from shared.spec.attention import AttentionRows
from shared.spec.cache_pools import KV
from shared.spec.draft_tree import TreeShape
from shared.spec.layers import ImageEmbeds
from shared.spec.linear import Matrix, NormedStream
from shared.spec.lora import LORA, BatchAdapters, with_adapters
from shared.spec.model import Forward, Hidden, Weights
from shared.spec.sampling import over_tokens
from shared.spec.tree_growth import DraftRequests, Logits, Rank, Tokens, Tree, grow

HeadWeights = Mapping[str, Shaped[np.ndarray, "..."]]

Head = Callable[[AttentionRows, Tokens, ImageEmbeds | None, Hidden, KV], tuple[Hidden, Logits, KV]]
"""Draft head bound to its weights. Inputs: rows, each row's next token, image embeddings that
replace some token embeddings, each row's hidden state, and the head's KV. Outputs: the hidden state
for the next draft step, the logits, and the KV."""


def mtp(
    config: ModelConfig,
    weights: Weights,
    rows: AttentionRows,
    tokens: Tokens,
    shown: ImageEmbeds | None,
    hidden: Hidden,
    kv: KV,
    lora: BatchAdapters | None = None,
) -> tuple[Hidden, Logits, KV]:
    """Computes the MTP layer of a checkpoint, which shares embedding and LM head with the model.

    Its hidden state after the final norm enters the next draft step.

    Args:
      config, weights: Config and weights of the model.
      rows: Positions and visibility of the rows.
      tokens: Token after each row's own.
      shown: Image embeddings that replace embeddings of such tokens.
      hidden: Hidden states after the model's final norm; while drafting, after the MTP layer's own.
      kv: KV of the MTP layer.
      lora: Adapters of the requests; None without.
    """
    weights = with_adapters(weights, lora, rows.request)
    embeds = layers.embed_tokens(weights["embed"], tokens, shown)
    embeds = model.norm(config, embeds, weights["mtp.embedding_norm"])
    normed = model.norm(config, hidden, weights["mtp.hidden_norm"])
    adapters = weights.get(f"{MTP_FC}{LORA}")
    fc = replace(Matrix.plain(weights[MTP_FC]), lora=adapters and adapters.at(0))
    x = linear.product(np.concatenate([embeds, normed], axis=1), fc)
    y = model.norm(config, x, weights["mtp.layer.input_norm"][0])
    x, kv = _decoder_layer(config, weights, "mtp.layer.", x, y, rows, kv)
    out = model.norm(config, x, weights["mtp.final_norm"])
    return out, model.logits(config, weights, out), kv


def eagle(
    config: DraftConfig,
    weights: HeadWeights,
    target: Weights,
    rows: AttentionRows,
    tokens: Tokens,
    shown: ImageEmbeds | None,
    hidden: Hidden,
    kv: KV,
) -> tuple[Hidden, Logits, KV]:
    """Computes an EAGLE-1 or EAGLE-2 head, which has no input norm in its first layer and no final
    norm.

    Args:
      config, weights: Those of the head. A missing `fc_bias` is 0; a missing `embed` is the
        target's.
      target: Weights of the target, for the embedding and `lm_head`.
      rows, tokens, shown, kv: See `mtp`.
      hidden: Hidden states after the model's final norm; while drafting, the head's own output.

    Source: EAGLE, Li et al. 2024, arXiv:2401.15077.
    """
    embeds = layers.embed_tokens(embedding(weights, target), tokens, shown)
    x = _fc(weights, np.concatenate([embeds, hidden], axis=1))
    x, kv = _layers(config.layer, weights, x, x, rows, kv)
    return x, model.logits(config.layer, target, x), kv


def eagle3_project(
    config: DraftConfig, weights: HeadWeights, aux: Float[np.ndarray, "R streams"]
) -> Float[np.ndarray, "R hidden"]:
    """Projects auxiliary hidden states of target rows to the hidden state of an EAGLE-3 head.

    Args:
      config, weights: Those of the head; `aux_norm` norms each hidden state, `input_norm` all as
        one.
      aux: Auxiliary hidden states named by `config.aux_streams`, concatenated.
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
    rows: AttentionRows,
    tokens: Tokens,
    shown: ImageEmbeds | None,
    hidden: Hidden,
    kv: KV,
) -> tuple[Hidden, Logits, KV]:
    """Computes an EAGLE-3 head, whose first attention reads embedding and hidden state,
    concatenated.

    With `config.norm_residual` the first layer's residual is the normed hidden state, otherwise the
    hidden state itself.

    Args:
      config, weights: Those of the head; a missing `embed` or `lm_head` is the target's.
      target: Weights of the target.
      rows, tokens, shown, kv: See `mtp`.
      hidden: Result of `eagle3_project`; while drafting, the head's own output before its final
        norm, or after it with `config.norm_output`.

    Returns:
      The outputs of `Head`; logits are -inf for tokens outside the draft vocabulary.

    Source: EAGLE-3, Li et al. 2025, arXiv:2503.01840.
    """
    layer = config.layer
    embeds = layers.embed_tokens(embedding(weights, target), tokens, shown)
    embeds = model.norm(layer, embeds, weights["layer.input_norm"][0])
    normed = model.norm(layer, hidden, weights["layer.hidden_norm"][0])
    y, x = np.concatenate([embeds, normed], axis=1), normed if config.norm_residual else hidden
    x, kv = _layers(layer, weights, x, y, rows, kv)
    out = model.norm(layer, x, weights["final_norm"])
    if config.own_lm_head:
        logits = layers.linear(out, weights["lm_head"])
    else:
        logits = model.logits(layer, target, out)
    logits = over_tokens(logits, weights.get("draft_ids"), layer.vocab)
    return out if config.norm_output else x, logits, kv


@dataclass(frozen=True)
class EagleHeadDrafter:
    """A draft head bound to its weights and its target's.

    Attributes:
      layer: Config of the head's layers and hidden state.
      num_layers: Number of its layers.
      run: The head.
      reads: Function from a target pass to the hidden states that the head reads.
      bind: Returns `run` with the adapters of the requests; None for a head without adapters.
    """

    layer: ModelConfig
    num_layers: int
    run: Head
    reads: Callable[[Forward], Hidden]
    bind: Callable[[BatchAdapters], Head] | None = None

    @classmethod
    def nextn(cls, config: ModelConfig, weights: Weights) -> "EagleHeadDrafter":
        """Returns the model's own MTP layer as a drafter."""

        def bind(lora: BatchAdapters) -> Head:
            return partial(mtp, config, weights, lora=lora)

        run = partial(mtp, config, weights)
        return cls(config, 1, run, lambda passed: passed.hidden, bind)

    @classmethod
    def of_head(cls, head: DraftHead, target: Weights) -> "EagleHeadDrafter":
        """Returns a head with its own weights as a drafter; `target` are the model's weights."""
        config, weights = head.config, head.weights
        if config.traits.aux_streams is None:
            run = partial(eagle, config, weights, target)
            return cls(config.layer, config.layer.num_layers, run, lambda passed: passed.hidden)

        def project(passed: Forward) -> Hidden:
            aux = np.concatenate([passed.streams[i] for i in config.aux_streams], axis=1)
            return eagle3_project(config, weights, aux)

        run = partial(eagle3, config, weights, target)
        return cls(config.layer, config.layer.num_layers, run, project)

    def adapted(self, lora: BatchAdapters | None) -> Head:
        """Returns the head with the adapters of the requests, if it has adapters."""
        return self.run if lora is None or self.bind is None else self.bind(lora)


def embedding(weights: HeadWeights, target: Weights) -> Float[np.ndarray, "vocab hidden"]:
    """Returns the head's own embedding, or its target's."""
    return weights.get("embed", target["embed"])


def _fc(weights: HeadWeights, x: Float[np.ndarray, "R inputs"]) -> Hidden:
    projected = layers.linear(x, weights["fc"])
    return projected + weights["fc_bias"] if "fc_bias" in weights else projected


def _layers(
    config: ModelConfig,
    weights: Weights,
    x: Hidden,
    y: Float[np.ndarray, "R inputs"],
    rows: AttentionRows,
    kv: KV,
) -> tuple[Hidden, KV]:
    """Computes all layers of a head: the first reads `y` with residual `x`, later ones read the
    stream.
    """
    first, pools = kv[:1], kv[1:]
    x, first = _decoder_layer(config, weights, "layer.", x, y, rows, first)
    stream = NormedStream(x)
    for place, each in enumerate(config.layers[1:]):
        y = model.norm(config, stream.rows, weights["later.input_norm"][place])
        assert isinstance(each.mixer, SelfAttentionConfig)  # heads have only attention layers
        stream, pools = model.attention_layer(
            config, each.mixer, weights, "later.", place, y, stream, rows, pools
        )
        stack = f"later.{each.mlp.kind}.", place
        stream = model.mlp_layer(config, each.mlp, weights, "later.", place, stack, stream)
    return stream.rows, np.concatenate([first, pools])


def _decoder_layer(
    config: ModelConfig,
    weights: Weights,
    prefix: str,
    x: Hidden,
    y: Float[np.ndarray, "R inputs"],
    rows: AttentionRows,
    kv: KV,
) -> tuple[Hidden, KV]:
    """Computes one layer with the residual `x`, whose attention reads `y`."""
    stream, kv = model.attention_layer(
        config, config.attentions[0], weights, prefix, 0, y, NormedStream(x), rows, kv
    )
    mlp = config.draft_layer.mlp
    stack = f"{prefix}{mlp.kind}.", 0
    return model.mlp_layer(config, mlp, weights, prefix, 0, stack, stream).rows, kv


@dataclass(frozen=True)
class DraftInput:
    """Draft input of a slot: result of draft extend that the next step's draft starts from.

    Attributes:
      tokens, weights: Best candidates for the token after the newest, and their log weights.
      hidden: Hidden state of the head in the last extended row.
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
) -> AttentionRows:
    """Returns the B * W rows of draft extend over an accepted path, W = depth + 1 per request.

    Row j of a request has position `lengths + j` and combines the hidden state of the path's node j
    with the step's output token j. Rows from `counts` on are padding.
    """
    B, W = len(lengths), depth + 1
    request, step = np.repeat(np.arange(B), W), np.tile(np.arange(W), B)
    is_real = step < counts[request]
    positions = np.where(is_real, lengths[request] + step, 0)
    until = np.where(is_real, positions + 1, 0)
    return AttentionRows(
        request=request,
        positions=positions,
        places=positions,
        first=draft_from[request],
        until=until,
        window=np.zeros((B * W, 0), bool),
        is_real=is_real,
        page_table=page_table,
    )


def relay_of(hidden: Hidden, logits: Logits, last: Int[np.ndarray, " B"], rank: Rank) -> DraftInput:
    """Builds the draft input from each request's last extended row.

    Args:
      hidden, logits: Outputs of all rows of the extend.
      last: Flat index of each request's last row.
      rank: Selects the candidates.
    """
    no_path = np.zeros((len(last), 1, 0), np.int32)
    tokens, weights = rank(logits[last][:, None], no_path)
    return DraftInput(tokens[:, 0], weights[:, 0], hidden[last])


def draft(
    head: Head,
    kv: KV,
    relay: DraftInput,
    requests: DraftRequests,
    shape: TreeShape,
    rank: Rank,
) -> tuple[Tree, KV]:
    """Grows one dynamic draft tree per request: the draft input is its first level, then S - 1
    expansions.

    Args:
      head: The draft head.
      kv: The head's KV.
      relay: Draft input with at least k candidates. It is invalid for a request without draft KV,
        which gets its root only.
      requests: Requests of the step.
      shape: Shape of the trees.
      rank: Selects each node's k children.

    Returns:
      The trees, and the head's KV.

    Source: EAGLE-2, Li et al. 2024, arXiv:2406.16858.
    """
    hidden = relay.hidden

    def expand(
        rows: AttentionRows, tokens: Tokens, parent: Int[np.ndarray, " R"], kv: KV
    ) -> tuple[Logits, KV]:
        nonlocal hidden
        hidden, logits, kv = head(rows, tokens, None, hidden[parent], kv)
        return logits, kv

    first = (relay.tokens[:, : shape.width], relay.weights[:, : shape.width])
    return grow(expand, kv, first, requests, shape, rank, root_rows=0)
