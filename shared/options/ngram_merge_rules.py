"""Rules of merged drafting, in which n-gram drafts extend the trees of another drafter."""

from shared.drafts.kinds import NGRAM
from shared.options.adaptive import MOST_NODES
from shared.options.rule_context import Example, Rule, flags_of

JOINED_RULES = (
    Rule(
        applies=lambda s: s.draft.joins_copies and s.options.ngram.sam_budget > s.num_copies,
        reason="--speculative-ngram-external-sam-budget {budget} must not exceed "
        "--speculative-ngram-num-draft-tokens {copies}",
        hint="give at most {copies}",
        example=Example(
            drafter="NEXTN+NGRAM", flags=flags_of("--speculative-ngram-external-sam-budget 13")
        ),
    ),
    Rule(
        applies=lambda s: (
            s.draft.from_text and "speculative_ngram_num_draft_tokens" in s.options.explicit_flags
        ),
        reason="--speculative-ngram-num-draft-tokens requires a merged method such as "
        "NEXTN+NGRAM; with --speculative-algorithm NGRAM, --speculative-num-draft-tokens sets the "
        "tree size",
        hint="remove it",
        example=Example(
            drafter=NGRAM.name, flags=flags_of("--speculative-ngram-num-draft-tokens 4")
        ),
    ),
    Rule(
        applies=lambda s: s.draft.joins_copies and s.num_drafted_nodes + s.num_copies > MOST_NODES,
        reason="--speculative-num-draft-tokens and --speculative-ngram-num-draft-tokens {copies} "
        f"exceed the {MOST_NODES} nodes of a tree together",
        hint="lower one of them",
        example=Example(
            drafter="NEXTN+NGRAM",
            flags=flags_of(
                "--speculative-num-steps 5 --speculative-eagle-topk 4 "
                "--speculative-num-draft-tokens 60"
            ),
        ),
    ),
    Rule(
        applies=lambda s: s.draft.joins_copies and s.draft.verification != "exact",
        reason="--speculative-accept-rule rejection supports draft chains only, and "
        "--speculative-algorithm {both} drafts trees",
        hint="give --speculative-accept-rule exact, or a method without +NGRAM",
        example=Example(
            drafter="NEXTN+NGRAM", flags=flags_of("--speculative-accept-rule rejection")
        ),
    ),
    Rule(
        applies=lambda s: s.draft.joins_copies and s.draft.accept_rates is not None,
        reason="--speculative-simulate-accept-length is not supported with "
        "--speculative-algorithm {both}",
        hint="give a method without +NGRAM",
        example=Example(
            drafter="NEXTN+NGRAM", flags=flags_of("--speculative-simulate-accept-length 2")
        ),
    ),
    Rule(
        applies=lambda s: (
            s.draft.joins_copies
            and s.adaptive.speculative_adaptive
            and (s.adaptive.speculative_adaptive_config or s.adaptive.speculative_adaptive_trace)
            is not None
        ),
        reason="--speculative-adaptive-config and --speculative-adaptive-trace are not supported "
        "with --speculative-algorithm {both}, where --speculative-adaptive chooses between the "
        "two sources of one shape",
        hint="remove them",
        example=Example(
            drafter="NEXTN+NGRAM",
            flags=flags_of("--speculative-adaptive --speculative-adaptive-trace steps.jsonl"),
        ),
    ),
)
