"""The boundary between the host engine and a device backend.

The host describes one step in a `StepPlan` and hands it to `Backend.submit`, which returns at once;
the answer comes back in a `StepFuture`. A plan is one int32 buffer: its fields are views into it,
so a step is one upload, and a result is one int32 array, so a step is one download; both are laid
out by `shared.boundary.buffers`.

Promises of every backend, each a test of `tests/boundary/test_backend_contract.py`:
- order: steps take effect in the order of submission.
- continuation: a decode row carries no token and no length; it goes on from what the device holds
  for its slot, so step n+1 can be submitted before the result of step n is known.
- reach: a step writes only KV positions at or past the slot's length, the slot's own state, and
  the snapshots named in the plan.
- bound: a decode step adds 1..S+1 tokens and uses at most `TreeShape.scratch` positions past the
  slot's length.
- independence: a row's tokens depend neither on its neighbours nor on padding; its counts neither
  where there is a verify row for each node.
- isolation: NaN in a row fails that row, not the step, and harms no later owner of its pages.
- readiness: `submit` compiles and captures nothing; a program that is not prepared is refused.
- beginnings: a row starts in a prefill or a count; no decode and no draft resets or restores one.
- pictures: an encoding writes the pool's rows from its place on, as many as the picture has; they
  are the same whatever else is in the pool, and a prefill reads those that its plan names.

Page, slot, snapshot and picture row 0 are sinks for padding; nothing reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Int32

from shared.boundary.pictures import Encode, PicturePool, Pictures
from shared.boundary.program import CAPTURED, Extra, Program, Work, unmasked
from shared.boundary.ranks import ALONE, Ranks
from shared.boundary.texts import Texts, TextTable
from shared.drafts.drafts import Drafts
from shared.models.config import ModelConfig
from shared.models.fp8_words import InWords
from shared.models.ranks import local
from shared.spec.copies import Copies
from shared.spec.draft_tree import TreeShape
from shared.spec.logprobs import Logprobs, Scores
from shared.spec.sampling import Sampling

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


class Launch(Enum):
    """How a step gets to the device."""

    COMPILED = "compiled"
    CUDA_GRAPH = "cuda_graph"
    DISABLED = "eager_by_flag"
    EAGER = "eager"


@dataclass(frozen=True, kw_only=True, eq=False)
class Capacity:
    """What a backend is made to provide, once its start has found it out.

    What is not listed does not exist, and the planner never asks for it.

    Attributes:
      page_size: Tokens in a KV page.
      num_pages, num_slots, num_snapshots: Pool sizes, each with the sink 0.
      programs: Every program that exists.
      overlap: Most steps in flight beside the one being planned.
      context_length: Most tokens of a request, prompt and output together.
      vocab: Tokens of the target's vocabulary.
      max_stop_ids, max_bias, max_logprobs: Widths M, K of the plan's and the result's fields.
      max_scores: Width K of a result's scores.
      accept_rule: Which of `shared.spec.acceptance.RULES` accepts drafts; all but "match" are for
        chains.
      accept_rates: Where they are given, drafts are accepted by lot instead, each level's first
        with the rate of its level; see `shared.spec.acceptance.simulate`.
      pictures: None where the model sees no pictures; then no plan has any.
      texts: None where no program drafts from seen text.

    Raises:
      ValueError: A program drafts trees, or joins two sources in one, and the rule is for chains;
        or a lot and another rule than "match" are asked for, or a lot without rates.
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
    max_scores: int = 0
    accept_rule: str = "match"
    accept_rates: tuple[float, ...] | None = None
    pictures: PicturePool | None = None
    texts: TextTable | None = None

    def __post_init__(self) -> None:
        widest = max(
            (p.shape.width for p in self.programs if not p.has(Extra.HOST_DRAFT)), default=0
        )
        if any(p.has(Extra.COPIES) for p in self.programs):
            widest = max(widest, 2)  # copies stand beside what is drafted
        if self.accept_rule != "match" and widest > 1:
            raise ValueError(f"the accept rule {self.accept_rule} is for chains, not for trees")
        if self.accept_rule != "match" and self.accept_rates is not None:
            raise ValueError(f"the accept rule {self.accept_rule} and a lot exclude each other")
        if self.accept_rates == ():
            raise ValueError("a lot needs the rate of a level at least")

    @cached_property
    def simulated_accept_length(self) -> float | None:
        """Tokens of a step on average, by the lot, where every level has a draft; None: judged."""
        if self.accept_rates is None:
            return None
        return 1 + sum(
            prod(self.accept_rates[: level + 1]) for level in range(len(self.accept_rates))
        )

    @cached_property
    def token_sizes(self) -> tuple[int, ...]:
        """Token buckets of a prefill, ascending."""
        return tuple(sorted({p.tokens for p in self.programs if p.work is Work.PREFILL}))

    @cached_property
    def max_picture_tokens(self) -> int:
        """Most rows of a prompt that one picture may take; 0 where the model sees none."""
        if self.pictures is None:
            return 0
        most = max((p.tokens for p in self.programs if p.work is Work.ENCODE), default=0)
        return most // self.pictures.vision.merged

    @cached_property
    def shapes(self) -> tuple[TreeShape, ...]:
        """Draft shapes, the smallest first."""
        return tuple(sorted({p.shape for p in self.programs}, key=lambda s: (s.nodes, s.rows)))

    @cached_property
    def unmasked_programs(self) -> tuple[Program, ...]:
        """Programs of batches in which no request has a grammar; see `unmasked`."""
        return unmasked(self.programs)

    @cached_property
    def max_depth(self) -> int:
        """S_max: the most drafts that one step can accept."""
        return max(shape.depth for shape in self.shapes)

    @cached_property
    def max_calibrated(self) -> int:
        """Depths of a plan's `calibration`, which has one at least."""
        return max(1, self.max_depth)

    @cached_property
    def max_width(self) -> int:
        """k_max: candidates that a drafter's relay holds."""
        return max(1, *(shape.width for shape in self.shapes))

    @cached_property
    def scratch(self) -> int:
        """Most positions past a slot's length that one step writes."""
        return max(shape.scratch for shape in self.shapes)

    @cached_property
    def max_positions(self) -> int:
        """How far page tables and rotary tables reach: the bound with every step in flight."""
        return self.context_length + (self.overlap + 1) * (self.max_depth + 1) + self.scratch

    def num_pages_for(self, positions: int) -> int:
        """Pages that hold `positions` tokens."""
        return -(-positions // self.page_size)


@dataclass(frozen=True, kw_only=True, eq=False)
class Blueprint:
    """What a backend is made from, known before any memory is taken.

    Attributes:
      config: The target's settings.
      drafts: What drafts on the device.
      capacity: What the backend shall provide.
      dtype: Of weights, KV and activations, float32 or bfloat16.
      on_gpu: Whether steps run on a GPU.
      captured: Of a backend that captures steps on a GPU, the works whose steps it shall.
      in_words: The target's parameters that stay FP8; see `shared.models.fp8_words`.
      in_codes: Those that stay codes and quantise their rows; see `shared.spec.fp8_activations`.
      ranks: Which of the ranks that run the model it is.
    """

    config: ModelConfig
    drafts: Drafts
    capacity: Capacity
    dtype: str
    on_gpu: bool
    captured: tuple[Work, ...] = CAPTURED
    in_words: InWords = field(default_factory=dict)
    in_codes: frozenset[str] = frozenset()
    ranks: Ranks = ALONE

    @property
    def share(self) -> Blueprint:
        """With what one of the ranks has of the model and of what drafts."""
        count = self.ranks.count
        return replace(self, config=local(self.config, count), drafts=self.drafts.local(count))

    @property
    def item_bytes(self) -> int:
        """Bytes of one number of the dtype."""
        return ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Prefill:
    """Prompt chunks, one after the other.

    Attributes:
      tokens: Prompt tokens of all rows; past `row_starts[B]` padding.
      row_starts: First token of each row, and the end.
      first_positions: Position of each row's first token; its slot's length so far.
      ends_prompt: 1 where the row's next token is chosen; 0 where the prompt goes on.
      next_tokens: The newest token of a row that goes on; not read where `ends_prompt`.
      pictures: None where the model sees none.
    """

    tokens: Int32[np.ndarray, " T"]
    row_starts: Int32[np.ndarray, " B+1"]
    first_positions: Int32[np.ndarray, " B"]
    ends_prompt: Int32[np.ndarray, " B"]
    next_tokens: Int32[np.ndarray, " B"]
    pictures: Pictures | None


@dataclass(frozen=True)
class HostDraft:
    """Draft trees made by the host.

    Siblings carry different tokens. Node 0 stands for the device's newest token, its entry is not
    read. `forced` rows are chains accepted whatever the target says.
    """

    tokens: Int32[np.ndarray, "B N"]
    parents: Int32[np.ndarray, "B N"]
    num_nodes: Int32[np.ndarray, " B"]
    forced: Int32[np.ndarray, " B"]


@dataclass(frozen=True)
class Decode:
    """One step of drafting (unless `drafts` brings the trees), verifying and committing.

    Attributes:
      copies: Copies of seen text that join what is drafted; None where none do.
    """

    shape: TreeShape
    drafts: HostDraft | None
    copies: Copies | None = None


@dataclass(frozen=True)
class Draft:
    """Drafts and ranks, returns the trees, commits nothing."""

    shape: TreeShape


@dataclass(frozen=True)
class Count:
    """Adds tokens to `seen` that a cache hit spares the prefill.

    A row is counted from its first token up to and with the first that its prefill feeds, in as
    many steps as that takes; the first of them starts the row, and the prefill then does not.

    Attributes:
      tokens: Tokens of all rows; past `row_starts[B]` padding.
      row_starts: First token of each row, and the end.
      first_positions: Position of each row's first token.
    """

    tokens: Int32[np.ndarray, " T"]
    row_starts: Int32[np.ndarray, " B+1"]
    first_positions: Int32[np.ndarray, " B"]


@dataclass(frozen=True)
class Snapshots:
    """Recurrent state to restore before and to save within a step; 0 names the sink: nothing.

    A decode takes a snapshot at any length that it passes. A prefill takes one where the chunked
    delta rule has a state of its own: a whole number of `shared.spec.gated_delta.CHUNK` tokens
    after the first token of the row in this step, or at its last. Elsewhere none is taken, and
    `StepResult.saved` says so.

    Attributes:
      restore: Snapshot that a starting row takes its state from.
      save: Snapshot that is written if the step passes `save_at` and can take it.
      save_at: Length at which the state is taken.
    """

    restore: Int32[np.ndarray, " B"]
    save: Int32[np.ndarray, " B"]
    save_at: Int32[np.ndarray, " B"]


@dataclass(frozen=True)
class Mask:
    """Tokens that grammars allow, as `spec.masks` has them: node (b, n) has mask `index[b, n]`.

    Mask 0 allows every token; there is one more for each verify row.
    """

    bits: Int32[np.ndarray, "Q words"]
    index: Int32[np.ndarray, "B N"]


@dataclass(frozen=True)
class StepPlan:
    """One step. Every array is a view into `buffer`.

    Attributes:
      program: The compiled program that runs the plan.
      buffer: The plan as the device gets it; never refilled while a step may read it.
      work: What to do.
      slots: Slot of each row; 0 pads.
      page_table: Pages of each row; 0 pads.
      starts: 1 at a row's first step, of a prefill or a count: state, counts and draft memory are
        set to zero. 0 in a decode and a draft, where nothing reads it.
      draft_from: Where whole draft KV begins after a cache hit; read with `starts`.
      reports: 1 where the row's logprobs are wanted; in every plan, and read where the program
        has logprobs.
      sampling: How tokens are chosen.
      snapshots: Recurrent state restored and saved.
      mask: What grammars allow; None where the program takes no mask.
      texts: Whose texts the rows are; None where no program drafts from text.
    """

    program: Program
    buffer: Int32[np.ndarray, " words"]
    work: Prefill | Decode | Draft | Count | Encode
    slots: Int32[np.ndarray, " B"]
    page_table: Int32[np.ndarray, "B P"]
    starts: Int32[np.ndarray, " B"]
    draft_from: Int32[np.ndarray, " B"]
    reports: Int32[np.ndarray, " B"]
    sampling: Sampling
    snapshots: Snapshots
    mask: Mask | None
    texts: Texts | None = None


class Origins(NamedTuple):
    """Where the nodes of joined trees come from; a node may come from both sources.

    Attributes:
      drafted: 1 where the device's drafter grew the node.
      copied: The node of the plan's copies that it is; 0: of none.
    """

    drafted: Int32[np.ndarray, "B N"]
    copied: Int32[np.ndarray, "B N"]


@dataclass(frozen=True)
class StepResult:
    """What a step gave.

    Attributes:
      tokens: Tokens of each row; 0 past its count.
      counts: Tokens the step added to each row's text; 0 where a prompt goes on or the row failed.
      failed: 1 where a row's logits were not finite.
      saved: 1 where the row's snapshot was taken.
      drafts, parents, num_nodes: The draft trees.
      origins: Of their nodes; None where the plan brought no copies.
      logprobs: Of each emitted token of the rows that report, 0 elsewhere; None where the program
        has none.
      scores: Row t of the token that follows flat token t of a prefill, be it the newest one; 0 of
        padding; None where the program has none.
      device_seconds: Time of the step on the device; None where it is unknown (after idling).
    """

    tokens: Int32[np.ndarray, "B W"]
    counts: Int32[np.ndarray, " B"]
    failed: Int32[np.ndarray, " B"]
    saved: Int32[np.ndarray, " B"]
    drafts: Int32[np.ndarray, "B N"]
    parents: Int32[np.ndarray, "B N"]
    num_nodes: Int32[np.ndarray, " B"]
    logprobs: Logprobs | None
    scores: Scores | None
    device_seconds: float | None
    origins: Origins | None = None


class StepFuture(Protocol):
    """The result of a submitted step, some time."""

    def result(self) -> StepResult:
        """Waits for the copy to the host."""
        ...


class Backend(Protocol):
    """A device that runs steps.

    Before one is made, its module answers `workspace` too, of a `Blueprint`.
    """

    capacity: Capacity

    def workspace(self, program: Program) -> int:
        """Bytes that a step of the program needs beyond weights and pools."""
        ...

    def prepare(self, programs: Sequence[Program], progress: Callable[[Program], None]) -> None:
        """Makes programs ready to run: compiled, or captured; what is ready already is passed by.

        Args:
          programs: Some of `capacity`.
          progress: Called with each program before it is made ready.

        Raises:
          ValueError: `capacity` does not list a program.
        """
        ...

    def launch(self, program: Program) -> Launch:
        """How a step of the program is run."""
        ...

    def submit(self, plan: StepPlan) -> StepFuture:
        """Queues one step and returns at once.

        Raises:
          ValueError: The plan's program was not prepared, or a decode names a row that starts.
        """
        ...

    def close(self) -> None:
        """Waits for the steps in flight and frees the device."""
        ...
