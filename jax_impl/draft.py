"""Draft phase of a step: draft trees from the host, the n-gram table or the drafter."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jax_impl.device_state import DeviceState, Fields, HostDraft
from jax_impl.drafters import DraftRequests, DraftTrees
from jax_impl.ops.trees import merge_drafts, ngram, verify_budget
from jax_impl.ops.trees.merge_drafts import DraftedTrees, MergedTrees, NgramTrees
from jax_impl.step_context import Step, drafter_state, mrope_deltas, ranking, with_drafter_state
from shared.boundary.program import ProgramFeature
from shared.spec.ngram import width_of


class VerifyTrees(NamedTuple):
    """Draft tree of each row, to be verified.

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
        """Returns the trees' fields of a result."""
        trees = {"drafts": self.tokens, "parents": self.parents, "num_nodes": self.num_nodes}
        if self.origins is None:
            return trees
        return trees | {"drafted": self.origins.drafted, "copied": self.origins.copied}


def draft(step: Step, state: DeviceState) -> tuple[DeviceState, Fields]:
    """Runs a step that only drafts; writes nothing but draft KV past the lengths."""
    state, trees = build_trees(step, state)
    return state, trees.fields()


def build_trees(step: Step, state: DeviceState) -> tuple[DeviceState, VerifyTrees]:
    """Builds the draft trees of a step: from the plan, on the device, or the roots alone."""
    plan, newest = step.plan, state.newest[step.plan.slots]
    if plan.drafts is not None:
        return state, _host_trees(plan.drafts, newest)
    if step.program.shape.is_plain:
        return state, _roots(newest)
    state, drafted = _grow(step, state, newest)
    if plan.copies is not None:
        return state, _merge(step, drafted, plan.copies)
    if step.program.shares_rows:
        return state, _prune(step, drafted)
    trees = VerifyTrees(
        tokens=drafted.tokens,
        parents=drafted.parents,
        num_nodes=drafted.num_nodes,
        forced=None,
        drafted=drafted.processed,
    )
    return state, trees


def _host_trees(drafts: HostDraft, newest: Int[jax.Array, " B"]) -> VerifyTrees:
    return VerifyTrees(
        tokens=drafts.tokens.at[:, 0].set(newest),
        parents=drafts.parents,
        # The node count of a padded row is 0, but every row verifies its root.
        num_nodes=jnp.maximum(drafts.num_nodes, 1),
        forced=drafts.forced,
        drafted=None,
    )


def _roots(newest: Int[jax.Array, " B"]) -> VerifyTrees:
    nothing = jnp.zeros_like(newest)
    return VerifyTrees(
        tokens=newest[:, None],
        parents=nothing[:, None],
        num_nodes=nothing + 1,
        forced=None,
        drafted=None,
    )


def _grow(
    step: Step, state: DeviceState, newest: Int[jax.Array, " B"]
) -> tuple[DeviceState, DraftTrees]:
    """Drafts on the device: with the n-gram table or the drafter, or nothing."""
    shape, drafter = step.program.shape, step.context.drafter
    if step.program.has(ProgramFeature.DEVICE_NGRAM):
        return state, _ngram_trees(step, state)
    if shape.drafter.is_plain:
        return state, _no_drafts(newest)
    assert drafter is not None  # required by a program that drafts
    assert state.draft is not None
    deltas = mrope_deltas(step, state)
    requests = DraftRequests.of(state.draft, step.plan, newest, step.lengths, deltas)
    rank = ranking(step, state, step.lengths, shape.width, step.samples_drafts)
    memory = drafter_state(step, state)
    drafted, memory = drafter.draft(memory, requests, shape.drafter, rank)
    return with_drafter_state(step, state, memory), drafted


def _ngram_trees(step: Step, state: DeviceState) -> DraftTrees:
    """Drafts the tokens that followed earlier occurrences of each row's last n-gram."""
    plan, shape, memory = step.plan, step.program.shape, state.texts
    assert memory is not None  # required by the program
    assert plan.texts is not None
    width = width_of(shape.nodes, step.context.capacity.accept_rule)
    given = (memory.tails[plan.slots], plan.texts.scopes, plan.sampling.max_drafts)
    grown = ngram.draft(memory.table, *given, shape.nodes, shape.depth, width)
    return DraftTrees(grown.tokens, grown.parents, grown.num_nodes, grown.weights, None)


def _no_drafts(newest: Int[jax.Array, " B"]) -> DraftTrees:
    """Returns trees without drafts: each root and one padding node.

    Kernels require trees of more than one node.
    """
    tokens = jnp.pad(newest[:, None], ((0, 0), (0, 1)))
    weights = jnp.zeros(tokens.shape, jnp.float32)
    return DraftTrees(tokens, jnp.zeros_like(tokens), jnp.ones_like(newest), weights, None)


def _merge(step: Step, drafted: DraftTrees, copies: NgramTrees) -> VerifyTrees:
    """Merges the plan's n-gram drafts into the drafter's trees and keeps the best nodes."""
    ranked, shape = _log_acceptance(step, drafted), step.program.shape
    grown = DraftedTrees(drafted.tokens, drafted.parents, drafted.num_nodes, ranked)
    max_drafts = step.plan.sampling.max_drafts
    merged = merge_drafts.merge(
        grown, copies, step.lengths, max_drafts, shape.nodes, shape.depth, shape.rows
    )
    return VerifyTrees(merged.tokens, merged.parents, merged.num_nodes, None, None, merged)


def _prune(step: Step, drafted: DraftTrees) -> VerifyTrees:
    """Prunes the trees to the verify budget of the batch."""
    ranked, rows = _log_acceptance(step, drafted), step.program.shape.rows
    tokens, parents, num_nodes = verify_budget.prune_to_budget(
        drafted.tokens, drafted.parents, drafted.num_nodes, ranked, rows
    )
    return VerifyTrees(tokens, parents, num_nodes, forced=None, drafted=None)


def _log_acceptance(step: Step, drafted: DraftTrees) -> Float[jax.Array, "B N"]:
    """Returns the calibrated log acceptance probability of each node."""
    assert drafted.weights is not None  # set by a program that merges or prunes trees
    calibration = step.plan.sampling.calibration
    return verify_budget.log_acceptance(drafted.parents, drafted.weights, calibration)
