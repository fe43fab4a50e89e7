"""The places of pictures in a prompt."""

from collections.abc import Sequence

from shared.models.pictures import PictureRefused


def expanded(tokens: Sequence[int], image_token: int, counts: Sequence[int]) -> list[int]:
    """A prompt in which each picture's token is repeated, once for each of its rows.

    Args:
      tokens: As the chat template has written them, with one image token for each picture.
      counts: Rows of each picture.

    Raises:
      PictureRefused: There are not as many image tokens as pictures, as where a text has the name
        of that token in it.
    """
    places = sum(token == image_token for token in tokens)
    if places != len(counts):
        raise PictureRefused(
            f"the prompt has places for {places} pictures, and the request has {len(counts)}; "
            "a text may not hold the name of the image token"
        )
    left = iter(counts)
    return [t for token in tokens for t in [token] * (next(left) if token == image_token else 1)]
