"""What a step reads and writes: the memory of all slots and pages, the plan and the result."""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.boundary.backend import Limits, Program
from shared.boundary.buffers import plan_layout, result_layout
from shared.drafts.config import DraftSizes
from shared.models.config import ModelConfig
from shared.spec.gated_delta import CHUNK
from shared.spec.mamba_state import WINDOW
from torch_impl.ops import any_row, at_most, attention
from torch_impl.ops.mamba_state import DeltaState
from torch_impl.ops.sampling import Sampling

PLAN_SAMPLING = tuple(field.name for field in fields(Sampling))


@dataclass(frozen=True)
class DeviceState:
    """All memory that outlives a step. It is allocated once and written in place.

    Slot, page and snapshot 0 are sinks.

    Attributes:
      length: Committed positions of each slot.
      newest: The newest token, which has no KV yet.
      draft_from: First position at which the draft KV is whole.
      seen: Twice a token's count in the output, plus 1 where the prompt has it.
      relay_ids, relay_weights, relay_hidden: The drafter's candidates for the next step.
      kv: Keys and values of each attention layer's page pool.
      draft_kv: Those of the drafter's layers.
      recurrent, window: The state of the gated-delta layers.
      saved_recurrent, saved_window: Snapshots of it.
      draft_recurrent, draft_window, draft_saved_recurrent, draft_saved_window: The drafter's.
    """

    length: Int[Tensor, " slots"]
    newest: Int[Tensor, " slots"]
    draft_from: Int[Tensor, " slots"]
    seen: Int[Tensor, "slots vocab"]
    relay_ids: Int[Tensor, "slots k"]
    relay_weights: Float[Tensor, "slots k"]
    relay_hidden: Float[Tensor, "slots head_hidden"]
    kv: Float[Tensor, "L 2 pages page H D"]
    draft_kv: Float[Tensor, "Ld 2 pages page Hd Dd"]
    recurrent: Float[Tensor, "Lg slots Hv K V"]
    window: Float[Tensor, "Lg slots 3 C"]
    saved_recurrent: Float[Tensor, "Lg snapshots Hv K V"]
    saved_window: Float[Tensor, "Lg snapshots 3 C"]
    draft_recurrent: Float[Tensor, "Ldg slots Hd Kd Vd"]
    draft_window: Float[Tensor, "Ldg slots 3 Cd"]
    draft_saved_recurrent: Float[Tensor, "Ldg snapshots Hd Kd Vd"]
    draft_saved_window: Float[Tensor, "Ldg snapshots 3 Cd"]


def allocate(
    config: ModelConfig,
    limits: Limits,
    drafter: DraftSizes | None,
    dtype: torch.dtype,
    device: torch.device,
) -> DeviceState:
    """Memory for all slots, pages and snapshots, zeroed.

    Args:
      drafter: What the drafter keeps; None without one.
    """

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def delta(sizes: ModelConfig, num_layers: int) -> list[Tensor]:
        recurrent, window = _delta_shapes(sizes)
        return [
            memory
            for count in (slots, limits.num_snapshots)
            for memory in (
                zeros(num_layers, count, *recurrent, dtype=torch.float32),
                zeros(num_layers, count, *window),
            )
        ]

    slots, pages = limits.num_slots, (2, limits.num_pages, limits.page_size)
    kept = drafter or DraftSizes(config, 0, 0, False)
    width = limits.max_width if kept.has_relay else 0
    per_slot = [zeros(slots, dtype=torch.int32) for _ in range(3)]
    heads = (kept.model.num_kv_heads, kept.model.head_size)
    return DeviceState(
        *per_slot,
        zeros(slots, limits.vocab, dtype=torch.int32),
        zeros(slots, width, dtype=torch.int32),
        zeros(slots, width, dtype=torch.float32),
        zeros(slots, kept.model.hidden if kept.has_relay else 0),
        zeros(config.num_attention_layers, *pages, config.num_kv_heads, config.head_size),
        zeros(kept.num_attention_layers, *pages, *heads),
        *delta(config, config.num_gated_delta_layers),
        *delta(kept.model, kept.num_gated_delta_layers),
    )


def _delta_shapes(config: ModelConfig) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """One slot's recurrent state and window in one layer; empty without such layers."""
    sizes = config.gated_delta
    if sizes is None:
        return (0, 0, 0), (WINDOW, 0)
    heads = (sizes.num_value_heads, sizes.key_size, sizes.value_size)
    return heads, (WINDOW, sizes.channels)


@dataclass(frozen=True)
class Plan:
    """A plan on the device: views into its words.

    Attributes:
      work: The fields of the program's kind of work, by name.
      slots, starts, draft_from, page_table: Of the rows; see `shared.boundary.backend.StepPlan`.
      restore, save, save_at: Snapshots.
      sampling: Parameters of the rows.
    """

    work: dict[str, Int[Tensor, "..."]]
    slots: Int[Tensor, " B"]
    starts: Bool[Tensor, " B"]
    draft_from: Int[Tensor, " B"]
    page_table: Int[Tensor, "B P"]
    restore: Int[Tensor, " B"]
    save: Int[Tensor, " B"]
    save_at: Int[Tensor, " B"]
    sampling: Sampling


def read_plan(words: Int[Tensor, " words"], program: Program, limits: Limits) -> Plan:
    """Views of a plan's fields; floats are bit-cast, an unsigned seed keeps its bits."""
    found = {}
    for name, field in plan_layout(program, limits).fields.items():
        view = words[field.offset : field.offset + field.size].view(field.shape)
        found[name] = view.view(torch.float32) if field.dtype.kind == "f" else view
    sampling = Sampling(**{name: found.pop(name) for name in PLAN_SAMPLING})
    names = [f.name for f in fields(Plan) if f.name not in ("work", "sampling", "starts")]
    rows = {name: found.pop(name) for name in names}
    starts = found.pop("starts") != 0
    for name in ("slots", "page_table", "restore", "save"):
        rows[name] = rows[name].long()  # indices: torch would convert them at every use
    return Plan(work=found, starts=starts, sampling=sampling, **rows)


@dataclass(frozen=True)
class Prompts:
    """The prompt chunks of a prefill.

    Attributes:
      tokens: All chunks, then padding.
      row_starts: First token of each chunk, and the end.
      first: Position of each chunk's first token.
      lengths: Of the slots after the chunks.
      last: The flat row of each chunk's last token.
      rows: Where the tokens stand and what they see.
    """

    tokens: Int[Tensor, " T"]
    row_starts: Int[Tensor, " B1"]
    first: Int[Tensor, " B"]
    lengths: Int[Tensor, " B"]
    last: Int[Tensor, " B"]
    rows: attention.Rows

    @classmethod
    def of(cls, plan: Plan, program: Program) -> "Prompts":
        """The chunks of a plan."""
        row_starts, first = plan.work["row_starts"], plan.work["first_positions"]
        num_tokens = at_most(row_starts[-1], program.tokens, CHUNK)
        no_bound = torch.zeros_like(first)
        where = (row_starts, first, no_bound, plan.page_table, num_tokens)
        return cls(
            tokens=plan.work["tokens"][:num_tokens],
            row_starts=row_starts,
            first=first,
            lengths=first + row_starts[1:] - row_starts[:-1],
            last=(row_starts[1:] - 1).clamp(min=0),
            rows=attention.causal_rows(*where),
        )


def pack(
    found: dict[str, Tensor], program: Program, limits: Limits, words: Int[Tensor, " words"]
) -> Int[Tensor, " out"]:
    """Lays the fields of a result behind one another; what the work did not give is 0.

    Args:
      found: Fields of the result by name.
      words: The plan's words, for their device.
    """
    parts = []
    for name, field in result_layout(program, limits).fields.items():
        if name not in found:
            parts.append(words.new_zeros(field.size))
            continue
        value = found[name].contiguous()
        value = value.view(torch.int32) if value.is_floating_point() else value.int()
        parts.append(value.flatten())
    return torch.cat(parts)


def start(state: DeviceState, plan: Plan) -> None:
    """Resets the slots of starting rows and restores their snapshots.

    What was there is replaced, not multiplied: it may hold a NaN.
    """
    if not any_row(plan.starts):
        return
    slots = plan.slots
    relay = (state.relay_ids, state.relay_weights, state.relay_hidden)
    for memory in (state.length, state.newest, state.seen, *relay):
        starts = plan.starts.view(-1, *[1] * (memory.ndim - 1))
        memory[slots] = torch.where(starts, 0, memory[slots])
    state.draft_from[slots] = torch.where(plan.starts, plan.draft_from, state.draft_from[slots])
    for memory, saved in (
        (state.recurrent, state.saved_recurrent),
        (state.window, state.saved_window),
        (state.draft_recurrent, state.draft_saved_recurrent),
        (state.draft_window, state.draft_saved_window),
    ):
        shape = (1, -1, *[1] * (memory.ndim - 2))
        restored = torch.where((plan.restore != 0).view(shape), saved[:, plan.restore], 0)
        memory[:, slots] = torch.where(plan.starts.view(shape), restored, memory[:, slots])


def count(
    state: DeviceState,
    slots: Int[Tensor, "*rows"],
    tokens: Int[Tensor, "*rows"],
    is_output: Bool[Tensor, "*rows"],
    is_counted: Bool[Tensor, "*rows"],
) -> None:
    """Adds tokens to `seen`: a mark for one of the prompt, 2 for one of the output."""
    vocab, flat = state.seen.shape[1], state.seen.view(-1)
    place = torch.where(is_counted, slots * vocab + tokens, 0)  # 0 is the sink's
    marked = torch.where(is_output, 0, place)
    flat[marked] = flat[marked] | 1  # repeated tokens write the same value
    flat.index_add_(0, place.flatten(), 2 * (is_output & is_counted).flatten().int())


def take(state: DeviceState, slots: Int[Tensor, " B"]) -> DeltaState:
    """The recurrent states of slots."""
    return DeltaState(state.recurrent[:, slots], state.window[:, slots])


def put(state: DeviceState, slots: Int[Tensor, " B"], new: DeltaState) -> None:
    """Replaces the recurrent states of slots."""
    state.recurrent[:, slots] = new.recurrent
    state.window[:, slots] = new.window


def save(state: DeviceState, places: Int[Tensor, " B"], saved: DeltaState) -> None:
    """Writes snapshots; place 0, the sink, takes those that were not taken."""
    if state.saved_recurrent.shape[1] == 1:
        return
    state.saved_recurrent[:, places] = saved.recurrent
    state.saved_window[:, places] = saved.window
