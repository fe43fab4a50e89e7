"""Prefill steps over prompt chunks, and count steps for tokens found in the prefix cache."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from shared.boundary.buffers import SCORES
from shared.boundary.program import Program, ProgramFeature
from shared.spec.logprobs import SCORED_ROWS
from torch_impl import model
from torch_impl.device_state import Fields, Plan, reset_slots
from torch_impl.drafters import ExtendRows, PrefillChunks
from torch_impl.layers import PrefillMixer
from torch_impl.model import Forward
from torch_impl.ops.gdn import gdn_state
from torch_impl.ops.gemm.layers import ImageEmbeds
from torch_impl.ops.sampling import logprobs, sampling
from torch_impl.ops.trees import draft_tree, ngram, slot_state
from torch_impl.step_context import StepContext, logprobs_of, ranking


def count_tokens(context: StepContext, plan: Plan, program: Program) -> Fields:
    reset_slots(context.state, plan)
    prompt = plan.prompt
    assert prompt is not None  # a count has one
    request, is_real = draft_tree.request_of(prompt.row_starts, program.tokens)
    place = torch.arange(program.tokens, dtype=torch.int32, device=request.device)
    place = place - prompt.row_starts[request] + prompt.first_positions[request]
    is_output = place >= plan.sampling.prompt_length[request]
    seen, owners = context.state.seen, plan.slots[request]
    slot_state.count(seen, owners, prompt.tokens, is_output, is_real)
    return {"counts": torch.zeros_like(plan.save_at)}


def prefill(context: StepContext, plan: Plan, program: Program) -> Fields:
    state, is_row, prompt = context.state, plan.slots != 0, plan.prompt
    assert prompt is not None  # a prefill has one
    reset_slots(state, plan)
    prompts = PrefillChunks.of(plan, program)
    if prompt.images is not None and state.images is not None:
        state.images.deltas[plan.slots] = prompt.images.deltas
    passed, saved = _read_prompts(context, plan, prompts, context.streams(program))
    _count_prompts(context, plan, prompts)
    logits = model.logits(context.model, passed.hidden[prompts.last])
    lengths, ends = prompts.lengths, prompt.ends_prompt
    chosen = _choose_next(context, plan, logits, lengths)
    newest = torch.where(ends, chosen.ids, prompt.next_tokens)
    slot_state.commit(
        lengths=state.lengths,
        newest=state.newest,
        seen=state.seen,
        draft_from=None,
        slots=plan.slots,
        before=lengths - 1,  # the chunks' tokens are already counted
        tokens=newest[:, None],
        counts=is_row.int(),
        prompt_length=plan.sampling.prompt_length,
    )
    following = _following(prompts, newest)
    if context.extends_drafter(program):
        _prefill_prompts(context, plan, prompts, passed, following)
    if state.texts is not None:
        _learn_texts(state.texts, plan, prompts, following)
    failed = ~chosen.is_finite & is_row
    counts = (ends & ~failed & is_row).int()
    emitted = torch.where(counts > 0, newest, 0)[:, None]
    values = {"tokens": emitted, "counts": counts, "failed": failed, "snapshot_saved": saved}
    values |= {"drafts": newest[:, None], "num_nodes": torch.ones_like(newest)}
    row_of = torch.arange(len(counts), device=counts.device)[:, None]
    values |= logprobs_of(context, plan, program, logits, row_of, emitted, counts)
    return values | _scores(context, program, prompts, passed, following)


def _following(prompts: PrefillChunks, newest: Int[Tensor, " B"]) -> Int[Tensor, " T"]:
    """Returns the token that follows each token of the chunks."""
    request = prompts.rows.request
    is_last = draft_tree.is_last(prompts.row_starts, request)
    return torch.where(is_last, newest[request], prompts.tokens.roll(-1))


def _learn_texts(
    memory: ngram.NgramState, plan: Plan, prompts: PrefillChunks, following: Int[Tensor, " T"]
) -> None:
    """Adds the chunks to the n-gram table, without runs of one token, such as image tokens."""
    assert plan.texts is not None
    assert plan.texts.before is not None  # set in a prefill
    request, is_real = prompts.rows.request, prompts.rows.is_real
    sources = prompts.sources, _following_sources(plan, prompts)
    for source in sources:
        is_real = is_real if source is None else is_real & (source == 0)
    windows = ngram.prompt_windows(prompts.tokens, prompts.row_starts, request, plan.texts.before)
    rows = (windows, following, request, prompts.last, plan.texts.scopes, is_real)
    ngram.learn_prompts(memory, plan.slots, *rows)


def _following_sources(plan: Plan, prompts: PrefillChunks) -> Int[Tensor, " T"] | None:
    """Returns the encoder-cache rows of those tokens."""
    if prompts.sources is None or plan.prompt is None or plan.prompt.images is None:
        return None
    request = prompts.rows.request
    is_last = draft_tree.is_last(prompts.row_starts, request)
    next_sources = plan.prompt.images.next_sources
    return torch.where(is_last, next_sources[request], prompts.sources.roll(-1))


def _shown(context: StepContext, sources: Int[Tensor, " T"] | None) -> ImageEmbeds | None:
    """Returns the image embeddings that replace token embeddings; None for a text-only model."""
    images = context.state.images
    return None if sources is None or images is None else ImageEmbeds(images.pool, sources)


def _scores(
    context: StepContext,
    program: Program,
    prompts: PrefillChunks,
    passed: Forward,
    following: Int[Tensor, " T"],
) -> Fields:
    """Computes prompt logprobs; the logits of a block of rows are computed at a time."""
    if not program.has(ProgramFeature.PROMPT_LOGPROBS):
        return {}
    blocks = []
    for hidden, ids in zip(
        passed.hidden.split(SCORED_ROWS), following.split(SCORED_ROWS), strict=True
    ):
        logits = model.logits(context.model, hidden)
        k, vocabulary = context.capacity.max_scores, context.model.vocabulary
        blocks.append(logprobs.prompt_logprobs(logits, ids, k, vocabulary))
    parts = map(torch.cat, zip(*blocks, strict=True))
    return {name: _real(program, prompts, part) for name, part in zip(SCORES, parts, strict=True)}


def _real(
    program: Program, prompts: PrefillChunks, values: Shaped[Tensor, "R ..."]
) -> Shaped[Tensor, "T ..."]:
    """Sets values of padding rows to zero; on a CPU there are none."""
    is_real = prompts.rows.is_real.view(-1, *[1] * (values.dim() - 1))
    padded = values.new_zeros(program.tokens, *values.shape[1:])
    padded[: len(values)] = torch.where(is_real, values, 0)
    return padded


def _read_prompts(
    context: StepContext, plan: Plan, prompts: PrefillChunks, streams: tuple[int, ...]
) -> tuple[Forward, Bool[Tensor, " B"]]:
    """Runs the target over the chunks and advances its GDN states; returns which were saved."""
    state, config, rows = context.state, context.model.config, prompts.rows
    shown = _shown(context, prompts.sources)
    if state.delta is None:
        passed = model.forward(context.model, prompts.tokens, shown, rows, state.kv, None, streams)
        return passed, torch.zeros_like(plan.starts)
    assert state.snapshots is not None  # slots with states have snapshots
    save_after = plan.save_at - prompts.first
    is_saved = gdn_state.ends_chunk(save_after, prompts.lengths - prompts.first)
    is_saved &= plan.save != 0
    save = torch.where(is_saved, plan.save, 0)
    pools, where = (state.delta, state.snapshots), (prompts.row_starts, rows.request)
    mixer = PrefillMixer(config, *pools, plan.slots, *where, save_after, save)
    passed = model.forward(context.model, prompts.tokens, shown, rows, state.kv, mixer, streams)
    return passed, is_saved


def _count_prompts(context: StepContext, plan: Plan, prompts: PrefillChunks) -> None:
    """Counts the chunks' tokens, except those already counted as their slot's newest token."""
    rows, starts = prompts.rows, plan.starts
    was_newest = (rows.positions == prompts.first[rows.request]) & ~starts[rows.request]
    is_output = rows.positions >= plan.sampling.prompt_length[rows.request]
    seen, owners = context.state.seen, plan.slots[rows.request]
    slot_state.count(seen, owners, prompts.tokens, is_output, rows.is_real & ~was_newest)


def _choose_next(
    context: StepContext,
    plan: Plan,
    logits: Float[Tensor, "B share"],
    lengths: Int[Tensor, " B"],
) -> sampling.SampledTokens:
    """Chooses the target's token after each chunk."""
    seen = sampling.counts_alone(context.state.seen, plan.slots)
    request = torch.arange(len(lengths), device=lengths.device)
    vocabulary = context.model.vocabulary
    return sampling.choose(logits, seen, lengths, plan.sampling, request, None, vocabulary)


def _prefill_prompts(
    context: StepContext,
    plan: Plan,
    prompts: PrefillChunks,
    passed: Forward,
    following: Int[Tensor, " T"],
) -> None:
    """Extends the drafter over the chunks; each row has the token that follows it."""
    rows, draft = prompts.rows, context.state.draft
    assert context.drafter is not None  # required by draft extend
    assert draft is not None
    rank = ranking(context, plan, prompts.lengths, context.capacity.max_width, False)
    fed = ExtendRows(
        rows=replace(rows, first=draft.draft_from[plan.slots][rows.request]),
        tokens=prompts.tokens,
        following=following,
        shown=_shown(context, _following_sources(plan, prompts)),
        passed=passed,
        last=prompts.last,
    )
    context.drafter.prefill(draft, plan, prompts, fed, rank)
