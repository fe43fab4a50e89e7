"""Interface between the host engine and a device backend.

The host describes one step in a `StepPlan` and passes it to `Backend.submit`, which returns at
once. The result arrives in a `StepFuture`. A plan is one int32 buffer and a result is one int32
array, so a step needs one upload and one download. `shared.boundary.buffers` defines both layouts.

Invariants of every backend, each tested by `tests/boundary/test_backend_contract.py`:
- order: steps take effect in the order of submission.
- continuation: a decode row carries no token and no length. It continues from the device's state of
  its slot, so step n+1 can be submitted before the result of step n is known.
- reach: a step writes only KV positions at or past the slot's length, the slot's own state, and
  named snapshots.
- bound: a decode step adds 1..S+1 tokens and writes at most `TreeShape.scratch` positions ahead.
- independence: a row's tokens depend neither on other rows nor on padding. Its token count does not
  either, if each node has a verify row.
- isolation: NaN in a row fails only that row and does not affect later owners of its pages.
- readiness: `submit` compiles and captures nothing; a program that is not prepared is an error.
- beginnings: a row starts in a prefill or count step; other steps reset and restore nothing.
- images: an encode step writes one encoder-cache row per image token, from `place` on, whatever
  the other rows of the cache. A prefill reads the rows that its plan names.
- transfer: an export copies the named pages or snapshot, an import writes them and nothing else.
- adapters: a load step writes layers of one adapter slot, which later steps read.

Page, slot, snapshot and encoder-cache row 0 are reserved for writes of padding; nothing reads them.

Policy, what may not be added here: names of frameworks, GPUs, model families or drafters (their
records have properties), command-line options (the startup resolves them), device arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import Protocol

import numpy as np
from jaxtyping import Int32

from shared.boundary.adapter_pool import AdapterPoolSpec, CopyWork
from shared.boundary.draft_sources import DraftSources
from shared.boundary.grammar_bitmask import GrammarBitmask
from shared.boundary.images import EncodeImage, EncoderCacheSpec, ImageInputs
from shared.boundary.ngram_table import NgramScopes, NgramTableSpec
from shared.boundary.program import (
    CAPTURED,
    LaunchMode,
    Program,
    ProgramFeature,
    StepKind,
    unmasked,
)
from shared.boundary.snapshots import Snapshots
from shared.boundary.tp_group import SINGLE_RANK, TPGroup
from shared.boundary.transfer_spec import TransferSpec, TransferWords
from shared.boundary.window_pools import WindowPool, check_ascending
from shared.drafts.drafter_spec import DrafterSpec
from shared.models.cache_spec import ITEM_BYTES, CacheUnit
from shared.models.config import ModelConfig
from shared.models.formats.weight_format import QuantizedFormat
from shared.models.groups import CachePool, pools_with
from shared.models.tp_sharding import shard_config
from shared.spec.draft_tree import TreeShape
from shared.spec.logprobs import Logprobs, PromptLogprobs
from shared.spec.merge_drafts import NgramTrees
from shared.spec.sampling import Sampling


@dataclass(frozen=True, kw_only=True, eq=False)
class BackendLimits:
    """Limits and programs of a backend, fixed at startup.

    A program that is not listed does not exist, and the planner never requests one.

    Attributes:
      page_size: Tokens in a KV page.
      num_pages, num_slots, num_snapshots: Pool sizes, each including the reserved entry 0.
      programs: All programs of the backend.
      overlap: Maximum number of steps in flight while the next one is planned.
      context_length: Maximum tokens of a request, prompt and output together.
      vocab: Vocabulary size of the target.
      max_stop_ids, max_bias, max_logprobs: Widths M and K of fields of the plan and of the result.
      max_scores: Width K of a result's prompt logprobs; 0 if no program returns any.
      accept_rule: Name of the rule in `shared.spec.acceptance.RULES`; all but "exact" need chains.
      accept_rates: Acceptance rate of each draft level if acceptance is simulated, else None; see
        `shared.spec.acceptance.simulate`.
      images: Encoder cache; None for a text-only model, whose plans contain no images.
      texts: N-gram table on the device; None if no program drafts from it.
      window_pools: Page pools of sliding-window layers, by ascending window. All other layers, and
        those of drafters, use the `num_pages` pages.
      transfer: Entries of KV transfer; None if no program exports or imports them.
      adapters: Slots of LoRA adapters; None if no program takes adapters.

    Raises:
      ValueError: The accept rule requires chains and a program verifies trees; or it is combined
        with simulated acceptance; or `accept_rates` is empty; or two pools have one window.
    """

    page_size: int
    num_pages: int
    num_slots: int
    num_snapshots: int
    programs: tuple[Program, ...]
    overlap: int
    context_length: int
    vocab: int
    max_stop_ids: int
    max_bias: int
    max_logprobs: int
    max_scores: int
    accept_rule: str
    accept_rates: tuple[float, ...] | None = None
    images: EncoderCacheSpec | None = None
    texts: NgramTableSpec | None = None
    window_pools: tuple[WindowPool, ...] = ()
    transfer: TransferSpec | None = None
    adapters: AdapterPoolSpec | None = None

    def __post_init__(self) -> None:
        check_ascending(self.window_pools)
        widths = [p.shape.width for p in self.programs if not p.has(ProgramFeature.HOST_DRAFT)]
        if any(p.has(ProgramFeature.NGRAM_DRAFTS) for p in self.programs):
            widths.append(2)  # n-gram drafts are siblings of the drafter's
        widest = max(widths, default=0)
        if self.accept_rule != "exact" and widest > 1:
            raise ValueError(
                f"accept_rule {self.accept_rule} requires draft chains, but a program verifies "
                f"trees of width {widest}"
            )
        if self.accept_rule != "exact" and self.accept_rates is not None:
            raise ValueError(
                f"accept_rule {self.accept_rule} is not supported with simulated acceptance"
            )
        if self.accept_rates == ():
            raise ValueError("accept_rates must contain the rate of at least one draft level")

    @cached_property
    def simulated_accept_length(self) -> float | None:
        """Mean tokens per step of a full-depth tree under simulated acceptance, else None."""
        if self.accept_rates is None:
            return None
        return 1 + sum(accumulate(self.accept_rates, mul))

    @cached_property
    def token_sizes(self) -> tuple[int, ...]:
        """Token buckets of a prefill, in ascending order."""
        return tuple(sorted({p.tokens for p in self.programs if p.work is StepKind.PREFILL}))

    @cached_property
    def max_image_tokens(self) -> int:
        """Maximum prompt tokens of one image; 0 for a text-only model."""
        if self.images is None:
            return 0
        most = max((p.tokens for p in self.programs if p.work is StepKind.ENCODE), default=0)
        return most // self.images.vision.merged

    @cached_property
    def shapes(self) -> tuple[TreeShape, ...]:
        """Draft shapes in ascending order of size."""
        return tuple(sorted({p.shape for p in self.programs}, key=lambda s: (s.nodes, s.rows)))

    @cached_property
    def unmasked_programs(self) -> tuple[Program, ...]:
        """Programs for batches without a grammar; see `unmasked`."""
        return unmasked(self.programs)

    @cached_property
    def max_depth(self) -> int:
        """S_max: the maximum number of draft tokens that one step can accept."""
        return max(shape.depth for shape in self.shapes)

    @cached_property
    def max_calibrated(self) -> int:
        """Number of depths in a plan's `calibration`; at least 1."""
        return max(1, self.max_depth)

    @cached_property
    def max_width(self) -> int:
        """k_max: candidates stored in a drafter's draft input."""
        return max(1, *(shape.width for shape in self.shapes))

    @cached_property
    def scratch(self) -> int:
        """Maximum positions past a slot's length that one step writes."""
        return max(shape.scratch for shape in self.shapes)

    @cached_property
    def max_positions(self) -> int:
        """Positions covered by page tables and rotary tables, with all steps in flight included."""
        return self.context_length + (self.overlap + 1) * (self.max_depth + 1) + self.scratch

    def num_pages_of(self, window: int | None) -> int:
        """Returns the pages of the target's layers with a sliding window (None: without one)."""
        return next((p.num_pages for p in self.window_pools if p.window == window), self.num_pages)

    def num_pages_for(self, positions: int) -> int:
        """Returns the number of pages that hold `positions` tokens."""
        return -(-positions // self.page_size)


@dataclass(frozen=True, kw_only=True, eq=False)
class BackendSpec:
    """Specification from which a backend is built, before memory is allocated.

    Attributes:
      config: Config of the target model.
      drafts: Drafter on the device.
      capacity: Limits and programs that the backend must provide.
      dtype: Dtype of weights, KV and activations, float32 or bfloat16.
      on_gpu: True if steps run on a GPU.
      captured: Kinds of steps to capture as graphs, for a backend that captures steps on a GPU.
      formats: Formats of the parameters that stay quantised, by name.
      ranks: The tensor-parallel group, and the rank of this backend in it.
    """

    config: ModelConfig
    drafts: DrafterSpec
    capacity: BackendLimits
    dtype: str
    on_gpu: bool
    captured: tuple[StepKind, ...] = CAPTURED
    formats: Mapping[str, QuantizedFormat] = field(default_factory=dict)
    ranks: TPGroup = SINGLE_RANK

    @property
    def share(self) -> BackendSpec:
        """The same specification with the tensor-parallel shard of the model and of the drafter."""
        count = self.ranks.count
        config = shard_config(self.config, count)
        return replace(self, config=config, drafts=self.drafts.local(count))

    @property
    def cache_pools(self) -> tuple[CachePool, ...]:
        """Cache pools of the target and of the drafter."""
        sizes = self.drafts.sizes
        return (*self.config.cache_pools, *(() if sizes is None else sizes.pools))

    @property
    def has_state(self) -> bool:
        """True if a layer of the target or of the drafter has a recurrent state."""
        return bool(pools_with(self.cache_pools, CacheUnit.SLOT))

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of `dtype`."""
        return ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Prefill:
    """Prompt chunks of several requests, concatenated.

    Attributes:
      tokens: Prompt tokens of all rows; padding from `row_starts[B]` on.
      row_starts: Index of each row's first token, and the end.
      first_positions: Position of each row's first token, equal to its slot's length so far.
      ends_prompt: 1 if the step samples the row's next token; 0 if the prompt continues.
      next_tokens: Prompt token after the row's chunk; not read where `ends_prompt` is 1.
      images: Image inputs; None for a text-only model.
    """

    tokens: Int32[np.ndarray, " T"]
    row_starts: Int32[np.ndarray, " B+1"]
    first_positions: Int32[np.ndarray, " B"]
    ends_prompt: Int32[np.ndarray, " B"]
    next_tokens: Int32[np.ndarray, " B"]
    images: ImageInputs | None


@dataclass(frozen=True)
class HostDraft:
    """Draft trees built by the host.

    Siblings differ. Node 0 is the device's newest token; its entry is not read. Rows with `forced`
    are chains that are accepted whatever the target predicts.
    """

    tokens: Int32[np.ndarray, "B N"]
    parents: Int32[np.ndarray, "B N"]
    num_nodes: Int32[np.ndarray, " B"]
    forced: Int32[np.ndarray, " B"]


@dataclass(frozen=True)
class Decode:
    """Drafts (unless `drafts` contains the trees), verifies and commits.

    Attributes:
      shape: Shape of the verified trees.
      drafts: Draft trees of the host; None if the device drafts.
      ngram_drafts: N-gram drafts that are merged into the device's trees; None if there are none.
    """

    shape: TreeShape
    drafts: HostDraft | None
    ngram_drafts: NgramTrees | None = None


@dataclass(frozen=True)
class DraftOnly:
    """Drafts and ranks the nodes, returns the trees and commits nothing."""

    shape: TreeShape


@dataclass(frozen=True)
class CountPromptTokens:
    """Adds prompt tokens that a cache hit skips in the prefill to the token counts of their row.

    A row is counted from its first token through the first token of its prefill, in one or more
    steps. The first of them starts the row instead of the prefill.

    Attributes:
      tokens: Tokens of all rows; padding from `row_starts[B]` on.
      row_starts: Index of each row's first token, and the end.
      first_positions: Position of each row's first token.
    """

    tokens: Int32[np.ndarray, " T"]
    row_starts: Int32[np.ndarray, " B+1"]
    first_positions: Int32[np.ndarray, " B"]


StepWork = Prefill | Decode | DraftOnly | CountPromptTokens | EncodeImage | CopyWork
"""Inputs of a step by its kind."""


@dataclass(frozen=True)
class StepPlan:
    """One step. Every array is a view into `buffer`.

    Attributes:
      program: The compiled program that runs the plan.
      buffer: The plan as the device receives it; never refilled while a step may read it.
      work: Inputs of the step's kind.
      slots: Slot of each row; 0 for padding.
      page_table: Pages of each row; 0 for padding.
      window_page_tables: Pages of each row in each window pool, in the columns of `page_table`; 0
        where no row of the step attends to. None without window pools.
      starts: 1 at a row's first step (a prefill or a count), which resets its state, token counts
        and drafter state. Always 0 and not read in decode and draft steps.
      draft_from: First position with complete draft KV after a cache hit; read with `starts`.
      reports: 1 if the row's logprobs are requested; read if the program computes logprobs.
      sampling: Sampling parameters of each row.
      snapshots: Recurrent state to restore and to save.
      mask: Grammar bitmasks; None if the program takes none.
      texts: N-gram scopes of the rows; None if no program drafts from the n-gram table.
      adapters: Adapter slot of each row (0: none), or that a load step writes; None without.
    """

    program: Program
    buffer: Int32[np.ndarray, " words"]
    work: StepWork
    slots: Int32[np.ndarray, " B"]
    page_table: Int32[np.ndarray, "B P"]
    starts: Int32[np.ndarray, " B"]
    draft_from: Int32[np.ndarray, " B"]
    reports: Int32[np.ndarray, " B"]
    sampling: Sampling
    snapshots: Snapshots
    mask: GrammarBitmask | None
    texts: NgramScopes | None = None
    window_page_tables: Int32[np.ndarray, "W B P"] | None = None
    adapters: Int32[np.ndarray, " B"] | None = None

    @property
    def page_tables(self) -> list[Int32[np.ndarray, "B P"]]:
        """Page table of each pool: that of `page_table`, then those of the window pools."""
        windows = self.window_page_tables
        return [self.page_table, *(() if windows is None else windows)]


@dataclass(frozen=True)
class StepResult:
    """Result of a step.

    Attributes:
      tokens: Output tokens of each row; 0 past its count.
      counts: Number of tokens added to each row; 0 if its prompt continues or the row failed.
      failed: 1 if a row's logits were not finite.
      snapshot_saved: 1 if the row's snapshot was written.
      drafts, parents, num_nodes: The draft trees.
      origins: Sources of their nodes; None if the plan contained no n-gram drafts.
      logprobs: Logprobs of the output tokens of rows that request them; None without this feature.
      scores: Prompt logprobs: entry t is of the token after flat token t of a prefill; 0 for
        padding. None if the program computes none.
      device_seconds: Device time of the step; None if it is unknown (after idling).
      words: Entries of an export; else None.
    """

    tokens: Int32[np.ndarray, "B W"]
    counts: Int32[np.ndarray, " B"]
    failed: Int32[np.ndarray, " B"]
    snapshot_saved: Int32[np.ndarray, " B"]
    drafts: Int32[np.ndarray, "B N"]
    parents: Int32[np.ndarray, "B N"]
    num_nodes: Int32[np.ndarray, " B"]
    logprobs: Logprobs | None
    scores: PromptLogprobs | None
    device_seconds: float | None
    origins: DraftSources | None = None
    words: TransferWords | None = None


class StepFuture(Protocol):
    """Result of a submitted step."""

    def result(self) -> StepResult:
        """Waits until the result has been copied to the host, and returns it."""
        ...


class Backend(Protocol):
    """A device that runs steps; its module also has a function `workspace` of a `BackendSpec`."""

    capacity: BackendLimits

    def workspace(self, program: Program) -> int:
        """Returns the bytes that a step of the program needs beyond weights and pools."""
        ...

    def prepare(self, programs: Sequence[Program], progress: Callable[[Program], None]) -> None:
        """Compiles or captures programs; skips those that are ready.

        Args:
          programs: Some programs of `capacity`.
          progress: Called with each program before it is prepared.

        Raises:
          ValueError: `capacity` does not list a program.
        """
        ...

    def launch(self, program: Program) -> LaunchMode:
        """Returns the launch mode of a step of the program."""
        ...

    def submit(self, plan: StepPlan) -> StepFuture:
        """Queues one step and returns at once.

        Raises:
          ValueError: The plan's program was not prepared, or a decode or draft step starts a row.
        """
        ...

    def close(self) -> None:
        """Waits for the steps in flight and frees the device."""
        ...
