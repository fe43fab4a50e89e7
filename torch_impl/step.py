"""One step on the device: draft, verify, accept, commit and draft-extend, or a prefill.

Everything is written in place into the slots' memory, and nothing is read back: which work runs
follows from the program alone, so a whole decode step can be captured as one CUDA graph.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.backend import Limits, Program, Work
from torch_impl import model
from torch_impl.device_state import (
    DeviceState,
    Plan,
    Prompts,
    count,
    pack,
    put,
    read_plan,
    save,
    start,
    take,
)
from torch_impl.drafters import Noise, Ranking, noise_of
from torch_impl.drafters.eagle import EagleDrafter, Relay, extend_rows
from torch_impl.layers import Chunks, OneToken, Tree
from torch_impl.model import Forward, Model
from torch_impl.ops import (
    acceptance,
    any_row,
    attention,
    draft_tree,
    mamba_state,
    sampling,
)

Fields = dict[str, Tensor]


@dataclass(frozen=True)
class Machine:
    """All that a step works with.

    Attributes:
      model: The target.
      drafter: None without one.
      limits: What exists.
      state: The memory of all slots and pages.
    """

    model: Model
    drafter: EagleDrafter | None
    limits: Limits
    state: DeviceState

    def feeds(self, program: Program) -> bool:
        """Whether the drafter follows a step; plain decoding leaves a hole in its KV instead."""
        is_prefill = program.work is Work.PREFILL
        return self.drafter is not None and (is_prefill or not program.shape.is_plain)

    def streams(self, program: Program) -> tuple[int, ...]:
        """The residual streams that a step keeps for the drafter."""
        return self.drafter.head.streams if self.feeds(program) else ()


def step(machine: Machine, words: Int[Tensor, " words"], program: Program) -> Int[Tensor, " out"]:
    """Runs one plan, given as its words; returns the words of its result."""
    plan = read_plan(words, program, machine.limits)
    work = {
        Work.PREFILL: _prefill,
        Work.DECODE: _decode,
        Work.DRAFT: _draft_only,
        Work.COUNT: _count_only,
    }[program.work]
    fields = work(machine, plan, program)
    machine.state.length[:1].zero_()  # the sink would grow by every padded row
    return pack(fields, program, machine.limits, words)


# Counting what a cache hit spares


def _count_only(machine: Machine, plan: Plan, program: Program) -> Fields:
    start(machine.state, plan)
    row_starts, tokens = plan.work["row_starts"], plan.work["tokens"]
    request, is_real = draft_tree.request_of(row_starts, program.tokens)
    place = torch.arange(program.tokens, dtype=torch.int32, device=tokens.device)
    place = place - row_starts[request]
    is_output = place >= plan.sampling.prompt_length[request]
    count(machine.state, plan.slots[request], tokens, is_output, is_real)
    return {}


# Prefill


def _prefill(machine: Machine, plan: Plan, program: Program) -> Fields:
    state, is_row = machine.state, plan.slots != 0
    start(state, plan)
    prompts = Prompts.of(plan, program)
    lengths = prompts.lengths
    passed, saved = _prefill_forward(machine, plan, prompts, machine.streams(program))
    _count_prompts(machine, plan, prompts)
    logits = model.logits(machine.model, passed.hidden[prompts.last])
    # The choice's noise, then the relay's.
    noise = noise_of(plan.sampling, lengths - 1, 2, machine.limits.vocab)
    chosen = _choose_next(machine, plan, logits, lengths, noise)
    ends = plan.work["ends_prompt"] != 0
    newest = torch.where(ends, chosen, plan.work["next_tokens"])
    state.length[plan.slots], state.newest[plan.slots] = lengths, newest
    count(state, plan.slots, newest, lengths >= plan.sampling.prompt_length, is_row)
    if machine.feeds(program):
        _feed_prompts(machine, plan, prompts, passed, newest, noise)
    failed = ~logits.isfinite().all(dim=1) & is_row
    counts = (ends & ~failed & is_row).int()
    emitted = torch.where(counts > 0, newest, 0)[:, None]
    found = {"tokens": emitted, "counts": counts, "failed": failed, "saved": saved}
    found |= {"drafts": newest[:, None], "num_nodes": torch.ones_like(newest)}
    return found | _logprobs(machine, program, logits[:, None], emitted, counts)


def _count_prompts(machine: Machine, plan: Plan, prompts: Prompts) -> None:
    """Counts the chunks' tokens, but for those that were their slot's newest token already."""
    rows, starts = prompts.rows, plan.starts
    was_newest = (rows.positions == prompts.first[rows.request]) & ~starts[rows.request]
    is_output = rows.positions >= plan.sampling.prompt_length[rows.request]
    slots = plan.slots[rows.request]
    count(machine.state, slots, prompts.tokens, is_output, rows.is_real & ~was_newest)


def _feed_prompts(
    machine: Machine,
    plan: Plan,
    prompts: Prompts,
    passed: Forward,
    newest: Int[Tensor, " B"],
    noise: Noise | None,
) -> None:
    """Extends the drafter over the chunks, each row with the token after it."""
    rows = prompts.rows
    bound = machine.state.draft_from[plan.slots]
    is_last = draft_tree.is_last(prompts.row_starts, rows.request)
    following = torch.where(is_last, newest[rows.request], prompts.tokens.roll(-1))
    rows = replace(rows, first=bound[rows.request])
    noise = None if noise is None else noise[:, 1:]
    _extend(machine, plan, rows, following, passed, prompts.last, prompts.lengths, noise)


def _prefill_forward(
    machine: Machine, plan: Plan, prompts: Prompts, streams: tuple[int, ...]
) -> tuple[Forward, Bool[Tensor, " B"]]:
    """Runs the target over prompt chunks and carries its states on; says what was saved."""
    state, config, rows = machine.state, machine.model.config, prompts.rows
    if not config.num_gated_delta_layers:
        passed = model.forward(machine.model, prompts.tokens, rows, state.kv, None, streams)
        return passed, torch.zeros_like(plan.starts)
    save_after = plan.save_at - prompts.first
    mixer = Chunks(config, take(state, plan.slots), prompts.row_starts, rows, save_after)
    passed = model.forward(machine.model, prompts.tokens, rows, state.kv, mixer, streams)
    is_saved = mamba_state.ends_chunk(save_after, prompts.lengths - prompts.first)
    is_saved &= plan.save != 0
    put(state, plan.slots, mamba_state.stacked(mixer.new))
    save(state, torch.where(is_saved, plan.save, 0), mamba_state.stacked(mixer.saved))
    return passed, is_saved


# Decode


@dataclass(frozen=True)
class Trees:
    """The draft tree of each row, and which rows force theirs (None: no row can)."""

    tokens: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    num_nodes: Int[Tensor, " B"]
    forced: Bool[Tensor, " B"] | None

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


def _decode(machine: Machine, plan: Plan, program: Program) -> Fields:
    state, shape = machine.state, program.shape
    start(state, plan)
    lengths = state.length[plan.slots]
    # One place more than the tree is deep: the relay's, after a path of any length.
    places = shape.max_tokens + int(machine.feeds(program))
    noise = noise_of(plan.sampling, lengths, places, machine.limits.vocab)
    trees = _trees(machine, plan, program, lengths, noise)
    verified = _verify(machine, plan, program, trees, lengths, noise)
    saved = _commit(machine, plan, program, verified, lengths)
    if machine.feeds(program):
        _feed_path(machine, plan, verified, lengths, noise)
    elif shape.is_plain:
        state.draft_from[plan.slots] = lengths + verified.counts
    found = {"tokens": verified.tokens, "counts": verified.counts, "failed": verified.failed}
    found |= {"saved": saved} | trees.fields()
    return found | _logprobs(machine, program, verified.logits, verified.tokens, verified.counts)


def _draft_only(machine: Machine, plan: Plan, program: Program) -> Fields:
    lengths = machine.state.length[plan.slots]
    noise = noise_of(plan.sampling, lengths, program.shape.depth, machine.limits.vocab)
    return _trees(machine, plan, program, lengths, noise).fields()


def _trees(
    machine: Machine, plan: Plan, program: Program, lengths: Int[Tensor, " B"], noise: Noise | None
) -> Trees:
    """The trees of a step: the plan's, the drafter's, or the root alone."""
    state, slots, shape = machine.state, plan.slots, program.shape
    newest = state.newest[slots]
    if program.host_draft:
        tokens = torch.cat([newest[:, None], plan.work["draft_tree_tokens"][:, 1:]], dim=1)
        # A padded row's own node count is 0, but every row verifies its root.
        num_nodes = plan.work["draft_tree_num_nodes"].clamp(min=1)
        forced = plan.work["draft_tree_forced"] != 0
        return Trees(tokens, plan.work["draft_tree_parents"], num_nodes, forced)
    if shape.is_plain:
        nothing = torch.zeros_like(newest)
        return Trees(newest[:, None], nothing[:, None], nothing + 1, None)
    relay = Relay(state.relay_ids[slots], state.relay_weights[slots], state.relay_hidden[slots])
    rank = Ranking(plan.sampling, lengths, _seen(machine, plan), noise, shape.width)
    where = (lengths, state.draft_from[slots], plan.sampling.max_drafts, plan.page_table)
    return Trees(*machine.drafter.draft(state.draft_kv, relay, newest, *where, shape, rank), None)


def _verify(
    machine: Machine,
    plan: Plan,
    program: Program,
    trees: Trees,
    lengths: Int[Tensor, " B"],
    noise: Noise | None,
) -> Verified:
    """Runs the target over all trees and follows its choices; the states stay as they are."""
    shape, parents = program.shape, trees.parents
    rows, node = attention.tree_rows(parents, trees.num_nodes, lengths, plan.page_table, shape.rows)
    row_of = draft_tree.rows_of(trees.num_nodes, shape.nodes, shape.rows)
    mixer = _mixer(machine, plan, program, parents, row_of, rows.request, node)
    tokens = trees.tokens[rows.request, node]
    streams = machine.streams(program)
    passed = model.forward(machine.model, tokens, rows, machine.state.kv, mixer, streams)
    logits = model.logits(machine.model, passed.hidden)
    chosen = _choose_rows(machine, plan, trees, logits, rows.request, node, lengths, noise)
    choices, walked = chosen[row_of], trees.num_nodes
    if trees.forced is not None:
        choices, walked = acceptance.force(trees.tokens, walked, choices, trees.forced)
    path, counts = acceptance.walk(trees.tokens, parents, walked, choices, shape.depth)
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
    parents: Int[Tensor, "B N"],
    row_of: Int[Tensor, "B N"],
    request: Int[Tensor, " R"],
    node: Int[Tensor, " R"],
) -> Tree | OneToken | None:
    config = machine.model.config
    if not config.num_gated_delta_layers:
        return None
    state = take(machine.state, plan.slots)
    if program.shape.is_plain:
        return OneToken(config, state)
    return Tree(config, state, None if _is_chain(program) else parents, row_of, request, node)


def _is_chain(program: Program) -> bool:
    """Whether every tree is a chain; a plan's own trees may be anything."""
    return program.shape.width <= 1 and not program.host_draft


def _commit(
    machine: Machine, plan: Plan, program: Program, verified: Verified, lengths: Int[Tensor, " B"]
) -> Bool[Tensor, " B"]:
    """Makes the accepted path the slots' past; returns which snapshots were taken."""
    state, slots, counts = machine.state, plan.slots, verified.counts
    if not _is_chain(program):
        attention.commit_window(state.kv, plan.page_table, lengths, verified.path, counts)
    saved = _commit_state(machine, plan, verified, plan.save_at - lengths)
    place = torch.arange(program.shape.max_tokens, dtype=torch.int32, device=slots.device)
    is_output = lengths[:, None] + 1 + place >= plan.sampling.prompt_length[:, None]
    owners = slots[:, None].expand_as(verified.tokens)
    count(state, owners, verified.tokens, is_output, place < counts[:, None])
    last = verified.tokens.gather(1, (counts - 1).clamp(min=0).long()[:, None])[:, 0]
    state.newest[slots] = torch.where(counts > 0, last, state.newest[slots])
    state.length[slots] = lengths + counts
    return saved


def _commit_state(
    machine: Machine, plan: Plan, verified: Verified, save_after: Int[Tensor, " B"]
) -> Bool[Tensor, " B"]:
    """Advances the gated-delta states along the path, or takes over what plain decoding made."""
    mixer, counts = verified.mixer, verified.counts
    if mixer is None:
        return torch.zeros_like(plan.starts)
    if isinstance(mixer, OneToken):
        new = saved = mamba_state.stacked(mixer.new)
        passed = (save_after == 1) & (counts == 1)
    else:
        moves = (take(machine.state, plan.slots), mixer.kept(), verified.path, counts, save_after)
        new, saved, passed = mamba_state.replay(*moves)
    passed = passed & (plan.save != 0)
    put(machine.state, plan.slots, new)
    save(machine.state, torch.where(passed, plan.save, 0), saved)
    return passed


def _feed_path(
    machine: Machine,
    plan: Plan,
    verified: Verified,
    lengths: Int[Tensor, " B"],
    noise: Noise | None,
) -> None:
    """Extends the drafter over the accepted path, with the target's hidden states."""
    (B, W), counts = verified.path.shape, verified.counts
    bound = machine.state.draft_from[plan.slots]
    rows = extend_rows(lengths, counts, bound, plan.page_table, W - 1)
    request = torch.arange(B, device=counts.device)
    last = request * W + (counts - 1).clamp(min=0)
    noise = None if noise is None else noise[request, counts][:, None]
    following, lengths = verified.tokens.flatten(), lengths + counts
    _extend(machine, plan, rows, following, verified.passed, last, lengths, noise)


def _extend(
    machine: Machine,
    plan: Plan,
    rows: attention.Rows,
    following: Int[Tensor, " R"],
    passed: Forward,
    last: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    noise: Noise | None,
) -> None:
    """Feeds committed rows to the drafter and stores the relay for the next step."""
    state, slots = machine.state, plan.slots
    width = machine.limits.max_width
    rank = Ranking(plan.sampling, lengths, _seen(machine, plan), noise, width)
    relay = machine.drafter.extend(state.draft_kv, rows, following, passed, last, rank)
    state.relay_ids[slots] = relay.tokens
    state.relay_weights[slots] = relay.weights
    state.relay_hidden[slots] = relay.hidden


# Choosing


def _seen(machine: Machine, plan: Plan) -> Int[Tensor, "B vocab"] | None:
    """What the rows have seen, or None where no row has a penalty."""
    if not any_row(plan.sampling.has_penalty):
        return None
    return machine.state.seen[plan.slots]


def _choose_next(
    machine: Machine,
    plan: Plan,
    logits: Float[Tensor, "B vocab"],
    positions: Int[Tensor, " B"],
    noise: Noise | None,
) -> Int[Tensor, " B"]:
    """The target's token at `positions`, where the noise begins."""
    how = plan.sampling
    processed = sampling.processed(logits, _seen(machine, plan), positions, how, None)
    first = None if noise is None else noise[:, 0]
    return sampling.choose(processed, first, how.temperature)


def _choose_rows(
    machine: Machine,
    plan: Plan,
    trees: Trees,
    logits: Float[Tensor, "R vocab"],
    request: Int[Tensor, " R"],
    node: Int[Tensor, " R"],
    lengths: Int[Tensor, " B"],
    noise: Noise | None,
) -> Int[Tensor, " R"]:
    """The target's token after each verified node."""
    depth = draft_tree.depths(trees.parents)[request, node]
    seen = _seen(machine, plan)
    if seen is not None:
        seen = sampling.path_seen(seen, trees.tokens, trees.parents)[request, node]
    is_plain = trees.tokens.shape[1] == 1
    rows = plan.sampling if is_plain else plan.sampling.rows(request)
    positions = lengths[request] + depth + 1
    processed = sampling.processed(logits, seen, positions, rows, None)
    shared = None if noise is None else noise[request, depth]
    return sampling.choose(processed, shared, rows.temperature)


def _logprobs(
    machine: Machine,
    program: Program,
    logits: Float[Tensor, "B W vocab"],
    tokens: Int[Tensor, "B W"],
    counts: Int[Tensor, " B"],
) -> Fields:
    if not program.logprobs:
        return {}
    found = sampling.reported(logits, tokens, counts, machine.limits.max_logprobs)
    return dict(zip(("chosen", "top_ids", "top_values"), found, strict=True))
