"""Steps over prompts: chunks of them are fed, or tokens counted that a cache hit spares."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.boundary.backend import Program
from torch_impl import model
from torch_impl.device_state import Plan, Prompts, count, put, save, start, take
from torch_impl.drafters import Fed, Noise, noise_of
from torch_impl.layers import Chunks
from torch_impl.machine import Fields, Machine, logprobs_of, ranking, seen_of
from torch_impl.model import Forward
from torch_impl.ops import draft_tree, mamba_state, sampling


def count_tokens(machine: Machine, plan: Plan, program: Program) -> Fields:
    start(machine.state, plan)
    row_starts, tokens = plan.work["row_starts"], plan.work["tokens"]
    request, is_real = draft_tree.request_of(row_starts, program.tokens)
    place = torch.arange(program.tokens, dtype=torch.int32, device=tokens.device)
    place = place - row_starts[request]
    is_output = place >= plan.sampling.prompt_length[request]
    count(machine.state, plan.slots[request], tokens, is_output, is_real)
    return {}


def prefill(machine: Machine, plan: Plan, program: Program) -> Fields:
    state, is_row = machine.state, plan.slots != 0
    start(state, plan)
    prompts = Prompts.of(plan, program)
    lengths = prompts.lengths
    passed, saved = _prefill_forward(machine, plan, prompts, machine.streams(program))
    _count_prompts(machine, plan, prompts)
    logits = model.logits(machine.model, passed.hidden[prompts.last])
    # The choice's noise, then the relay's.
    places = 1 + int(machine.relays(program))
    noise = noise_of(plan.sampling, lengths - 1, places, machine.limits.vocab)
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
    return found | logprobs_of(machine, program, logits[:, None], emitted, counts)


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
    rank = ranking(machine, plan, prompts.lengths, noise, machine.limits.max_width, None)
    fed = Fed(rows, prompts.tokens, following, passed, prompts.last)
    machine.drafter.prefill(machine.state, plan, prompts, fed, rank)


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


def _choose_next(
    machine: Machine,
    plan: Plan,
    logits: Float[Tensor, "B vocab"],
    positions: Int[Tensor, " B"],
    noise: Noise | None,
) -> Int[Tensor, " B"]:
    """The target's token at `positions`, where the noise begins."""
    how = plan.sampling
    processed = sampling.processed(logits, seen_of(machine, plan), positions, how, None)
    first = None if noise is None else noise[:, 0]
    return sampling.choose(processed, first, how.temperature)
