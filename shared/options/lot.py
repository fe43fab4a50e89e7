"""The value of --speculative-simulate-accept-length, by which drafts are accepted by lot."""

from shared.options.flags import ConfigError

MOST_TOKENS = 64
"""Of a step: as many as a draft tree has nodes."""


def rates_of(text: str | None) -> tuple[float, ...] | None:
    """How often the draft of each level is accepted, given those before it; never beyond.

    Args:
      text: The rates, with commas between them. Or one number, the mean length of a step with its
        bonus token: then all rates but the last are 1. None: no lot.

    Raises:
      ConfigError: It is neither.
    """
    if text is None:
        return None
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and 1 <= numbers[0] <= MOST_TOKENS:
        whole, share = divmod(numbers[0] - 1, 1)
        return (1.0,) * int(whole) + (share,) * (share > 0) or (0.0,)
    if len(numbers) < 2 or not all(0 <= rate <= 1 for rate in numbers):
        raise ConfigError(
            "--speculative-simulate-accept-length must be a number of tokens from 1 to "
            f"{MOST_TOKENS}, or rates from 0 to 1 with commas between them, got {text}"
        )
    return tuple(numbers)
