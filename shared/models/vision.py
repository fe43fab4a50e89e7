"""What a config.json says of a vision tower.

The tower turns one picture into rows that stand where the prompt's placeholders do. It is a model
of its own beside the text's: text alone is served without a look at it.
"""

from dataclasses import dataclass

from shared.models.config_classes import QWEN3_5_OUTER, QWEN3_5_VISION
from shared.models.fields import MOST_NAMED, Json, count, object_of, positive
from shared.models.neutral import NEUTRAL

TENSORS = "visual."
"""Begins the name of each tensor of a tower."""

EPS = 1e-6
"""Added to the variance of every layer norm; no field says it."""

THETA = 10000.0
"""Base of the frequencies by which patches turn."""

ROPE = {"rope_type": ("axial", "default"), "rope_theta": (THETA,)}
"""Rotary settings of a tower, and the values that are served."""

PLACE = "vision_config"

READ = QWEN3_5_VISION.fields.keys() | {"deepstack_visual_indexes", "model_type", "architectures"}
"""Fields of `vision_config` that are read."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """What a vision tower is like.

    Attributes:
      depth: Blocks, all of which see the whole picture.
      hidden: Width of a patch's row.
      num_heads: Of each block's attention.
      intermediate: Width inside a block's MLP.
      channels: Of a pixel.
      patch_size: Pixels on a side of a patch.
      frames: Pictures behind one another that a patch spans; a single one is repeated.
      merge_size: So many patches on a side become one row of the prompt.
      table_side: The learned table of places has so many rows, and as many columns.
      out: Width of the rows that stand in the prompt, the text model's.
      image_token: The token in whose place those rows stand.
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
        """Numbers of a patch as the tower reads it."""
        return self.channels * self.frames * self.patch_size**2

    @property
    def patch_bytes(self) -> int:
        """Bytes of a patch as it travels, in one frame."""
        return self.channels * self.patch_size**2

    def picture_bytes(self, num_patches: int) -> int:
        """Of so many patches, in whole words."""
        return -(-num_patches * self.patch_bytes // 4) * 4

    def num_patches(self, picture_bytes: int) -> int:
        """The inverse of `picture_bytes`."""
        return picture_bytes // self.patch_bytes

    def most_lines(self, num_patches: int) -> int:
        """Most rows and columns together of a picture of so many patches: of the narrowest."""
        return num_patches // self.merge_size + self.merge_size

    def block_products(self, num_patches: int) -> int:
        """Multiplications of one block, with those of every patch's attention to all."""
        weights = 4 * self.hidden**2 + 2 * self.hidden * self.intermediate
        return num_patches * (weights + 2 * num_patches * self.hidden)

    @property
    def merged(self) -> int:
        """Patches that become one row of the prompt."""
        return self.merge_size**2


def read_vision(config: Json, hidden: int, vocab: int) -> VisionConfig | None:
    """The tower that a config.json describes; None where it describes none.

    Args:
      hidden, vocab: Of the text model.

    Raises:
      ValueError: The tower is another one than this program computes; one sentence that names the
        field.
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
        raise ValueError("num_position_embeddings in vision_config must be the square of a number")
    # Half of a head turns with the row and half with the column, and each turns in pairs.
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
    """Refuses by name what would change the tower and is not implemented."""
    if vision.get("deepstack_visual_indexes"):
        raise ValueError(
            "deepstack_visual_indexes in vision_config is not supported; the tower's rows stand "
            "in the prompt alone"
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
    """A size, or a list of equal sizes."""
    sizes = vision[field]
    if isinstance(sizes, list) and len(set(map(str, sizes))) == 1:
        return positive({field: sizes[0]}, field, place=PLACE)
    return positive(vision, field, place=PLACE)
