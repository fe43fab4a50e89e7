"""Weights of a model: tensors on a device, with one record per layer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from shared.boundary.tp_group import SINGLE_RANK, TPGroup
from shared.drafts.checkpoint import check_head, head_parameters, maps_of_rank, token_maps
from shared.drafts.config import DraftConfig, DraftHead
from shared.models.config import ModelConfig
from shared.models.dummy_weights import DummyCheckpoint, Stored
from shared.models.formats.weight_format import QuantizedFormat
from shared.models.parameter import Parameter, of_rank
from shared.models.parameter_arrays import shard_array
from shared.models.parameters import DRAFT_HEAD, divided_parameters
from shared.models.stacks import BIAS
from shared.models.tp_sharding import shard_config
from shared.models.vision_config import VisionConfig
from shared.models.vision_parameters import check_vision_encoder
from torch_impl import dummy_weights
from torch_impl.formats import registry
from torch_impl.layer_weights import layers_of, matrix_of
from torch_impl.model_weights import (
    AssistantWeights,
    BlockWeights,
    DraftVocabHead,
    EncoderBlock,
    HeadWeights,
    LayerNorm,
    MTPLayer,
    VisionEncoderWeights,
    Weights,
)
from torch_impl.ops.gemm.linear import Matrix
from torch_impl.ops.gemm.per_layer import PerLayerTable

Arrays = Mapping[str, Shaped[np.ndarray, "..."]]

Tensors = dict[str, Any]
"""Tensors by name; a stack that stays quantised is a `Matrix`."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The types that a model can run in, by name."""


def load(
    checkpoint: Stored,
    config: ModelConfig,
    with_mtp: bool,
    dtype: str,
    device: torch.device,
    progress: Callable[[int], None],
    formats: Mapping[str, QuantizedFormat],
    group: TPGroup = SINGLE_RANK,
    token_map: Sequence[int] | None = None,
) -> Weights:
    """Reads a rank's shard of a checkpoint to the device, parameter by parameter.

    Args:
      checkpoint: Files of the model.
      config: Config of the whole model.
      with_mtp: True to load the MTP layer.
      dtype: A name of `DTYPES`.
      device: Device of the rank.
      progress: Called with the number of stored bytes after each tensor.
      formats: Formats of the parameters that stay quantised, by name.
      group: TP group of the rank.
      token_map: Tokens that are drafted; see `shared.drafts.drafter_spec.DrafterSpec`.

    Raises:
      CheckpointError: See `Checkpoint.load`.
    """
    tensors: Tensors = {}
    wanted = divided_parameters(config, with_mtp, group.count, token_map)
    for parameter in of_rank(wanted, group.rank, group.count):
        name = parameter.name
        if (format := formats.get(name)) is None:
            tensors[name] = _loaded(checkpoint, parameter, dtype, device, progress)
        else:
            planes = registry.read(checkpoint, parameter, format, device, progress)
            tensors[name] = Matrix(format, planes)
    return _assemble(config, tensors, token_map)


def from_arrays(
    config: ModelConfig,
    arrays: Arrays,
    dtype: str,
    device: torch.device,
    group: TPGroup = SINGLE_RANK,
    token_map: Sequence[int] | None = None,
) -> Weights:
    """Copies a rank's shard of arrays by the names of `shared.models.parameters` to the device."""
    wanted = divided_parameters(config, "mtp.fc" in arrays, group.count, token_map)
    return _assemble(config, _from_arrays(wanted, arrays, dtype, device, group), token_map)


def load_head(
    checkpoint: Stored,
    config: DraftConfig,
    dtype: str,
    device: torch.device,
    progress: Callable[[int], None],
    group: TPGroup = SINGLE_RANK,
) -> HeadWeights | BlockWeights | AssistantWeights:
    """Reads a draft head to the device, parameter by parameter; see `load`.

    Raises:
      CheckpointError: See `shared.drafts.checkpoint.check_head`.
    """
    wanted = of_rank(check_head(checkpoint, config), group.rank, group.count)
    tensors = {p.name: _loaded(checkpoint, p, dtype, device, progress) for p in wanted}
    maps = maps_of_rank(token_maps(checkpoint, config), group.rank, group.count)
    tensors |= {name: _tensor(values, device) for name, values in maps.items()}
    return _head(_local_head(config, group), tensors)


def load_vision_encoder(
    checkpoint: Stored,
    config: VisionConfig,
    dtype: str,
    device: torch.device,
    progress: Callable[[int], None],
) -> VisionEncoderWeights:
    """Reads a vision encoder to the device; it is replicated on all ranks. See `load`.

    Raises:
      CheckpointError: See `shared.models.vision_parameters.check_vision_encoder`.
    """
    wanted = check_vision_encoder(checkpoint, config)
    tensors = {p.name: _loaded(checkpoint, p, dtype, device, progress) for p in wanted}
    return _tower(config, tensors)


def head_from_arrays(
    head: DraftHead, dtype: str, device: torch.device, group: TPGroup = SINGLE_RANK
) -> HeadWeights | BlockWeights | AssistantWeights:
    """Copies a rank's shard of a draft head's arrays to the device; some may be absent."""
    wanted = head_parameters(head.config, None)
    tensors = _from_arrays(wanted, head.weights, dtype, device, group)
    maps = maps_of_rank(head.weights, group.rank, group.count)
    tensors |= {name: _tensor(values.copy(), device) for name, values in maps.items()}
    return _head(_local_head(head.config, group), tensors)


def _local_head(config: DraftConfig, group: TPGroup) -> DraftConfig:
    return replace(config, layer=shard_config(config.layer, group.count))


def _from_arrays(
    wanted: Sequence[Parameter], arrays: Arrays, dtype: str, device: torch.device, group: TPGroup
) -> dict[str, Tensor]:
    """Returns the wanted parameters that are present; a head may omit some."""
    tensors = {}
    for parameter in of_rank(wanted, group.rank, group.count):
        name = parameter.tied_to or parameter.name
        if name in arrays:
            tensor = _tensor(np.array(shard_array(parameter, arrays[name])), device)
            tensors[parameter.name] = _centred(parameter, tensor.to(_type_of(parameter, dtype)))
    return tensors


def _centred(parameter: Parameter, stored: Tensor) -> Tensor:
    return stored.add_(parameter.centre) if parameter.centre else stored


def _type_of(parameter: Parameter, dtype: str) -> torch.dtype:
    return torch.float32 if parameter.float32 else DTYPES[dtype]


def _loaded(
    checkpoint: Stored,
    parameter: Parameter,
    dtype: str,
    device: torch.device,
    progress: Callable[[int], None],
) -> Tensor:
    """Loads one parameter: read to the device tensor by tensor, or generated there."""
    kind = _type_of(parameter, dtype)
    if isinstance(checkpoint, DummyCheckpoint):
        made = dummy_weights.parameter_array(
            parameter, checkpoint.init_spec(parameter), kind, device
        )
        progress(checkpoint.num_bytes([parameter]))
        if (encoding := checkpoint.encoding_of(parameter)) is not None:
            made = registry.SCALED[type(encoding)](made, parameter, encoding)
        return _centred(parameter, made)
    new = torch.empty if parameter.is_filled else torch.zeros
    read = new(parameter.shape, dtype=kind, device=device)
    for at, values in checkpoint.pieces(parameter, progress):
        read[at].copy_(registry.host_tensor(values))
    return _centred(parameter, read)


def _tensor(array: Shaped[np.ndarray, "..."], device: torch.device) -> Tensor:
    return registry.host_tensor(array).to(device)


def _assemble(config: ModelConfig, tensors: Tensors, token_map: Sequence[int] | None) -> Weights:
    embed, draft_rows = tensors["embed"], None
    if token_map is not None:
        ids = torch.tensor(token_map, dtype=torch.int32, device=embed.device)
        draft_rows = DraftVocabHead(Matrix.plain(tensors[DRAFT_HEAD]), ids)
    return Weights(
        embed=embed,
        lm_head=Matrix.plain(tensors.get("lm_head", embed)),
        final_norm=tensors["final_norm"],
        layers=layers_of(tensors, "", config.layers),
        mtp=_mtp(config, tensors) if "mtp.fc" in tensors else None,
        draft_rows=draft_rows,
        per_layer=_per_layer(tensors),
    )


def _per_layer(tensors: Tensors) -> PerLayerTable | None:
    if "per_layer.embed" not in tensors:
        return None
    embed, projection, norm = (tensors[f"per_layer.{x}"] for x in ("embed", "projection", "norm"))
    return PerLayerTable(embed, Matrix.plain(projection), norm)


def _mtp(config: ModelConfig, tensors: Tensors) -> MTPLayer:
    norms = ("embedding_norm", "hidden_norm", "final_norm")
    return MTPLayer(
        fc=Matrix.plain(tensors["mtp.fc"]),
        layer=layers_of(tensors, "mtp.layer.", [config.draft_layer])[0],
        **{name: tensors[f"mtp.{name}"] for name in norms},
    )


def _tower(config: VisionConfig, tensors: Tensors) -> VisionEncoderWeights:
    def matrix(name: str) -> Matrix:
        return Matrix.plain(tensors[f"vision.{name}"], tensors[f"vision.{name}{BIAS}"])

    def norm(name: str) -> LayerNorm:
        return LayerNorm(tensors[f"vision.{name}"], tensors[f"vision.{name}{BIAS}"])

    def block(i: int) -> EncoderBlock:
        def norm_of(name: str) -> LayerNorm:
            stacks = norm(name)
            return LayerNorm(stacks.weight[i], stacks.bias[i])

        return EncoderBlock(
            attention_norm=norm_of("attention_norm"),
            inputs=matrix_of(tensors, "vision.attention.inputs", i),
            out=matrix_of(tensors, "vision.attention.out", i),
            mlp_norm=norm_of("mlp_norm"),
            up=matrix_of(tensors, "vision.mlp.up", i),
            down=matrix_of(tensors, "vision.mlp.down", i),
        )

    return VisionEncoderWeights(
        patches=matrix("patches"),
        places=tensors["vision.places"],
        blocks=tuple(map(block, range(config.depth))),
        merger_norm=norm("merger_norm"),
        merger_up=matrix("merger.up"),
        merger_down=matrix("merger.down"),
    )


def _head(config: DraftConfig, tensors: Tensors) -> HeadWeights | BlockWeights | AssistantWeights:
    if config.traits.reads_target_kv:
        layers = layers_of(tensors, "", config.layer.layers)
        return AssistantWeights.of(config, layers, tensors)
    return _block(config, tensors) if config.block else _eagle(config, tensors)


def _block(config: DraftConfig, tensors: Tensors) -> BlockWeights:
    layers = layers_of(tensors, "layer.", config.layer.layers)
    return BlockWeights.of(config, layers, tensors)


def _own_head(tensors: Tensors) -> Matrix | None:
    return Matrix.plain(tensors["lm_head"]) if "lm_head" in tensors else None


def _eagle(config: DraftConfig, tensors: Tensors) -> HeadWeights:
    hidden_norm, like = tensors.get("layer.hidden_norm"), config.layer.layers
    return HeadWeights(
        config=config,
        fc=Matrix.plain(tensors["fc"]),
        fc_bias=tensors.get("fc_bias"),
        aux_norm=tensors.get("aux_norm"),
        input_norm=tensors.get("input_norm"),
        hidden_norm=None if hidden_norm is None else hidden_norm[0],
        layers=(
            *layers_of(tensors, "layer.", like[:1]),
            *layers_of(tensors, "later.", like[1:]),
        ),
        final_norm=tensors.get("final_norm"),
        lm_head=_own_head(tensors),
        embed=tensors.get("embed"),
        draft_ids=tensors.get("draft_ids"),
    )
