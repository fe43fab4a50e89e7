"""Prefill steps over prompt chunks, and count steps for tokens found in the prefix cache."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int, Shaped

from jax_impl import model, ops
from jax_impl.device_state import DeviceState, Fields, Plan, reset_slots
from jax_impl.drafters import ExtendRows, PrefillChunks
from jax_impl.layers import PrefillMixer
from jax_impl.model import Forward
from jax_impl.ops.gdn import gdn_state
from jax_impl.ops.gemm.layers import ImageEmbeds
from jax_impl.ops.sampling import logprobs, sampling
from jax_impl.ops.sampling.logprobs import Scored
from jax_impl.ops.trees import draft_tree, ngram, slot_state
from jax_impl.step_context import StepContext, logprobs_of, ranking
from shared.boundary.buffers import SCORES
from shared.boundary.program import Program, ProgramFeature
from shared.spec.logprobs import SCORED_ROWS


def count_tokens(
    context: StepContext, state: DeviceState, plan: Plan, program: Program
) -> tuple[DeviceState, Fields]:
    """Adds tokens to the token counts in `seen`; resets the slots of starting rows first."""
    state, prompt = reset_slots(state, plan), plan.prompt
    assert prompt is not None  # a count has one
    num_tokens = prompt.row_starts[1:] - prompt.row_starts[:-1]
    _, request, place, is_real = draft_tree.flatten(num_tokens, program.tokens)
    positions = prompt.first_positions[request] + place
    is_output = positions >= plan.sampling.prompt_length[request]
    seen = slot_state.count(state.seen, plan.slots[request], prompt.tokens, is_output, is_real)
    return state._replace(seen=seen), {"counts": jnp.zeros_like(plan.slots)}


def prefill(
    context: StepContext, state: DeviceState, plan: Plan, program: Program
) -> tuple[DeviceState, Fields]:
    """Prefills prompt chunks and chooses the first output token of prompts that end."""
    state, prompt = reset_slots(state, plan), plan.prompt
    assert prompt is not None  # a prefill has one
    prompts = PrefillChunks.of(plan, program)
    if prompt.images is not None and state.images is not None:
        deltas = state.images.deltas.at[plan.slots].set(prompt.images.deltas)
        state = state._replace(images=state.images._replace(deltas=deltas))
    passed, state, saved = _read_prompts(context, state, plan, program, prompts)
    state = _count_prompts(context, state, plan, prompts)
    logits = model.logits(context.model, passed.hidden[prompts.last])
    chosen = _choose_next(context, state, plan, logits, prompts.lengths)
    newest = jnp.where(prompt.ends_prompt, chosen.ids, prompt.next_tokens)
    is_row = plan.slots != 0
    is_output = prompts.lengths >= plan.sampling.prompt_length
    state = state._replace(
        lengths=state.lengths.at[plan.slots].set(prompts.lengths),
        newest=state.newest.at[plan.slots].set(newest),
        seen=slot_state.count(state.seen, plan.slots, newest, is_output, is_row),
    )
    following = _following(prompts, newest)
    if context.extends_drafter(program):
        state = _prefill_prompts(context, state, plan, prompts, passed, following)
    if state.texts is not None:
        texts = _learnt_texts(state.texts, plan, prompts, following)
        state = state._replace(texts=texts)
    failed = ~chosen.is_finite
    counts = (prompt.ends_prompt & ~failed & is_row).astype(jnp.int32)
    tokens = jnp.where(counts > 0, newest, 0)[:, None]
    values = {"tokens": tokens, "counts": counts, "failed": failed, "snapshot_saved": saved}
    values |= {"drafts": newest[:, None], "num_nodes": jnp.ones_like(newest)}
    row_of = jnp.arange(len(counts), dtype=jnp.int32)[:, None]
    values |= logprobs_of(context, plan, program, logits, row_of, tokens, counts)
    return state, values | _scores(context, program, prompts, passed, following)


def _following(prompts: PrefillChunks, newest: Int[jax.Array, " B"]) -> Int[jax.Array, " T"]:
    """Returns the token that follows each token of the chunks."""
    request = prompts.rows.request
    is_last = jnp.arange(len(prompts.tokens)) + 1 == prompts.row_starts[request + 1]
    return jnp.where(is_last, newest[request], jnp.roll(prompts.tokens, -1))


def _learnt_texts(
    memory: ngram.NgramState, plan: Plan, prompts: PrefillChunks, following: Int[jax.Array, " T"]
) -> ngram.NgramState:
    """Adds the chunks to the n-gram table, without runs of one token, such as image tokens."""
    assert plan.texts is not None
    assert plan.texts.before is not None  # set in a prefill
    request, is_real = prompts.rows.request, prompts.rows.is_real
    sources = prompts.sources, _following_sources(plan, prompts)
    for source in sources:
        is_real = is_real if source is None else is_real & (source == 0)
    windows = ngram.prompt_windows(prompts.tokens, prompts.row_starts, request, plan.texts.before)
    rows = (windows, following, request, prompts.last, plan.texts.scopes, is_real)
    return ngram.learn_prompts(memory, plan.slots, *rows)


def _following_sources(plan: Plan, prompts: PrefillChunks) -> Int[jax.Array, " T"] | None:
    """Returns the encoder-cache rows of those tokens."""
    if prompts.sources is None or plan.prompt is None or plan.prompt.images is None:
        return None
    request = prompts.rows.request
    is_last = jnp.arange(len(prompts.tokens)) + 1 == prompts.row_starts[request + 1]
    next_sources = plan.prompt.images.next_sources
    return jnp.where(is_last, next_sources[request], jnp.roll(prompts.sources, -1))


def _shown(state: DeviceState, sources: Int[jax.Array, " T"] | None) -> ImageEmbeds | None:
    """Returns the image embeddings that replace token embeddings; None for a text-only model."""
    images = state.images
    return None if sources is None or images is None else ImageEmbeds(images.pool, sources)


def _scores(
    context: StepContext,
    program: Program,
    prompts: PrefillChunks,
    passed: Forward,
    following: Int[jax.Array, " T"],
) -> Fields:
    """Computes prompt logprobs; the logits of a block of rows are computed at a time."""
    if not program.has(ProgramFeature.PROMPT_LOGPROBS):
        return {}
    rows, k = math.gcd(program.tokens, SCORED_ROWS), context.capacity.max_scores
    blocks = passed.hidden.reshape(-1, rows, passed.hidden.shape[1]), following.reshape(-1, rows)

    def score(before: Scored, block: tuple[jax.Array, jax.Array]) -> tuple[Scored, Scored]:
        # A block begins after the previous block has ended: otherwise all logits would be in
        # memory at once. XLA drops unused outputs of a barrier, so the results pass through it.
        (hidden, ids), before = lax.optimization_barrier((block, before))
        logits, vocabulary = model.logits(context.model, hidden), context.model.vocabulary
        return logprobs.prompt_logprobs(logits, ids, k, vocabulary), before

    whole, best = jnp.zeros(rows), jnp.zeros((rows, k))
    nothing = (whole, whole.astype(jnp.int32), best.astype(jnp.int32), best)
    last, before = ops.scan(score, nothing, blocks)
    shifted = (jnp.append(b[1:], a[None], axis=0) for b, a in zip(before, last, strict=True))
    parts = [part.reshape(program.tokens, *part.shape[2:]) for part in shifted]
    return {name: _real(prompts, part) for name, part in zip(SCORES, parts, strict=True)}


def _real(prompts: PrefillChunks, values: Shaped[jax.Array, "T ..."]) -> Shaped[jax.Array, "T ..."]:
    """Sets values of padding rows to zero."""
    is_real = prompts.rows.is_real.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.where(is_real, values, jnp.zeros((), values.dtype))


def _count_prompts(
    context: StepContext, state: DeviceState, plan: Plan, prompts: PrefillChunks
) -> DeviceState:
    """Counts the chunks' tokens, except those already counted as their slot's newest token."""
    rows = prompts.rows
    was_newest = (rows.positions == prompts.first[rows.request]) & ~plan.starts[rows.request]
    is_output = rows.positions >= plan.sampling.prompt_length[rows.request]
    is_counted = rows.is_real & ~was_newest
    owners = plan.slots[rows.request]
    return state._replace(
        seen=slot_state.count(state.seen, owners, prompts.tokens, is_output, is_counted)
    )


def _prefill_prompts(
    context: StepContext,
    state: DeviceState,
    plan: Plan,
    prompts: PrefillChunks,
    passed: Forward,
    following: Int[jax.Array, " T"],
) -> DeviceState:
    """Extends the drafter over the chunks; each row has the token that follows it."""
    assert context.drafter is not None  # required by draft extend
    assert state.draft is not None
    rows, draft_from = prompts.rows, state.draft.draft_from[plan.slots]
    rows = rows._replace(first=draft_from[rows.request])
    rank = ranking(context, state, plan, prompts.lengths, context.capacity.max_width, False)
    shown = _shown(state, _following_sources(plan, prompts))
    fed = ExtendRows(rows, prompts.tokens, following, shown, passed, prompts.last)
    memory = context.drafter.prefill(state.draft, plan, prompts, fed, rank)
    return state._replace(draft=memory)


def _read_prompts(
    context: StepContext, state: DeviceState, plan: Plan, program: Program, prompts: PrefillChunks
) -> tuple[Forward, DeviceState, Bool[jax.Array, " B"]]:
    """Runs the target over the chunks and advances its GDN states; returns which were saved."""
    streams, mixer = context.streams(program), None
    save_after = plan.save_at - prompts.first
    is_saved = gdn_state.ends_chunk(save_after, prompts.lengths - prompts.first)
    is_saved &= plan.save != 0
    if state.delta is not None:
        assert state.snapshots is not None  # slots with states have snapshots
        where = (plan.slots, prompts.row_starts, prompts.rows.request)
        pools, save = (state.delta, state.snapshots), jnp.where(is_saved, plan.save, 0)
        mixer = PrefillMixer(context.model.config, *pools, *where, save_after, save)
    given = (prompts.tokens, _shown(state, prompts.sources), prompts.rows, state.kv)
    passed = model.forward(context.model, *given, mixer, streams)
    state = state._replace(kv=passed.kv)
    if mixer is not None:
        delta, snapshots = mixer.carry
        state = state._replace(delta=delta, snapshots=snapshots)
    return passed, state, is_saved


def _choose_next(
    context: StepContext,
    state: DeviceState,
    plan: Plan,
    logits: Float[jax.Array, "B share"],
    lengths: Int[jax.Array, " B"],
) -> sampling.SampledTokens:
    """Chooses the target's token after each chunk."""
    seen = sampling.counts_alone(state.seen, plan.slots)
    request = jnp.arange(len(lengths))
    vocabulary = context.model.vocabulary
    return sampling.choose(logits, seen, lengths, plan.sampling, request, None, vocabulary)
