"""Sources of the nodes of merged draft trees in a result."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int32


class DraftSources(NamedTuple):
    """Sources of the nodes of merged draft trees; a node may have both.

    Attributes:
      drafted: 1 if the drafter proposed the node.
      copied: Index of the node in the plan's n-gram drafts; 0 if it is not among them.
    """

    drafted: Int32[np.ndarray, "B N"]
    copied: Int32[np.ndarray, "B N"]
