"""What a start makes of a checkpoint's vision tower: bounds of pictures, and the pool's rows."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from shared.boundary.images import PicturePool
from shared.boundary.program import Extra, Program, Work
from shared.engine.encoder_cache import least_rows
from shared.models.families import vision_from_folder
from shared.models.image_processor import PictureConfig, pictures_from_folder
from shared.models.vision_config import VisionConfig
from shared.options.flags import ConfigError, spelling
from shared.options.options import Options
from shared.process.resolved_config import Settled
from shared.spec.draft_tree import TreeShape

TEXT_ALONE = "--language-model-only serves the model's text"

DECODER = "PIL"
"""The package that opens pictures in the server's workers, which would find out too late."""

KEPT_PICTURES = 4
"""Of the largest size, for which a pool has rows where no flag says how many it has."""

MOST_PRODUCTS = 3 * 10**12
"""Multiplications of a step that encodes, unless a block alone has more: some 20 ms of an H100."""

FEW_SIZES = 8
"""Where programs are few, a picture up to this part of the largest has one of its own."""


@dataclass(frozen=True)
class Tower:
    """A vision tower that a start serves with.

    Attributes:
      vision: What it is like.
      processor: What the checkpoint makes of pictures.
    """

    vision: VisionConfig
    processor: PictureConfig


def find_vision(options: Options, folder: str | Path) -> VisionConfig | None:
    """The tower that a folder's config.json names, unless text alone is to be served.

    Raises:
      ConfigError: It is none that is computed here.
    """
    if options.model.language_model_only:
        return None
    try:
        return vision_from_folder(folder)
    except ValueError as error:
        raise ConfigError(f"{error}; {TEXT_ALONE}") from error


def find_tower(options: Options, folder: str | Path, vision: VisionConfig | None) -> Tower | None:
    """The tower of a model folder; None where text alone is served.

    Args:
      vision: See `find_vision`; None too where the checkpoint's files hold no tower.

    Raises:
      ConfigError: The tower lacks its settings of pictures, or the start what decodes them; or
        flags speak of pictures where there is no tower.
    """
    if vision is None:
        for name in ("max_image_tokens", "mm_encoder_cache_tokens"):
            if getattr(options.engine, name) is not None:
                raise ConfigError(
                    f"{spelling(name)} requires image input, and only the text model is served; "
                    "remove the flag"
                )
        return None
    if find_spec(DECODER) is None:
        raise ConfigError(
            "image input requires the package pillow; install the extra vision; " + TEXT_ALONE
        )
    try:
        return Tower(vision, pictures_from_folder(folder, vision))
    except ValueError as error:
        raise ConfigError(f"{error}; {TEXT_ALONE}") from error


def picture_pool(tower: Tower, settled: Settled) -> PicturePool:
    """The pool of a start, whose settings shrink pictures to what one may take.

    Raises:
      ConfigError: Flags leave no room for a picture.
    """
    processor, per_row = tower.processor, tower.processor.factor**2
    most = max(1, min(settled.most_picture_tokens, processor.most // per_row))
    wanted = settled.told.engine.mm_encoder_cache_tokens
    rows, least = wanted or KEPT_PICTURES * most, least_rows(most)
    if wanted is not None and wanted < least:
        raise ConfigError(
            f"--mm-encoder-cache-tokens {wanted} is too small for one step, which needs "
            f"{least}; increase it, or lower --max-image-tokens"
        )
    processor = replace(processor, most=most * per_row, least=min(processor.least, most * per_row))
    return PicturePool(tower.vision, processor, 1 + max(rows, least))


def encodings(pool: PicturePool, are_few: bool) -> list[Program]:
    """The programs that encode: for sizes that double, from the smallest picture's on.

    Large pictures are encoded in several steps, between which streams have theirs.
    """
    per_row = pool.processor.factor**2
    most, size = pool.processor.most // per_row, -(-pool.processor.least // per_row)
    sizes = {max(size, most // FEW_SIZES), most} if are_few else {most}
    while not are_few and size < most:
        sizes.add(size)
        size *= 2
    patches = [rows * pool.vision.merged for rows in sorted(sizes)]
    return [
        Program(
            work=Work.ENCODE,
            batch=1,
            pages=1,
            tokens=size,
            shape=TreeShape.plain(1),
            extras=Extra.NONE,
            blocks=blocks,
        )
        for size in patches
        for blocks in _pieces(pool.vision, size)
    ]


def _pieces(vision: VisionConfig, patches: int) -> list[range]:
    """The blocks of each step that encodes a picture of so many patches."""
    most = max(1, MOST_PRODUCTS // vision.block_products(patches))
    count = -(-vision.depth // most)
    bounds = [vision.depth * i // count for i in range(count + 1)]
    return [range(*pair) for pair in pairwise(bounds)]
