"""By which positions the rows of a prompt with pictures turn.

A row has its place, which counts tokens and says where its KV lies, and three turns, which say how
its queries and keys are rotated: by time, by row and by column. In text all four are equal. The
rows of a picture have one turn of time, and turn by their row and their column in the picture; what
comes behind goes on as if the picture were as long as its longer side.

Source: Qwen2-VL, Wang et al. 2024, arXiv:2409.12191; the order of the dimensions is Qwen3-VL's.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from shared.models.rotary import RotaryConfig


def turns(
    tokens: Int[np.ndarray, " T"], image_token: int, grids: Sequence[tuple[int, int]]
) -> tuple[Int[np.ndarray, "T 3"], int]:
    """The three turns of each row, and what is added to the place of every later token.

    Args:
      tokens: The expanded prompt; see `shared.pictures.prompt.expanded`.
      grids: Rows and columns of each picture, in those that stand in the prompt.

    Raises:
      ValueError: The image tokens are not those of these pictures.
    """
    # The engine asks this of whole prompts between two steps: a loop is over pictures alone.
    found, places = np.empty((len(tokens), 3), np.int32), np.flatnonzero(tokens == image_token)
    at = turn = seen = 0
    for rows, columns in grids:
        count = rows * columns
        own = places[seen : seen + count]
        if not count or len(own) < count or own[-1] - own[0] != count - 1:
            raise ValueError("the prompt has other image tokens than its pictures have rows")
        first, row_and_column = int(own[0]), np.indices((rows, columns)).reshape(2, -1)
        found[at:first] = np.arange(turn, turn + first - at)[:, None]
        turn += first - at
        found[first : first + count, 0] = turn
        found[first : first + count, 1:] = turn + row_and_column.T
        at, turn, seen = first + count, turn + max(rows, columns), seen + count
    if seen < len(places):
        raise ValueError("the prompt has more image tokens than its pictures have rows")
    found[at:] = np.arange(turn, turn + len(tokens) - at)[:, None]
    return found, turn - at


def turn_of_pairs(rotary: RotaryConfig) -> Int[np.ndarray, " half"]:
    """Which of a row's turns each rotated pair of dimensions takes.

    Time, row and column take turns, a pair each, as long as row and column have some left; time has
    what is left over.
    """
    _, by_row, by_column = rotary.sections
    taken = np.zeros(rotary.width // 2, np.int32)
    taken[1 : 3 * by_row : 3], taken[2 : 3 * by_column : 3] = 1, 2
    return taken
