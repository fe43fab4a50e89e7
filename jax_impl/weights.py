"""The weights of a model as NNX modules: one stack `[layers, ...]` per layer kind and parameter.

Names are those of `shared.models.parameters`. Norm weights are float32 with the 1 of zero-centred
norms added; everything else has the model's dtype, but for what the checkpoint layout keeps in
float32.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Float, Int, Shaped

from jax_impl import dummy
from jax_impl.ops import linear
from jax_impl.ops.linear import Matrix
from shared.drafts import checkpoint as draft_checkpoint
from shared.drafts.config import DraftConfig, DraftHead
from shared.models.checkpoint import Checkpoint
from shared.models.config import ModelConfig
from shared.models.dummy import DummyCheckpoint, Stored, size_of
from shared.models.parameters import (
    BIAS,
    NORMS,
    NORMS_BEHIND,
    Parameter,
    norms_before,
    parameters,
)

Arrays = Mapping[str, Shaped[np.ndarray, "..."] | Shaped[jax.Array, "..."]]


LARGE = 1 << 24
"""Numbers from which on a stack is read to the device tensor by tensor and never lies as a whole in
main memory; for less, compiling what writes a piece would cost more."""


class Attention(NamedTuple):
    """An attention layer; the norms, alone or in their stack, are None in a model without them."""

    inputs: Matrix
    out: Matrix
    q_norm: Float[jax.Array, "*L queries"] | None
    k_norm: Float[jax.Array, "*L keys"] | None


class GatedDelta(NamedTuple):
    """A gated-delta layer; its small parameters are those of all where matrices are in stacks."""

    inputs: Matrix
    conv: Float[jax.Array, "*L C 4"]
    a_log: Float[jax.Array, "*L H"]
    dt_bias: Float[jax.Array, "*L H"]
    norm: Float[jax.Array, "*L V"]
    out: Matrix


class Mlp(NamedTuple):
    """A gated MLP; `gate_up` holds the gate's rows, then those of up."""

    gate_up: Matrix
    down: Matrix


class Layer(NamedTuple):
    """A decoder layer; that of an EAGLE head has no norm of its input.

    A norm is None too where its scale is in the weight behind it, or where norms stand at the ends
    of mixers and MLPs; those are None elsewhere.
    """

    input_norm: Float[jax.Array, " hidden"] | None
    mixer: Attention | GatedDelta
    post_norm: Float[jax.Array, " hidden"] | None
    mlp: Mlp
    mixer_end_norm: Float[jax.Array, " hidden"] | None
    feed_end_norm: Float[jax.Array, " hidden"] | None


class AttentionStack(nnx.Module):
    """The attention layers of a stack."""

    def __init__(self, arrays: Arrays, prefix: str) -> None:
        self.inputs = nnx.Param(arrays[f"{prefix}inputs"])
        self.out = nnx.Param(arrays[f"{prefix}out"])
        _take_biases(self, arrays, prefix, ("inputs", "out"))
        if f"{prefix}q_norm" in arrays:
            self.q_norm = nnx.Param(arrays[f"{prefix}q_norm"])
            self.k_norm = nnx.Param(arrays[f"{prefix}k_norm"])

    def layer(self, place: int, in_stacks: bool) -> Attention:
        norms = [self.q_norm, self.k_norm] if hasattr(self, "q_norm") else [None, None]
        # As with the weights: kernels take their layer's of a stack.
        norms = [x if x is None else x[...] if in_stacks else x[place] for x in norms]
        return Attention(
            inputs=_matrix(self, "inputs", place, in_stacks),
            out=_matrix(self, "out", place, in_stacks),
            q_norm=norms[0],
            k_norm=norms[1],
        )


class GatedDeltaStack(nnx.Module):
    """The gated-delta layers of a stack."""

    inputs: nnx.Param
    conv: nnx.Param
    a_log: nnx.Param
    dt_bias: nnx.Param
    norm: nnx.Param
    out: nnx.Param

    def __init__(self, arrays: Arrays, prefix: str) -> None:
        for name in GatedDelta._fields:
            setattr(self, name, nnx.Param(arrays[f"{prefix}{name}"]))

    def layer(self, place: int, in_stacks: bool) -> GatedDelta:
        # As with the weights: kernels take their layer's of a stack.
        small = (self.conv, self.a_log, self.dt_bias, self.norm)
        conv, a_log, dt_bias, norm = (x[...] if in_stacks else x[place] for x in small)
        inputs, out = (_matrix(self, x, place, in_stacks) for x in ("inputs", "out"))
        return GatedDelta(inputs, conv, a_log, dt_bias, norm, out)


class Layers(nnx.Module):
    """A stack of decoder layers: what all have, and a stack for each kind of mixer.

    Attributes:
      in_stacks: Layers are given the stacks, as kernels read them, and not their own matrices.
    """

    input_norm: nnx.Param
    hidden_norm: nnx.Param
    post_attention_norm: nnx.Param

    def __init__(self, arrays: Arrays, prefix: str, in_stacks: bool) -> None:
        self.in_stacks = in_stacks
        # Each layer lacks some; what is folded is missing too.
        for name in ("hidden_norm", *NORMS, *NORMS_BEHIND):
            if f"{prefix}{name}" in arrays:
                setattr(self, name, nnx.Param(arrays[f"{prefix}{name}"]))
        self.gate_up = nnx.Param(arrays[f"{prefix}mlp.gate_up"])
        self.down = nnx.Param(arrays[f"{prefix}mlp.down"])
        _take_biases(self, arrays, f"{prefix}mlp.", ("gate_up", "down"))
        if f"{prefix}attention.inputs" in arrays:
            self.attention = AttentionStack(arrays, f"{prefix}attention.")
        if f"{prefix}gated_delta.inputs" in arrays:
            self.gated_delta = GatedDeltaStack(arrays, f"{prefix}gated_delta.")

    def layer(self, number: int, kind: str, place: int) -> Layer:
        """The layer of a number, which stands at a place among its kind."""
        stack = self.attention if kind == "attention" else self.gated_delta
        gate_up, down = (_matrix(self, x, number, self.in_stacks) for x in ("gate_up", "down"))

        def norm(name: str) -> Float[jax.Array, " hidden"] | None:
            return getattr(self, name)[number] if hasattr(self, name) else None

        return Layer(
            input_norm=norm("input_norm"),
            mixer=stack.layer(place, self.in_stacks),
            post_norm=norm("post_attention_norm"),
            mlp=Mlp(gate_up, down),
            mixer_end_norm=norm("mixer_end_norm"),
            feed_end_norm=norm("feed_end_norm"),
        )


def _take_biases(owner: nnx.Module, arrays: Arrays, prefix: str, names: tuple[str, ...]) -> None:
    """Takes what the products with some weights add, where the model has that."""
    for name in names:
        if f"{prefix}{name}{BIAS}" in arrays:
            setattr(owner, f"{name}{BIAS}", nnx.Param(arrays[f"{prefix}{name}{BIAS}"]))


def _matrix(owner: nnx.Module, name: str, place: int, in_stacks: bool) -> Matrix:
    """A weight of a stack: by itself, or as kernels read it."""
    stack, bias = getattr(owner, name), getattr(owner, f"{name}{BIAS}", None)
    if in_stacks:
        return Matrix(stack[...], place, None if bias is None else bias[...])
    return Matrix(stack[place], bias=None if bias is None else bias[place])


class Mtp(nnx.Module):
    """The MTP layer, which drafts for NEXTN."""

    def __init__(self, arrays: Arrays, in_stacks: bool = False) -> None:
        self.fc = nnx.Param(arrays["mtp.fc"])
        self.embedding_norm = nnx.Param(arrays["mtp.embedding_norm"])
        self.hidden_norm = nnx.Param(arrays["mtp.hidden_norm"])
        self.final_norm = nnx.Param(arrays["mtp.final_norm"])
        self.layers = Layers(arrays, "mtp.layer.", in_stacks)


class Weights(nnx.Module):
    """A model; `lm_head` is the embedding where the two are tied."""

    def __init__(self, arrays: Arrays, in_stacks: bool = False) -> None:
        self.embed = nnx.Param(arrays["embed"])
        if "lm_head" in arrays:
            self.lm_head = nnx.Param(arrays["lm_head"])
        self.final_norm = nnx.Param(arrays["final_norm"])
        self.layers = Layers(arrays, "", in_stacks)
        if "mtp.fc" in arrays:
            self.mtp = Mtp(arrays, in_stacks)

    @property
    def has_mtp(self) -> bool:
        """Whether the MTP layer is there."""
        return hasattr(self, "mtp")

    @property
    def head(self) -> nnx.Param:
        """The matrix that gives the logits."""
        return self.lm_head if hasattr(self, "lm_head") else self.embed


class DraftModel(nnx.Module):
    """A draft head of its own checkpoint; what it lacks it shares with the target or does without.

    `draft_ids` holds the target's id of each token of a draft vocabulary. A DFlash head has
    `hidden_norm` beside `fc`, and a stack of several layers.
    """

    fc_bias: nnx.Param
    aux_norm: nnx.Param
    input_norm: nnx.Param
    hidden_norm: nnx.Param
    post_attention_norm: nnx.Param
    final_norm: nnx.Param
    lm_head: nnx.Param
    embed: nnx.Param

    def __init__(self, arrays: Arrays, in_stacks: bool = False) -> None:
        self.fc = nnx.Param(arrays["fc"])
        norms = ("aux_norm", "input_norm", "hidden_norm", "final_norm")
        for name in ("fc_bias", *norms, "lm_head", "embed"):
            if name in arrays:
                setattr(self, name, nnx.Param(arrays[name]))
        if "draft_ids" in arrays:
            self.draft_ids = nnx.Variable(arrays["draft_ids"])
        self.layers = Layers(arrays, "layer.", in_stacks)


class Loadable(Protocol):
    """What weights are read from, of either form: see `shared.models.checkpoint.Checkpoint`."""

    def load(
        self, parameter: Parameter, dtype: np.dtype | type, progress: Callable[[int], None]
    ) -> Shaped[np.ndarray, "..."]: ...


class LoadedHead(NamedTuple):
    """A draft head whose weights are on the device; as `shared.drafts.config.DraftHead`."""

    config: DraftConfig
    weights: DraftModel


def load(
    checkpoint: Loadable,
    config: ModelConfig,
    with_mtp: bool,
    dtype: np.dtype | type,
    device: jax.Device,
    progress: Callable[[int], None],
) -> Weights:
    """Reads a checkpoint to the device, parameter by parameter.

    Args:
      dtype: Of the weights, float32 or bfloat16.
      progress: Called with the number of stored bytes after each tensor.

    Raises:
      CheckpointError: A tensor is missing or has another shape.
    """
    arrays = {}
    for parameter in parameters(config, with_mtp):
        array = _loaded(checkpoint, parameter, dtype, device, progress)
        arrays[parameter.name] = _placed(parameter, array, dtype, device)
    return _model(arrays, config, device)


def load_head(
    checkpoint: Stored,
    config: DraftConfig,
    dtype: np.dtype | type,
    device: jax.Device,
    progress: Callable[[int], None],
) -> DraftModel:
    """Reads a draft head to the device, parameter by parameter; see `load`.

    Raises:
      CheckpointError: See `shared.drafts.checkpoint.check_head`.
    """
    arrays = {}
    for parameter in draft_checkpoint.check_head(checkpoint, config):
        array = _loaded(checkpoint, parameter, dtype, device, progress)
        arrays[parameter.name] = _placed(parameter, array, dtype, device)
    if config.has_draft_vocab:
        ids = draft_checkpoint.draft_ids(checkpoint, config)
        arrays["draft_ids"] = _placed_ids(ids, device)
    return _head(arrays, config, device)


def _loaded(
    checkpoint: Loadable,
    parameter: Parameter,
    dtype: np.dtype | type,
    device: jax.Device,
    progress: Callable[[int], None],
) -> Shaped[np.ndarray, "..."] | Shaped[jax.Array, "..."]:
    """One parameter: read to main memory, or if large to the device; or made there."""
    kind = np.float32 if parameter.float32 else dtype
    if isinstance(checkpoint, DummyCheckpoint):
        made = dummy.parameter_array(parameter, checkpoint.law(parameter), kind, device)
        progress(size_of(parameter))
        return made
    is_large = math.prod(parameter.shape) >= LARGE and parameter.stacked
    if not (is_large and isinstance(checkpoint, Checkpoint)):
        return checkpoint.load(parameter, dtype, progress)
    read = jnp.zeros(parameter.shape, kind, device=device)
    for at, values in checkpoint.pieces(parameter, progress):
        first = [each.start if isinstance(each, slice) else each for each in at]
        read = _written(read, values[None], jnp.asarray(first, np.int32))
    return read


@partial(jax.jit, donate_argnums=0)
def _written(
    stack: Shaped[jax.Array, "..."], piece: Shaped[jax.Array, "..."], first: Int[jax.Array, " 2"]
) -> Shaped[jax.Array, "..."]:
    """A stack of layers with a piece of one, which begins at `first`; in its own memory."""
    start = [*first, *[0] * (stack.ndim - 2)]
    return lax.dynamic_update_slice(stack, piece.astype(stack.dtype), start)


def from_arrays(
    arrays: Arrays, config: ModelConfig, dtype: np.dtype | type, device: jax.Device
) -> Weights:
    """Brings arrays under the names of `shared.models.parameters` to the device."""
    wanted = parameters(config, "mtp.fc" in arrays)
    return _model(_from_arrays(wanted, arrays, dtype, device), config, device)


def head_from_arrays(head: DraftHead, dtype: np.dtype | type, device: jax.Device) -> LoadedHead:
    """Brings the arrays of a draft head to the device."""
    wanted = draft_checkpoint.head_parameters(head.config, None)
    placed = _from_arrays(wanted, head.weights, dtype, device)
    if head.config.has_draft_vocab:
        placed["draft_ids"] = _placed_ids(head.weights["draft_ids"], device)
    return LoadedHead(head.config, _head(placed, head.config, device))


def _model(arrays: dict[str, jax.Array], config: ModelConfig, device: jax.Device) -> Weights:
    if not linear.folds_norms(arrays["embed"], device):
        return Weights(arrays)
    norms = [] if config.norms_behind else norms_before("", config.layer_kinds)
    norms += norms_before("mtp.layer.", ["attention"]) if "mtp.fc" in arrays else []
    return Weights(_folded(arrays, norms), in_stacks=True)


def _head(arrays: dict[str, jax.Array], config: DraftConfig, device: jax.Device) -> DraftModel:
    if not linear.folds_norms(arrays["fc"], device):
        return DraftModel(arrays)
    norms = norms_before("layer.", config.layer.layer_kinds, with_inputs=False)
    return DraftModel(_folded(arrays, norms), in_stacks=True)


def _folded(
    arrays: dict[str, jax.Array], norms: list[tuple[str, list[int], str]]
) -> dict[str, jax.Array]:
    """Without norms, whose scales are in the weights behind them."""
    for name, numbers, weight in norms:
        scale = arrays[name][jnp.asarray(numbers)]
        arrays[weight] = linear.scaled(arrays[weight], scale)
    folded = {name for name, _, _ in norms}
    return {name: array for name, array in arrays.items() if name not in folded}


def _from_arrays(
    wanted: Sequence[Parameter], arrays: Arrays, dtype: np.dtype | type, device: jax.Device
) -> dict[str, jax.Array]:
    """Those of the parameters that are there; a head may lack some."""
    return {p.name: _placed(p, arrays[p.name], dtype, device) for p in wanted if p.name in arrays}


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


def _placed_ids(ids: Shaped[np.ndarray, " draft_vocab"], device: jax.Device) -> jax.Array:
    return jax.device_put(jnp.asarray(ids, np.int32), device)
