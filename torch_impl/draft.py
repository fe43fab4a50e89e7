"""Draft phase of a step: draft trees from the host, the n-gram table or the drafter."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.boundary.program import ProgramFeature
from shared.spec.ngram import width_of
from torch_impl.device_state import Fields, HostDraft
from torch_impl.drafters import DraftRequests, DraftTrees
from torch_impl.ops.trees import merge_drafts, ngram, verify_budget
from torch_impl.ops.trees.merge_drafts import DraftedTrees, MergedTrees, NgramTrees
from torch_impl.step_context import Step, mrope_deltas, ranking


@dataclass(frozen=True)
class VerifyTrees:
    """Draft tree of each row, to be verified.

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
        """Returns the trees' fields of a result."""
        trees = {"drafts": self.tokens, "parents": self.parents, "num_nodes": self.num_nodes}
        if self.origins is None:
            return trees
        return trees | {"drafted": self.origins.drafted, "copied": self.origins.copied}


def draft(step: Step) -> Fields:
    """Runs a step that only drafts; writes nothing but draft KV past the lengths."""
    return build_trees(step).fields()


def build_trees(step: Step) -> VerifyTrees:
    """Builds the draft trees of a step: from the plan, on the device, or the roots alone."""
    plan, newest = step.plan, step.context.state.newest[step.plan.slots]
    if plan.drafts is not None:
        return _host_trees(plan.drafts, newest)
    if step.program.shape.is_plain:
        return _roots(newest)
    drafted = _grow(step, newest)
    if plan.copies is not None:
        return _merge(step, drafted, plan.copies)
    if step.program.shares_rows:
        return _prune(step, drafted)
    return VerifyTrees(
        tokens=drafted.tokens,
        parents=drafted.parents,
        num_nodes=drafted.num_nodes,
        forced=None,
        drafted=drafted.processed,
    )


def _host_trees(drafts: HostDraft, newest: Int[Tensor, " B"]) -> VerifyTrees:
    return VerifyTrees(
        tokens=torch.cat([newest[:, None], drafts.tokens[:, 1:]], dim=1),
        parents=drafts.parents,
        # The node count of a padded row is 0, but every row verifies its root.
        num_nodes=drafts.num_nodes.clamp(min=1),
        forced=drafts.forced,
        drafted=None,
    )


def _roots(newest: Int[Tensor, " B"]) -> VerifyTrees:
    return VerifyTrees(
        tokens=newest[:, None],
        parents=torch.zeros_like(newest)[:, None],
        num_nodes=torch.ones_like(newest),
        forced=None,
        drafted=None,
    )


def _grow(step: Step, newest: Int[Tensor, " B"]) -> DraftTrees:
    """Drafts on the device: with the n-gram table or the drafter, or nothing."""
    shape, drafter, memory = step.program.shape, step.context.drafter, step.context.state.draft
    if step.program.has(ProgramFeature.DEVICE_NGRAM):
        return _ngram_trees(step)
    if shape.drafter.is_plain:
        return _no_drafts(newest)
    assert drafter is not None  # required by a program that drafts
    assert memory is not None
    deltas = mrope_deltas(step)
    requests = DraftRequests.of(memory, step.plan, newest, step.lengths, deltas)
    rank = ranking(step, step.lengths, shape.width, step.samples_drafts)
    return drafter.draft(memory, requests, shape.drafter, rank)


def _ngram_trees(step: Step) -> DraftTrees:
    """Drafts the tokens that followed earlier occurrences of each row's last n-gram."""
    plan, shape, memory = step.plan, step.program.shape, step.context.state.texts
    assert memory is not None  # required by the program
    assert plan.texts is not None
    width = width_of(shape.nodes, step.context.capacity.accept_rule)
    given = (memory.tails[plan.slots], plan.texts.scopes, plan.sampling.max_drafts)
    grown = ngram.draft(memory.table, *given, shape.nodes, shape.depth, width)
    return DraftTrees(grown.tokens, grown.parents, grown.num_nodes, grown.weights, None)


def _no_drafts(newest: Int[Tensor, " B"]) -> DraftTrees:
    """Returns trees without drafts: each root and one padding node.

    Kernels require trees of more than one node.
    """
    tokens = torch.stack([newest, torch.zeros_like(newest)], dim=1)
    weights = torch.zeros_like(tokens, dtype=torch.float32)
    return DraftTrees(tokens, torch.zeros_like(tokens), torch.ones_like(newest), weights, None)


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


def _log_acceptance(step: Step, drafted: DraftTrees) -> Float[Tensor, "B N"]:
    """Returns the calibrated log acceptance probability of each node."""
    assert drafted.weights is not None  # set by a program that merges or prunes trees
    calibration = step.plan.sampling.calibration
    return verify_budget.log_acceptance(drafted.parents, drafted.weights, calibration)
