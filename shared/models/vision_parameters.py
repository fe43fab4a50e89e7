"""Parameters of a vision encoder, and the checkpoint tensors that each is loaded from."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from shared.models.checkpoint import CheckpointError
from shared.models.parameter import Parameter
from shared.models.stacks import BIAS, single, stack
from shared.models.vision_config import TENSORS, VisionConfig


class EncoderFiles(Protocol):
    """Protocol of files that may contain a vision encoder, a subset of
    `shared.models.checkpoint.Checkpoint`.
    """

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors, without prefix."""
        ...

    def known(self, wanted: Sequence[Parameter]) -> set[str]:
        """Returns the names of the tensors that these parameters use."""
        ...

    def check_parameters(self, wanted: Sequence[Parameter]) -> None:
        """Raises `CheckpointError` for the first tensor that is missing or has another dtype or
        shape.
        """
        ...


def vision_encoder_parameters(config: VisionConfig) -> list[Parameter]:
    """Returns all parameters of a vision encoder; its blocks are stacked, and matrices are `[out,
    in]`.
    """
    hidden, wide, merged = config.hidden, config.intermediate, config.merged * config.hidden
    blocks = [f"{TENSORS}blocks.{i}" for i in range(config.depth)]
    patch = (config.channels, config.frames, config.patch_size, config.patch_size)
    embed = single("vision.patches", f"{TENSORS}patch_embed.proj.weight", (hidden, *patch))
    return [
        replace(embed, shape=(hidden, config.patch_numbers)),
        single(f"vision.patches{BIAS}", f"{TENSORS}patch_embed.proj.bias", (hidden,)),
        single("vision.places", f"{TENSORS}pos_embed.weight", (config.table_side**2, hidden)),
        *_stacked_norm("vision.attention_norm", blocks, "norm1", hidden),
        *_stacked_product("vision.attention.inputs", blocks, "attn.qkv", (3 * hidden, hidden)),
        *_stacked_product("vision.attention.out", blocks, "attn.proj", (hidden, hidden)),
        *_stacked_norm("vision.mlp_norm", blocks, "norm2", hidden),
        *_stacked_product("vision.mlp.up", blocks, "mlp.linear_fc1", (wide, hidden)),
        *_stacked_product("vision.mlp.down", blocks, "mlp.linear_fc2", (hidden, wide)),
        *_single_norm("vision.merger_norm", f"{TENSORS}merger.norm", hidden),
        *_single_product("vision.merger.up", f"{TENSORS}merger.linear_fc1", (merged, merged)),
        *_single_product("vision.merger.down", f"{TENSORS}merger.linear_fc2", (config.out, merged)),
    ]


def check_vision_encoder(checkpoint: EncoderFiles, config: VisionConfig) -> list[Parameter]:
    """Checks presence, dtype and shape of a vision encoder's tensors, and that there are no others.

    Returns:
      Its parameters.

    Raises:
      CheckpointError: The first fault, with the name of its tensor.
    """
    wanted = vision_encoder_parameters(config)
    checkpoint.check_parameters(wanted)
    of_tower = {name for name in checkpoint.names if name.startswith(TENSORS)}
    if unknown := sorted(of_tower - checkpoint.known(wanted)):
        raise CheckpointError(
            f"tensor {unknown[0]} is not part of the vision encoder; use a checkpoint without it"
        )
    return wanted


def _stacked_product(
    name: str, blocks: Sequence[str], tensor: str, shape: tuple[int, int]
) -> list[Parameter]:
    bias = stack(f"{name}{BIAS}", blocks, {f"{tensor}.bias": shape[:1]})
    return [stack(name, blocks, {f"{tensor}.weight": shape}), bias]


def _stacked_norm(name: str, blocks: Sequence[str], tensor: str, width: int) -> list[Parameter]:
    ends = {"": "weight", BIAS: "bias"}
    return [
        stack(f"{name}{ours}", blocks, {f"{tensor}.{theirs}": (width,)}, float32=True)
        for ours, theirs in ends.items()
    ]


def _single_product(name: str, tensor: str, shape: tuple[int, int]) -> list[Parameter]:
    bias = single(f"{name}{BIAS}", f"{tensor}.bias", shape[:1])
    return [single(name, f"{tensor}.weight", shape), bias]


def _single_norm(name: str, tensor: str, width: int) -> list[Parameter]:
    ends = {"": "weight", BIAS: "bias"}
    return [
        replace(single(f"{name}{ours}", f"{tensor}.{theirs}", (width,)), float32=True)
        for ours, theirs in ends.items()
    ]
