"""Rules between the drafting method and the shape of its draft chains and trees."""

from collections.abc import Sequence

from shared.drafts.kinds import BLOCK_KINDS, Form
from shared.models.sentence_list import sentence_list
from shared.options.adaptive import MOST_STEPS
from shared.options.rule_context import Example, Rule, RuleContext, flags_of
from shared.options.speculative import NAIVE_SHAPE


def _differ(given: Sequence[int | None], fixed: Sequence[int]) -> bool:
    """Returns True if a number was given and differs from the fixed one."""
    return any(number not in (None, want) for number, want in zip(given, fixed, strict=True))


def _shapes_naive(s: RuleContext) -> bool:
    names = ("num_steps", "eagle_topk", "num_draft_tokens")
    given = [getattr(s.draft, f"speculative_{name}") for name in names]
    return s.draft.has_form(Form.TOKEN) and _differ(given, NAIVE_SHAPE)


def _shapes_text(s: RuleContext) -> bool:
    draft = s.draft
    given = (
        draft.speculative_draft_model_path,
        draft.speculative_num_steps,
        draft.speculative_eagle_topk,
    )
    return draft.from_text and given != (None, None, None)


def _shapes_itself(s: RuleContext) -> bool:
    """Returns True if the flags determine the draft shape."""
    return s.draft.has_form(Form.TREE, Form.BLOCK)


def _lacks_nodes(s: RuleContext) -> bool:
    return _shapes_itself(s) and s.draft.topk > 1 and s.draft.speculative_num_draft_tokens is None


def _breaks_block(s: RuleContext) -> bool:
    given = (s.draft.speculative_num_steps, s.draft.speculative_num_draft_tokens)
    is_chain = s.block is not None and s.draft.topk == 1
    return is_chain and _differ(given, ((s.block or 1) - 1, s.block or 1))


def _exceeds_block(s: RuleContext) -> bool:
    """Returns True for a tree of more levels than a block."""
    return s.block is not None and s.draft.topk > 1 and s.num_steps >= s.block


def _is_shaped_twice(s: RuleContext) -> bool:
    """Returns True if flags fix a shape and `--speculative-adaptive` chooses one."""
    draft = s.draft
    shape = (draft.speculative_num_steps, draft.speculative_eagle_topk)
    nodes = draft.speculative_num_draft_tokens
    is_size = draft.from_text and not s.options.candidates
    return (s.adaptive.speculative_adaptive and not draft.joins_copies) and (
        shape != (None, None) or (nodes is not None and not is_size)
    )


def _names_other_drafts(s: RuleContext) -> bool:
    """Returns True if the file contains shapes that the drafter does not support."""
    most = NAIVE_SHAPE[0] if s.draft.has_form(Form.TOKEN) else MOST_STEPS
    if s.drafts_blocks:
        most = (s.block or 1) - 1
    has_trees = s.draft.has_form(Form.TREE, Form.BLOCK)
    return any(
        each.steps > most or (each.topk > 1 and not has_trees) for each in s.options.candidates
    )


def _simulates_more(s: RuleContext) -> bool:
    """Returns True if acceptance is simulated beyond the draft depth."""
    return len(s.draft.accept_rates or ()) > s.num_levels


DRAFT_SHAPE_RULES = (
    Rule(
        applies=lambda s: (
            s.block is not None and (s.draft.speculative_draft_window_size or s.block) < s.block
        ),
        reason="--speculative-draft-window-size {window} is shorter than the draft model's chain "
        "of {block} nodes",
        hint="give at least {block}",
        example=Example(drafter="DFLASH", flags=flags_of("--speculative-draft-window-size 2")),
    ),
    Rule(
        applies=_breaks_block,
        reason="--speculative-num-steps and --speculative-num-draft-tokens must fit the draft "
        "model, which drafts chains of {block} nodes",
        hint="remove them",
        example=Example(drafter="DFLASH", flags=flags_of("--speculative-num-draft-tokens 3")),
    ),
    Rule(
        applies=_exceeds_block,
        reason="--speculative-num-steps {S} exceeds the block of the draft model, which drafts "
        "{block_levels} levels",
        hint="lower it, or remove the flag",
        example=None,
    ),
    Rule(
        applies=_shapes_naive,
        reason="--speculative-num-steps, --speculative-eagle-topk and "
        "--speculative-num-draft-tokens are not supported with --speculative-algorithm "
        "NAIVE_EAGLE, which always drafts one token",
        hint="remove them",
        example=Example(drafter="NAIVE_EAGLE", flags=flags_of("--speculative-num-steps 2")),
    ),
    Rule(
        applies=_shapes_text,
        reason="--speculative-draft-model-path, --speculative-num-steps and "
        "--speculative-eagle-topk are not supported with --speculative-algorithm NGRAM, whose "
        "trees have --speculative-num-draft-tokens nodes",
        hint="remove them",
        example=Example(drafter="NGRAM", flags=flags_of("--speculative-num-steps 3")),
    ),
    Rule(
        applies=_lacks_nodes,
        reason="--speculative-eagle-topk {k} requires the size of the draft tree",
        hint="set --speculative-num-draft-tokens",
        example=Example(drafter="NEXTN", flags=flags_of("--speculative-eagle-topk 2")),
    ),
    Rule(
        applies=lambda s: (
            _shapes_itself(s) and s.draft.topk == 1 and s.draft.num_draft_tokens != s.max_nodes
        ),
        reason="--speculative-num-draft-tokens {N} must be --speculative-num-steps + 1 = {chain} "
        "with --speculative-eagle-topk 1",
        hint="remove it",
        example=Example(
            drafter="NEXTN",
            flags=flags_of("--speculative-num-steps 2 --speculative-num-draft-tokens 8"),
        ),
    ),
    Rule(
        applies=lambda s: (
            _shapes_itself(s)
            and s.draft.topk > 1
            and not _lacks_nodes(s)
            and not s.num_steps < s.draft.num_draft_tokens <= s.max_nodes
        ),
        reason="--speculative-num-draft-tokens must be {chain} to {most} with "
        "--speculative-num-steps {S} and --speculative-eagle-topk {k}, got {N}",
        hint="give a number in that range",
        example=Example(
            drafter="NEXTN",
            flags=flags_of(
                "--speculative-num-steps 2 --speculative-eagle-topk 2 "
                "--speculative-num-draft-tokens 64"
            ),
        ),
    ),
    Rule(
        applies=_simulates_more,
        reason="--speculative-simulate-accept-length {simulated} needs more draft levels than the "
        "{levels} that are drafted",
        hint="lower it, or draft more",
        example=Example(
            drafter="NAIVE_EAGLE", flags=flags_of("--speculative-simulate-accept-length 2.5")
        ),
    ),
    Rule(
        applies=_is_shaped_twice,
        reason="--speculative-num-steps, --speculative-eagle-topk and "
        "--speculative-num-draft-tokens fix one draft shape, and --speculative-adaptive chooses "
        "among several",
        hint="list the shapes in the file of --speculative-adaptive-config; with NGRAM alone, "
        "--speculative-num-draft-tokens is the largest size",
        example=Example(
            drafter="NEXTN", flags=flags_of("--speculative-num-steps 3 --speculative-adaptive")
        ),
    ),
    Rule(
        applies=_names_other_drafts,
        reason="--speculative-adaptive-config contains shapes that --speculative-algorithm "
        "{algorithm} does not support: trees with NGRAM and NAIVE_EAGLE, more than one step with "
        f"NAIVE_EAGLE, and more than a block with {sentence_list(BLOCK_KINDS)}",
        hint="remove these shapes",
        example=None,
    ),
)
