"""Lists of words in messages."""

from collections.abc import Iterable


def sentence_list(words: Iterable[object], last: str = "or") -> str:
    """Returns words as a list in a sentence, such as "A, B or C"; there must be at least one."""
    *others, final = map(str, words)
    return f" {last} ".join(filter(None, (", ".join(others), final)))
