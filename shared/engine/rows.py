"""Scheduled rows of one step: their requests, and the inputs they add to its plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from jaxtyping import Float32

from shared.boundary.backend import CountPromptTokens, Decode, HostDraft, Prefill, StepPlan
from shared.boundary.images import EncodeImage, ImageInputs
from shared.boundary.program import StepKind
from shared.engine.grammar import BitmaskRows
from shared.engine.image_inputs import PromptImage
from shared.engine.request import Request
from shared.spec.draft_tree import TreeShape
from shared.spec.gated_delta import CHUNK
from shared.spec.merge_drafts import NgramTrees
from shared.spec.ngram import WINDOW
from shared.spec.vision_encoder import Pixels

_TREE = tuple(field.name for field in fields(HostDraft))
_COPIES = tuple(field.name for field in fields(NgramTrees))


@dataclass(frozen=True)
class Chunk:
    """Positions `first` to `end` of a request's context, prefilled in one step.

    Attributes:
      request: The request.
      first, end: Range of positions.
      images: Images with a token in the chunk or directly after it, each with the encoder-cache
        row of its first token.
    """

    request: Request
    first: int
    end: int
    images: tuple[tuple[PromptImage, int], ...] = ()

    @property
    def starts(self) -> bool:
        """True if it is the request's first step in its slot."""
        return self.first == self.request.first_position and not self.request.count_length

    @property
    def ends_prompt(self) -> bool:
        """True if the next token is sampled after the chunk."""
        return self.end == len(self.request.context)


def chunk_end(request: Request, budget: int) -> int:
    """Returns the end of a chunk of at most `budget` tokens; its start if nothing fits.

    Inside a prompt it is a multiple of `CHUNK`, so that the chunked delta rule divides a prompt in
    the same way under any chunking and gives the same bits.
    """
    end = request.prefilled + budget
    if end >= request.prefill_length:
        return request.prefill_length
    return max(request.prefilled, end // CHUNK * CHUNK)


@dataclass(frozen=True, kw_only=True)
class ScheduledRows:
    """Rows of one step; created by `prefill`, `count`, `decode`, `draft` or `encode`.

    Attributes:
      work: Kind of the step.
      requests: Request of each row; empty for an encode step.
      chunks: Chunk of each row of a prefill; else empty.
      counted: Tokens that a count step adds to the token counts, without prefilling them.
      patches: Patches of the encoded image; else 0.
      blocks: Vision-encoder blocks to run.
      pixels: Pixels of the image, if the step starts its encoding.
      place: Encoder-cache row of its first token, if the step ends its encoding.
      shape: Draft shape of a decode and of a draft step.
      drafts: Host-built tree of each row of a decode; None otherwise.
      copies: N-gram drafts of each row to merge into the device's trees; None otherwise.
      calibration: Acceptance probability of each row's chain by depth, see
        `shared.spec.sampling.Sampling`; None if unknown.
      branch_calibration: Acceptance off the first path of trees by depth, the same for all rows;
        None if unknown.
      corpus_nodes: For n-gram trees in `drafts` or `ngram_drafts`: returns the nodes of a row that
        come from an external corpus. None for all other trees.
      masks: Grammar masks of the nodes; None if no row has a grammar.
    """

    work: StepKind
    requests: Sequence[Request]
    chunks: Sequence[Chunk] = ()
    counted: Chunk | None = None
    patches: int = 0
    blocks: range = range(0)
    pixels: Pixels | None = None
    place: int = 0
    shape: TreeShape | None = None
    drafts: HostDraft | None = None
    copies: NgramTrees | None = None
    calibration: Float32[np.ndarray, "B S_max"] | None = None
    branch_calibration: Float32[np.ndarray, " S_max"] | None = None
    corpus_nodes: Callable[[int], list[int]] | None = None
    masks: BitmaskRows | None = None

    @classmethod
    def prefill(cls, chunks: Sequence[Chunk]) -> Self:
        """Returns a step that prefills prompt chunks, at most one per request."""
        return cls(
            work=StepKind.PREFILL, requests=[chunk.request for chunk in chunks], chunks=chunks
        )

    @classmethod
    def count(cls, counted: Chunk) -> Self:
        """Returns a step that counts tokens of one request; its first such step starts the row."""
        return cls(work=StepKind.COUNT, requests=[counted.request], counted=counted)

    @classmethod
    def encode(cls, patches: int, blocks: range, pixels: Pixels | None, place: int) -> Self:
        """Returns a step that runs blocks of the vision encoder; see `EncodeImage`."""
        return cls(
            work=StepKind.ENCODE,
            requests=[],
            patches=patches,
            blocks=blocks,
            pixels=pixels,
            place=place,
        )

    @classmethod
    def decode(
        cls,
        requests: Sequence[Request],
        shape: TreeShape,
        *,
        drafts: HostDraft | None = None,
        copies: NgramTrees | None = None,
        calibration: Float32[np.ndarray, "B S_max"] | None = None,
        corpus_nodes: Callable[[int], list[int]] | None = None,
        masks: BitmaskRows | None = None,
    ) -> Self:
        """Returns a step that verifies trees from any drafter and commits the accepted tokens."""
        return cls(
            work=StepKind.DECODE,
            requests=requests,
            shape=shape,
            drafts=drafts,
            copies=copies,
            calibration=calibration,
            corpus_nodes=corpus_nodes,
            masks=masks,
        )

    @classmethod
    def draft(cls, requests: Sequence[Request], shape: TreeShape) -> Self:
        """Returns a step that drafts trees for a later decode step, and commits nothing."""
        return cls(work=StepKind.DRAFT, requests=requests, shape=shape)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that the step prefills or counts, or patches; 0 for a decode or a draft
        step.
        """
        chunks = self.chunks if self.counted is None else (self.counted,)
        return self.patches + sum(chunk.end - chunk.first for chunk in chunks)

    @property
    def max_tokens(self) -> list[int]:
        """Maximum tokens that the step adds to each row; 0 if it samples none."""
        if self.work is StepKind.DECODE:
            assert self.shape is not None
            return [self.shape.max_tokens] * len(self.requests)
        if self.work is StepKind.PREFILL:
            return [int(chunk.ends_prompt) for chunk in self.chunks]
        return [0] * len(self.requests)

    def accepted(self, num_tokens: int) -> int | None:
        """Returns the number of accepted draft tokens among a row's tokens; None for steps without
        verification.
        """
        return (
            num_tokens - 1 if self.work is StepKind.DECODE else None
        )  # the last is the bonus token

    def fill(self, plan: StepPlan) -> None:
        """Writes the inputs of the rows other than slots, pages and sampling parameters.

        Raises:
          ValueError: A request's prefill was not submitted entirely: a decode never starts a row.
        """
        if isinstance(plan.work, Prefill):
            _lay_chunks(plan, plan.work, self.chunks)
        elif isinstance(plan.work, CountPromptTokens):
            assert self.counted is not None
            _lay_counted(plan, plan.work, self.counted)
        elif isinstance(plan.work, EncodeImage):
            _lay_image(plan.work, self.pixels, self.place)
        else:
            _check_prefilled(self.requests)
            _copy_known(plan, self)


def _lay_chunks(plan: StepPlan, work: Prefill, chunks: Sequence[Chunk]) -> None:
    """Writes the chunks, concatenated."""
    end = 0
    for row, chunk in enumerate(chunks):
        start, end = end, end + chunk.end - chunk.first
        context = chunk.request.context
        work.tokens[start:end] = context[chunk.first : chunk.end]
        work.row_starts[row + 1] = end
        work.first_positions[row] = chunk.first
        work.ends_prompt[row] = chunk.ends_prompt
        if work.images is not None:
            _lay_images(work.images, row, start, chunk)
        if plan.texts is not None and plan.texts.before is not None:
            before = context[max(0, chunk.first - WINDOW) : chunk.first]
            plan.texts.before[row] = -1
            plan.texts.before[row, WINDOW - len(before) :] = before
        # Drafters process a chunk's last token together with the token after it.
        work.next_tokens[row] = 0 if chunk.ends_prompt else context[chunk.end]
        if chunk.starts:
            _start(plan, row, chunk.request)
    work.row_starts[len(chunks) + 1 :] = end


def _lay_images(images: ImageInputs, row: int, start: int, chunk: Chunk) -> None:
    """Writes the M-RoPE positions of a chunk, and the encoder-cache rows of its image tokens."""
    first, end, sight = chunk.first, chunk.end, chunk.request.mrope
    turns = images.mrope_positions[start : start + end - first]
    if sight is None:
        turns[:] = np.arange(first, end)[:, None]
        return
    turns[:] = sight.between(first, end)
    images.mrope_position_deltas[row] = sight.delta
    for image, place in chunk.images:
        from_, to = max(first, image.first), min(end, image.end)
        at = place - image.first
        images.sources[start + from_ - first : start + to - first] = np.arange(from_, to) + at
        if image.first <= end < image.end:
            images.next_embed_sources[row] = end + at


def _lay_image(work: EncodeImage, pixels: Pixels | None, place: int) -> None:
    if pixels is not None:
        for name, values in vars(pixels).items():
            getattr(work.pixels, name)[: len(values)] = values
    work.place[0] = place


def _lay_counted(plan: StepPlan, work: CountPromptTokens, counted: Chunk) -> None:
    """Writes the tokens; the first count step of a row starts it."""
    num_tokens = counted.end - counted.first
    work.tokens[:num_tokens] = counted.request.context[counted.first : counted.end]
    work.row_starts[1:] = num_tokens
    work.first_positions[0] = counted.first
    if counted.first == 0:
        _start(plan, 0, counted.request)


def _start(plan: StepPlan, row: int, request: Request) -> None:
    """Marks a row as starting, with the draft KV and the snapshot of its cache hit."""
    plan.starts[row], plan.draft_from[row] = 1, request.draft_from
    plan.snapshots.restore[row] = request.restores


def _copy_known(plan: StepPlan, rows: ScheduledRows) -> None:
    """Writes calibration and masks of a decode, and the draft trees of the host."""
    if rows.calibration is not None:
        plan.sampling.calibration[: len(rows.calibration)] = rows.calibration
    if rows.branch_calibration is not None:
        plan.sampling.branch_calibration[: len(rows.requests)] = rows.branch_calibration
    if rows.masks is not None:
        assert plan.mask is not None  # the program was selected for it
        plan.mask.bits[1 : 1 + len(rows.masks.bits)] = rows.masks.bits
        plan.mask.index[: len(rows.masks.index)] = rows.masks.index
    if not isinstance(plan.work, Decode):
        return
    brought = (
        (rows.drafts, plan.work.drafts, _TREE),
        (rows.copies, plan.work.ngram_drafts, _COPIES),
    )
    for given, laid, names in brought:
        if given is None or laid is None:
            continue
        for name in names:
            values = getattr(given, name)
            getattr(laid, name)[: len(values)] = values


def _check_prefilled(requests: Sequence[Request]) -> None:
    for request in requests:
        if not request.decodes:
            raise ValueError(
                f"request {request.request_id} has {request.prefilled} of "
                f"{request.prefill_length} tokens prefilled; a decode step requires all"
            )
