"""Rules between the drafting method and the files of its draft model or head."""

from shared.drafts.kinds import (
    BLOCK_KINDS,
    KINDS,
    LAYER_CONVENTION,
    NEXTN,
    Form,
    Source,
)
from shared.models.sentence_list import sentence_list
from shared.options.rule_context import Example, Rule, RuleContext, flags_of


def _wants_mtp(s: RuleContext) -> bool:
    return s.draft.has_source(Source.MTP, Source.MTP_OR_HEAD) and s.draft.with_mtp


def _lists_layers(s: RuleContext) -> bool:
    """Returns True if the head, or the algorithm without one, lists layers of its target."""
    kind = s.kind if s.head_kind is None else KINDS[s.head_kind]
    return kind is not None and LAYER_CONVENTION in kind.flags


_LISTING = [name for name, kind in KINDS.items() if LAYER_CONVENTION in kind.flags]


DRAFT_MODEL_RULES = (
    Rule(
        applies=lambda s: _wants_mtp(s) and not s.model.has_mtp,
        reason="--speculative-algorithm {algorithm} requires an MTP layer that is supported, and "
        "this {family} checkpoint has none",
        hint="give a draft head with --speculative-algorithm EAGLE or EAGLE3 and "
        "--speculative-draft-model-path, or remove the flag",
        example=Example(drafter="NEXTN", model_type="llama"),
    ),
    Rule(
        applies=lambda s: _wants_mtp(s) and s.model.has_mtp and not s.has_mtp,
        reason="--speculative-algorithm {algorithm} requires an MTP layer, and the checkpoint has "
        "no {mtp_tensors} tensors, though its config.json names the layer",
        hint="use a checkpoint with these tensors, or another algorithm",
        example=None,
    ),
    Rule(
        applies=lambda s: (
            s.draft.has_source(Source.MTP)
            and s.draft.speculative_draft_model_path is not None
            and s.head_kind != NEXTN.name
        ),
        reason="--speculative-draft-model-path with --speculative-algorithm NEXTN must be an MTP "
        "layer in the speculators format or a Gemma 4 assistant, and the draft model is neither",
        hint="give one, or remove the flag to use the checkpoint's own MTP layer",
        example=None,
    ),
    Rule(
        applies=lambda s: (
            s.draft.has_source(Source.HEAD) and s.draft.speculative_draft_model_path is None
        ),
        reason="--speculative-algorithm {algorithm} requires a draft head",
        hint="give its folder as --speculative-draft-model-path",
        example=None,
    ),
    Rule(
        applies=lambda s: (
            s.draft.has_source(Source.MODEL) and s.draft.speculative_draft_model_path is None
        ),
        reason="--speculative-algorithm STANDALONE requires a small model with the target's "
        "tokenizer",
        hint="give its folder as --speculative-draft-model-path",
        example=None,
    ),
    Rule(
        applies=lambda s: s.draft.has_source(Source.MODEL) and s.head_kind is not None,
        reason="--speculative-algorithm STANDALONE requires a whole model, and the draft model's "
        "tensors are those of {head}",
        hint="give --speculative-algorithm {head_kind}, or a model",
        example=None,
    ),
    Rule(
        applies=lambda s: (
            s.head_kind is not None
            and s.draft.has_source(Source.HEAD)
            and s.algorithm != s.head_kind
        ),
        reason="--speculative-algorithm {algorithm} does not fit the draft model, whose tensors "
        "are those of {head}",
        hint="give --speculative-algorithm {head_kind}, or another head",
        example=None,
    ),
    Rule(
        applies=lambda s: s.draft.has_form(Form.TOKEN) and s.head_kind in BLOCK_KINDS,
        reason="--speculative-algorithm NAIVE_EAGLE drafts one token per step, and the draft "
        "model drafts blocks",
        hint="give --speculative-algorithm {head_kind}",
        example=None,
    ),
    Rule(
        applies=lambda s: bool(s.draft.speculative_draft_window_size) and not s.drafts_blocks,
        reason="--speculative-draft-window-size requires --speculative-algorithm "
        f"{sentence_list(BLOCK_KINDS)}",
        hint="remove the flag",
        example=Example(drafter="NEXTN", flags=flags_of("--speculative-draft-window-size 512")),
    ),
    Rule(
        applies=lambda s: (
            s.draft.speculative_aux_layer_convention is not None and not _lists_layers(s)
        ),
        reason="--speculative-aux-layer-convention requires a head that lists layers of its "
        f"target: {sentence_list(_LISTING)}",
        hint="remove the flag",
        example=Example(
            drafter="NEXTN", flags=flags_of("--speculative-aux-layer-convention inputs")
        ),
    ),
)
