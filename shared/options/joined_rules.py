"""What two sources in one tree cannot do, and why; see `shared.options.rules`."""

from shared.options.adaptive import MOST_NODES
from shared.options.algorithms import HOST_ALGORITHM
from shared.options.setup import Example, Rule


def flags_of(line: str) -> tuple[str, ...]:
    """The words of a command line."""
    return tuple(line.split())


JOINED_RULES = (
    Rule(
        refuses=lambda s: s.draft.joins_copies and s.options.ngram.sam_budget > s.num_copies,
        reason="--speculative-ngram-external-sam-budget {budget} is more than the nodes of "
        "--speculative-ngram-draft-tokens {copies}",
        way_out="give at most {copies}",
        example=Example(
            drafter="NEXTN+NGRAM", flags=flags_of("--speculative-ngram-external-sam-budget 13")
        ),
    ),
    Rule(
        refuses=lambda s: s.draft.from_text and "speculative_ngram_draft_tokens" in s.options.given,
        reason="--speculative-ngram-draft-tokens is for two sources in one tree, and the trees of "
        "--speculative-algorithm NGRAM have --speculative-num-draft-tokens nodes",
        way_out="leave it out",
        example=Example(
            drafter=HOST_ALGORITHM, flags=flags_of("--speculative-ngram-draft-tokens 4")
        ),
    ),
    Rule(
        refuses=lambda s: s.draft.joins_copies and s.num_drafted_nodes + s.num_copies > MOST_NODES,
        reason=f"trees have {MOST_NODES} nodes at most, and --speculative-num-draft-tokens and "
        "--speculative-ngram-draft-tokens {copies} are more together",
        way_out="lower one of them",
        example=Example(
            drafter="NEXTN+NGRAM",
            flags=flags_of(
                "--speculative-num-steps 5 --speculative-eagle-topk 4 "
                "--speculative-num-draft-tokens 60"
            ),
        ),
    ),
    Rule(
        refuses=lambda s: s.draft.joins_copies and s.draft.verification != "match",
        reason="--accept-rule rejection accepts chains, and --speculative-algorithm {both} has "
        "trees, in which the nodes that are verified depend on the drafts that were drawn",
        way_out="give --accept-rule match, or one source",
        example=Example(drafter="NEXTN+NGRAM", flags=flags_of("--accept-rule rejection")),
    ),
    Rule(
        refuses=lambda s: s.draft.joins_copies and s.draft.accept_rates is not None,
        reason="--speculative-simulate-accept-length accepts drafts by lot, and of "
        "--speculative-algorithm {both} none says whose",
        way_out="give one source",
        example=Example(
            drafter="NEXTN+NGRAM", flags=flags_of("--speculative-simulate-accept-length 2")
        ),
    ),
    Rule(
        refuses=lambda s: (
            s.draft.joins_copies
            and s.adaptive.speculative_adaptive
            and (s.adaptive.speculative_adaptive_config or s.adaptive.speculative_adaptive_trace)
            is not None
        ),
        reason="--speculative-adaptive-config and --speculative-adaptive-trace are about shapes of "
        "one source, and with --speculative-algorithm {both} --speculative-adaptive chooses "
        "between two sources, in one shape",
        way_out="leave them out",
        example=Example(
            drafter="NEXTN+NGRAM",
            flags=flags_of("--speculative-adaptive --speculative-adaptive-trace steps.jsonl"),
        ),
    ),
)
