"""Device state between steps: KV pages, GDN states and per-slot values; plan and result buffers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding
from jaxtyping import Bool, Float, Int

from jax_impl.adapters import Adapters, new_adapters
from jax_impl.cache_pools import new_kv, new_pools, new_states
from jax_impl.ops.attention.attention import Pools, WindowPageTables
from jax_impl.ops.recurrent.recurrent_state import RecurrentState
from jax_impl.ops.sampling.sampling import Sampling
from jax_impl.ops.trees import ngram, slot_state
from jax_impl.ops.trees.merge_drafts import NgramTrees
from jax_impl.vision_encoder import Begun, Pixels
from shared.boundary.adapter_pool import WORDS
from shared.boundary.backend import BackendLimits
from shared.boundary.buffers import Field, plan_layout, result_layout
from shared.boundary.images import max_begun
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.drafts.config import DraftStateSizes
from shared.models.config import ModelConfig
from shared.models.groups import CachePool
from shared.spec.ngram import LENGTHS, WAYS, WINDOW

Fields = dict[str, jax.Array]
"""Fields of a result by name."""

Words = Int[jax.Array, " words"]


class DraftInput(NamedTuple):
    """Draft input: values a slot carries from one step's draft extend to the next step's draft.

    Attributes:
      tokens, weights: Top candidates for the token after the newest, and their log weights.
      hidden: Hidden state of the head at the last extended row.
    """

    tokens: Int[jax.Array, "B k"]
    weights: Float[jax.Array, "B k"]
    hidden: Float[jax.Array, "B hidden"]

    def put(self, slots: Int[jax.Array, " b"], rows: "DraftInput") -> "DraftInput":
        """Returns the draft inputs with those of some slots replaced."""
        return jax.tree.map(lambda memory, new: memory.at[slots].set(new), self, rows)


class DraftState(NamedTuple):
    """State of a drafter.

    Attributes:
      draft_from: First position from which the slot's draft KV has no gap.
      relay: Draft input by slot; None for drafters without one.
      kv: KV pools of the drafter, indexed by the target's page numbers. For a drafter that reads
        the target's KV: none between steps, and while it runs those of the target.
      delta, snapshots: GDN states by slot and by snapshot; None without GDN layers.
    """

    draft_from: Int[jax.Array, " slots"]
    relay: DraftInput | None
    kv: Pools
    delta: RecurrentState | None
    snapshots: RecurrentState | None


class ImageState(NamedTuple):
    """State of a vision-language model for images.

    Attributes:
      pool: Encoder cache: image embeddings for later prompts; row 0 is reserved for padding.
      deltas: M-RoPE position delta of each slot.
      begun: Activations of a partly encoded image; None if each image is encoded in one step.
    """

    pool: Float[jax.Array, "rows hidden"]
    deltas: Int[jax.Array, " slots"]
    begun: Begun | None


class DeviceState(NamedTuple):
    """State of all slots, donated to each step. Slot, page and snapshot 0 are reserved for padding.

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

    lengths: Int[jax.Array, " slots"]
    newest: Int[jax.Array, " slots"]
    seen: Int[jax.Array, "slots vocab"]
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
    dtype: np.dtype | type,
    device: jax.Device,
    num_ranks: int,
) -> DeviceState:
    """Allocates the state of a rank before the first step, all zeros.

    Args:
      drafter: Sizes of the drafter's state; None without a drafter.
    """

    slots, size = capacity.num_slots, capacity.page_size

    # One program: separate allocations would compile one program for each size.
    @partial(jax.jit, out_shardings=SingleDeviceSharding(device))
    def zeros() -> DeviceState:
        return DeviceState(
            lengths=jnp.zeros(slots, np.int32),
            newest=jnp.zeros(slots, np.int32),
            seen=jnp.zeros((slots, capacity.vocab), np.int32),
            kv=tuple(
                new_kv(each.mixer, len(each), (capacity.num_pages_of(each.window), size), dtype)
                for each in config.kv_pools
            ),
            delta=new_states(config.cache_pools, slots, dtype),
            snapshots=new_states(config.cache_pools, capacity.num_snapshots, dtype),
            draft=None if drafter is None else _new_draft(drafter, capacity, dtype),
            images=_new_images(capacity, dtype),
            texts=_new_texts(capacity),
            adapters=new_adapters(capacity.adapters, num_ranks, dtype),
        )

    return zeros()


def _new_images(capacity: BackendLimits, dtype: np.dtype | type) -> ImageState | None:
    images = capacity.images
    if images is None:
        return None
    vision, most, begun = images.vision, max_begun(capacity.programs, images.vision), None
    if most:
        cos, sin = (jnp.zeros((most, vision.head_size // 2)) for _ in range(2))
        begun = Begun(jnp.zeros((most, vision.hidden), dtype), cos, sin, jnp.zeros(1, np.int32))
    return ImageState(
        pool=jnp.zeros((images.num_rows, vision.out), dtype),
        deltas=jnp.zeros(capacity.num_slots, np.int32),
        begun=begun,
    )


def _new_texts(capacity: BackendLimits) -> ngram.NgramState | None:
    if capacity.texts is None:
        return None
    shape = (len(LENGTHS), capacity.texts.groups, WAYS)
    tokens, checks, stamps = (jnp.zeros(shape, np.int32) for _ in range(3))
    table = ngram.NgramTable(tokens, checks, stamps, jnp.zeros(len(LENGTHS), np.int32))
    return ngram.NgramState(jnp.zeros((capacity.num_slots, WINDOW), np.int32), table)


def _new_draft(
    drafter: DraftStateSizes, capacity: BackendLimits, dtype: np.dtype | type
) -> DraftState:
    slots, pool = capacity.num_slots, (capacity.num_pages, capacity.page_size)
    return DraftState(
        draft_from=jnp.zeros(slots, np.int32),
        relay=_new_relay(drafter, capacity, dtype) if drafter.has_draft_input else None,
        kv=new_pools(drafter.pools, pool, dtype),
        delta=new_states(drafter.pools, slots, dtype),
        snapshots=new_states(drafter.pools, capacity.num_snapshots, dtype),
    )


def _new_relay(
    drafter: DraftStateSizes, capacity: BackendLimits, dtype: np.dtype | type
) -> DraftInput:
    slots, width = capacity.num_slots, capacity.max_width
    return DraftInput(
        tokens=jnp.zeros((slots, width), np.int32),
        weights=jnp.zeros((slots, width), np.float32),
        hidden=jnp.zeros((slots, drafter.model.hidden), dtype),
    )


@dataclass(frozen=True)
class Images:
    """Image inputs of a prefill; see `shared.boundary.images.Images`."""

    sources: Int[jax.Array, " T"]
    mrope_positions: Int[jax.Array, "T 3"]
    next_sources: Int[jax.Array, " B"]
    deltas: Int[jax.Array, " B"]


@dataclass(frozen=True)
class ImageToEncode:
    """Image to encode; see `shared.boundary.images.Encode`."""

    pixels: Pixels | None
    place: Int[jax.Array, " 1"]


@dataclass(frozen=True)
class Prompt:
    """Prefill chunks of a plan; see `shared.boundary.backend.Prefill`.

    In a count step the tokens begin at position 0 and have no following token.
    """

    tokens: Int[jax.Array, " T"]
    row_starts: Int[jax.Array, " B1"]
    first_positions: Int[jax.Array, " B"]
    ends_prompt: Bool[jax.Array, " B"]
    next_tokens: Int[jax.Array, " B"]
    images: Images | None


@dataclass(frozen=True)
class HostDraft:
    """Draft trees of a plan; see `shared.boundary.backend.HostDraft`."""

    tokens: Int[jax.Array, "B N"]
    parents: Int[jax.Array, "B N"]
    num_nodes: Int[jax.Array, " B"]
    forced: Bool[jax.Array, " B"]


@dataclass(frozen=True)
class TokenMask:
    """Grammar token bitmask; see `shared.boundary.grammar_bitmask.GrammarBitmask`."""

    bits: Int[jax.Array, "Q words"]
    index: Int[jax.Array, "B N"]


@dataclass(frozen=True)
class NgramScopes:
    """N-gram scopes of the rows; see `shared.boundary.ngram_table.NgramScopes`."""

    scopes: Int[jax.Array, "B 2"]
    before: Int[jax.Array, "B window"] | None


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

    slots: Int[jax.Array, " B"]
    starts: Bool[jax.Array, " B"]
    draft_from: Int[jax.Array, " B"]
    reports: Bool[jax.Array, " B"]
    page_table: Int[jax.Array, "B P"]
    restore: Int[jax.Array, " B"]
    save: Int[jax.Array, " B"]
    save_at: Int[jax.Array, " B"]
    sampling: Sampling
    prompt: Prompt | None
    drafts: HostDraft | None
    copies: NgramTrees | None
    mask: TokenMask | None
    image: ImageToEncode | None
    texts: NgramScopes | None
    window_page_tables: WindowPageTables
    kv: Fields
    adapters: Int[jax.Array, " B"] | None

    def page_tables_of(self, pools: Sequence[CachePool]) -> list[Int[jax.Array, "B P"]]:
        """Returns the page table of each KV pool of the target."""
        windows = self.window_page_tables
        return [windows.get(pool.window or 0, self.page_table) for pool in pools]


def read_plan(words: Words, program: Program, capacity: BackendLimits) -> Plan:
    """Returns views of a plan's fields; floats and seeds are bit-cast."""
    layout = plan_layout(program, capacity)
    at = {name: _view(words, field) for name, field in layout.fields.items()}
    return Plan(
        slots=at["slots"],
        starts=at["starts"] != 0,
        draft_from=at["draft_from"],
        reports=at["reports"] != 0,
        page_table=at["page_table"],
        restore=at["restore"],
        save=at["save"],
        save_at=at["save_at"],
        sampling=Sampling(**{name: at[name] for name in Sampling._fields}),
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


def _view(words: Words, field: Field) -> jax.Array:
    part = lax.slice(words, (field.offset,), (field.offset + field.size,))
    # Identity: XLA copies a bare slice in a separate launch, but fuses computed values.
    part = lax.clamp(jnp.int32(-(2**31)), part, jnp.int32(2**31 - 1))
    return lax.bitcast_convert_type(part, jnp.dtype(field.dtype)).reshape(field.shape)


def _read_prompt(at: Fields, program: Program) -> Prompt | None:
    if program.work not in (StepKind.PREFILL, StepKind.COUNT):
        return None
    nothing = jnp.zeros_like(at["save_at"])
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
    pixels = Pixels(*(at[f"image_{name}"] for name in Pixels._fields)) if begins else None
    return ImageToEncode(pixels, at["place"])


def _read_drafts(at: Fields) -> HostDraft:
    return HostDraft(
        tokens=at["draft_tree_tokens"],
        parents=at["draft_tree_parents"],
        num_nodes=at["draft_tree_num_nodes"],
        forced=at["draft_tree_forced"] != 0,
    )


def _read_copies(at: Fields) -> NgramTrees:
    return NgramTrees(**{name: at[f"copies_{name}"] for name in NgramTrees._fields})


def pack(values: Fields, program: Program, capacity: BackendLimits) -> Words:
    """Concatenates the fields of a result; fields that the step did not compute are 0."""
    parts = []
    for name, field in result_layout(program, capacity).fields.items():
        value = values.get(name, jnp.zeros(field.shape, field.dtype))
        parts.append(lax.bitcast_convert_type(value.astype(field.dtype).reshape(-1), jnp.int32))
    return jnp.concatenate(parts)


def reset_slots(state: DeviceState, plan: Plan) -> DeviceState:
    """Resets the slots of starting rows and restores their snapshots.

    Old values are replaced, not multiplied by 0, because they may be NaN.
    """
    state = state._replace(
        lengths=_reset(plan, state.lengths),
        newest=_reset(plan, state.newest),
        seen=_reset(plan, state.seen),
        delta=_restore(plan, state.delta, state.snapshots),
    )
    if state.draft is None:
        return state
    draft, held = state.draft, state.draft.draft_from[plan.slots]
    draft_from = jnp.where(plan.starts, plan.draft_from, held)
    draft = draft._replace(
        draft_from=draft.draft_from.at[plan.slots].set(draft_from),
        relay=jax.tree.map(lambda memory: _reset(plan, memory), draft.relay),
        delta=_restore(plan, draft.delta, draft.snapshots),
    )
    return state._replace(draft=draft)


def _reset(plan: Plan, memory: jax.Array) -> jax.Array:
    """Sets the slots of starting rows to zero."""
    starts = plan.starts.reshape(-1, *[1] * (memory.ndim - 1))
    rows = jnp.where(starts, jnp.zeros((), memory.dtype), memory[plan.slots])
    return memory.at[plan.slots].set(rows)


def _restore(
    plan: Plan, states: RecurrentState | None, snapshots: RecurrentState | None
) -> RecurrentState | None:
    """Sets the states of starting rows to their snapshots, or to zero."""
    if states is None or snapshots is None:
        return None
    rows = (plan.slots, plan.restore, plan.starts)
    return jax.tree.map(
        lambda memory, saved: slot_state.restore(memory, saved, *rows), states, snapshots
    )


def select(
    is_first: Bool[jax.Array, " B"], first: RecurrentState, second: RecurrentState
) -> RecurrentState:
    """Selects the first or second states per row; NaN in states not selected has no effect."""

    def pick(first: jax.Array, second: jax.Array) -> jax.Array:
        mask = is_first.reshape(1, -1, *[1] * (second.ndim - 2))
        return jnp.where(mask, first, second)

    return jax.tree.map(pick, first, second)
