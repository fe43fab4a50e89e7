"""Expert routing settings, as plain data for the kernels of both backends."""

from dataclasses import dataclass

from shared.models.mlp import MoEConfig


@dataclass(frozen=True, kw_only=True)
class RoutingSettings:
    """Compile-time routing settings of an MoE block.

    A row has one slot per selected expert, by ascending expert number, and a last slot for the
    shared expert, if there is one.

    Attributes:
      experts: Number of routed experts.
      top: Experts that are selected per row (top-k).
      groups, top_groups: Number of expert groups, and of groups that a row selects experts from:
        the groups whose two highest scores have the highest sum. One group: no restriction.
      is_sigmoid: Whether an expert's score and weight are the sigmoid of its logit. Otherwise the
        score is the logit, and the weight is from a softmax.
      is_renormalised: Whether the weights of the selected experts are divided by their sum.
        Otherwise softmax weights are relative to all experts.
      factor: Factor of the weights of routed experts.
      output_factor: Multiplier of the sum of a row's slots.
      is_shared: Whether each row also has the shared expert, which follows the routed experts.
      is_gated: Whether the shared expert's weight is the sigmoid of a logit, which follows the
        routed experts' logits. Otherwise the weight is 1.
    """

    experts: int
    top: int
    groups: int
    top_groups: int
    is_sigmoid: bool
    is_renormalised: bool
    factor: float
    output_factor: float
    is_shared: bool
    is_gated: bool

    def __post_init__(self) -> None:
        if not 0 < self.top <= self.experts:
            raise ValueError(f"top must be from 1 to {self.experts}, got {self.top}")
        size, over = divmod(self.experts, self.groups)
        if over or self.groups > 1 and size < 2:
            raise ValueError(
                f"experts must form groups of equal size, two or more each, got {self.experts} "
                f"experts and {self.groups} groups"
            )
        if not 0 < self.top_groups <= self.groups or self.top_groups * size < self.top:
            raise ValueError(
                f"top_groups must be at most {self.groups} and have {self.top} experts or more, "
                f"got {self.top_groups}"
            )
        if self.is_gated and not self.is_shared:
            raise ValueError("is_gated requires is_shared: only a shared expert has a gate")

    @property
    def slots(self) -> int:
        """Slots of a row: its selected experts and the shared one."""
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
    """Returns the routing settings of an MoE layer; latents are multiplied after their projection.

    A shared expert counts only if its weights are stored in the stacks of the routed experts.
    """
    return RoutingSettings(
        experts=config.num_experts,
        top=config.top_k,
        groups=config.num_groups,
        top_groups=config.num_chosen_groups,
        is_sigmoid=config.scores == "sigmoid",
        is_renormalised=config.is_renormalised,
        factor=config.routed_factor,
        output_factor=1.0 if config.latent else config.output_factor,
        is_shared=config.shares_stacks,
        is_gated=config.shared_is_gated,
    )
