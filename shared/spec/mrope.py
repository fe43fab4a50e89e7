"""M-RoPE positions of prompts with images.

Each token has a sequence position, which indexes its KV, and three rotary positions (time, row,
column). For text all four advance together. The tokens of an image share one time position and use
their row and column in the image grid. Text after an image continues from the larger side of the
grid.

Source: Qwen2-VL, Wang et al. 2024, arXiv:2409.12191; the order of dimensions is Qwen3-VL's
(interleaved).
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from shared.models.rotary import RotaryConfig


def mrope_positions(
    tokens: Int[np.ndarray, " T"], image_token: int, grids: Sequence[tuple[int, int]]
) -> tuple[Int[np.ndarray, "T 3"], int]:
    """Returns the M-RoPE positions of each token, and the position delta of all later tokens.

    Args:
      tokens: The expanded prompt; see `shared.images.placeholders.expanded`.
      image_token: Placeholder token of images.
      grids: Rows and columns of each image, in image tokens.

    Raises:
      ValueError: The image tokens of the prompt do not match the images.
    """
    # The engine calls this for whole prompts between two steps, so it loops over images only.
    positions, places = np.empty((len(tokens), 3), np.int32), np.flatnonzero(tokens == image_token)
    at = position = num_used = 0
    for rows, columns in grids:
        count = rows * columns
        image_places = places[num_used : num_used + count]
        if (
            not count
            or len(image_places) < count
            or image_places[-1] - image_places[0] != count - 1
        ):
            raise ValueError("the image tokens of the prompt do not match the sizes of its images")
        first, row_and_column = int(image_places[0]), np.indices((rows, columns)).reshape(2, -1)
        positions[at:first] = np.arange(position, position + first - at)[:, None]
        position += first - at
        positions[first : first + count, 0] = position
        positions[first : first + count, 1:] = position + row_and_column.T
        at, position, num_used = first + count, position + max(rows, columns), num_used + count
    if num_used < len(places):
        raise ValueError("the prompt has more image tokens than its images")
    positions[at:] = np.arange(position, position + len(tokens) - at)[:, None]
    return positions, position - at


def mrope_section_map(rotary: RotaryConfig) -> Int[np.ndarray, " half"]:
    """Returns the M-RoPE section map: 0 (time), 1 (row) or 2 (column) for each rotated pair.

    Time, row and column alternate while row and column have pairs left; time has the remaining
    pairs.
    """
    _, by_row, by_column = rotary.sections
    taken = np.zeros(rotary.width // 2, np.int32)
    taken[1 : 3 * by_row : 3], taken[2 : 3 * by_column : 3] = 1, 2
    return taken
