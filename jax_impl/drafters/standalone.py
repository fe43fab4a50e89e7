"""A whole small model drafts; as `shared.spec.standalone`."""

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jax_impl import device_state, model
from jax_impl.device_state import DraftState, Held
from jax_impl.drafters import Fed, Ranking, Trees
from jax_impl.drafters.eagle import Carried, extend_rows, grow
from jax_impl.drafters.heads import Logits, Tokens
from jax_impl.layers import KV, Chunks, Single, Tree
from jax_impl.ops import mamba_state
from jax_impl.ops.attention import Rows
from jax_impl.ops.mamba_state import DeltaState
from jax_impl.weights import Model
from shared.drafts.config import DraftSizes
from shared.models.config import ModelConfig
from shared.spec.draft_tree import TreeShape
from shared.spec.gated_delta import CHUNK


class StandaloneDrafter(NamedTuple):
    """A `jax_impl.drafters.Drafter` made of a small model.

    Attributes:
      target_vocab: Of the model it drafts for.
    """

    config: ModelConfig
    weights: Model
    target_vocab: int

    @property
    def sizes(self) -> DraftSizes:
        """See `Drafter`."""
        return DraftSizes.of_model(self.config)

    def prefill(
        self,
        memory: DraftState,
        plan: SimpleNamespace,
        held: Held,
        fed: Fed,
        ranking: Ranking,
        noise: Float[jax.Array, "B vocab"],
    ) -> DraftState:
        """See `Drafter`."""
        if held.draft_delta is None:
            return self._without_states(memory, fed)
        first = plan.first_positions
        before = _context(held.draft_delta, memory.start[plan.slots], first)
        num_tokens, save_after = plan.row_starts[1:] - plan.row_starts[:-1], plan.save_at - first
        stack, where = self.weights.layers.gated_delta, (plan.row_starts, save_after)
        mixer = Chunks(self.config, stack, before, fed.rows.request, *where)
        kv = self._forward(memory.kv, fed.rows, fed.tokens, mixer).kv
        is_taken = (save_after > 0) & (save_after <= num_tokens)
        is_taken &= (save_after % CHUNK == 0) | (save_after == num_tokens)
        return _kept(memory, plan, kv, mixer.after(), mixer.saved(), is_taken)

    def extend(
        self,
        memory: DraftState,
        plan: SimpleNamespace,
        before: Int[jax.Array, " B"],
        counts: Int[jax.Array, " B"],
        fed: Fed,
        ranking: Ranking,
        noise: Float[jax.Array, "B vocab"],
    ) -> DraftState:
        """See `Drafter`."""
        if memory.delta is None:
            return self._without_states(memory, fed)
        B, W = len(counts), len(fed.tokens) // len(counts)
        place = jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32), (B, W))
        row_of = jnp.arange(B * W, dtype=jnp.int32).reshape(B, W)
        slots, stack = plan.slots, self.weights.layers.gated_delta
        held = _context(device_state.take(memory.delta, slots), memory.start[slots], before)
        where = (row_of, fed.rows.request, place.reshape(-1))
        mixer = Tree(self.config, stack, held, None, *where)
        kv = self._forward(memory.kv, fed.rows, fed.tokens, mixer).kv
        moves = (mixer.kept(), place, counts, plan.save_at - before)
        return _kept(memory, plan, kv, *mamba_state.replay(held, *moves))

    def draft(
        self,
        memory: DraftState,
        plan: SimpleNamespace,
        newest: Int[jax.Array, " B"],
        shape: TreeShape,
        ranking: Ranking,
        noise: Float[jax.Array, "B levels vocab"],
    ) -> tuple[Trees, DraftState]:
        """See `Drafter`."""
        start, lengths = memory.start[plan.slots], ranking.lengths
        states = None
        if memory.delta is not None:
            states = _context(device_state.take(memory.delta, plan.slots), start, lengths)

        def expand(
            rows: Rows, tokens: Tokens, states: Carried, kv: KV
        ) -> tuple[Logits, Carried, KV]:
            mixer = None
            if states is not None:
                mixer = Single(self.config, self.weights.layers.gated_delta, states)
            passed = self._forward(kv, rows, tokens, mixer)
            logits = over_target(model.logits(self.weights, passed.hidden), self.target_vocab)
            return logits, mixer and mixer.after(), passed.kv

        def pick(states: Carried, rows: Int[jax.Array, " R"]) -> Carried:
            return states and device_state.take(states, rows)

        can_draft = (start < lengths).astype(jnp.int32)
        rows, _ = extend_rows(lengths, can_draft, start, plan.page_table, 1)
        logits, states, kv = expand(rows, newest, states, memory.kv)
        no_path = jnp.zeros((len(newest), 1, 0), jnp.int32)
        ids, weights = ranking.rank(logits[:, None], no_path, 0, noise[:, 0], shape.width)
        first, bounds = (ids[:, 0], weights[:, 0]), (start, plan.page_table)
        how = (shape, ranking, noise, 1)
        trees, kv = grow(expand, pick, states, kv, first, newest, *bounds, *how)
        return trees, memory._replace(kv=kv)

    def _without_states(self, memory: DraftState, fed: Fed) -> DraftState:
        """Extends a model that has nothing but KV."""
        return memory._replace(kv=self._forward(memory.kv, fed.rows, fed.tokens, None).kv)

    def _forward(
        self, kv: KV, rows: Rows, tokens: Tokens, mixer: Chunks | Single | Tree | None
    ) -> model.Forward:
        known = jnp.minimum(tokens, self.config.vocab - 1)
        return model.forward(self.config, self.weights, kv, rows, known, mixer)


def over_target(
    logits: Float[jax.Array, "R draft_vocab"], vocab: int
) -> Float[jax.Array, "R vocab"]:
    """As the specification."""
    missing = max(vocab - logits.shape[1], 0)
    return jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf)[:, :vocab]


def _context(
    held: DeltaState, start: Int[jax.Array, " B"], lengths: Int[jax.Array, " B"]
) -> DeltaState:
    """As `shared.spec.standalone.context_of`."""
    return device_state.select(start < lengths, held, jax.tree.map(jnp.zeros_like, held))


def _kept(
    memory: DraftState,
    plan: SimpleNamespace,
    kv: KV,
    after: DeltaState,
    saved: DeltaState,
    is_taken: Bool[jax.Array, " B"],
) -> DraftState:
    """The memory with new states, and with the snapshots that were taken."""
    assert memory.delta is not None  # there are states to write
    assert memory.snapshots is not None
    places = jnp.where(is_taken & (plan.save != 0), plan.save, 0)
    delta = device_state.put(memory.delta, plan.slots, after)
    snapshots = device_state.put(memory.snapshots, places, saved)
    return memory._replace(kv=kv, delta=delta, snapshots=snapshots)
