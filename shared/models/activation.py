"""Activations of MLPs."""

from typing import NamedTuple

SILU, GELU_TANH, SWIGLU_OAI, RELU2 = "silu", "gelu_tanh", "swiglu_oai", "relu2"
SCALED_SILU = "scaled_silu"


class Activation(NamedTuple):
    """Activation of an MLP, as plain data for specification, backends and kernels.

    Attributes:
      kind: `SILU`: silu(gate) * up. `GELU_TANH`: gelu(gate) * up with the tanh approximation.
        `SWIGLU_OAI`: gate * sigmoid(alpha * gate) * (up + 1), with the gate at most `limit` and up
        between -`limit` and `limit`. `RELU2`: relu(up) squared, without a gate.
        `SCALED_SILU`: factor * silu(alpha * gate) * up.
      alpha, limit: Settings of `SWIGLU_OAI`.
      factor: Setting of `SCALED_SILU`, which also has an `alpha`.
    """

    kind: str = SILU
    alpha: float = 1.0
    limit: float = 0.0
    factor: float = 1.0

    @property
    def is_gated(self) -> bool:
        """True if the MLP has a gate next to the up projection."""
        return self.kind != RELU2

    @property
    def num_projections(self) -> int:
        """Projections of the input that the activation combines: gate and up, or up alone."""
        return 2 if self.is_gated else 1


SILU_AND_MUL = Activation()
"""Activation of most families."""
