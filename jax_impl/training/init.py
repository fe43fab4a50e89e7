"""Fresh parameters of models and draft heads, float32, in the containers of serving.

A draft head starts as a sensible copy: its `fc` hands on what it reads, and whatever of its target
has the shape of a part of its own is taken over.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jax_impl.training.block import BlockHeadConfig
from jax_impl.training.nnx_modules import DraftModel, Layers, ModelModule, Mtp
from shared.drafts.checkpoint import choice_parameters, head_parameters
from shared.drafts.config import DraftConfig
from shared.models.config import ModelConfig
from shared.models.parameters import Parameter, decoder_parameters, parameters, single

Arrays = dict[str, Float[np.ndarray, "..."]]

DECAY_RATES, TIME_STEPS = (1.0, 16.0), (1e-3, 1e-1)
"""Ranges that a gated-delta head's decay rate and time step are drawn from, as published."""

NOISE = 0.02
"""Of the rest of an `fc` that hands on what it reads, relative to a fresh matrix."""


NOTHING = ("fc_bias", "moved", "confidence", "confidence_bias")
"""What changes nothing at first."""

SELECTOR_SCALE = 0.02
"""Of the numbers of pairs, whose product is nearly nothing at first."""


def fresh_model(config: ModelConfig, seed: int, with_mtp: bool) -> ModelModule:
    """A model to train from nothing."""
    rng = np.random.default_rng(seed)
    return ModelModule(_on_device(_drawn(parameters(config, with_mtp), config.num_layers, rng)))


def fresh_mtp(config: ModelConfig, target: ModelModule, seed: int) -> Mtp:
    """An MTP layer for a target that has none; its layer is the target's last of its kind."""
    wanted = [p for p in parameters(config, True) if p.name.startswith("mtp.")]
    arrays = _drawn(wanted, 1, np.random.default_rng(seed))
    arrays["mtp.fc"] = _hand_on(arrays["mtp.fc"], [0, 1])
    arrays["mtp.final_norm"] = np.asarray(target.final_norm[...], np.float32)
    _take_over(arrays, "mtp.layer.", [config.num_layers - 1], config, target)
    return Mtp(_on_device(arrays))


def fresh_head(
    config: DraftConfig,
    target_config: ModelConfig,
    target: ModelModule,
    seed: int,
    draft_ids: Int[np.ndarray, " draft_vocab"] | None,
) -> DraftModel:
    """An EAGLE or EAGLE-3 head for a target.

    Args:
      draft_ids: The target's tokens that the head scores, ascending; None where it scores all.

    Raises:
      ValueError: `draft_ids` are not as many as the config's draft vocabulary.
    """
    if config.has_draft_vocab and (draft_ids is None or len(draft_ids) != config.draft_vocab):
        given = "none" if draft_ids is None else len(draft_ids)
        raise ValueError(f"draft_ids must be {config.draft_vocab} tokens, got {given}")
    arrays = _drawn(head_parameters(config, None), 1, np.random.default_rng(seed))
    same_width = config.layer.hidden == config.target_hidden
    if same_width:
        # The embedding and the hidden state, or of the target's streams the last.
        arrays["fc"] = _hand_on(arrays["fc"], [0, 1] if config.kind == "EAGLE" else [2])
        _take_over(arrays, "layer.", [target_config.num_layers - 1], target_config, target)
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
    """A head with blocks for a target; its layers are the target's last ones where they fit.

    What a DSpark or a DFlash2 head has beside a DFlash one changes nothing at first.
    """
    config, norm = block.layer, (block.layer.hidden,)
    names = [f"layers.{i}" for i in range(config.num_layers)]
    streams = len(block.aux_streams)
    wanted = [
        single("fc", "fc.weight", (config.hidden, streams * config.hidden)),
        single("hidden_norm", "hidden_norm.weight", norm),
        single("final_norm", "norm.weight", norm),
        *decoder_parameters("layer.", config, names),
        *choice_parameters(block.config, config, config.vocab),
    ]
    arrays = _drawn(wanted, config.num_layers, np.random.default_rng(seed))
    arrays["fc"] = _hand_on(arrays["fc"], [streams - 1])
    arrays["final_norm"] = np.asarray(target.final_norm[...], np.float32)
    last = target_config.num_layers
    from_layers = [max(last - config.num_layers + i, 0) for i in range(config.num_layers)]
    _take_over(arrays, "layer.", from_layers, target_config, target)
    return DraftModel(_on_device(arrays))


def _on_device(arrays: Arrays) -> dict[str, Float[jnp.ndarray, "..."]]:
    return {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}


def _drawn(wanted: Sequence[Parameter], num_layers: int, rng: np.random.Generator) -> Arrays:
    return {p.name: _draw(p, num_layers, rng).astype(np.float32) for p in wanted}


def _draw(parameter: Parameter, num_layers: int, rng: np.random.Generator) -> np.ndarray:
    """Norms are 1; what ends a layer is small, so that the residual does not grow with the depth.

    Source: the deviation sqrt(2 / 5 / inputs) of small models, Nguyen and Salazar 2019,
      arXiv:1910.05895; decay and time step as in Gated Delta Networks, arXiv:2412.06464.
    """
    kind, shape = parameter.name.rsplit(".", 1)[-1], parameter.shape
    if kind.endswith("norm"):
        return np.ones(shape)
    if kind in NOTHING or parameter.name == "markov.lm_head":
        return np.zeros(shape)
    if kind == "base":  # of a convolution: a row is itself alone
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


def _hand_on(
    fc: Float[np.ndarray, "hidden inputs"], parts: Sequence[int]
) -> Float[np.ndarray, "hidden inputs"]:
    """An `fc` that gives the mean of some parts of its input, each as wide as its output."""
    hidden = len(fc)
    fc_init = NOISE * fc
    for part in parts:
        fc_init[:, part * hidden : (part + 1) * hidden] += np.eye(hidden) / len(parts)
    return fc_init


def _take_over(
    arrays: Arrays, prefix: str, layers: Sequence[int], config: ModelConfig, target: ModelModule
) -> None:
    """Copies what fits of the target's layers, and of its attention layers up to each of them."""
    stack: Layers = target.layers
    for name in ("post_attention_norm", "mlp.gate_up", "mlp.down"):
        stacked = getattr(stack, name.rsplit(".", 1)[-1])[...]
        _copy(arrays, f"{prefix}{name}", [stacked[layer] for layer in layers])
    if not config.num_attention_layers:
        return
    places = [max(config.layer_kinds[: layer + 1].count("attention") - 1, 0) for layer in layers]
    parts = ("inputs", "out", "q_norm", "k_norm")
    shared = {p: getattr(stack.attention, p)[...] for p in parts if hasattr(stack.attention, p)}
    fits = all(f"{prefix}attention.{p}" in arrays for p in shared) and all(
        arrays[f"{prefix}attention.{p}"].shape[1:] == stacked.shape[1:]
        for p, stacked in shared.items()
    )
    if fits:
        for part, stacked in shared.items():
            _copy(arrays, f"{prefix}attention.{part}", [stacked[place] for place in places])
        attention = [i for i, kind in enumerate(config.layer_kinds) if kind == "attention"]
        norms = [stack.input_norm[attention[place]] for place in places]
        _copy(arrays, f"{prefix}input_norm", norms)


def _copy(arrays: Arrays, name: str, layers: Sequence[jnp.ndarray]) -> None:
    stacked = np.stack([np.asarray(array, np.float32) for array in layers])
    if name in arrays and arrays[name].shape == stacked.shape:
        arrays[name] = stacked
