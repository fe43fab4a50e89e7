"""Device state between steps: KV pages, GDN states and per-slot values; plan and result buffers."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.boundary.adapter_pool import WORDS
from shared.boundary.backend import BackendLimits
from shared.boundary.buffers import plan_layout, result_layout
from shared.boundary.images import max_begun
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.drafts.config import DraftStateSizes
from shared.models.config import ModelConfig
from shared.models.groups import CachePool
from shared.spec.ngram import LENGTHS, WAYS, WINDOW
from torch_impl.adapters import Adapters, new_adapters
from torch_impl.cache_pools import new_kv, new_pools, new_states
from torch_impl.ops.attention.attention import Pools, WindowPageTables
from torch_impl.ops.recurrent.recurrent_state import RecurrentState
from torch_impl.ops.sampling.sampling import Sampling
from torch_impl.ops.trees import ngram, slot_state
from torch_impl.ops.trees.merge_drafts import NgramTrees
from torch_impl.vision_encoder import Begun, Pixels

Fields = dict[str, Tensor]
"""Fields of a result by name."""


@dataclass(frozen=True)
class DraftInput:
    """Draft input: values a slot carries from one step's draft extend to the next step's draft.

    Attributes:
      tokens, weights: Top candidates for the token after the newest, and their log weights.
      hidden: Hidden state of the head at the last extended row.
    """

    tokens: Int[Tensor, "B k"]
    weights: Float[Tensor, "B k"]
    hidden: Float[Tensor, "B hidden"]

    def put(self, slots: Int[Tensor, " b"], rows: "DraftInput") -> None:
        """Replaces the draft inputs of some slots in place."""
        self.tokens[slots] = rows.tokens
        self.weights[slots] = rows.weights
        self.hidden[slots] = rows.hidden


@dataclass(frozen=True)
class DraftState:
    """State of a drafter.

    Attributes:
      draft_from: First position from which the slot's draft KV has no gap.
      relay: Draft input by slot; None for drafters without one.
      kv: KV pools of the drafter, indexed by the target's page numbers. For a drafter that reads
        the target's KV: the pools of the target.
      delta, snapshots: GDN states by slot and by snapshot; None without GDN layers.
    """

    draft_from: Int[Tensor, " slots"]
    relay: DraftInput | None
    kv: Pools
    delta: RecurrentState | None
    snapshots: RecurrentState | None


@dataclass(frozen=True)
class ImageState:
    """State of a vision-language model for images.

    Attributes:
      pool: Encoder cache: image embeddings for later prompts; row 0 is reserved for padding.
      deltas: M-RoPE position delta of each slot.
      begun: Activations of a partly encoded image; None if each image is encoded in one step.
    """

    pool: Float[Tensor, "rows hidden"]
    deltas: Int[Tensor, " slots"]
    begun: Begun | None


@dataclass(frozen=True)
class DeviceState:
    """State of all slots, allocated once and written in place.

    Slot, page and snapshot 0 are reserved for padding.

    Attributes:
      lengths: Number of committed tokens of each slot; their KV is in the pages.
      newest: The token after the committed ones; it has no KV yet.
      seen: Token counts: twice the count in the output, plus 1 if the prompt has the token.
      kv: KV pools of the target, in the order of `ModelConfig.kv_pools`.
      delta, snapshots: GDN states by slot and by snapshot; None without GDN layers.
      draft: None without a drafter.
      images: None for a model without a vision encoder.
      texts: N-gram table; None if no n-gram drafts are made on the device.
      adapters: LoRA adapters of the model.
    """

    lengths: Int[Tensor, " slots"]
    newest: Int[Tensor, " slots"]
    seen: Int[Tensor, "slots vocab"]
    kv: Pools
    delta: RecurrentState | None
    snapshots: RecurrentState | None
    draft: DraftState | None
    images: ImageState | None
    texts: ngram.NgramState | None
    adapters: Adapters


def allocate(
    config: ModelConfig,
    capacity: BackendLimits,
    drafter: DraftStateSizes | None,
    dtype: torch.dtype,
    device: torch.device,
    num_ranks: int,
) -> DeviceState:
    """Allocates the state of a rank before the first step, all zeros.

    Args:
      drafter: Sizes of the drafter's state; None without a drafter.
    """
    slots, size = capacity.num_slots, capacity.page_size
    per_slot = {"dtype": torch.int32, "device": device}
    kv = tuple(
        new_kv(each.mixer, len(each), (capacity.num_pages_of(each.window), size), dtype, device)
        for each in config.kv_pools
    )
    return DeviceState(
        lengths=torch.zeros(slots, **per_slot),
        newest=torch.zeros(slots, **per_slot),
        seen=torch.zeros(slots, capacity.vocab, **per_slot),
        kv=kv,
        delta=new_states(config.cache_pools, slots, dtype, device),
        snapshots=new_states(config.cache_pools, capacity.num_snapshots, dtype, device),
        draft=None if drafter is None else _new_draft(drafter, kv, capacity, dtype, device),
        images=_new_images(capacity, dtype, device),
        texts=_new_texts(capacity, device),
        adapters=new_adapters(capacity.adapters, num_ranks, dtype, device),
    )


def _new_images(
    capacity: BackendLimits, dtype: torch.dtype, device: torch.device
) -> ImageState | None:
    images = capacity.images
    if images is None:
        return None
    vision, most = images.vision, max_begun(capacity.programs, images.vision)

    def new(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=kind, device=device)

    begun = None
    if most:
        half, count = (most, vision.head_size // 2), new(1, kind=torch.int32)
        begun = Begun(new(most, vision.hidden, kind=dtype), new(*half), new(*half), count)
    return ImageState(
        pool=new(images.num_rows, vision.out, kind=dtype),
        deltas=new(capacity.num_slots, kind=torch.int32),
        begun=begun,
    )


def _new_texts(capacity: BackendLimits, device: torch.device) -> ngram.NgramState | None:
    if capacity.texts is None:
        return None
    shape = (len(LENGTHS), capacity.texts.groups, WAYS)

    def new(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    table = ngram.NgramTable(
        tokens=new(*shape), checks=new(*shape), stamps=new(*shape), clocks=new(len(LENGTHS))
    )
    return ngram.NgramState(new(capacity.num_slots, WINDOW), table)


def _new_draft(
    drafter: DraftStateSizes,
    target_kv: Pools,
    capacity: BackendLimits,
    dtype: torch.dtype,
    device: torch.device,
) -> DraftState:
    slots, pool = capacity.num_slots, (capacity.num_pages, capacity.page_size)
    return DraftState(
        draft_from=torch.zeros(slots, dtype=torch.int32, device=device),
        relay=_new_relay(drafter, capacity, dtype, device) if drafter.has_draft_input else None,
        kv=target_kv if drafter.reads_target_kv else new_pools(drafter.pools, pool, dtype, device),
        delta=new_states(drafter.pools, slots, dtype, device),
        snapshots=new_states(drafter.pools, capacity.num_snapshots, dtype, device),
    )


def _new_relay(
    drafter: DraftStateSizes, capacity: BackendLimits, dtype: torch.dtype, device: torch.device
) -> DraftInput:
    slots, width = capacity.num_slots, capacity.max_width
    return DraftInput(
        tokens=torch.zeros(slots, width, dtype=torch.int32, device=device),
        weights=torch.zeros(slots, width, dtype=torch.float32, device=device),
        hidden=torch.zeros(slots, drafter.model.hidden, dtype=dtype, device=device),
    )


@dataclass(frozen=True)
class Images:
    """Image inputs of a prefill; see `shared.boundary.images.Images`."""

    sources: Int[Tensor, " T"]
    mrope_positions: Int[Tensor, "T 3"]
    next_sources: Int[Tensor, " B"]
    deltas: Int[Tensor, " B"]


@dataclass(frozen=True)
class ImageToEncode:
    """Image to encode; see `shared.boundary.images.Encode`."""

    pixels: Pixels | None
    place: Int[Tensor, " 1"]


@dataclass(frozen=True)
class Prompt:
    """Prefill chunks of a plan; see `shared.boundary.backend.Prefill`.

    In a count step the tokens begin at position 0 and have no following token.
    """

    tokens: Int[Tensor, " T"]
    row_starts: Int[Tensor, " B1"]
    first_positions: Int[Tensor, " B"]
    ends_prompt: Bool[Tensor, " B"]
    next_tokens: Int[Tensor, " B"]
    images: Images | None


@dataclass(frozen=True)
class HostDraft:
    """Draft trees of a plan; see `shared.boundary.backend.HostDraft`."""

    tokens: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    num_nodes: Int[Tensor, " B"]
    forced: Bool[Tensor, " B"]


@dataclass(frozen=True)
class TokenMask:
    """Grammar token bitmask; see `shared.boundary.grammar_bitmask.GrammarBitmask`."""

    bits: Int[Tensor, "Q words"]
    index: Int[Tensor, "B N"]


@dataclass(frozen=True)
class NgramScopes:
    """N-gram scopes of the rows; see `shared.boundary.ngram_table.NgramScopes`."""

    scopes: Int[Tensor, "B 2"]
    before: Int[Tensor, "B window"] | None


@dataclass(frozen=True)
class Plan:
    """Plan on the device: views into its int32 buffer.

    Attributes:
      slots, starts, draft_from, reports, page_table: Fields of the rows; see
        `shared.boundary.backend.StepPlan`.
      restore, save, save_at: State snapshots to restore and to save.
      sampling: Sampling parameters of the rows.
      prompt: Chunks of a prefill or count step; None in other steps.
      drafts: Draft trees from the host; None without them.
      copies: N-gram drafts to merge into the drafter's trees; None without them.
      mask: Grammar token bitmask; None if the program takes no mask.
      image: Image of an encode step; None in other steps.
      texts: N-gram scopes of the rows; None without n-gram drafts on the device.
      window_page_tables: Pages of each row in the window pools, by sliding window.
      kv: Words of an import or of an adapter, by field; empty in other steps.
      adapters: Adapter slot of each row, or that a load step writes; None without.
    """

    slots: Int[Tensor, " B"]
    starts: Bool[Tensor, " B"]
    draft_from: Int[Tensor, " B"]
    reports: Bool[Tensor, " B"]
    page_table: Int[Tensor, "B P"]
    restore: Int[Tensor, " B"]
    save: Int[Tensor, " B"]
    save_at: Int[Tensor, " B"]
    sampling: Sampling
    prompt: Prompt | None
    drafts: HostDraft | None
    copies: NgramTrees | None
    mask: TokenMask | None
    image: ImageToEncode | None
    texts: NgramScopes | None
    window_page_tables: WindowPageTables
    kv: Fields
    adapters: Int[Tensor, " B"] | None

    def page_tables_of(self, pools: Sequence[CachePool]) -> list[Int[Tensor, "B P"]]:
        """Returns the page table of each KV pool of the target."""
        windows = self.window_page_tables
        return [windows.get(pool.window or 0, self.page_table) for pool in pools]


_TYPES = {"float32": torch.float32, "uint8": torch.uint8}


def read_plan(words: Int[Tensor, " words"], program: Program, capacity: BackendLimits) -> Plan:
    """Returns views of a plan's fields; floats are bit-cast, an unsigned seed keeps its bits."""
    at = {}
    for name, field in plan_layout(program, capacity).fields.items():
        view = words[field.offset : field.offset + field.size]
        at[name] = view.view(_TYPES.get(field.dtype.name, torch.int32)).view(field.shape)
    windows = ["window_page_tables"] * bool(capacity.window_pools)
    for name in ("slots", "page_table", *windows, "restore", "save"):
        at[name] = at[name].long()  # indices: torch would convert them at each use
    return Plan(
        slots=at["slots"],
        starts=at["starts"] != 0,
        draft_from=at["draft_from"],
        reports=at["reports"] != 0,
        page_table=at["page_table"],
        restore=at["restore"],
        save=at["save"],
        save_at=at["save_at"],
        sampling=Sampling(**{field.name: at[field.name] for field in fields(Sampling)}),
        prompt=_read_prompt(at, program),
        drafts=_read_drafts(at) if program.has(ProgramFeature.HOST_DRAFT) else None,
        copies=_read_copies(at) if program.has(ProgramFeature.NGRAM_DRAFTS) else None,
        mask=TokenMask(at["mask_bits"], at["mask_index"])
        if program.has(ProgramFeature.MASK)
        else None,
        image=_read_image(at) if program.work is StepKind.ENCODE else None,
        texts=_read_texts(at),
        window_page_tables={
            pool.window: at["window_page_tables"][i] for i, pool in enumerate(capacity.window_pools)
        },
        kv={name: words for name, words in at.items() if name.startswith(("kv_", WORDS))},
        adapters=at.get("adapters"),
    )


def _read_prompt(at: Fields, program: Program) -> Prompt | None:
    if program.work not in (StepKind.PREFILL, StepKind.COUNT):
        return None
    nothing = torch.zeros_like(at["save_at"])
    return Prompt(
        tokens=at["tokens"],
        row_starts=at["row_starts"],
        first_positions=at["first_positions"],
        ends_prompt=at.get("ends_prompt", nothing) != 0,
        next_tokens=at.get("next_tokens", nothing),
        images=_read_images(at),
    )


def _read_texts(at: Fields) -> NgramScopes | None:
    return NgramScopes(at["text_scopes"], at.get("text_before")) if "text_scopes" in at else None


def _read_images(at: Fields) -> Images | None:
    if "image_sources" not in at:
        return None
    return Images(
        sources=at["image_sources"],
        mrope_positions=at["image_mrope_positions"],
        next_sources=at["image_next_embed_sources"],
        deltas=at["image_mrope_position_deltas"],
    )


def _read_image(at: Fields) -> ImageToEncode:
    begins = "image_bytes" in at
    pixels = Pixels(**{f.name: at[f"image_{f.name}"] for f in fields(Pixels)}) if begins else None
    return ImageToEncode(pixels, at["place"])


def _read_drafts(at: Fields) -> HostDraft:
    return HostDraft(
        tokens=at["draft_tree_tokens"],
        parents=at["draft_tree_parents"],
        num_nodes=at["draft_tree_num_nodes"],
        forced=at["draft_tree_forced"] != 0,
    )


def _read_copies(at: Fields) -> NgramTrees:
    return NgramTrees(**{f.name: at[f"copies_{f.name}"] for f in fields(NgramTrees)})


def pack(values: Fields, program: Program, capacity: BackendLimits) -> Int[Tensor, " out"]:
    """Concatenates the fields of a result; fields that the step did not compute are 0."""
    device, parts = next(iter(values.values())).device, []
    for name, field in result_layout(program, capacity).fields.items():
        if name not in values:
            parts.append(torch.zeros(field.size, dtype=torch.int32, device=device))
            continue
        value = values[name].contiguous()
        value = value.view(torch.int32) if value.is_floating_point() else value.int()
        parts.append(value.flatten())
    return torch.cat(parts)


def reset_slots(state: DeviceState, plan: Plan) -> None:
    """Resets the slots of starting rows and restores their snapshots.

    Old values are replaced, not multiplied by 0, because they may be NaN.
    """
    owners, draft = plan.slots, state.draft
    memory = [state.lengths, state.newest, state.seen]
    if draft is not None and draft.relay is not None:
        memory += [draft.relay.tokens, draft.relay.weights, draft.relay.hidden]
    for part in memory:
        starts = plan.starts.view(-1, *[1] * (part.ndim - 1))
        part[owners] = torch.where(starts, 0, part[owners])
    _restore(plan, state.delta, state.snapshots)
    if draft is not None:
        held = draft.draft_from[owners]
        draft.draft_from[owners] = torch.where(plan.starts, plan.draft_from, held)
        _restore(plan, draft.delta, draft.snapshots)


def _restore(plan: Plan, states: RecurrentState | None, snapshots: RecurrentState | None) -> None:
    """Sets the states of starting rows to their snapshots, or to zero."""
    if states is None or snapshots is None:
        return
    for memory, saved in (
        (states.recurrent, snapshots.recurrent),
        (states.window, snapshots.window),
    ):
        slot_state.restore(memory, saved, plan.slots, plan.restore, plan.starts)
