"""Decode steps: draft, verify, accept, commit and draft extend.

Policy, what may not be added here: code for one drafter or one model (its place is `drafters/` or
`layers.py`), kernels and sampling rules (`ops/`), decisions that depend on device values (the
program fixes all branches), scheduling and memory limits (the host plans them).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.boundary.program import Program, ProgramFeature
from shared.spec.ngram import width_of
from torch_impl import model
from torch_impl.device_state import Fields, HostDraft, Plan, TokenMask
from torch_impl.drafters import DraftTrees, ExtendRows
from torch_impl.drafters.eagle import extend_rows
from torch_impl.layers import VerifyMixer
from torch_impl.model import Forward
from torch_impl.ops.attention import attention
from torch_impl.ops.attention.attention import AttentionRows
from torch_impl.ops.gdn.gdn_layer import TreeNodes
from torch_impl.ops.sampling import acceptance, grammar_bitmask, lm_head, sampling
from torch_impl.ops.sampling.acceptance import AcceptedPath
from torch_impl.ops.sampling.lm_head import Projection
from torch_impl.ops.trees import draft_tree, merge_drafts, ngram, slot_state, verify_budget
from torch_impl.ops.trees.merge_drafts import DraftedTrees, MergedTrees, NgramTrees
from torch_impl.step_context import StepContext, logprobs_of, ranking, with_image_mrope


@dataclass(frozen=True)
class Trees:
    """Draft tree of each row.

    Attributes:
      forced: Rows whose draft tokens are accepted unconditionally; None if the program has none.
      drafted: Processed logits that a chain was sampled from; None if it was not sampled.
      origins: Source of each node; None without merged n-gram drafts.
    """

    tokens: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    num_nodes: Int[Tensor, " B"]
    forced: Bool[Tensor, " B"] | None
    drafted: Float[Tensor, "B S vocab"] | None
    origins: MergedTrees | None = None

    def fields(self) -> Fields:
        trees = {"drafts": self.tokens, "parents": self.parents, "num_nodes": self.num_nodes}
        if self.origins is None:
            return trees
        return trees | {"drafted": self.origins.drafted, "copied": self.origins.copied}


@dataclass(frozen=True)
class VerifyOutput:
    """Result of a verify: the target's forward pass over all nodes, the accepted paths, this rank's
    shard of the logits of all nodes (if the program reads them), and the inputs of a commit."""

    passed: Forward
    accepted: AcceptedPath
    logits: Float[Tensor, "R share"] | None
    mixer: VerifyMixer | None


def decode(context: StepContext, plan: Plan, program: Program) -> Fields:
    lengths = context.state.lengths[plan.slots]
    trees = build_trees(context, plan, program, lengths)
    verified = verify(context, plan, program, trees, lengths)
    saved = commit(context, plan, program, verified, lengths)
    draft_extend(context, plan, program, trees, verified, lengths)
    return result_fields(context, plan, program, trees, verified, saved)


def draft(context: StepContext, plan: Plan, program: Program) -> Fields:
    lengths = context.state.lengths[plan.slots]
    return build_trees(context, plan, program, lengths).fields()


def build_trees(
    context: StepContext, plan: Plan, program: Program, lengths: Int[Tensor, " B"]
) -> Trees:
    """Builds the draft trees of a step: from the plan, from the drafter, or the root alone."""
    state, shape = context.state, program.shape
    newest = state.newest[plan.slots]
    if plan.drafts is not None:
        return _host_trees(plan.drafts, newest)
    if shape.is_plain:
        return _roots(newest)
    if plan.copies is not None and shape.drafter.is_plain:
        return _joined(_no_drafts(newest), plan, program, plan.copies, lengths)
    if program.has(ProgramFeature.DEVICE_NGRAM):
        return _of_texts(context, plan, program)
    assert context.drafter is not None  # required by a program that drafts
    assert state.draft is not None
    rank = ranking(context, plan, lengths, shape.width, context.samples(program))
    deltas = None if state.images is None else state.images.deltas[plan.slots]
    drafted = context.drafter.draft(state.draft, plan, newest, lengths, deltas, shape.drafter, rank)
    if plan.copies is not None:
        return _joined(drafted, plan, program, plan.copies, lengths)
    if program.shares_rows:
        return Trees(*_share(drafted, plan, shape.rows), None, None)
    return Trees(drafted.tokens, drafted.parents, drafted.num_nodes, None, drafted.processed)


def _of_texts(context: StepContext, plan: Plan, program: Program) -> Trees:
    """Drafts the tokens that followed earlier occurrences of each row's last n-gram."""
    shape, memory = program.shape, context.state.texts
    assert memory is not None  # required by the program
    assert plan.texts is not None
    width = width_of(shape.nodes, context.capacity.accept_rule)
    given = (memory.tails[plan.slots], plan.texts.scopes, plan.sampling.max_drafts)
    grown = ngram.draft(memory.table, *given, shape.nodes, shape.depth, width)
    drafted = DraftTrees(grown.tokens, grown.parents, grown.num_nodes, grown.weights, None)
    if program.shares_rows:
        return Trees(*_share(drafted, plan, shape.rows), None, None)
    return Trees(drafted.tokens, drafted.parents, drafted.num_nodes, None, None)


def _share(
    drafted: DraftTrees, plan: Plan, rows: int
) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B N"], Int[Tensor, " B"]]:
    """Prunes the trees to the verify budget; returns tokens, parents and node counts."""
    assert drafted.weights is not None  # set by a program with a verify budget
    ranked = verify_budget.log_acceptance(
        drafted.parents, drafted.weights, plan.sampling.calibration
    )
    return verify_budget.prune_to_budget(
        drafted.tokens, drafted.parents, drafted.num_nodes, ranked, rows
    )


def _no_drafts(newest: Int[Tensor, " B"]) -> DraftTrees:
    """Returns trees without drafts: each root and one padding node.

    Kernels require trees of more than one node.
    """
    tokens = torch.stack([newest, torch.zeros_like(newest)], dim=1)
    weights = torch.zeros_like(tokens, dtype=torch.float32)
    return DraftTrees(tokens, torch.zeros_like(tokens), torch.ones_like(newest), weights, None)


def _joined(
    drafted: DraftTrees, plan: Plan, program: Program, given: NgramTrees, lengths: Int[Tensor, " B"]
) -> Trees:
    """Merges the plan's n-gram drafts into the drafter's trees and keeps the best nodes."""
    assert drafted.weights is not None  # set by a shape with merged drafts
    ranked = verify_budget.log_acceptance(
        drafted.parents, drafted.weights, plan.sampling.calibration
    )
    grown = DraftedTrees(drafted.tokens, drafted.parents, drafted.num_nodes, ranked)
    shape, most = program.shape, plan.sampling.max_drafts
    joined = merge_drafts.merge(grown, given, lengths, most, shape.nodes, shape.depth, shape.rows)
    return Trees(joined.tokens, joined.parents, joined.num_nodes, None, None, joined)


def _host_trees(drafts: HostDraft, newest: Int[Tensor, " B"]) -> Trees:
    return Trees(
        tokens=torch.cat([newest[:, None], drafts.tokens[:, 1:]], dim=1),
        parents=drafts.parents,
        # The node count of a padded row is 0, but every row verifies its root.
        num_nodes=drafts.num_nodes.clamp(min=1),
        forced=drafts.forced,
        drafted=None,
    )


def _roots(newest: Int[Tensor, " B"]) -> Trees:
    return Trees(
        tokens=newest[:, None],
        parents=torch.zeros_like(newest)[:, None],
        num_nodes=torch.ones_like(newest),
        forced=None,
        drafted=None,
    )


def verify(
    context: StepContext,
    plan: Plan,
    program: Program,
    trees: Trees,
    lengths: Int[Tensor, " B"],
) -> VerifyOutput:
    """Runs the target over all trees and finds the accepted paths; GDN states are not changed."""
    shape = program.shape
    rows, node = attention.tree_rows(
        trees.parents,
        trees.num_nodes,
        lengths,
        plan.page_table,
        shape.rows,
        program.is_chain,
    )
    rows = with_image_mrope(context, plan, rows)
    row_of = draft_tree.flat_rows(rows.row_starts, trees.num_nodes, shape.nodes)
    mixer = _mixer(context, plan, program, trees, row_of, rows, node)
    tokens = trees.tokens[rows.request, node]
    streams = context.streams(program)
    passed = model.forward(context.model, tokens, None, rows, context.state.kv, mixer, streams)
    # An argmax alone is fused into the LM-head GEMM and needs no stored logits.
    reads = program.has(ProgramFeature.LOGPROBS) or trees.drafted is not None
    projected = model.lm_head_input(context.model, passed.hidden)
    logits = lm_head.scores(projected) if reads else None
    choices, is_finite = _choose(
        context, plan, program, trees, projected, logits, rows, node, row_of, lengths
    )
    choices, walked = _accepting(context, plan, program, trees, choices, lengths)
    accepted = acceptance.follow(
        trees.tokens,
        trees.parents,
        walked,
        choices,
        row_of,
        is_finite,
        plan.slots != 0,
        shape.depth,
        program.is_chain,
    )
    return VerifyOutput(passed, accepted, logits, mixer)


def _mixer(
    context: StepContext,
    plan: Plan,
    program: Program,
    trees: Trees,
    row_of: Int[Tensor, "B N"],
    rows: AttentionRows,
    node: Int[Tensor, " R"],
) -> VerifyMixer | None:
    if context.state.delta is None:
        return None
    parents = None if program.is_chain else trees.parents
    nodes = TreeNodes(parents, rows.row_starts, row_of, rows.request, node)
    pools = (context.state.delta, plan.slots)
    return VerifyMixer(context.model.config, *pools, nodes, program.shape.is_plain)


def _choose(
    context: StepContext,
    plan: Plan,
    program: Program,
    trees: Trees,
    projected: Projection,
    logits: Float[Tensor, "R share"] | None,
    rows: AttentionRows,
    node: Int[Tensor, " R"],
    row_of: Int[Tensor, "B N"],
    lengths: Int[Tensor, " B"],
) -> tuple[Int[Tensor, "B N"], Bool[Tensor, " R"]]:
    """Chooses the token after each node; also returns the mask of rows with finite logits."""
    request, positions, params = rows.request, rows.positions + 1, plan.sampling
    of_trees = (trees.tokens, trees.parents, request, node, program.is_chain)
    seen = sampling.counts_in_trees(context.state.seen, plan.slots, *of_trees)
    if trees.drafted is None:
        allowed = _allowed(plan.mask, request, node, context.capacity.vocab)
        given = (seen, positions, params, request, allowed, context.model.vocabulary)
        if logits is None:
            chosen = lm_head.choose(projected, *given)
        else:
            chosen = sampling.choose(logits, *given)
        return chosen.ids[row_of], chosen.is_finite
    assert logits is not None  # read by rejection sampling
    return acceptance.rejection_sample(
        logits=logits,
        seen=seen,
        positions=positions,
        sampling=params,
        request=request,
        row_of=row_of,
        tokens=trees.tokens,
        num_nodes=trees.num_nodes,
        lengths=lengths,
        drafted=trees.drafted,
        allowed=None,
        rule=context.capacity.accept_rule,
        vocabulary=context.model.vocabulary,
    )


def _allowed(
    mask: TokenMask | None, request: Int[Tensor, " R"], node: Int[Tensor, " R"], vocab: int
) -> Bool[Tensor, "R vocab"] | None:
    """Returns the tokens that the grammar allows each verify row, or None for all."""
    return (
        None
        if mask is None
        else grammar_bitmask.allowed(mask.bits, mask.index[request, node], vocab)
    )


def _accepting(
    context: StepContext,
    plan: Plan,
    program: Program,
    trees: Trees,
    choices: Int[Tensor, "B N"],
    lengths: Int[Tensor, " B"],
) -> tuple[Int[Tensor, "B N"], Int[Tensor, " B"]]:
    """Returns the choices and node counts that determine acceptance.

    They come from the target, from simulated acceptance, or from forced drafts of a row.
    """
    tokens, walked, rates = trees.tokens, trees.num_nodes, context.capacity.accept_rates
    if rates is not None and not program.shape.is_plain:
        seeds = plan.sampling.seed
        choices, walked = acceptance.simulate(
            tokens, trees.parents, walked, choices, rates, seeds, lengths
        )
    if trees.forced is not None:
        choices, forced = acceptance.force_chain(tokens, trees.num_nodes, choices, trees.forced)
        walked = torch.where(trees.forced, forced, walked)
    return choices, walked


def commit(
    context: StepContext,
    plan: Plan,
    program: Program,
    verified: VerifyOutput,
    lengths: Int[Tensor, " B"],
) -> Bool[Tensor, " B"]:
    """Commits the accepted paths to the slots; returns which snapshots were saved."""
    state, draft = context.state, context.state.draft
    if not program.is_chain:
        attention.compact_accepted_kv(
            state.kv, plan.page_table, lengths, verified.accepted.path, verified.accepted.counts
        )
    saved = _commit_state(context, plan, verified, plan.save_at - lengths)
    slot_state.commit(
        lengths=state.lengths,
        newest=state.newest,
        seen=state.seen,
        draft_from=None if draft is None or context.extends_drafter(program) else draft.draft_from,
        slots=plan.slots,
        before=lengths,
        tokens=verified.accepted.tokens,
        counts=verified.accepted.counts,
        prompt_length=plan.sampling.prompt_length,
    )
    if state.texts is not None:
        assert plan.texts is not None  # n-gram scopes of the rows
        accepted = verified.accepted
        rows = (plan.slots, accepted.tokens, accepted.counts, plan.texts.scopes)
        ngram.learn_outputs(state.texts, *rows)
    return saved


def _commit_state(
    context: StepContext, plan: Plan, verified: VerifyOutput, save_after: Int[Tensor, " B"]
) -> Bool[Tensor, " B"]:
    """Advances the GDN states along the accepted paths; returns which snapshots were saved."""
    accepted, snapshots = verified.accepted, context.state.snapshots
    if verified.mixer is None or snapshots is None:
        return torch.zeros_like(plan.starts)
    verified.mixer.commit(snapshots, accepted.path, accepted.counts, save_after, plan.save)
    return (plan.save != 0) & (save_after >= 1) & (save_after <= accepted.counts)


def draft_extend(
    context: StepContext,
    plan: Plan,
    program: Program,
    trees: Trees,
    verified: VerifyOutput,
    lengths: Int[Tensor, " B"],
) -> None:
    """Extends the drafter over the accepted paths with the target's hidden states.

    A step of plain decoding leaves a gap in the draft KV instead.
    """
    if not context.extends_drafter(program):
        return
    W, counts, draft = (
        verified.accepted.path.shape[1],
        verified.accepted.counts,
        context.state.draft,
    )
    assert context.drafter is not None  # required by draft extend
    assert draft is not None
    rows = extend_rows(lengths, counts, draft.draft_from[plan.slots], plan.page_table, W - 1)
    rank = ranking(context, plan, lengths + counts, context.capacity.max_width, False)
    fed = ExtendRows(
        rows=with_image_mrope(context, plan, rows),
        tokens=trees.tokens.gather(1, verified.accepted.path.long()).flatten(),
        following=verified.accepted.tokens.flatten(),
        shown=None,
        passed=verified.passed.at(verified.accepted.rows.flatten()),
        last=rows.row_starts[:-1] + (counts - 1).clamp(min=0),
    )
    context.drafter.extend(draft, plan, lengths, counts, fed, rank)


def result_fields(
    context: StepContext,
    plan: Plan,
    program: Program,
    trees: Trees,
    verified: VerifyOutput,
    saved: Bool[Tensor, " B"],
) -> Fields:
    """Returns the fields of a decode step's result."""
    accepted = verified.accepted
    values = {"tokens": accepted.tokens, "counts": accepted.counts, "failed": accepted.failed}
    values |= {"snapshot_saved": saved} | trees.fields()
    chosen_from = (verified.logits, accepted.rows, accepted.tokens, accepted.counts)
    return values | logprobs_of(context, plan, program, *chosen_from)
