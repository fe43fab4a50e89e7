"""Initial parameters of models and draft heads, float32.

A draft head starts from its target. Its `fc` passes on a part of its input, and parameters of the
target with the same shape are copied.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jax_impl.training.block import BlockHeadConfig
from jax_impl.training.nnx_modules import DraftModel, Layers, ModelModule, Mtp
from shared.drafts.checkpoint import head_parameters, part_parameters
from shared.drafts.config import DraftConfig
from shared.models.config import ModelConfig
from shared.models.parameter import Parameter
from shared.models.parameters import decoder_parameters, parameters
from shared.models.stacks import single

Arrays = dict[str, Float[np.ndarray, "..."]]

DECAY_RATES, TIME_STEPS = (1.0, 16.0), (1e-3, 1e-1)
"""Published ranges of the initial decay rate and time step of a GDN head."""

NOISE = 0.02
"""Scale of the random part of such an `fc`, relative to a random matrix."""

NOTHING = ("fc_bias", "moved", "confidence", "confidence_bias")
"""Names of parameters that start at zero."""

SELECTOR_SCALE = 0.02
"""Scale of the selector's initial factors; their product is close to zero."""


def fresh_model(config: ModelConfig, seed: int, with_mtp: bool) -> ModelModule:
    """Returns a model with random parameters."""
    rng = np.random.default_rng(seed)
    return ModelModule(_on_device(_drawn(parameters(config, with_mtp), config.num_layers, rng)))


def fresh_mtp(config: ModelConfig, target: ModelModule, seed: int) -> Mtp:
    """Returns an MTP layer for a target; its layer is a copy of the target's last ones."""
    wanted = [p for p in parameters(config, True) if p.name.startswith("mtp.")]
    arrays = _drawn(wanted, 1, np.random.default_rng(seed))
    arrays["mtp.fc"] = _pass_on(arrays["mtp.fc"], [0, 1])
    arrays["mtp.final_norm"] = np.asarray(target.final_norm[...], np.float32)
    _copy_layers(arrays, "mtp.layer.", [config.num_layers - 1], config, target)
    return Mtp(_on_device(arrays))


def fresh_head(
    config: DraftConfig,
    target_config: ModelConfig,
    target: ModelModule,
    seed: int,
    draft_ids: Int[np.ndarray, " draft_vocab"] | None,
) -> DraftModel:
    """Returns an EAGLE or EAGLE-3 head for a target.

    Args:
      draft_ids: Target tokens of the draft vocabulary, ascending; None without one.

    Raises:
      ValueError: The number of `draft_ids` is not the config's draft vocabulary size.
    """
    if config.has_draft_vocab and (draft_ids is None or len(draft_ids) != config.draft_vocab):
        given = "none" if draft_ids is None else len(draft_ids)
        raise ValueError(f"draft_ids must be {config.draft_vocab} tokens, got {given}")
    arrays = _drawn(head_parameters(config, None), 1, np.random.default_rng(seed))
    same_width = config.layer.hidden == config.target_hidden
    if same_width:
        # EAGLE: the mean of embedding and hidden state; EAGLE-3: the last auxiliary hidden state.
        arrays["fc"] = _pass_on(arrays["fc"], [2] if config.aux_streams else [0, 1])
        _copy_layers(arrays, "layer.", [target_config.num_layers - 1], target_config, target)
    if "final_norm" in arrays and same_width:
        arrays["final_norm"] = np.asarray(target.final_norm[...], np.float32)
    if config.own_lm_head and same_width:
        whole = np.asarray(target.head[...], np.float32)
        arrays["lm_head"] = whole if draft_ids is None else whole[draft_ids]
    placed = _on_device(arrays)
    if draft_ids is not None and config.has_draft_vocab:
        placed["draft_ids"] = jnp.asarray(draft_ids, jnp.int32)
    return DraftModel(placed)


def fresh_block(
    block: BlockHeadConfig, target_config: ModelConfig, target: ModelModule, seed: int
) -> DraftModel:
    """Returns a block head for a target, with the target's last layers if their shapes fit.

    The additional parameters of DSpark and DFlash2 start with no effect on the output.
    """
    config, norm = block.layer, (block.layer.hidden,)
    names = [f"layers.{i}" for i in range(config.num_layers)]
    streams = len(block.aux_streams)
    wanted = [
        single("fc", "fc.weight", (config.hidden, streams * config.hidden)),
        single("hidden_norm", "hidden_norm.weight", norm),
        single("final_norm", "norm.weight", norm),
        *decoder_parameters("layer.", config, names),
        *part_parameters(block.config, config, config.vocab),
    ]
    arrays = _drawn(wanted, config.num_layers, np.random.default_rng(seed))
    arrays["fc"] = _pass_on(arrays["fc"], [streams - 1])
    arrays["final_norm"] = np.asarray(target.final_norm[...], np.float32)
    last = target_config.num_layers
    from_layers = [max(last - config.num_layers + i, 0) for i in range(config.num_layers)]
    _copy_layers(arrays, "layer.", from_layers, target_config, target)
    return DraftModel(_on_device(arrays))


def _on_device(arrays: Arrays) -> dict[str, Float[jnp.ndarray, "..."]]:
    return {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}


def _drawn(wanted: Sequence[Parameter], num_layers: int, rng: np.random.Generator) -> Arrays:
    return {p.name: _draw(p, num_layers, rng).astype(np.float32) for p in wanted}


def _draw(parameter: Parameter, num_layers: int, rng: np.random.Generator) -> np.ndarray:
    """Draws one parameter: norms are 1, and output projections shrink with the number of layers.

    Small output projections keep the residual stream from growing with the depth.

    Source: the deviation sqrt(2 / 5 / inputs) of small models, Nguyen and Salazar 2019,
      arXiv:1910.05895; decay and time step as in Gated Delta Networks, arXiv:2412.06464.
    """
    kind, shape = parameter.name.rsplit(".", 1)[-1], parameter.shape
    if kind.endswith("norm"):
        return np.ones(shape)
    if kind in NOTHING or parameter.name == "markov.lm_head":
        return np.zeros(shape)
    if kind == "base":  # of a convolution: the identity
        return np.broadcast_to(np.arange(shape[1])[:, None] == 0, shape).astype(np.float32)
    if parameter.name.startswith("selector."):
        return SELECTOR_SCALE * rng.standard_normal(shape)
    if kind == "a_log":
        return np.log(rng.uniform(*DECAY_RATES, shape))
    if kind == "dt_bias":
        low, high = np.log(TIME_STEPS)
        steps = np.exp(rng.uniform(low, high, shape))
        return steps + np.log(-np.expm1(-steps))  # softplus of it is the step
    if kind == "conv":
        bound = shape[-1] ** -0.5
        return rng.uniform(-bound, bound, shape)
    deviation = (2 / 5 / shape[-1]) ** 0.5
    if kind in ("out", "down"):
        deviation /= (2 * num_layers) ** 0.5
    return deviation * rng.standard_normal(shape)


def _pass_on(
    fc: Float[np.ndarray, "hidden inputs"], parts: Sequence[int]
) -> Float[np.ndarray, "hidden inputs"]:
    """Returns an `fc` whose output is the mean of some parts of its input, plus noise.

    Args:
      fc: A random matrix; each part of its input is as wide as its output.
      parts: Indices of the parts.
    """
    hidden = len(fc)
    fc_init = NOISE * fc
    for part in parts:
        fc_init[:, part * hidden : (part + 1) * hidden] += np.eye(hidden) / len(parts)
    return fc_init


def _copy_layers(
    arrays: Arrays, prefix: str, layers: Sequence[int], config: ModelConfig, target: ModelModule
) -> None:
    """Copies parameters of the target's layers whose shapes fit.

    The attention comes from the last attention layer up to each of `layers`.
    """
    stack: Layers = target.layers
    for name in ("post_attention_norm", "mlp.gate_up", "mlp.down"):
        stacked = getattr(stack, name.rsplit(".", 1)[-1])[...]
        _copy(arrays, f"{prefix}{name}", [stacked[layer] for layer in layers])
    attention = config.attention_groups[0].layers
    indices = [max(sum(i <= layer for i in attention) - 1, 0) for layer in layers]
    parts = ("inputs", "out", "q_norm", "k_norm")
    shared = {p: getattr(stack.attention, p)[...] for p in parts if hasattr(stack.attention, p)}
    fits = all(f"{prefix}attention.{p}" in arrays for p in shared) and all(
        arrays[f"{prefix}attention.{p}"].shape[1:] == stacked.shape[1:]
        for p, stacked in shared.items()
    )
    if fits:
        for part, stacked in shared.items():
            _copy(arrays, f"{prefix}attention.{part}", [stacked[index] for index in indices])
        norms = [stack.input_norm[attention[index]] for index in indices]
        _copy(arrays, f"{prefix}input_norm", norms)


def _copy(arrays: Arrays, name: str, layers: Sequence[jnp.ndarray]) -> None:
    stacked = np.stack([np.asarray(array, np.float32) for array in layers])
    if name in arrays and arrays[name].shape == stacked.shape:
        arrays[name] = stacked
