"""Steps of decoding: draft, verify, accept, commit and draft-extend."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.boundary.backend import Program
from torch_impl import model
from torch_impl.device_state import Fields, HostDraft, Plan, keep, take
from torch_impl.drafters import Fed, Noise, noise_of
from torch_impl.drafters.eagle import extend_rows
from torch_impl.layers import OneToken, Tree
from torch_impl.machine import Machine, logprobs_of, ranking, seen_of
from torch_impl.model import Forward
from torch_impl.ops import acceptance, attention, draft_tree, mamba_state, sampling, slots
from torch_impl.ops.attention import Rows
from torch_impl.rejection import choose, draft_noise, rejects


@dataclass(frozen=True)
class Trees:
    """The draft tree of each row.

    Attributes:
      forced: Rows that force theirs; None: no row can.
      drafted: Processed logits that a chain's drafts were sampled from; None: they were not.
    """

    tokens: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    num_nodes: Int[Tensor, " B"]
    forced: Bool[Tensor, " B"] | None
    drafted: Float[Tensor, "B S vocab"] | None

    def fields(self) -> Fields:
        """The trees as fields of a result."""
        return {"drafts": self.tokens, "parents": self.parents, "num_nodes": self.num_nodes}


@dataclass(frozen=True)
class Verified:
    """What a verify found: each row's path, the target's pass over its W nodes, what it emits,
    and what a commit needs."""

    passed: Forward
    path: Int[Tensor, "B W"]
    counts: Int[Tensor, " B"]
    tokens: Int[Tensor, "B W"]
    failed: Bool[Tensor, " B"]
    logits: Float[Tensor, "B W vocab"]
    mixer: Tree | OneToken | None


def decode(machine: Machine, plan: Plan, program: Program) -> Fields:
    lengths = machine.state.lengths[plan.slots]
    # One place more than the tree is deep: the relay's, after a path of any length.
    places = program.shape.max_tokens + int(machine.relays(program))
    noise = _noise(machine, plan, program, lengths, places)
    trees = _trees(machine, plan, program, lengths, noise)
    verified = _verify(machine, plan, program, trees, lengths, noise)
    saved = _commit(machine, plan, program, verified, lengths)
    _extend(machine, plan, program, trees, verified, lengths, noise)
    found = {"tokens": verified.tokens, "counts": verified.counts, "failed": verified.failed}
    found |= {"saved": saved} | trees.fields()
    return found | logprobs_of(machine, program, verified.logits, verified.tokens, verified.counts)


def draft(machine: Machine, plan: Plan, program: Program) -> Fields:
    lengths = machine.state.lengths[plan.slots]
    noise = _noise(machine, plan, program, lengths, program.shape.depth)
    return _trees(machine, plan, program, lengths, noise).fields()


def _noise(
    machine: Machine, plan: Plan, program: Program, lengths: Int[Tensor, " B"], places: int
) -> Noise | None:
    """The noise of drafts: the target's own of `places` positions, or one that it never sees."""
    if rejects(machine, program):
        return draft_noise(machine, plan, program, lengths)
    return noise_of(plan.sampling, lengths, places, machine.limits.vocab)


def _trees(
    machine: Machine, plan: Plan, program: Program, lengths: Int[Tensor, " B"], noise: Noise | None
) -> Trees:
    """The trees of a step: the plan's, the drafter's, or the root alone."""
    state, shape = machine.state, program.shape
    newest = state.newest[plan.slots]
    if plan.drafts is not None:
        return _host_trees(plan.drafts, newest)
    if shape.is_plain:
        return _roots(newest)
    kept = [] if rejects(machine, program) else None
    rank = ranking(machine, plan, lengths, noise, shape.width, kept)
    grown = machine.drafter.draft(state.draft, plan, newest, lengths, shape, rank)
    drafted = None if kept is None else torch.stack(kept, dim=1)
    return Trees(grown.tokens, grown.parents, grown.num_nodes, forced=None, drafted=drafted)


def _host_trees(drafts: HostDraft, newest: Int[Tensor, " B"]) -> Trees:
    return Trees(
        tokens=torch.cat([newest[:, None], drafts.tokens[:, 1:]], dim=1),
        parents=drafts.parents,
        # A padded row's own node count is 0, but every row verifies its root.
        num_nodes=drafts.num_nodes.clamp(min=1),
        forced=drafts.forced,
        drafted=None,
    )


def _roots(newest: Int[Tensor, " B"]) -> Trees:
    """Trees of one node."""
    return Trees(
        tokens=newest[:, None],
        parents=torch.zeros_like(newest)[:, None],
        num_nodes=torch.ones_like(newest),
        forced=None,
        drafted=None,
    )


def _verify(
    machine: Machine,
    plan: Plan,
    program: Program,
    trees: Trees,
    lengths: Int[Tensor, " B"],
    noise: Noise | None,
) -> Verified:
    """Runs the target over all trees and follows its choices; the states stay as they are."""
    shape = program.shape
    rows, node = attention.tree_rows(
        trees.parents, trees.num_nodes, lengths, plan.page_table, shape.rows
    )
    row_of = draft_tree.rows_of(trees.num_nodes, shape.nodes, shape.rows)
    mixer = _mixer(machine, plan, program, trees, row_of, rows, node)
    tokens = trees.tokens[rows.request, node]
    streams = machine.streams(program)
    passed = model.forward(machine.model, tokens, rows, machine.state.kv, mixer, streams)
    logits = model.logits(machine.model, passed.hidden)
    choices = _choose(machine, plan, trees, logits, rows, node, row_of, lengths, noise)
    walked = trees.num_nodes
    if trees.forced is not None:
        choices, walked = acceptance.force(trees.tokens, walked, choices, trees.forced)
    path, counts = acceptance.walk(trees.tokens, trees.parents, walked, choices, shape.depth)
    is_bad, is_row = ~logits.isfinite().all(dim=1), plan.slots != 0
    failed = acceptance.failed(is_bad[row_of], path) & is_row
    counts = torch.where(is_row & ~failed, counts, 0)
    on_path = row_of.gather(1, path.long())
    return Verified(
        passed=passed.at(on_path.flatten()),
        path=path,
        counts=counts,
        tokens=acceptance.emitted(choices, path, counts),
        failed=failed,
        logits=logits[on_path] if program.logprobs else logits[:0],
        mixer=mixer,
    )


def _mixer(
    machine: Machine,
    plan: Plan,
    program: Program,
    trees: Trees,
    row_of: Int[Tensor, "B N"],
    rows: Rows,
    node: Int[Tensor, " R"],
) -> Tree | OneToken | None:
    config, delta = machine.model.config, machine.state.delta
    if delta is None:
        return None
    state = take(delta, plan.slots)
    if program.shape.is_plain:
        return OneToken(config, state)
    parents = None if program.is_chain else trees.parents
    return Tree(config, state, parents, row_of, rows.request, node)


def _choose(
    machine: Machine,
    plan: Plan,
    trees: Trees,
    logits: Float[Tensor, "R vocab"],
    rows: Rows,
    node: Int[Tensor, " R"],
    row_of: Int[Tensor, "B N"],
    lengths: Int[Tensor, " B"],
    noise: Noise | None,
) -> Int[Tensor, "B N"]:
    """The token after each node, by the target alone or by the rule that judges drafts."""
    request, level = rows.request, rows.positions - lengths[rows.request]
    seen = seen_of(machine, plan)
    if seen is not None:
        seen = sampling.path_seen(seen, trees.tokens, trees.parents)[request, node]
    how = plan.sampling if trees.tokens.shape[1] == 1 else plan.sampling.rows(request)
    scores = sampling.processed(logits, seen, rows.positions + 1, how, None)
    if trees.drafted is not None:
        chain = (trees.tokens, trees.num_nodes, trees.drafted)
        return choose(machine, plan, *chain, scores[row_of], lengths)
    shared = None if noise is None else noise[request, level]
    return sampling.choose(scores, shared, how.temperature)[row_of]


def _commit(
    machine: Machine, plan: Plan, program: Program, verified: Verified, lengths: Int[Tensor, " B"]
) -> Bool[Tensor, " B"]:
    """Makes the accepted path the slots' past; returns which snapshots were taken."""
    state, draft = machine.state, machine.state.draft
    if not program.is_chain:
        attention.commit_window(state.kv, plan.page_table, lengths, verified.path, verified.counts)
    saved = _commit_state(machine, plan, verified, plan.save_at - lengths)
    slots.commit(
        lengths=state.lengths,
        newest=state.newest,
        seen=state.seen,
        draft_from=None if draft is None or machine.feeds(program) else draft.draft_from,
        slots=plan.slots,
        before=lengths,
        tokens=verified.tokens,
        counts=verified.counts,
        prompt_length=plan.sampling.prompt_length,
    )
    return saved


def _commit_state(
    machine: Machine, plan: Plan, verified: Verified, save_after: Int[Tensor, " B"]
) -> Bool[Tensor, " B"]:
    """Advances the gated-delta states along the path, or takes over what plain decoding made."""
    state, mixer, counts = machine.state, verified.mixer, verified.counts
    if mixer is None:
        return torch.zeros_like(plan.starts)
    if isinstance(mixer, OneToken):
        new = saved = mamba_state.stacked(mixer.new)
        passed = (save_after == 1) & (counts == 1)
    else:
        before = take(state.delta, plan.slots)
        new, saved, passed = mamba_state.replay(
            before, mixer.kept(), verified.path, counts, save_after
        )
    passed = passed & (plan.save != 0)
    keep(state.delta, state.snapshots, plan, new, saved, passed)
    return passed


def _extend(
    machine: Machine,
    plan: Plan,
    program: Program,
    trees: Trees,
    verified: Verified,
    lengths: Int[Tensor, " B"],
    noise: Noise | None,
) -> None:
    """Extends the drafter over the accepted path, with the target's hidden states.

    A plain step leaves a hole in its KV instead.
    """
    if not machine.feeds(program):
        return
    (B, W), counts, draft = verified.path.shape, verified.counts, machine.state.draft
    rows = extend_rows(lengths, counts, draft.draft_from[plan.slots], plan.page_table, W - 1)
    request = torch.arange(B, device=counts.device)
    # The candidates of a relay mean nothing where drafts are sampled.
    has_noise = noise is not None and machine.relays(program) and trees.drafted is None
    after = noise[request, counts][:, None] if has_noise else None
    rank = ranking(machine, plan, lengths + counts, after, machine.limits.max_width, None)
    fed = Fed(
        rows=rows,
        tokens=trees.tokens.gather(1, verified.path.long()).flatten(),
        following=verified.tokens.flatten(),
        passed=verified.passed,
        last=request * W + (counts - 1).clamp(min=0),
    )
    machine.drafter.extend(draft, plan, lengths, counts, fed, rank)
