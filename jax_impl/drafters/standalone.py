"""STANDALONE drafter: a small draft model; same as `shared.spec.standalone`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int

from jax_impl import model
from jax_impl.device_state import DraftState, Plan, select
from jax_impl.drafters import DraftRequests, DraftTrees, ExtendRows, PrefillChunks, Ranking
from jax_impl.drafters.eagle import Carried, Expand, FirstLevel, extend_rows, grow
from jax_impl.drafters.heads import Tokens
from jax_impl.layers import PrefillMixer, RecurrentMixer, VerifyMixer
from jax_impl.model import Forward, Model
from jax_impl.ops.attention.attention import AttentionRows, Pools
from jax_impl.ops.recurrent import recurrent_layer, recurrent_state
from jax_impl.ops.recurrent.recurrent_layer import TreeNodes
from jax_impl.ops.recurrent.recurrent_state import RecurrentState
from jax_impl.ops.sampling.lm_head import Projection
from shared.drafts.config import DraftStateSizes
from shared.spec.draft_tree import TreeShape


class StandaloneDrafter(NamedTuple):
    """Drafter with a small draft model."""

    small: Model

    @property
    def streams(self) -> tuple[int, ...]:
        return ()

    @property
    def sizes(self) -> DraftStateSizes:
        return DraftStateSizes.of_model(self.small.config)

    def prefill(
        self,
        memory: DraftState,
        plan: Plan,
        prompts: PrefillChunks,
        committed: ExtendRows,
        rank: Ranking,
    ) -> DraftState:
        if memory.delta is None or memory.snapshots is None:
            return self._without_states(memory, committed)
        pools = (_in_slots(memory, plan.slots, prompts.first), memory.snapshots)
        save_after = plan.save_at - prompts.first
        is_saved = recurrent_state.ends_chunk(save_after, prompts.lengths - prompts.first)
        where = (plan.slots, prompts.row_starts, committed.rows.request)
        save = jnp.where(is_saved, plan.save, 0)
        small = self.small
        mixer = PrefillMixer(small.config, small.group, *pools, *where, save_after, save)
        kv = self._forward(memory.kv, committed.rows, committed.tokens, mixer).kv
        delta, snapshots = mixer.carry
        return memory._replace(kv=kv, delta=delta, snapshots=snapshots)

    def extend(
        self,
        memory: DraftState,
        plan: Plan,
        before: Int[jax.Array, " B"],
        counts: Int[jax.Array, " B"],
        committed: ExtendRows,
        rank: Ranking,
    ) -> DraftState:
        if memory.delta is None or memory.snapshots is None:
            return self._without_states(memory, committed)
        B, W = len(counts), len(committed.tokens) // len(counts)
        place = jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32), (B, W))
        row_of = jnp.arange(B * W, dtype=jnp.int32).reshape(B, W)
        nodes = TreeNodes(
            None, committed.rows.row_starts, row_of, committed.rows.request, place.reshape(-1)
        )
        states = _in_slots(memory, plan.slots, before)
        small = self.small
        mixer = VerifyMixer(small.config, small.group, states, plan.slots, nodes, False)
        kv = self._forward(memory.kv, committed.rows, committed.tokens, mixer).kv
        save = (plan.save_at - before, plan.save)
        delta, snapshots = mixer.commit(memory.snapshots, place, counts, *save)
        return memory._replace(kv=kv, delta=delta, snapshots=snapshots)

    def draft(
        self, memory: DraftState, requests: DraftRequests, shape: TreeShape, rank: Ranking
    ) -> tuple[DraftTrees, DraftState]:
        rank = rank._replace(vocabulary=self.small.vocabulary)
        states = None
        if memory.delta is not None:
            states = _context(memory, requests.slots, requests.lengths)

        def run(
            rows: AttentionRows, tokens: Tokens, states: Carried, kv: Pools
        ) -> tuple[Projection, Carried, Pools]:
            mixer = None
            if states is not None:
                starts = jnp.arange(len(tokens) + 1, dtype=jnp.int32)
                request = starts[:-1]
                nodes = TreeNodes(None, starts, request[:, None], request, 0 * request)
                small = self.small
                mixer = VerifyMixer(small.config, small.group, states, request, nodes, True)
            passed = self._forward(kv, rows, tokens, mixer)
            scored = model.lm_head_input(self.small, passed.hidden)
            return scored, None if mixer is None else mixer.advanced, passed.kv

        def pick(states: Carried, rows: Int[jax.Array, " R"]) -> Carried:
            return None if states is None else recurrent_layer.take(states, rows)

        counts = requests.can_draft.astype(jnp.int32)
        draft_from, table = requests.draft_from, requests.page_table
        rows = extend_rows(requests.lengths, counts, draft_from, table, depth=0)
        scored, states, kv = run(rows, requests.newest, states, memory.kv)
        expand, first = Expand(run, pick, states), FirstLevel.of(rank.roots(scored))
        drafted, kv = grow(expand, kv, first, requests, shape, rank, root_rows=1)
        return drafted, memory._replace(kv=kv)

    def _without_states(self, memory: DraftState, committed: ExtendRows) -> DraftState:
        """Extends a draft model without GDN states."""
        return memory._replace(
            kv=self._forward(memory.kv, committed.rows, committed.tokens, None).kv
        )

    def _forward(
        self, kv: Pools, rows: AttentionRows, tokens: Tokens, mixer: RecurrentMixer | None
    ) -> Forward:
        known = jnp.minimum(tokens, self.small.config.vocab - 1)
        # The draft model is text-only, also with a VLM as target.
        rows = rows._replace(mrope_positions=None)
        return model.forward(self.small, known, None, rows, kv, mixer, ())


def _context(
    memory: DraftState, slots: Int[jax.Array, " B"], lengths: Int[jax.Array, " B"]
) -> RecurrentState:
    """Same as `shared.spec.standalone.context_of`, for the states of the slots."""
    assert memory.delta is not None  # a draft model with GDN layers
    held = recurrent_layer.take(memory.delta, slots)
    is_whole = memory.draft_from[slots] < lengths
    return select(is_whole, held, jax.tree.map(jnp.zeros_like, held))


def _in_slots(
    memory: DraftState, slots: Int[jax.Array, " B"], lengths: Int[jax.Array, " B"]
) -> RecurrentState:
    """Returns the states of all slots; those in the plan are the states of their context."""
    assert memory.delta is not None  # a draft model with GDN layers
    return recurrent_layer.put(memory.delta, slots, _context(memory, slots, lengths))
