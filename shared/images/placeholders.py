"""Image placeholders in a prompt."""

from collections.abc import Sequence

from shared.models.image_processor import InvalidImageError


def expanded(tokens: Sequence[int], image_token: int, counts: Sequence[int]) -> list[int]:
    """Repeats each image token once per embedding of its image.

    Args:
      tokens: Prompt as the chat template has written it, with one image token per image.
      image_token: Id of the image token.
      counts: Embeddings of each image.

    Raises:
      ImageRefused: The numbers of image tokens and images differ, for example because a text
        contains the image token.
    """
    places = sum(token == image_token for token in tokens)
    if places != len(counts):
        raise InvalidImageError(
            f"the prompt has {places} image tokens, and the request has {len(counts)} images; "
            "remove the image token from the text"
        )
    left = iter(counts)
    return [t for token in tokens for t in [token] * (next(left) if token == image_token else 1)]
