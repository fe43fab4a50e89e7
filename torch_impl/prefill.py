"""Prefill steps over prompt chunks, and count steps for tokens found in the prefix cache."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from shared.boundary.buffers import SCORES
from shared.boundary.program import ProgramFeature
from shared.spec.logprobs import SCORED_ROWS
from torch_impl import model
from torch_impl.device_state import Fields, reset_slots
from torch_impl.drafters import ExtendRows, PrefillChunks
from torch_impl.layers import PrefillMixer
from torch_impl.model import Forward
from torch_impl.ops.gemm.layers import ImageEmbeds
from torch_impl.ops.recurrent import recurrent_state
from torch_impl.ops.sampling import logprobs, sampling
from torch_impl.ops.sampling.sampling import SampledTokens
from torch_impl.ops.trees import draft_tree, ngram, slot_state
from torch_impl.step_context import Step, adapter_slots, logprobs_of, ranking


def count_tokens(step: Step) -> Fields:
    """Adds tokens to the token counts in `seen`; resets the slots of starting rows first."""
    plan, prompt, tokens = step.plan, step.plan.prompt, step.program.tokens
    assert prompt is not None  # a count has one
    reset_slots(step.context.state, plan)
    request, is_real = draft_tree.request_of(prompt.row_starts, tokens)
    place = torch.arange(tokens, dtype=torch.int32, device=request.device)
    positions = place - prompt.row_starts[request] + step.lengths[request]
    is_output = positions >= plan.sampling.prompt_length[request]
    seen, owners = step.context.state.seen, plan.slots[request]
    slot_state.count(seen, owners, prompt.tokens, is_output, is_real)
    return {"counts": torch.zeros_like(plan.save_at)}


def prefill(step: Step) -> Fields:
    """Prefills prompt chunks and chooses the first output token of prompts that end."""
    plan, prompt, is_row = step.plan, step.plan.prompt, step.plan.slots != 0
    assert prompt is not None  # a prefill has one
    reset_slots(step.context.state, plan)
    prompts = PrefillChunks.of(plan, step.program)
    _store_mrope_deltas(step)
    passed, saved = _read_prompts(step, prompts)
    _count_prompts(step, prompts)
    logits = model.logits(step.context.model, passed.hidden[prompts.last])
    chosen = _choose_next(step, prompts, logits)
    newest = torch.where(prompt.ends_prompt, chosen.ids, prompt.next_tokens)
    _commit(step, prompts, newest, is_row)
    following = _following(prompts, prompts.tokens, newest)
    _extend_drafter(step, prompts, passed, following)
    _learn_ngrams(step, prompts, following)
    fields = _result_fields(step, chosen, newest, is_row, saved)
    fields |= _logprobs(step, logits, fields)
    return fields | _scores(step, prompts, passed, following)


def _store_mrope_deltas(step: Step) -> None:
    """Stores the M-RoPE position delta of each slot, for a model with a vision encoder."""
    prompt, images = step.plan.prompt, step.context.state.images
    assert prompt is not None  # a prefill has one
    if prompt.images is not None and images is not None:
        images.deltas[step.plan.slots] = prompt.images.deltas


def _read_prompts(step: Step, prompts: PrefillChunks) -> tuple[Forward, Bool[Tensor, " B"]]:
    """Runs the target over the chunks and advances its GDN states; returns which were saved."""
    target, state, plan = step.context.model, step.context.state, step.plan
    tokens, shown = prompts.tokens, _shown(step, prompts.sources)
    slots = adapter_slots(step, prompts.rows.request)
    rows = replace(prompts.rows, window_page_tables=plan.window_page_tables)
    if state.delta is None:
        passed = model.forward(target, tokens, shown, rows, state.kv, None, step.streams, slots)
        return passed, torch.zeros_like(plan.starts)
    assert state.snapshots is not None  # slots with states have snapshots
    save_after = plan.save_at - step.lengths
    is_saved = recurrent_state.ends_chunk(save_after, prompts.lengths - step.lengths)
    is_saved &= plan.save != 0
    mixer = PrefillMixer(
        config=target.config,
        group=target.group,
        states=state.delta,
        snapshots=state.snapshots,
        slots=plan.slots,
        row_starts=prompts.row_starts,
        request=rows.request,
        save_after=save_after,
        save=torch.where(is_saved, plan.save, 0),
    )
    passed = model.forward(target, tokens, shown, rows, state.kv, mixer, step.streams, slots)
    return passed, is_saved


def _count_prompts(step: Step, prompts: PrefillChunks) -> None:
    """Counts the chunks' tokens, except those already counted as their slot's newest token."""
    plan, rows = step.plan, prompts.rows
    was_newest = (rows.positions == step.lengths[rows.request]) & ~plan.starts[rows.request]
    is_output = rows.positions >= plan.sampling.prompt_length[rows.request]
    seen, owners = step.context.state.seen, plan.slots[rows.request]
    slot_state.count(seen, owners, prompts.tokens, is_output, rows.is_real & ~was_newest)


def _choose_next(
    step: Step, prompts: PrefillChunks, logits: Float[Tensor, "B share"]
) -> SampledTokens:
    """Chooses the target's token after each chunk."""
    lengths = prompts.lengths
    seen = sampling.counts_alone(step.context.state.seen, step.plan.slots)
    request = torch.arange(len(lengths), device=lengths.device)
    params, vocabulary = step.plan.sampling, step.context.model.vocabulary
    return sampling.choose(logits, seen, lengths, params, request, None, vocabulary)


def _commit(
    step: Step, prompts: PrefillChunks, newest: Int[Tensor, " B"], is_row: Bool[Tensor, " B"]
) -> None:
    """Commits the chunks to their slots; each slot also has the token after its chunk."""
    state, plan = step.context.state, step.plan
    slot_state.commit(
        lengths=state.lengths,
        newest=state.newest,
        seen=state.seen,
        draft_from=None,
        slots=plan.slots,
        before=prompts.lengths - 1,  # the chunks' tokens are already counted
        tokens=newest[:, None],
        counts=is_row.int(),
        prompt_length=plan.sampling.prompt_length,
    )


def _following(
    prompts: PrefillChunks, values: Int[Tensor, " T"], after: Int[Tensor, " B"]
) -> Int[Tensor, " T"]:
    """Returns the value that follows each value of the chunks; `after` follows the chunks."""
    request = prompts.rows.request
    is_last = draft_tree.is_last(prompts.row_starts, request)
    return torch.where(is_last, after[request], values.roll(-1))


def _following_sources(step: Step, prompts: PrefillChunks) -> Int[Tensor, " T"] | None:
    """Returns the encoder-cache row of the token that follows each token of the chunks."""
    prompt = step.plan.prompt
    if prompts.sources is None or prompt is None or prompt.images is None:
        return None
    return _following(prompts, prompts.sources, prompt.images.next_sources)


def _shown(step: Step, sources: Int[Tensor, " T"] | None) -> ImageEmbeds | None:
    """Returns the image embeddings that replace token embeddings; None for a text-only model."""
    images = step.context.state.images
    return None if sources is None or images is None else ImageEmbeds(images.pool, sources)


def _extend_drafter(
    step: Step, prompts: PrefillChunks, passed: Forward, following: Int[Tensor, " T"]
) -> None:
    """Extends the drafter over the chunks; each row has the token that follows it."""
    if not step.extends_drafter:
        return
    context, plan, rows = step.context, step.plan, prompts.rows
    draft = context.state.draft
    assert context.drafter is not None  # required by draft extend
    assert draft is not None
    rank = ranking(step, prompts.lengths, context.capacity.max_width, False)
    committed = ExtendRows(
        rows=replace(rows, first=draft.draft_from[plan.slots][rows.request]),
        tokens=prompts.tokens,
        following=following,
        shown=_shown(step, _following_sources(step, prompts)),
        passed=passed,
        last=prompts.last,
    )
    context.drafter.prefill(draft, plan, prompts, committed, rank)


def _learn_ngrams(step: Step, prompts: PrefillChunks, following: Int[Tensor, " T"]) -> None:
    """Adds the chunks to the n-gram table of the device, if it has one.

    Runs of one token, such as image tokens, are not added.
    """
    texts, scopes, is_real = step.context.state.texts, step.plan.texts, prompts.rows.is_real
    if texts is None:
        return
    assert scopes is not None
    assert scopes.before is not None  # set in a prefill
    for source in (prompts.sources, _following_sources(step, prompts)):
        is_real = is_real if source is None else is_real & (source == 0)
    request = prompts.rows.request
    windows = ngram.prompt_windows(prompts.tokens, prompts.row_starts, request, scopes.before)
    rows = (windows, following, request, prompts.last, scopes.scopes, is_real)
    ngram.learn_prompts(texts, step.plan.slots, *rows)


def _result_fields(
    step: Step,
    chosen: SampledTokens,
    newest: Int[Tensor, " B"],
    is_row: Bool[Tensor, " B"],
    saved: Bool[Tensor, " B"],
) -> Fields:
    """Returns the fields of a prefill step's result, except logprobs."""
    prompt, failed = step.plan.prompt, ~chosen.is_finite & is_row
    assert prompt is not None  # a prefill has one
    counts = (prompt.ends_prompt & ~failed & is_row).int()
    return {
        "tokens": torch.where(counts > 0, newest, 0)[:, None],
        "counts": counts,
        "failed": failed,
        "snapshot_saved": saved,
        "drafts": newest[:, None],
        "num_nodes": torch.ones_like(newest),
    }


def _logprobs(step: Step, logits: Float[Tensor, "B share"], fields: Fields) -> Fields:
    """Returns the logprob fields of the first output tokens."""
    tokens, counts = fields["tokens"], fields["counts"]
    row_of = torch.arange(len(counts), device=counts.device)[:, None]
    return logprobs_of(step, logits, row_of, tokens, counts)


def _scores(
    step: Step, prompts: PrefillChunks, passed: Forward, following: Int[Tensor, " T"]
) -> Fields:
    """Computes prompt logprobs; the logits of a block of rows are computed at a time."""
    if not step.program.has(ProgramFeature.PROMPT_LOGPROBS):
        return {}
    target, k = step.context.model, step.context.capacity.max_scores
    blocks = zip(passed.hidden.split(SCORED_ROWS), following.split(SCORED_ROWS), strict=True)
    scored = [
        logprobs.prompt_logprobs(model.logits(target, hidden), ids, k, target.vocabulary)
        for hidden, ids in blocks
    ]
    parts = map(torch.cat, zip(*scored, strict=True))
    return {name: _real(step, prompts, part) for name, part in zip(SCORES, parts, strict=True)}


def _real(
    step: Step, prompts: PrefillChunks, values: Shaped[Tensor, "R ..."]
) -> Shaped[Tensor, "T ..."]:
    """Sets values of padding rows to zero; on a CPU there are none."""
    is_real = prompts.rows.is_real.view(-1, *[1] * (values.dim() - 1))
    padded = values.new_zeros(step.program.tokens, *values.shape[1:])
    padded[: len(values)] = torch.where(is_real, values, 0)
    return padded
