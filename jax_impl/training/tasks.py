"""Training tasks: a model from scratch, or a draft head for a frozen target."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Int32

from jax_impl import weights
from jax_impl.training import init, losses
from jax_impl.training.block import BlockHeadConfig, block_loss, fill_blocks
from jax_impl.training.candidate_loss import Objective
from jax_impl.training.examples import TrainingBatch
from jax_impl.training.forward import Tokens
from jax_impl.training.loop import Metrics, Task
from jax_impl.training.losses import Mask
from jax_impl.training.nnx_modules import DraftModel, ModelModule, Mtp
from shared.drafts.checkpoint import check_head, open_head
from shared.drafts.config import DraftConfig
from shared.drafts.dspark_config import VANILLA, MarkovConfig
from shared.drafts.infer_from_tensors import infer_from_tensors
from shared.models.checkpoint import Checkpoint, open_checkpoint
from shared.models.config import ModelConfig
from shared.models.config_fields import Json

MIN_LAYERS = 3  # of an EAGLE-3 head's target; the head reads three of its layers

Module = TypeVar("Module", bound=nnx.Module)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Numerical settings of a training pass.

    Attributes:
      dtype: Dtype of the GEMMs and of a frozen target, float32 or bfloat16.
      remat: Recompute the inner activations of a layer for the gradient, to save memory.
    """

    dtype: DTypeLike
    remat: bool


class Target(NamedTuple):
    """Target model of a draft head."""

    config: ModelConfig
    model: ModelModule


class Trainable(NamedTuple, Generic[Module]):
    """Training task, with a function that rebuilds the module from its parameters."""

    task: Task
    merge: Callable[[nnx.State], Module]


def load_model(folder: Path, config: ModelConfig, with_mtp: bool, dtype: DTypeLike) -> ModelModule:
    """Loads a checkpoint's model to the first device.

    Raises:
      CheckpointError: See `shared.models.checkpoint.Checkpoint.check`.
    """
    checkpoint = open_checkpoint(folder)
    checkpoint.check(config, with_mtp)
    loaded = weights.load(
        checkpoint,
        config,
        with_mtp,
        jnp.dtype(dtype),
        jax.devices()[0],
        lambda count: None,
        {},
    )
    return ModelModule(loaded.named)


def model_task(
    config: ModelConfig,
    start: Path | None,
    seed: int,
    mtp_weight: float,
    balance_weight: float,
    precision: Precision,
) -> Trainable[ModelModule]:
    """Returns the task of training a model, with an MTP layer if the config has one.

    Args:
      start: Folder of a checkpoint to start from; None for random parameters.
      mtp_weight: Weight of the MTP layer's loss.
      balance_weight: Weight of the load-balancing loss of the experts.
    """
    if start is None:
        model = init.fresh_model(config, seed, config.has_mtp)
    else:
        model = load_model(start, config, config.has_mtp, np.float32)

    def loss(
        model: ModelModule, frozen: Any, batch: TrainingBatch, key: Any
    ) -> tuple[Any, Metrics]:
        tokens, loss_mask = batch_arrays(batch)
        return losses.language_model_loss(
            config,
            model,
            tokens,
            loss_mask,
            precision.dtype,
            mtp_weight,
            balance_weight,
            precision.remat,
        )

    return trainable(model, (), loss)


def mtp_task(
    target: Target, start: Path | None, seed: int, depth: int, precision: Precision
) -> Trainable[Mtp]:
    """Returns the task of training the MTP layer of a target.

    Args:
      target: The frozen target.
      start: Folder of a model with the layer to start from; None for a fresh one.
      seed: Seed of a fresh layer.
      depth: Trained draft steps.
      precision: Numerical settings.

    Raises:
      ValueError: The target's architecture has no MTP layer.
    """
    config = target.config
    if not config.has_mtp:
        raise ValueError(
            "--draft mtp requires a target with an MTP layer in its config.json "
            "(mtp_num_hidden_layers: 1, in Qwen3.5 models)"
        )
    if start is None:
        layer = init.fresh_mtp(config, target.model, seed)
    else:
        layer = load_model(start, config, True, np.float32).mtp

    def loss(layer: Mtp, model: ModelModule, batch: TrainingBatch, key: Any) -> tuple[Any, Metrics]:
        tokens, loss_mask = batch_arrays(batch)
        return losses.head_loss(
            "mtp",
            None,
            layer,
            config,
            model,
            tokens,
            loss_mask,
            depth,
            precision.dtype,
            precision.remat,
        )

    return trainable(layer, target.model, loss)


def head_task(
    config: DraftConfig,
    target: Target,
    start: Path | None,
    seed: int,
    draft_ids: Int32[np.ndarray, " draft_vocab"] | None,
    depth: int,
    precision: Precision,
) -> Trainable[DraftModel]:
    """Returns the task of training an EAGLE or EAGLE-3 head.

    Args:
      config: Config of the head.
      target: The frozen target.
      start: Folder of a head to start from; None for a fresh one.
      seed: Seed of a fresh head.
      draft_ids: Target tokens of the draft vocabulary; None without one.
      depth: Trained draft steps.
      precision: Numerical settings.
    """
    if start is None:
        head = init.fresh_head(config, target.config, target.model, seed, draft_ids)
    else:
        head = load_head(start, config)
    kind = config.kind.lower()

    def loss(
        head: DraftModel, model: ModelModule, batch: TrainingBatch, key: Any
    ) -> tuple[Any, Metrics]:
        tokens, loss_mask = batch_arrays(batch)
        return losses.head_loss(
            kind,
            config,
            head,
            target.config,
            model,
            tokens,
            loss_mask,
            depth,
            precision.dtype,
            precision.remat,
        )

    return trainable(head, target.model, loss)


def block_task(
    config: DraftConfig,
    target: Target,
    start: Path | None,
    seed: int,
    num_anchors: int,
    objective: Objective,
    precision: Precision,
) -> Trainable[DraftModel]:
    """Returns the task of training a block head: DFlash, JetSpec, DSpark or DFlash2.

    Args:
      config: Config of the head.
      target: The frozen target.
      start: Folder of a head to start from; None for a fresh one.
      seed: Seed of a fresh head.
      num_anchors: Blocks per row in a step.
      objective: Loss of the slots.
      precision: Numerical settings.
    """
    block = BlockHeadConfig.of(config)
    if start is None:
        head = init.fresh_block(block, target.config, target.model, seed)
    else:
        head = load_head(start, config)

    def loss(
        head: DraftModel, model: ModelModule, batch: TrainingBatch, key: Any
    ) -> tuple[Any, Metrics]:
        tokens, loss_mask = batch_arrays(batch)
        filled = fill_blocks(
            block,
            head,
            target.config,
            model,
            tokens,
            loss_mask,
            key,
            num_anchors,
            precision.dtype,
            precision.remat,
        )
        return block_loss(block, head, model, filled, objective, precision.dtype)

    return trainable(head, target.model, loss)


def started(config: DraftConfig, kind: str, folder: Path, target: Checkpoint) -> DraftConfig:
    """Returns the config of a head to start from, completed from its tensors.

    Args:
      config: Contents of its config.json.
      kind: Kind to train, the value of `--draft`.
      folder: Folder of the head.
      target: Files of the target model.

    Raises:
      ValueError: The head is of another kind, or its tensors do not match its config.
    """
    if config.kind != kind.upper():
        raise ValueError(
            f"--draft {kind} does not match --start {folder}, which has a head of kind "
            f"{config.kind}; use --draft {config.kind.lower()} or another --start"
        )
    opened = open_head(folder)
    config = infer_from_tensors(config, opened, target)
    check_head(opened, config)
    return config


def check_head_trained(config: DraftConfig) -> None:
    """Checks that training supports the features of a head.

    Raises:
      ValueError: The head has an unsupported feature; the message names it.
    """
    layer, block = config.layer, config.block
    is_block, markov = block is not None, config.part(MarkovConfig)
    windows = [each.window for each in layer.attentions]
    windows += block.windows if block else ()
    mlp_bias = layer.dense is not None and layer.dense.bias
    found = {
        "norm_before_residual": config.norm_residual,
        "several layers": layer.num_layers > 1 and not is_block,
        "sliding windows": any(windows),
        "query and key norms": layer.attention.qk_norm and not is_block,
        "biases in its layers": layer.attention.input_bias or layer.attention.out_bias or mlp_bias,
        "its own embedding": config.own_embed and not config.traits.is_independent,
        "a draft vocabulary": is_block and config.has_draft_vocab,
        f"a {markov.kind if markov else ''} Markov head": markov and markov.kind != VANILLA,
    }
    unsupported = [feature for feature, is_there in found.items() if is_there]
    if unsupported:
        raise ValueError(
            f"training a {config.kind} head with {unsupported[0]} is not supported, only serving "
            "it; remove --start to train a fresh head"
        )


def load_head(folder: Path, config: DraftConfig) -> DraftModel:
    """Loads a draft head's parameters in float32."""
    device = jax.devices()[0]
    opened = open_head(folder)
    return DraftModel(
        weights.load_head(opened, config, np.float32, device, lambda count: None).named
    )


def batch_arrays(batch: TrainingBatch) -> tuple[Tokens, Mask]:
    """Returns the tokens and the weights of a batch."""
    return jnp.asarray(batch.tokens), jnp.asarray(batch.weights)


def trainable(
    module: Module, frozen: Any, loss: Callable[..., tuple[Any, Metrics]]
) -> Trainable[Module]:
    """Splits the trained and the frozen module into arrays and their NNX graphs."""
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    frozen_graph, arrays = nnx.split(frozen) if isinstance(frozen, nnx.Module) else (None, ())

    def merge(params: nnx.State) -> Module:
        return nnx.merge(graph, params, rest)

    def of_arrays(
        params: nnx.State, frozen: Any, batch: TrainingBatch, key: Any
    ) -> tuple[Any, Metrics]:
        whole = nnx.merge(frozen_graph, frozen) if frozen_graph else None
        return loss(merge(params), whole, batch, key)

    return Trainable(Task(params=params, frozen=arrays, loss=of_arrays), merge)


def head_json(
    kind: str,
    target: ModelConfig,
    draft_vocab: int | None,
    num_layers: int,
    block: int,
    mask: int,
    is_causal: bool,
) -> Json:
    """Returns the config.json of a fresh head, with the layer sizes of its target.

    Args:
      kind: "eagle", "eagle3", "dflash", "dspark" or "dflash2".
      draft_vocab: Size of an EAGLE-3 head's draft vocabulary; None for all tokens.
      num_layers, block, mask: Number of layers, block size and mask token of a block head.
      is_causal: True for a JetSpec head, a DFlash head with a causal block.

    Raises:
      ValueError: The target has too few layers.
    """
    assert target.dense is not None  # `check_drafted_for` rejects experts
    common = {
        "dtype": "bfloat16",
        "vocab_size": target.vocab,
        "hidden_size": target.hidden,
        "intermediate_size": target.dense.intermediate,
        "num_attention_heads": target.attention.num_heads,
        "num_key_value_heads": target.attention.num_kv_heads,
        "head_dim": target.attention.head_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": target.rms_eps,
        "rope_theta": target.attention.rotary.theta,
        "max_position_embeddings": target.context_length,
        "tie_word_embeddings": False,
    }
    if kind in CHOICES:
        fields = {**_block_json(target, num_layers, block, mask), **common, **CHOICES[kind]}
        own = fields["dflash_config"] | ({"causal_head": True} if is_causal else {})
        return {**fields, "dflash_config": own}
    one = {"model_type": "llama", "num_hidden_layers": 1}
    if kind == "eagle":
        return {"architectures": ["LlamaForCausalLMEagle"], **one, **common, "bias": True}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **one,
        **common,
        "draft_vocab_size": draft_vocab or target.vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": _aux_ids(target.num_layers)},
    }


def _aux_ids(num_layers: int) -> list[int]:
    """Returns the layers that an EAGLE-3 head reads: the second, the middle, one near the end."""
    if num_layers < MIN_LAYERS:
        raise ValueError(
            f"--draft eagle3 requires a target of at least {MIN_LAYERS} layers, got {num_layers}; "
            "use --draft eagle"
        )
    middle = max(2, num_layers // 2)
    last = max(middle + 1, num_layers - max(1, round(3 * num_layers / 32)))
    return [min(2, middle - 1) - 1, middle - 1, last - 1]


CHOICES: dict[str, dict[str, Any]] = {
    "dflash": {"architectures": ["DFlashDraftModel"]},
    "dspark": {
        "architectures": ["DSparkDraftModel"],
        "markov_rank": 256,
        "markov_head_type": VANILLA,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
    },
    "dflash2": {
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
}
"""Config fields of a fresh block head's token choice, as in the published heads of its kind."""


def _block_json(target: ModelConfig, num_layers: int, block: int, mask: int) -> dict[str, Any]:
    """Returns the config fields of a block head.

    The auxiliary hidden states are spread evenly from the second layer to the last but one.
    """
    span = max(target.num_layers - 3, 0)
    steps = max(num_layers - 1, 1)
    ids = sorted(
        {min(1, target.num_layers - 1) + round(i * span / steps) for i in range(num_layers)}
    )
    return {
        "model_type": "qwen3",
        "num_hidden_layers": num_layers,
        "block_size": block,
        "num_target_layers": target.num_layers,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": ids},
    }
