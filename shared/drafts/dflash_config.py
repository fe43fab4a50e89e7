"""Config of the block that a draft model fills, such as DFlash, DSpark or DFlash2.

The model is a small Qwen3 that predicts a whole block of mask tokens in one pass.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

from shared.drafts.block_part import BlockPart
from shared.drafts.config_formats import SPECULATORS
from shared.drafts.kinds import CAUSAL_FIELDS, FORMATS, HEADS
from shared.drafts.raw_config import PLACE, RawDraftConfig
from shared.models.config import ModelConfig
from shared.models.config_fields import Json, flag, listed, object_of, positive, word

MAX_BLOCK = 17
"""Maximum depth of a draft tree, plus one."""

Part = TypeVar("Part", bound=BlockPart)

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Block of a draft model, and the attention of its rows to the block and to the context.

    Attributes:
      size: Rows of the block: the newest token, then masks.
      mask_id: Token id of a mask.
      windows: Sliding window of each layer; None for full attention. A key `window` positions away
        is not visible.
      causal: Per layer, True if a row does not attend to later rows of the block.
      from_anchor: True if the window is counted from the start of the block, so that all rows
        attend to the whole block and to `window` positions before it; False if it is counted from
        each row.
      first_slot: Slot of the first draft token: 0 if a slot predicts the token after its position
        (DSpark), 1 if it predicts the token at it.
      parts: Parts that the kind of head has in addition to a DFlash head.
    """

    size: int
    mask_id: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    from_anchor: bool
    first_slot: int
    parts: tuple[BlockPart, ...]

    @property
    def nodes(self) -> int:
        """Nodes of the chain of all draft tokens of a block, including the root."""
        return self.size + 1 - self.first_slot

    def part(self, of: type[Part]) -> Part | None:
        """Returns the part of a class; None if the head has none."""
        return next((part for part in self.parts if isinstance(part, of)), None)

    def check_shape(self, depth: int, width: int, scratch: int) -> None:
        """Checks that a draft shape has no more levels than a block drafts.

        Args:
          depth, width: Levels and width of the tree.
          scratch: Positions past the length that are reserved for the step. The whole block is
            written, however few of its draft tokens are used.

        Raises:
          ValueError: It has more levels, or the block exceeds its scratch positions.
        """
        if depth >= self.nodes:
            raise ValueError(
                f"a head with blocks of {self.size} tokens drafts at most {self.nodes - 1} levels, "
                f"got {depth}"
            )
        if scratch < self.size:
            raise ValueError(
                f"a head with blocks of {self.size} tokens writes {self.size} positions past the "
                f"length, but a shape of {depth} levels and width {width} reserves {scratch}"
            )

    def with_window(self, window: int) -> "BlockConfig":
        """Returns the block with one window for all layers; the window must be at least a block."""
        return replace(self, windows=(window,) * len(self.windows))


def stated_nodes(config: Json, kind: str) -> int | None:
    """Returns the unvalidated number of chain nodes of a block in a config.json; None without a
    block.

    Args:
      config: Contents of the config.json.
      kind: Kind of the head.
    """
    said = word(config, "speculators_model_type", "", PLACE)
    left_out = FORMATS[kind].defaults if said in SPECULATORS else {}
    settings = {**left_out, **config, **object_of(config, FORMATS[kind].nested)}
    size = settings.get("block_size")
    return size + 1 - _first_slot(settings, kind) if isinstance(size, int) else None


def block_of(stated: RawDraftConfig, layer: ModelConfig) -> BlockConfig:
    """Reads the block of a draft model.

    Args:
      stated: Normalised fields of its config.json.
      layer: Config of the draft model's layers.

    Raises:
      ValueError: A field is missing or out of range; the message names it.
    """
    settings, read_parts = stated.settings, HEADS[stated.kind].read_parts
    size, mask_id = (_whole(settings, name) for name in ("block_size", "mask_token_id"))
    first_slot = _first_slot(settings, stated.kind)
    most = MAX_BLOCK - 1 + first_slot
    if not 2 <= size <= most:
        raise ValueError(f"the draft model's block_size must be 2 to {most}, got {size}")
    if not 0 <= mask_id < layer.vocab:
        raise ValueError(
            f"the draft model's mask_token_id must be below {layer.vocab}, got {mask_id}"
        )
    windows = windows_of(settings, layer.num_layers)
    slides = [window is not None for window in windows]
    non_causal, is_causal = stated.flag("sliding_window_non_causal"), _is_causal_head(stated)
    return BlockConfig(
        size=size,
        mask_id=mask_id,
        windows=windows,
        causal=tuple(
            is_causal or (not non_causal and stated.flag("is_causal", each)) for each in slides
        ),
        from_anchor=stated.is_speculators,
        first_slot=first_slot,
        parts=() if read_parts is None else read_parts(stated, layer, size),
    )


def _is_causal_head(stated: RawDraftConfig) -> bool:
    """Returns True for a JetSpec head: the block is causal in all layers.

    Raises:
      ValueError: The field of another architecture is given, or the fields are contradictory, or
        the block of the architecture is ambiguous without its field.
    """
    names = listed(stated.settings, "architectures", str, PLACE) or []
    formats = {} if stated.is_speculators else CAUSAL_FIELDS
    own = next((formats[name] for name in names if name in formats), None)
    for field in CAUSAL_FIELDS.values():
        is_own = field == own and field in stated.nested
        if stated.flag(field) and not is_own:
            raise ValueError(
                f"the draft model's {field} is supported only in dflash_config of "
                f"{' and '.join(f'{name} ({each})' for name, each in CAUSAL_FIELDS.items())}; "
                "use a head of one of these formats"
            )
    if own == "causal" and own not in stated.nested:
        raise ValueError(
            "the draft model's dflash_config has no causal, so whether the block of a "
            "Qwen3DFlashDraftModel is causal is unknown; add true for a head of train_jetspec, "
            "else false"
        )
    is_causal = own is not None and stated.flag(own)
    contradicts = is_causal and not stated.flag("is_causal", True)
    if contradicts or (is_causal and stated.flag("sliding_window_non_causal")):
        other = "is_causal false" if contradicts else "sliding_window_non_causal true"
        raise ValueError(
            f"the draft model's {own} true contradicts {other}; remove one of them from its "
            "config.json"
        )
    return is_causal


def _first_slot(settings: Json, kind: str) -> int:
    is_default = HEADS[kind].samples_from_anchor
    return 1 - int(flag(settings, "sample_from_anchor", is_default, PLACE))


def windows_of(settings: Json, num_layers: int) -> tuple[int | None, ...]:
    """Reads the sliding window of each layer; None for full attention.

    Raises:
      ValueError: A field is missing or out of range; the message names it.
    """
    is_sliding = [kind == SLIDING for kind in _kinds(settings, num_layers)]
    window = positive(settings, "sliding_window", place=PLACE) if any(is_sliding) else None
    return tuple(window if each else None for each in is_sliding)


def _kinds(settings: Json, num_layers: int) -> list[str]:
    kinds = listed(settings, "layer_types", str, PLACE)
    if kinds is None:
        if flag(settings, "use_sliding_window", place=PLACE):
            raise ValueError("the draft model's use_sliding_window requires layer_types")
        return [FULL] * num_layers
    unknown = sorted({*kinds} - {SLIDING, FULL})
    if unknown or len(kinds) != num_layers:
        what = f"contains {unknown[0]}" if unknown else f"lists {len(kinds)} layers"
        raise ValueError(
            f"the draft model's layer_types {what}; it must name {num_layers} layers, each "
            f"{SLIDING} or {FULL}"
        )
    return kinds


def _whole(settings: Json, field: str) -> int:
    value = settings.get(field)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"the draft model's {field} must be an integer, got {value!r}")
    return value
