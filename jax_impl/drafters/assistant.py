"""ASSISTANT drafter: a Gemma 4 assistant; same as `shared.spec.assistant`.

It reads the pools of the target, which a step passes as those of its state, and writes none.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jax_impl import model
from jax_impl.device_state import DraftInput, DraftState, Plan
from jax_impl.drafters import DraftRequests, DraftTrees, ExtendRows, PrefillChunks, Ranking
from jax_impl.drafters.eagle import Carried, Expand, first_of, grow
from jax_impl.drafters.heads import Tokens
from jax_impl.layers import Hidden
from jax_impl.model import Model, embedding_factor, lm_head_input
from jax_impl.model_weights import AssistantWeights, Weights
from jax_impl.ops.attention.attention import AttentionRows, Pools, WindowPageTables
from jax_impl.ops.collectives import all_gather
from jax_impl.ops.gemm.layers import embed_tokens
from jax_impl.ops.gemm.linear import product
from jax_impl.ops.sampling.lm_head import Projection
from shared.drafts.config import DraftStateSizes
from shared.models.groups import places_in_target
from shared.spec.draft_tree import TreeShape

TargetHidden = Float[jax.Array, "R target_hidden"]
"""Hidden states of the target's width."""


class Assistant(NamedTuple):
    """Assistant with its target.

    Attributes:
      target: The target, for the embedding.
      layers: The layers as a model that reads the pools of the target.
      weights: Weights beside the layers.
    """

    target: Model
    layers: Model
    weights: AssistantWeights

    @classmethod
    def of(cls, target: Model, own: AssistantWeights) -> "Assistant":
        """Builds the assistant from its weights."""
        config = own.config.layer
        places = places_in_target(config.places, target.config.places, own.config.kv_layers)
        weights = Weights(
            embed=target.weights.embed,
            lm_head=own.lm_head,
            final_norm=own.final_norm,
            layers=own.layers,
            mtp=None,
            draft_rows=None,
            per_layer=None,
        )
        return cls(target, Model.reading(config, weights, target.group, places), own)

    def forward(
        self, rows: AttentionRows, tokens: Tokens, hidden: TargetHidden, kv: Pools
    ) -> tuple[Hidden, Pools]:
        """Runs the assistant over rows; returns its hidden states after the final norm.

        Kernels return the pools too, in the same memory.
        """
        target, embed = self.target, self.target.weights.embed
        factor = embedding_factor(target.config, embed)
        embedded = embed_tokens(embed, tokens, None, factor)
        x = product(jnp.concatenate([embedded, hidden], axis=1), self.weights.fc)
        x = all_gather.all_gather(target.group, x)
        passed = model.run_layers(self.layers, x, None, rows, kv, None, ())
        return passed.hidden, passed.kv

    def carried(self, hidden: Hidden) -> TargetHidden:
        """Returns the hidden states for the next level from the outputs of `forward`."""
        return all_gather.all_gather(self.target.group, product(hidden, self.weights.post))

    def projected(self, hidden: Hidden) -> Projection:
        """Returns the LM-head projection of this rank's shard from the outputs of `forward`."""
        return lm_head_input(self.layers, hidden)._replace(clusters=self.weights.clusters)


class AssistantDrafter(NamedTuple):
    """Drafter with an assistant."""

    assistant: Assistant

    @classmethod
    def of(cls, target: Model, weights: AssistantWeights) -> "AssistantDrafter":
        """Builds the drafter from its weights and its target."""
        return cls(Assistant.of(target, weights))

    @property
    def streams(self) -> tuple[int, ...]:
        return ()

    @property
    def sizes(self) -> DraftStateSizes:
        return self.assistant.weights.config.sizes

    def prefill(
        self,
        memory: DraftState,
        plan: Plan,
        prompts: PrefillChunks,
        committed: ExtendRows,
        rank: Ranking,
    ) -> DraftState:
        return self._extend(memory, plan, committed, rank)

    def extend(
        self,
        memory: DraftState,
        plan: Plan,
        before: Int[jax.Array, " B"],
        counts: Int[jax.Array, " B"],
        committed: ExtendRows,
        rank: Ranking,
    ) -> DraftState:
        return self._extend(memory, plan, committed, rank)

    def _extend(
        self, memory: DraftState, plan: Plan, committed: ExtendRows, rank: Ranking
    ) -> DraftState:
        assert memory.relay is not None  # an assistant has a relay
        new, kv = relay_of(self.assistant, memory.kv, plan, committed, rank)
        return memory._replace(kv=kv, relay=memory.relay.put(plan.slots, new))

    def draft(
        self, memory: DraftState, requests: DraftRequests, shape: TreeShape, rank: Ranking
    ) -> tuple[DraftTrees, DraftState]:
        drafted, kv = draft(self.assistant, memory.kv, requests, shape, rank)
        return drafted, memory._replace(kv=kv)


def reading_rows(
    until: Int[jax.Array, " B"],
    page_table: Int[jax.Array, "B table"],
    window_page_tables: WindowPageTables,
    width: int,
) -> AttentionRows:
    """Returns `width` rows for each request, all at its last committed position."""
    request = jnp.repeat(jnp.arange(len(until), dtype=jnp.int32), width)
    row_starts = width * jnp.arange(len(until) + 1, dtype=jnp.int32)
    until = until[request]
    position = jnp.maximum(until - 1, 0)
    return AttentionRows(
        request=request,
        positions=position,
        places=position,
        first=jnp.zeros_like(until),
        until=until,
        window=jnp.zeros((len(until), 0), bool),
        is_real=until > 0,
        page_table=page_table,
        row_starts=row_starts,
        max_rows=width,
        window_page_tables=window_page_tables,
    )


def relay_of(
    assistant: Assistant, kv: Pools, plan: Plan, committed: ExtendRows, rank: Ranking
) -> tuple[DraftInput, Pools]:
    """Returns the relay of each request, from the last of its committed rows."""
    last, rows = committed.last, committed.rows
    is_real = rows.is_real[last] & (plan.slots != 0)
    until = jnp.where(is_real, rows.positions[last] + 1, 0)
    own = reading_rows(until, plan.page_table, plan.window_page_tables, 1)
    hidden = committed.passed.hidden[last]
    ends, kv = assistant.forward(own, committed.following[last], hidden, kv)
    ranked = rank.roots(assistant.projected(ends))
    return DraftInput(ranked.ids[:, 0], ranked.weights[:, 0], ends), kv


def draft(
    assistant: Assistant, kv: Pools, requests: DraftRequests, shape: TreeShape, rank: Ranking
) -> tuple[DraftTrees, Pools]:
    """Builds one draft tree per request; see `eagle.draft`."""
    relay = requests.relay
    assert relay is not None  # an assistant has a relay
    until = jnp.where(requests.can_draft, requests.lengths, 0)
    rows = reading_rows(until, requests.page_table, requests.window_page_tables, shape.width)

    def run(
        _: AttentionRows, tokens: Tokens, hidden: Carried, kv: Pools
    ) -> tuple[Projection, Carried, Pools]:
        out, kv = assistant.forward(rows, tokens, assistant.carried(hidden), kv)
        return assistant.projected(out), out, kv

    def pick(hidden: Carried, parents: Int[jax.Array, " R"]) -> Carried:
        return hidden[parents]

    expand, first = (
        Expand(run, pick, relay.hidden),
        first_of(assistant.projected, relay, shape, rank),
    )
    return grow(expand, kv, first, requests, shape, rank, root_rows=0)
