"""Parser of --speculative-simulate-accept-length (simulated acceptance)."""

from shared.options.flags import ConfigError

MOST_TOKENS = 64
"""Maximum tokens of a step, the maximum number of nodes of a draft tree."""


def rates_of(text: str | None) -> tuple[float, ...] | None:
    """Returns the acceptance rate of each position, given that all before it are accepted.

    Args:
      text: Rates separated by commas, or one number, the mean tokens per step with the bonus token
        (all rates but the last are then 1). None: no simulation.

    Raises:
      ConfigError: The text is neither.
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
            f"{MOST_TOKENS}, or acceptance rates from 0 to 1 separated by commas, got {text}"
        )
    return tuple(numbers)
