"""Vision encoder config, read from `vision_config` in a config.json.

A vision encoder converts one image into embeddings that replace the prompt's placeholder tokens. It
is separate from the language model: text-only serving does not read it.
"""

from dataclasses import dataclass

from shared.models.config_classes.qwen import QWEN3_5_OUTER, QWEN3_5_VISION
from shared.models.config_fields import MOST_NAMED, Json, count, object_of, positive
from shared.models.neutral import NEUTRAL

TENSORS = "visual."
"""Prefix of the names of a vision encoder's tensors."""

EPS = 1e-6
"""Epsilon of all layer norms; no config field defines it."""

THETA = 10000.0
"""Base of the rotary frequencies of patches."""

ROPE = {"rope_type": ("axial", "default"), "rope_theta": (THETA,)}
"""Rotary settings of a vision encoder with their supported values."""

PLACE = "vision_config"

READ = QWEN3_5_VISION.fields.keys() | {"deepstack_visual_indexes", "model_type", "architectures"}
"""Fields of `vision_config` that are read."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Settings of a vision encoder (ViT and patch merger).

    Attributes:
      depth: Number of blocks, all with attention over the whole image.
      hidden: Width of a patch's hidden state.
      num_heads: Attention heads of each block.
      intermediate: Inner width of a block's MLP.
      channels: Colour channels.
      patch_size: Side of a patch in pixels.
      frames: Frames in a patch; a single image is repeated.
      merge_size: Patches on a side of the square that is merged into one image token.
      table_side: Rows, and columns, of the learned position embedding.
      out: Width of image embeddings, equal to the text model's hidden size.
      image_token: Placeholder token that image embeddings replace.
    """

    depth: int
    hidden: int
    num_heads: int
    intermediate: int
    channels: int
    patch_size: int
    frames: int
    merge_size: int
    table_side: int
    out: int
    image_token: int

    @property
    def head_size(self) -> int:
        """Dimensions of a head."""
        return self.hidden // self.num_heads

    @property
    def patch_numbers(self) -> int:
        """Input values of a patch, all frames included."""
        return self.channels * self.frames * self.patch_size**2

    @property
    def patch_bytes(self) -> int:
        """Bytes of a patch in a plan, with one frame."""
        return self.channels * self.patch_size**2

    def image_bytes(self, num_patches: int) -> int:
        """Returns the bytes of `num_patches` patches, rounded up to a multiple of 4."""
        return -(-num_patches * self.patch_bytes // 4) * 4

    def num_patches(self, image_bytes: int) -> int:
        """Returns the number of patches; the inverse of `image_bytes`."""
        return image_bytes // self.patch_bytes

    def max_lines(self, num_patches: int) -> int:
        """Returns the maximum of rows plus columns for an image of `num_patches` patches (the
        narrowest image).
        """
        return num_patches // self.merge_size + self.merge_size

    def block_products(self, num_patches: int) -> int:
        """Returns the multiplications of one block, including full attention."""
        weights = 4 * self.hidden**2 + 2 * self.hidden * self.intermediate
        return num_patches * (weights + 2 * num_patches * self.hidden)

    @property
    def merged(self) -> int:
        """Patches that are merged into one image token."""
        return self.merge_size**2


def read_vision(config: Json, hidden: int, vocab: int) -> VisionConfig | None:
    """Reads the vision encoder config of a config.json; returns None if it has none.

    Args:
      config: Contents of config.json.
      hidden, vocab: Hidden size and vocabulary size of the text model.

    Raises:
      ValueError: The vision encoder is not supported; the message names the field.
    """
    stated = object_of(config, PLACE)
    if not stated:
        return None
    vision = QWEN3_5_VISION.completed(stated, PLACE)
    _refuse_other(vision)
    side = round(positive(vision, "num_position_embeddings") ** 0.5)
    found = VisionConfig(
        depth=positive(vision, "depth", most=MOST_NAMED),
        hidden=positive(vision, "hidden_size"),
        num_heads=positive(vision, "num_heads"),
        intermediate=positive(vision, "intermediate_size"),
        channels=positive(vision, "in_channels"),
        patch_size=_side(vision, "patch_size"),
        frames=_side(vision, "temporal_patch_size"),
        merge_size=positive(vision, "spatial_merge_size"),
        table_side=side,
        out=positive(vision, "out_hidden_size"),
        image_token=count(QWEN3_5_OUTER.completed(config), "image_token_id"),
    )
    if found.channels != 3:
        raise ValueError(f"in_channels in vision_config must be 3, got {found.channels}")
    if side**2 != vision["num_position_embeddings"]:
        raise ValueError(
            "num_position_embeddings in vision_config must be the square of an integer"
        )
    # Half of a head is rotated by the row and half by the column, each in pairs.
    if found.hidden % found.num_heads or found.head_size % 4:
        raise ValueError(
            f"hidden_size ({found.hidden}) in vision_config must be num_heads "
            f"({found.num_heads}) times a multiple of 4"
        )
    if found.out != hidden:
        raise ValueError(
            f"out_hidden_size in vision_config ({found.out}) must be the text model's "
            f"hidden_size ({hidden})"
        )
    if not 0 < found.image_token < vocab:
        raise ValueError(f"image_token_id in config.json must name a token below {vocab}")
    return found


def _refuse_other(vision: Json) -> None:
    """Raises an error for settings that would change the vision encoder and are not implemented."""
    if vision.get("deepstack_visual_indexes"):
        raise ValueError(
            "deepstack_visual_indexes in vision_config is not supported; use a model without "
            "DeepStack features"
        )
    if vision["hidden_act"] != "gelu_pytorch_tanh":
        raise ValueError(
            f"hidden_act in vision_config must be gelu_pytorch_tanh, got {vision['hidden_act']!r}"
        )
    for name, value in object_of(vision, "rope_parameters", PLACE).items():
        if value is not None and value not in ROPE.get(name, ()):
            served = " or ".join(map(str, ROPE.get(name, ("absent",))))
            raise ValueError(f"{name} in vision_config must be {served}, got {value!r:.60}")
    asking = {name for name, value in vision.items() if value}
    if unknown := sorted(asking - READ - NEUTRAL):
        raise ValueError(f"{unknown[0]} in vision_config is not supported; use another checkpoint")


def _side(vision: Json, field: str) -> int:
    """Reads a size, or a list of equal sizes."""
    sizes = vision[field]
    if isinstance(sizes, list) and len(set(map(str, sizes))) == 1:
        return positive({field: sizes[0]}, field, place=PLACE)
    return positive(vision, field, place=PLACE)
