"""Activations of gated MLPs."""

from typing import NamedTuple

SILU, GELU_TANH, SWIGLU_OAI = "silu", "gelu_tanh", "swiglu_oai"


class Activation(NamedTuple):
    """Activation of a gated MLP, as plain data for specification, backends and kernels.

    Attributes:
      kind: `SILU`: silu(gate) * up. `GELU_TANH`: gelu(gate) * up with the tanh approximation.
        `SWIGLU_OAI`: gate * sigmoid(alpha * gate) * (up + 1), with the gate at most `limit` and up
        between -`limit` and `limit`.
      alpha, limit: Settings of `SWIGLU_OAI`.
    """

    kind: str = SILU
    alpha: float = 1.0
    limit: float = 0.0


SILU_AND_MUL = Activation()
"""Activation of most families."""
