"""Parameters of a model in loading order, and the checkpoint tensors that each is loaded from.

Parameters are stacks, one for each layer group: `attention.inputs` contains the fused QKV
projection of layer after layer, `gated_delta.inputs` the fused projection of qkv, z, b and a.
Matrices are `[out, in]`, as in Hugging Face checkpoints. The matrices of a layer's experts are
stacked again: `experts.gate_up` is `[layers, experts, out, in]`. The stacks of a mixer or an MLP
are defined by its config.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shared.models import per_layer
from shared.models.config import ModelConfig
from shared.models.groups import group, parallel_groups
from shared.models.layers import LayerConfig
from shared.models.mtp import MTP_FC, MTP_LAYER, MtpLayers
from shared.models.parameter import CheckpointTensor, Parameter
from shared.models.stacks import by_columns, head_of, norms_of, single, single_norm, stack

DRAFT_HEAD = "draft_lm_head"
"""Name of the parameter of `draft_head`."""


def parameters(config: ModelConfig, with_mtp: bool) -> list[Parameter]:
    """Returns all parameters of a model in loading order; `lm_head` is absent if tied.

    Raises:
      ValueError: `with_mtp` is set for a model whose config names no MTP layer.
    """
    table = (config.vocab, config.hidden)
    tensors = [single("embed", "embed_tokens.weight", table), *per_layer.parameters(config)]
    tensors += decoder_parameters("", config, [f"layers.{i}" for i in range(config.num_layers)])
    tensors.append(single_norm("final_norm", "norm.weight", config.hidden, config.norm_centre))
    if not config.tied:
        tensors.append(head_of("lm_head", "lm_head.weight", table))
    if with_mtp:
        if config.mtp is None:
            raise ValueError("the model's config.json names no MTP layer")
        tensors += _mtp_parameters(config, config.mtp)
    return [_as_stored(each, config.tensor_names) for each in tensors]


_PLACE = re.compile(r"(?:mtp\.)?(?:layers\.\d+\.)?")


def _as_stored(parameter: Parameter, names: Sequence[tuple[str, str]]) -> Parameter:
    """Returns a parameter that is loaded from the tensors of a family's own names."""
    if not names:
        return parameter
    pieces = (tuple(_renamed(x, names) for x in sources) for sources in parameter.pieces)
    return replace(parameter, pieces=tuple(pieces))


def _renamed(source: CheckpointTensor, names: Sequence[tuple[str, str]]) -> CheckpointTensor:
    place = _PLACE.match(source.name)
    assert place is not None  # the pattern matches the empty string
    name = source.name[place.end() :]
    for usual, stored in names:
        if name.startswith(usual):
            name = stored + name.removeprefix(usual)
            break
    parts = tuple(_renamed(part, names) for part in source.parts)
    return replace(source, name=place[0] + name, parts=parts)


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
    mlps_of: Sequence[str] | None = None,
) -> list[Parameter]:
    """Returns the stacks of the decoder layers with the checkpoint prefixes `layers`.

    Args:
      prefix: Prefix of the parameter names.
      config: Config of the model.
      layers: Prefixes of the layers in the checkpoint.
      like: Config of each layer; None for the layers of `config`.
      mlps_of: Prefixes of their MLPs, if those are stored as layers of their own.
    """
    like = config.layers if like is None else like
    mixers = (*group([each.mixer for each in like]), *parallel_groups(like))
    mlps = group([each.mlp for each in like])
    norms, centre = NORMS_BEHIND if config.post_norm else NORMS, config.norm_centre
    norms = NORMS_AROUND if config.sandwich_norms else norms
    if any(each.is_single for each in like):
        norms = {"input_norm": NORMS["input_norm"]}
    tensors = [norms_of(f"{prefix}{x}", layers, y, config.hidden, centre) for x, y in norms.items()]
    if mlps_of is not None:
        name, source = f"{prefix}post_attention_norm", norms["post_attention_norm"]
        tensors[-1] = norms_of(name, mlps_of, source, config.hidden, centre)
    if config.has_layer_scalars:
        scalars = {"layer_scalar": (1,)}
        tensors.append(stack(f"{prefix}layer_scalar", layers, scalars, float32=True))
    tensors += per_layer.layer_parameters(prefix, config, layers)
    for each in (*mlps, *sorted(mixers, key=lambda group: group.name)):
        stored = layers if mlps_of is None or each in mixers else mlps_of
        of_group = [stored[i] for i in each.layers]
        tensors += each.config.parameters(f"{prefix}{each.name}.", of_group, config.stack_settings)
    return tensors


def unread_kv(config: ModelConfig) -> Iterator[str]:
    """Yields the name prefixes of key and value tensors in layers that read the KV of another
    layer; released checkpoints contain them.
    """
    for index, layer in enumerate(config.layers):
        if layer.kv_shared_layer_index is not None or layer.reads_target_kv:
            yield from (f"layers.{index}.self_attn.{x}_" for x in "kv")


NORMS = {
    "input_norm": "input_layernorm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
}
NORMS_BEHIND = {
    "mixer_end_norm": "post_attention_layernorm.weight",
    "feed_end_norm": "post_feedforward_layernorm.weight",
}
NORMS_AROUND = NORMS_BEHIND | {
    "input_norm": "input_layernorm.weight",
    "post_attention_norm": "pre_feedforward_layernorm.weight",
}
"""Norms of a decoder layer by our names: before its mixer and its MLP, after them, or both."""


def _mtp_parameters(config: ModelConfig, mtp: MtpLayers) -> list[Parameter]:
    hidden, stored = config.hidden, mtp.format
    norms = {
        "embedding_norm": stored.embedding_norm,
        "hidden_norm": stored.hidden_norm,
        "final_norm": stored.final_norm,
    }
    return [
        by_columns(MTP_FC, mtp.tensor(stored.fc), (hidden, 2 * hidden)),
        *(
            single_norm(f"mtp.{name}", mtp.tensor(tensor), hidden, config.norm_centre)
            for name, tensor in norms.items()
        ),
        *decoder_parameters(MTP_LAYER, config, [mtp.layer], [config.draft_layer], [mtp.mlp]),
    ]
