"""MLPs of decoder layers: dense, and mixtures of experts.

Like a mixer, an MLP config answers for its layers: sizes of a TP rank, sizes that must divide, and
parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from shared.models.activation import Activation
from shared.models.head_groups import check_groups
from shared.models.no_sublayer import NoSublayer
from shared.models.parameter import CheckpointTensor, Parameter
from shared.models.sharded_range import ShardedRange
from shared.models.stacks import BIAS, StackSettings, bias, norms_of, stack


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """MLP: gate and up with `intermediate` columns, then a projection to the hidden size.

    Attributes:
      intermediate: Width of gate and up.
      bias: True if all projections have a bias.
      activation: Activation of gate, times up; or of up alone, in an MLP without a gate.
    """

    kind: ClassVar[str] = "mlp"

    intermediate: int
    bias: bool
    activation: Activation

    @property
    def sizes(self) -> Self:
        """The config itself: all layers of a group are equal."""
        return self

    @property
    def divided(self) -> Iterator[tuple[str, int]]:
        """Sizes that must be multiples of the number of TP ranks, with their config.json fields."""
        yield "intermediate_size", self.intermediate

    def local(self, count: int) -> Self:
        """Returns the config of one of `count` TP ranks."""
        return replace(self, intermediate=self.intermediate // count)

    def parameters(
        self, prefix: str, layers: Sequence[str], settings: StackSettings
    ) -> list[Parameter]:
        """Returns the stacks of some layers.

        Args:
          prefix: Prefix of the parameter names.
          layers: Prefixes of the layers in the checkpoint.
          settings: Settings of the model.
        """
        wide = (self.intermediate, settings.hidden)
        gate_up = {"mlp.gate_proj.weight": wide, "mlp.up_proj.weight": wide}
        if not self.activation.is_gated:
            del gate_up["mlp.gate_proj.weight"]
        elif settings.fused_gate_up:
            gate_up = {"mlp.gate_up_proj.weight": (2 * wide[0], wide[1])}
        down = {"mlp.down_proj.weight": wide[::-1]}
        columns = (ShardedRange(settings.hidden),)
        sections = _gate_up(wide[0], self.activation)
        both = ("gate_up", gate_up, sections), ("down", down, columns)
        tensors = [stack(f"{prefix}{x}", layers, t, sections=cut) for x, t, cut in both]
        if self.bias:
            tensors += [bias(f"{prefix}{x}", layers, t, cut) for x, t, cut in both]
        return tensors


@dataclass(frozen=True)
class NoMLP(NoSublayer):
    """MLP of a layer that only has a mixer: no parameters."""

    kind: ClassVar[str] = "no_mlp"


@dataclass(frozen=True, kw_only=True)
class ExpertTensors:
    """Names and layout of the MoE tensors of a family.

    Attributes:
      router: Name of the router.
      score_bias: Name of the bias of its scores.
      experts: Prefix of the experts' tensors.
      gate, up, down: Names of the projections of an expert that is stored by itself.
      is_transposed: True if matrices that are stored for all experts at once are `[in, out]`.
      is_interleaved: True if the gate and up outputs of such matrices alternate.
      width_field: Field of config.json with the width of an expert.
    """

    router: str = "mlp.gate"
    score_bias: str = "mlp.gate.e_score_correction_bias"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    is_transposed: bool = False
    is_interleaved: bool = False
    width_field: str = "moe_intermediate_size"


USUAL_TENSORS = ExpertTensors()
"""Names and layout of most families."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts (MoE): a router selects top-k MLPs for each token.

    Attributes:
      num_experts: Routed experts.
      top_k: Top-k: experts per token.
      intermediate: Width of an expert.
      shared_intermediate: Width of the shared expert, which every token uses; 0 for none.
      shared_is_gated: True if the shared expert's output is multiplied by a gate per token.
      scores: Score function of the router: "softmax" over all experts, or "sigmoid" of each logit.
      has_score_bias: True if a bias is added to the scores for selection but not for the weights.
      num_groups, num_chosen_groups: Groups of neighbouring experts; experts are selected within the
        best groups.
      is_renormalised: True if the weights of selected experts are divided by their sum.
      routed_factor: Final multiplier of the weights.
      output_factor: Multiplier of the output, which is added to the residual stream.
      latent: Width of the latent that routed experts read and write, between two projections of all
        experts; 0 without. The router and the shared expert read the hidden state.
      has_bias: True if the router and both matrices of an expert have a bias.
      activation: Activation of the experts.
      has_expert_scale: True if the weight of each expert is multiplied by a stored number.
      parallel: Dense MLP that runs in parallel to the experts; None without. Both have norms of
        their own before and after, and so has the router.
      tensors: Names and layout in a checkpoint.

    Raises:
      ValueError: The numbers are inconsistent.
    """

    kind: ClassVar[str] = "experts"

    num_experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int
    shared_is_gated: bool
    scores: str
    has_score_bias: bool
    num_groups: int
    num_chosen_groups: int
    is_renormalised: bool
    routed_factor: float
    output_factor: float
    latent: int = 0
    has_bias: bool
    activation: Activation
    has_expert_scale: bool
    parallel: MLPConfig | None
    tensors: ExpertTensors

    def __post_init__(self) -> None:
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(f"scores of experts must be softmax or sigmoid, got {self.scores!r}")
        if self.scores == "softmax" and (self.has_score_bias or self.num_groups > 1):
            raise ValueError("softmax scores are not supported with score biases or expert groups")
        if self.has_bias and self.shared_intermediate:
            raise ValueError("experts with biases are not supported with a shared expert")
        names = "the number of experts", "n_group"
        check_groups(names, self.num_experts, self.num_groups)
        if not 1 <= self.num_chosen_groups <= self.num_groups:
            raise ValueError(
                f"topk_group must be 1 to {self.num_groups}, got {self.num_chosen_groups}"
            )
        most = self.group_size * self.num_chosen_groups
        if not 1 <= self.top_k <= most:
            raise ValueError(f"num_experts_per_tok must be 1 to {most}, got {self.top_k}")

    @property
    def group_size(self) -> int:
        """Experts of a group."""
        return self.num_experts // self.num_groups

    @property
    def shares_stacks(self) -> bool:
        """True if the shared expert has the width of the others and is the last entry of their
        stack.
        """
        return self.shared_intermediate == self.intermediate and not self.latent

    @property
    def num_stacked(self) -> int:
        """Experts in one stack."""
        return self.num_experts + self.shares_stacks

    @property
    def num_scored(self) -> int:
        """Router outputs: a logit for each expert, and one for the shared expert's gate."""
        return self.num_experts + self.shared_is_gated

    @property
    def sizes(self) -> Self:
        """The config itself: all layers of a group are equal."""
        return self

    @property
    def divided(self) -> Iterator[tuple[str, int]]:
        """Sizes that must be multiples of the number of TP ranks, with their config.json fields."""
        yield self.tensors.width_field, self.intermediate
        yield "shared_expert_intermediate_size", self.shared_intermediate
        yield "moe_latent_size", self.latent
        if self.parallel is not None:
            yield from self.parallel.divided

    def local(self, count: int) -> Self:
        """Returns the config of one of `count` TP ranks."""
        return replace(
            self,
            intermediate=self.intermediate // count,
            shared_intermediate=self.shared_intermediate // count,
            parallel=None if self.parallel is None else self.parallel.local(count),
        )

    def parameters(
        self, prefix: str, layers: Sequence[str], settings: StackSettings
    ) -> list[Parameter]:
        """Returns the stacks of routers and experts; see `MLPConfig.parameters`.

        A shared expert of the same width is the last expert.
        """
        hidden = settings.hidden
        router = {f"{self.tensors.router}.weight": (self.num_experts, hidden)}
        if self.shared_is_gated:
            router["mlp.shared_expert_gate.weight"] = (1, hidden)
        tensors = [stack(f"{prefix}router", layers, router)]
        if self.has_score_bias:
            scores = {self.tensors.score_bias: (self.num_experts,)}
            tensors.append(stack(f"{prefix}score_bias", layers, scores, float32=True))
        if self.latent:
            tensors += self._latents(prefix, layers, hidden)
        if self.has_bias:
            tensors.append(bias(f"{prefix}router", layers, router, ()))
            tensors += [self._expert_biases(prefix, x, layers, hidden) for x in ("gate_up", "down")]
        shared = "mlp.shared_expert." if self.shared_is_gated else "mlp.shared_experts."
        wide = (self.shared_intermediate, hidden)
        gate_up = {f"{shared}{x}_proj.weight": wide for x in ("gate", "up")[-self._projections :]}
        if settings.fused_gate_up:
            gate_up = {f"{shared}gate_up_proj.weight": (2 * wide[0], hidden)}
        down = {f"{shared}down_proj.weight": wide[::-1]}
        joined, width = self.shares_stacks, self.latent or hidden
        tensors += [
            self._experts(f"{prefix}gate_up", layers, width, gate_up if joined else {}),
            self._experts(f"{prefix}down", layers, width, down if joined else {}),
        ]
        if self.shared_intermediate and not joined:
            cut = _gate_up(wide[0], self.activation)
            tensors.append(stack(f"{prefix}shared_gate_up", layers, gate_up, sections=cut))
            cut = (ShardedRange(hidden),)
            tensors.append(stack(f"{prefix}shared_down", layers, down, sections=cut))
        if self.has_expert_scale:
            scale = {"router.per_expert_scale": (self.num_experts,)}
            tensors.append(stack(f"{prefix}expert_scale", layers, scale, float32=True))
        return tensors + self._parallel_mlp(prefix, layers, settings)

    def _parallel_mlp(
        self, prefix: str, layers: Sequence[str], settings: StackSettings
    ) -> list[Parameter]:
        """Returns the stacks of the parallel MLP, and of the norms of both branches."""
        if self.parallel is None:
            return []
        norms = {
            "router_norm": "router.scale",
            "expert_norm": "pre_feedforward_layernorm_2.weight",
            "mlp_end_norm": "post_feedforward_layernorm_1.weight",
            "expert_end_norm": "post_feedforward_layernorm_2.weight",
        }
        hidden, centre = settings.hidden, settings.norm_centre
        return [
            *self.parallel.parameters(f"{prefix}parallel_", layers, settings),
            *(norms_of(f"{prefix}{x}", layers, y, hidden, centre) for x, y in norms.items()),
        ]

    def _latents(self, prefix: str, layers: Sequence[str], hidden: int) -> list[Parameter]:
        """Returns the projections into the latent and back."""
        shapes = {"fc1": (self.latent, hidden), "fc2": (hidden, self.latent)}
        names = {"fc1": "latent_in", "fc2": "latent_out"}
        return [
            stack(
                f"{prefix}{names[each]}",
                layers,
                {f"mlp.{each}_latent_proj.weight": shape},
                sections=(ShardedRange(shape[0]),),
            )
            for each, shape in shapes.items()
        ]

    def _experts(
        self,
        name: str,
        layers: Sequence[str],
        hidden: int,
        shared: Mapping[str, tuple[int, ...]],
    ) -> Parameter:
        """Returns the matrices of each layer's experts, stored as one tensor or as some per expert.

        Args:
          name: Parameter name, which ends in `gate_up` or `down`.
          layers: Prefixes of the layers in the checkpoint.
          hidden: Width of the experts' inputs.
          shared: Tensors of the shared expert that is stored after the others.
        """
        matrix, stored = name.rsplit(".", 1)[-1], self.tensors
        wide, first = (self.intermediate, hidden), self._projections
        each = (first * wide[0], wide[1]) if matrix == "gate_up" else wide[::-1]
        single_shape = wide if matrix == "gate_up" else wide[::-1]
        singles = [stored.gate, stored.up][-first:] if matrix == "gate_up" else [stored.down]
        together = f"{matrix}_proj" if len(singles) > 1 else singles[0]
        pieces = []
        for layer in layers:
            parts = tuple(
                CheckpointTensor(f"{layer}.{stored.experts}.{expert}.{part}.weight", single_shape)
                for expert in range(self.num_experts)
                for part in singles
            )
            whole = CheckpointTensor(
                f"{layer}.{stored.experts}.{together}",
                (self.num_experts, *each),
                parts,
                is_transposed=stored.is_transposed,
                is_interleaved=stored.is_interleaved and matrix == "gate_up",
            )
            behind = [
                CheckpointTensor(f"{layer}.{tensor}", shape) for tensor, shape in shared.items()
            ]
            pieces.append((whole, *behind))
        shape = (len(layers), self.num_stacked, *each)
        cut = self._sections(matrix, hidden)
        return Parameter(name, shape, tuple(pieces), stacked=True, sections=cut)

    def _expert_biases(
        self, prefix: str, matrix: str, layers: Sequence[str], hidden: int
    ) -> Parameter:
        """Returns the biases of one matrix of all experts."""
        outputs = self._projections * self.intermediate if matrix == "gate_up" else hidden
        pieces = [
            CheckpointTensor(
                f"{layer}.{self.tensors.experts}.{matrix}_proj_bias",
                (self.num_experts, outputs),
                is_interleaved=self.tensors.is_interleaved and matrix == "gate_up",
            )
            for layer in layers
        ]
        return Parameter(
            f"{prefix}{matrix}{BIAS}",
            (len(layers), self.num_experts, outputs),
            tuple((each,) for each in pieces),
            stacked=True,
            axis=-1,
            sections=self._sections(matrix, hidden),
        )

    def _sections(self, matrix: str, hidden: int) -> tuple[ShardedRange, ...]:
        """Returns the TP sections of the outputs of an expert's matrix."""
        if matrix == "gate_up":
            return _gate_up(self.intermediate, self.activation)
        return (ShardedRange(hidden),)

    @property
    def _projections(self) -> int:
        return self.activation.num_projections


def _gate_up(intermediate: int, activation: Activation) -> tuple[ShardedRange, ...]:
    """Returns the TP sections of the gate and up projections, or of up alone."""
    return (ShardedRange(intermediate),) * activation.num_projections


FeedForwardConfig = MLPConfig | MoEConfig | NoMLP
