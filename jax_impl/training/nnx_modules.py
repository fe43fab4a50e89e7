"""Trained parameters as NNX modules: one stack `[layers, ...]` per layer kind and parameter.

A module is made from arrays under the names of `shared.models.parameters`. The arrays come from
`jax_impl.weights` or `jax_impl.training.init`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Shaped

from jax_impl.weights import Loaded
from shared.models.config import ModelConfig
from shared.models.parameters import NORMS, parameters

Arrays = Mapping[str, Shaped[np.ndarray, "..."] | Shaped[jax.Array, "..."]]

MLP = ("gate_up", "down")

GATED_DELTA = ("inputs", "conv", "a_log", "dt_bias", "norm", "out")
"""Parameters of a GDN layer."""


class AttentionStack(nnx.Module):
    """Attention layers of a stack."""

    def __init__(self, arrays: Arrays, prefix: str) -> None:
        self.inputs = nnx.Param(arrays[f"{prefix}inputs"])
        self.out = nnx.Param(arrays[f"{prefix}out"])
        if f"{prefix}q_norm" in arrays:
            self.q_norm = nnx.Param(arrays[f"{prefix}q_norm"])
            self.k_norm = nnx.Param(arrays[f"{prefix}k_norm"])


class ExpertsStack(nnx.Module):
    """MoE blocks of a stack."""

    def __init__(self, arrays: Arrays, prefix: str) -> None:
        self.router = nnx.Param(arrays[f"{prefix}router"])
        self.gate_up = nnx.Param(arrays[f"{prefix}gate_up"])
        self.down = nnx.Param(arrays[f"{prefix}down"])


class GatedDeltaStack(nnx.Module):
    """GDN layers of a stack."""

    inputs: nnx.Param
    conv: nnx.Param
    a_log: nnx.Param
    dt_bias: nnx.Param
    norm: nnx.Param
    out: nnx.Param

    def __init__(self, arrays: Arrays, prefix: str) -> None:
        for name in GATED_DELTA:
            setattr(self, name, nnx.Param(arrays[f"{prefix}{name}"]))


class Layers(nnx.Module):
    """Stack of decoder layers: shared parameters, and a stack for each kind of mixer and MLP."""

    gate_up: nnx.Param
    down: nnx.Param
    input_norm: nnx.Param
    hidden_norm: nnx.Param
    post_attention_norm: nnx.Param

    def __init__(self, arrays: Arrays, prefix: str) -> None:
        # Layers of a model have no hidden_norm, and EAGLE heads no input_norm either.
        for name in ("hidden_norm", *NORMS):
            if f"{prefix}{name}" in arrays:
                setattr(self, name, nnx.Param(arrays[f"{prefix}{name}"]))
        for name in MLP:
            if f"{prefix}mlp.{name}" in arrays:
                setattr(self, name, nnx.Param(arrays[f"{prefix}mlp.{name}"]))
        if f"{prefix}experts.router" in arrays:
            self.experts = ExpertsStack(arrays, f"{prefix}experts.")
        if f"{prefix}attention.inputs" in arrays:
            self.attention = AttentionStack(arrays, f"{prefix}attention.")
        if f"{prefix}gated_delta.inputs" in arrays:
            self.gated_delta = GatedDeltaStack(arrays, f"{prefix}gated_delta.")


class Mtp(nnx.Module):
    """MTP layer, the drafter of NEXTN."""

    def __init__(self, arrays: Arrays) -> None:
        self.fc = nnx.Param(arrays["mtp.fc"])
        self.embedding_norm = nnx.Param(arrays["mtp.embedding_norm"])
        self.hidden_norm = nnx.Param(arrays["mtp.hidden_norm"])
        self.final_norm = nnx.Param(arrays["mtp.final_norm"])
        self.layers = Layers(arrays, "mtp.layer.")


class ModelModule(nnx.Module):
    """Language model; without `lm_head` the LM head is tied to the embedding."""

    def __init__(self, arrays: Arrays) -> None:
        self.embed = nnx.Param(arrays["embed"])
        if "lm_head" in arrays:
            self.lm_head = nnx.Param(arrays["lm_head"])
        self.final_norm = nnx.Param(arrays["final_norm"])
        self.layers = Layers(arrays, "")
        if "mtp.fc" in arrays:
            self.mtp = Mtp(arrays)

    @property
    def has_mtp(self) -> bool:
        """Returns True if the MTP layer was loaded."""
        return hasattr(self, "mtp")

    @property
    def head(self) -> nnx.Param:
        """Matrix of the LM head."""
        return self.lm_head if hasattr(self, "lm_head") else self.embed


class ParameterGroup(nnx.Module):
    """Parameters with a common name prefix, nested by the words of their names."""

    def __init__(self, arrays: Arrays, prefix: str) -> None:
        words = {name[len(prefix) :].split(".")[0] for name in arrays if name.startswith(prefix)}
        for word in sorted(words):
            name = f"{prefix}{word}"
            is_parameter = name in arrays
            setattr(
                self,
                word,
                nnx.Param(arrays[name]) if is_parameter else ParameterGroup(arrays, f"{name}."),
            )

    def __getitem__(self, name: str) -> jax.Array:
        """Returns a parameter by its name without the prefix."""
        found: Any = self
        for word in name.split("."):
            found = getattr(found, word)
        return found[...]


class DraftModel(nnx.Module):
    """Draft head with its own checkpoint; absent parameters are shared with the target or unused.

    `draft_ids` holds the target token of each draft vocabulary token. Block heads have
    `hidden_norm` next to `fc`, and a stack of several layers. DSpark adds `markov` and an optional
    confidence, DFlash2 adds `conv` and `selector`.
    """

    fc_bias: nnx.Param
    aux_norm: nnx.Param
    input_norm: nnx.Param
    hidden_norm: nnx.Param
    post_attention_norm: nnx.Param
    final_norm: nnx.Param
    lm_head: nnx.Param
    embed: nnx.Param
    confidence: nnx.Param
    confidence_bias: nnx.Param
    markov: ParameterGroup
    conv: ParameterGroup
    selector: ParameterGroup

    def __init__(self, arrays: Arrays) -> None:
        self.fc = nnx.Param(arrays["fc"])
        norms = ("aux_norm", "input_norm", "hidden_norm", "final_norm")
        for name in ("fc_bias", *norms, "lm_head", "embed", "confidence", "confidence_bias"):
            if name in arrays:
                setattr(self, name, nnx.Param(arrays[name]))
        for name in ("markov", "conv", "selector"):
            if any(each.startswith(f"{name}.") for each in arrays):
                setattr(self, name, ParameterGroup(arrays, f"{name}."))
        if "draft_ids" in arrays:
            self.draft_ids = nnx.Variable(arrays["draft_ids"])
        self.layers = Layers(arrays, "layer.")


def named(module: ModelModule | DraftModel | Mtp) -> dict[str, jax.Array]:
    """Returns parameters by the names of `shared.models.parameters`; of `Mtp` without `mtp.`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    stack = "" if isinstance(module, ModelModule) else "layer."
    return {_name([key.key for key in path], stack): array for path, array in flat}


def _name(words: list[str], stack: str) -> str:
    """Returns a parameter's name from its path in the module; names omit the stack `layers`."""
    first, *rest = words
    if first == "mtp":
        return "mtp." + _name(rest, "layer.")
    if first == "layers":
        return stack + ("mlp." if rest[0] in MLP else "") + ".".join(rest)
    return ".".join(words)


def loaded_of(model: ModelModule, config: ModelConfig) -> Loaded:
    """Returns a model as the weights of a backend."""
    arrays, loaded = named(model), Loaded({}, {})
    for parameter in parameters(config, model.has_mtp):
        group = loaded.stacks if parameter.stacked else loaded.alone
        group[parameter.name] = arrays[parameter.name]
    return loaded
