"""STANDALONE drafter: a small draft model; same as `shared.spec.standalone`."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shared.drafts.config import DraftStateSizes
from shared.spec.draft_tree import TreeShape
from torch_impl import model
from torch_impl.device_state import DraftState, Plan
from torch_impl.drafters import DraftRequests, DraftTrees, ExtendRows, PrefillChunks, Ranking
from torch_impl.drafters.eagle import FirstLevel, extend_rows, grow
from torch_impl.drafters.heads import Tokens
from torch_impl.layers import PrefillMixer, RecurrentMixer, VerifyMixer
from torch_impl.model import Model
from torch_impl.ops.attention.attention import AttentionRows
from torch_impl.ops.recurrent import recurrent_layer, recurrent_state
from torch_impl.ops.recurrent.recurrent_layer import TreeNodes
from torch_impl.ops.recurrent.recurrent_state import RecurrentState
from torch_impl.ops.sampling.lm_head import Projection


@dataclass(frozen=True)
class StandaloneDrafter:
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
    ) -> None:
        if memory.delta is None or memory.snapshots is None:
            self._forward(memory, committed.rows, committed.tokens, None)
            return
        recurrent_layer.put(memory.delta, plan.slots, _context(memory, plan.slots, prompts.first))
        save_after = plan.save_at - prompts.first
        is_saved = recurrent_state.ends_chunk(save_after, prompts.lengths - prompts.first)
        save = torch.where(is_saved, plan.save, 0)
        pools, where = (
            (memory.delta, memory.snapshots),
            (prompts.row_starts, committed.rows.request),
        )
        small = self.small
        mixer = PrefillMixer(
            small.config, small.group, *pools, plan.slots, *where, save_after, save
        )
        self._forward(memory, committed.rows, committed.tokens, mixer)

    def extend(
        self,
        memory: DraftState,
        plan: Plan,
        before: Int[Tensor, " B"],
        counts: Int[Tensor, " B"],
        committed: ExtendRows,
        rank: Ranking,
    ) -> None:
        if memory.delta is None or memory.snapshots is None:
            self._forward(memory, committed.rows, committed.tokens, None)
            return
        recurrent_layer.put(memory.delta, plan.slots, _context(memory, plan.slots, before))
        B, W = len(counts), len(committed.tokens) // len(counts)
        place = torch.arange(W, dtype=torch.int32, device=counts.device).expand(B, W)
        row_of = torch.arange(B * W, device=counts.device).view(B, W)
        rows, node = committed.rows, place.flatten().long()
        nodes = TreeNodes(None, rows.row_starts, row_of, rows.request, node)
        small = self.small
        mixer = VerifyMixer(small.config, small.group, memory.delta, plan.slots, nodes, False)
        self._forward(memory, rows, committed.tokens, mixer)
        mixer.commit(memory.snapshots, place, counts, plan.save_at - before, plan.save)

    def draft(
        self, memory: DraftState, requests: DraftRequests, shape: TreeShape, rank: Ranking
    ) -> DraftTrees:
        rank = replace(rank, vocabulary=self.small.vocabulary)
        states = None
        if memory.delta is not None:
            states = _context(memory, requests.slots, requests.lengths)

        def expand(rows: AttentionRows, tokens: Tokens, parent: Int[Tensor, " R"]) -> Projection:
            nonlocal states
            mixer = None
            if states is not None:
                states = recurrent_layer.take(states, parent)
                starts = torch.arange(len(tokens) + 1, dtype=torch.int32, device=tokens.device)
                request = starts[:-1]
                nodes = TreeNodes(None, starts, request[:, None], request, 0 * request)
                small = self.small
                mixer = VerifyMixer(small.config, small.group, states, request, nodes, True)
            hidden = self._forward(memory, rows, tokens, mixer)
            states = None if mixer is None else mixer.advanced
            return model.lm_head_input(self.small, hidden)

        counts, newest = requests.can_draft.int(), requests.newest
        draft_from, table = requests.draft_from, requests.page_table
        rows = extend_rows(requests.lengths, counts, draft_from, table, depth=0)
        scored = expand(rows, newest, torch.arange(len(newest), device=newest.device))
        first = FirstLevel.of(rank.roots(scored))
        return grow(expand, first, requests, shape, rank, root_rows=1)

    def _forward(
        self, memory: DraftState, rows: AttentionRows, tokens: Tokens, mixer: RecurrentMixer | None
    ) -> Float[Tensor, "R hidden"]:
        known = tokens.clamp(max=self.small.config.vocab - 1)
        # The draft model is text-only, also with a VLM as target.
        rows = replace(rows, mrope_positions=None)
        return model.forward(self.small, known, None, rows, memory.kv, mixer, ()).hidden


def _context(
    memory: DraftState, slots: Int[Tensor, " B"], lengths: Int[Tensor, " B"]
) -> RecurrentState:
    """Same as `shared.spec.standalone.context_of`, for the states of the slots."""
    is_whole = (memory.draft_from[slots] < lengths).view(1, -1, 1, 1)
    assert memory.delta is not None  # a draft model with GDN layers
    held = recurrent_layer.take(memory.delta, slots)
    recurrent = torch.where(is_whole[..., None], held.recurrent, 0)
    return RecurrentState(recurrent, torch.where(is_whole, held.window, 0))
