"""Steps over prompts: chunks of them are fed, or tokens counted that a cache hit spares."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jax_impl import device_state, layers, model
from jax_impl.device_state import DeviceState, Held
from jax_impl.drafters import Drafter, Fed, Ranking
from jax_impl.machine import Fields, Machine, held_by, logprobs_of
from jax_impl.ops import attention, draft_tree, sampling
from jax_impl.ops.attention import Rows
from shared.boundary.backend import Program
from shared.spec.gated_delta import CHUNK


def prefill(
    program: Program, machine: Machine, state: DeviceState, plan: SimpleNamespace
) -> tuple[DeviceState, Fields]:
    held, slots, how = held_by(state, plan), plan.slots, plan.sampling
    num_tokens = plan.row_starts[1:] - plan.row_starts[:-1]
    lengths = plan.first_positions + num_tokens
    rows = attention.causal_rows(
        plan.row_starts,
        plan.first_positions,
        jnp.zeros_like(slots),
        plan.page_table,
        program.tokens,
        program.tokens,
    )
    passed, state, is_taken = _read_prompt(machine, state, plan, held, rows, num_tokens)
    last = jnp.maximum(plan.row_starts[1:] - 1, 0)
    logits = model.logits(machine.weights, passed.hidden[last])
    seen = _prompt_seen(plan, held, rows)
    noise = sampling.gumbel_levels(how, lengths, 1 + machine.has_relay, seen.shape[1])
    scores = sampling.processed(logits, seen, lengths, how, None)
    chosen = sampling.choose(scores, noise[:, 0], how.temperature)
    ends = plan.ends_prompt != 0
    newest = jnp.where(ends, chosen, plan.next_tokens)
    everyone = jnp.arange(len(slots)), newest, lengths, jnp.ones(len(slots), bool)
    seen = sampling.counted(seen, *everyone, how.prompt_length)
    state = state._replace(
        lengths=state.lengths.at[slots].set(lengths),
        newest=state.newest.at[slots].set(newest),
        seen=state.seen.at[slots].set(seen),
    )
    if machine.drafter is not None:
        ranked = (Ranking(how, seen, lengths, None), noise[:, -1])
        state = _feed_prompt(machine.drafter, state, plan, held, rows, newest, passed, *ranked)
    failed = ~jnp.isfinite(logits).all(axis=1)
    counts = (ends & ~failed & (slots != 0)).astype(jnp.int32)
    tokens = jnp.where(counts > 0, newest, 0)[:, None]
    result = {"tokens": tokens, "counts": counts, "failed": failed, "saved": is_taken}
    result |= {"drafts": newest[:, None], "num_nodes": jnp.ones_like(newest)}
    if program.logprobs:
        result |= logprobs_of(logits[:, None], tokens, counts, machine.limits.max_logprobs)
    return state, result


def _read_prompt(
    machine: Machine,
    state: DeviceState,
    plan: SimpleNamespace,
    held: Held,
    rows: Rows,
    num_tokens: Int[jax.Array, " B"],
) -> tuple[model.Forward, DeviceState, Bool[jax.Array, " B"]]:
    """Runs the target over the chunks and carries states on; says which snapshots were taken.

    A snapshot is taken at the end of a chunk of the delta rule, or of the row; no other place has
    a state of its own.
    """
    save_after = plan.save_at - plan.first_positions
    is_taken = (plan.save != 0) & (save_after > 0) & (save_after <= num_tokens)
    is_taken &= (save_after % CHUNK == 0) | (save_after == num_tokens)
    mixer = None
    if held.delta is not None:
        stack = machine.weights.layers.gated_delta
        where = (rows.request, plan.row_starts, save_after)
        mixer = layers.Chunks(machine.config, stack, held.delta, *where)
    passed = model.forward(machine.config, machine.weights, state.kv, rows, plan.tokens, mixer)
    state = state._replace(kv=passed.kv)
    if mixer is not None:
        states, places = (mixer.after(), mixer.saved()), jnp.where(is_taken, plan.save, 0)
        state = device_state.with_states(state, plan.slots, *states, places)
    return passed, state, is_taken


def _prompt_seen(plan: SimpleNamespace, held: Held, rows: Rows) -> Int[jax.Array, "B vocab"]:
    """What was seen, the chunks' tokens counted.

    The token before a row's first said that it would be next, so the first is counted already.
    """
    place = rows.positions - plan.first_positions[rows.request]
    is_counted = rows.is_real & ((plan.starts != 0)[rows.request] | (place > 0))
    counting = (rows.request, plan.tokens, rows.positions, is_counted)
    return sampling.counted(held.seen, *counting, plan.sampling.prompt_length)


def _feed_prompt(
    drafter: Drafter,
    state: DeviceState,
    plan: SimpleNamespace,
    held: Held,
    rows: Rows,
    newest: Int[jax.Array, " B"],
    passed: model.Forward,
    ranking: Ranking,
    noise: Float[jax.Array, "B vocab"],
) -> DeviceState:
    """Extends the drafter over the chunks: each row with the token after it."""
    is_last = jnp.arange(len(plan.tokens)) + 1 == plan.row_starts[rows.request + 1]
    following = jnp.where(is_last, newest[rows.request], jnp.roll(plan.tokens, -1))
    rows, last = rows._replace(first=held.start[rows.request]), plan.row_starts[1:] - 1
    fed = Fed(rows, plan.tokens, following, passed, jnp.maximum(last, 0))
    memory = state.draft._replace(start=state.draft.start.at[plan.slots].set(held.start))
    return state._replace(draft=drafter.prefill(memory, plan, held, fed, ranking, noise))


def count_tokens(
    program: Program, machine: Machine, state: DeviceState, plan: SimpleNamespace
) -> tuple[DeviceState, Fields]:
    """Adds tokens from position 0 on to `seen`; of a starting row it resets everything first."""
    held, slots = held_by(state, plan), plan.slots
    num_tokens = plan.row_starts[1:] - plan.row_starts[:-1]
    _, request, place, is_real = draft_tree.flatten(num_tokens, program.tokens)
    counting = (request, plan.tokens, place, is_real, plan.sampling.prompt_length)
    seen = sampling.counted(held.seen, *counting)
    lengths = jnp.where(plan.starts != 0, 0, state.lengths[slots])
    state = state._replace(
        seen=state.seen.at[slots].set(seen), lengths=state.lengths.at[slots].set(lengths)
    )
    if held.delta is not None:
        state = state._replace(delta=device_state.put(state.delta, slots, held.delta))
    if held.start is not None:
        start = state.draft.start.at[slots].set(held.start)
        draft = state.draft._replace(start=start)
        if held.draft_delta is not None:
            draft = draft._replace(delta=device_state.put(draft.delta, slots, held.draft_delta))
        state = state._replace(draft=draft)
    return state, {}
