"""Which operations of a start its kernels take, asked before anything is loaded or compiled.

Where there is a GPU, an operation that has a kernel runs it. For what a kernel does not take, the
start is refused by name; or the operation runs as plain operations of the framework, where that is
what was asked for, and is then printed at the start and counted in `/metrics`. `OPERATIONS` says
which of both. Operations of which there is no kernel at all, as those of masks and of logprobs, are
not listed.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from shared.boundary.backend import Blueprint
from shared.boundary.program import Program, Work
from shared.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class KernelLimits:
    """What the kernels of a backend take; see `kernels.limits`.

    Attributes:
      head_sizes: Of attention heads.
      delta_sizes: Of the keys and values of gated-delta heads.
      most_nodes: Of a tree that gated-delta layers verify.
      product_dtype: Of the rows and weights of products.
      experts_unit: Of which the widths of experts are multiples.
    """

    head_sizes: tuple[int, ...]
    delta_sizes: tuple[int, ...]
    most_nodes: int
    product_dtype: str
    experts_unit: int


WITHOUT_LAYERS = (Work.COUNT, Work.ENCODE)
"""Works that run no layer of the text model."""

Fault = Callable[[KernelLimits, Blueprint, Program], str | None]


@dataclass(frozen=True)
class Operation:
    """An operation that has kernels.

    Attributes:
      name: Its module in `ops`, and its function where it is not the whole module.
      fault: Says what of a program's steps the kernels do not take; None where they take all, or
        where the program does not run the operation.
      is_refused: Whether a start with such a program is refused; else the operation is plain.
    """

    name: str
    fault: Fault
    is_refused: bool


@dataclass(frozen=True)
class PlainOperation:
    """An operation that steps on a GPU run without its kernels.

    Attributes:
      name: As in `OPERATIONS`.
      reason: What its kernels do not take.
      programs: In how many programs.
    """

    name: str
    reason: str
    programs: int


def _attention_fault(takes: KernelLimits, blueprint: Blueprint, program: Program) -> str | None:
    for model in _models(blueprint):
        size = model.attention.head_size
        if program.work not in WITHOUT_LAYERS and size not in takes.head_sizes:
            return f"attention heads of {_listed(takes.head_sizes)}, not of {size}"
    return None


def _delta_fault(takes: KernelLimits, blueprint: Blueprint, program: Program) -> str | None:
    for model in _models(blueprint):
        delta = model.gated_delta
        if delta is None or program.work in WITHOUT_LAYERS:
            continue
        for name, size in (("keys", delta.key_size), ("values", delta.value_size)):
            if size not in takes.delta_sizes:
                return f"gated-delta {name} of {_listed(takes.delta_sizes)}, not of {size}"
        if program.shape.nodes > takes.most_nodes:
            return f"trees of at most {takes.most_nodes} nodes, not of {program.shape.nodes}"
    return None


def _dtype_fault(takes: KernelLimits, blueprint: Blueprint, program: Program) -> str | None:
    if program.work in WITHOUT_LAYERS or blueprint.dtype == takes.product_dtype:
        return None
    return f"{takes.product_dtype}, not {blueprint.dtype}"


def _tower_fault(takes: KernelLimits, blueprint: Blueprint, program: Program) -> str | None:
    if program.work is not Work.ENCODE or blueprint.dtype == takes.product_dtype:
        return None
    return f"{takes.product_dtype}, not {blueprint.dtype}"


def _feed_fault(takes: KernelLimits, blueprint: Blueprint, program: Program) -> str | None:
    has_layers = any(model.gated_delta is not None for model in _models(blueprint))
    is_fed = has_layers and program.work is Work.PREFILL
    return _dtype_fault(takes, blueprint, program) if is_fed else None


def _convolution_fault(takes: KernelLimits, blueprint: Blueprint, program: Program) -> str | None:
    block = blueprint.drafts.block
    is_drafted = program.work in (Work.DECODE, Work.DRAFT)
    if not is_drafted or block is None or block.conv is None:
        return None
    return _dtype_fault(takes, blueprint, program)


def _experts_dtype_fault(takes: KernelLimits, blueprint: Blueprint, program: Program) -> str | None:
    has_layers = any(model.experts is not None for model in _models(blueprint))
    return _dtype_fault(takes, blueprint, program) if has_layers else None


def _experts_size_fault(takes: KernelLimits, blueprint: Blueprint, program: Program) -> str | None:
    if _dtype_fault(takes, blueprint, program) or program.work in WITHOUT_LAYERS:
        return None
    for model in _models(blueprint):
        if (experts := model.experts) is None:
            continue
        if experts.shared_intermediate and not experts.shares_stacks:
            own, all_of = experts.shared_intermediate, experts.intermediate
            return f"shared experts as wide as the others, {all_of}, not {own}"
        for size in (model.hidden, experts.intermediate):
            if size % takes.experts_unit:
                return f"experts of multiples of {takes.experts_unit}, not of {size}"
    return None


OF_TOWERS = (
    "attention.attend_all",
    *(f"layers.{name}" for name in ("blended", "gelu", "gelu_tanh", "layer_norm")),
)
"""Operations that a vision tower alone runs."""

OPERATIONS = (
    Operation("mix", _attention_fault, is_refused=True),
    Operation("delta_mix", _delta_fault, is_refused=True),
    Operation("delta_mix.feed", _feed_fault, is_refused=False),
    Operation("experts", _experts_dtype_fault, is_refused=False),
    Operation("experts.added_experts", _experts_size_fault, is_refused=True),
    Operation("convolution", _convolution_fault, is_refused=False),
    Operation("layers.rms_norm", _dtype_fault, is_refused=False),
    Operation("linear", _dtype_fault, is_refused=False),
    Operation("projection", _dtype_fault, is_refused=False),
    *(Operation(name, _tower_fault, is_refused=False) for name in OF_TOWERS),
)
"""Every operation whose kernels do not take all that a start may ask of them.

Of float32, which is for comparisons, there are kernels of attention and of decoding gated-delta
layers; products, norms and gated-delta prompts are plain.
"""


def plain_operations(blueprint: Blueprint, takes: KernelLimits) -> tuple[PlainOperation, ...]:
    """What the programs of a GPU run without kernels, in the order of `OPERATIONS`.

    Raises:
      ValueError: The kernels do not take something that the start needs them for; one sentence that
        says what, and the way out.
    """
    if not blueprint.on_gpu:
        return ()
    return tuple(_plain(blueprint, takes))


def _plain(blueprint: Blueprint, takes: KernelLimits) -> Iterator[PlainOperation]:
    for operation in OPERATIONS:
        programs = blueprint.capacity.programs
        faults = (operation.fault(takes, blueprint, program) for program in programs)
        for reason, count in Counter(fault for fault in faults if fault is not None).items():
            if operation.is_refused:
                raise ValueError(
                    f"the kernels of a GPU take {reason}; hide the GPU (CUDA_VISIBLE_DEVICES=) to "
                    "serve on the CPU"
                )
            yield PlainOperation(operation.name, reason, count)


def plain_gauges(operations: tuple[PlainOperation, ...]) -> dict[str, Callable[[], float]]:
    """How many programs run each operation of `OPERATIONS` without its kernels, as metrics."""
    counts = Counter({operation.name: 0 for operation in OPERATIONS})
    for plain in operations:
        counts[plain.name] += plain.programs
    return {
        f'engine_plain_operations{{op="{name}"}}': partial(float, count)
        for name, count in counts.items()
    }


def _models(blueprint: Blueprint) -> Iterator[ModelConfig]:
    """The target, and what drafts on the device; a head is a model of a few layers."""
    yield blueprint.config
    if blueprint.drafts.sizes is not None:
        yield blueprint.drafts.sizes.model


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes[:-1])) + f" or {sizes[-1]}"
