"""Operations that fall back to the reference implementation, determined before weights are loaded.

On a GPU, an operation with a kernel uses it. If the kernel does not support a model or dtype, the
startup fails with an error, or the operation falls back to plain operations of the framework.
`OPERATIONS` defines which of the two applies. Fallbacks are printed at startup and counted in
`/metrics`. Operations that have no kernel at all, such as masks and logprobs, are not listed.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from shared.boundary.backend import BackendSpec
from shared.boundary.program import Program, StepKind
from shared.boundary.transfer_spec import TRANSFERS
from shared.drafts.dflash2 import ConvConfig
from shared.models.config import ModelConfig
from shared.models.mixers import (
    AttentionConfig,
    LatentAttentionConfig,
    Mamba2Config,
)
from shared.models.sentence_list import sentence_list
from shared.spec.reduction_order import SQUARES


@dataclass(frozen=True, kw_only=True)
class KernelLimits:
    """Sizes and dtypes that the kernels of a backend support; see `kernels.kernel_limits`.

    Attributes:
      head_sizes: Supported attention head sizes.
      latent_columns: Maximum columns of latents and of rope keys in latent attention.
      delta_sizes: Supported key and value sizes of GDN heads, and head sizes of Mamba2.
      mamba2_state_sizes: Supported state sizes of Mamba2 heads.
      max_nodes: Maximum nodes of a tree that recurrent layers verify.
      product_dtype: Dtype of the activations and weights of matrix products.
      experts_unit: Number that the widths of experts must be multiples of.
    """

    head_sizes: tuple[int, ...]
    latent_columns: tuple[int, int]
    delta_sizes: tuple[int, ...]
    mamba2_state_sizes: tuple[int, ...]
    max_nodes: int
    product_dtype: str
    experts_unit: int


WITHOUT_LAYERS = (StepKind.COUNT, StepKind.ENCODE, *TRANSFERS)
"""Step kinds that run no layer of the language model."""

Fault = Callable[[KernelLimits, BackendSpec, Program], str | None]


@dataclass(frozen=True)
class Operation:
    """An operation that has kernels.

    Attributes:
      name: Its module in `ops`, with the function if it is not the whole module.
      fault: Returns the requirement that a program does not meet; None if the kernels support the
        program or it does not run the operation.
      is_refused: True if an unsupported program is an error at startup; False if it falls back.
    """

    name: str
    fault: Fault
    is_refused: bool


@dataclass(frozen=True)
class FallbackOp:
    """An operation that falls back to the reference implementation on a GPU.

    Attributes:
      name: Name in `OPERATIONS`.
      reason: Requirement of its kernels that is not met.
      programs: Number of programs that use the fallback.
    """

    name: str
    reason: str
    programs: int


def _attention_fault(takes: KernelLimits, blueprint: BackendSpec, program: Program) -> str | None:
    for model in _models(blueprint):
        attentions = (x for x in model.attentions if isinstance(x, AttentionConfig))
        for size in (each.head_size for each in attentions):
            if program.work not in WITHOUT_LAYERS and size not in takes.head_sizes:
                return f"attention heads of size {sentence_list(takes.head_sizes)}, got {size}"
    return None


def _latent_fault(takes: KernelLimits, blueprint: BackendSpec, program: Program) -> str | None:
    latents, keys = takes.latent_columns
    for model in _models(blueprint):
        for each in model.attentions:
            if program.work in WITHOUT_LAYERS or not isinstance(each, LatentAttentionConfig):
                continue
            if each.latent_rank > latents or each.rope_size > keys:
                return (
                    f"latents of at most {latents} columns and rope keys of at most {keys}, "
                    f"got {each.latent_rank} and {each.rope_size}"
                )
    return None


def _recurrent_fault(takes: KernelLimits, blueprint: BackendSpec, program: Program) -> str | None:
    for model in _models(blueprint):
        if model.recurrent is None or program.work in WITHOUT_LAYERS:
            continue
        heads, states = takes.delta_sizes, takes.mamba2_state_sizes
        is_delta, (_, key, value) = model.recurrent.has_delta, model.recurrent.state_shape
        names = ("GDN keys", "GDN values") if is_delta else ("Mamba2 states", "Mamba2 heads")
        limits = zip(names, (key, value), (heads if is_delta else states, heads), strict=True)
        for name, size, sizes in limits:
            if size not in sizes:
                return f"{name} of size {sentence_list(sizes)}, got {size}"
        if program.shape.nodes > takes.max_nodes:
            return f"trees of at most {takes.max_nodes} nodes, got {program.shape.nodes}"
    return None


def _dtype_fault(takes: KernelLimits, blueprint: BackendSpec, program: Program) -> str | None:
    if program.work in WITHOUT_LAYERS or blueprint.dtype == takes.product_dtype:
        return None
    return f"{takes.product_dtype}, got {blueprint.dtype}"


def _tower_fault(takes: KernelLimits, blueprint: BackendSpec, program: Program) -> str | None:
    if program.work is not StepKind.ENCODE or blueprint.dtype == takes.product_dtype:
        return None
    return f"{takes.product_dtype}, got {blueprint.dtype}"


def _gelu_fault(takes: KernelLimits, blueprint: BackendSpec, program: Program) -> str | None:
    if any(model.per_layer_size for model in _models(blueprint)):
        fault = _dtype_fault(takes, blueprint, program)
        return fault or _tower_fault(takes, blueprint, program)
    return _tower_fault(takes, blueprint, program)


def _feed_fault(takes: KernelLimits, blueprint: BackendSpec, program: Program) -> str | None:
    if program.work is not StepKind.PREFILL:
        return None
    has_layers = any(model.recurrent is not None for model in _models(blueprint))
    return _dtype_fault(takes, blueprint, program) if has_layers else None


def _output_norm_fault(takes: KernelLimits, blueprint: BackendSpec, program: Program) -> str | None:
    if program.work in WITHOUT_LAYERS:
        return None
    for model in _models(blueprint):
        if not isinstance(mixer := model.recurrent, Mamba2Config):
            continue
        own = mixer.local(blueprint.ranks.count)
        if own.has_cut_norm and not own.has_whole_chunks(SQUARES.chunk):
            return (
                f"multiples of {SQUARES.chunk} columns of an output norm that ranks share, "
                f"got {own.values}"
            )
        return _dtype_fault(takes, blueprint, program)
    return None


def _convolution_fault(takes: KernelLimits, blueprint: BackendSpec, program: Program) -> str | None:
    block = blueprint.drafts.block
    is_drafted = program.work in (StepKind.DECODE, StepKind.DRAFT)
    if not is_drafted or block is None or block.part(ConvConfig) is None:
        return None
    return _dtype_fault(takes, blueprint, program)


def _experts_dtype_fault(
    takes: KernelLimits, blueprint: BackendSpec, program: Program
) -> str | None:
    has_layers = any(model.experts is not None for model in _models(blueprint))
    return _dtype_fault(takes, blueprint, program) if has_layers else None


def _parallel_experts_fault(
    takes: KernelLimits, blueprint: BackendSpec, program: Program
) -> str | None:
    experts = [model.experts for model in _models(blueprint)]
    is_parallel = any(each is not None and each.parallel is not None for each in experts)
    return _dtype_fault(takes, blueprint, program) if is_parallel else None


def _added_norm_fault(takes: KernelLimits, blueprint: BackendSpec, program: Program) -> str | None:
    has_norms = any(model.ends_with_norms for model in _models(blueprint))
    return _dtype_fault(takes, blueprint, program) if has_norms else None


def _value_norm_fault(takes: KernelLimits, blueprint: BackendSpec, program: Program) -> str | None:
    attentions = [each for model in _models(blueprint) for each in model.attentions]
    has_norms = any(isinstance(x, AttentionConfig) and x.value_norm for x in attentions)
    return _dtype_fault(takes, blueprint, program) if has_norms else None


def _experts_size_fault(
    takes: KernelLimits, blueprint: BackendSpec, program: Program
) -> str | None:
    if _dtype_fault(takes, blueprint, program) or program.work in WITHOUT_LAYERS:
        return None
    for model in _models(blueprint):
        if (experts := model.experts) is None:
            continue
        if experts.shared_is_gated and not experts.shares_stacks:
            own, all_of = experts.shared_intermediate, experts.intermediate
            return f"gated shared experts of the same width as the others ({all_of}), got {own}"
        for size in (model.hidden, experts.intermediate, experts.latent):
            if size % takes.experts_unit:
                return f"expert widths that are multiples of {takes.experts_unit}, got {size}"
        width, ranks = experts.local(blueprint.ranks.count).intermediate, blueprint.ranks.count
        if width % takes.experts_unit:
            return (
                f"expert widths that are multiples of {takes.experts_unit} on each rank, "
                f"got {experts.intermediate} on {ranks} ranks, {width} on each"
            )
    return None


GELU = "layers.gelu_tanh"
OF_TOWERS = (
    "attention.bidirectional_attention",
    *(f"layers.{name}" for name in ("bilinear_pos_embed", "gelu", "gelu_tanh", "layer_norm")),
)
"""Operations of vision encoders; models with per-layer embeddings run GELU, too."""

OPERATIONS = (
    Operation("attention_layer", _attention_fault, is_refused=True),
    Operation("attention_layer.norm_values", _value_norm_fault, is_refused=False),
    Operation("latent_attention", _latent_fault, is_refused=True),
    Operation("recurrent_layer", _recurrent_fault, is_refused=True),
    Operation("recurrent_layer.prefill", _feed_fault, is_refused=False),
    Operation("mamba2.gated_output", _output_norm_fault, is_refused=False),
    Operation("experts", _experts_dtype_fault, is_refused=False),
    Operation("experts.added_experts", _experts_size_fault, is_refused=True),
    Operation("parallel_experts", _parallel_experts_fault, is_refused=False),
    Operation("convolution", _convolution_fault, is_refused=False),
    Operation("added_norm", _added_norm_fault, is_refused=False),
    Operation("layers.rms_norm", _dtype_fault, is_refused=False),
    Operation("linear", _dtype_fault, is_refused=False),
    Operation("lm_head", _dtype_fault, is_refused=False),
    *(
        Operation(name, _gelu_fault if name == GELU else _tower_fault, is_refused=False)
        for name in OF_TOWERS
    ),
)
"""All operations whose kernels do not support every model and dtype.

Float32, which serves comparisons, has kernels for attention and for decoding of recurrent layers.
Products, norms and prefill of recurrent layers fall back.
"""


def fallback_ops(blueprint: BackendSpec, takes: KernelLimits) -> tuple[FallbackOp, ...]:
    """Returns the fallbacks of a GPU's programs, in the order of `OPERATIONS`.

    Raises:
      ValueError: The kernels do not support something that has no fallback.
    """
    if not blueprint.on_gpu:
        return ()
    return tuple(_plain(blueprint, takes))


def _plain(blueprint: BackendSpec, takes: KernelLimits) -> Iterator[FallbackOp]:
    for operation in OPERATIONS:
        programs = blueprint.capacity.programs
        faults = (operation.fault(takes, blueprint, program) for program in programs)
        for reason, count in Counter(fault for fault in faults if fault is not None).items():
            if operation.is_refused:
                fewer = "" if blueprint.ranks.is_single else "use a smaller --tp-size, or "
                raise ValueError(
                    f"GPU kernels require {reason}; {fewer}set CUDA_VISIBLE_DEVICES= to serve on "
                    "the CPU"
                )
            yield FallbackOp(operation.name, reason, count)


def fallback_gauges(operations: tuple[FallbackOp, ...]) -> dict[str, Callable[[], float]]:
    """Returns metrics that count the programs with a fallback, one for each operation of
    `OPERATIONS`.
    """
    counts = Counter({operation.name: 0 for operation in OPERATIONS})
    for plain in operations:
        counts[plain.name] += plain.programs
    return {
        f'engine_fallback_ops{{op="{name}"}}': partial(float, count)
        for name, count in counts.items()
    }


def _models(blueprint: BackendSpec) -> Iterator[ModelConfig]:
    """Yields the target and the drafter on the device; a draft head is a model of a few layers."""
    yield blueprint.config
    if blueprint.drafts.sizes is not None:
        yield blueprint.drafts.sizes.model
