"""Vision encoder at startup: image size limits, the encoder cache, and encode programs."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise

from shared.boundary.images import EncoderCacheSpec
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.engine.encoder_cache import min_rows
from shared.models.config import ModelConfig
from shared.models.families import vision_config
from shared.models.image_processor import ImageProcessorConfig, images_from_folder
from shared.models.model_folder import ModelFolder
from shared.models.vision_config import VisionConfig
from shared.options.flags import ConfigError, raise_fault, spelling
from shared.options.options import Options
from shared.process.resolved_config import ResolvedConfig
from shared.spec.draft_tree import TreeShape

TEXT_ALONE = "--language-model-only serves the model's text"

DECODER = "PIL"
"""Package that decodes images in the server's worker processes; checked at startup."""

KEPT_IMAGES = 4
"""Default size of the encoder cache, in images of the largest size."""

MOST_PRODUCTS = 3 * 10**12
"""Maximum multiplications of an encode step with more than one block: about 20 ms on an H100."""

FEW_SIZES = 8
"""With reduced buckets, images up to this fraction of the largest have their own program."""


@dataclass(frozen=True)
class VisionEncoder:
    """Vision encoder of a server.

    Attributes:
      vision: Its config.
      processor: Image processor config of the checkpoint.
    """

    vision: VisionConfig
    processor: ImageProcessorConfig


def find_vision(options: Options, folder: ModelFolder, text: ModelConfig) -> VisionConfig | None:
    """Returns the vision encoder config of a folder; None with `--language-model-only`.

    Args:
      options: Options of the server.
      folder: The model folder.
      text: Config of its language model.

    Raises:
      ConfigError: The vision encoder is not supported.
    """
    if options.model.language_model_only:
        return None
    try:
        return vision_config(folder.config, text)
    except ValueError as error:
        raise ConfigError(f"{error}; {TEXT_ALONE}") from error


def find_vision_encoder(
    options: Options, folder: ModelFolder, vision: VisionConfig | None
) -> VisionEncoder | None:
    """Returns the vision encoder of a model folder; None for text-only serving.

    Args:
      options: Options of the server.
      folder: The model folder.
      vision: Result of `find_vision`; also None if the checkpoint's files have no vision encoder.

    Raises:
      ConfigError: The image processor settings or the decoder package are missing; or image flags
        are set without a vision encoder.
    """
    raise_fault(_decoder_fault() if vision else _image_flags_fault(options))
    if vision is None:
        return None
    try:
        return VisionEncoder(vision, images_from_folder(folder, vision))
    except ValueError as error:
        raise ConfigError(f"{error}; {TEXT_ALONE}") from error


def _image_flags_fault(options: Options) -> str | None:
    """Returns the first image flag, which text-only serving does not support."""
    names = ("max_image_tokens", "mm_encoder_cache_tokens")
    given = next((name for name in names if getattr(options.engine, name) is not None), None)
    if given is None:
        return None
    return (
        f"{spelling(given)} requires image input, and only the text model is served; "
        "remove the flag"
    )


def _decoder_fault() -> str | None:
    """Returns the lack of a package that decodes images."""
    if find_spec(DECODER) is not None:
        return None
    return "image input requires the package pillow; install the extra vision; " + TEXT_ALONE


def image_pool(tower: VisionEncoder, settled: ResolvedConfig) -> EncoderCacheSpec:
    """Returns the encoder cache of a server; limits the image size to `--max-image-tokens`.

    Raises:
      ConfigError: The flags leave no room for an image.
    """
    processor, per_row = tower.processor, tower.processor.multiple**2
    most = max(1, min(settled.max_image_tokens, processor.max_pixels // per_row))
    wanted = settled.options.engine.mm_encoder_cache_tokens
    rows, least = wanted or KEPT_IMAGES * most, min_rows(most)
    if wanted is not None and wanted < least:
        raise ConfigError(
            f"--mm-encoder-cache-tokens {wanted} is too small for one step, which needs "
            f"{least}; increase it, or lower --max-image-tokens"
        )
    processor = replace(
        processor, max_pixels=most * per_row, min_pixels=min(processor.min_pixels, most * per_row)
    )
    return EncoderCacheSpec(tower.vision, processor, 1 + max(rows, least))


def encode_programs(pool: EncoderCacheSpec, are_few: bool) -> list[Program]:
    """Returns the encode programs: for doubling sizes, from the smallest image on.

    Large images are encoded in several steps, between which other requests run.
    """
    per_row = pool.processor.multiple**2
    most, size = pool.processor.max_pixels // per_row, -(-pool.processor.min_pixels // per_row)
    sizes = {max(size, most // FEW_SIZES), most} if are_few else {most}
    while not are_few and size < most:
        sizes.add(size)
        size *= 2
    patches = [rows * pool.vision.merged for rows in sorted(sizes)]
    return [
        Program(
            work=StepKind.ENCODE,
            batch=1,
            pages=1,
            tokens=size,
            shape=TreeShape.plain(1),
            extras=ProgramFeature.NONE,
            blocks=blocks,
        )
        for size in patches
        for blocks in _pieces(pool.vision, size)
    ]


def _pieces(vision: VisionConfig, patches: int) -> list[range]:
    """Returns the block ranges of the steps that encode an image of `patches` patches."""
    most = max(1, MOST_PRODUCTS // vision.block_products(patches))
    count = -(-vision.depth // most)
    bounds = [vision.depth * i // count for i in range(count + 1)]
    return [range(*pair) for pair in pairwise(bounds)]
