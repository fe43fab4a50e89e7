"""Construction of the engine: decode controller, n-gram index, trace and shadow verification."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from shared.boundary.backend import Backend, BackendLimits, BackendSpec
from shared.drafts.checkpoint import draft_parameters
from shared.engine.adapter_slots import HostAdapter
from shared.engine.adaptive.controller import AdaptiveController
from shared.engine.adaptive.policy import ExpectedValuePolicy
from shared.engine.adaptive.tiers import Shapes
from shared.engine.adaptive.trace import TraceWriter
from shared.engine.branch_calibration import with_branch_calibration
from shared.engine.controller import Controller, DeviceNgramController, StaticController
from shared.engine.engine import Engine
from shared.engine.grammar_controller import GrammarController
from shared.engine.ngram.index import NgramIndex
from shared.engine.ngram_controllers.adaptive import AdaptiveNgramController
from shared.engine.ngram_controllers.controller import NgramController
from shared.engine.ngram_controllers.merged_drafts import MergedDraftController
from shared.engine.shadow_verify import ShadowVerifier
from shared.models.parameter import Parameter
from shared.models.parameters import parameters
from shared.options.flags import ConfigError
from shared.options.options import Options
from shared.process.buckets import draft_shape
from shared.process.caching import cache_policy
from shared.process.logs import log
from shared.process.memory_plan import MemoryPlan
from shared.process.profiling import step_seconds
from shared.process.resolved_config import ResolvedConfig

SHORTEST_STEP_S = 1e-3
"""Minimum duration of a plain step on a GPU for NGRAM's adaptive choice to pay.

Shorter steps are bound by host work, which the choice adds to: with the demo model (0.23 ms per
step on an H200) it reached 0.81 times the tokens per second of plain decoding
(`bench/results/ngram_short_steps_h200.json`).
"""

NGRAM_DISABLED = (
    "warning: NGRAM is disabled: decode steps take less than 1 ms on this GPU, "
    "too short for the host to build drafts; remove --speculative-adaptive to "
    "draft in every step"
)


def make_engine(
    backend: Backend,
    memory: MemoryPlan,
    transfer_fingerprint: str = "",
    adapters: Iterable[HostAdapter] = (),
) -> Engine:
    """Returns the engine of a backend that was built from a memory plan.

    Args:
      backend: The backend.
      memory: Its memory plan.
      transfer_fingerprint, adapters: See `shared.engine.engine.Engine`.
    """
    settled = memory.settled
    return Engine(
        backend,
        make_controller(
            backend,
            settled,
            on_gpu=memory.blueprint.on_gpu,
            has_experts=memory.blueprint.config.experts is not None,
            draft_share=drafter_cost_fraction(memory.blueprint, settled),
        ),
        overlap=settled.overlap,
        chunked_prefill_size=settled.prefill_chunk_size,
        cache=cache_policy(memory),
        transfer_fingerprint=transfer_fingerprint,
        adapters=adapters,
    )


def with_shadow_verify(engine: Engine, backend: Backend, rate: float) -> Engine | ShadowVerifier:
    """Wraps the engine to verify a fraction of its outputs."""
    if not rate:
        return engine
    return ShadowVerifier(
        engine, backend, rate=rate, report=lambda divergence: log.error(str(divergence))
    )


def drafter_cost_fraction(blueprint: BackendSpec, settled: ResolvedConfig) -> float:
    """Returns the time of a drafter's passes as a fraction of a step without drafting.

    It is 0 without merged n-gram drafts, where it is not used. Both times are estimated from the
    weights read: each pass reads its own layers and a vocabulary matrix. A drafter with a draft
    input computes its first draft token in draft extend, and a block is filled in one pass.
    """
    if not settled.draft.joins_copies:
        return 0.0
    model, drafts = blueprint.config, blueprint.drafts
    drafted = model.vocab if drafts.token_map is None else len(drafts.token_map)
    table, every = model.vocab * model.hidden, _numbers(parameters(model, False))
    target = every - table * (not model.tied)
    if drafts.model is not None:
        return settled.draft.num_steps * _numbers(parameters(drafts.model, False)) / target
    passes = 1 if drafts.block else settled.draft.num_steps - 1
    if drafts.head is None:  # an MTP layer, which shares everything else with the target
        layers = _numbers(parameters(model, drafts.with_mtp)) - every
    else:  # an embedding of its own is only read by row
        own = draft_parameters(drafts, None)
        layers = _numbers([parameter for parameter in own if parameter.name != "embed"])
        drafted = 0 if drafts.head.own_lm_head else drafted
    return passes * (layers + drafted * model.hidden) / target


def _numbers(wanted: Sequence[Parameter]) -> int:
    return sum(math.prod(parameter.shape) for parameter in wanted)


def make_controller(
    backend: Backend,
    settled: ResolvedConfig,
    *,
    on_gpu: bool,
    has_experts: bool,
    draft_share: float,
) -> Controller:
    """Returns the controller, after compiling and measuring what it needs."""
    if settled.draft.joins_copies:
        table = _measured(backend, settled, has_experts)
        controller = _joined(backend.capacity, settled, draft_share, table)
    else:
        controller = _controller_of_drafts(backend, settled, on_gpu, has_experts)
    if settled.options.engine.has_grammars:
        # With a drafter on the device, n-gram drafts are not merged into trees with a grammar.
        index = None if settled.draft.joins_copies else controller.index
        controller = GrammarController(backend.capacity, controller, index)
    return with_branch_calibration(controller, backend.capacity)


def _controller_of_drafts(
    backend: Backend, settled: ResolvedConfig, on_gpu: bool, has_experts: bool
) -> Controller:
    shape, capacity, options = draft_shape(settled, 1), backend.capacity, settled.options
    table = _measured(backend, settled, has_experts)
    if options.adaptive.speculative_adaptive and not settled.draft.drafts_on_host:
        trace = _trace(options, Shapes.of(capacity, host_draft=False).tiers, table)
        return AdaptiveController(
            capacity, ExpectedValuePolicy(), table, trace, has_experts=has_experts
        )
    if not settled.draft.drafts_on_host:
        static = DeviceNgramController if settled.draft.drafts_from_table else StaticController
        return static(capacity, nodes=shape.nodes, depth=shape.depth, width=shape.width)
    if on_gpu and is_host_bound(table) and not options.ngram.sam_budget:
        return StaticController(capacity, nodes=1, depth=0, width=0, notes=(NGRAM_DISABLED,))
    index = NgramIndex(
        options.ngram,
        nodes=shape.nodes,
        depth=shape.depth,
        vocab=capacity.vocab,
        chain=capacity.accept_rule != "exact",
    )
    index.warm_up()
    if options.adaptive.speculative_adaptive:
        tiers = (*Shapes.of(capacity, host_draft=True).tiers, "disabled")
        return AdaptiveNgramController(capacity, index, table, trace=_trace(options, tiers, table))
    return NgramController(capacity, index)


def _measured(
    backend: Backend, settled: ResolvedConfig, has_experts: bool
) -> dict[int, list[float]]:
    """Measures the times of the steps of an adaptive server; returns nothing for others."""
    if not settled.options.adaptive.speculative_adaptive:
        return {}
    return step_seconds(
        backend,
        host_draft=settled.draft.drafts_on_host,
        has_experts=has_experts,
        overlap=settled.overlap,
        chunked_prefill_size=settled.prefill_chunk_size,
    )


def _joined(
    capacity: BackendLimits,
    settled: ResolvedConfig,
    draft_share: float,
    table: Mapping[int, Sequence[float]],
) -> MergedDraftController:
    shape, copies = draft_shape(settled, 1), settled.options.ngram.num_copies
    ahead = max(0, shape.copied - 1 - 2 * copies)
    index = NgramIndex(
        settled.options.ngram,
        nodes=shape.copied,
        depth=shape.copied - 1,
        vocab=capacity.vocab,
        chain=False,
        ahead=ahead,
        path=ahead + copies,
    )
    controller = MergedDraftController(capacity, index, draft_share, table)
    controller.warm_up()
    return controller


def is_host_bound(table: Mapping[int, Sequence[float]]) -> bool:
    """Returns True if plain steps without waiting, the last of each bucket, are too short."""
    return bool(table) and min(seconds[-1] for seconds in table.values()) < SHORTEST_STEP_S


def _trace(
    options: Options, tiers: Sequence[object], table: Mapping[int, Sequence[float]]
) -> TraceWriter | None:
    path = options.adaptive.speculative_adaptive_trace
    if path is None:
        return None
    try:
        return TraceWriter(Path(path), tiers, table)
    except OSError as error:
        raise ConfigError(
            f"--speculative-adaptive-trace {path} cannot be written: {error.strerror}"
        ) from error
