"""Config of the block that a DFlash, DSpark or DFlash2 draft model fills.

The model is a small Qwen3 that predicts a whole block of mask tokens in one pass.
"""

from dataclasses import dataclass, replace

from shared.drafts.config_formats import LEFT_OUT, PLACE, SPECULATORS, RawDraftConfig
from shared.drafts.dflash2 import ConvConfig, SelectorConfig, conv_of, selector_of
from shared.drafts.dspark_config import MarkovConfig, markov_of
from shared.models.config import ModelConfig
from shared.models.config_fields import Json, flag, listed, object_of, positive, word

MAX_BLOCK = 17
"""Maximum depth of a draft tree, plus one."""

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
      markov: Markov head of a DSpark model, which conditions draft tokens on earlier ones; else
        None.
      conv: Convolutions in the layers of a DFlash2 model; else None.
      selector: Selector of a DFlash2 model, which conditions draft tokens on earlier ones; else
        None.
    """

    size: int
    mask_id: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    from_anchor: bool
    first_slot: int
    markov: MarkovConfig | None
    conv: ConvConfig | None
    selector: SelectorConfig | None

    @property
    def nodes(self) -> int:
        """Nodes of the chain of all draft tokens of a block, including the root."""
        return self.size + 1 - self.first_slot

    def check_shape(self, nodes: int, width: int, scratch: int) -> None:
        """Checks that a draft shape is a chain of the block's first draft tokens.

        Args:
          nodes, width: Nodes and width of the tree.
          scratch: Positions past the length that are reserved for the step. The whole block is
            written, however few of its draft tokens are used.

        Raises:
          ValueError: It is not such a chain, or the block exceeds its scratch positions.
        """
        if width != 1 or nodes > self.nodes:
            raise ValueError(
                f"a head with blocks of {self.size} tokens drafts chains of at most "
                f"{self.nodes} nodes, got {nodes} nodes and width {width}"
            )
        if scratch < self.size:
            raise ValueError(
                f"a head with blocks of {self.size} tokens writes {self.size} positions past the "
                f"length, but a shape of {nodes} nodes reserves {scratch}"
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
    left_out = LEFT_OUT[kind] if said in SPECULATORS else {}
    settings = {**left_out, **config, **object_of(config, "dflash_config")}
    size = settings.get("block_size")
    return size + 1 - _first_slot(settings, kind) if isinstance(size, int) else None


def block_of(stated: RawDraftConfig, layer: ModelConfig) -> BlockConfig:
    """Reads the block of a DFlash, DSpark or DFlash2 draft model.

    Args:
      stated: Normalised fields of its config.json.
      layer: Config of the draft model's layers.

    Raises:
      ValueError: A field is missing or out of range; the message names it.
    """
    settings = stated.settings
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
    non_causal = stated.flag("sliding_window_non_causal")
    return BlockConfig(
        size=size,
        mask_id=mask_id,
        windows=windows,
        causal=tuple(not non_causal and stated.flag("is_causal", each) for each in slides),
        from_anchor=stated.is_speculators,
        first_slot=first_slot,
        markov=markov_of(stated) if stated.kind == "DSPARK" else None,
        conv=conv_of(stated, layer, size) if stated.kind == "DFLASH2" else None,
        selector=selector_of(stated, layer) if stated.kind == "DFLASH2" else None,
    )


def _first_slot(settings: Json, kind: str) -> int:
    """Returns the first slot; DSpark models use the newest token's own slot by default."""
    return 1 - int(flag(settings, "sample_from_anchor", kind == "DSPARK", PLACE))


def default_layers(num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Returns the default target layers whose output is read: from the second to the third last,
    evenly spaced.
    """
    if num_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_layers - 1)) for i in range(num_layers))


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
