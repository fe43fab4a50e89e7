"""What the config.json of a DFlash draft model says beside its layers' sizes.

The model is a small Qwen3 that fills a whole block of mask tokens in one pass. Relatives with more
modules share its architecture and most of its tensors' names; they are refused by their own names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shared.models.config import ModelConfig
from shared.models.fields import Json

MAX_BLOCK = 17
"""One more than the levels that a draft tree may have."""

RELATIVES = {
    "conv_kernel_size": "DFlash2",
    "selector_rank": "DFlash2",
    "markov_rank": "DSpark",
}
"""Fields of other models that a DFlash draft model has not."""

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """The block that a DFlash draft model fills, and what its rows see of it and of the context.

    Attributes:
      size: Rows of the block: the newest token, then masks.
      mask_id: Token id of a mask.
      windows: For each layer how near a key must be to be seen, None where any is; a key that is
        `window` positions away is not.
      causal: For each layer whether a row of the block sees none of those behind it.
    """

    size: int
    mask_id: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]

    def check_shape(self, nodes: int, width: int, scratch: int) -> None:
        """Refuses a draft shape that is no chain of the block's first drafts.

        Args:
          nodes, width: Of the tree.
          scratch: Positions past the length that are kept for the step. The block is as wide as it
            is, however few of its drafts are taken.

        Raises:
          ValueError: It is another one, or the block would be written past its scratch.
        """
        if width != 1 or nodes > self.size:
            raise ValueError(
                f"a DFLASH head with blocks of {self.size} tokens drafts chains of at most "
                f"{self.size} nodes, got {nodes} nodes and width {width}"
            )
        if scratch < self.size:
            raise ValueError(
                f"a DFLASH head with blocks of {self.size} tokens writes so many positions past "
                f"the length, and a shape of {nodes} nodes has room for {scratch}"
            )

    def with_window(self, window: int) -> "BlockConfig":
        """With one window, at least a block, for every layer."""
        return replace(self, windows=(window,) * len(self.windows))


def settings_of(config: Json) -> dict[str, Any]:
    """The fields of config.json with those of `dflash_config`, which may hold any of them."""
    dflash = config.get("dflash_config") or {}
    if not isinstance(dflash, Mapping):
        raise ValueError("the draft model's dflash_config must be an object")
    return {**config, **dflash}


def stated_block(config: Json) -> int | None:
    """The size of the block that a config.json states, right or not; None where there is none."""
    size = settings_of(config).get("block_size")
    return size if isinstance(size, int) else None


def refuse_relatives(settings: Json) -> None:
    """Refuses a model that shares the architecture's name and is another one.

    Raises:
      ValueError: It is; one sentence that names the field.
    """
    for field, name in RELATIVES.items():
        if settings.get(field):
            raise ValueError(
                f"the draft model's {field} makes it a {name} model, which is not supported; "
                "use a plain DFlash draft model"
            )
    projector = settings.get("projector_type")
    if projector not in (None, "dflash"):
        name = "a Domino model" if projector == "domino" else "another model"
        raise ValueError(
            f"the draft model's projector_type {projector} makes it {name}, which is not "
            "supported; use a plain DFlash draft model"
        )


def block_of(settings: Json, layer: ModelConfig) -> BlockConfig:
    """The block of a DFlash draft model.

    Args:
      settings: See `settings_of`.
      layer: Sizes of the draft model's layers.

    Raises:
      ValueError: A field is missing or out of range; one sentence that names it.
    """
    size, mask_id = (_whole(settings, name) for name in ("block_size", "mask_token_id"))
    if not 2 <= size <= MAX_BLOCK:
        raise ValueError(f"the draft model's block_size must be 2 to {MAX_BLOCK}, got {size}")
    if not 0 <= mask_id < layer.vocab:
        raise ValueError(
            f"the draft model's mask_token_id must be below {layer.vocab}, got {mask_id}"
        )
    kinds = _kinds(settings, layer.num_layers)
    is_sliding = [kind == SLIDING for kind in kinds]
    window = _whole(settings, "sliding_window") if any(is_sliding) else None
    if window is not None and window < 1:
        raise ValueError(f"the draft model's sliding_window must be positive, got {window}")
    stated = settings.get("is_causal")
    return BlockConfig(
        size=size,
        mask_id=mask_id,
        windows=tuple(window if each else None for each in is_sliding),
        causal=tuple(each if stated is None else bool(stated) for each in is_sliding),
    )


def streams_of(settings: Json, layer: ModelConfig, target: ModelConfig) -> tuple[int, ...]:
    """Which residual streams of the target are read; listed ids name layers whose output it is.

    Raises:
      ValueError: They are no ascending layers of this target.
    """
    L = target.num_layers
    stated = settings.get("num_target_layers")
    if stated not in (None, L):
        raise ValueError(
            f"the draft model's num_target_layers is {stated}, this model has {L} layers; use a "
            "draft model that was trained for this model"
        )
    listed = settings.get("target_layer_ids")
    ids = _default_ids(layer.num_layers, L) if listed is None else [int(i) for i in listed]
    if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= L:
        raise ValueError(
            f"the draft model's target_layer_ids are {ids}; they must ascend and name layers of "
            f"the target's {L}"
        )
    return tuple(i + 1 for i in ids)


def _default_ids(num_layers: int, num_target_layers: int) -> list[int]:
    """Spread evenly from the second layer to the third last."""
    if num_layers == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + i * span / (num_layers - 1)) for i in range(num_layers)]


def _kinds(settings: Json, num_layers: int) -> list[str]:
    kinds = settings.get("layer_types")
    if kinds is None:
        if settings.get("use_sliding_window"):
            raise ValueError(
                "the draft model's use_sliding_window needs layer_types, which say where it slides"
            )
        return [FULL] * num_layers
    unknown = sorted({str(kind) for kind in kinds} - {SLIDING, FULL})
    if unknown or len(kinds) != num_layers:
        what = f"holds {unknown[0]}" if unknown else f"lists {len(kinds)} layers"
        raise ValueError(
            f"the draft model's layer_types {what}; it must name {num_layers} layers, each "
            f"{SLIDING} or {FULL}"
        )
    return list(kinds)


def _whole(settings: Json, field: str) -> int:
    value = settings.get(field)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"the draft model's {field} must be a whole number, got {value!r}")
    return value
