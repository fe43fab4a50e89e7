"""Programs: the units that a backend compiles or captures, by step kind, sizes and features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, Flag

from shared.spec.draft_tree import TreeShape


class LaunchMode(Enum):
    """Launch mode of a step."""

    COMPILED = "compiled"
    CUDA_GRAPH = "cuda_graph"
    DISABLED = "eager_by_flag"
    EAGER = "eager"


class StepKind(Enum):
    """Kind of a step."""

    PREFILL = "prefill"
    DECODE = "decode"
    DRAFT = "draft"
    COUNT = "count"
    ENCODE = "encode"
    EXPORT_KV = "export_kv"
    IMPORT_KV = "import_kv"
    LOAD_ADAPTER = "load_adapter"


CAPTURED = (StepKind.DECODE, StepKind.DRAFT, StepKind.PREFILL, StepKind.ENCODE)
"""Kinds of steps that backends capture as graphs.

Export, import and load steps are not among them: they are a few large copies, so launches take
little of their time, and each graph would keep a plan with the data of a step on the device."""


class ProgramFeature(Flag):
    """Optional inputs and outputs of a step, as flags.

    Attributes:
      HOST_DRAFT: The plan contains the draft tree (`HostDraft`) instead of the device's drafter
        building it.
      COPIES: The plan contains n-gram drafts that are merged into the drafter's tree.
      MASK: The plan contains grammar bitmasks (`Mask`).
      LOGPROBS: The result contains logprobs of the rows that the plan selects.
      SCORES: The result of a prefill contains the logprobs of all prompt tokens.
      TEXTS: The device drafts from its n-gram table, not with a drafter.
      LORA: The plan contains the adapter slots of the rows.
    """

    NONE = 0
    HOST_DRAFT = 1
    MASK = 2
    LOGPROBS = 4
    PROMPT_LOGPROBS = 8
    NGRAM_DRAFTS = 16
    DEVICE_NGRAM = 32
    LORA = 64


OF_A_PLAN = (
    ProgramFeature.HOST_DRAFT
    | ProgramFeature.MASK
    | ProgramFeature.NGRAM_DRAFTS
    | ProgramFeature.LORA
)
"""Features that are inputs: a program with one of them requires it in every plan. The other
features only add outputs, which a plan may ignore."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Step kind and array sizes of a program that is compiled or captured once.

    Attributes:
      work: Kind of the step.
      batch: B, rows of the plan.
      pages: P, columns of the page table; for an export or an import the pages of a step.
      tokens: T, flat tokens of a prefill or a count, patches of an encode step; else 0.
      shape: Draft tree of a decode or a draft; else the one-node tree.
      extras: Optional inputs and outputs.
      blocks: Vision-encoder blocks of an encode step, where a range that starts after block 0
        continues the image of the previous encode step; layers of the snapshot of an export or an
        import (`shared.boundary.transfer_spec`), or of an adapter
        (`shared.boundary.adapter_pool`); else empty.
    """

    work: StepKind
    batch: int
    pages: int
    tokens: int
    shape: TreeShape
    extras: ProgramFeature
    blocks: range = range(0)

    def has(self, extra: ProgramFeature) -> bool:
        """Returns True if the program has the feature."""
        return extra in self.extras

    def with_features(self, wanted: Mapping[ProgramFeature, bool]) -> Program:
        """Returns the same program with features added or removed."""
        extras = self.extras
        for extra, is_wanted in wanted.items():
            extras = extras | extra if is_wanted else extras & ~extra
        return replace(self, extras=extras)

    @property
    def is_chain(self) -> bool:
        """True if every tree is a chain; trees from the host or from n-grams may branch."""
        branches = bool(
            self.extras
            & (
                ProgramFeature.HOST_DRAFT
                | ProgramFeature.NGRAM_DRAFTS
                | ProgramFeature.DEVICE_NGRAM
            )
        )
        return self.shape.width <= 1 and not branches

    @property
    def drafts_on_device(self) -> bool:
        """True if the device builds the draft trees of the step."""
        drafts = self.work in (StepKind.DECODE, StepKind.DRAFT)
        return drafts and not self.has(ProgramFeature.HOST_DRAFT) and not self.shape.is_plain

    @property
    def shares_rows(self) -> bool:
        """True if the batch's draft nodes compete for a verify budget; see `spec.verify_rows`."""
        return self.drafts_on_device and self.shape.shares_rows(self.batch)

    def __str__(self) -> str:
        """Formats the kind, sizes and features."""
        sizes = [f"{self.batch} rows"]
        of = "patches" if self.work is StepKind.ENCODE else "tokens"
        sizes += [f"{self.tokens} {of}"] * bool(self.tokens)
        part = "blocks" if self.work is StepKind.ENCODE else "layers"
        sizes += [f"{part} {b.start} to {b.stop - 1}" for b in [self.blocks] if b]
        sizes += [f"{self.shape.nodes} nodes"] * (not self.shape.is_plain)
        sizes += [f"{self.shape.rows} verify rows"] * self.shape.shares_rows(self.batch)
        sizes += [f"{self.pages} pages"]
        named = [str(extra.name).lower().replace("_", " ") for extra in self.extras]
        return f"{self.work.value} of {', '.join(sizes + named)}"


def unmasked(programs: Sequence[Program]) -> tuple[Program, ...]:
    """Returns the programs of batches in which no request has a grammar.

    A program that takes masks is included if no other has its batch and its tree: rows without a
    grammar then use the mask of all ones.
    """
    plain = [program for program in programs if not program.has(ProgramFeature.MASK)]
    known = {_batch_and_tree(program) for program in plain}
    return (*plain, *(p for p in programs if p not in plain and _batch_and_tree(p) not in known))


def _batch_and_tree(program: Program) -> tuple[StepKind, int, tuple[int, ...], bool]:
    brought = program.has(ProgramFeature.HOST_DRAFT)
    return program.work, program.batch, program.shape.tree, brought
