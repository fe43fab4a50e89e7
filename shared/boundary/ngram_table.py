"""N-gram table of a backend, and the scopes that separate its entries."""

from dataclasses import dataclass

from jaxtyping import Int32
from numpy import ndarray

ENTRY_BYTES = 12
"""Bytes of an entry: following token, second hash and time stamp."""


@dataclass(frozen=True, kw_only=True)
class NgramTableSpec:
    """Size of the device's n-gram table; see `shared.spec.ngram`.

    Attributes:
      groups: Groups of entries for each n-gram length; a power of two.
      by_request: True if a request drafts only from its own tokens, not from all tokens of its
        tenant.
    """

    groups: int
    by_request: bool


@dataclass(frozen=True)
class NgramScopes:
    """N-gram scopes of the rows of a plan.

    Attributes:
      scopes: 64-bit name of each row's tenant or request, as two int32. N-grams of a row are
        visible only to rows with the same name.
      before: Prefill only: the tokens before each row's first, newest last; -1 before position 0.
        None in other steps.
    """

    scopes: Int32[ndarray, "B 2"]
    before: Int32[ndarray, "B window"] | None
