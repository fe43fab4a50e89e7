"""Names of the speculative algorithms, and aliases of other engines."""

import difflib

from shared.drafts.kinds import KINDS, NEXTN, NGRAM
from shared.options.flags import AUTO, ConfigError

ALGORITHMS = tuple(KINDS)
WITH_COPIES = f"+{NGRAM.name}"
"""Suffix of a drafter whose trees are merged with n-gram drafts."""

JOINED_ALGORITHMS = tuple(
    f"{name}{WITH_COPIES}" for name, kind in KINDS.items() if kind.merges_ngrams
)

KNOWN_ALGORITHMS = (*ALGORITHMS, *JOINED_ALGORITHMS)
OFF_NAMES = ("none", "off")
"""Names for no algorithm, the default."""


def _bare(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())


_BY_BARE_NAME = {_bare(name): name for name in ALGORITHMS} | {
    _bare(alias): name for name, kind in KINDS.items() for alias in kind.aliases
}


def algorithm_of(name: str) -> str | None:
    """Returns the algorithm of a name, in any spelling of this server or of other engines.

    Args:
      name: Case, hyphens and underscores are ignored; `A+B` merges two drafters.

    Returns:
      One of `KNOWN_ALGORITHMS`, or `AUTO`; None if the name disables speculative decoding.

    Raises:
      ConfigError: The name is unknown.
    """
    if name.lower() in OFF_NAMES:
        return None
    if name.lower() == AUTO:
        return AUTO
    parts = [_BY_BARE_NAME.get(_bare(part)) or _of_family(part) for part in name.split("+")]
    found = "+".join(parts)
    if found not in KNOWN_ALGORITHMS:
        raise ConfigError(
            f"--speculative-algorithm must be one of {', '.join(KNOWN_ALGORITHMS)}, auto or "
            f"none, got {name}"
            f"{_did_you_mean(name)}"
        )
    return found


def _of_family(part: str) -> str:
    """Returns NEXTN for vLLM's name of a family's MTP, such as `deepseek_mtp`; else the name."""
    return NEXTN.name if _bare(part).endswith("mtp") else part


def _did_you_mean(name: str) -> str:
    known = {**_BY_BARE_NAME, **{_bare(each): each for each in JOINED_ALGORITHMS}}
    near = difflib.get_close_matches(_bare(name), known, n=1)
    return f"; did you mean {known[near[0]]}?" if near else ""
