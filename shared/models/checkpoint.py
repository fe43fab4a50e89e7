"""Which parameter lies where in the safetensors files of a checkpoint, under which of our names.

Our parameters are stacks, one per layer kind: `attention.inputs` holds layer after layer of the
fused query, key and value projection, `gated_delta.inputs` that of qkv, z, b and a. Matrices
are `[out, in]`, as in Hugging Face checkpoints.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from shared.models.config import ModelConfig

Array = Shaped[np.ndarray, "..."]
Weights = dict[str, Array]

PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
"""What released checkpoints put before the names used here; the first that fits is cut off."""

IGNORED = ("visual.", "vision_tower.", "rotary_emb.inv_freq")
"""Parts of names of tensors that a text model does without."""

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class CheckpointError(ValueError):
    """The folder cannot be loaded; the message is one sentence that names the fault."""


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint: its name without prefix, and its shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """One array of ours and the tensors it is made of.

    Attributes:
      name: Our name.
      shape: Our shape.
      pieces: Per layer of a stack (or once) the tensors that are joined on axis 0.
      stacked: Axis 0 of `shape` counts layers.
      float32: Kept in float32 whatever the dtype of the model.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[Source, ...], ...]
    stacked: bool
    float32: bool = False

    @property
    def sources(self) -> tuple[Source, ...]:
        """All tensors of the checkpoint that this parameter needs."""
        return tuple(source for piece in self.pieces for source in piece)


def parameters(config: ModelConfig, with_mtp: bool) -> list[Parameter]:
    """Every parameter of a model in the order they are loaded; `lm_head` is absent when tied.

    Raises:
      ValueError: `with_mtp` for a model whose config names no MTP layer.
    """
    if with_mtp and not config.has_mtp:
        raise ValueError("the model's config.json names no MTP layer (mtp_num_hidden_layers)")
    table = (config.vocab, config.hidden)
    tensors = [single("embed", "embed_tokens.weight", table)]
    tensors += decoder_parameters("", config, [f"layers.{i}" for i in range(config.num_layers)])
    tensors.append(single("final_norm", "norm.weight", (config.hidden,)))
    if not config.tied:
        tensors.append(single("lm_head", "lm_head.weight", table))
    return tensors + (_mtp_parameters(config) if with_mtp else [])


def decoder_parameters(
    prefix: str, config: ModelConfig, layers: Sequence[str], kinds: Sequence[str] | None = None
) -> list[Parameter]:
    """Stacks of the decoder layers that the checkpoint calls `layers`, of the given kinds.

    Args:
      prefix: Put before our names.
      kinds: Layer kinds, those of the config where None.
    """
    kinds = config.layer_kinds if kinds is None else kinds
    attention = [name for name, kind in zip(layers, kinds, strict=True) if kind == "attention"]
    delta = [name for name, kind in zip(layers, kinds, strict=True) if kind == "gated_delta"]
    norm = (config.hidden,)
    return [
        stack(f"{prefix}input_norm", layers, {"input_layernorm.weight": norm}),
        stack(f"{prefix}post_attention_norm", layers, {"post_attention_layernorm.weight": norm}),
        *mlp_parameters(f"{prefix}mlp.", config, layers),
        *(attention_parameters(f"{prefix}attention.", config, attention) if attention else []),
        *(_gated_delta(f"{prefix}gated_delta.", config, delta) if delta else []),
    ]


def norms_before(
    prefix: str, kinds: Sequence[str], with_inputs: bool = True
) -> list[tuple[str, list[int], str]]:
    """Which norm stands before which stack of weights, in the decoder layers of a prefix.

    Args:
      kinds: Of the layers.
      with_inputs: Whether the mixers read the normed stream alone; those of draft heads do not.

    Returns:
      The name of a stack of norms, the layers in it that matter, and the name of the weights.
    """
    norms = [(f"{prefix}post_attention_norm", list(range(len(kinds))), f"{prefix}mlp.gate_up")]
    for kind in sorted(set(kinds)) if with_inputs else []:
        numbers = [number for number, each in enumerate(kinds) if each == kind]
        norms.append((f"{prefix}input_norm", numbers, f"{prefix}{kind}.inputs"))
    return norms


def attention_parameters(
    prefix: str, config: ModelConfig, layers: Sequence[str], inputs: int | None = None
) -> list[Parameter]:
    """Stacks of the attention layers; with an output gate the q rows are [q | gate] per head.

    Args:
      inputs: Width that q, k and v are computed from, the hidden size where None.
    """
    inputs = inputs or config.hidden
    size = config.head_size
    queries, keys = config.num_heads * size, config.num_kv_heads * size
    qkv = {
        "self_attn.q_proj.weight": (queries * (2 if config.attention_gate else 1), inputs),
        "self_attn.k_proj.weight": (keys, inputs),
        "self_attn.v_proj.weight": (keys, inputs),
    }
    tensors = [
        stack(f"{prefix}inputs", layers, qkv),
        stack(f"{prefix}out", layers, {"self_attn.o_proj.weight": (config.hidden, queries)}),
    ]
    if config.qk_norm:
        tensors.append(stack(f"{prefix}q_norm", layers, {"self_attn.q_norm.weight": (size,)}))
        tensors.append(stack(f"{prefix}k_norm", layers, {"self_attn.k_norm.weight": (size,)}))
    return tensors


def mlp_parameters(prefix: str, config: ModelConfig, layers: Sequence[str]) -> list[Parameter]:
    """Stacks of the gated MLPs of some layers."""
    wide = (config.intermediate, config.hidden)
    gate_up = {"mlp.gate_proj.weight": wide, "mlp.up_proj.weight": wide}
    return [
        stack(f"{prefix}gate_up", layers, gate_up),
        stack(f"{prefix}down", layers, {"mlp.down_proj.weight": wide[::-1]}),
    ]


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
    return [
        stack(f"{prefix}inputs", layers, inputs),
        stack(f"{prefix}conv", layers, conv, shape=(delta.channels, delta.conv_width)),
        stack(f"{prefix}a_log", layers, {"linear_attn.A_log": (heads,)}, float32=True),
        stack(f"{prefix}dt_bias", layers, {"linear_attn.dt_bias": (heads,)}, float32=True),
        stack(f"{prefix}norm", layers, {"linear_attn.norm.weight": (delta.value_size,)}),
        stack(f"{prefix}out", layers, {"linear_attn.out_proj.weight": (hidden, values)}),
    ]


def _mtp_parameters(config: ModelConfig) -> list[Parameter]:
    hidden = (config.hidden,)
    return [
        single("mtp.fc", "mtp.fc.weight", (config.hidden, 2 * config.hidden)),
        single("mtp.embedding_norm", "mtp.pre_fc_norm_embedding.weight", hidden),
        single("mtp.hidden_norm", "mtp.pre_fc_norm_hidden.weight", hidden),
        single("mtp.final_norm", "mtp.norm.weight", hidden),
        *decoder_parameters("mtp.layer.", config, ["mtp.layers.0"], ["attention"]),
    ]


def single(name: str, source: str, shape: tuple[int, ...]) -> Parameter:
    """A parameter that is one tensor of the checkpoint, unchanged."""
    return Parameter(name, shape, ((Source(source, shape),),), stacked=False)


def stack(
    name: str,
    layers: Sequence[str],
    tensors: Mapping[str, tuple[int, ...]],
    shape: tuple[int, ...] | None = None,
    float32: bool = False,
) -> Parameter:
    """One parameter that stacks, per layer, `tensors` joined on axis 0 (and seen as `shape`)."""
    if shape is None:
        rows = sum(s[0] for s in tensors.values())
        shape = (rows, *next(iter(tensors.values()))[1:])
    pieces = tuple(tuple(Source(f"{layer}.{t}", s) for t, s in tensors.items()) for layer in layers)
    return Parameter(name, (len(layers), *shape), pieces, stacked=True, float32=float32)


class Checkpoint:
    """The tensors of an opened folder, found by their names without prefix, read one by one."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._slices: dict[str, Any] = {}
        self._handles = [_open_file(path) for path in files]
        self._owners: dict[str, tuple[Any, str]] = {}
        for handle in self._handles:
            for stored in handle.keys():  # noqa: SIM118 - the handle is no mapping
                name = _without_prefix(stored)
                if name in self._owners:
                    raise CheckpointError(f"the tensor {name} is stored twice in the checkpoint")
                self._owners[name] = (handle, stored)

    @property
    def names(self) -> Collection[str]:
        """The tensors that are there, without prefix."""
        return self._owners.keys()

    @property
    def has_mtp(self) -> bool:
        """Whether the files hold an MTP layer; a config may name one that is not there."""
        return any(name.startswith("mtp.") for name in self._owners)

    def has(self, name: str) -> bool:
        """Whether a tensor is there, by its name without prefix."""
        return name in self._owners

    def tensor(self, name: str) -> Array:
        """One tensor as it is stored, such as the integer map of a draft vocabulary."""
        self._header(name)
        handle, stored = self._owners[name]
        return handle.get_tensor(stored)

    def num_bytes(self, wanted: Sequence[Parameter]) -> int:
        """How many stored bytes loading these parameters reads."""
        return sum(self._num_bytes(source) for p in wanted for source in p.sources)

    def check(self, config: ModelConfig, with_mtp: bool) -> None:
        """Checks presence, dtype and shape of every tensor of a model before any is read.

        Tensors that the model's code would leave out (a bias, scales, experts) are refused too.

        Raises:
          CheckpointError: The first fault, by the name of its tensor.
        """
        if with_mtp and not self.has_mtp:
            raise CheckpointError("the checkpoint has no mtp.* tensors, so it cannot draft NEXTN")
        wanted = parameters(config, with_mtp)
        self.check_parameters(wanted)
        known = {source.name for parameter in wanted for source in parameter.sources}
        for name in sorted(self._owners.keys() - known):
            tied_head = config.tied and name == "lm_head.weight"
            if tied_head or name.startswith("mtp.") or any(part in name for part in IGNORED):
                continue
            raise CheckpointError(
                f"the tensor {name} has no place in a {config.family} model; "
                "use a checkpoint without it"
            )

    def check_parameters(self, wanted: Sequence[Parameter]) -> None:
        """Checks presence, dtype and shape of every tensor that these parameters need.

        Raises:
          CheckpointError: The first fault, by the name of its tensor.
        """
        for parameter in wanted:
            for source in parameter.sources:
                self._check_source(source)

    def load(
        self,
        parameter: Parameter,
        dtype: np.dtype | type,
        progress: Callable[[int], None] = lambda num_bytes: None,
    ) -> Array:
        """Reads one parameter, tensor by tensor.

        Args:
          dtype: What to convert to; a parameter that is kept in float32 ignores it.
          progress: Called after each tensor with the number of stored bytes just read.

        Raises:
          CheckpointError: A tensor is missing or has another shape or an unknown dtype.
        """
        loaded = np.empty(parameter.shape, np.float32 if parameter.float32 else dtype)
        for i, piece in enumerate(parameter.pieces):
            rows = loaded[i] if parameter.stacked else loaded
            start = 0
            for source in piece:
                self._check_source(source)
                stop = start + source.shape[0]
                rows[start:stop] = self.tensor(source.name).reshape(-1, *rows.shape[1:])
                start = stop
                progress(self._num_bytes(source))
        return loaded

    def _header(self, name: str) -> Any:
        if name not in self._slices:
            if name not in self._owners:
                raise CheckpointError(f"the checkpoint has no tensor {name}")
            handle, stored = self._owners[name]
            self._slices[name] = handle.get_slice(stored)
        return self._slices[name]

    def _num_bytes(self, source: Source) -> int:
        return math.prod(source.shape) * DTYPES[self._header(source.name).get_dtype()].itemsize

    def _check_source(self, source: Source) -> None:
        header = self._header(source.name)
        got, dtype = tuple(header.get_shape()), header.get_dtype()
        if got != source.shape:
            raise CheckpointError(
                f"the tensor {source.name} has shape {list(got)}, expected {list(source.shape)}"
            )
        if dtype not in DTYPES:
            raise CheckpointError(
                f"the tensor {source.name} is stored as {dtype}; "
                f"use a checkpoint in one of {', '.join(DTYPES)}"
            )


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Opens the safetensors files of a folder: a single file, or the shards of an index.

    Raises:
      CheckpointError: The folder or a file is missing, or a file is truncated or broken.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"the model folder {folder} does not exist")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"the model folder {folder} has no config.json")
    return Checkpoint(_weight_files(folder))


def load_all(folder: str | Path, config: ModelConfig, with_mtp: bool) -> Weights:
    """Loads every parameter of a checkpoint in float32.

    Raises:
      CheckpointError: See `open_checkpoint` and `Checkpoint.check`.
    """
    checkpoint = open_checkpoint(folder)
    checkpoint.check(config, with_mtp)
    wanted = parameters(config, with_mtp)
    return {parameter.name: checkpoint.load(parameter, np.float32) for parameter in wanted}


def save_checkpoint(
    folder: str | Path, config_dict: Mapping[str, Any], weights: Weights, num_shards: int = 1
) -> None:
    """Writes config.json and the weights under their Hugging Face names.

    Args:
      config_dict: Contents of config.json.
      weights: By our names; the MTP layer is written where `mtp.fc` is present.
      num_shards: 1 writes a single file, more write shards and an index.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_dict, indent=1), encoding="utf-8")
    config = ModelConfig.from_dict(config_dict)
    prefix = "model.language_model." if "text_config" in config_dict else "model."
    tensors = {}
    for parameter in parameters(config, "mtp.fc" in weights):
        tensors.update(split(parameter, weights[parameter.name], prefix))
    _save_files(folder, tensors, num_shards)


def split(parameter: Parameter, array: Array, prefix: str) -> Weights:
    """Takes one of our arrays apart into the tensors of a checkpoint."""
    tensors = {}
    for i, piece in enumerate(parameter.pieces):
        rows = array[i] if parameter.stacked else array
        start = 0
        for source in piece:
            part = rows[start : start + source.shape[0]].reshape(source.shape)
            whole = source.name.startswith(("lm_head.", "mtp."))
            tensors[source.name if whole else prefix + source.name] = np.ascontiguousarray(part)
            start += source.shape[0]
    return tensors


def _save_files(folder: Path, tensors: Weights, num_shards: int) -> None:
    if num_shards == 1:
        save_file(tensors, folder / SINGLE_FILE)
        return
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::num_shards])
        save_file(part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).is_file():
        raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    try:
        weight_map = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX_FILE} is no valid index of shards") from error
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"the shard {name} is missing from the model folder {folder}")
    return [folder / name for name in names]


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or no safetensors file: {error}") from error


def _without_prefix(name: str) -> str:
    return next((name[len(p) :] for p in PREFIXES if name.startswith(p)), name)
