"""Checks of programs when a backend is built, and of plans when they are submitted."""

from collections.abc import Collection, Iterator, Sequence
from itertools import chain

import numpy as np

from shared.boundary.adapter_pool import AdapterPoolSpec
from shared.boundary.backend import BackendLimits, Decode, StepPlan
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.boundary.transfer_spec import TRANSFERS, TransferSpec
from shared.drafts.drafter_spec import DrafterSpec


def check_capacity(
    capacity: BackendLimits, drafts: DrafterSpec, has_mtp: bool, has_vision_encoder: bool
) -> None:
    """Checks that the backend's models can run its programs.

    Args:
      capacity: Limits and programs of the backend.
      drafts: Drafter of the backend.
      has_mtp: True if the target's weights contain an MTP layer.
      has_vision_encoder: True if a vision encoder is loaded.

    Raises:
      ValueError: A program cannot exist; the message names it.
    """
    if drafts.with_mtp and not has_mtp:
        raise ValueError("drafter NEXTN requires a checkpoint with an MTP layer")
    if has_vision_encoder != (capacity.images is not None):
        raise ValueError(
            "a vision encoder requires an encoder cache, and an encoder cache a vision encoder"
        )
    if drafts.uses_ngrams != (capacity.texts is not None):
        raise ValueError(
            "n-gram drafting on the device requires an n-gram table, and a table requires "
            "n-gram drafting"
        )
    has_lora = any(x.has(ProgramFeature.LORA) for x in capacity.programs)
    if has_lora != (capacity.adapters is not None):
        raise ValueError(
            "an adapter pool requires programs with adapters, and these require a pool"
        )
    for program in capacity.programs:
        _check_program(program, drafts, capacity.max_scores, capacity.transfer)
        _check_adapters(program, capacity.adapters)
        if program.work is StepKind.ENCODE:
            _check_encoding(program, capacity)
        if program.shares_rows and capacity.accept_rule != "exact":
            raise ValueError(
                f"accept_rule {capacity.accept_rule} must verify every draft token, but "
                f"{program} has fewer verify rows than nodes"
            )


def _check_program(
    program: Program, drafts: DrafterSpec, max_scores: int, transfer: TransferSpec | None
) -> None:
    shape = program.shape
    if program.work in TRANSFERS and transfer is None:
        raise ValueError(f"{program} requires the entries of KV transfer")
    if program.has(ProgramFeature.MASK) and (
        program.work is not StepKind.DECODE or program.drafts_on_device
    ):
        raise ValueError(f"grammar masks require draft trees built by the host, got {program}")
    if program.has(ProgramFeature.PROMPT_LOGPROBS) and (
        program.work is not StepKind.PREFILL or not max_scores
    ):
        raise ValueError(
            f"prompt logprobs require a prefill and max_scores of at least 1, got {program}"
        )
    if program.has(ProgramFeature.NGRAM_DRAFTS) is not bool(shape.copied):
        raise ValueError(
            f"n-gram drafts and a tree shape with room for them require each other, got {program}"
        )
    if program.work not in (StepKind.DECODE, StepKind.DRAFT):
        return
    if shape.rows < program.batch:
        raise ValueError(
            f"at least one verify row per batch row is required, got {shape.rows} in {program}"
        )
    if program.has(ProgramFeature.HOST_DRAFT) or shape.is_plain:
        return
    if program.has(ProgramFeature.DEVICE_NGRAM) != drafts.uses_ngrams:
        raise ValueError(
            f"drafting from the n-gram table does not match the drafter of the backend in {program}"
        )
    if not (drafts.on_device or drafts.uses_ngrams):
        raise ValueError(f"{program} requires a drafter")
    if drafts.block is not None:
        own = shape.drafter
        if not own.is_plain:
            drafts.block.check_shape(own.depth, own.width, own.scratch)


def _check_adapters(program: Program, pool: AdapterPoolSpec | None) -> None:
    if not program.has(ProgramFeature.LORA):
        return
    assert pool is not None  # checked above
    if program.work not in pool.step_kinds:
        raise ValueError(
            "adapters require a prefill, a decode, or a draft step with an adapted MTP layer, got "
            f"{program}"
        )


def _check_encoding(program: Program, capacity: BackendLimits) -> None:
    images = capacity.images
    if images is None:
        raise ValueError(f"{program} requires a vision-language model")
    merged = images.vision.merged
    if program.tokens % merged or program.tokens // merged >= images.num_rows:
        raise ValueError(
            f"encode sizes must be multiples of {merged} patches and fit into "
            f"{images.num_rows - 1} encoder-cache rows, got {program}"
        )
    depth, size = images.vision.depth, (StepKind.ENCODE, program.tokens)
    pieces = [p.blocks for p in capacity.programs if (p.work, p.tokens) == size]
    if [*chain(*sorted(pieces, key=lambda blocks: blocks.start))] != [*range(depth)]:
        raise ValueError(
            f"encode programs of one size must run each of the {depth} encoder blocks once; "
            f"those of the size of {program} do not"
        )


def to_prepare(
    programs: Sequence[Program], capacity: BackendLimits, ready: Collection[Program]
) -> Iterator[Program]:
    """Yields each program that is not ready yet, once.

    Args:
      programs: Programs to prepare.
      capacity: Limits and programs of the backend.
      ready: Programs that are prepared already.

    Raises:
      ValueError: `capacity` does not list a program.
    """
    for program in dict.fromkeys(programs):
        if program not in capacity.programs:
            raise ValueError(f"{program} is not among the programs of the backend")
        if program not in ready:
            yield program


def check_plan(plan: StepPlan, ready: Collection[Program]) -> None:
    """Checks that a plan's program is ready and that its rows fit it.

    Raises:
      ValueError: The program was not prepared, a decode or a draft starts a row, or the host's
        trees have more nodes than the program has verify rows.
    """
    program = plan.program
    if program not in ready:
        raise ValueError(f"{program} is not prepared; call prepare first")
    begins = program.work in (StepKind.PREFILL, StepKind.COUNT)
    restores = plan.snapshots.restore.any() and program.work is not StepKind.EXPORT_KV
    if not begins and (plan.starts.any() or restores):
        raise ValueError(f"rows must start in a prefill or a count, got {program}")
    if isinstance(plan.work, Decode) and plan.work.drafts is not None:
        # Padding rows verify their root too.
        num_nodes = int(np.maximum(plan.work.drafts.num_nodes, 1).sum())
        if num_nodes > program.shape.rows:
            rows = program.shape.rows
            raise ValueError(
                f"draft trees have {num_nodes} nodes, but {program} has {rows} verify rows"
            )
