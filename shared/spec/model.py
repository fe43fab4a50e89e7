"""The forward pass of Llama, Qwen3, Qwen3.5 and their kin over ragged rows, on paged KV and states.

`prefill` and `verify` are the same pass; they differ in which rows see which, and in how
gated-delta layers run: in chunks with the states carried on, or over a tree with the states left
as they are. The residual stream `streams[i]` is what enters layer i; `streams[L]` left the last.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
from jaxtyping import Float, Int

from shared.models.config import ModelConfig
from shared.models.fp8_words import SCALES
from shared.models.layers import AttentionConfig, DenseConfig, ExpertsConfig
from shared.models.parameters import BIAS
from shared.spec import attention, draft_tree, layers, linear, mamba_state
from shared.spec.attention import Rows, windowed
from shared.spec.experts import Experts, added_experts
from shared.spec.layers import Shown
from shared.spec.linear import Matrix, Stream
from shared.spec.mamba_state import DeltaState, DeltaWeights, Kept
from shared.spec.mix import Angles, HeadNorms, Heads, grown_rows, normed_rows
from shared.spec.mix import mix as mix_heads
from shared.spec.turns import turn_of_pairs

Weights = Mapping[str, Float[np.ndarray, "..."]]
Hidden = Float[np.ndarray, "R hidden"]


@dataclass(frozen=True)
class KV:
    """The page pools of a stack of attention layers; page 0 is the sink."""

    k: Float[np.ndarray, "L P page H D"]
    v: Float[np.ndarray, "L P page H D"]


@dataclass(frozen=True)
class Forward:
    """What a pass gives: the hidden state after the final norm, all residual streams, the KV."""

    hidden: Hidden
    streams: Float[np.ndarray, "L1 R hidden"]
    kv: KV

    def at(self, rows: Int[np.ndarray, " some"]) -> "Forward":
        """What the pass gave of some rows."""
        return Forward(self.hidden[rows], self.streams[:, rows], self.kv)


DeltaMixer = Callable[[int, Float[np.ndarray, "R outputs"]], Float[np.ndarray, "R values"]]
"""How a pass runs its gated-delta layers: from a layer (counted among its kind) and its projected
inputs to the heads' outputs after the gated norm."""


def new_kv(config: ModelConfig, num_layers: int, num_pages: int, page_size: int) -> KV:
    """Empty pools of `num_layers` attention layers."""
    keys, values = (
        np.zeros((num_layers, num_pages, page_size, *plane.shape), np.float32)
        for plane in config.attention.kept
    )
    return KV(keys, values)


def new_state(config: ModelConfig, batch: int) -> DeltaState:
    """The states of `batch` rows before their first token; without layers where there are none."""
    sizes, num_layers = config.gated_delta, config.num_gated_delta_layers
    if sizes is None:
        return DeltaState(
            np.zeros((0, batch, 0, 0, 0), np.float32),
            np.zeros((0, batch, mamba_state.WINDOW, 0), np.float32),
        )
    return DeltaState(
        **{x.name: np.zeros((num_layers, batch, *x.shape), np.float32) for x in sizes.kept}
    )


def prefill(
    config: ModelConfig,
    weights: Weights,
    kv: KV,
    state: DeltaState,
    tokens: Int[np.ndarray, " T"],
    row_starts: Int[np.ndarray, " B1"],
    first_positions: Int[np.ndarray, " B"],
    page_table: Int[np.ndarray, "B table"],
    shown: Shown | None,
    turns: Int[np.ndarray, "T 3"] | None,
) -> tuple[Forward, DeltaState]:
    """Runs prompt chunks of several requests and carries their states on.

    Args:
      state: The states of the batch's rows before their chunks.
      tokens: The chunks one after the other, then padding.
      row_starts: First token of each chunk, and the end.
      first_positions: Position of each chunk's first token; so many tokens lie in the pages.
      page_table: Pages of each request, with room for the chunk.
      shown: Rows of pictures in the place of tokens'; None of text.
      turns: By which the rows turn; None: by their positions.
    """
    no_bound = np.zeros_like(first_positions)
    rows = attention.causal_rows(row_starts, first_positions, no_bound, page_table, len(tokens))
    mixer = Chunks(config, weights, state, row_starts)
    rows = replace(rows, turns=turns)
    passed = forward(config, weights, kv, rows, tokens, shown, mixer)
    return passed, DeltaState(mixer.recurrent, mixer.window)


def verify(
    config: ModelConfig,
    weights: Weights,
    kv: KV,
    state: DeltaState,
    tokens: Int[np.ndarray, "B N"],
    parents: Int[np.ndarray, "B N"],
    num_nodes: Int[np.ndarray, " B"],
    lengths: Int[np.ndarray, " B"],
    page_table: Int[np.ndarray, "B table"],
    rows: int,
    delta: Int[np.ndarray, " B"] | None,
) -> tuple[Forward, Kept]:
    """Runs one draft tree per request; neither the states nor a position below the lengths changes.

    Args:
      state: The states of the batch's rows, at their lengths.
      tokens, parents, num_nodes: The trees; node 0 is the newest token.
      lengths: Committed positions of each request.
      rows: R, flat rows; those past the last node are padding.
      delta: What the turns of each request's rows are above their positions; None: nothing.

    Returns:
      The pass over the flat rows, and what a replay of the accepted path needs.
    """
    flat, node = attention.tree_rows(parents, num_nodes, lengths, page_table, rows)
    if delta is not None:
        flat = attention.turned(flat, delta)
    row_starts = np.concatenate([[0], np.cumsum(num_nodes)])
    row_of = draft_tree.flat_rows(row_starts, num_nodes, tokens.shape[1])
    mixer = Tree(config, weights, state, parents, row_of, flat.request, node)
    passed = forward(config, weights, kv, flat, tokens[flat.request, node], None, mixer)
    return passed, mixer.all_kept()


def forward(
    config: ModelConfig,
    weights: Weights,
    kv: KV,
    rows: Rows,
    tokens: Int[np.ndarray, " R"],
    shown: Shown | None,
    mixer: DeltaMixer,
) -> Forward:
    """Runs all layers over ragged rows.

    Args:
      rows: Where the rows stand and what they see.
      tokens: The token of each row.
      shown: What stands in the place of some tokens'; None of text.
      mixer: Runs the gated-delta layers; a model without them never calls it.
    """
    norms = [_norm_before(config, weights, "input_norm", i) for i in range(config.num_layers)]
    norms.append(None)  # what leaves the last layer no product reads
    embedded = layers.embedded(weights["embed"], tokens, shown, config.embedding_factor)
    stream = linear.stream(embedded, norms[0])
    streams, places = [stream.rows], dict.fromkeys((*config.layer_kinds, *config.feed_kinds), 0)
    for layer, each in enumerate(config.layers):
        mixing, kind, fed = each.mixer, each.mixer.kind, each.feed
        place, projection = places[kind], matrix(weights, f"{kind}.inputs", places[kind])
        inputs = linear.normed_product(stream, config.input_eps, projection)
        if isinstance(mixing, AttentionConfig):
            mixed, kv = mix(config, mixing, weights, "", place, inputs, rows, kv)
        else:
            mixed = mixer(place, inputs)
        out, norm_of = (
            matrix(weights, f"{kind}.out", place),
            norm_between(config, weights, "", layer),
        )
        stream = _added(config, weights, "mixer_end_norm", layer, mixed, out, stream, norm_of)
        norm_of = norms[layer + 1]
        stream = feed(config, fed, weights, "", layer, places[fed.kind], stream, norm_of)
        places[kind] += 1
        places[fed.kind] += 1
        streams.append(stream.rows)
    return Forward(norm(config, stream.rows, weights["final_norm"]), np.stack(streams), kv)


def logits(config: ModelConfig, weights: Weights, hidden: Hidden) -> Float[np.ndarray, "R vocab"]:
    """Scores of the next token; a tied model has no head of its own."""
    head = Matrix(weights.get("lm_head", weights["embed"]))
    return linear.product_float32(hidden, head, config.logits_factor)


def matrix(weights: Weights, name: str, layer: int) -> Matrix:
    """The weight of one layer of a stack, with what stands beside it."""
    beside = (weights.get(f"{name}{end}") for end in (BIAS, SCALES))
    return Matrix(weights[name][layer], *(x if x is None else x[layer] for x in beside))


def norm(
    config: ModelConfig, x: Float[np.ndarray, "..."], weight: Float[np.ndarray, " size"]
) -> Float[np.ndarray, "..."]:
    """The model's own kind of RMS norm."""
    return layers.rms_norm(x, scale(config, weight), config.rms_eps)


def scale(config: ModelConfig, weight: Float[np.ndarray, " size"]) -> Float[np.ndarray, " size"]:
    """What a norm multiplies by: some models store its distance from 1."""
    return 1 + weight if config.zero_centered_norms else weight


def angles(config: AttentionConfig, rows: Rows) -> Angles:
    """The rotation of each row."""
    turning = rows.positions
    if rows.turns is not None and config.rotary.sections:
        turning = rows.turns[:, turn_of_pairs(config.rotary)]
    return Angles(*layers.rotary_angles(turning, config.rotary))


def head_norms(config: ModelConfig, weights: Weights, prefix: str, layer: int) -> HeadNorms | None:
    """The norms of one layer's heads, where the model has them."""
    if not config.attention.qk_norm:
        return None
    q, k = (scale(config, weights[f"{prefix}attention.{x}_norm"][layer]) for x in "qk")
    return HeadNorms(q, k, config.rms_eps)


def mix(
    config: ModelConfig,
    attention: AttentionConfig,
    weights: Weights,
    prefix: str,
    layer: int,
    qkv: Float[np.ndarray, "R outputs"],
    rows: Rows,
    kv: KV,
) -> tuple[Float[np.ndarray, "R heads_size"], KV]:
    """`shared.spec.mix.mix` of one layer.

    Args:
      attention: Of the layer.
      prefix: Before the names of the stack in `weights`, "" or that of a draft head.
      layer: Place in the stack of weights and of pools.
      qkv: The layer's projection.
      kv: The pools of the stack.
    """
    norms, pools = head_norms(config, weights, prefix, layer), (kv.k[layer], kv.v[layer])
    heads, turn = Heads.of(attention), angles(attention, rows)
    if norms is not None and attention.norms_all_heads:
        qkv, norms = normed_rows(qkv, heads, norms), None
    if attention.query_growth:
        grown = layers.query_growth(
            rows.positions, attention.query_growth, attention.rotary.original_context
        )
        qkv = grown_rows(qkv, heads, grown)
    seen = windowed(rows, attention.window)
    out, k, v = mix_heads(qkv, heads, norms, turn, seen, *pools)
    return out, KV(_replaced(kv.k, layer, k), _replaced(kv.v, layer, v))


def attention_layer(
    config: ModelConfig,
    attention: AttentionConfig,
    weights: Weights,
    prefix: str,
    layer: int,
    x: Float[np.ndarray, "R inputs"],
    stream: Stream,
    rows: Rows,
    kv: KV,
) -> tuple[Stream, KV]:
    """One attention layer of a draft head, whose projection reads `x` and not the stream.

    Args:
      attention: Of the layer.
    """
    name = f"{prefix}attention."
    qkv = linear.product(x, matrix(weights, f"{name}inputs", layer))
    out, kv = mix(config, attention, weights, prefix, layer, qkv, rows, kv)
    between = norm_between(config, weights, prefix, layer)
    added = linear.added_product(out, matrix(weights, f"{name}out", layer), stream, norm=between)
    return added, kv


def feed(
    config: ModelConfig,
    fed: DenseConfig | ExpertsConfig,
    weights: Weights,
    prefix: str,
    layer: int,
    place: int,
    stream: Stream,
    norm: Float[np.ndarray, " hidden"] | None = None,
) -> Stream:
    """The gated MLP of one layer, or its experts, and the residual behind.

    Args:
      fed: What the layer has.
      prefix: Before the names of the stacks in `weights`.
      layer, place: The layer's number among all of the prefix, and among those that have the same.
      stream: To be read through the norm before the MLP.
      norm: Of the stream that this gives.
    """
    if isinstance(fed, ExpertsConfig):
        own = experts_of(weights, f"{prefix}experts.", place)
        return added_experts(stream, config.rms_eps, fed, own, norm)
    gate_up, down = (matrix(weights, f"{prefix}mlp.{x}", place) for x in ("gate_up", "down"))
    x = linear.gated_product(stream, config.input_eps, gate_up)
    return _added(config, weights, f"{prefix}feed_end_norm", layer, x, down, stream, norm)


def norm_between(
    config: ModelConfig, weights: Weights, prefix: str, layer: int
) -> Float[np.ndarray, " hidden"] | None:
    """Scale of the norm between the mixer of a layer and its MLP."""
    return _norm_before(config, weights, f"{prefix}post_attention_norm", layer)


def experts_of(weights: Weights, prefix: str, place: int) -> Experts:
    """The experts of one layer of the stacks that a prefix names."""

    def at(name: str) -> Matrix:
        return matrix(weights, f"{prefix}{name}", place)

    bias, has_own = weights.get(f"{prefix}score_bias"), f"{prefix}shared_down" in weights
    return Experts(
        router=at("router"),
        gate_up=at("gate_up"),
        down=at("down"),
        score_bias=None if bias is None else bias[place],
        shared_gate_up=at("shared_gate_up") if has_own else None,
        shared_down=at("shared_down") if has_own else None,
    )


def _norm_before(
    config: ModelConfig, weights: Weights, name: str, layer: int
) -> Float[np.ndarray, " hidden"] | None:
    return None if config.norms_behind else scale(config, weights[name][layer])


def _added(
    config: ModelConfig,
    weights: Weights,
    norm_behind: str,
    layer: int,
    x: Float[np.ndarray, "R inputs"],
    weight: Matrix,
    stream: Stream,
    norm: Float[np.ndarray, " hidden"] | None,
) -> Stream:
    """The stream with a product, which a model may norm before it is added."""
    if not config.norms_behind:
        return linear.added_product(x, weight, stream, config.residual_factor, norm)
    scales = scale(config, weights[norm_behind][layer])
    return linear.added_norm(linear.product(x, weight), scales, config.rms_eps, stream)


def _replaced(
    pools: Float[np.ndarray, "L P page H D"], layer: int, pages: Float[np.ndarray, "P page H D"]
) -> Float[np.ndarray, "L P page H D"]:
    pools = pools.copy()
    pools[layer] = pages
    return pools


def delta_weights(config: ModelConfig, weights: Weights, layer: int) -> DeltaWeights:
    """What one gated-delta layer holds besides its matrices."""
    names = ("conv", "a_log", "dt_bias", "norm")
    arrays = {name: weights[f"gated_delta.{name}"][layer] for name in names}
    return DeltaWeights(**arrays, eps=config.rms_eps)


class Chunks:
    """Gated-delta layers of a prefill: each request's rows in chunks, the states carried on."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        state: DeltaState,
        row_starts: Int[np.ndarray, " B1"],
    ) -> None:
        self._config, self._weights, self._row_starts = config, weights, row_starts
        self.recurrent, self.window = state.recurrent.copy(), state.window.copy()

    def __call__(
        self, layer: int, inputs: Float[np.ndarray, "R outputs"]
    ) -> Float[np.ndarray, "R values"]:
        """See `DeltaMixer`."""
        assert self._config.gated_delta is not None  # a model with such layers has their sizes
        out, self.recurrent[layer], self.window[layer] = mamba_state.mix_chunks(
            inputs,
            delta_weights(self._config, self._weights, layer),
            self._config.gated_delta,
            self.recurrent[layer],
            self.window[layer],
            self._row_starts,
        )
        return out


class Tree:
    """Gated-delta layers of a verify: each node goes on from its parent, its inputs are kept."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        state: DeltaState,
        parents: Int[np.ndarray, "B N"],
        row_of: Int[np.ndarray, "B N"],
        request: Int[np.ndarray, " R"],
        node: Int[np.ndarray, " R"],
    ) -> None:
        self._config, self._weights = config, weights
        self._state, self._parents, self._row_of = state, parents, row_of
        self._request, self._node = request, node
        self._kept: list[Kept] = []

    def __call__(
        self, layer: int, inputs: Float[np.ndarray, "R outputs"]
    ) -> Float[np.ndarray, "R values"]:
        """See `DeltaMixer`."""
        assert self._config.gated_delta is not None  # a model with such layers has their sizes
        out, kept = mamba_state.mix_tree(
            inputs,
            delta_weights(self._config, self._weights, layer),
            self._config.gated_delta,
            self._state.recurrent[layer],
            self._state.window[layer],
            self._parents,
            self._row_of,
            self._request,
            self._node,
        )
        self._kept.append(kept)
        return out

    def all_kept(self) -> Kept:
        """The kept inputs of all layers, stacked."""
        if self._kept:
            names = [field.name for field in fields(Kept)]
            return Kept(*(np.concatenate([getattr(x, n) for x in self._kept]) for n in names))
        gates = np.zeros((0, *self._parents.shape, 0), np.float32)
        heads_of = np.zeros((*gates.shape, 0), np.float32)
        return Kept(heads_of, heads_of, gates, gates, gates)
