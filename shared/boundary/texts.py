"""What a backend keeps of seen text, and what a plan says of whose text a row is."""

from dataclasses import dataclass

from jaxtyping import Int32
from numpy import ndarray


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """The table of n-grams from which steps draft; see `shared.spec.ngram`.

    Attributes:
      groups: Of each length, a power of two.
      by_request: A request drafts from its own text alone, not from all of its tenant's.
    """

    groups: int
    by_request: bool


@dataclass(frozen=True)
class Texts:
    """Whose texts the rows of a plan are.

    Attributes:
      scopes: A name of each row's tenant, or of its request, in two words; what is learnt of one
        row, no row with another name drafts from.
      before: Of a prefill, the tokens before each row's first, the newest last; -1 before the
        beginning of a text. None in other work.
    """

    scopes: Int32[ndarray, "B 2"]
    before: Int32[ndarray, "B window"] | None
