"""Steps of decoding: draft, verify, accept, commit and draft-extend."""

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jax_impl import device_state, layers, model
from jax_impl.device_state import DeviceState
from jax_impl.drafters import Fed, Ranking, eagle
from jax_impl.machine import Fields, Machine, logprobs_of
from jax_impl.ops import acceptance, attention, draft_tree, mamba_state, sampling
from jax_impl.ops.mamba_state import DeltaState
from jax_impl.rejection import choose, draft_noise, rejects
from shared.boundary.backend import Program


class Trees(NamedTuple):
    """The draft tree of each row.

    Attributes:
      drafted: Processed logits that a chain's drafts were sampled from; None: they were not.
    """

    tokens: Int[jax.Array, "B N"]
    parents: Int[jax.Array, "B N"]
    num_nodes: Int[jax.Array, " B"]
    forced: Bool[jax.Array, " B"]
    drafted: Float[jax.Array, "B S vocab"] | None

    def fields(self) -> Fields:
        """As the result names them."""
        return {"drafts": self.tokens, "parents": self.parents, "num_nodes": self.num_nodes}


def draft(
    program: Program, machine: Machine, state: DeviceState, plan: SimpleNamespace
) -> tuple[DeviceState, Fields]:
    """Drafts and ranks; writes nothing but draft KV past the lengths."""
    noise = _noise(program, machine, state, plan)
    trees, state = _grown(program, machine, state, plan, noise)
    return state, trees.fields()


def _noise(
    program: Program, machine: Machine, state: DeviceState, plan: SimpleNamespace
) -> Float[jax.Array, "B levels vocab"]:
    """The noise of every position that the step chooses or drafts at, from the newest's next on.

    Where drafts are sampled, it is the noise of their levels, and of nothing else.
    """
    if rejects(machine, program):
        return draft_noise(machine, plan, program, state.lengths[plan.slots])
    depth = program.shape.depth
    levels = depth + 1 + (machine.has_relay and depth > 0)
    first = state.lengths[plan.slots] + 1
    return sampling.gumbel_levels(plan.sampling, first, levels, machine.limits.vocab)


def _grown(
    program: Program,
    machine: Machine,
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
        return Trees(tokens, plan.draft_tree_parents, num_nodes, forced, None), state
    if program.shape.is_plain:
        return _roots(newest), state
    kept = [] if rejects(machine, program) else None
    ranking = Ranking(plan.sampling, state.seen[slots], state.lengths[slots], kept)
    drafting = (state.draft, plan, newest, program.shape, ranking, noise)
    grown, memory = machine.drafter.draft(*drafting)
    drafted = None if kept is None else jnp.stack(kept, axis=1)
    trees = Trees(*grown, jnp.zeros(len(newest), bool), drafted)
    return trees, state._replace(draft=memory)


def _roots(newest: Int[jax.Array, " B"]) -> Trees:
    """Trees of one node."""
    parents = jnp.zeros((len(newest), 1), jnp.int32)
    no_row = jnp.zeros(len(newest), bool)
    return Trees(newest[:, None], parents, jnp.ones_like(newest), no_row, None)


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
    program: Program, machine: Machine, state: DeviceState, plan: SimpleNamespace, trees: Trees
) -> Verified:
    """Runs the target over all nodes; no slot's state changes."""
    shape, lengths = program.shape, state.lengths[plan.slots]
    is_chain = _is_chain(program)
    rows, node = attention.tree_rows(
        trees.parents, trees.num_nodes, lengths, plan.page_table, shape.rows, is_chain
    )
    row_of = draft_tree.flat_rows(rows.row_starts, trees.num_nodes, shape.nodes)
    mixer = None
    if state.delta is not None:
        stack = machine.weights.layers.gated_delta
        delta = device_state.take(state.delta, plan.slots)
        if shape.is_plain:
            mixer = layers.Single(machine.config, stack, delta)
        else:
            parents = None if is_chain else trees.parents
            mixer = layers.Tree(machine.config, stack, delta, parents, row_of, rows.request, node)
    tokens = trees.tokens[rows.request, node]
    passed = model.forward(machine.config, machine.weights, state.kv, rows, tokens, mixer)
    logits = model.logits(machine.weights, passed.hidden)
    return Verified(passed, logits, row_of, rows.request, node, rows.positions, mixer)


def _is_chain(program: Program) -> bool:
    """Whether every tree is a chain; a plan's own trees may be anything."""
    return program.shape.width <= 1 and not program.host_draft


def _choices(
    machine: Machine,
    plan: SimpleNamespace,
    state: DeviceState,
    trees: Trees,
    verified: Verified,
    noise: Float[jax.Array, "B levels vocab"],
) -> Int[jax.Array, "B N"]:
    """The token after each node."""
    request, node = verified.request, verified.node
    lengths = state.lengths[plan.slots]

    def seen() -> Int[jax.Array, "R vocab"]:
        on_path = draft_tree.ancestors(trees.parents).at[:, :, 0].set(False)[request, node]
        return sampling.seen_along(state.seen[plan.slots][request], trees.tokens[request], on_path)

    how = plan.sampling.rows(request)
    positions = verified.positions + 1
    scores = sampling.processed_after(verified.logits, seen, positions, how, None)
    if trees.drafted is not None:
        chain = (trees.tokens, trees.num_nodes, trees.drafted)
        return choose(machine, plan, *chain, scores[verified.row_of], lengths)
    level = jnp.clip(verified.positions - lengths[request], 0, noise.shape[1] - 1)
    chosen = sampling.choose(scores, noise[request, level], how.temperature)
    return chosen[verified.row_of]


def decode(
    program: Program, machine: Machine, state: DeviceState, plan: SimpleNamespace
) -> tuple[DeviceState, Fields]:
    noise = _noise(program, machine, state, plan)
    trees, state = _grown(program, machine, state, plan, noise)
    verified = _verified(program, machine, state, plan, trees)
    choices = _choices(machine, plan, state, trees, verified, noise)
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
    if machine.drafter is not None:
        on_path = jnp.take_along_axis(verified.row_of, path, axis=1).reshape(-1)
        own = jnp.take_along_axis(trees.tokens, path, axis=1).reshape(-1)
        fed = (verified.passed.at(on_path), own, tokens)
        state = _extended(program, machine, state, plan, before, counts, *fed, noise)
    result = {"tokens": tokens, "counts": counts, "failed": failed, "saved": saved}
    result |= trees.fields()
    if program.logprobs:
        on_path = jnp.take_along_axis(verified.row_of, path, axis=1)
        top = machine.limits.max_logprobs
        result |= logprobs_of(verified.logits[on_path], tokens, counts, top)
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
    if not _is_chain(program):
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
    machine: Machine,
    state: DeviceState,
    plan: SimpleNamespace,
    before: Int[jax.Array, " B"],
    counts: Int[jax.Array, " B"],
    passed: model.Forward,
    own: Int[jax.Array, " R"],
    tokens: Int[jax.Array, "B W"],
    noise: Float[jax.Array, "B levels vocab"],
) -> DeviceState:
    """Feeds the accepted path to the drafter; a plain step leaves a hole in its KV instead.

    Args:
      passed: The target's pass over the path's B * W rows.
      own: The tokens of those rows; `tokens` follow them.
    """
    slots, lengths = plan.slots, state.lengths[plan.slots]
    if program.shape.is_plain:
        start = state.draft.start.at[slots].set(lengths)
        return state._replace(draft=state.draft._replace(start=start))
    start = state.draft.start[slots]
    rows, last = eagle.extend_rows(before, counts, start, plan.page_table, tokens.shape[1])
    fed = Fed(rows, own, tokens.reshape(-1), passed, last)
    ranking = Ranking(plan.sampling, state.seen[slots], lengths, None)
    # Without a relay nothing is ranked, and a path as deep as the tree has no noise after it.
    after = noise[jnp.arange(len(counts)), jnp.minimum(counts, noise.shape[1] - 1)]
    extended = machine.drafter.extend(state.draft, plan, before, counts, fed, ranking, after)
    return state._replace(draft=extended)
