"""Decode steps: draft, verify, accept, commit and draft extend.

Policy, what may not be added here: code for one drafter or one model (its place is `drafters/` or
`layers.py`), sources of draft trees (`draft.py`), kernels and sampling rules (`ops/`), decisions
that depend on device values (the program fixes all branches), scheduling and memory limits (the
host plans them).
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.boundary.program import ProgramFeature
from torch_impl import model
from torch_impl.device_state import Fields, TokenMask
from torch_impl.draft import VerifyTrees, build_trees
from torch_impl.drafters import ExtendRows
from torch_impl.drafters.eagle import extend_rows
from torch_impl.layers import VerifyMixer
from torch_impl.ops.attention import attention
from torch_impl.ops.attention.attention import AttentionRows
from torch_impl.ops.recurrent.recurrent_layer import TreeNodes
from torch_impl.ops.sampling import acceptance, grammar_bitmask, lm_head, sampling
from torch_impl.ops.sampling.acceptance import AcceptedPath
from torch_impl.ops.sampling.lm_head import Projection
from torch_impl.ops.sampling.sampling import TokenCounts
from torch_impl.ops.trees import draft_tree, ngram, slot_state
from torch_impl.step_context import Step, adapter_slots, logprobs_of, ranking, with_image_mrope


@dataclass(frozen=True)
class VerifyRows:
    """Verify rows of a step: the nodes of all trees, one after the other.

    Attributes:
      rows: Positions and visible KV of each verify row.
      node: Tree node of each verify row.
      row_of: Verify row of each node.
    """

    rows: AttentionRows
    node: Int[Tensor, " R"]
    row_of: Int[Tensor, "B N"]

    @classmethod
    def of(cls, step: Step, trees: VerifyTrees) -> "VerifyRows":
        """Builds the verify rows of the trees."""
        program, shape, table = step.program, step.program.shape, step.plan.page_table
        rows, node = attention.tree_rows(
            trees.parents, trees.num_nodes, step.lengths, table, shape.rows, program.is_chain
        )
        rows = with_image_mrope(step, rows)
        rows = replace(rows, window_page_tables=step.plan.window_page_tables)
        row_of = draft_tree.flat_rows(rows.row_starts, trees.num_nodes, shape.nodes)
        return cls(rows, node, row_of)


@dataclass(frozen=True)
class VerifyOutput:
    """Result of a verify.

    Attributes:
      flat: Verify rows of the trees.
      passed: Target's forward pass over the verify rows.
      projected: LM-head projection of the verify rows.
      logits: This rank's shard of their logits; None if the program does not read logits.
      mixer: Mixer that ran the GDN layers, with the inputs that a commit replays.
    """

    flat: VerifyRows
    passed: model.Forward
    projected: Projection
    logits: Float[Tensor, "R share"] | None
    mixer: VerifyMixer | None


def decode(step: Step) -> Fields:
    """Runs a decode step: each row commits its accepted path, at least one token."""
    trees = build_trees(step)
    verified = verify(step, trees)
    accepted = accept(step, trees, verified)
    saved = commit(step, verified, accepted)
    draft_extend(step, trees, verified, accepted)
    return result_fields(step, trees, verified, accepted, saved)


def verify(step: Step, trees: VerifyTrees) -> VerifyOutput:
    """Runs the target over all trees; GDN states are not changed."""
    target, state, flat = step.context.model, step.context.state, VerifyRows.of(step, trees)
    mixer = _mixer(step, trees, flat)
    tokens = trees.tokens[flat.rows.request, flat.node]
    slots = adapter_slots(step, flat.rows.request)
    passed = model.forward(target, tokens, None, flat.rows, state.kv, mixer, step.streams, slots)
    projected = model.lm_head_input(target, passed.hidden)
    # An argmax alone is fused into the LM-head GEMM and needs no stored logits.
    reads = step.program.has(ProgramFeature.LOGPROBS) or trees.drafted is not None
    logits = lm_head.scores(projected) if reads else None
    return VerifyOutput(flat, passed, projected, logits, mixer)


def _mixer(step: Step, trees: VerifyTrees, flat: VerifyRows) -> VerifyMixer | None:
    """Returns the mixer of the step's GDN layers, or None for a model without them."""
    delta = step.context.state.delta
    if delta is None:
        return None
    parents, rows = None if step.program.is_chain else trees.parents, flat.rows
    nodes = TreeNodes(parents, rows.row_starts, flat.row_of, rows.request, flat.node)
    target, is_plain = step.context.model, step.program.shape.is_plain
    return VerifyMixer(target.config, target.group, delta, step.plan.slots, nodes, is_plain)


def accept(step: Step, trees: VerifyTrees, verified: VerifyOutput) -> AcceptedPath:
    """Returns the accepted path of each row's tree."""
    choices, is_finite = _choose(step, trees, verified)
    choices, walked = _accepting(step, trees, choices)
    return acceptance.follow(
        trees.tokens,
        trees.parents,
        walked,
        choices,
        verified.flat.row_of,
        is_finite,
        step.plan.slots != 0,
        step.program.shape.depth,
        step.program.is_chain,
    )


def _choose(
    step: Step, trees: VerifyTrees, verified: VerifyOutput
) -> tuple[Int[Tensor, "B N"], Bool[Tensor, " R"]]:
    """Chooses the token after each node; also returns the mask of rows with finite logits."""
    rows, vocabulary = verified.flat.rows, step.context.model.vocabulary
    positions = rows.positions + 1
    seen = _token_counts(step, trees, verified.flat)
    if trees.drafted is not None:
        return _sample_rejecting(step, trees, verified, seen, positions)
    allowed = _allowed(step.plan.mask, verified.flat, step.context.capacity.vocab)
    given = (seen, positions, step.plan.sampling, rows.request, allowed, vocabulary)
    if verified.logits is None:
        chosen = lm_head.choose(verified.projected, *given)
    else:
        chosen = sampling.choose(verified.logits, *given)
    return chosen.ids[verified.flat.row_of], chosen.is_finite


def _token_counts(step: Step, trees: VerifyTrees, flat: VerifyRows) -> TokenCounts:
    """Returns the token counts of each verify row, for penalties."""
    return sampling.counts_in_trees(
        counts=step.context.state.seen,
        slots=step.plan.slots,
        tokens=trees.tokens,
        parents=trees.parents,
        request=flat.rows.request,
        node=flat.node,
        is_chain=step.program.is_chain,
    )


def _sample_rejecting(
    step: Step,
    trees: VerifyTrees,
    verified: VerifyOutput,
    seen: TokenCounts,
    positions: Int[Tensor, " R"],
) -> tuple[Int[Tensor, "B N"], Bool[Tensor, " R"]]:
    """Same as `_choose`, by rejection sampling of sampled drafts."""
    context = step.context
    assert trees.drafted is not None  # set with verified logits for rejection sampling
    assert verified.logits is not None
    return acceptance.rejection_sample(
        logits=verified.logits,
        seen=seen,
        positions=positions,
        sampling=step.plan.sampling,
        request=verified.flat.rows.request,
        row_of=verified.flat.row_of,
        tokens=trees.tokens,
        num_nodes=trees.num_nodes,
        lengths=step.lengths,
        drafted=trees.drafted,
        allowed=None,
        rule=context.capacity.accept_rule,
        vocabulary=context.model.vocabulary,
    )


def _allowed(
    mask: TokenMask | None, flat: VerifyRows, vocab: int
) -> Bool[Tensor, "R vocab"] | None:
    """Returns the tokens that the grammar allows each verify row, or None for all."""
    if mask is None:
        return None
    return grammar_bitmask.allowed(mask.bits, mask.index[flat.rows.request, flat.node], vocab)


def _accepting(
    step: Step, trees: VerifyTrees, choices: Int[Tensor, "B N"]
) -> tuple[Int[Tensor, "B N"], Int[Tensor, " B"]]:
    """Returns the choices and node counts that determine acceptance.

    They come from the target, from simulated acceptance, or from forced drafts of a row.
    """
    tokens, walked, rates = trees.tokens, trees.num_nodes, step.context.capacity.accept_rates
    if rates is not None and not step.program.shape.is_plain:
        seed, lengths = step.plan.sampling.seed, step.lengths
        choices, walked = acceptance.simulate(
            tokens, trees.parents, walked, choices, rates, seed, lengths
        )
    if trees.forced is not None:
        choices, forced = acceptance.force_chain(tokens, trees.num_nodes, choices, trees.forced)
        walked = torch.where(trees.forced, forced, walked)
    return choices, walked


def commit(step: Step, verified: VerifyOutput, accepted: AcceptedPath) -> Bool[Tensor, " B"]:
    """Commits the accepted paths to the slots; returns which snapshots were saved."""
    state, plan = step.context.state, step.plan
    if not step.program.is_chain:
        tables = plan.page_tables_of(step.context.model.config.kv_pools)
        path, counts = accepted.path, accepted.counts
        for pool, table in zip(state.kv, tables, strict=True):
            attention.compact_accepted_kv(pool, table, step.lengths, path, counts)
    saved = _commit_states(step, verified.mixer, accepted)
    draft = None if step.extends_drafter else state.draft  # leaves a gap in its KV
    slot_state.commit(
        lengths=state.lengths,
        newest=state.newest,
        seen=state.seen,
        draft_from=None if draft is None else draft.draft_from,
        slots=plan.slots,
        before=step.lengths,
        tokens=accepted.tokens,
        counts=accepted.counts,
        prompt_length=plan.sampling.prompt_length,
    )
    _learn_ngrams(step, accepted)
    return saved


def _commit_states(
    step: Step, mixer: VerifyMixer | None, accepted: AcceptedPath
) -> Bool[Tensor, " B"]:
    """Advances the GDN states along the accepted paths; returns which snapshots were saved."""
    plan, snapshots = step.plan, step.context.state.snapshots
    save_after = plan.save_at - step.lengths
    if mixer is None or snapshots is None:
        return torch.zeros_like(plan.starts)
    mixer.commit(snapshots, accepted.path, accepted.counts, save_after, plan.save)
    return (plan.save != 0) & (save_after >= 1) & (save_after <= accepted.counts)


def _learn_ngrams(step: Step, accepted: AcceptedPath) -> None:
    """Adds the accepted tokens to the n-gram table of the device, if it has one."""
    plan, texts = step.plan, step.context.state.texts
    if texts is None:
        return
    assert plan.texts is not None  # n-gram scopes of the rows
    ngram.learn_outputs(texts, plan.slots, accepted.tokens, accepted.counts, plan.texts.scopes)


def draft_extend(
    step: Step, trees: VerifyTrees, verified: VerifyOutput, accepted: AcceptedPath
) -> None:
    """Extends the drafter over the accepted paths with the target's hidden states.

    A step of plain decoding leaves a gap in the draft KV instead.
    """
    if not step.extends_drafter:
        return
    context, plan, draft = step.context, step.plan, step.context.state.draft
    assert context.drafter is not None  # required by draft extend
    assert draft is not None
    counts, W = accepted.counts, accepted.path.shape[1]
    draft_from = draft.draft_from[plan.slots]
    rows = extend_rows(step.lengths, counts, draft_from, plan.page_table, W - 1)
    rank = ranking(step, step.lengths + counts, context.capacity.max_width, False)
    committed = ExtendRows(
        rows=with_image_mrope(step, rows),
        tokens=trees.tokens.gather(1, accepted.path.long()).flatten(),
        following=accepted.tokens.flatten(),
        shown=None,
        passed=verified.passed.at(accepted.rows.flatten()),
        last=rows.row_starts[:-1] + (counts - 1).clamp(min=0),
    )
    context.drafter.extend(draft, plan, step.lengths, counts, committed, rank)


def result_fields(
    step: Step,
    trees: VerifyTrees,
    verified: VerifyOutput,
    accepted: AcceptedPath,
    saved: Bool[Tensor, " B"],
) -> Fields:
    """Returns the fields of a decode step's result."""
    values = {"tokens": accepted.tokens, "counts": accepted.counts, "failed": accepted.failed}
    values |= {"snapshot_saved": saved} | trees.fields()
    return values | logprobs_of(
        step, verified.logits, accepted.rows, accepted.tokens, accepted.counts
    )
