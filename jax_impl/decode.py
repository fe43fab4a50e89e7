"""Decode steps: draft, verify, accept, commit and draft extend.

Policy, what may not be added here: code for one drafter or one model (its place is `drafters/` or
`layers.py`), kernels and sampling rules (`ops/`), decisions that depend on device values (the
program fixes all branches), scheduling and memory limits (the host plans them).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jax_impl import model
from jax_impl.device_state import DeviceState, Fields, Plan, TokenMask
from jax_impl.drafters import DraftTrees, ExtendRows
from jax_impl.drafters.eagle import extend_rows
from jax_impl.layers import VerifyMixer
from jax_impl.ops.attention import attention
from jax_impl.ops.attention.attention import AttentionRows
from jax_impl.ops.gdn.gdn_layer import TreeNodes
from jax_impl.ops.sampling import acceptance, grammar_bitmask, lm_head, sampling
from jax_impl.ops.sampling.acceptance import AcceptedPath
from jax_impl.ops.sampling.lm_head import Projection
from jax_impl.ops.trees import draft_tree, merge_drafts, ngram, slot_state, verify_budget
from jax_impl.ops.trees.merge_drafts import DraftedTrees, MergedTrees, NgramTrees
from jax_impl.step_context import StepContext, logprobs_of, ranking, with_image_mrope
from shared.boundary.program import Program, ProgramFeature
from shared.spec.ngram import width_of


class Trees(NamedTuple):
    """Draft tree of each row.

    Attributes:
      forced: Rows whose draft tokens are accepted unconditionally; None if the program has none.
      drafted: Processed logits that a chain was sampled from; None if it was not sampled.
      origins: Source of each node; None without merged n-gram drafts.
    """

    tokens: Int[jax.Array, "B N"]
    parents: Int[jax.Array, "B N"]
    num_nodes: Int[jax.Array, " B"]
    forced: Bool[jax.Array, " B"] | None
    drafted: Float[jax.Array, "B S vocab"] | None
    origins: MergedTrees | None = None

    def fields(self) -> Fields:
        trees = {"drafts": self.tokens, "parents": self.parents, "num_nodes": self.num_nodes}
        if self.origins is None:
            return trees
        return trees | {"drafted": self.origins.drafted, "copied": self.origins.copied}


class VerifyOutput(NamedTuple):
    """Result of a verify.

    Attributes:
      passed: Target's forward pass over all nodes.
      accepted: Accepted path of each row's tree.
      logits: This rank's shard of the logits of all nodes; None if the program does not read them.
      mixer: Mixer that ran the GDN layers, with the inputs that a commit replays.
    """

    passed: model.Forward
    accepted: AcceptedPath
    logits: Float[jax.Array, "R share"] | None
    mixer: VerifyMixer | None


def decode(
    context: StepContext, state: DeviceState, plan: Plan, program: Program
) -> tuple[DeviceState, Fields]:
    """Builds draft trees or reads the plan's, verifies them, and commits accepted tokens."""
    lengths = state.lengths[plan.slots]
    trees, state = build_trees(context, state, plan, program, lengths)
    verified = verify(context, state, plan, program, trees, lengths)
    state, saved = commit(context, state, plan, program, verified, lengths)
    state = draft_extend(context, state, plan, program, trees, verified, lengths)
    return state, result_fields(context, plan, program, trees, verified, saved)


def draft(
    context: StepContext, state: DeviceState, plan: Plan, program: Program
) -> tuple[DeviceState, Fields]:
    """Drafts only; writes nothing but draft KV past the lengths."""
    trees, state = build_trees(context, state, plan, program, state.lengths[plan.slots])
    return state, trees.fields()


def build_trees(
    context: StepContext,
    state: DeviceState,
    plan: Plan,
    program: Program,
    lengths: Int[jax.Array, " B"],
) -> tuple[Trees, DeviceState]:
    """Builds the draft trees of a step: from the plan, from the drafter, or the root alone."""
    newest, shape = state.newest[plan.slots], program.shape
    if plan.drafts is not None:
        tokens = plan.drafts.tokens.at[:, 0].set(newest)
        # The node count of a padded row is 0, but every row verifies its root.
        num_nodes = jnp.maximum(plan.drafts.num_nodes, 1)
        return Trees(tokens, plan.drafts.parents, num_nodes, plan.drafts.forced, None), state
    if shape.is_plain:
        nothing = jnp.zeros_like(newest)
        return Trees(newest[:, None], nothing[:, None], nothing + 1, None, None), state
    if plan.copies is not None and shape.drafter.is_plain:
        return _joined(_no_drafts(newest), plan, program, plan.copies, lengths), state
    if program.has(ProgramFeature.DEVICE_NGRAM):
        return _of_texts(context, state, plan, program), state
    assert context.drafter is not None  # required by a program that drafts
    assert state.draft is not None
    rank = ranking(context, state, plan, lengths, shape.width, context.samples(program))
    deltas = None if state.images is None else state.images.deltas[plan.slots]
    given = (state.draft, plan, newest, lengths, deltas)
    drafted, memory = context.drafter.draft(*given, shape.drafter, rank)
    state = state._replace(draft=memory)
    if plan.copies is not None:
        return _joined(drafted, plan, program, plan.copies, lengths), state
    if program.shares_rows:
        return Trees(*_share(drafted, plan, shape.rows), None, None), state
    trees = (drafted.tokens, drafted.parents, drafted.num_nodes)
    return Trees(*trees, None, drafted.processed), state


def _of_texts(context: StepContext, state: DeviceState, plan: Plan, program: Program) -> Trees:
    """Drafts the tokens that followed earlier occurrences of each row's last n-gram."""
    shape, memory = program.shape, state.texts
    assert memory is not None  # required by the program
    assert plan.texts is not None
    width = width_of(shape.nodes, context.capacity.accept_rule)
    given = (memory.tails[plan.slots], plan.texts.scopes, plan.sampling.max_drafts)
    grown = ngram.draft(memory.table, *given, shape.nodes, shape.depth, width)
    if program.shares_rows:
        return Trees(*_share(DraftTrees(*grown, None), plan, shape.rows), None, None)
    return Trees(grown.tokens, grown.parents, grown.num_nodes, None, None)


def _share(
    drafted: DraftTrees, plan: Plan, rows: int
) -> tuple[Int[jax.Array, "B N"], Int[jax.Array, "B N"], Int[jax.Array, " B"]]:
    """Prunes the trees to the verify budget; returns tokens, parents and node counts."""
    assert drafted.weights is not None  # set by a program with a verify budget
    ranked = verify_budget.log_acceptance(
        drafted.parents, drafted.weights, plan.sampling.calibration
    )
    return verify_budget.prune_to_budget(
        drafted.tokens, drafted.parents, drafted.num_nodes, ranked, rows
    )


def _no_drafts(newest: Int[jax.Array, " B"]) -> DraftTrees:
    """Returns trees without drafts: each root and one padding node.

    Kernels require trees of more than one node.
    """
    tokens = jnp.pad(newest[:, None], ((0, 0), (0, 1)))
    weights = jnp.zeros(tokens.shape, jnp.float32)
    return DraftTrees(tokens, jnp.zeros_like(tokens), jnp.ones_like(newest), weights, None)


def _joined(
    drafted: DraftTrees,
    plan: Plan,
    program: Program,
    given: NgramTrees,
    lengths: Int[jax.Array, " B"],
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


def verify(
    context: StepContext,
    state: DeviceState,
    plan: Plan,
    program: Program,
    trees: Trees,
    lengths: Int[jax.Array, " B"],
) -> VerifyOutput:
    """Runs the target over all trees and finds the accepted paths; GDN states are not changed."""
    shape = program.shape
    rows, node = attention.tree_rows(
        trees.parents, trees.num_nodes, lengths, plan.page_table, shape.rows, program.is_chain
    )
    rows = with_image_mrope(context, state, plan, rows)
    row_of = draft_tree.flat_rows(rows.row_starts, trees.num_nodes, shape.nodes)
    mixer = _mixer(context, state, plan, program, trees, rows, node, row_of)
    tokens, streams = trees.tokens[rows.request, node], context.streams(program)
    passed = model.forward(context.model, tokens, None, rows, state.kv, mixer, streams)
    # An argmax alone is fused into the LM-head GEMM and needs no stored logits.
    reads = program.has(ProgramFeature.LOGPROBS) or trees.drafted is not None
    projected = model.lm_head_input(context.model, passed.hidden)
    logits = lm_head.scores(projected) if reads else None
    choices, is_finite = _choose(
        context, state, plan, program, trees, projected, logits, rows, node, row_of, lengths
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
    state: DeviceState,
    plan: Plan,
    program: Program,
    trees: Trees,
    rows: AttentionRows,
    node: Int[jax.Array, " R"],
    row_of: Int[jax.Array, "B N"],
) -> VerifyMixer | None:
    """Returns the mixer of the step's GDN layers, or None for a model without them."""
    if state.delta is None:
        return None
    parents = None if program.is_chain else trees.parents
    nodes = TreeNodes(parents, rows.row_starts, row_of, rows.request, node)
    pools = (state.delta, plan.slots)
    return VerifyMixer(context.model.config, *pools, nodes, program.shape.is_plain)


def _choose(
    context: StepContext,
    state: DeviceState,
    plan: Plan,
    program: Program,
    trees: Trees,
    projected: Projection,
    logits: Float[jax.Array, "R share"] | None,
    rows: AttentionRows,
    node: Int[jax.Array, " R"],
    row_of: Int[jax.Array, "B N"],
    lengths: Int[jax.Array, " B"],
) -> tuple[Int[jax.Array, "B N"], Bool[jax.Array, " R"]]:
    """Chooses the token after each node; also returns the mask of rows with finite logits."""
    of_trees = (trees.tokens, trees.parents, rows.request, node, program.is_chain)
    seen = sampling.counts_in_trees(state.seen, plan.slots, *of_trees)
    positions, params = rows.positions + 1, plan.sampling
    if trees.drafted is None:
        allowed = _allowed(plan.mask, rows.request, node, context.capacity.vocab)
        given = (seen, positions, params, rows.request, allowed, context.model.vocabulary)
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
        request=rows.request,
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
    mask: TokenMask | None,
    request: Int[jax.Array, " R"],
    node: Int[jax.Array, " R"],
    vocab: int,
) -> Bool[jax.Array, "R vocab"] | None:
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
    choices: Int[jax.Array, "B N"],
    lengths: Int[jax.Array, " B"],
) -> tuple[Int[jax.Array, "B N"], Int[jax.Array, " B"]]:
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
        walked = jnp.where(trees.forced, forced, walked)
    return choices, walked


def commit(
    context: StepContext,
    state: DeviceState,
    plan: Plan,
    program: Program,
    verified: VerifyOutput,
    lengths: Int[jax.Array, " B"],
) -> tuple[DeviceState, Bool[jax.Array, " B"]]:
    """Commits the accepted paths to the slots; returns which snapshots were saved."""
    kv, counts = verified.passed.kv, verified.accepted.counts
    if not program.is_chain:
        kv = attention.compact_accepted_kv(
            kv, plan.page_table, lengths, verified.accepted.path, counts
        )
    state, saved = _commit_state(state, plan, verified, plan.save_at - lengths)
    draft = None if context.extends_drafter(program) else state.draft  # leaves a gap in its KV
    new_lengths, newest, seen, draft_from = slot_state.commit(
        lengths=state.lengths,
        newest=state.newest,
        seen=state.seen,
        draft_from=None if draft is None else draft.draft_from,
        slots=plan.slots,
        before=lengths,
        tokens=verified.accepted.tokens,
        counts=counts,
        prompt_length=plan.sampling.prompt_length,
    )
    state = state._replace(lengths=new_lengths, newest=newest, seen=seen, kv=kv)
    if draft is not None:
        state = state._replace(draft=draft._replace(draft_from=draft_from))
    if state.texts is not None:
        assert plan.texts is not None  # n-gram scopes of the rows
        rows = (plan.slots, verified.accepted.tokens, counts, plan.texts.scopes)
        state = state._replace(texts=ngram.learn_outputs(state.texts, *rows))
    return state, saved


def _commit_state(
    state: DeviceState,
    plan: Plan,
    verified: VerifyOutput,
    save_after: Int[jax.Array, " B"],
) -> tuple[DeviceState, Bool[jax.Array, " B"]]:
    """Advances the GDN states along the accepted paths; returns which snapshots were saved."""
    accepted = verified.accepted
    passed = (plan.save != 0) & (save_after >= 1) & (save_after <= accepted.counts)
    if verified.mixer is None or state.snapshots is None:
        return state, passed
    where = (accepted.path, accepted.counts, save_after, plan.save)
    delta, snapshots = verified.mixer.commit(state.snapshots, *where)
    return state._replace(delta=delta, snapshots=snapshots), passed


def draft_extend(
    context: StepContext,
    state: DeviceState,
    plan: Plan,
    program: Program,
    trees: Trees,
    verified: VerifyOutput,
    lengths: Int[jax.Array, " B"],
) -> DeviceState:
    """Extends the drafter over the accepted paths with the target's hidden states.

    A step of plain decoding leaves a gap in the draft KV instead.
    """
    if not context.extends_drafter(program):
        return state
    assert context.drafter is not None  # required by draft extend
    assert state.draft is not None
    (B, W), counts = verified.accepted.path.shape, verified.accepted.counts
    draft_from = state.draft.draft_from[plan.slots]
    rows = extend_rows(lengths, counts, draft_from, plan.page_table, W - 1)
    last = W * jnp.arange(B, dtype=jnp.int32) + jnp.maximum(counts - 1, 0)
    rank = ranking(context, state, plan, lengths + counts, context.capacity.max_width, False)
    tokens = jnp.take_along_axis(trees.tokens, verified.accepted.path, axis=1).reshape(-1)
    passed = verified.passed.at(verified.accepted.rows.reshape(-1))
    rows = with_image_mrope(context, state, plan, rows)
    fed = ExtendRows(rows, tokens, verified.accepted.tokens.reshape(-1), None, passed, last)
    memory = context.drafter.extend(state.draft, plan, lengths, counts, fed, rank)
    return state._replace(draft=memory)


def result_fields(
    context: StepContext,
    plan: Plan,
    program: Program,
    trees: Trees,
    verified: VerifyOutput,
    saved: Bool[jax.Array, " B"],
) -> Fields:
    """Returns the fields of a decode step's result."""
    accepted = verified.accepted
    values = {"tokens": accepted.tokens, "counts": accepted.counts, "failed": accepted.failed}
    values |= {"snapshot_saved": saved} | trees.fields()
    chosen_from = (verified.logits, accepted.rows, accepted.tokens, accepted.counts)
    return values | logprobs_of(context, plan, program, *chosen_from)
