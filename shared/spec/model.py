"""The forward pass of Llama, Qwen3 and Qwen3.5 (dense) over ragged rows, on paged KV and states.

`prefill` and `verify` are the same pass; they differ in which rows see which, and in how
gated-delta layers run: in chunks with the states carried on, or over a tree with the states left
as they are. The residual stream `streams[i]` is what enters layer i; `streams[L]` left the last.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from shared.models.config import ModelConfig
from shared.spec import attention, draft_tree, gated_delta, layers, mamba_state
from shared.spec.attention import Rows
from shared.spec.mamba_state import DeltaState, Kept

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


DeltaMixer = Callable[[int, Hidden], Float[np.ndarray, "R H V"]]
"""How a pass runs its gated-delta layers: from a layer (counted among its kind) and its normed
input to the layer's outputs before the output norm."""


def new_kv(config: ModelConfig, num_layers: int, num_pages: int, page_size: int) -> KV:
    """Empty pools of `num_layers` attention layers."""
    shape = (num_layers, num_pages, page_size, config.num_kv_heads, config.head_size)
    return KV(np.zeros(shape, np.float32), np.zeros(shape, np.float32))


def new_state(config: ModelConfig, batch: int) -> DeltaState:
    """The states of `batch` rows before their first token; without layers where there are none."""
    sizes, num_layers = config.gated_delta, config.num_gated_delta_layers
    if sizes is None:
        return DeltaState(
            np.zeros((0, batch, 0, 0, 0), np.float32),
            np.zeros((0, batch, mamba_state.WINDOW, 0), np.float32),
        )
    heads = (sizes.num_value_heads, sizes.key_size, sizes.value_size)
    return DeltaState(
        np.zeros((num_layers, batch, *heads), np.float32),
        np.zeros((num_layers, batch, mamba_state.WINDOW, sizes.channels), np.float32),
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
) -> tuple[Forward, DeltaState]:
    """Runs prompt chunks of several requests and carries their states on.

    Args:
      state: The states of the batch's rows before their chunks.
      tokens: The chunks one after the other, then padding.
      row_starts: First token of each chunk, and the end.
      first_positions: Position of each chunk's first token; so many tokens lie in the pages.
      page_table: Pages of each request, with room for the chunk.
    """
    no_bound = np.zeros_like(first_positions)
    rows = attention.causal_rows(row_starts, first_positions, no_bound, page_table, len(tokens))
    mixer = Chunks(config, weights, state, row_starts)
    passed = forward(config, weights, kv, rows, tokens, mixer)
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
) -> tuple[Forward, Kept]:
    """Runs one draft tree per request; neither the states nor a position below the lengths changes.

    Args:
      state: The states of the batch's rows, at their lengths.
      tokens, parents, num_nodes: The trees; node 0 is the newest token.
      lengths: Committed positions of each request.
      rows: R, flat rows; those past the last node are padding.

    Returns:
      The pass over the flat rows, and what a replay of the accepted path needs.
    """
    flat, node = attention.tree_rows(parents, num_nodes, lengths, page_table, rows)
    row_starts = np.concatenate([[0], np.cumsum(num_nodes)])
    row_of = draft_tree.flat_rows(row_starts, num_nodes, tokens.shape[1])
    mixer = Tree(config, weights, state, parents, row_of, flat.request, node)
    passed = forward(config, weights, kv, flat, tokens[flat.request, node], mixer)
    return passed, mixer.all_kept()


def forward(
    config: ModelConfig,
    weights: Weights,
    kv: KV,
    rows: Rows,
    tokens: Int[np.ndarray, " R"],
    mixer: DeltaMixer,
) -> Forward:
    """Runs all layers over ragged rows.

    Args:
      rows: Where the rows stand and what they see.
      tokens: The token of each row.
      mixer: Runs the gated-delta layers; a model without them never calls it.
    """
    x = weights["embed"][tokens]
    streams = [x]
    place = {"attention": 0, "gated_delta": 0}
    for layer, kind in enumerate(config.layer_kinds):
        y = norm(config, x, weights["input_norm"][layer])
        if kind == "attention":
            mixed, kv = attention_layer(config, weights, "", place[kind], y, rows, kv)
        else:
            mixed = _gated_delta_layer(config, weights, place[kind], y, mixer)
        place[kind] += 1
        x = x + mixed
        x = x + mlp(weights, "", layer, norm(config, x, weights["post_attention_norm"][layer]))
        streams.append(x)
    return Forward(norm(config, x, weights["final_norm"]), np.stack(streams), kv)


def logits(weights: Weights, hidden: Hidden) -> Float[np.ndarray, "R vocab"]:
    """Scores of the next token; a tied model has no head of its own."""
    return layers.linear(hidden, weights.get("lm_head", weights["embed"]))


def norm(
    config: ModelConfig, x: Float[np.ndarray, "..."], weight: Float[np.ndarray, " size"]
) -> Float[np.ndarray, "..."]:
    """The model's own kind of RMS norm."""
    kind = layers.rms_norm_zero_centered if config.zero_centered_norms else layers.rms_norm
    return kind(x, weight, config.rms_eps)


def attention_layer(
    config: ModelConfig,
    weights: Weights,
    prefix: str,
    layer: int,
    x: Float[np.ndarray, "R inputs"],
    rows: Rows,
    kv: KV,
) -> tuple[Hidden, KV]:
    """One attention layer, from the normed input to the output projection.

    Args:
      prefix: Before the names of the stack in `weights`, "" or that of a draft head.
      layer: Place in the stack of weights and of pools.
      kv: The pools of the stack.
    """
    name = f"{prefix}attention."
    q, k, v, gate = _project(config, layers.linear(x, weights[f"{name}qkv"][layer]))
    if config.qk_norm:
        q = norm(config, q, weights[f"{name}q_norm"][layer])
        k = norm(config, k, weights[f"{name}k_norm"][layer])
    cos, sin = layers.rotary_angles(rows.positions, config.rotary)
    q, k = layers.apply_rotary(q, cos, sin), layers.apply_rotary(k, cos, sin)
    where = (rows.page_table, rows.request, rows.places, rows.is_real)
    k_pages = attention.write(kv.k[layer], *where, k)
    v_pages = attention.write(kv.v[layer], *where, v)
    sees = (rows.page_table, rows.request, rows.first, rows.until, rows.window)
    out = attention.attend(q, k_pages, v_pages, *sees)
    if gate is not None:
        out = out * layers.sigmoid(gate)
    projected = layers.linear(out.reshape(len(x), -1), weights[f"{name}out"][layer])
    return projected, KV(_replaced(kv.k, layer, k_pages), _replaced(kv.v, layer, v_pages))


def mlp(weights: Weights, prefix: str, layer: int, x: Hidden) -> Hidden:
    """The gated MLP of one layer of a stack."""
    gate_up, down = weights[f"{prefix}mlp.gate_up"], weights[f"{prefix}mlp.down"]
    return layers.gated_mlp(x, gate_up[layer], down[layer])


def _project(
    config: ModelConfig, qkv: Float[np.ndarray, "R out"]
) -> tuple[
    Float[np.ndarray, "R Hq D"],
    Float[np.ndarray, "R Hk D"],
    Float[np.ndarray, "R Hk D"],
    Float[np.ndarray, "R Hq D"] | None,
]:
    """Takes the fused projection apart: queries, keys, values, and the gate where there is one."""
    R, D, keys = len(qkv), config.head_size, config.num_kv_heads * config.head_size
    queries = qkv.shape[1] - 2 * keys
    q, k, v = np.split(qkv, [queries, queries + keys], axis=1)
    k, v = k.reshape(R, -1, D), v.reshape(R, -1, D)
    if not config.attention_gate:
        return q.reshape(R, -1, D), k, v, None
    pairs = q.reshape(R, config.num_heads, 2, D)  # per head its query rows, then its gate rows
    return pairs[:, :, 0], k, v, pairs[:, :, 1]


def _replaced(
    pools: Float[np.ndarray, "L P page H D"], layer: int, pages: Float[np.ndarray, "P page H D"]
) -> Float[np.ndarray, "L P page H D"]:
    pools = pools.copy()
    pools[layer] = pages
    return pools


def _gated_delta_layer(
    config: ModelConfig, weights: Weights, layer: int, x: Hidden, mixer: DeltaMixer
) -> Hidden:
    out = mixer(layer, x)
    z = layers.linear(x, weights["gated_delta.z"][layer]).reshape(out.shape)
    gated = gated_delta.gated_norm(out, z, weights["gated_delta.norm"][layer], config.rms_eps)
    return layers.linear(gated.reshape(len(x), -1), weights["gated_delta.out"][layer])


class _DeltaInputs:
    """What both ways of running gated-delta layers compute of the rows."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        assert config.gated_delta is not None or not config.num_gated_delta_layers
        self._sizes = config.gated_delta
        self._weights = weights

    def conv_inputs(self, layer: int, x: Hidden) -> Float[np.ndarray, "R C"]:
        return layers.linear(x, self._weights["gated_delta.qkv"][layer])

    def gates(
        self, layer: int, x: Hidden
    ) -> tuple[Float[np.ndarray, "R H"], Float[np.ndarray, "R H"]]:
        b, a = np.split(layers.linear(x, self._weights["gated_delta.ba"][layer]), 2, axis=1)
        a_log = self._weights["gated_delta.a_log"][layer]
        return gated_delta.gates(b, a, a_log, self._weights["gated_delta.dt_bias"][layer])

    def qkv(
        self, layer: int, windows: Float[np.ndarray, "R 3 C"], inputs: Float[np.ndarray, "R C"]
    ) -> tuple[Float[np.ndarray, "R H K"], Float[np.ndarray, "R H K"], Float[np.ndarray, "R H V"]]:
        sizes = self._sizes
        assert sizes is not None  # a config with such layers has their sizes
        channels = mamba_state.conv(windows, inputs, self._weights["gated_delta.conv"][layer])
        heads = (sizes.num_key_heads, sizes.num_value_heads)
        return gated_delta.split(channels, *heads, sizes.key_size)


class Chunks:
    """Gated-delta layers of a prefill: each request's rows in chunks, the states carried on."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        state: DeltaState,
        row_starts: Int[np.ndarray, " B1"],
    ) -> None:
        self._inputs = _DeltaInputs(config, weights)
        self._row_starts = row_starts
        self.recurrent, self.window = state.recurrent.copy(), state.window.copy()

    def __call__(self, layer: int, x: Hidden) -> Float[np.ndarray, "R H V"]:
        """See `DeltaMixer`."""
        inputs = self._inputs.conv_inputs(layer, x)
        gates = self._inputs.gates(layer, x)
        heads, _, size = self.recurrent.shape[2:]
        out = np.zeros((len(x), heads, size), np.float32)
        for row, (start, stop) in enumerate(
            np.stack([self._row_starts[:-1], self._row_starts[1:]], 1)
        ):
            windows = mamba_state.chain_windows(self.window[layer, row], inputs[start:stop])
            qkv = self._inputs.qkv(layer, windows[:-1], inputs[start:stop])
            self.recurrent[layer, row], out[start:stop] = gated_delta.chunked(
                self.recurrent[layer, row], *qkv, *(gate[start:stop] for gate in gates)
            )
            self.window[layer, row] = windows[-1]
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
        self._inputs = _DeltaInputs(config, weights)
        self._state, self._parents, self._row_of = state, parents, row_of
        self._request, self._node = request, node
        self._kept: list[tuple[np.ndarray, ...]] = []

    def __call__(self, layer: int, x: Hidden) -> Float[np.ndarray, "R H V"]:
        """See `DeltaMixer`."""
        inputs = self._inputs.conv_inputs(layer, x)[self._row_of]  # [B, N, C]
        windows = mamba_state.tree_windows(self._state.window[layer], inputs, self._parents)
        B, N, C = inputs.shape
        flat = self._inputs.qkv(layer, windows.reshape(B * N, -1, C), inputs.reshape(B * N, C))
        q, k, v = (part.reshape(B, N, *part.shape[1:]) for part in flat)
        log_decay, beta = (gate[self._row_of] for gate in self._inputs.gates(layer, x))
        self._kept.append((k, v, log_decay, beta, inputs))
        recurrent = self._state.recurrent[layer]
        out = gated_delta.verify(recurrent, q, k, v, log_decay, beta, self._parents)
        return out[self._request, self._node]

    def all_kept(self) -> Kept:
        """The kept inputs of all layers, stacked."""
        if self._kept:
            return Kept(*(np.stack(parts) for parts in zip(*self._kept, strict=True)))
        gates = np.zeros((0, *self._parents.shape, 0), np.float32)
        heads = np.zeros((*gates.shape, 0), np.float32)
        return Kept(heads, heads, gates, gates, gates)
