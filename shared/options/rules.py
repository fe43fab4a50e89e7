"""Combinations of flags, model and drafter that are not supported, with the reason and a hint.

`GET /capabilities`, `docs/compatibility.md` and the test that tries every combination read the same
list. `shared.options.flags` checks each value alone, and `shared.options.unsupported_fields`
lists fields of requests. No field that chooses tokens is unsupported.
"""

from shared.drafts.kinds import NGRAM
from shared.options.disaggregation_rules import DISAGGREGATION_RULES
from shared.options.draft_model_rules import DRAFT_MODEL_RULES
from shared.options.draft_shape_rules import DRAFT_SHAPE_RULES
from shared.options.ngram_rules import NGRAM_RULES
from shared.options.rule_context import Example, Rule, RuleContext, flags_of
from shared.options.speculative import EXACT
from shared.options.token_map_rules import MAP_RULES

RULES = (
    *DRAFT_MODEL_RULES,
    *DRAFT_SHAPE_RULES,
    Rule(
        applies=lambda s: s.draft.verification != EXACT and s.draft.topk > 1,
        reason="--speculative-accept-rule rejection supports draft chains only, and "
        "--speculative-eagle-topk {k} drafts trees",
        hint="give --speculative-accept-rule exact, or remove --speculative-eagle-topk",
        example=Example(
            drafter="NEXTN",
            flags=flags_of(
                "--speculative-accept-rule rejection --speculative-num-steps 2 "
                "--speculative-eagle-topk 2 --speculative-num-draft-tokens 6"
            ),
        ),
    ),
    Rule(
        applies=lambda s: (
            s.draft.speculative_use_block_verification
            and s.draft.speculative_accept_rule != "rejection"
        ),
        reason="--speculative-use-block-verification requires --speculative-accept-rule rejection",
        hint="add it, or remove the flag",
        example=Example(drafter="NEXTN", flags=("--speculative-use-block-verification",)),
    ),
    Rule(
        applies=lambda s: s.draft.accept_rates is not None and s.draft.verification != EXACT,
        reason="--speculative-simulate-accept-length and --speculative-accept-rule rejection are "
        "mutually exclusive",
        hint="remove one of them",
        example=Example(
            drafter="NEXTN",
            flags=flags_of(
                "--speculative-simulate-accept-length 2 --speculative-accept-rule rejection"
            ),
        ),
    ),
    Rule(
        applies=lambda s: (
            s.draft.accept_rates is not None and bool(s.options.engine.shadow_verify_rate)
        ),
        reason="--shadow-verify-rate is not supported with --speculative-simulate-accept-length: "
        "simulated outputs differ from plain decoding",
        hint="remove one of them",
        example=Example(
            drafter="NEXTN",
            flags=flags_of("--speculative-simulate-accept-length 2 --shadow-verify-rate 0.1"),
        ),
    ),
    Rule(
        applies=lambda s: s.adaptive_flag is not None and not s.adaptive.speculative_adaptive,
        reason="{adaptive_flag} requires --speculative-adaptive",
        hint="add it, or remove the flag",
        example=Example(
            drafter="NEXTN", flags=flags_of("--speculative-adaptive-trace steps.jsonl")
        ),
    ),
    Rule(
        applies=lambda s: s.adaptive.speculative_adaptive and s.draft.verification != EXACT,
        reason="--speculative-accept-rule rejection is not supported with --speculative-adaptive: "
        "the output would depend on measured times",
        hint="give --speculative-accept-rule exact, or remove --speculative-adaptive",
        example=Example(
            drafter="NEXTN",
            flags=flags_of("--speculative-accept-rule rejection --speculative-adaptive"),
        ),
    ),
    Rule(
        applies=lambda s: s.options.engine.has_grammars and s.draft.verification != EXACT,
        reason="--grammar-backend {grammars} is not supported with --speculative-accept-rule "
        "rejection: grammar-constrained batches verify drafts of the host",
        hint="remove one of them",
        example=Example(
            drafter="NEXTN",
            flags=flags_of("--grammar-backend llguidance --speculative-accept-rule rejection"),
        ),
    ),
    Rule(
        applies=lambda s: s.options.engine.has_grammars and s.draft.accept_rates is not None,
        reason="--grammar-backend {grammars} is not supported with "
        "--speculative-simulate-accept-length {simulated}: simulated acceptance ignores the "
        "grammar",
        hint="remove one of them",
        example=Example(
            drafter="NEXTN",
            flags=flags_of(
                "--grammar-backend llguidance --speculative-simulate-accept-length 0.9,0.5,0"
            ),
        ),
    ),
    Rule(
        applies=lambda s: (
            s.options.engine.disable_overlap_schedule and bool(s.options.engine.overlap_depth)
        ),
        reason="--disable-overlap-schedule contradicts --overlap-depth {overlap}",
        hint="remove one of them",
        example=Example(
            drafter="NEXTN", flags=flags_of("--overlap-depth 2 --disable-overlap-schedule")
        ),
    ),
    Rule(
        applies=lambda s: (
            s.options.engine.mamba_track_interval is not None
            and s.model.recurrent is None
            and not s.draft.drafts_with_a_model
        ),
        reason="--mamba-track-interval requires a model with recurrent state, and a {family} "
        "model has none",
        hint="remove the flag",
        example=Example(
            drafter=NGRAM.name, model_type="qwen3", flags=flags_of("--mamba-track-interval 256")
        ),
    ),
    Rule(
        applies=lambda s: (
            s.options.engine.mamba_track_interval is not None
            and s.options.engine.disable_radix_cache
        ),
        reason="--mamba-track-interval requires the prefix cache, and --disable-radix-cache turns "
        "it off",
        hint="remove one of them",
        example=Example(
            drafter="NEXTN", flags=flags_of("--mamba-track-interval 256 --disable-radix-cache")
        ),
    ),
    Rule(
        applies=lambda s: (
            s.options.engine.disable_output_caching
            and (
                s.options.engine.disable_radix_cache
                or s.options.engine.mamba_track_interval is not None
            )
        ),
        reason="--disable-output-caching keeps outputs out of the prefix cache, so "
        "--mamba-track-interval and --disable-radix-cache have no effect with it",
        hint="remove one of them",
        example=Example(
            drafter="NEXTN", flags=flags_of("--disable-output-caching --mamba-track-interval 256")
        ),
    ),
    Rule(
        applies=lambda s: (s.options.model.context_length or 0) > s.model.context_length,
        reason="--context-length {context} exceeds the model's {model_context} positions",
        hint="give a smaller value, or remove the flag",
        example=Example(drafter="NEXTN", flags=flags_of("--context-length 16777216")),
    ),
    *MAP_RULES,
    *NGRAM_RULES,
    *DISAGGREGATION_RULES,
)


def refusals(setup: RuleContext) -> list[str]:
    """Returns one sentence per rule that applies; empty for a supported setup."""
    words = setup.words()
    return [rule.sentence(words) for rule in RULES if rule.applies(setup)]
