"""What no backend has: refused by name where a backend is made and where a plan arrives."""

from collections.abc import Collection, Iterator, Sequence
from itertools import chain

import numpy as np

from shared.boundary.backend import Capacity, Decode, StepPlan
from shared.boundary.program import Extra, Program, Work
from shared.drafts.drafts import Drafts


def check_capacity(capacity: Capacity, drafts: Drafts, has_mtp: bool, has_tower: bool) -> None:
    """Holds the programs that are asked of a backend against what drafts on it.

    Args:
      drafts: What drafts on the backend.
      has_mtp: Whether the target's weights hold an mtp layer.
      has_tower: Whether a vision tower was loaded.

    Raises:
      ValueError: A program cannot exist; one sentence that names it.
    """
    if drafts.with_mtp and not has_mtp:
        raise ValueError("the drafter NEXTN needs a checkpoint with mtp.* tensors")
    if has_tower != (capacity.pictures is not None):
        raise ValueError("a vision tower and a pool for its rows need each other")
    if drafts.from_text != (capacity.texts is not None):
        raise ValueError("drafts from text and a table of its n-grams need each other")
    for program in capacity.programs:
        _check_program(program, drafts, capacity.max_scores)
        if program.work is Work.ENCODE:
            _check_encoding(program, capacity)
        if program.shares_rows and capacity.accept_rule != "match":
            raise ValueError(
                f"the accept rule {capacity.accept_rule} verifies every draft, fewer does {program}"
            )


def _check_program(program: Program, drafts: Drafts, most_scores: int) -> None:
    shape = program.shape
    if program.has(Extra.MASK) and (program.work is not Work.DECODE or program.drafts_on_device):
        raise ValueError(f"masks are for trees that the host knows, and not for {program}")
    if program.has(Extra.SCORES) and (program.work is not Work.PREFILL or not most_scores):
        raise ValueError(f"scores are of prompts, of one token each at least, not of {program}")
    if program.has(Extra.COPIES) is not bool(shape.copied):
        raise ValueError(f"copies come with a plan that has room for them, not with {program}")
    if program.work not in (Work.DECODE, Work.DRAFT):
        return
    if shape.rows < program.batch:
        raise ValueError(f"a verify has a row for each of its batch, {shape.rows} has {program}")
    if program.has(Extra.HOST_DRAFT) or shape.is_plain:
        return
    if program.has(Extra.TEXTS) != drafts.from_text:
        raise ValueError(f"drafts from text are of a table of its n-grams, not of {program}")
    if not (drafts.on_device or drafts.from_text):
        raise ValueError(f"a drafter is needed by {program}")
    if drafts.block is not None:
        own = shape.drafter
        if not own.is_plain:
            drafts.block.check_shape(own.nodes, own.width, own.scratch)


def _check_encoding(program: Program, capacity: Capacity) -> None:
    pictures = capacity.pictures
    if pictures is None:
        raise ValueError(f"a model that sees is needed by {program}")
    merged = pictures.vision.merged
    if program.tokens % merged or program.tokens // merged >= pictures.num_rows:
        raise ValueError(
            f"{merged} patches make a row of {pictures.num_rows}, one of them the sink, and they "
            f"do not hold {program}"
        )
    depth, size = pictures.vision.depth, (Work.ENCODE, program.tokens)
    pieces = [p.blocks for p in capacity.programs if (p.work, p.tokens) == size]
    if [*chain(*sorted(pieces, key=lambda blocks: blocks.start))] != [*range(depth)]:
        raise ValueError(
            f"encodings of one size run each of the tower's {depth} blocks once, which those "
            f"beside {program} do not"
        )


def to_prepare(
    programs: Sequence[Program], capacity: Capacity, ready: Collection[Program]
) -> Iterator[Program]:
    """Those that are not ready yet, each once.

    Raises:
      ValueError: `capacity` does not list a program.
    """
    for program in dict.fromkeys(programs):
        if program not in capacity.programs:
            raise ValueError(f"there is no program {program}")
        if program not in ready:
            yield program


def check_plan(plan: StepPlan, ready: Collection[Program]) -> None:
    """Holds a plan against what is ready, and a decode against rows that start and that it has.

    Raises:
      ValueError: The program was not prepared, a decode or a draft starts a row, or the host's
        trees have more nodes than the program has verify rows.
    """
    program = plan.program
    if program not in ready:
        raise ValueError(f"there is no program ready for a {program}; prepare it first")
    begins = program.work in (Work.PREFILL, Work.COUNT)
    if not begins and (plan.starts.any() or plan.snapshots.restore.any()):
        raise ValueError(f"a row starts in a prefill or a count, not in a {program}")
    if isinstance(plan.work, Decode) and plan.work.drafts is not None:
        # Padding verifies its root too.
        num_nodes = int(np.maximum(plan.work.drafts.num_nodes, 1).sum())
        if num_nodes > program.shape.rows:
            rows = program.shape.rows
            raise ValueError(f"{num_nodes} nodes are more than the {rows} verify rows of {program}")
