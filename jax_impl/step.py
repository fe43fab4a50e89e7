"""One step as one function of the device state and the plan; compiled once per program."""

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jax_impl import device_state, layers, model
from jax_impl.device_state import DeviceState, Held
from jax_impl.drafters import eagle
from jax_impl.drafters.eagle import Ranking
from jax_impl.drafters.heads import Head
from jax_impl.ops import acceptance, attention, draft_tree, mamba_state, sampling
from jax_impl.ops.attention import Rows
from jax_impl.ops.mamba_state import DeltaState
from jax_impl.weights import Model
from shared.backend import Limits, Program, Work
from shared.model_config import ModelConfig
from shared.spec.gated_delta import CHUNK

Fields = dict[str, jax.Array]


class Target(NamedTuple):
    """What all steps of a backend have in common."""

    config: ModelConfig
    limits: Limits
    weights: Model
    head: Head | None


class Trees(NamedTuple):
    """The draft tree of each row."""

    tokens: Int[jax.Array, "B N"]
    parents: Int[jax.Array, "B N"]
    num_nodes: Int[jax.Array, " B"]
    forced: Bool[jax.Array, " B"]

    def fields(self) -> Fields:
        """As the result names them."""
        return {"drafts": self.tokens, "parents": self.parents, "num_nodes": self.num_nodes}


def step(
    program: Program, target: Target, state: DeviceState, plan: SimpleNamespace
) -> tuple[DeviceState, Fields]:
    """Runs one plan, whose arrays it finds by name: the state after it, and the result's fields."""
    work = {Work.PREFILL: _prefill, Work.DECODE: _decode, Work.DRAFT: _draft, Work.COUNT: _count}
    state, result = work[program.work](program, target, state, plan)
    is_row = plan.slots != 0
    result = {name: _rows_only(is_row, value) for name, value in result.items()}
    # Nobody resets the sink: without the pin, padding would grow its length for ever.
    return state._replace(lengths=state.lengths.at[0].set(0)), result


def _rows_only(is_row: Bool[jax.Array, " B"], values: jax.Array) -> jax.Array:
    mask = is_row.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.where(mask, values, jnp.zeros((), values.dtype))


def _held(state: DeviceState, plan: SimpleNamespace) -> Held:
    rows = (plan.slots, plan.starts != 0, plan.restore, plan.draft_from)
    return device_state.begun(state, *rows)


# Prompts


def _prefill(
    program: Program, target: Target, state: DeviceState, plan: SimpleNamespace
) -> tuple[DeviceState, Fields]:
    held, slots, how = _held(state, plan), plan.slots, plan.sampling
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
    passed, state, is_taken = _read_prompt(target, state, plan, held, rows, num_tokens)
    last = jnp.maximum(plan.row_starts[1:] - 1, 0)
    logits = model.logits(target.weights, passed.hidden[last])
    seen = _prompt_seen(plan, held, rows)
    noise = sampling.gumbel_levels(how, lengths, 1 if target.head is None else 2, seen.shape[1])
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
    if target.head is not None:
        ranked = (last, Ranking(how, seen, lengths), noise[:, 1], target.limits.max_width)
        state = _feed_prompt(target.head, state, plan, held, rows, newest, passed, ranked)
    failed = ~jnp.isfinite(logits).all(axis=1)
    counts = (ends & ~failed & (slots != 0)).astype(jnp.int32)
    tokens = jnp.where(counts > 0, newest, 0)[:, None]
    result = {"tokens": tokens, "counts": counts, "failed": failed, "saved": is_taken}
    result |= _roots(newest).fields()
    if program.logprobs:
        result |= _logprobs(logits[:, None], tokens, counts, target.limits.max_logprobs)
    return state, result


def _read_prompt(
    target: Target,
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
        stack = target.weights.layers.gated_delta
        where = (rows.request, plan.row_starts, save_after)
        mixer = layers.Chunks(target.config, stack, held.delta, *where)
    passed = model.forward(target.config, target.weights, state.kv, rows, plan.tokens, mixer)
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
    head: Head,
    state: DeviceState,
    plan: SimpleNamespace,
    held: Held,
    rows: Rows,
    newest: Int[jax.Array, " B"],
    passed: model.Forward,
    ranked: tuple,
) -> DeviceState:
    """Extends the drafter over the chunks: each row with the token after it."""
    is_last = jnp.arange(len(plan.tokens)) + 1 == plan.row_starts[rows.request + 1]
    following = jnp.where(is_last, newest[rows.request], jnp.roll(plan.tokens, -1))
    rows = rows._replace(first=held.start[rows.request])
    relay, kv = eagle.feed(head, rows, following, passed, state.draft.kv, *ranked)
    return device_state.with_relay(state, plan.slots, held.start, relay, kv)


def _count(
    program: Program, target: Target, state: DeviceState, plan: SimpleNamespace
) -> tuple[DeviceState, Fields]:
    """Adds tokens from position 0 on to `seen`; of a starting row it resets everything first."""
    held, slots = _held(state, plan), plan.slots
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
        state = state._replace(draft=state.draft._replace(start=start))
    return state, {}


# Decoding


def _draft(
    program: Program, target: Target, state: DeviceState, plan: SimpleNamespace
) -> tuple[DeviceState, Fields]:
    """Drafts and ranks; writes nothing but draft KV past the lengths."""
    noise = _noise(program, target, state, plan)
    trees, state = _grown(program, target, state, plan, noise)
    return state, trees.fields()


def _noise(
    program: Program, target: Target, state: DeviceState, plan: SimpleNamespace
) -> Float[jax.Array, "B levels vocab"]:
    """The noise of every position that the step chooses or drafts at, from the newest's next on."""
    depth = program.shape.depth
    levels = depth + 1 + (target.head is not None and depth > 0)
    first = state.lengths[plan.slots] + 1
    return sampling.gumbel_levels(plan.sampling, first, levels, target.limits.vocab)


def _grown(
    program: Program,
    target: Target,
    state: DeviceState,
    plan: SimpleNamespace,
    noise: Float[jax.Array, "B levels vocab"],
) -> tuple[Trees, DeviceState]:
    """The trees of the plan, or those that the drafter grows; the root alone in a plain shape."""
    slots, newest = plan.slots, state.newest[plan.slots]
    if program.host_draft:
        tokens = plan.draft_tree_tokens.at[:, 0].set(newest)
        num_nodes = jnp.maximum(plan.draft_tree_num_nodes, 1)
        forced = plan.draft_tree_forced != 0
        return Trees(tokens, plan.draft_tree_parents, num_nodes, forced), state
    if program.shape.is_plain:
        return _roots(newest), state
    ranking = Ranking(plan.sampling, state.seen[slots], state.lengths[slots])
    grown, kv = eagle.draft(
        target.head,
        state.draft,
        slots,
        newest,
        plan.page_table,
        program.shape,
        ranking,
        noise,
    )
    state = state._replace(draft=state.draft._replace(kv=kv))
    return Trees(*grown, jnp.zeros(len(newest), bool)), state


def _roots(newest: Int[jax.Array, " B"]) -> Trees:
    """Trees of one node."""
    parents = jnp.zeros((len(newest), 1), jnp.int32)
    return Trees(newest[:, None], parents, jnp.ones_like(newest), jnp.zeros(len(newest), bool))


class Verified(NamedTuple):
    """What a verify gave; `mixer` holds what the states' commit needs."""

    passed: model.Forward
    logits: Float[jax.Array, "R vocab"]
    row_of: Int[jax.Array, "B N"]
    request: Int[jax.Array, " R"]
    node: Int[jax.Array, " R"]
    positions: Int[jax.Array, " R"]
    mixer: layers.Tree | layers.Single | None


def _verified(
    program: Program, target: Target, state: DeviceState, plan: SimpleNamespace, trees: Trees
) -> Verified:
    """Runs the target over all nodes; no slot's state changes."""
    shape, lengths = program.shape, state.lengths[plan.slots]
    is_chain = shape.width <= 1
    rows, node = attention.tree_rows(
        trees.parents, trees.num_nodes, lengths, plan.page_table, shape.rows, is_chain
    )
    row_starts = jnp.pad(jnp.cumsum(trees.num_nodes, dtype=jnp.int32), (1, 0))
    row_of = draft_tree.flat_rows(row_starts, trees.num_nodes, shape.nodes)
    mixer = None
    if state.delta is not None:
        stack = target.weights.layers.gated_delta
        delta = device_state.take(state.delta, plan.slots)
        if shape.is_plain:
            mixer = layers.Single(target.config, stack, delta)
        else:
            parents = None if is_chain else trees.parents
            mixer = layers.Tree(target.config, stack, delta, parents, row_of, rows.request, node)
    tokens = trees.tokens[rows.request, node]
    passed = model.forward(target.config, target.weights, state.kv, rows, tokens, mixer)
    logits = model.logits(target.weights, passed.hidden)
    return Verified(passed, logits, row_of, rows.request, node, rows.positions, mixer)


def _choices(
    plan: SimpleNamespace,
    state: DeviceState,
    trees: Trees,
    verified: Verified,
    noise: Float[jax.Array, "B levels vocab"],
) -> Int[jax.Array, "B N"]:
    """The target's token after each node."""
    request, node = verified.request, verified.node
    lengths = state.lengths[plan.slots]

    def seen() -> Int[jax.Array, "R vocab"]:
        on_path = draft_tree.ancestors(trees.parents).at[:, :, 0].set(False)[request, node]
        return sampling.seen_along(state.seen[plan.slots][request], trees.tokens[request], on_path)

    how = plan.sampling.rows(request)
    positions = verified.positions + 1
    scores = sampling.processed_after(verified.logits, seen, positions, how, None)
    level = jnp.clip(verified.positions - lengths[request], 0, noise.shape[1] - 1)
    chosen = sampling.choose(scores, noise[request, level], how.temperature)
    return chosen[verified.row_of]


def _decode(
    program: Program, target: Target, state: DeviceState, plan: SimpleNamespace
) -> tuple[DeviceState, Fields]:
    noise = _noise(program, target, state, plan)
    trees, state = _grown(program, target, state, plan, noise)
    verified = _verified(program, target, state, plan, trees)
    choices = _choices(plan, state, trees, verified, noise)
    choices, walked = acceptance.force(trees.tokens, trees.num_nodes, choices, trees.forced)
    path, counts = acceptance.walk(
        trees.tokens, trees.parents, walked, choices, program.shape.depth
    )
    is_spoiled = ~jnp.isfinite(verified.logits).all(axis=1)
    failed = acceptance.failed(is_spoiled[verified.row_of], path)
    counts = jnp.where(failed | (plan.slots == 0), 0, counts)
    tokens = acceptance.emitted(choices, path, counts)
    before = state.lengths[plan.slots]
    state, saved = _committed(program, state, plan, verified, path, counts, tokens)
    if target.head is not None:
        on_path = jnp.take_along_axis(verified.row_of, path, axis=1).reshape(-1)
        passed = verified.passed.at(on_path)
        state = _extended(program, target, state, plan, before, passed, counts, tokens, noise)
    result = {"tokens": tokens, "counts": counts, "failed": failed, "saved": saved}
    result |= trees.fields()
    if program.logprobs:
        on_path = jnp.take_along_axis(verified.row_of, path, axis=1)
        top = target.limits.max_logprobs
        result |= _logprobs(verified.logits[on_path], tokens, counts, top)
    return state, result


def _committed(
    program: Program,
    state: DeviceState,
    plan: SimpleNamespace,
    verified: Verified,
    path: Int[jax.Array, "B W"],
    counts: Int[jax.Array, " B"],
    tokens: Int[jax.Array, "B W"],
) -> tuple[DeviceState, Bool[jax.Array, " B"]]:
    """Makes the accepted path the slots' past; says which snapshots were taken."""
    slots, shape, kv = plan.slots, program.shape, verified.passed.kv
    lengths = state.lengths[slots]
    if shape.width > 1:
        kv = layers.commit_window(kv, plan.page_table, lengths, path, counts)
    save_after = plan.save_at - lengths
    is_taken = (plan.save != 0) & (save_after >= 1) & (save_after <= counts)
    if state.delta is not None:
        after, saved = _delta_after(shape.is_plain, state, plan, verified, path, counts, save_after)
        places = jnp.where(is_taken, plan.save, 0)
        state = device_state.with_states(state, slots, after, saved, places)
    B, W = tokens.shape
    request = jnp.repeat(jnp.arange(B), W)
    number = jnp.tile(jnp.arange(W), B)
    positions = lengths[request] + 1 + number
    counting = (request, tokens.reshape(-1), positions, number < counts[request])
    seen = sampling.counted(state.seen[slots], *counting, plan.sampling.prompt_length)
    last = jnp.take_along_axis(tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
    newest = jnp.where(counts > 0, last, state.newest[slots])
    state = state._replace(
        lengths=state.lengths.at[slots].add(counts),
        newest=state.newest.at[slots].set(newest),
        seen=state.seen.at[slots].set(seen),
        kv=kv,
    )
    return state, is_taken


def _delta_after(
    is_plain: bool,
    state: DeviceState,
    plan: SimpleNamespace,
    verified: Verified,
    path: Int[jax.Array, "B W"],
    counts: Int[jax.Array, " B"],
    save_after: Int[jax.Array, " B"],
) -> tuple[DeltaState, DeltaState]:
    """The rows' states after their paths, and their snapshots."""
    before = device_state.take(state.delta, plan.slots)
    if not is_plain:
        kept = verified.mixer.kept()
        return mamba_state.replay(before, kept, path, counts, save_after)[:2]
    after = device_state.select(counts > 0, verified.mixer.after(), before)
    return after, after


def _extended(
    program: Program,
    target: Target,
    state: DeviceState,
    plan: SimpleNamespace,
    before: Int[jax.Array, " B"],
    passed: model.Forward,
    counts: Int[jax.Array, " B"],
    tokens: Int[jax.Array, "B W"],
    noise: Float[jax.Array, "B levels vocab"],
) -> DeviceState:
    """Feeds the accepted path to the drafter; a plain step leaves a hole in its KV instead.

    Args:
      passed: The target's pass over the path's B * W rows.
    """
    slots, lengths = plan.slots, state.lengths[plan.slots]
    if program.shape.is_plain:
        start = state.draft.start.at[slots].set(lengths)
        return state._replace(draft=state.draft._replace(start=start))
    start = state.draft.start[slots]
    rows, last = eagle.extend_rows(before, counts, start, plan.page_table, tokens.shape[1])
    level = jnp.arange(len(counts)), counts
    ranking = Ranking(plan.sampling, state.seen[slots], lengths)
    feeding = (rows, tokens.reshape(-1), passed, state.draft.kv, last, ranking, noise[level])
    relay, kv = eagle.feed(target.head, *feeding, target.limits.max_width)
    return device_state.with_relay(state, slots, start, relay, kv)


def _logprobs(
    logits: Float[jax.Array, "B W vocab"],
    tokens: Int[jax.Array, "B W"],
    counts: Int[jax.Array, " B"],
    top: int,
) -> Fields:
    """Logprobs of the emitted tokens and the best ones; 0 past the counts."""
    B, W, vocab = logits.shape
    flat = logits.reshape(B * W, vocab)
    is_emitted = jnp.arange(W) < counts[:, None]
    chosen = sampling.logprobs(flat, tokens.reshape(-1)).reshape(B, W)
    ids, values = (x.reshape(B, W, top) for x in sampling.top_logprobs(flat, top))
    return {
        "chosen": jnp.where(is_emitted, chosen, 0),
        "top_ids": jnp.where(is_emitted[:, :, None], ids, 0),
        "top_values": jnp.where(is_emitted[:, :, None], values, 0),
    }
