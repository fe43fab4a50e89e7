"""What can be trained: a model from scratch, or a draft head on a target that stays as it is."""

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
from jax_impl.training.block import BlockHeadConfig, block_loss
from jax_impl.training.examples import TrainingBatch
from jax_impl.training.forward import Tokens
from jax_impl.training.loop import Metrics, Task
from jax_impl.training.losses import Mask
from jax_impl.training.nnx_modules import DraftModel, ModelModule, Mtp
from shared.drafts.checkpoint import check_head, open_head
from shared.drafts.config import DraftConfig
from shared.drafts.dspark_config import VANILLA
from shared.drafts.infer_from_tensors import infer_from_tensors
from shared.models.checkpoint import Checkpoint, open_checkpoint
from shared.models.config import ModelConfig
from shared.models.config_fields import Json

MIN_LAYERS = 3  # of an EAGLE-3 head's target, as it reads three of its streams


Module = TypeVar("Module", bound=nnx.Module)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How a pass is computed.

    Attributes:
      dtype: Of the products, float32 or bfloat16; a frozen target is held in it.
      remat: Compute a layer's inner values again for the gradient, to spare memory.
    """

    dtype: DTypeLike
    remat: bool


class Target(NamedTuple):
    """The model that a head drafts for."""

    config: ModelConfig
    model: ModelModule


class Trainable(NamedTuple, Generic[Module]):
    """A task, and what gives the module of its parameters back."""

    task: Task
    merge: Callable[[nnx.State], Module]


def load_model(folder: Path, config: ModelConfig, with_mtp: bool, dtype: DTypeLike) -> ModelModule:
    """A checkpoint's model on the first device.

    Raises:
      CheckpointError: See `shared.models.checkpoint.Checkpoint.check`.
    """
    checkpoint = open_checkpoint(folder)
    checkpoint.check(config, with_mtp)
    kind = jnp.dtype(dtype)
    where = (kind, jax.devices()[0], lambda count: None)
    return ModelModule(weights.load(checkpoint, config, with_mtp, *where, {}).named)


def model_task(
    config: ModelConfig,
    start: Path | None,
    seed: int,
    mtp_weight: float,
    balance_weight: float,
    precision: Precision,
) -> Trainable[ModelModule]:
    """A model from scratch, with its MTP layer where the config names one.

    Args:
      start: Folder of a checkpoint to start from; None for fresh parameters.
      mtp_weight: Weight of the MTP layer's loss.
      balance_weight: Weight of the loss that keeps all experts in use.
    """
    if start is None:
        model = init.fresh_model(config, seed, config.has_mtp)
    else:
        model = load_model(start, config, config.has_mtp, np.float32)

    def loss(
        model: ModelModule, frozen: Any, batch: TrainingBatch, key: Any
    ) -> tuple[Any, Metrics]:
        return losses.language_model_loss(
            config,
            model,
            *_arrays(batch),
            precision.dtype,
            mtp_weight,
            balance_weight,
            precision.remat,
        )

    return _trainable(model, (), loss)


def mtp_task(
    target: Target, start: Path | None, seed: int, depth: int, precision: Precision
) -> Trainable[Mtp]:
    """The MTP layer of a target; `start` is a folder whose layer it starts from.

    Raises:
      ValueError: The target's architecture has no MTP layer.
    """
    config = target.config
    if not config.has_mtp:
        raise ValueError(
            "--draft mtp needs a target whose config.json names an MTP layer "
            "(mtp_num_hidden_layers: 1, for Qwen3.5 models)"
        )
    if start is None:
        layer = init.fresh_mtp(config, target.model, seed)
    else:
        layer = load_model(start, config, True, np.float32).mtp

    def loss(layer: Mtp, model: ModelModule, batch: TrainingBatch, key: Any) -> tuple[Any, Metrics]:
        return losses.head_loss(
            "mtp",
            None,
            layer,
            config,
            model,
            *_arrays(batch),
            depth,
            precision.dtype,
            precision.remat,
        )

    return _trainable(layer, target.model, loss)


def head_task(
    config: DraftConfig,
    target: Target,
    start: Path | None,
    seed: int,
    draft_ids: Int32[np.ndarray, " draft_vocab"] | None,
    depth: int,
    precision: Precision,
) -> Trainable[DraftModel]:
    """An EAGLE or EAGLE-3 head; `start` is a folder of a head to start from.

    Args:
      draft_ids: The target's tokens of a draft vocabulary.
    """
    if start is None:
        head = init.fresh_head(config, target.config, target.model, seed, draft_ids)
    else:
        head = load_head(start, config)
    kind = config.kind.lower()

    def loss(
        head: DraftModel, model: ModelModule, batch: TrainingBatch, key: Any
    ) -> tuple[Any, Metrics]:
        return losses.head_loss(
            kind,
            config,
            head,
            target.config,
            model,
            *_arrays(batch),
            depth,
            precision.dtype,
            precision.remat,
        )

    return _trainable(head, target.model, loss)


def block_task(
    config: DraftConfig,
    target: Target,
    start: Path | None,
    seed: int,
    num_anchors: int,
    precision: Precision,
) -> Trainable[DraftModel]:
    """A head with blocks; `start` is a folder of a head to start from.

    Args:
      num_anchors: Blocks of each row in a step.
    """
    block = BlockHeadConfig.of(config)
    if start is None:
        head = init.fresh_block(block, target.config, target.model, seed)
    else:
        head = load_head(start, config)

    def loss(
        head: DraftModel, model: ModelModule, batch: TrainingBatch, key: Any
    ) -> tuple[Any, Metrics]:
        return block_loss(
            block,
            head,
            target.config,
            model,
            *_arrays(batch),
            key,
            num_anchors,
            precision.dtype,
            precision.remat,
        )

    return _trainable(head, target.model, loss)


def started(config: DraftConfig, kind: str, folder: Path, target: Checkpoint) -> DraftConfig:
    """The settings of a head to start from, as its files have them.

    Args:
      config: What its config.json says.
      kind: That is to be trained, as `--draft` says it.
      folder: Of the head.
      target: Files of the model that it drafts for.

    Raises:
      ValueError: It is of another kind, or its files are those of another head; one sentence.
    """
    if config.kind != kind.upper():
        raise ValueError(
            f"--draft {kind} does not fit --start {folder}, whose head is {config.kind}; give "
            f"--draft {config.kind.lower()}, or another folder"
        )
    opened = open_head(folder)
    config = infer_from_tensors(config, opened, target)
    check_head(opened, config)
    return config


def check_head_trained(config: DraftConfig) -> None:
    """Refuses a head that drafts as no pass of training does.

    Raises:
      ValueError: One sentence that names what it has.
    """
    layer, block = config.layer, config.block
    is_block, markov = block is not None, None if block is None else block.markov
    windows = [each.window for each in layer.attentions]
    windows += block.windows if block else ()
    mlp_bias = layer.dense is not None and layer.dense.bias
    is_causal = block is not None and any(block.causal)
    found = {
        "norm_before_residual": config.norm_residual,
        "several layers": layer.num_layers > 1 and not is_block,
        "layers that slide": any(windows),
        "norms of queries and keys": layer.attention.qk_norm and not is_block,
        "biases in its layers": layer.attention.input_bias or layer.attention.out_bias or mlp_bias,
        "rows that see none behind them": is_causal,
        "an embedding of its own": config.own_embed and config.kind != "EAGLE3",
        "a vocabulary of its own": is_block and config.has_draft_vocab,
        f"a {markov.kind if markov else ''} Markov step": markov and markov.kind != VANILLA,
    }
    named = [what for what, is_there in found.items() if is_there]
    if named:
        raise ValueError(
            f"a {config.kind} head with {named[0]} is served, and not trained further; leave "
            "--start out"
        )


def load_head(folder: Path, config: DraftConfig) -> DraftModel:
    """A draft head's parameters in float32."""
    device = jax.devices()[0]
    opened = open_head(folder)
    return DraftModel(
        weights.load_head(opened, config, np.float32, device, lambda count: None).named
    )


def _arrays(batch: TrainingBatch) -> tuple[Tokens, Mask]:
    return jnp.asarray(batch.tokens), jnp.asarray(batch.weights)


def _trainable(
    module: Module, frozen: Any, loss: Callable[..., tuple[Any, Metrics]]
) -> Trainable[Module]:
    """Splits the module that is trained, and the frozen one, into arrays and their place."""
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
    kind: str, target: ModelConfig, draft_vocab: int | None, num_layers: int, block: int, mask: int
) -> Json:
    """The contents of config.json of a fresh head, with the layer sizes of its target.

    Args:
      kind: "eagle", "eagle3", "dflash", "dspark" or "dflash2".
      draft_vocab: Tokens of an EAGLE-3 head's vocabulary; None for all.
      num_layers, block, mask: Layers, block size and mask token of a head with blocks.

    Raises:
      ValueError: The target has too few layers.
    """
    assert target.dense is not None  # `check_drafted_for` refuses experts
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
        return {**_block_json(target, num_layers, block, mask), **common, **CHOICES[kind]}
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
    """Layers whose outputs an EAGLE-3 head reads: the second, the middle, and one near the end."""
    if num_layers < MIN_LAYERS:
        raise ValueError(f"--draft eagle3 needs a target of {MIN_LAYERS} layers, got {num_layers}")
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
"""Of a fresh head with blocks how it chooses its drafts, as published heads of the kind do."""


def _block_json(target: ModelConfig, num_layers: int, block: int, mask: int) -> dict[str, Any]:
    """The streams are spread evenly from the second layer to the last but one."""
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
