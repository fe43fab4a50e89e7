"""Weights of a model: named arrays on a device, and the records that a step reads.

A program takes the arrays as arguments, with one stack `[layers, ...]` per layer parameter, and
builds the records while it is traced. Norm weights are float32 and include the offset of
zero-centred norms.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Int, Shaped

from jax_impl import dummy_weights
from jax_impl.formats import registry
from jax_impl.layer_weights import layers_of
from jax_impl.model_weights import (
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
from jax_impl.ops import reads_stacks
from jax_impl.ops.gemm.linear import Matrix
from jax_impl.ops.gemm.per_layer import PerLayerTable
from shared.boundary.tp_group import SINGLE_RANK, TPGroup
from shared.drafts.checkpoint import check_head, head_parameters, maps_of_rank, token_maps
from shared.drafts.config import DraftConfig, DraftHead
from shared.models.checkpoint import Checkpoint
from shared.models.config import ModelConfig
from shared.models.dummy_weights import DummyCheckpoint, Stored
from shared.models.formats.weight_format import QuantizedFormat
from shared.models.parameter import Parameter, of_rank
from shared.models.parameter_arrays import shard_array
from shared.models.parameters import DRAFT_HEAD, divided_parameters
from shared.models.stacks import BIAS
from shared.models.vision_config import VisionConfig
from shared.models.vision_parameters import check_vision_encoder

Arrays = Mapping[str, Shaped[np.ndarray, "..."] | Shaped[jax.Array, "..."]]

LARGE = 1 << 24
"""Elements from which on a parameter is copied to the device in pieces, never as a whole in host
memory. For smaller ones, compiling the program that writes a piece would cost more."""


class Loaded(NamedTuple):
    """Loaded weights, by the names of `shared.models.parameters` and of heads.

    Attributes:
      alone: Parameters that are not per layer.
      stacks: Per-layer parameters, stacked; those that stay quantised are matrices.
    """

    alone: dict[str, jax.Array]
    stacks: dict[str, Any]

    @property
    def named(self) -> dict[str, Any]:
        """Returns all arrays by name."""
        return self.alone | self.stacks

    @property
    def has_mtp(self) -> bool:
        """Returns True if the MTP layer was loaded."""
        return "mtp.fc" in self.alone


class Loadable(Protocol):
    """Source of weights, safetensors or Orbax; see `shared.models.checkpoint.Checkpoint`."""

    def load(
        self, parameter: Parameter, dtype: np.dtype | type, progress: Callable[[int], None]
    ) -> Shaped[np.ndarray, "..."]: ...


def load(
    checkpoint: Loadable,
    config: ModelConfig,
    with_mtp: bool,
    dtype: np.dtype | type,
    device: jax.Device,
    progress: Callable[[int], None],
    formats: Mapping[str, QuantizedFormat],
    group: TPGroup = SINGLE_RANK,
    token_map: Sequence[int] | None = None,
) -> Loaded:
    """Reads a rank's shard of a checkpoint to the device, parameter by parameter.

    Args:
      checkpoint: Files of the model.
      config: Config of the whole model.
      with_mtp: True to load the MTP layer.
      dtype: Dtype of the weights, float32 or bfloat16.
      device: Device of the rank.
      progress: Called with the number of stored bytes after each tensor.
      formats: Formats of the parameters that stay quantised, by name; all are stacks.
      group: TP group of the rank.
      token_map: Tokens that are drafted; see `shared.drafts.drafter_spec.DrafterSpec`.

    Raises:
      CheckpointError: A tensor is missing or has another shape.
    """
    wanted = divided_parameters(config, with_mtp, group.count, token_map)
    wanted = of_rank(wanted, group.rank, group.count)
    read = partial(_loaded, checkpoint, dtype=dtype, device=device, progress=progress)
    loaded = _sorted_out([p for p in wanted if p.name not in formats], read, dtype, device)
    for parameter in (p for p in wanted if p.name in formats):
        assert isinstance(checkpoint, Checkpoint | DummyCheckpoint)  # others have none
        format = formats[parameter.name]
        planes = registry.read(checkpoint, parameter, format, device, progress)
        loaded.stacks[parameter.name] = Matrix(format, planes)
    return _with_ids(loaded, token_map, device)


def load_head(
    checkpoint: Stored,
    config: DraftConfig,
    dtype: np.dtype | type,
    device: jax.Device,
    progress: Callable[[int], None],
    group: TPGroup = SINGLE_RANK,
) -> Loaded:
    """Reads a draft head to the device, parameter by parameter; see `load`.

    Raises:
      CheckpointError: See `shared.drafts.checkpoint.check_head`.
    """
    wanted = of_rank(check_head(checkpoint, config), group.rank, group.count)
    read = partial(_loaded, checkpoint, dtype=dtype, device=device, progress=progress)
    maps = maps_of_rank(token_maps(checkpoint, config), group.rank, group.count)
    return _with_maps(_sorted_out(wanted, read, dtype, device), maps, device)


def load_vision_encoder(
    checkpoint: Stored,
    config: VisionConfig,
    dtype: np.dtype | type,
    device: jax.Device,
    progress: Callable[[int], None],
) -> Loaded:
    """Reads a vision encoder to the device; it is replicated on all ranks. See `load`.

    Raises:
      CheckpointError: See `shared.models.vision_parameters.check_vision_encoder`.
    """
    read = partial(_loaded, checkpoint, dtype=dtype, device=device, progress=progress)
    return _sorted_out(check_vision_encoder(checkpoint, config), read, dtype, device)


def from_arrays(
    arrays: Arrays,
    config: ModelConfig,
    dtype: np.dtype | type,
    device: jax.Device,
    group: TPGroup = SINGLE_RANK,
    token_map: Sequence[int] | None = None,
) -> Loaded:
    """Copies a rank's shard of arrays by the names of `shared.models.parameters` to the device."""
    wanted = divided_parameters(config, "mtp.fc" in arrays, group.count, token_map)
    wanted = of_rank(wanted, group.rank, group.count)
    return _with_ids(
        _sorted_out(wanted, partial(_share_of, arrays), dtype, device), token_map, device
    )


def head_from_arrays(
    head: DraftHead, dtype: np.dtype | type, device: jax.Device, group: TPGroup = SINGLE_RANK
) -> Loaded:
    """Copies a rank's shard of a draft head's arrays to the device; some may be absent."""
    wanted = [p for p in head_parameters(head.config, None) if p.name in head.weights]
    read = partial(_share_of, head.weights)
    loaded = _sorted_out(of_rank(wanted, group.rank, group.count), read, dtype, device)
    return _with_maps(loaded, maps_of_rank(head.weights, group.rank, group.count), device)


def _with_ids(loaded: Loaded, ids: Sequence[int] | None, device: jax.Device) -> Loaded:
    return loaded if ids is None else _with_maps(loaded, {"draft_ids": ids}, device)


def _with_maps(loaded: Loaded, maps: Mapping[str, Any], device: jax.Device) -> Loaded:
    for name, values in maps.items():
        loaded.alone[name] = jax.device_put(jnp.asarray(values, np.int32), device)
    return loaded


def _share_of(
    arrays: Arrays, parameter: Parameter
) -> Shaped[np.ndarray, "..."] | Shaped[jax.Array, "..."]:
    array = arrays[parameter.tied_to or parameter.name]
    return array if parameter.whole is None else shard_array(parameter, np.asarray(array))


def _sorted_out(
    wanted: Sequence[Parameter],
    read: Callable[[Parameter], Shaped[np.ndarray, "..."] | Shaped[jax.Array, "..."]],
    dtype: np.dtype | type,
    device: jax.Device,
) -> Loaded:
    loaded = Loaded({}, {})
    for parameter in wanted:
        where = loaded.stacks if parameter.stacked else loaded.alone
        where[parameter.name] = _placed(parameter, read(parameter), dtype, device)
    return loaded


def _loaded(
    checkpoint: Loadable,
    parameter: Parameter,
    dtype: np.dtype | type,
    device: jax.Device,
    progress: Callable[[int], None],
) -> Shaped[np.ndarray, "..."] | Shaped[jax.Array, "..."]:
    """Loads one parameter: via host memory, in pieces if large, or generated on the device."""
    kind = np.float32 if parameter.float32 else dtype
    if isinstance(checkpoint, DummyCheckpoint):
        made = dummy_weights.parameter_array(
            parameter, checkpoint.init_spec(parameter), kind, device
        )
        progress(checkpoint.num_bytes([parameter]))
        if (encoding := checkpoint.encoding_of(parameter)) is not None:
            made = registry.SCALED[type(encoding)](made, parameter, encoding)
        return made
    is_large = math.prod(parameter.shape) >= LARGE
    if not (is_large and isinstance(checkpoint, Checkpoint)):
        return checkpoint.load(parameter, dtype, progress)
    read = jnp.zeros(parameter.shape, kind, device=device)
    for at, values in checkpoint.pieces(parameter, progress):
        first = [each.start if isinstance(each, slice) else each for each in at]
        piece = values.reshape((1,) * (read.ndim - values.ndim) + values.shape)
        read = _written(read, piece, jnp.asarray(first, np.int32))
    return read


@partial(jax.jit, donate_argnums=0)
def _written(
    stack: Shaped[jax.Array, "..."], piece: Shaped[jax.Array, "..."], first: Int[jax.Array, " axes"]
) -> Shaped[jax.Array, "..."]:
    """A stack of layers with a piece of one, which begins at `first`; in its own memory.

    Args:
      first: On the outer axes; the piece spans the others.
    """
    start = [*first, *[0] * (stack.ndim - len(first))]
    return lax.dynamic_update_slice(stack, piece.astype(stack.dtype), start)


def _placed(
    parameter: Parameter,
    array: Shaped[np.ndarray, "..."] | Shaped[jax.Array, "..."],
    dtype: np.dtype | type,
    device: jax.Device,
) -> Shaped[jax.Array, "..."]:
    kind = np.float32 if parameter.float32 else dtype
    if parameter.centre:
        array = array.astype(np.float32) + np.float32(parameter.centre)
    return jax.device_put(jnp.asarray(array, kind), device)


def are_read_in_stacks(loaded: Loaded, device: jax.Device) -> bool:
    """Returns True if a layer gets stacked weights for kernels, not its own matrices."""
    stacks = loaded.stacks
    name = next(name for name in stacks if name.endswith("attention.out"))
    is_quantised = isinstance(stacks[name], Matrix)  # kernels read it with rows of this dtype
    return reads_stacks(loaded.alone["embed"] if is_quantised else stacks[name], device)


# Records of the arrays of a trace


def weights_of(config: ModelConfig, loaded: Loaded, in_stacks: bool) -> Weights:
    """Builds a model's records; `in_stacks` is the result of `are_read_in_stacks`."""
    alone, rows = loaded.alone, None
    if DRAFT_HEAD in alone:
        rows = DraftVocabHead(Matrix.plain(alone[DRAFT_HEAD]), alone["draft_ids"])
    return Weights(
        embed=alone["embed"],
        lm_head=Matrix.plain(alone.get("lm_head", alone["embed"])),
        final_norm=alone["final_norm"],
        layers=layers_of(loaded.stacks, "", config.layers, in_stacks),
        mtp=_mtp(config, loaded, in_stacks) if loaded.has_mtp else None,
        draft_rows=rows,
        per_layer=_per_layer(alone),
    )


def _per_layer(alone: Mapping[str, jax.Array]) -> PerLayerTable | None:
    if "per_layer.embed" not in alone:
        return None
    embed, projection, norm = (alone[f"per_layer.{x}"] for x in ("embed", "projection", "norm"))
    return PerLayerTable(embed, Matrix.plain(projection), norm)


def head_of(
    config: DraftConfig, loaded: Loaded, in_stacks: bool
) -> HeadWeights | BlockWeights | AssistantWeights:
    """Builds a draft head's records; see `weights_of`."""
    if config.traits.reads_target_kv:
        layers = layers_of(loaded.stacks, "", config.layer.layers, in_stacks)
        return AssistantWeights.of(config, layers, loaded.alone)
    return (_block if config.block else _eagle)(config, loaded, in_stacks)


def vision_encoder_of(loaded: Loaded) -> VisionEncoderWeights:
    """Builds a vision encoder's records; its blocks share the stacks."""

    def matrix(name: str) -> Matrix:
        named = loaded.named
        return Matrix.plain(named[f"vision.{name}"], None, named[f"vision.{name}{BIAS}"])

    def norm(name: str) -> LayerNorm:
        return LayerNorm(*(loaded.named[f"vision.{name}{end}"] for end in ("", BIAS)))

    return VisionEncoderWeights(
        patches=matrix("patches"),
        places=loaded.alone["vision.places"],
        blocks=EncoderBlock(
            attention_norm=norm("attention_norm"),
            inputs=matrix("attention.inputs"),
            out=matrix("attention.out"),
            mlp_norm=norm("mlp_norm"),
            up=matrix("mlp.up"),
            down=matrix("mlp.down"),
        ),
        merger_norm=norm("merger_norm"),
        merger_up=matrix("merger.up"),
        merger_down=matrix("merger.down"),
    )


def _mtp(config: ModelConfig, loaded: Loaded, in_stacks: bool) -> MTPLayer:
    return MTPLayer(
        fc=Matrix.plain(loaded.alone["mtp.fc"]),
        layer=layers_of(loaded.stacks, "mtp.layer.", [config.draft_layer], in_stacks)[0],
        **{x: loaded.alone[f"mtp.{x}"] for x in ("embedding_norm", "hidden_norm", "final_norm")},
    )


def _block(config: DraftConfig, loaded: Loaded, in_stacks: bool) -> BlockWeights:
    layers = layers_of(loaded.stacks, "layer.", config.layer.layers, in_stacks)
    return BlockWeights.of(config, layers, loaded.alone)


def _own_head(loaded: Loaded) -> Matrix | None:
    return Matrix.plain(loaded.alone["lm_head"]) if "lm_head" in loaded.alone else None


def _eagle(config: DraftConfig, loaded: Loaded, in_stacks: bool) -> HeadWeights:
    alone, hidden_norm = loaded.alone, loaded.stacks.get("layer.hidden_norm")
    like = config.layer.layers
    return HeadWeights(
        config=config,
        fc=Matrix.plain(alone["fc"]),
        fc_bias=alone.get("fc_bias"),
        aux_norm=loaded.stacks.get("aux_norm"),
        input_norm=alone.get("input_norm"),
        hidden_norm=None if hidden_norm is None else hidden_norm[0],
        layers=(
            *layers_of(loaded.stacks, "layer.", like[:1], in_stacks),
            *layers_of(loaded.stacks, "later.", like[1:], in_stacks),
        ),
        final_norm=alone.get("final_norm"),
        lm_head=_own_head(loaded),
        embed=alone.get("embed"),
        draft_ids=alone.get("draft_ids"),
    )
