"""MoE routing settings of model families, and their fields in a config.json."""

from dataclasses import dataclass

from shared.models.activation import SILU, SWIGLU_OAI, Activation
from shared.models.config_fields import MOST_NAMED, Json, count, flag, listed, number, positive
from shared.models.mlp import USUAL_TENSORS, ExpertTensors, MLPConfig, MoEConfig


@dataclass(frozen=True)
class Routing:
    """Differences between the MoE blocks of model families.

    Attributes:
      count_field: Field with the number of experts.
      scores: See `MoEConfig`.
      is_renormalised: True if the weights of selected experts are renormalised and `norm_topk_prob`
        is not read.
      reads_renormalised: True if `norm_topk_prob` is read.
      shared_field: Field with the width of the one shared expert; None without one.
      has_shared_gate: True if that expert has a gate per token.
      counts_shared: True if there are `n_shared_experts` shared experts, stored as one MLP.
      has_latent: True if the routed experts may have a latent of width `moe_latent_size`.
      has_groups: True if experts are selected within groups and weights have a routed scaling
        factor.
      steps: True if `mlp_only_layers` and `decoder_sparse_step` define the dense layers.
      begins_dense: True if `first_k_dense_replace` defines the number of dense layers at the start.
      reads_types: True if `mlp_layer_types`, where it is stated, defines the dense layers.
      has_bias, tensors: See `MoEConfig`.
      activation: Kind of activation.
      top_k_field: Field with the number of experts per token.
      enabled_by: Field that enables the experts; empty if the number of experts does.
      is_parallel: True if each layer also has a dense MLP, and each expert a scale; see
        `MoEConfig`.
    """

    count_field: str = "num_experts"
    scores: str = "softmax"
    is_renormalised: bool = False
    reads_renormalised: bool = True
    shared_field: str | None = None
    has_shared_gate: bool = False
    counts_shared: bool = False
    has_latent: bool = False
    has_groups: bool = False
    steps: bool = False
    begins_dense: bool = False
    reads_types: bool = False
    has_bias: bool = False
    activation: str = SILU
    top_k_field: str = "num_experts_per_tok"
    enabled_by: str = ""
    is_parallel: bool = False
    tensors: ExpertTensors = USUAL_TENSORS


FIXED = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
"""Optional fields with their only supported value."""


def read_experts(text: Json, routing: Routing, output_factor: float) -> MoEConfig:
    """Reads the MoE config of a config.json.

    Args:
      text: Fields of a config.json with defaults for absent ones.
      routing: MoE settings of the family.
      output_factor: See `MoEConfig`.

    Raises:
      ValueError: A field is missing or has an unsupported value.
    """
    width, is_sigmoid = positive(text, routing.tensors.width_field), routing.scores == "sigmoid"
    is_renormalised = routing.is_renormalised
    if routing.reads_renormalised:
        is_renormalised = flag(text, "norm_topk_prob")
    shared = 0 if routing.shared_field is None else positive(text, routing.shared_field)
    if routing.counts_shared:
        shared = width * count(text, "n_shared_experts")
    return MoEConfig(
        num_experts=positive(text, routing.count_field, most=MOST_NAMED),
        top_k=positive(text, routing.top_k_field),
        intermediate=width,
        shared_intermediate=shared,
        shared_is_gated=routing.has_shared_gate,
        scores=routing.scores,
        has_score_bias=is_sigmoid,
        num_groups=positive(text, "n_group") if routing.has_groups else 1,
        num_chosen_groups=positive(text, "topk_group") if routing.has_groups else 1,
        is_renormalised=is_renormalised,
        routed_factor=number(text, "routed_scaling_factor") if routing.has_groups else 1.0,
        latent=count(text, "moe_latent_size") if routing.has_latent else 0,
        output_factor=output_factor,
        has_bias=routing.has_bias,
        activation=(activation := _activation(text, routing.activation)),
        has_expert_scale=routing.is_parallel,
        parallel=_parallel(text, activation) if routing.is_parallel else None,
        tensors=routing.tensors,
    )


def _parallel(text: Json, activation: Activation) -> MLPConfig:
    width = positive(text, "intermediate_size")
    return MLPConfig(intermediate=width, bias=False, activation=activation)


def _activation(text: Json, kind: str) -> Activation:
    if kind != SWIGLU_OAI:
        return Activation(kind)
    return Activation(kind, number(text, "swiglu_alpha"), number(text, "swiglu_limit"))


def sparse_layers(text: Json, routing: Routing | None, num_layers: int) -> list[bool]:
    """Returns a flag per layer: True for MoE layers."""
    if routing is None:
        return [False] * num_layers
    if routing.enabled_by:
        return [flag(text, routing.enabled_by)] * num_layers
    if not count(text, routing.count_field):
        return [False] * num_layers
    types = listed(text, "mlp_layer_types", str) if routing.reads_types else None
    if types is not None:
        return _sparse_types(types, num_layers)
    dense = listed(text, "mlp_only_layers", int) or [] if routing.steps else []
    step = positive(text, "decoder_sparse_step") if routing.steps else 1
    first = count(text, "first_k_dense_replace") if routing.begins_dense else 0
    return [i >= first and i not in dense and (i + 1) % step == 0 for i in range(num_layers)]


def _sparse_types(types: list[str], num_layers: int) -> list[bool]:
    if unknown := sorted({*types} - {"dense", "sparse"}):
        raise ValueError(f"mlp_layer_types contains {unknown[0]!r}; supported are dense and sparse")
    if len(types) != num_layers:
        raise ValueError(
            f"mlp_layer_types lists {len(types)} layers, num_hidden_layers is {num_layers}"
        )
    return [each == "sparse" for each in types]


def refuse_other_experts(text: Json, routing: Routing | None, name: str) -> None:
    """Checks that a config.json has no MoE fields or values that its family does not support.

    Args:
      text: Fields of the config.json.
      routing: MoE settings of the family; None for a dense family.
      name: Name of the family.

    Raises:
      ValueError: It has one; the message names the field.
    """
    known = "" if routing is None else routing.count_field
    for field in ("num_experts", "num_local_experts", "n_routed_experts"):
        if text.get(field) and field != known:
            raise ValueError(
                f"{field}: MoE is not supported in a {name} model; use a model of another family"
            )
    if routing is None:
        return
    if not routing.steps and (
        text.get("mlp_only_layers") or positive(text, "decoder_sparse_step", 1) > 1
    ):
        raise ValueError(
            f"mlp_only_layers and decoder_sparse_step are not supported in a {name} model; use a "
            "checkpoint with MoE in all layers"
        )
    for field, served in FIXED.items():
        if text.get(field, served) != served:
            raise ValueError(f"{field} must be {served}, got {text[field]!r}")
