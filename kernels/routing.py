"""Expert routing settings, as plain data for the kernels of both backends."""

from dataclasses import dataclass

from shared.models.layers import MoEConfig


@dataclass(frozen=True, kw_only=True)
class RoutingSettings:
    """Compile-time routing settings of an MoE block.

    A row has a slot for each expert that it chooses, by ascending number, and a last one for the
    shared expert, if there is one.

    Attributes:
      experts: Of which a row chooses.
      top: Experts that a row chooses.
      groups, top_groups: A row chooses from so many of the groups that the experts are cut into,
        those whose two highest scores have the highest sums; of one group, from all.
      is_sigmoid: Whether an expert's score is the sigmoid of its logit and weighs it; otherwise it
        is the logit, and softmax weighs it.
      is_renormalised: Whether the weights of the chosen are divided by their sum. Those of softmax
        are otherwise shares of the sum over all experts.
      factor: What these weights are multiplied by.
      is_shared: Whether each row has, besides, the expert behind the others.
      is_gated: Whether the shared expert's weight is the sigmoid of the logit behind the experts';
        otherwise it is 1.
    """

    experts: int
    top: int
    groups: int
    top_groups: int
    is_sigmoid: bool
    is_renormalised: bool
    factor: float
    is_shared: bool
    is_gated: bool

    def __post_init__(self) -> None:
        if not 0 < self.top <= self.experts:
            raise ValueError(f"top must be from 1 to {self.experts}, got {self.top}")
        size, over = divmod(self.experts, self.groups)
        if over or self.groups > 1 and size < 2:
            raise ValueError(f"{self.experts} experts make no {self.groups} groups of two or more")
        if not 0 < self.top_groups <= self.groups or self.top_groups * size < self.top:
            raise ValueError(
                f"{self.top_groups} of {self.groups} groups have no {self.top} experts"
            )
        if self.is_gated and not self.is_shared:
            raise ValueError("only a shared expert has a gate")

    @property
    def slots(self) -> int:
        """Experts of a row."""
        return self.top + self.is_shared

    @property
    def outputs(self) -> int:
        """Logits of a row."""
        return self.experts + self.is_gated

    @property
    def stored(self) -> int:
        """Experts that have weights."""
        return self.experts + self.is_shared


def routing_of(config: MoEConfig) -> RoutingSettings:
    """How rows choose in such a layer, whose shared expert stands in the stacks of the others."""
    return RoutingSettings(
        experts=config.num_experts,
        top=config.top_k,
        groups=config.num_groups,
        top_groups=config.num_chosen_groups,
        is_sigmoid=config.scores == "sigmoid",
        is_renormalised=config.is_renormalised,
        factor=config.routed_factor,
        is_shared=config.shares_stacks,
        is_gated=config.shared_is_gated,
    )
