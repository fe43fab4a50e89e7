"""As `shared.spec.standalone`, in torch: a whole small model drafts."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.drafts.config import DraftSizes
from shared.spec.draft_tree import TreeShape
from torch_impl import model
from torch_impl.device_state import DeviceState, Plan, Prompts
from torch_impl.drafters import Fed, Grown, Rank
from torch_impl.drafters.eagle import extend_rows, grow
from torch_impl.drafters.heads import Logits, Tokens
from torch_impl.layers import Chunks, DeltaMixer, OneToken, Tree
from torch_impl.model import Model
from torch_impl.ops import mamba_state
from torch_impl.ops.attention import Rows
from torch_impl.ops.mamba_state import DeltaState


@dataclass(frozen=True)
class StandaloneDrafter:
    """A `torch_impl.drafters.Drafter` made of a small model.

    Attributes:
      target_vocab: Of the model it drafts for.
    """

    small: Model
    target_vocab: int

    @property
    def streams(self) -> tuple[int, ...]:
        """See `Drafter`."""
        return ()

    @property
    def sizes(self) -> DraftSizes:
        """See `Drafter`."""
        return DraftSizes.of_model(self.small.config)

    @property
    def is_hybrid(self) -> bool:
        """Whether it has recurrent states."""
        return self.small.config.num_gated_delta_layers > 0

    def prefill(
        self, state: DeviceState, plan: Plan, prompts: Prompts, fed: Fed, rank: Rank
    ) -> None:
        """See `Drafter`."""
        if not self.is_hybrid:
            self._forward(state, fed.rows, fed.tokens, None)
            return
        before, save_after = self._context(state, plan, prompts.first), plan.save_at - prompts.first
        where = (prompts.row_starts, fed.rows, save_after)
        mixer = Chunks(self.small.config, before, *where)
        self._forward(state, fed.rows, fed.tokens, mixer)
        is_saved = mamba_state.ends_chunk(save_after, prompts.lengths - prompts.first)
        new, saved = mamba_state.stacked(mixer.new), mamba_state.stacked(mixer.saved)
        _keep(state, plan, new, saved, is_saved)

    def extend(
        self,
        state: DeviceState,
        plan: Plan,
        before: Int[Tensor, " B"],
        counts: Int[Tensor, " B"],
        fed: Fed,
        rank: Rank,
    ) -> None:
        """See `Drafter`."""
        if not self.is_hybrid:
            self._forward(state, fed.rows, fed.tokens, None)
            return
        B, W = len(counts), len(fed.tokens) // len(counts)
        place = torch.arange(W, device=counts.device).expand(B, W)
        row_of = torch.arange(B * W, device=counts.device).view(B, W)
        context = self._context(state, plan, before)
        mixer = Tree(self.small.config, context, None, row_of, fed.rows.request, place.flatten())
        self._forward(state, fed.rows, fed.tokens, mixer)
        moves = (mixer.kept(), place.int(), counts, plan.save_at - before)
        _keep(state, plan, *mamba_state.replay(context, *moves))

    def draft(
        self,
        state: DeviceState,
        plan: Plan,
        newest: Int[Tensor, " B"],
        lengths: Int[Tensor, " B"],
        shape: TreeShape,
        rank: Rank,
    ) -> Grown:
        """See `Drafter`."""
        draft_from = state.draft_from[plan.slots]
        nodes = self._context(state, plan, lengths) if self.is_hybrid else None

        def expand(rows: Rows, tokens: Tokens, parent: Int[Tensor, " R"]) -> Logits:
            nonlocal nodes
            mixer = None
            if nodes is not None:
                before = DeltaState(nodes.recurrent[:, parent], nodes.window[:, parent])
                mixer = OneToken(self.small.config, before)
            hidden = self._forward(state, rows, tokens, mixer)
            nodes = None if mixer is None else mamba_state.stacked(mixer.new)
            return over_target(model.logits(self.small, hidden), self.target_vocab)

        can_draft = (draft_from < lengths).int()
        rows = extend_rows(lengths, can_draft, draft_from, plan.page_table, 0)
        requests = torch.arange(len(newest), device=newest.device)
        logits = expand(rows, newest, requests)
        ids, weights = rank(logits[:, None], newest.new_zeros(len(newest), 1, 0))
        bounds = (lengths, draft_from, plan.sampling.max_drafts, plan.page_table)
        return grow(expand, (ids[:, 0], weights[:, 0]), newest, *bounds, shape, rank, 1)

    def _forward(
        self, state: DeviceState, rows: Rows, tokens: Tokens, mixer: DeltaMixer | None
    ) -> Float[Tensor, "R hidden"]:
        known = tokens.clamp(max=self.small.config.vocab - 1)
        return model.forward(self.small, known, rows, state.draft_kv, mixer, ()).hidden

    def _context(self, state: DeviceState, plan: Plan, lengths: Int[Tensor, " B"]) -> DeltaState:
        """As `shared.spec.standalone.context_of` of the slots' states."""
        is_whole = (state.draft_from[plan.slots] < lengths).view(1, -1, 1, 1)
        recurrent = torch.where(is_whole[..., None], state.draft_recurrent[:, plan.slots], 0)
        return DeltaState(recurrent, torch.where(is_whole, state.draft_window[:, plan.slots], 0))


def over_target(logits: Float[Tensor, "R draft_vocab"], vocab: int) -> Float[Tensor, "R vocab"]:
    """As the specification."""
    missing = max(vocab - logits.shape[1], 0)
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)[:, :vocab]


def _keep(
    state: DeviceState,
    plan: Plan,
    new: DeltaState,
    saved: DeltaState,
    is_saved: Bool[Tensor, " B"],
) -> None:
    """Replaces the states of the slots, and writes the snapshots that were taken."""
    state.draft_recurrent[:, plan.slots] = new.recurrent
    state.draft_window[:, plan.slots] = new.window
    if state.draft_saved_recurrent.shape[1] > 1:
        places = torch.where(is_saved, plan.save, 0)
        state.draft_saved_recurrent[:, places] = saved.recurrent
        state.draft_saved_window[:, places] = saved.window
