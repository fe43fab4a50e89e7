"""Prefill steps over prompt chunks, and count steps for tokens found in the prefix cache."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int, Shaped

from jax_impl import model, ops
from jax_impl.device_state import DeviceState, Fields, reset_slots
from jax_impl.drafters import ExtendRows, PrefillChunks
from jax_impl.layers import PrefillMixer
from jax_impl.model import Forward
from jax_impl.ops.gemm.layers import ImageEmbeds
from jax_impl.ops.recurrent import recurrent_state
from jax_impl.ops.sampling import logprobs, sampling
from jax_impl.ops.sampling.logprobs import Scored
from jax_impl.ops.sampling.sampling import SampledTokens
from jax_impl.ops.trees import draft_tree, ngram, slot_state
from jax_impl.step_context import (
    Step,
    adapter_slots,
    drafter_state,
    logprobs_of,
    ranking,
    with_drafter_state,
)
from shared.boundary.buffers import SCORES
from shared.boundary.program import ProgramFeature
from shared.spec.logprobs import SCORED_ROWS


def count_tokens(step: Step, state: DeviceState) -> tuple[DeviceState, Fields]:
    """Adds tokens to the token counts in `seen`; resets the slots of starting rows first."""
    plan, prompt = step.plan, step.plan.prompt
    assert prompt is not None  # a count has one
    state = reset_slots(state, plan)
    num_tokens = prompt.row_starts[1:] - prompt.row_starts[:-1]
    _, request, place, is_real = draft_tree.flatten(num_tokens, step.program.tokens)
    positions = step.lengths[request] + place
    is_output = positions >= plan.sampling.prompt_length[request]
    seen = slot_state.count(state.seen, plan.slots[request], prompt.tokens, is_output, is_real)
    return state._replace(seen=seen), {"counts": jnp.zeros_like(plan.slots)}


def prefill(step: Step, state: DeviceState) -> tuple[DeviceState, Fields]:
    """Prefills prompt chunks and chooses the first output token of prompts that end."""
    plan, prompt = step.plan, step.plan.prompt
    assert prompt is not None  # a prefill has one
    state = reset_slots(state, plan)
    prompts = PrefillChunks.of(plan, step.program)
    state = _store_mrope_deltas(step, state)
    passed, state, saved = _read_prompts(step, state, prompts)
    state = _count_prompts(step, state, prompts)
    logits = model.logits(step.context.model, passed.hidden[prompts.last])
    chosen = _choose_next(step, state, prompts, logits)
    newest = jnp.where(prompt.ends_prompt, chosen.ids, prompt.next_tokens)
    is_row = plan.slots != 0
    state = _commit(step, state, prompts, newest, is_row)
    following = _following(prompts, prompts.tokens, newest)
    state = _extend_drafter(step, state, prompts, passed, following)
    state = _learn_ngrams(step, state, prompts, following)
    fields = _result_fields(step, chosen, newest, is_row, saved)
    fields |= _logprobs(step, logits, fields)
    return state, fields | _scores(step, prompts, passed, following)


def _store_mrope_deltas(step: Step, state: DeviceState) -> DeviceState:
    """Stores the M-RoPE position delta of each slot, for a model with a vision encoder."""
    prompt = step.plan.prompt
    assert prompt is not None  # a prefill has one
    if prompt.images is None or state.images is None:
        return state
    deltas = state.images.deltas.at[step.plan.slots].set(prompt.images.deltas)
    return state._replace(images=state.images._replace(deltas=deltas))


def _read_prompts(
    step: Step, state: DeviceState, prompts: PrefillChunks
) -> tuple[Forward, DeviceState, Bool[jax.Array, " B"]]:
    """Runs the target over the chunks and advances its GDN states; returns which were saved."""
    target, plan, mixer = step.context.model, step.plan, None
    save_after = plan.save_at - step.lengths
    is_saved = recurrent_state.ends_chunk(save_after, prompts.lengths - step.lengths)
    is_saved &= plan.save != 0
    if state.delta is not None:
        assert state.snapshots is not None  # slots with states have snapshots
        mixer = PrefillMixer(
            config=target.config,
            group=target.group,
            states=state.delta,
            snapshots=state.snapshots,
            slots=plan.slots,
            row_starts=prompts.row_starts,
            request=prompts.rows.request,
            save_after=save_after,
            save=jnp.where(is_saved, plan.save, 0),
        )
    tokens, shown = prompts.tokens, _shown(state, prompts.sources)
    rows = prompts.rows._replace(window_page_tables=plan.window_page_tables)
    slots = adapter_slots(step, rows.request)
    passed = model.forward(target, tokens, shown, rows, state.kv, mixer, step.streams, slots)
    state = state._replace(kv=passed.kv)
    if mixer is not None:
        delta, snapshots = mixer.carry
        state = state._replace(delta=delta, snapshots=snapshots)
    return passed, state, is_saved


def _count_prompts(step: Step, state: DeviceState, prompts: PrefillChunks) -> DeviceState:
    """Counts the chunks' tokens, except those already counted as their slot's newest token."""
    plan, rows = step.plan, prompts.rows
    was_newest = (rows.positions == step.lengths[rows.request]) & ~plan.starts[rows.request]
    is_output = rows.positions >= plan.sampling.prompt_length[rows.request]
    is_counted, owners = rows.is_real & ~was_newest, plan.slots[rows.request]
    seen = slot_state.count(state.seen, owners, prompts.tokens, is_output, is_counted)
    return state._replace(seen=seen)


def _choose_next(
    step: Step, state: DeviceState, prompts: PrefillChunks, logits: Float[jax.Array, "B share"]
) -> SampledTokens:
    """Chooses the target's token after each chunk."""
    seen = sampling.counts_alone(state.seen, step.plan.slots)
    request = jnp.arange(len(prompts.lengths))
    params, vocabulary = step.plan.sampling, step.context.model.vocabulary
    return sampling.choose(logits, seen, prompts.lengths, params, request, None, vocabulary)


def _commit(
    step: Step,
    state: DeviceState,
    prompts: PrefillChunks,
    newest: Int[jax.Array, " B"],
    is_row: Bool[jax.Array, " B"],
) -> DeviceState:
    """Commits the chunks to their slots; each slot also has the token after its chunk."""
    slots = step.plan.slots
    is_output = prompts.lengths >= step.plan.sampling.prompt_length
    return state._replace(
        lengths=state.lengths.at[slots].set(prompts.lengths),
        newest=state.newest.at[slots].set(newest),
        seen=slot_state.count(state.seen, slots, newest, is_output, is_row),
    )


def _following(
    prompts: PrefillChunks, values: Int[jax.Array, " T"], after: Int[jax.Array, " B"]
) -> Int[jax.Array, " T"]:
    """Returns the value that follows each value of the chunks; `after` follows the chunks."""
    request = prompts.rows.request
    is_last = jnp.arange(len(prompts.tokens)) + 1 == prompts.row_starts[request + 1]
    return jnp.where(is_last, after[request], jnp.roll(values, -1))


def _following_sources(step: Step, prompts: PrefillChunks) -> Int[jax.Array, " T"] | None:
    """Returns the encoder-cache row of the token that follows each token of the chunks."""
    prompt = step.plan.prompt
    if prompts.sources is None or prompt is None or prompt.images is None:
        return None
    return _following(prompts, prompts.sources, prompt.images.next_sources)


def _shown(state: DeviceState, sources: Int[jax.Array, " T"] | None) -> ImageEmbeds | None:
    """Returns the image embeddings that replace token embeddings; None for a text-only model."""
    images = state.images
    return None if sources is None or images is None else ImageEmbeds(images.pool, sources)


def _extend_drafter(
    step: Step,
    state: DeviceState,
    prompts: PrefillChunks,
    passed: Forward,
    following: Int[jax.Array, " T"],
) -> DeviceState:
    """Extends the drafter over the chunks; each row has the token that follows it."""
    if not step.extends_drafter:
        return state
    context, plan, rows = step.context, step.plan, prompts.rows
    assert context.drafter is not None  # required by draft extend
    assert state.draft is not None
    draft_from = state.draft.draft_from[plan.slots]
    rank = ranking(step, state, prompts.lengths, context.capacity.max_width, False)
    committed = ExtendRows(
        rows=rows._replace(first=draft_from[rows.request]),
        tokens=prompts.tokens,
        following=following,
        shown=_shown(state, _following_sources(step, prompts)),
        passed=passed,
        last=prompts.last,
    )
    memory = drafter_state(step, state)
    memory = context.drafter.prefill(memory, plan, prompts, committed, rank)
    return with_drafter_state(step, state, memory)


def _learn_ngrams(
    step: Step, state: DeviceState, prompts: PrefillChunks, following: Int[jax.Array, " T"]
) -> DeviceState:
    """Adds the chunks to the n-gram table of the device, if it has one.

    Runs of one token, such as image tokens, are not added.
    """
    if state.texts is None:
        return state
    plan, scopes, is_real = step.plan, step.plan.texts, prompts.rows.is_real
    assert scopes is not None
    assert scopes.before is not None  # set in a prefill
    for source in (prompts.sources, _following_sources(step, prompts)):
        is_real = is_real if source is None else is_real & (source == 0)
    request = prompts.rows.request
    windows = ngram.prompt_windows(prompts.tokens, prompts.row_starts, request, scopes.before)
    rows = (windows, following, request, prompts.last, scopes.scopes, is_real)
    return state._replace(texts=ngram.learn_prompts(state.texts, plan.slots, *rows))


def _result_fields(
    step: Step,
    chosen: SampledTokens,
    newest: Int[jax.Array, " B"],
    is_row: Bool[jax.Array, " B"],
    saved: Bool[jax.Array, " B"],
) -> Fields:
    """Returns the fields of a prefill step's result, except logprobs."""
    prompt, failed = step.plan.prompt, ~chosen.is_finite
    assert prompt is not None  # a prefill has one
    counts = (prompt.ends_prompt & ~failed & is_row).astype(jnp.int32)
    return {
        "tokens": jnp.where(counts > 0, newest, 0)[:, None],
        "counts": counts,
        "failed": failed,
        "snapshot_saved": saved,
        "drafts": newest[:, None],
        "num_nodes": jnp.ones_like(newest),
    }


def _logprobs(step: Step, logits: Float[jax.Array, "B share"], fields: Fields) -> Fields:
    """Returns the logprob fields of the first output tokens."""
    tokens, counts = fields["tokens"], fields["counts"]
    row_of = jnp.arange(len(counts), dtype=jnp.int32)[:, None]
    return logprobs_of(step, logits, row_of, tokens, counts)


def _scores(
    step: Step, prompts: PrefillChunks, passed: Forward, following: Int[jax.Array, " T"]
) -> Fields:
    """Computes prompt logprobs; the logits of a block of rows are computed at a time."""
    if not step.program.has(ProgramFeature.PROMPT_LOGPROBS):
        return {}
    target, k = step.context.model, step.context.capacity.max_scores
    rows = math.gcd(step.program.tokens, SCORED_ROWS)
    blocks = passed.hidden.reshape(-1, rows, passed.hidden.shape[1]), following.reshape(-1, rows)

    def score(before: Scored, block: tuple[jax.Array, jax.Array]) -> tuple[Scored, Scored]:
        # A block begins after the previous block has ended: otherwise all logits would be in
        # memory at once. XLA drops unused outputs of a barrier, so the results pass through it.
        (hidden, ids), before = lax.optimization_barrier((block, before))
        logits = model.logits(target, hidden)
        return logprobs.prompt_logprobs(logits, ids, k, target.vocabulary), before

    whole, best = jnp.zeros(rows), jnp.zeros((rows, k))
    nothing = (whole, whole.astype(jnp.int32), best.astype(jnp.int32), best)
    last, before = ops.scan(score, nothing, blocks)
    shifted = (jnp.append(b[1:], a[None], axis=0) for b, a in zip(before, last, strict=True))
    parts = [part.reshape(step.program.tokens, *part.shape[2:]) for part in shifted]
    return {name: _real(prompts, part) for name, part in zip(SCORES, parts, strict=True)}


def _real(prompts: PrefillChunks, values: Shaped[jax.Array, "T ..."]) -> Shaped[jax.Array, "T ..."]:
    """Sets values of padding rows to zero."""
    is_real = prompts.rows.is_real.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.where(is_real, values, jnp.zeros((), values.dtype))
