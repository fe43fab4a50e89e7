"""Checks of flags and model files that require no device and no framework.

They run before the framework is imported, so that a wrong folder is reported as fast as a wrong
flag, and before the weights of a hub model are downloaded.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from shared.drafts.checkpoint import DraftFiles, check_head
from shared.drafts.drafter_spec import DrafterSpec
from shared.drafts.infer_from_tensors import infer_from_tensors
from shared.drafts.token_map import read_token_map
from shared.drafts.tokenizer import check_same_tokenizer
from shared.models.checkpoint import Checkpoint, open_checkpoint
from shared.models.config import ModelConfig
from shared.models.file_kind import ORBAX_FOLDER
from shared.models.formats.fp8_w8a8 import w8a8_fault
from shared.models.parameter import Parameter, of_rank
from shared.models.parameters import parameters
from shared.models.sampling import SamplingDefaults
from shared.models.tied import as_stored
from shared.models.tp_sharding import shard_config
from shared.models.vision_parameters import check_vision_encoder
from shared.options.adaptive import read_candidates
from shared.options.flags import ConfigError, raise_fault, with_absolute_paths
from shared.options.options import PARTS, Options
from shared.options.rule_context import RuleContext
from shared.options.rules import refusals
from shared.options.speculative import SpeculativeConfig
from shared.process.adapters import AdapterFiles
from shared.process.algorithm_choice import with_algorithm
from shared.process.defaults import with_grammars, with_parsers
from shared.process.grammars import GrammarQueue
from shared.process.image_startup import VisionEncoder, find_vision_encoder
from shared.process.ipc_messages import DEFAULT_NAME
from shared.process.opened_models import (
    DraftFolder,
    OpenedDraft,
    OpenedModels,
    OpenedTarget,
    WeightSource,
    open_models,
)


@dataclass(frozen=True, kw_only=True)
class CheckedModel:
    """Flags and opened files of a startup, after all checks that require no device.

    Attributes:
      options: The options, with absolute paths and each `auto` resolved that requires no device.
      opened: The opened models.
      whole: All parameters of the target.
      draft_files: The drafter and its files.
      tower: Vision encoder; None for text-only serving.
      adapters: LoRA adapters; None without.
      defaults: Defaults of omitted sampling fields; those of OpenAI's API on a worker rank.
      grammars: Grammar compiler; None without structured output, and on a worker rank.
    """

    options: Options
    opened: OpenedModels
    whole: list[Parameter]
    draft_files: DraftFiles
    tower: VisionEncoder | None
    adapters: AdapterFiles | None
    defaults: SamplingDefaults
    grammars: GrammarQueue | None

    @property
    def wanted(self) -> list[Parameter]:
        """Parameters of the target as rank 0 loads them; other ranks have equal shards."""
        return of_rank(self.whole, 0, self.options.ranks.tp_size)


def check_model(options: Options, opens: Callable[[str], WeightSource]) -> CheckedModel:
    """Checks flags and files as far as no device is required.

    Args:
      options: Options of the command line.
      opens: Opens the target's folder.

    Raises:
      ValueError: A flag or a file is invalid (`ConfigError`, `CheckpointError`, ...).
    """
    options = _with_candidates(with_whole_paths(options))
    raise_fault(options.observing.exporter_fault())
    target, folder_of = OpenedTarget(options, opens), cache(DraftFolder)
    options = with_algorithm(
        options,
        lambda: target.has_mtp,
        lambda path: folder_of(path).algorithm,
        lambda path: folder_of(path).is_assistant,
    )
    checked = _checked_files(options, open_models(options, target, folder_of))
    options = with_parsers(options, target.tokenizer)
    options, grammars = with_grammars(options, checked.opened.model.vocab, target.tokenizer)
    defaults = _sampling_defaults(options, target)
    return replace(checked, options=options, defaults=defaults, grammars=grammars)


def check_worker(options: Options, opens: Callable[[str], WeightSource]) -> CheckedModel:
    """Checks the files of a worker rank, which compiles no grammar.

    Args:
      options: Options that `check_model` has resolved on rank 0.
      opens: Opens the target's folder.

    Raises:
      ValueError: A flag or a file is invalid.
    """
    options, target = _with_candidates(options), OpenedTarget(options, opens)
    return _checked_files(options, open_models(options, target, DraftFolder))


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


def _checked_files(options: Options, opened: OpenedModels) -> CheckedModel:
    """Checks opened files against the flags, without what only serving requires."""
    raise_fault(_rules_fault(options, opened))
    opened.checkpoint.check(opened.model, options.speculative.with_mtp)
    tower = _checked_tower(options, opened)
    drafts = _checked_drafter(options, opened)
    raise_fault(_shares_fault(options, opened.model, drafts))
    whole = parameters(opened.model, options.speculative.with_mtp)
    raise_fault(_quantization_fault(options, whole, opened))
    if options.model.fp8_activations:
        raise_fault(w8a8_fault(whole, opened.checkpoint.stored))
    return CheckedModel(
        options=options,
        opened=opened,
        whole=whole,
        draft_files=DraftFiles(drafts, opened.draft and opened.draft.weights),
        tower=tower,
        adapters=_checked_adapters(options, opened),
        defaults=SamplingDefaults(),
        grammars=None,
    )


def _rules_fault(options: Options, opened: OpenedModels) -> str | None:
    """Returns the refusals of all rules on flags, one a line."""
    setup = RuleContext(
        options=options,
        model=opened.model,
        has_mtp=opened.checkpoint.has_mtp(opened.model),
        head_kind=opened.head_kind,
        block=opened.draft.block if opened.draft else None,
    )
    return "\n".join(refusals(setup)) or None


def _checked_tower(options: Options, opened: OpenedModels) -> VisionEncoder | None:
    target, checkpoint = opened.target, opened.checkpoint
    vision = target.vision if checkpoint.has_vision_encoder else None
    tower = find_vision_encoder(options, target.folder, vision)
    if tower is not None and isinstance(checkpoint, Checkpoint):
        check_vision_encoder(checkpoint, tower.vision)
    return tower


def _checked_adapters(options: Options, opened: OpenedModels) -> AdapterFiles | None:
    """Opens the LoRA adapters and checks that they fit the target."""
    model = opened.model
    if not options.lora.is_enabled:
        return None
    if options.model.fp8_activations:
        raise ConfigError("--lora-paths is not supported with --fp8-activations; remove one")
    served = options.server.served_model_name or Path(options.model.model_path).name
    if taken := {served, DEFAULT_NAME} & options.lora.folders.keys():
        raise ConfigError(f"--lora-paths names an adapter {min(taken)}, as the model; rename it")
    base = opened.checkpoint if isinstance(opened.checkpoint, Checkpoint) else None
    return AdapterFiles.of(options.lora, model, options.speculative.with_mtp, base)


def _shares_fault(options: Options, model: ModelConfig, drafts: DrafterSpec) -> str | None:
    """Returns why the target or the drafter cannot be sharded over the ranks."""
    count = options.ranks.tp_size
    try:
        shard_config(model, count), drafts.local(count)
    except ValueError as error:
        return f"--tp-size {count} does not fit: {error}"
    return None


def _quantization_fault(
    options: Options, whole: list[Parameter], opened: OpenedModels
) -> str | None:
    """Returns the contradiction between `--quantization` and the stored weights."""
    if (name := options.model.quantization) is None:
        return None
    stored = map(opened.checkpoint.stored, whole)
    encodings = {tensor and tensor.encoding.name for tensors in stored for tensor in tensors}
    if name in encodings:
        return None
    return (
        f"--quantization {name} requires a checkpoint with {name.upper()} weights, and this one "
        "has none (weights are not quantized at startup); give one, or remove the flag"
    )


def _sampling_defaults(options: Options, target: OpenedTarget) -> SamplingDefaults:
    if options.server.sampling_defaults == "openai":
        return SamplingDefaults()
    return SamplingDefaults.from_folder(target.folder)


def _checked_drafter(options: Options, opened: OpenedModels) -> DrafterSpec:
    """Returns the drafter on the device, after checking its files against its config and the
    target.
    """
    speculative, draft = options.speculative, opened.draft
    if draft is None:
        drafts = _drafter_without_files(speculative, opened.model)
    elif speculative.drafts_with_a_model:
        drafts = DrafterSpec.of_model(_checked_draft_model(opened, draft))
    else:
        drafts = _checked_head(opened, draft, speculative.speculative_draft_window_size)
    if (path := speculative.speculative_token_map) is None:
        return drafts
    raise_fault(_own_lm_head_fault(drafts))
    return replace(drafts, token_map=read_token_map(path, opened.model.vocab))


def _drafter_without_files(speculative: SpeculativeConfig, model: ModelConfig) -> DrafterSpec:
    if speculative.drafts_from_table:
        return DrafterSpec.of_text()
    return DrafterSpec.of_mtp(model) if speculative.with_mtp else DrafterSpec.none()


def _checked_draft_model(opened: OpenedModels, draft: OpenedDraft) -> ModelConfig:
    small = as_stored(draft.draft_model_config, draft.weights)
    draft.weights.check(small, with_mtp=False)
    check_same_tokenizer(opened.target.tokenizer, opened.model, draft.tokenizer, small)
    return small


def _checked_head(opened: OpenedModels, draft: OpenedDraft, window: int | None) -> DrafterSpec:
    config, weights, target = draft.head_config, draft.weights, opened.checkpoint
    if isinstance(weights, Checkpoint):
        own = target if isinstance(target, Checkpoint) else None
        config = infer_from_tensors(config, weights, own)
    check_head(weights, config)
    return DrafterSpec.of_head(config.with_window(window))


def _own_lm_head_fault(drafts: DrafterSpec) -> str | None:
    """Returns the reason why the drafter's own LM head excludes a token map."""
    if drafts.head is None or not drafts.head.own_lm_head:
        return None
    own = f" of {drafts.head.draft_vocab} tokens" if drafts.head.has_draft_vocab else ""
    return (
        "--speculative-token-map requires drafts by the target's LM head, and the "
        f"draft model has its own lm_head{own}; remove the flag"
    )


def with_whole_paths(options: Options) -> Options:
    """Makes all paths absolute, because a server has several processes."""
    parts = {name: with_absolute_paths(getattr(options, name)) for name in PARTS}
    return replace(options, **parts)


def _with_candidates(options: Options) -> Options:
    """Reads the draft shapes of the adaptive config file."""
    path = options.adaptive.speculative_adaptive_config
    return replace(options, candidates=read_candidates(path)) if path else options
