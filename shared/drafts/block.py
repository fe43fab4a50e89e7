"""What the config.json of a DFlash, DSpark or DFlash2 draft model says beside its layers' sizes.

The model is a small Qwen3 that fills a whole block of mask tokens in one pass.
"""

from dataclasses import dataclass, replace

from shared.drafts.dflash2 import ConvConfig, SelectorConfig, conv_of, selector_of
from shared.drafts.formats import LEFT_OUT, PLACE, SPECULATORS, Stated
from shared.drafts.markov import MarkovConfig, markov_of
from shared.models.config import ModelConfig
from shared.models.fields import Json, flag, listed, object_of, positive, word

MAX_BLOCK = 17
"""One more than the levels that a draft tree may have."""

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """The block that a draft model fills, and what its rows see of it and of the context.

    Attributes:
      size: Rows of the block: the newest token, then masks.
      mask_id: Token id of a mask.
      windows: For each layer how near a key must be to be seen, None where any is; a key that is
        `window` positions away is not.
      causal: For each layer whether a row of the block sees none of those behind it.
      from_anchor: A window is counted once for the whole block, which sees all of itself and so
        many positions before it; else from each row.
      first_slot: Slot of the first draft: 0 where a slot scores the token behind its own position,
        as of a DSpark model, 1 where it scores the token at it.
      markov: How drafts know those before them, of a DSpark model; None of another.
      conv: The convolutions of the layers of a DFlash2 model; None of another.
      selector: How drafts know those before them, of a DFlash2 model; None of another.
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
        """Of the chain of all drafts of a block, with its root."""
        return self.size + 1 - self.first_slot

    def check_shape(self, nodes: int, width: int, scratch: int) -> None:
        """Refuses a draft shape that is no chain of the block's first drafts.

        Args:
          nodes, width: Of the tree.
          scratch: Positions past the length that are kept for the step. The block is as wide as it
            is, however few of its drafts are taken.

        Raises:
          ValueError: It is another one, or the block would be written past its scratch.
        """
        if width != 1 or nodes > self.nodes:
            raise ValueError(
                f"a head with blocks of {self.size} tokens drafts chains of at most "
                f"{self.nodes} nodes, got {nodes} nodes and width {width}"
            )
        if scratch < self.size:
            raise ValueError(
                f"a head with blocks of {self.size} tokens writes so many positions past "
                f"the length, and a shape of {nodes} nodes has room for {scratch}"
            )

    def with_window(self, window: int) -> "BlockConfig":
        """With one window, at least a block, for every layer."""
        return replace(self, windows=(window,) * len(self.windows))


def stated_nodes(config: Json, kind: str) -> int | None:
    """Nodes of the chain of a block that a config.json states, right or not; None without one.

    Args:
      kind: Of the head.
    """
    said = word(config, "speculators_model_type", "", PLACE)
    left_out = LEFT_OUT[kind] if said in SPECULATORS else {}
    settings = {**left_out, **config, **object_of(config, "dflash_config")}
    size = settings.get("block_size")
    return size + 1 - _first_slot(settings, kind) if isinstance(size, int) else None


def block_of(stated: Stated, layer: ModelConfig) -> BlockConfig:
    """The block of a DFlash, DSpark or DFlash2 draft model.

    Args:
      stated: What its config.json says.
      layer: Sizes of the draft model's layers.

    Raises:
      ValueError: A field is missing or out of range; one sentence that names it.
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
    """DSpark models use the newest token's own slot where they do not say otherwise."""
    return 1 - int(flag(settings, "sample_from_anchor", kind == "DSPARK", PLACE))


def default_layers(num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Layers of the target whose output is read: from the second to the third last, evenly."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_layers - 1)) for i in range(num_layers))


def windows_of(settings: Json, num_layers: int) -> tuple[int | None, ...]:
    """For each layer how near a key must be to be seen, None where any is.

    Raises:
      ValueError: A field is missing or out of range; one sentence that names it.
    """
    is_sliding = [kind == SLIDING for kind in _kinds(settings, num_layers)]
    window = positive(settings, "sliding_window", place=PLACE) if any(is_sliding) else None
    return tuple(window if each else None for each in is_sliding)


def _kinds(settings: Json, num_layers: int) -> list[str]:
    kinds = listed(settings, "layer_types", str, PLACE)
    if kinds is None:
        if flag(settings, "use_sliding_window", place=PLACE):
            raise ValueError(
                "the draft model's use_sliding_window needs layer_types, which say where it slides"
            )
        return [FULL] * num_layers
    unknown = sorted({*kinds} - {SLIDING, FULL})
    if unknown or len(kinds) != num_layers:
        what = f"holds {unknown[0]}" if unknown else f"lists {len(kinds)} layers"
        raise ValueError(
            f"the draft model's layer_types {what}; it must name {num_layers} layers, each "
            f"{SLIDING} or {FULL}"
        )
    return kinds


def _whole(settings: Json, field: str) -> int:
    value = settings.get(field)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"the draft model's {field} must be a whole number, got {value!r}")
    return value
