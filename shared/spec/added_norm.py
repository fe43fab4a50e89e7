"""Residual addition of models with norms after mixers and MLPs (OLMo, Gemma)."""

import numpy as np
from jaxtyping import Float

from shared.spec import layers
from shared.spec.linear import NormedStream


def added_norm(
    x: Float[np.ndarray, "R hidden"],
    end_norm: Float[np.ndarray, " hidden"],
    eps: float,
    stream: NormedStream,
    scalar: Float[np.ndarray, " 1"] | None,
    norm: Float[np.ndarray, " hidden"] | None,
) -> NormedStream:
    """Adds the RMS norm of each row to the residual stream (post-norm).

    Args:
      x: Rows.
      end_norm: Scale of their norm.
      eps: Epsilon of the norm.
      stream: Residual stream.
      scalar: Layer scalar, by which the sum is multiplied; None without.
      norm: Scale of the next norm of the stream.
    """
    rows = stream.rows + layers.rms_norm(x, end_norm, eps)
    if scalar is not None:
        rows = (rows * scalar).astype(rows.dtype)
    return stream.with_next_norm(rows, norm)
