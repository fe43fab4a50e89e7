"""The config.json of a trained head in the speculators format, which vLLM can load.

`shared.drafts.config_formats` reads the same fields.
"""

from pathlib import Path
from typing import Any

from shared.drafts.config import DraftConfig
from shared.drafts.dflash2 import ConvConfig, SelectorConfig
from shared.drafts.dspark_config import MarkovConfig
from shared.models.config_fields import Json, read_json
from shared.models.rotary import settings_of
from shared.models.sentence_list import sentence_list

AUTHORS, SPECULATORS = "authors", "speculators"
FORMATS = (AUTHORS, SPECULATORS)
"""Formats of a written head: the format of the kind's authors, or the speculators format."""

TYPES = {
    "EAGLE3": ("eagle3", "Eagle3Speculator"),
    "DFLASH": ("dflash", "DFlashSpeculator"),
    "DSPARK": ("dspark", "DSparkSpeculator"),
    "DFLASH2": ("dflash2", "DFlash2DraftModel"),
}
"""Name and architecture of each kind of head in the speculators format."""

_LAYER = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "model_type"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
    *("max_position_embeddings", "attention_bias", "tie_word_embeddings"),
    "partial_rotary_factor",
)


def check_format(name: str, draft: str | None, is_causal: bool) -> None:
    """Checks that a format supports a kind of head.

    Args:
      is_causal: True for a head with a causal block.

    Raises:
      ValueError: The speculators format does not support the kind or the causal block.
    """
    if name == SPECULATORS and is_causal:
        raise ValueError(
            "--format speculators is not supported for a JetSpec head: the format has no field for "
            "a causal block of masks; remove it"
        )
    if name == SPECULATORS and (draft or "").upper() not in TYPES:
        kinds = sentence_list(TYPES, "and").lower()
        raise ValueError(f"--format speculators requires --draft {kinds}; remove it")


def speculators_json(head_json: Json, config: DraftConfig, target: Path, depth: int) -> Json:
    """Returns the config.json of a head in the speculators format.

    Args:
      head_json: Contents of its config.json in the format of the authors.
      config: The same contents, parsed.
      target: Folder of the target model.
      depth: Suggested number of draft tokens; a block head suggests all tokens of its block.
    """
    method, architecture = TYPES[config.kind]
    layer = {name: head_json[name] for name in _LAYER if name in head_json}
    theta = config.layer.attention.rotary.theta
    rope = {"rope_type": "default", "rope_theta": theta, **settings_of(head_json)}
    layer["rope_parameters"] = rope
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.block.nodes - 1 if config.block else depth,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    verifier = {
        "name_or_path": str(target),
        "architectures": read_json(target / "config.json").get("architectures") or [],
    }
    return {
        "architectures": [architecture],
        "speculators_model_type": method,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": method,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": verifier,
        },
        "draft_vocab_size": config.draft_vocab,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        **_of_kind(config),
    }


def _of_kind(config: DraftConfig) -> dict[str, Any]:
    inputs = list(config.aux_streams)
    if (block := config.block) is not None:
        fields = {"block_size": block.size, "mask_token_id": block.mask_id}
        fields["sample_from_anchor"] = block.first_slot == 0
        if (markov := block.part(MarkovConfig)) is not None:
            fields |= {"markov_rank": markov.rank, "markov_head_type": markov.kind}
            fields["enable_confidence_head"] = markov.has_confidence
            fields["confidence_head_with_markov"] = markov.confidence_sees_previous
        conv, selector = block.part(ConvConfig), block.part(SelectorConfig)
        if conv is not None and selector is not None:
            fields["conv_kernel_size"] = conv.taps
            fields["conv_group_size"] = conv.group_size
            fields["selector_rank"] = selector.rank
            fields["selector_top_k"] = selector.candidates
        return {**fields, "aux_hidden_state_layer_ids": inputs}
    switches = {
        "fc_norm": config.norm_aux,
        "norm_before_fc": config.norm_input,
        "norm_output": config.norm_output,
        "norm_before_residual": config.norm_residual,
    }
    return {"eagle_aux_hidden_state_layer_ids": inputs, **switches}
