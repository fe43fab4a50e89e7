"""Checks of flags and model files that require no device and no framework.

They run before the framework is imported, so that a wrong folder is reported as fast as a wrong
flag, and before the weights of a hub model are downloaded.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from shared.drafts.aux_hidden_states import LayerIdMeaning
from shared.drafts.checkpoint import (
    DraftFiles,
    check_head,
    dummy_head,
    is_head,
    kind_of,
    open_head,
)
from shared.drafts.config import DraftConfig
from shared.drafts.dflash_config import stated_nodes
from shared.drafts.drafter_spec import DrafterSpec
from shared.drafts.infer_from_tensors import infer_from_tensors
from shared.drafts.mtp import with_mtp_of
from shared.drafts.token_map import read_token_map
from shared.drafts.tokenizer import check_same_tokenizer, tokens_of
from shared.models.checkpoint import Checkpoint, open_checkpoint
from shared.models.config import ModelConfig
from shared.models.config_fields import read_json
from shared.models.dummy_weights import DummyCheckpoint, Stored
from shared.models.families import config_from_folder, stated_granularity
from shared.models.file_kind import ORBAX_FOLDER
from shared.models.formats.fp8_w8a16 import InWords
from shared.models.parameter import of_rank
from shared.models.parameters import Parameter, parameters
from shared.models.sampling import SamplingDefaults
from shared.models.tied import as_stored
from shared.models.tp_sharding import shard_config
from shared.models.vision_config import VisionConfig
from shared.models.vision_parameters import check_vision_encoder
from shared.options.adaptive import read_candidates
from shared.options.algorithms import BLOCK_ALGORITHMS
from shared.options.flags import ConfigError, with_absolute_paths
from shared.options.options import PARTS, Options
from shared.options.rule_context import RuleContext
from shared.options.rules import refusals
from shared.options.speculative import SpeculativeConfig
from shared.process.algorithm_choice import with_algorithm
from shared.process.defaults import with_grammars, with_parsers
from shared.process.grammars import GrammarQueue
from shared.process.image_startup import VisionEncoder, find_vision, find_vision_encoder


class WeightSource(Protocol):
    """Interface of an opened checkpoint, such as `shared.models.checkpoint.Checkpoint`."""

    @property
    def has_mtp(self) -> bool:
        """True if the files contain an MTP layer."""
        ...

    @property
    def has_vision_encoder(self) -> bool:
        """True if the files contain a vision encoder."""
        ...

    def unties(self, config: ModelConfig) -> bool:
        """Returns True if there is a separate LM head though the config ties it."""
        ...

    def check(self, config: ModelConfig, with_mtp: bool) -> None:
        """Raises `CheckpointError` for the first fault that the headers show."""
        ...

    def num_bytes(self, wanted: Sequence[Parameter]) -> int:
        """Returns the stored bytes that loading these parameters reads."""
        ...

    def as_w8a16(self, wanted: Sequence[Parameter]) -> InWords:
        """Returns the parameters that can be stored as packed FP8."""
        ...

    def as_w8a8(self, wanted: Sequence[Parameter]) -> frozenset[str]:
        """Returns the names of the parameters that are entirely FP8 with block scales."""
        ...

    def has_scales(self, wanted: Sequence[Parameter]) -> frozenset[str]:
        """Returns the names of the parameters with at least one FP8 tensor."""
        ...


@dataclass(frozen=True, kw_only=True)
class CheckedModel:
    """Flags and opened files of a startup, after all checks that require no device.

    Attributes:
      options: The options, with absolute paths and each `auto` resolved that requires no device.
      model: Config of the target.
      checkpoint: Files of the target.
      draft_files: The drafter and its files.
      tower: Vision encoder; None for text-only serving.
      as_w8a8: Names of the parameters used as W8A8.
      defaults: Defaults of omitted sampling fields.
      grammars: Grammar compiler; None without structured output.
    """

    options: Options
    model: ModelConfig
    checkpoint: WeightSource
    draft_files: DraftFiles
    tower: VisionEncoder | None
    as_w8a8: frozenset[str]
    defaults: SamplingDefaults
    grammars: GrammarQueue | None

    @property
    def wanted(self) -> list[Parameter]:
        """Parameters of the target as rank 0 loads them; other ranks have equal shards."""
        whole = parameters(self.model, self.options.speculative.with_mtp)
        return of_rank(whole, 0, self.options.ranks.tp_size)


def check_model(options: Options, opens: Callable[[str], WeightSource]) -> CheckedModel:
    """Checks flags and files as far as no device is required.

    Args:
      options: Options of the command line.
      opens: Opens the target's folder.

    Raises:
      ValueError: A flag or a file is invalid (`ConfigError`, `CheckpointError`, ...).
    """
    options = _with_candidates(with_whole_paths(options))
    options.observing.check_exporter()
    options = with_algorithm(options, lambda: _has_mtp(options, opens))
    folder = options.model.model_path
    opened = _opened(options, opens)
    model, checkpoint = opened.model, opened.checkpoint
    _check_rules(options, opened)
    checkpoint.check(model, options.speculative.with_mtp)
    tower = _checked_tower(options, checkpoint)
    options = with_parsers(options)
    is_openai = options.server.sampling_defaults == "openai"
    drafts = _with_map(options, model, _drafts(options, model, opened.draft, checkpoint))
    _check_shares(model, drafts, options.ranks.tp_size)
    _check_quantization(options, checkpoint, model)
    options, grammars = with_grammars(options, model.vocab)
    return CheckedModel(
        options=options,
        model=model,
        checkpoint=checkpoint,
        draft_files=DraftFiles(drafts, opened.draft),
        tower=tower,
        as_w8a8=_in_codes(options, checkpoint, model),
        defaults=SamplingDefaults() if is_openai else SamplingDefaults.from_folder(folder),
        grammars=grammars,
    )


def check_early(options: Options) -> CheckedModel | None:
    """Checks flags and files before the framework of the device is imported.

    Returns:
      The checked files; None if only the backend can read the format of the weights.

    Raises:
      ValueError: See `check_model`.
    """
    orbax = Path(os.path.expanduser(options.model.model_path)) / ORBAX_FOLDER
    if orbax.is_dir() and not options.model.is_dummy:
        return None
    return check_model(options, open_checkpoint)


@dataclass(frozen=True)
class _Opened:
    """Opened files of a startup.

    Attributes:
      model, checkpoint: The target, with the MTP layer of another folder if that drafts.
      draft: Files of a draft head or draft model; None without one.
      head_kind: See `RuleContext`.
    """

    model: ModelConfig
    checkpoint: WeightSource
    draft: Stored | None
    head_kind: str | None


def _has_mtp(options: Options, opens: Callable[[str], WeightSource]) -> bool:
    """Returns True if the target has an MTP layer."""
    opened = _opened(replace(options, speculative=SpeculativeConfig()), opens)
    return opened.checkpoint.has_mtp and opened.model.has_mtp


def _opened(options: Options, opens: Callable[[str], WeightSource]) -> _Opened:
    draft, folder = options.speculative, options.model.model_path
    model = config_from_folder(folder, options.model.context_length)
    if options.model.is_dummy:
        checkpoint = _dummy(model, folder, find_vision(options, folder))
    else:
        checkpoint = opens(folder)
    model = as_stored(model, checkpoint)
    stored = _open_draft(options, draft.head_path, model) if draft.head_path else None
    is_model = draft.drafts_with_a_model and stored is not None and not is_head(stored.names)
    head_kind = kind_of(stored.names) if stored and not is_model else None
    if draft.mtp_path and not options.model.is_dummy:
        layer = open_head(draft.mtp_path)
        head_kind = kind_of(layer.names)
        if head_kind == "NEXTN" and isinstance(checkpoint, Checkpoint):
            model, checkpoint = with_mtp_of(draft.mtp_path, layer, model, checkpoint)
    return _Opened(model, checkpoint, stored, head_kind)


def _check_rules(options: Options, opened: _Opened) -> None:
    path, head_kind = options.speculative.head_path, opened.head_kind
    setup = RuleContext(
        options=options,
        model=opened.model,
        has_mtp=opened.checkpoint.has_mtp,
        head_kind=head_kind,
        block=_block(path, head_kind) if path and head_kind in BLOCK_ALGORITHMS else None,
    )
    if refused := refusals(setup):
        raise ConfigError("\n".join(refused))


def _checked_tower(options: Options, checkpoint: WeightSource) -> VisionEncoder | None:
    folder = options.model.model_path
    vision = find_vision(options, folder) if checkpoint.has_vision_encoder else None
    tower = find_vision_encoder(options, folder, vision)
    if tower is not None and isinstance(checkpoint, Checkpoint):
        check_vision_encoder(checkpoint, tower.vision)
    return tower


def _check_shares(model: ModelConfig, drafts: DrafterSpec, count: int) -> None:
    """Checks that the target and the drafter can be sharded over the ranks."""
    try:
        shard_config(model, count), drafts.local(count)
    except ValueError as error:
        raise ConfigError(f"--tp-size {count} does not fit: {error}") from error


def _check_quantization(options: Options, checkpoint: WeightSource, model: ModelConfig) -> None:
    """Checks that the stored weights match `--quantization`."""
    wanted = parameters(model, options.speculative.with_mtp)
    if options.model.quantization and not checkpoint.has_scales(wanted):
        raise ConfigError(
            "--quantization fp8 requires a checkpoint with FP8 weights, and this one has "
            "none (weights are not quantized at startup); give one, or remove the flag"
        )


def _in_codes(options: Options, checkpoint: WeightSource, model: ModelConfig) -> frozenset[str]:
    """Returns the names of the parameters that `--fp8-activations` uses as W8A8."""
    if not options.model.fp8_activations:
        return frozenset()
    wanted = parameters(model, options.speculative.with_mtp)
    as_w8a8, some = checkpoint.as_w8a8(wanted), checkpoint.has_scales(wanted)
    if not some:
        raise ConfigError(
            "--fp8-activations requires a checkpoint with FP8 weights, and this one has "
            "none; remove the flag"
        )
    if mixed := min(some - as_w8a8, default=None):
        raise ConfigError(
            "--fp8-activations requires FP8 with block scales in all tensors of a fused "
            f"weight, and {mixed} has others; remove the flag"
        )
    return as_w8a8


def _dummy(model: ModelConfig, folder: str, vision: VisionConfig | None) -> DummyCheckpoint:
    return DummyCheckpoint.of_model(model, stated_granularity(folder), vision)


def _open_draft(options: Options, path: str, model: ModelConfig) -> Stored:
    """Opens the drafter's files, or creates dummy weights."""
    if not options.model.is_dummy:
        return open_head(path)
    if options.speculative.drafts_with_a_model:
        return _dummy(_small_config(options, path), path, None)
    return dummy_head(_head_config(options, path, model))


def _head_config(options: Options, path: str, model: ModelConfig) -> DraftConfig:
    told, known = (
        options.speculative.speculative_aux_layer_convention,
        tokens_of(options.model.model_path),
    )
    num_known = None if known is None else 1 + max(known.values(), default=-1)
    layer_ids = None if told is None else LayerIdMeaning(told)
    return DraftConfig.from_folder(path, model, layer_ids, num_known)


def _drafts(
    options: Options, model: ModelConfig, stored: Stored | None, checkpoint: WeightSource
) -> DrafterSpec:
    """Returns the drafter on the device, after checking its files against its config and the
    target.
    """
    draft, path = options.speculative, options.speculative.head_path
    if stored is None or path is None:
        return DrafterSpec.of_mtp(model) if draft.with_mtp else DrafterSpec.none()
    if draft.drafts_with_a_model:
        small = as_stored(_small_config(options, path), stored)
        stored.check(small, with_mtp=False)
        check_same_tokenizer(options.model.model_path, model, path, small)
        return DrafterSpec.of_model(small)
    config = _head_config(options, path, model)
    if isinstance(stored, Checkpoint):
        own = checkpoint if isinstance(checkpoint, Checkpoint) else None
        config = infer_from_tensors(config, stored, own)
    check_head(stored, config)
    return DrafterSpec.of_head(config.with_window(draft.speculative_draft_window_size))


def _with_map(options: Options, model: ModelConfig, drafts: DrafterSpec) -> DrafterSpec:
    """Applies `--speculative-token-map`."""
    if (path := options.speculative.speculative_token_map) is None:
        return drafts
    if drafts.head is not None and drafts.head.own_lm_head:
        own = f" of {drafts.head.draft_vocab} tokens" if drafts.head.has_draft_vocab else ""
        raise ConfigError(
            "--speculative-token-map requires drafts by the target's LM head, and the "
            f"draft model has its own lm_head{own}; remove the flag"
        )
    return replace(drafts, token_map=read_token_map(path, model.vocab))


def _block(path: str, kind: str) -> int | None:
    """Returns the chain nodes of a block head; None if its config cannot be read."""
    try:
        return stated_nodes(read_json(Path(path) / "config.json"), kind)
    except (OSError, ValueError):
        return None  # `DraftConfig` raises the error


def _small_config(options: Options, path: str) -> ModelConfig:
    try:
        return config_from_folder(path, options.model.context_length)
    except ValueError as error:
        raise ConfigError(f"the draft model is not supported: {error}") from error


def with_whole_paths(options: Options) -> Options:
    """Makes all paths absolute, because a server has several processes."""
    parts = {name: with_absolute_paths(getattr(options, name)) for name in PARTS}
    return replace(options, **parts)


def _with_candidates(options: Options) -> Options:
    """Reads the draft shapes of the adaptive config file."""
    path = options.adaptive.speculative_adaptive_config
    return replace(options, candidates=read_candidates(path)) if path else options
