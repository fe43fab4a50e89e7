"""Per-layer embeddings: a second embedding of each token with a part for each layer.

A layer adds a gated projection of its part to the residual stream, after its MLP.

Source: Gemma 3n and Gemma 4 (`hidden_size_per_layer_input`).
"""

from collections.abc import Sequence

from shared.models.config import ModelConfig
from shared.models.parameter import Parameter
from shared.models.stacks import norms_of, single, single_norm, stack


def parameters(config: ModelConfig) -> list[Parameter]:
    """Returns the parameters that compute the parts of all layers; none without the embeddings."""
    size = config.per_layer_size
    if not size:
        return []
    width = config.num_layers * size
    projection = "per_layer_model_projection.weight"
    norm = "per_layer_projection_norm.weight"
    return [
        single("per_layer.embed", "embed_tokens_per_layer.weight", (config.vocab, width)),
        single("per_layer.projection", projection, (width, config.hidden)),
        single_norm("per_layer.norm", norm, size, config.norm_centre),
    ]


def layer_parameters(prefix: str, config: ModelConfig, layers: Sequence[str]) -> list[Parameter]:
    """Returns the stacks with which some layers add their parts; see `decoder_parameters`."""
    size, hidden = config.per_layer_size, config.hidden
    if not size:
        return []
    gate = {"per_layer_input_gate.weight": (size, hidden)}
    out = {"per_layer_projection.weight": (hidden, size)}
    norm = "post_per_layer_input_norm.weight"
    return [
        stack(f"{prefix}per_layer.gate", layers, gate),
        stack(f"{prefix}per_layer.out", layers, out),
        norms_of(f"{prefix}per_layer.end_norm", layers, norm, hidden, config.norm_centre),
    ]
