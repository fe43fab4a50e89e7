"""Resolved config: flags, with defaults that depend on the model and the device filled in."""

from dataclasses import dataclass, replace

from shared.drafts.dflash_config import BlockConfig
from shared.drafts.drafter_spec import DrafterSpec
from shared.drafts.dspark_config import RNN, MarkovConfig
from shared.engine.cache_policy import track_unit
from shared.models.config import ModelConfig
from shared.options.adaptive import Candidate, default_candidates
from shared.options.flags import ConfigError
from shared.options.options import Options
from shared.options.speculative import SpeculativeConfig
from shared.process.device import Device


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """Resolved config of a server; the memory plan determines the number of KV pages.

    Attributes:
      options: Options of the command line, for options without defaults.
      dtype: A key of `ITEM_BYTES`.
      context_length: Maximum tokens of a request.
      page_size: KV positions of a page.
      max_running_requests: Maximum running requests.
      prefill_chunk_size: Maximum prompt tokens of a step.
      max_image_tokens: Maximum tokens of an image; the checkpoint may limit them further.
      track_interval: Tokens between state snapshots of the prefix cache.
      overlap: Maximum steps in flight while the next is planned.
      draft: Drafter with its shape.
      candidates: Draft shapes of adaptive speculation.
      block: Nodes of the chain of a block head; 0 for other drafters.
      reduced_buckets: True for reduced buckets, because each program takes seconds to compile on a
        CPU.
    """

    options: Options
    dtype: str
    context_length: int
    page_size: int
    max_running_requests: int
    prefill_chunk_size: int
    max_image_tokens: int
    track_interval: int
    overlap: int
    draft: SpeculativeConfig
    candidates: tuple[Candidate, ...]
    block: int
    reduced_buckets: bool


@dataclass(frozen=True)
class _Defaults:
    page_size: int
    max_running_requests: int
    chunked_prefill_size: int
    max_image_tokens: int
    dtype: str


DEFAULTS = {
    "cpu": _Defaults(16, 8, 256, 1024, "float32"),
    "gpu": _Defaults(64, 48, 2048, 4096, "bfloat16"),
}


def resolve(
    options: Options, model: ModelConfig, drafts: DrafterSpec, device: Device, are_compiled: bool
) -> ResolvedConfig:
    """Resolves the options that the command line left open.

    Args:
      options: Options of the command line.
      model: Config of the target.
      drafts: Drafter on the device.
      device: The device.
      are_compiled: True if each program is compiled at startup.

    Raises:
      ConfigError: The head drafts no trees.
    """
    are_few = are_compiled and device.kind == "cpu"
    defaults, engine = DEFAULTS[device.kind], options.engine
    block = drafts.block.nodes if drafts.block else None
    draft = options.speculative.settled(model.drafts_trees, block)
    candidates = _candidates(options, draft, drafts.block, are_few)
    if drafts.block is not None and any(k > 1 for k in (draft.topk, *(c.topk for c in candidates))):
        _check_trees(drafts.block)
    page_size = engine.page_size or defaults.page_size
    copies = options.ngram.num_copies if draft.joins_copies else 0
    deepest = max((draft.num_steps, copies, *(each.steps for each in candidates)))
    in_flight = (engine.steps_in_flight + 1) * (deepest + 1)
    return ResolvedConfig(
        options=options,
        dtype=defaults.dtype if options.model.dtype == "auto" else options.model.dtype,
        context_length=options.model.context_length or model.context_length,
        page_size=page_size,
        max_running_requests=engine.max_running_requests or defaults.max_running_requests,
        prefill_chunk_size=engine.chunked_prefill_size or defaults.chunked_prefill_size,
        max_image_tokens=engine.max_image_tokens or defaults.max_image_tokens,
        track_interval=engine.mamba_track_interval or _interval(page_size, in_flight),
        overlap=engine.steps_in_flight,
        draft=draft,
        candidates=candidates,
        block=block or 0,
        reduced_buckets=are_few,
    )


def _check_trees(block: BlockConfig) -> None:
    """Raises `ConfigError` for a head that drafts no trees."""
    markov = block.part(MarkovConfig)
    if markov is not None and markov.kind == RNN:
        raise ConfigError(
            "--speculative-eagle-topk above 1 is not supported with a DSPARK head of "
            "markov_head_type rnn, which has a state for each path; remove the flag"
        )


def _interval(page_size: int, in_flight: int) -> int:
    """Returns the smallest interval that steps in flight cannot pass twice."""
    unit = track_unit(page_size)
    return -(-in_flight // unit) * unit


def _candidates(
    options: Options, draft: SpeculativeConfig, block: BlockConfig | None, are_few: bool
) -> tuple[Candidate, ...]:
    """Returns the draft shapes of adaptive speculation: those of its file, or default ones."""
    if not options.adaptive.speculative_adaptive or draft.joins_copies:
        return ()
    is_cheap = draft.kind is not None and draft.kind.has_cheap_trees
    nodes = block.nodes if block else None
    candidates = options.candidates or default_candidates(
        steps=draft.num_steps,
        nodes=draft.num_draft_tokens,
        has_trees=is_cheap or (block is not None and all(block.causal)),
        block=nodes,
        on_host=draft.drafts_on_host,
        are_few=are_few,
    )
    return tuple(replace(each, block=nodes or 0) for each in candidates)
