"""Unsupported combinations with disaggregated prefill."""

from shared.options.disaggregation import DisaggregationMode
from shared.options.rule_context import Example, Rule, flags_of

DISAGGREGATION_RULES = (
    Rule(
        applies=lambda s: s.unused_transfer_flag is not None,
        reason="{transfer_flag} has no effect with --disaggregation-mode {transfer_mode}",
        hint="remove the flag",
        example=Example(drafter="NEXTN", flags=flags_of("--remote-prefill-timeout 10")),
    ),
    Rule(
        applies=lambda s: (
            s.options.disaggregation.mode is not DisaggregationMode.NONE
            and s.options.engine.disable_radix_cache
        ),
        reason="--disaggregation-mode {transfer_mode} requires the prefix cache, and "
        "--disable-radix-cache disables it",
        hint="remove one of them",
        example=Example(
            drafter="NEXTN", flags=flags_of("--disaggregation-mode prefill --disable-radix-cache")
        ),
    ),
)
