"""What is refused, and why: a short list of rules that the start holds a setup against.

`GET /capabilities`, `docs/compatibility.md` and the test that tries every combination read the same
list. A flag whose value alone is wrong is refused by `shared.options.options`, and what a request
may not ask for is `shared.options.request_fields`. Nothing is refused for the fields that choose
tokens.
"""

from collections.abc import Sequence

from shared.options.adaptive import MOST_STEPS, TREE_ALGORITHMS
from shared.options.algorithms import (
    BLOCK_ALGORITHMS,
    HEAD_ALGORITHMS,
    HOST_ALGORITHM,
    MODEL_ALGORITHM,
)
from shared.options.map_rules import MAP_RULES
from shared.options.setup import Example, Rule, Setup
from shared.options.speculative import ACCEPT_RULES, NAIVE_SHAPE
from shared.options.text_rules import TEXT_RULES


def _wants_mtp(s: Setup) -> bool:
    return s.algorithm in ("NEXTN", "NAIVE_EAGLE") and s.draft.with_mtp


def _differ(given: Sequence[int | None], fixed: Sequence[int]) -> bool:
    """Whether one of the numbers was given and is another one than the fixed."""
    return any(number not in (None, want) for number, want in zip(given, fixed, strict=True))


def _shapes_naive(s: Setup) -> bool:
    names = ("num_steps", "eagle_topk", "num_draft_tokens")
    given = [getattr(s.draft, f"speculative_{name}") for name in names]
    return s.algorithm == "NAIVE_EAGLE" and _differ(given, NAIVE_SHAPE)


def _shapes_text(s: Setup) -> bool:
    draft = s.draft
    given = (
        draft.speculative_draft_model_path,
        draft.speculative_num_steps,
        draft.speculative_eagle_topk,
    )
    return draft.from_text and given != (None, None, None)


def _shapes_itself(s: Setup) -> bool:
    """Whether the drafter's shape follows from the flags of a tree."""
    return s.draft.drafts and s.algorithm not in ("NAIVE_EAGLE", HOST_ALGORITHM)


def _lacks_nodes(s: Setup) -> bool:
    return _shapes_itself(s) and s.draft.topk > 1 and s.draft.speculative_num_draft_tokens is None


def _breaks_block(s: Setup) -> bool:
    given = (s.draft.speculative_num_steps, s.draft.speculative_num_draft_tokens)
    return s.block is not None and _differ(given, (s.block - 1, s.block))


def _is_shaped_twice(s: Setup) -> bool:
    """Whether flags name a shape where it is chosen; NGRAM's is the largest to choose from."""
    draft = s.draft
    shape = (draft.speculative_num_steps, draft.speculative_eagle_topk)
    nodes = draft.speculative_num_draft_tokens
    is_size = draft.from_text and not s.options.candidates
    return (s.adaptive.speculative_adaptive and not draft.joins_copies) and (
        shape != (None, None) or (nodes is not None and not is_size)
    )


def _names_other_drafts(s: Setup) -> bool:
    """Whether the file names shapes that the drafter cannot have."""
    most = NAIVE_SHAPE[0] if s.algorithm == "NAIVE_EAGLE" else MOST_STEPS
    if s.drafts_blocks:
        most = (s.block or 1) - 1
    has_trees = s.algorithm in (*TREE_ALGORITHMS, MODEL_ALGORITHM)
    return any(
        each.steps > most or (each.topk > 1 and not has_trees) for each in s.options.candidates
    )


def _simulates_more(s: Setup) -> bool:
    """Whether drafts are to be accepted on levels that no tree has."""
    return len(s.draft.accept_rates or ()) > s.num_levels


def _flags(line: str) -> tuple[str, ...]:
    return tuple(line.split())


RULES = (
    Rule(
        refuses=lambda s: _wants_mtp(s) and not (s.has_mtp and s.model.has_mtp),
        reason="--speculative-algorithm {algorithm} drafts with the checkpoint's own mtp layer, "
        "and this {family} checkpoint has none that is supported",
        way_out="give a draft head with --speculative-algorithm EAGLE or EAGLE3 and "
        "--speculative-draft-model-path, or leave the flag out",
        example=Example(drafter="NEXTN", model_type="llama"),
    ),
    Rule(
        refuses=lambda s: (
            s.algorithm == "NEXTN"
            and s.draft.speculative_draft_model_path is not None
            and s.head_kind != "NEXTN"
        ),
        reason="--speculative-draft-model-path with --speculative-algorithm NEXTN takes an mtp "
        "layer in the speculators format, and the draft model is none",
        way_out="give one, or leave the flag out for the checkpoint's own",
        example=None,
    ),
    Rule(
        refuses=lambda s: (
            s.algorithm in HEAD_ALGORITHMS and s.draft.speculative_draft_model_path is None
        ),
        reason="--speculative-algorithm {algorithm} drafts with a head of its own",
        way_out="give its folder as --speculative-draft-model-path",
        example=None,
    ),
    Rule(
        refuses=lambda s: (
            s.algorithm == MODEL_ALGORITHM and s.draft.speculative_draft_model_path is None
        ),
        reason="--speculative-algorithm STANDALONE drafts with a small model that has the target's "
        "tokenizer",
        way_out="give its folder as --speculative-draft-model-path",
        example=None,
    ),
    Rule(
        refuses=lambda s: s.algorithm == MODEL_ALGORITHM and s.head_kind is not None,
        reason="--speculative-algorithm STANDALONE drafts with a whole model, and the draft "
        "model's tensors are those of {head}",
        way_out="give --speculative-algorithm {head_kind}, or a model",
        example=None,
    ),
    Rule(
        refuses=lambda s: (
            s.head_kind is not None
            and s.algorithm in HEAD_ALGORITHMS
            and s.algorithm != s.head_kind
        ),
        reason="--speculative-algorithm {algorithm} does not fit the draft model, whose tensors "
        "are those of {head}",
        way_out="give --speculative-algorithm {head_kind}, or another head",
        example=None,
    ),
    Rule(
        refuses=lambda s: s.algorithm == "NAIVE_EAGLE" and s.head_kind in BLOCK_ALGORITHMS,
        reason="--speculative-algorithm NAIVE_EAGLE drafts one token, and the draft model drafts "
        "blocks",
        way_out="give --speculative-algorithm {head_kind}",
        example=None,
    ),
    Rule(
        refuses=lambda s: s.drafts_blocks and s.draft.topk > 1,
        reason="--speculative-eagle-topk {k} contradicts --speculative-algorithm {algorithm}, "
        "which drafts chains",
        way_out="leave the flag out",
        example=Example(
            drafter="DFLASH",
            flags=_flags("--speculative-eagle-topk 2 --speculative-num-draft-tokens 6"),
        ),
    ),
    Rule(
        refuses=lambda s: bool(s.draft.speculative_draft_window_size) and not s.drafts_blocks,
        reason="--speculative-draft-window-size is for --speculative-algorithm DFLASH, DSPARK or "
        "DFLASH2",
        way_out="leave the flag out",
        example=Example(drafter="NEXTN", flags=_flags("--speculative-draft-window-size 512")),
    ),
    Rule(
        refuses=lambda s: (
            s.draft.speculative_draft_layer_ids is not None
            and (s.head_kind or s.algorithm) not in ("EAGLE3", *BLOCK_ALGORITHMS)
        ),
        reason="--speculative-draft-layer-ids is for heads that list layers of their target, those "
        "of EAGLE3, DFLASH, DSPARK and DFLASH2",
        way_out="leave the flag out",
        example=Example(drafter="NEXTN", flags=_flags("--speculative-draft-layer-ids inputs")),
    ),
    Rule(
        refuses=lambda s: (
            s.block is not None and (s.draft.speculative_draft_window_size or s.block) < s.block
        ),
        reason="--speculative-draft-window-size {window} is shorter than the chain that the draft "
        "model drafts, of {block} nodes",
        way_out="give at least as many",
        example=Example(drafter="DFLASH", flags=_flags("--speculative-draft-window-size 2")),
    ),
    Rule(
        refuses=_breaks_block,
        reason="--speculative-num-steps and --speculative-num-draft-tokens contradict the draft "
        "model, which drafts chains of {block} nodes",
        way_out="leave them out",
        example=Example(drafter="DFLASH", flags=_flags("--speculative-num-draft-tokens 3")),
    ),
    Rule(
        refuses=_shapes_naive,
        reason="--speculative-num-steps, --speculative-eagle-topk and "
        "--speculative-num-draft-tokens contradict --speculative-algorithm NAIVE_EAGLE, which "
        "always drafts one token",
        way_out="leave them out",
        example=Example(drafter="NAIVE_EAGLE", flags=_flags("--speculative-num-steps 2")),
    ),
    Rule(
        refuses=_shapes_text,
        reason="--speculative-draft-model-path, --speculative-num-steps and "
        "--speculative-eagle-topk contradict --speculative-algorithm NGRAM, whose trees have "
        "--speculative-num-draft-tokens nodes of seen text",
        way_out="leave them out",
        example=Example(drafter="NGRAM", flags=_flags("--speculative-num-steps 3")),
    ),
    Rule(
        refuses=lambda s: s.ngram_flag is not None and not s.draft.copies_text,
        reason="{ngram_flag} belongs to another drafter",
        way_out="add --speculative-algorithm NGRAM or leave the flag out",
        example=Example(drafter="NEXTN", flags=_flags("--speculative-ngram-capacity 4096")),
    ),
    Rule(
        refuses=lambda s: (
            s.options.ngram.speculative_ngram_min_bfs_breadth
            > s.options.ngram.speculative_ngram_max_bfs_breadth
        ),
        reason="--speculative-ngram-min-bfs-breadth {min_breadth} is above "
        "--speculative-ngram-max-bfs-breadth {max_breadth}",
        way_out="lower it",
        example=Example(
            drafter=HOST_ALGORITHM, flags=_flags("--speculative-ngram-min-bfs-breadth 64")
        ),
    ),
    Rule(
        refuses=lambda s: (
            s.draft.from_text and s.options.ngram.sam_budget >= s.draft.num_draft_tokens
        ),
        reason="--speculative-ngram-external-sam-budget {budget} is more than the draft nodes of "
        "--speculative-num-draft-tokens {N}",
        way_out="give at most {most_budget}",
        example=Example(
            drafter=HOST_ALGORITHM,
            flags=_flags(
                "--speculative-num-draft-tokens 4 --speculative-ngram-external-sam-budget 4"
            ),
        ),
    ),
    Rule(
        refuses=lambda s: (
            s.options.ngram.speculative_ngram_external_corpus_path is not None
            and not s.options.ngram.sam_budget
        ),
        reason="--speculative-ngram-external-corpus-path needs draft nodes of its own",
        way_out="give their number as --speculative-ngram-external-sam-budget",
        example=Example(
            drafter=HOST_ALGORITHM,
            flags=_flags("--speculative-ngram-external-corpus-path corpus.jsonl"),
        ),
    ),
    Rule(
        refuses=_lacks_nodes,
        reason="--speculative-eagle-topk {k} asks for a draft tree",
        way_out="give its size as --speculative-num-draft-tokens",
        example=Example(drafter="NEXTN", flags=_flags("--speculative-eagle-topk 2")),
    ),
    Rule(
        refuses=lambda s: (
            _shapes_itself(s) and s.draft.topk == 1 and s.draft.num_draft_tokens != s.most_nodes
        ),
        reason="--speculative-num-draft-tokens {N} must be --speculative-num-steps + 1 = {chain} "
        "with --speculative-eagle-topk 1",
        way_out="leave it out",
        example=Example(
            drafter="NEXTN",
            flags=_flags("--speculative-num-steps 2 --speculative-num-draft-tokens 8"),
        ),
    ),
    Rule(
        refuses=lambda s: (
            _shapes_itself(s)
            and s.draft.topk > 1
            and not _lacks_nodes(s)
            and not s.draft.num_steps < s.draft.num_draft_tokens <= s.most_nodes
        ),
        reason="--speculative-num-draft-tokens must be {chain} to {most} with "
        "--speculative-num-steps {S} and --speculative-eagle-topk {k}, got {N}",
        way_out="give a number of that range",
        example=Example(
            drafter="NEXTN",
            flags=_flags(
                "--speculative-num-steps 2 --speculative-eagle-topk 2 "
                "--speculative-num-draft-tokens 64"
            ),
        ),
    ),
    Rule(
        refuses=lambda s: s.draft.verification != "match" and s.draft.topk > 1,
        reason="--accept-rule rejection accepts chains, and --speculative-eagle-topk {k} asks for "
        "a draft tree",
        way_out="give --accept-rule match, or leave --speculative-eagle-topk out",
        example=Example(
            drafter="NEXTN",
            flags=_flags(
                "--accept-rule rejection --speculative-num-steps 2 --speculative-eagle-topk 2 "
                "--speculative-num-draft-tokens 6"
            ),
        ),
    ),
    Rule(
        refuses=lambda s: s.draft.block_verification and s.draft.accept_rule != "rejection",
        reason="--block-verification is a way to reject chains",
        way_out="add --accept-rule rejection, or leave it out",
        example=Example(drafter="NEXTN", flags=("--block-verification",)),
    ),
    Rule(
        refuses=lambda s: s.draft.accept_rates is not None and s.draft.verification != "match",
        reason="--speculative-simulate-accept-length accepts drafts by lot, "
        "--accept-rule rejection by their probabilities",
        way_out="give one of them",
        example=Example(
            drafter="NEXTN",
            flags=_flags("--speculative-simulate-accept-length 2 --accept-rule rejection"),
        ),
    ),
    Rule(
        refuses=_simulates_more,
        reason="--speculative-simulate-accept-length {simulated} asks for drafts on more than the "
        "{levels} levels that are drafted",
        way_out="lower it, or draft more",
        example=Example(
            drafter="NAIVE_EAGLE", flags=_flags("--speculative-simulate-accept-length 2.5")
        ),
    ),
    Rule(
        refuses=lambda s: s.draft.accept_rates is not None and bool(s.options.engine.shadow_check),
        reason="--shadow-check compares texts with plain decoding, and with "
        "--speculative-simulate-accept-length they are not the model's",
        way_out="give one of them",
        example=Example(
            drafter="NEXTN",
            flags=_flags("--speculative-simulate-accept-length 2 --shadow-check 0.1"),
        ),
    ),
    Rule(
        refuses=lambda s: s.adaptive_flag is not None and not s.adaptive.speculative_adaptive,
        reason="{adaptive_flag} says how drafts are chosen",
        way_out="add --speculative-adaptive, or leave it out",
        example=Example(drafter="NEXTN", flags=_flags("--speculative-adaptive-trace steps.jsonl")),
    ),
    Rule(
        refuses=_is_shaped_twice,
        reason="--speculative-num-steps, --speculative-eagle-topk and "
        "--speculative-num-draft-tokens name one shape, and --speculative-adaptive chooses from "
        "several",
        way_out="name them in the file of --speculative-adaptive-config; with NGRAM alone, "
        "--speculative-num-draft-tokens is the largest",
        example=Example(
            drafter="NEXTN", flags=_flags("--speculative-num-steps 3 --speculative-adaptive")
        ),
    ),
    Rule(
        refuses=lambda s: (
            s.adaptive.speculative_adaptive and s.draft.verification != ACCEPT_RULES[0]
        ),
        reason="--accept-rule rejection gives texts that depend on the drafts, and with "
        "--speculative-adaptive these depend on measured seconds",
        way_out="give --accept-rule match, whose texts do not",
        example=Example(
            drafter="NEXTN", flags=_flags("--accept-rule rejection --speculative-adaptive")
        ),
    ),
    Rule(
        refuses=_names_other_drafts,
        reason="--speculative-adaptive-config names shapes that --speculative-algorithm "
        "{algorithm} does not draft, which are trees with NGRAM, NAIVE_EAGLE, DFLASH, "
        "DSPARK and DFLASH2, more than one step with NAIVE_EAGLE, and more than a block with the "
        "last three",
        way_out="name others",
        example=None,
    ),
    Rule(
        refuses=lambda s: s.options.engine.has_grammars and s.draft.verification != "match",
        reason="--grammar-backend {grammars} verifies trees of the host's, whose drafts are not "
        "judged by --accept-rule rejection",
        way_out="leave one of them out",
        example=Example(
            drafter="NEXTN",
            flags=_flags("--grammar-backend llguidance --accept-rule rejection"),
        ),
    ),
    Rule(
        refuses=lambda s: s.options.engine.has_grammars and s.draft.accept_rates is not None,
        reason="--grammar-backend {grammars} keeps what --speculative-simulate-accept-length "
        "{simulated} breaks: a draft accepted by lot is of no grammar",
        way_out="leave one of them out",
        example=Example(
            drafter="NEXTN",
            flags=_flags(
                "--grammar-backend llguidance --speculative-simulate-accept-length 0.9,0.5,0"
            ),
        ),
    ),
    Rule(
        refuses=lambda s: (
            s.options.engine.disable_overlap_schedule and bool(s.options.engine.overlap)
        ),
        reason="--disable-overlap-schedule contradicts --overlap {overlap}",
        way_out="give one of them",
        example=Example(drafter="NEXTN", flags=_flags("--overlap 2 --disable-overlap-schedule")),
    ),
    Rule(
        refuses=lambda s: (
            s.options.engine.mamba_track_interval is not None
            and not s.model.num_gated_delta_layers
            and not s.draft.drafts_with_a_model
        ),
        reason="--mamba-track-interval is of models with a recurrent state, and a {family} model "
        "has none",
        way_out="leave it out",
        example=Example(
            drafter=HOST_ALGORITHM, model_type="qwen3", flags=_flags("--mamba-track-interval 256")
        ),
    ),
    Rule(
        refuses=lambda s: (
            s.options.engine.mamba_track_interval is not None
            and s.options.engine.disable_radix_cache
        ),
        reason="--mamba-track-interval is of the prefix cache, which --disable-radix-cache turns "
        "off",
        way_out="give one of them",
        example=Example(
            drafter="NEXTN", flags=_flags("--mamba-track-interval 256 --disable-radix-cache")
        ),
    ),
    Rule(
        refuses=lambda s: (s.options.model.context_length or 0) > s.model.context_length,
        reason="--context-length {context} is beyond the model's {model_context} positions",
        way_out="give a smaller one or leave the flag out",
        example=Example(drafter="NEXTN", flags=_flags("--context-length 16777216")),
    ),
    *MAP_RULES,
    *TEXT_RULES,
)


def refusals(setup: Setup) -> list[str]:
    """One sentence for every rule that refuses the setup; an empty list where it can be served."""
    words = setup.words()
    return [rule.sentence(words) for rule in RULES if rule.refuses(setup)]
