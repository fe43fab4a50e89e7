"""Rules of the n-gram drafter: its flags, and where its n-grams are stored."""

from shared.drafts.kinds import NGRAM
from shared.models.sentence_list import sentence_list
from shared.options.flags import spelling
from shared.options.ngram import NEEDS_HOST
from shared.options.ngram_merge_rules import JOINED_RULES
from shared.options.rule_context import Example, Rule, flags_of

NGRAM_RULES = (
    Rule(
        applies=lambda s: s.ngram_flag is not None and not s.draft.copies_text,
        reason="{ngram_flag} requires an n-gram drafter",
        hint="add --speculative-algorithm NGRAM, or remove the flag",
        example=Example(drafter="NEXTN", flags=flags_of("--speculative-ngram-capacity 4096")),
    ),
    Rule(
        applies=lambda s: (
            s.options.ngram.speculative_ngram_min_bfs_breadth
            > s.options.ngram.speculative_ngram_max_bfs_breadth
        ),
        reason="--speculative-ngram-min-bfs-breadth {min_breadth} must not exceed "
        "--speculative-ngram-max-bfs-breadth {max_breadth}",
        hint="lower it",
        example=Example(
            drafter=NGRAM.name, flags=flags_of("--speculative-ngram-min-bfs-breadth 64")
        ),
    ),
    Rule(
        applies=lambda s: (
            s.draft.from_text and s.options.ngram.sam_budget >= s.draft.num_draft_tokens
        ),
        reason="--speculative-ngram-external-sam-budget {budget} must be less than "
        "--speculative-num-draft-tokens {N}",
        hint="give at most {max_budget}",
        example=Example(
            drafter=NGRAM.name,
            flags=flags_of(
                "--speculative-num-draft-tokens 4 --speculative-ngram-external-sam-budget 4"
            ),
        ),
    ),
    Rule(
        applies=lambda s: (
            s.options.ngram.speculative_ngram_external_corpus_path is not None
            and not s.options.ngram.sam_budget
        ),
        reason="--speculative-ngram-external-corpus-path requires draft nodes for the corpus",
        hint="set --speculative-ngram-external-sam-budget",
        example=Example(
            drafter=NGRAM.name,
            flags=flags_of("--speculative-ngram-external-corpus-path corpus.jsonl"),
        ),
    ),
    *JOINED_RULES,
    Rule(
        applies=lambda s: s.draft.speculative_ngram_backend is not None and not s.draft.from_text,
        reason="--speculative-ngram-backend requires --speculative-algorithm NGRAM",
        hint="remove the flag",
        example=Example(drafter="NEXTN", flags=("--speculative-ngram-backend", "host")),
    ),
    Rule(
        applies=lambda s: s.draft.drafts_from_table and bool(s.options.flags_of_host_index),
        reason="--speculative-ngram-backend device does not support --speculative-adaptive, "
        + sentence_list(map(spelling, NEEDS_HOST), "and"),
        hint="remove it, or the other flag",
        example=Example(
            drafter=NGRAM.name,
            flags=("--speculative-ngram-backend", "device", "--speculative-adaptive"),
        ),
    ),
)
