"""ASSISTANT drafter: a Gemma 4 assistant; same as `shared.spec.assistant`.

It reads the pools of the target, which a step passes as those of its state, and writes none.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shared.drafts.config import DraftStateSizes
from shared.models.groups import places_in_target
from shared.spec.draft_tree import TreeShape
from torch_impl import model
from torch_impl.device_state import DraftInput, DraftState, Plan
from torch_impl.drafters import DraftRequests, DraftTrees, ExtendRows, PrefillChunks, Ranking
from torch_impl.drafters.eagle import first_of, grow
from torch_impl.drafters.heads import Tokens
from torch_impl.layers import Hidden
from torch_impl.model import Model, embedding_factor, lm_head_input
from torch_impl.model_weights import AssistantWeights, Weights
from torch_impl.ops.attention.attention import AttentionRows, Pools, WindowPageTables
from torch_impl.ops.collectives import all_gather
from torch_impl.ops.gemm.layers import embed_tokens
from torch_impl.ops.gemm.linear import product
from torch_impl.ops.sampling.lm_head import Projection

TargetHidden = Float[Tensor, "R target_hidden"]
"""Hidden states of the target's width."""


@dataclass(frozen=True)
class Assistant:
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
    ) -> Hidden:
        """Runs the assistant over rows; returns its hidden states after the final norm."""
        target, embed = self.target, self.target.weights.embed
        factor = embedding_factor(target.config, embed)
        embedded = embed_tokens(embed, tokens, None, factor)
        x = product(torch.cat([embedded, hidden], dim=1), self.weights.fc)
        x = all_gather.all_gather(target.group, x)
        return model.run_layers(self.layers, x, None, rows, kv, None, ()).hidden

    def carried(self, hidden: Hidden) -> TargetHidden:
        """Returns the hidden states for the next level from the outputs of `forward`."""
        return all_gather.all_gather(self.target.group, product(hidden, self.weights.post))

    def projected(self, hidden: Hidden) -> Projection:
        """Returns the LM-head projection of this rank's shard from the outputs of `forward`."""
        return replace(lm_head_input(self.layers, hidden), clusters=self.weights.clusters)


@dataclass(frozen=True)
class AssistantDrafter:
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
    ) -> None:
        self._extend(memory, plan, committed, rank)

    def extend(
        self,
        memory: DraftState,
        plan: Plan,
        before: Int[Tensor, " B"],
        counts: Int[Tensor, " B"],
        committed: ExtendRows,
        rank: Ranking,
    ) -> None:
        self._extend(memory, plan, committed, rank)

    def _extend(self, memory: DraftState, plan: Plan, committed: ExtendRows, rank: Ranking) -> None:
        new, held = relay_of(self.assistant, memory.kv, plan, committed, rank), memory.relay
        assert held is not None  # an assistant has a relay
        held.put(plan.slots, new)

    def draft(
        self, memory: DraftState, requests: DraftRequests, shape: TreeShape, rank: Ranking
    ) -> DraftTrees:
        return draft(self.assistant, memory.kv, requests, shape, rank)


def reading_rows(
    until: Int[Tensor, " B"],
    page_table: Int[Tensor, "B table"],
    window_page_tables: WindowPageTables,
    width: int,
) -> AttentionRows:
    """Returns `width` rows for each request, all at its last committed position."""
    B, device = len(until), until.device
    request = torch.arange(B, device=device).repeat_interleave(width)
    until = until[request]
    position = (until - 1).clamp(min=0)
    return AttentionRows(
        request=request,
        positions=position,
        places=position,
        first=torch.zeros_like(until),
        until=until,
        window=torch.zeros(len(until), 0, dtype=torch.bool, device=device),
        is_real=until > 0,
        page_table=page_table,
        row_starts=width * torch.arange(B + 1, dtype=torch.int32, device=device),
        max_rows=width,
        window_page_tables=window_page_tables,
    )


def relay_of(
    assistant: Assistant, kv: Pools, plan: Plan, committed: ExtendRows, rank: Ranking
) -> DraftInput:
    """Returns the relay of each request, from the last of its committed rows."""
    last, rows = committed.last, committed.rows
    is_real = rows.is_real[last] & (plan.slots != 0)
    until = torch.where(is_real, rows.positions[last] + 1, 0)
    own = reading_rows(until, plan.page_table, plan.window_page_tables, 1)
    hidden = committed.passed.hidden[last]
    ends = assistant.forward(own, committed.following[last], hidden, kv)
    ranked = rank.roots(assistant.projected(ends))
    return DraftInput(ranked.ids[:, 0], ranked.weights[:, 0], ends)


def draft(
    assistant: Assistant, kv: Pools, requests: DraftRequests, shape: TreeShape, rank: Ranking
) -> DraftTrees:
    """Builds one draft tree per request; see `eagle.draft`."""
    relay = requests.relay
    assert relay is not None  # an assistant has a relay
    hidden = relay.hidden
    until = torch.where(requests.can_draft, requests.lengths, 0)
    rows = reading_rows(until, requests.page_table, requests.window_page_tables, shape.width)

    def expand(_: AttentionRows, tokens: Tokens, parent: Int[Tensor, " R"]) -> Projection:
        nonlocal hidden
        hidden = assistant.forward(rows, tokens, assistant.carried(hidden[parent]), kv)
        return assistant.projected(hidden)

    first = first_of(assistant.projected, relay, shape, rank)
    return grow(expand, first, requests, shape, rank, root_rows=0)
