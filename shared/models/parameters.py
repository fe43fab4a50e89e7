"""Model parameters and the checkpoint tensors that each of them is loaded from.

Parameters are stacks, one per layer kind: `attention.inputs` contains the fused QKV projection of
layer after layer, `gated_delta.inputs` the fused projection of qkv, z, b and a. Matrices are `[out,
in]`, as in Hugging Face checkpoints. The matrices of a layer's experts are stacked again:
`experts.gate_up` is `[layers, experts, out, in]`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shared.models.config import ModelConfig
from shared.models.layers import AttentionConfig, GatedDeltaConfig, LayerConfig, MoEConfig
from shared.models.parameter import CheckpointTensor, Parameter
from shared.models.tp_sharding import ShardedRange, vocab_section

BIAS = "_bias"
"""Suffix of the parameter name of a weight's bias."""


DRAFT_HEAD = "draft_lm_head"
"""Name of the parameter of `draft_head`."""


def parameters(config: ModelConfig, with_mtp: bool) -> list[Parameter]:
    """Returns all parameters of a model in loading order; `lm_head` is absent if tied.

    Raises:
      ValueError: `with_mtp` is set for a model whose config names no MTP layer.
    """
    if with_mtp and not config.has_mtp:
        raise ValueError("the model's config.json has no MTP layer (mtp_num_hidden_layers)")
    table = (config.vocab, config.hidden)
    tensors = [single("embed", "embed_tokens.weight", table)]
    tensors += decoder_parameters("", config, [f"layers.{i}" for i in range(config.num_layers)])
    tensors.append(single_norm("final_norm", "norm.weight", config.hidden, config.norm_centre))
    if not config.tied:
        tensors.append(head_of("lm_head", "lm_head.weight", table))
    return tensors + (_mtp_parameters(config) if with_mtp else [])


def divided_parameters(
    config: ModelConfig, with_mtp: bool, count: int, token_map: Sequence[int] | None
) -> list[Parameter]:
    """Returns all parameters of a model for sharding over `count` ranks; see `Parameter.of_rank`.

    In a tied model each rank has the whole embedding, and additionally a shard of it as its LM
    head.

    Args:
      config: Config of the model.
      with_mtp: True to include the MTP layer.
      count: Number of ranks.
      token_map: See `draft_head`; None if drafts use the full vocabulary.
    """
    wanted = parameters(config, with_mtp)
    if token_map is not None:
        wanted.append(draft_head(config, token_map))
    if count > 1 and config.tied:
        head = head_of("lm_head", "embed_tokens.weight", (config.vocab, config.hidden))
        wanted.append(replace(head, tied_to="embed"))
    return wanted


def draft_head(config: ModelConfig, ids: Sequence[int]) -> Parameter:
    """Returns a second copy of the LM-head rows of a reduced draft vocabulary.

    The rows are contiguous, so that drafting reads only them.

    Args:
      config: Config of the model.
      ids: Target token ids of the draft vocabulary, in ascending order.
    """
    name, source = ("embed", "embed_tokens") if config.tied else ("lm_head", "lm_head")
    whole = head_of(name, f"{source}.weight", (config.vocab, config.hidden))
    return whole.rows(DRAFT_HEAD, ids)


def decoder_parameters(
    prefix: str,
    config: ModelConfig,
    layers: Sequence[str],
    like: Sequence[LayerConfig] | None = None,
) -> list[Parameter]:
    """Returns the stacks of the decoder layers with the checkpoint prefixes `layers`.

    Args:
      prefix: Prefix of the parameter names.
      config: Config of the model.
      layers: Prefixes of the layers in the checkpoint.
      like: Config of each layer; None for the layers of `config`.
    """
    like = config.layers if like is None else like
    named = list(zip(layers, like, strict=True))
    attention = [name for name, each in named if each.mixer.kind == "attention"]
    delta = [name for name, each in named if each.mixer.kind == "gated_delta"]
    dense = [name for name, each in named if each.mlp.kind == "mlp"]
    sparse = [name for name, each in named if each.mlp.kind == "experts"]
    norms, centre = NORMS_BEHIND if config.post_norm else NORMS, config.norm_centre
    return [
        *(norms_of(f"{prefix}{x}", layers, y, config.hidden, centre) for x, y in norms.items()),
        *(mlp_parameters(f"{prefix}mlp.", config, dense) if dense else []),
        *(_experts(f"{prefix}experts.", config, sparse) if sparse else []),
        *(attention_parameters(f"{prefix}attention.", config, attention) if attention else []),
        *(_gated_delta(f"{prefix}gated_delta.", config, delta) if delta else []),
    ]


NORMS = {
    "input_norm": "input_layernorm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
}
NORMS_BEHIND = {
    "mixer_end_norm": "post_attention_layernorm.weight",
    "feed_end_norm": "post_feedforward_layernorm.weight",
}
"""Norms of a decoder layer by our names: before its mixer and its MLP, or behind them."""


def attention_parameters(
    prefix: str, config: ModelConfig, layers: Sequence[str], inputs: int | None = None
) -> list[Parameter]:
    """Returns the stacks of attention layers; with an output gate the q rows are [q | gate] per
    head.

    Args:
      prefix: Prefix of the parameter names.
      config: Config of the model.
      layers: Prefixes of the layers in the checkpoint.
      inputs: Input width of q, k and v; None for the hidden size.
    """
    inputs = inputs or config.hidden
    attention, size = config.attention, config.attention.head_size
    queries, keys = attention.query_size, attention.key_size
    qkv = {
        "self_attn.q_proj.weight": (queries * (2 if attention.has_gate else 1), inputs),
        "self_attn.k_proj.weight": (keys, inputs),
        "self_attn.v_proj.weight": (keys, inputs),
    }
    if config.fused_projections:
        qkv = {"self_attn.qkv_proj.weight": (queries + 2 * keys, inputs)}
    out = {"self_attn.o_proj.weight": (config.hidden, queries)}
    by_heads, by_columns = _heads(attention), (ShardedRange(config.hidden),)
    tensors = [
        stack(f"{prefix}inputs", layers, qkv, sections=by_heads),
        stack(f"{prefix}out", layers, out, sections=by_columns),
    ]
    if attention.input_bias:
        tensors.append(_bias(f"{prefix}inputs", layers, qkv, by_heads))
    if attention.out_bias:
        tensors.append(_bias(f"{prefix}out", layers, out, by_columns))
    if attention.qk_norm:
        sizes = {"q": queries, "k": keys} if attention.norms_all_heads else {"q": size, "k": size}
        tensors += [
            norms_of(
                f"{prefix}{x}_norm", layers, f"self_attn.{x}_norm.weight", width, config.norm_centre
            )
            for x, width in sizes.items()
        ]
    return tensors


def _heads(attention: AttentionConfig) -> tuple[ShardedRange, ...]:
    """Returns the TP sections of the QKV projection."""
    size = attention.head_size
    query = size * (2 if attention.has_gate else 1)
    keys = ShardedRange(attention.key_size, size, repeats=True)
    return ShardedRange(query * attention.num_heads, query), keys, keys


def mlp_parameters(prefix: str, config: ModelConfig, layers: Sequence[str]) -> list[Parameter]:
    """Returns the stacks of the gated MLPs of some layers."""
    assert config.dense is not None  # the config has dense layers
    wide = (config.dense.intermediate, config.hidden)
    gate_up = {"mlp.gate_proj.weight": wide, "mlp.up_proj.weight": wide}
    if config.fused_projections:
        gate_up = {"mlp.gate_up_proj.weight": (2 * wide[0], wide[1])}
    down = {"mlp.down_proj.weight": wide[::-1]}
    both = ("gate_up", gate_up, _gate_up(wide[0])), ("down", down, (ShardedRange(config.hidden),))
    tensors = [stack(f"{prefix}{x}", layers, t, sections=cut) for x, t, cut in both]
    if config.dense.bias:
        tensors += [_bias(f"{prefix}{x}", layers, t, cut) for x, t, cut in both]
    return tensors


def _gate_up(intermediate: int) -> tuple[ShardedRange, ...]:
    """Returns the TP sections of the gate and up projections."""
    return ShardedRange(intermediate), ShardedRange(intermediate)


def _experts(prefix: str, config: ModelConfig, layers: Sequence[str]) -> list[Parameter]:
    """Returns the stacks of routers and experts; a shared expert of the same width is the last
    expert.
    """
    sizes, hidden = config.experts, config.hidden
    assert sizes is not None  # the config has layers with experts
    router = {"mlp.gate.weight": (sizes.num_experts, hidden)}
    if sizes.shared_is_gated:
        router["mlp.shared_expert_gate.weight"] = (1, hidden)
    tensors = [stack(f"{prefix}router", layers, router)]
    if sizes.has_score_bias:
        bias = {"mlp.gate.e_score_correction_bias": (sizes.num_experts,)}
        tensors.append(stack(f"{prefix}score_bias", layers, bias, float32=True))
    shared = "mlp.shared_expert." if sizes.shared_is_gated else "mlp.shared_experts."
    wide = (sizes.shared_intermediate, hidden)
    gate_up = {f"{shared}{x}_proj.weight": wide for x in ("gate", "up")}
    down = {f"{shared}down_proj.weight": wide[::-1]}
    joined = sizes.shares_stacks
    tensors += [
        _stacked(f"{prefix}gate_up", layers, sizes, hidden, gate_up if joined else {}),
        _stacked(f"{prefix}down", layers, sizes, hidden, down if joined else {}),
    ]
    if sizes.shared_intermediate and not joined:
        cut = _gate_up(wide[0])
        tensors.append(stack(f"{prefix}shared_gate_up", layers, gate_up, sections=cut))
        cut = (ShardedRange(hidden),)
        tensors.append(stack(f"{prefix}shared_down", layers, down, sections=cut))
    return tensors


def _stacked(
    name: str,
    layers: Sequence[str],
    sizes: MoEConfig,
    hidden: int,
    shared: Mapping[str, tuple[int, ...]],
) -> Parameter:
    """Returns the matrices of each layer's experts, stored as one tensor or as some per expert.

    Args:
      name: Parameter name, which ends in `gate_up` or `down`.
      layers: Prefixes of the layers in the checkpoint.
      sizes: MoE config.
      hidden: Hidden size.
      shared: Tensors of the shared expert that is stored after the others.
    """
    matrix = name.rsplit(".", 1)[-1]
    wide = (sizes.intermediate, hidden)
    each = (2 * wide[0], wide[1]) if matrix == "gate_up" else wide[::-1]
    single_shape = wide if matrix == "gate_up" else wide[::-1]
    pieces = []
    for layer in layers:
        parts = tuple(
            CheckpointTensor(f"{layer}.mlp.experts.{expert}.{part}_proj.weight", single_shape)
            for expert in range(sizes.num_experts)
            for part in matrix.split("_")
        )
        whole = CheckpointTensor(
            f"{layer}.mlp.experts.{matrix}_proj", (sizes.num_experts, *each), parts
        )
        behind = [CheckpointTensor(f"{layer}.{tensor}", shape) for tensor, shape in shared.items()]
        pieces.append((whole, *behind))
    shape = (len(layers), sizes.num_stacked, *each)
    cut = _gate_up(sizes.intermediate) if matrix == "gate_up" else (ShardedRange(hidden),)
    return Parameter(name, shape, tuple(pieces), stacked=True, sections=cut)


def _gated_delta(prefix: str, config: ModelConfig, layers: Sequence[str]) -> list[Parameter]:
    delta = config.gated_delta
    assert delta is not None  # the config has gated-delta layers
    hidden, heads = config.hidden, delta.num_value_heads
    values = heads * delta.value_size
    inputs = {
        "linear_attn.in_proj_qkv.weight": (delta.channels, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
    }
    conv = {"linear_attn.conv1d.weight": (delta.channels, 1, delta.conv_width)}
    channels, by_heads = _channels(delta), ShardedRange(heads)
    by_inputs = (*channels, channels[-1], by_heads, by_heads)
    wide, narrow = (delta.channels, delta.conv_width), {"sections": (by_heads,), "axis": -1}
    out = {"linear_attn.out_proj.weight": (hidden, values)}
    return [
        stack(f"{prefix}inputs", layers, inputs, sections=by_inputs),
        stack(f"{prefix}conv", layers, conv, shape=wide, sections=channels),
        stack(f"{prefix}a_log", layers, {"linear_attn.A_log": (heads,)}, float32=True, **narrow),
        stack(
            f"{prefix}dt_bias", layers, {"linear_attn.dt_bias": (heads,)}, float32=True, **narrow
        ),
        norms_of(f"{prefix}norm", layers, "linear_attn.norm.weight", delta.value_size, 0.0),
        stack(f"{prefix}out", layers, out, sections=(ShardedRange(hidden),)),
    ]


def _channels(delta: GatedDeltaConfig) -> tuple[ShardedRange, ...]:
    """Returns the TP sections of the convolution channels: all q heads, k heads, v heads."""
    keys = ShardedRange(delta.num_key_heads * delta.key_size, delta.key_size)
    return keys, keys, ShardedRange(delta.num_value_heads * delta.value_size, delta.value_size)


def _mtp_parameters(config: ModelConfig) -> list[Parameter]:
    hidden, centre = config.hidden, config.norm_centre
    return [
        by_columns("mtp.fc", "mtp.fc.weight", (hidden, 2 * hidden)),
        single_norm("mtp.embedding_norm", "mtp.pre_fc_norm_embedding.weight", hidden, centre),
        single_norm("mtp.hidden_norm", "mtp.pre_fc_norm_hidden.weight", hidden, centre),
        single_norm("mtp.final_norm", "mtp.norm.weight", hidden, centre),
        *decoder_parameters("mtp.layer.", config, ["mtp.layers.0"], [config.draft_layer]),
    ]


def _bias(
    name: str,
    layers: Sequence[str],
    weights: Mapping[str, tuple[int, ...]],
    sections: tuple[ShardedRange, ...],
) -> Parameter:
    """Returns the bias of a stack of weights."""
    tensors = {f"{name.removesuffix('weight')}bias": shape[:1] for name, shape in weights.items()}
    return stack(f"{name}{BIAS}", layers, tensors, sections=sections, axis=-1)


def single(name: str, source: str, shape: tuple[int, ...]) -> Parameter:
    """Returns a parameter that is one tensor of the checkpoint."""
    return Parameter(name, shape, ((CheckpointTensor(source, shape),),), stacked=False)


def by_columns(name: str, source: str, shape: tuple[int, ...]) -> Parameter:
    """Returns an unstacked column-parallel matrix."""
    return replace(single(name, source, shape), sections=(ShardedRange(shape[0]),))


def head_of(name: str, source: str, shape: tuple[int, ...]) -> Parameter:
    """Returns the weight of an LM head, sharded over the vocabulary."""
    return replace(single(name, source, shape), sections=(vocab_section(shape[0]),))


def single_norm(name: str, source: str, width: int, centre: float) -> Parameter:
    """Returns the scale of an unstacked norm."""
    return replace(single(name, source, (width,)), float32=True, centre=centre)


def norms_of(name: str, layers: Sequence[str], source: str, width: int, centre: float) -> Parameter:
    """Returns the scales of a norm in each layer."""
    return replace(stack(name, layers, {source: (width,)}), float32=True, centre=centre)


def stack(
    name: str,
    layers: Sequence[str],
    tensors: Mapping[str, tuple[int, ...]],
    shape: tuple[int, ...] | None = None,
    float32: bool = False,
    sections: tuple[ShardedRange, ...] = (),
    axis: int = -2,
) -> Parameter:
    """Returns a parameter that concatenates `tensors` on axis 0 for each layer, reshaped to
    `shape`.
    """
    if shape is None:
        rows = sum(s[0] for s in tensors.values())
        shape = (rows, *next(iter(tensors.values()))[1:])
    pieces = tuple(
        tuple(CheckpointTensor(f"{layer}.{t}", s) for t, s in tensors.items()) for layer in layers
    )
    return Parameter(
        name,
        (len(layers), *shape),
        pieces,
        stacked=True,
        float32=float32,
        axis=axis,
        sections=sections,
    )
