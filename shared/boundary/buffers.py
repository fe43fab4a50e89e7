"""Layout of plans and results: one int32 buffer each, so a step needs one upload and one download.

Floats and seeds are bit-cast, never converted. Host and device use the same layouts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import TypeVar, get_type_hints

import numpy as np
from jaxtyping import Int32

from shared.boundary.adapter_pool import WORDS, LoadAdapter
from shared.boundary.backend import (
    BackendLimits,
    CountPromptTokens,
    Decode,
    DraftOnly,
    HostDraft,
    Prefill,
    StepPlan,
    StepResult,
    StepWork,
)
from shared.boundary.draft_sources import DraftSources
from shared.boundary.grammar_bitmask import GrammarBitmask, mask_words
from shared.boundary.images import EncodeImage, ImageInputs
from shared.boundary.ngram_table import NgramScopes
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.boundary.snapshots import Snapshots
from shared.boundary.transfer_spec import ExportKV, ImportKV, TransferWords
from shared.spec.logprobs import Logprobs, PromptLogprobs
from shared.spec.merge_drafts import NgramTrees
from shared.spec.ngram import WINDOW
from shared.spec.sampling import Sampling
from shared.spec.vision_encoder import Pixels


@dataclass(frozen=True)
class Field:
    """Position, shape and dtype of an array in an int32 buffer; other dtypes are bit-cast."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Number of int32 elements that the array takes."""
        return math.prod(self.shape) * self.dtype.itemsize // 4

    def view(self, buffer: Int32[np.ndarray, " words"]) -> np.ndarray:
        """Returns the array in `buffer` as a view."""
        words = buffer[self.offset : self.offset + self.size]
        return words.view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class Layout:
    """Fields of one buffer by name, and its size in int32 elements."""

    fields: dict[str, Field]
    size: int

    @cached_property
    def _record(self) -> np.dtype:
        """The whole buffer as one structured dtype, so that numpy splits it in one call."""
        parts = [(name, field.dtype, field.shape) for name, field in self.fields.items()]
        return np.dtype(parts)

    def views(self, buffer: Int32[np.ndarray, " words"]) -> dict[str, np.ndarray]:
        """Returns all arrays in `buffer` as views, by name."""
        record = buffer.view(self._record)[0]
        return {name: record[name] for name in self.fields}


def _lay_out(arrays: list[tuple[str, tuple[int, ...], type]]) -> Layout:
    fields, offset = {}, 0
    for name, shape, dtype in arrays:
        fields[name] = Field(offset, shape, np.dtype(dtype))
        offset += fields[name].size
    return Layout(fields, offset)


DTYPES = {"float32": np.float32, "int32": np.int32, "uint32": np.uint32}
"""Dtypes that a buffer of 32-bit elements can hold, by their names in annotations."""


@cache
def sampling_layout(kind: type, capacity: BackendLimits) -> dict[str, tuple[tuple[int, ...], type]]:
    """Returns the shape after the row axis and the dtype of each annotated field of `Sampling`.

    Args:
      kind: `Sampling`; the first axis of its fields is the row.
      capacity: Limits of the backend, which bound the other axes.

    Raises:
      TypeError: A field has a dtype that is not in `DTYPES`, or an axis without a bound in
        `capacity`.
    """
    bounds = {"M": capacity.max_stop_ids, "K": capacity.max_bias}
    bounds |= {"S_max": capacity.max_calibrated}
    layout = {}
    for name, array in get_type_hints(kind).items():
        (dtype, *others), (_, *axes) = array.dtypes, array.dim_str.split()
        if others or dtype not in DTYPES:
            raise TypeError(
                f"{name}: dtype must be one of {', '.join(DTYPES)}, got {' or '.join(array.dtypes)}"
            )
        if unknown := set(axes) - bounds.keys():
            raise TypeError(
                f"{name}: axis {min(unknown)} has no bound; use one of {', '.join(bounds)}"
            )
        layout[name] = tuple(bounds[axis] for axis in axes), DTYPES[dtype]
    return layout


def neutral(capacity: BackendLimits, rows: int) -> Sampling:
    """Returns sampling parameters without effect: greedy argmax of the unmodified logits."""
    layout = sampling_layout(Sampling, capacity)
    made = {name: np.zeros((rows, *shape), dtype) for name, (shape, dtype) in layout.items()}
    made["top_p"][:] = made["repetition"][:] = 1.0
    made["top_k"][:] = capacity.vocab
    return Sampling(**made)


_padding = cache(neutral)  # to copy from


@cache
def plan_layout(program: Program, capacity: BackendLimits) -> Layout:
    """Returns the buffer layout of a plan of `program`.

    Field names are those of the dataclasses. Prefixes: `draft_tree_` for `HostDraft`, `mask_` for
    `GrammarBitmask`, `image_` for `ImageInputs` and `Pixels`, `copies_` for `NgramTrees`, `text_`
    for `NgramScopes`, `kv_` for `TransferWords`, `adapter_` for `LoadAdapter`.
    """
    B, T, N = program.batch, program.tokens, program.shape.nodes
    work = {
        StepKind.PREFILL: [
            ("tokens", (T,)),
            ("row_starts", (B + 1,)),
            ("first_positions", (B,)),
            ("ends_prompt", (B,)),
            ("next_tokens", (B,)),
            *_image_fields(program, capacity),
        ],
        StepKind.DECODE: [],
        StepKind.DRAFT: [],
        StepKind.COUNT: [("tokens", (T,)), ("row_starts", (B + 1,)), ("first_positions", (B,))],
        StepKind.ENCODE: [("place", (1,))],
        StepKind.EXPORT_KV: [],
        StepKind.IMPORT_KV: _transfer_fields(program, capacity),
        StepKind.LOAD_ADAPTER: _adapter_fields(program, capacity),
    }[program.work]
    if program.has(ProgramFeature.HOST_DRAFT):
        work = [
            ("draft_tree_tokens", (B, N)),
            ("draft_tree_parents", (B, N)),
            ("draft_tree_num_nodes", (B,)),
            ("draft_tree_forced", (B,)),
        ]
    rows = [("slots", (B,)), ("starts", (B,)), ("draft_from", (B,)), ("reports", (B,))]
    is_load = program.work is StepKind.LOAD_ADAPTER
    rows += [("adapters", (B,))] * (is_load or program.has(ProgramFeature.LORA))
    snapshots = [("restore", (B,)), ("save", (B,)), ("save_at", (B,))]
    if capacity.texts is not None:
        rows += [("text_scopes", (B, 2))]
        rows += [("text_before", (B, WINDOW))] * (program.work is StepKind.PREFILL)
    masks = []
    if program.has(ProgramFeature.MASK):
        words = mask_words(capacity.vocab)
        masks = [("mask_index", (B, N)), ("mask_bits", (1 + program.shape.rows, words))]
    sampling = [
        (name, (B, *shape), dtype)
        for name, (shape, dtype) in sampling_layout(Sampling, capacity).items()
    ]
    ints = [(name, shape, np.int32) for name, shape in work + rows + snapshots]
    pages = [("page_table", (B, program.pages), np.int32)]
    if num_windows := len(capacity.window_pools):
        pages += [("window_page_tables", (num_windows, B, program.pages), np.int32)]
    pixels = _pixel_layout(program, capacity)
    copies = (
        _copies_layout(B, program.shape.copied) if program.has(ProgramFeature.NGRAM_DRAFTS) else []
    )
    bits = [(name, shape, np.int32) for name, shape in masks]
    return _lay_out([*ints, *sampling, *pixels, *pages, *copies, *bits])


def _transfer_fields(
    program: Program, capacity: BackendLimits
) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the fields of `TransferWords`; empty without KV transfer."""
    return [] if capacity.transfer is None else capacity.transfer.fields(program)


def _adapter_fields(program: Program, capacity: BackendLimits) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the field of `LoadAdapter`; empty without an adapter pool."""
    if program.work is not StepKind.LOAD_ADAPTER or capacity.adapters is None:
        return []
    return [(WORDS, (capacity.adapters.num_words(program),))]


def _image_fields(program: Program, capacity: BackendLimits) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the fields of `ImageInputs` in a prefill; empty for a text-only model."""
    if capacity.images is None:
        return []
    B, T = program.batch, program.tokens
    return [
        ("image_sources", (T,)),
        ("image_mrope_positions", (T, 3)),
        ("image_next_embed_sources", (B,)),
        ("image_mrope_position_deltas", (B,)),
    ]


def _pixel_layout(
    program: Program, capacity: BackendLimits
) -> list[tuple[str, tuple[int, ...], type]]:
    """Returns the fields of `Pixels`, for encode programs that run the first block."""
    if program.work is not StepKind.ENCODE or program.blocks.start or capacity.images is None:
        return []
    vision = capacity.images.vision
    lines, quarter = vision.max_lines(program.tokens), vision.head_size // 4
    return [
        ("image_bytes", (vision.image_bytes(program.tokens),), np.uint8),
        ("image_sides", (2,), np.int32),
        ("image_levels", (vision.channels, 256), np.float32),
        ("image_corners", (lines, 2), np.int32),
        ("image_shares", (lines, 2), np.float32),
        *((f"image_{x}", (lines, quarter), np.float32) for x in ("cos", "sin")),
    ]


def _copies_layout(B: int, M: int) -> list[tuple[str, tuple[int, ...], type]]:
    """Returns the fields of `NgramTrees`."""
    shape_of = {"num_nodes": (B,), "at": (B,)}
    return [
        (
            f"copies_{f.name}",
            shape_of.get(f.name, (B, M)),
            np.float32 if f.name == "weights" else np.int32,
        )
        for f in fields(NgramTrees)
    ]


@cache
def result_layout(program: Program, capacity: BackendLimits) -> Layout:
    """Returns the layout of a result of `program`.

    The fields named in `SCORES` hold the `PromptLogprobs`. They have one row per token. Those of
    `TransferWords` have one row per entry. All others have one row per row of the plan.
    """
    B, N, W, K = program.batch, program.shape.nodes, program.shape.max_tokens, capacity.max_logprobs
    ints = [("tokens", (B, W)), ("counts", (B,)), ("failed", (B,)), ("snapshot_saved", (B,))]
    ints += [("drafts", (B, N)), ("parents", (B, N)), ("num_nodes", (B,))]
    if program.has(ProgramFeature.NGRAM_DRAFTS):
        ints += [(name, (B, N)) for name in DraftSources._fields]
    if program.work is StepKind.EXPORT_KV:
        ints += _transfer_fields(program, capacity)
    arrays = [(name, shape, np.int32) for name, shape in ints]
    if program.has(ProgramFeature.LOGPROBS):
        arrays += [
            ("chosen", (B, W), np.float32),
            ("top_ids", (B, W, K), np.int32),
            ("top_values", (B, W, K), np.float32),
        ]
    if program.has(ProgramFeature.PROMPT_LOGPROBS):
        T, K = program.tokens, capacity.max_scores
        arrays += [
            ("score_chosen", (T,), np.float32),
            ("score_ranks", (T,), np.int32),
            ("score_top_ids", (T, K), np.int32),
            ("score_top_values", (T, K), np.float32),
        ]
    return _lay_out(arrays)


SCORES = tuple(f"score_{name}" for name in PromptLogprobs._fields)


def has_plan_rows(name: str) -> bool:
    """Returns True if a field of a result has one row per row of the plan."""
    return name not in SCORES and not name.startswith("kv_")


def empty_plan(program: Program, capacity: BackendLimits) -> StepPlan:
    """Returns a plan of padding rows in a new buffer; the planner fills in the rows."""
    layout = plan_layout(program, capacity)
    buffer = np.zeros(layout.size, np.int32)
    at = layout.views(buffer)
    for name, values in vars(_padding(capacity, program.batch)).items():
        at[name][:] = values
    if program.has(ProgramFeature.MASK):
        at["mask_bits"][0] = -1
    return plan_in(buffer, program, capacity)


def plan_in(
    buffer: Int32[np.ndarray, " words"], program: Program, capacity: BackendLimits
) -> StepPlan:
    """Returns the plan stored in a buffer, as views."""
    at = plan_layout(program, capacity).views(buffer)
    sampling = Sampling(**{f.name: at[f.name] for f in fields(Sampling)})
    mask = (
        GrammarBitmask(at["mask_bits"], at["mask_index"])
        if program.has(ProgramFeature.MASK)
        else None
    )
    texts = NgramScopes(at["text_scopes"], at.get("text_before")) if "text_scopes" in at else None
    return StepPlan(
        program=program,
        buffer=buffer,
        work=_work(program, at),
        slots=at["slots"],
        page_table=at["page_table"],
        starts=at["starts"],
        draft_from=at["draft_from"],
        reports=at["reports"],
        sampling=sampling,
        snapshots=Snapshots(at["restore"], at["save"], at["save_at"]),
        mask=mask,
        texts=texts,
        window_page_tables=at.get("window_page_tables"),
        adapters=at.get("adapters"),
    )


def _work(program: Program, at: dict[str, np.ndarray]) -> StepWork:
    match program.work:
        case StepKind.PREFILL:
            sees = "image_sources" in at
            images = _prefixed(ImageInputs, "image_", at) if sees else None
            names = (f.name for f in fields(Prefill) if f.name != "images")
            return Prefill(**{name: at[name] for name in names}, images=images)
        case StepKind.ENCODE:
            begins = "image_bytes" in at
            return EncodeImage(_prefixed(Pixels, "image_", at) if begins else None, at["place"])
        case StepKind.COUNT:
            return CountPromptTokens(**{f.name: at[f.name] for f in fields(CountPromptTokens)})
        case StepKind.DRAFT:
            return DraftOnly(program.shape)
        case StepKind.EXPORT_KV:
            return ExportKV()
        case StepKind.IMPORT_KV:
            return ImportKV(TransferWords.of(at))
        case StepKind.LOAD_ADAPTER:
            return LoadAdapter(at[WORDS])
    if program.has(ProgramFeature.NGRAM_DRAFTS):
        copies = NgramTrees(**{f.name: at[f"copies_{f.name}"] for f in fields(NgramTrees)})
        return Decode(program.shape, None, copies)
    if not program.has(ProgramFeature.HOST_DRAFT):
        return Decode(program.shape, None)
    return Decode(program.shape, _prefixed(HostDraft, "draft_tree_", at))


Record = TypeVar("Record", ImageInputs, Pixels, HostDraft)


def _prefixed(kind: type[Record], prefix: str, at: dict[str, np.ndarray]) -> Record:
    """Builds a record from the buffer fields with a prefix."""
    return kind(**{f.name: at[f"{prefix}{f.name}"] for f in fields(kind)})


def read_result(
    program: Program,
    capacity: BackendLimits,
    words: Int32[np.ndarray, " words"],
    device_seconds: float | None,
) -> StepResult:
    """Splits the int32 array of a backend into a result."""
    at = result_layout(program, capacity).views(words)
    logprobs = scores = origins = exported = None
    if program.work is StepKind.EXPORT_KV:
        exported = TransferWords.of(at)
    if program.has(ProgramFeature.NGRAM_DRAFTS):
        origins = DraftSources(*map(at.pop, DraftSources._fields))
    if program.has(ProgramFeature.LOGPROBS):
        logprobs = Logprobs(at.pop("chosen"), at.pop("top_ids"), at.pop("top_values"))
    if program.has(ProgramFeature.PROMPT_LOGPROBS):
        scores = PromptLogprobs(*map(at.pop, SCORES))
    return StepResult(
        **at,
        logprobs=logprobs,
        scores=scores,
        device_seconds=device_seconds,
        origins=origins,
        words=exported,
    )
