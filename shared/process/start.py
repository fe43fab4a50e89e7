"""What a start can refuse: everything that is found out before memory is taken.

Whatever the user can put right is refused by one sentence.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from shared.boundary.backend import Backend, Blueprint
from shared.boundary.operations import KernelLimits, PlainOperation, plain_operations
from shared.boundary.ranks import Ranks
from shared.drafts.block import stated_nodes
from shared.drafts.checkpoint import (
    DraftFiles,
    check_head,
    dummy_head,
    is_head,
    kind_of,
    open_head,
)
from shared.drafts.config import DraftConfig
from shared.drafts.drafts import Drafts
from shared.drafts.fitting import fitted
from shared.drafts.mtp import with_mtp_of
from shared.drafts.streams import Ids
from shared.drafts.token_map import read_token_map
from shared.drafts.tokenizer import check_same_tokenizer, tokens_of
from shared.models.checkpoint import Checkpoint
from shared.models.config import ModelConfig
from shared.models.dummy import DummyCheckpoint, Stored
from shared.models.families import config_from_folder, stated_granularity
from shared.models.fields import read_json
from shared.models.fp8 import BLOCK, are_whole_blocks
from shared.models.fp8_words import EXPERTS, InWords
from shared.models.parameters import Parameter, draft_head, parameters
from shared.models.ranks import local
from shared.models.sampling import SamplingDefaults
from shared.models.tied import as_stored
from shared.models.tower import check_tower, tower_parameters
from shared.models.vision import VisionConfig
from shared.options.adaptive import read_candidates
from shared.options.algorithms import BLOCK_ALGORITHMS
from shared.options.flags import ConfigError, in_full, spelling
from shared.options.options import PARTS, Options
from shared.options.rules import refusals
from shared.options.setup import Setup
from shared.process.caching import cache_policy
from shared.process.device import Device
from shared.process.grammars import Grammars
from shared.process.memory_plan import MemoryPlan, plan
from shared.process.pictures import find_tower, find_vision
from shared.process.programs import ProgramCosts
from shared.text.tokenizer import Tokenizer


class Weights(Protocol):
    """What the start needs of an opened checkpoint, say a `shared.models.checkpoint.Checkpoint`."""

    @property
    def has_mtp(self) -> bool:
        """Whether the files hold an mtp layer."""
        ...

    @property
    def has_tower(self) -> bool:
        """Whether the files hold a vision tower."""
        ...

    def unties(self, config: ModelConfig) -> bool:
        """Whether there is an LM head of its own, though the config ties it."""
        ...

    def check(self, config: ModelConfig, with_mtp: bool) -> None:
        """Raises `CheckpointError` for the first fault that the headers show."""
        ...

    def num_bytes(self, wanted: Sequence[Parameter]) -> int:
        """Bytes that loading these parameters reads from the disk."""
        ...

    def in_words(self, wanted: Sequence[Parameter]) -> InWords:
        """Those of the parameters that can stay FP8."""
        ...

    def in_codes(self, wanted: Sequence[Parameter]) -> frozenset[str]:
        """Those of the parameters that are FP8 as a whole, with scales of blocks, by name."""
        ...

    def has_scales(self, wanted: Sequence[Parameter]) -> frozenset[str]:
        """Those of the parameters of which some tensors are FP8, by name."""
        ...


HOPPERS = {"H20", "H100", "H200", "H800", "GH200"}
"""Words in the names of GPUs whose matrix units multiply codes of FP8 as the kernels do."""
LoadCall = Callable[[Blueprint, Any, DraftFiles, Callable[[int], None]], Backend]


@dataclass(frozen=True, kw_only=True)
class Platform:
    """A backend as the start sees it, before it is made.

    Attributes:
      find_device: Where the backend will run; called after the flags are known to be right.
      open_checkpoint: Opens the model folder; its files are checked before any weight is read.
      costs: What the backend says of its programs before it is made.
      kernels: What its kernels of a GPU take; None where it has none.
      load: Makes the backend from its blueprint, what `open_checkpoint` gave and what drafts; it
        calls its last argument with the number of stored bytes after each tensor.
      take_devices: Where one process has all devices, called with their number before the first
        is asked for.
      free_on_each: Where one process has all devices, bytes that can be allocated on each of the
        first so many.
    """

    find_device: Callable[[], Device]
    open_checkpoint: Callable[[str], Weights]
    costs: ProgramCosts
    kernels: KernelLimits | None
    load: LoadCall
    take_devices: Callable[[int], None] = lambda count: None
    free_on_each: Callable[[int], Sequence[int]] = lambda count: ()


@dataclass(frozen=True)
class Start:
    """A start that nothing refuses any more, before memory is taken.

    Attributes:
      checkpoint: The target's files, opened and checked.
      draft_files: What drafts, and its files.
      memory: The memory plan, with what the start serves with.
      plain: What steps on a GPU run without its kernels.
      defaults: How tokens are chosen where a request leaves it open.
      grammars: Compiles those of requests; None where the start has none.
    """

    checkpoint: Weights
    draft_files: DraftFiles
    memory: MemoryPlan
    plain: tuple[PlainOperation, ...]
    defaults: SamplingDefaults
    grammars: Grammars | None

    @property
    def num_bytes(self) -> int:
        """Stored bytes that loading reads."""
        blueprint = self.memory.blueprint
        wanted = parameters(blueprint.config, blueprint.drafts.with_mtp)
        if blueprint.capacity.pictures is not None:
            wanted += tower_parameters(blueprint.capacity.pictures.vision)
        if (token_map := blueprint.drafts.token_map) is not None:
            wanted.append(draft_head(blueprint.config, token_map))
        return self.checkpoint.num_bytes(wanted) + self.draft_files.num_bytes

    def of_rank(self, ranks: Ranks) -> "Start":
        """The same start as one of several ranks."""
        blueprint = replace(self.memory.blueprint, ranks=ranks)
        return replace(self, memory=replace(self.memory, blueprint=blueprint))

    def load(self, platform: Platform, progress: Callable[[int], None]) -> Backend:
        """Reads the weights and makes the backend; `progress` is told of bytes as they are read."""
        return platform.load(self.memory.blueprint, self.checkpoint, self.draft_files, progress)


def prepare(options: Options, platform: Platform) -> Start:
    """Everything that can be refused before memory is taken.

    Args:
      options: As the flags say.

    Raises:
      ValueError: A flag or a file is refused; `ConfigError` and `CheckpointError` are such.
    """
    options = _with_candidates(with_whole_paths(options))
    options.observing.check_exporter()
    if not platform.costs.captures:
        _refuse_graph_flags(options)
    draft, folder = options.speculative, options.model.model_path
    model = config_from_folder(folder, options.model.context_length)
    is_dummy, path = options.model.is_dummy, draft.head_path
    if is_dummy:
        checkpoint = _dummy(model, folder, find_vision(options, folder))
    else:
        checkpoint = platform.open_checkpoint(folder)
    model = as_stored(model, checkpoint)
    stored = _open_draft(options, path, model) if path else None
    is_model = draft.drafts_with_a_model and stored is not None and not is_head(stored.names)
    head_kind = kind_of(stored.names) if stored and not is_model else None
    if draft.mtp_path and not is_dummy:
        layer = open_head(draft.mtp_path)
        head_kind = kind_of(layer.names)
        if head_kind == "NEXTN" and isinstance(checkpoint, Checkpoint):
            model, checkpoint = with_mtp_of(draft.mtp_path, layer, model, checkpoint)
    setup = Setup(
        options=options,
        model=model,
        has_mtp=checkpoint.has_mtp,
        head_kind=head_kind,
        block=_block(path, head_kind) if path and head_kind in BLOCK_ALGORITHMS else None,
    )
    if refused := refusals(setup):
        raise ConfigError("\n".join(refused))
    corpus = options.ngram.speculative_ngram_external_corpus_path
    if corpus and not os.path.isfile(corpus):
        raise ConfigError(f"--speculative-ngram-external-corpus-path {corpus} is no file")
    checkpoint.check(model, draft.with_mtp)
    vision = find_vision(options, folder) if checkpoint.has_tower else None
    tower = find_tower(options, folder, vision)
    if tower is not None and isinstance(checkpoint, Checkpoint):
        check_tower(checkpoint, tower.vision)
    Tokenizer.from_folder(folder)  # the server's process keeps one; here only its faults count
    theirs = options.server.sampling_defaults == "openai"
    defaults = SamplingDefaults() if theirs else SamplingDefaults.from_folder(folder)
    drafts = _drafts(options, model, stored, checkpoint)
    draft_files = DraftFiles(_with_map(options, model, drafts), stored)
    _check_shares(model, draft_files.drafts, options.ranks.tp_size)
    grammars = Grammars.of_options(options, model.vocab)
    wanted = parameters(model, draft.with_mtp)
    in_codes = _in_codes(checkpoint, wanted) if options.model.fp8_activations else frozenset[str]()
    in_words = partial(checkpoint.in_words, wanted)
    platform.take_devices(options.ranks.tp_size)
    device = platform.find_device()
    if device.kind == "gpu":
        _refuse_without_kernels(device, [p for p in wanted if p.name in in_codes])
    if options.speculative.drafts_from_table:
        draft_files = DraftFiles(Drafts.of_text(), None)
    drafts, costs = draft_files.drafts, platform.costs
    memory = plan(options, model, drafts, device, costs, in_words, in_codes, tower)
    _check_map(drafts, memory.blueprint.capacity.max_width)
    cache_policy(memory)  # what it refuses is refused before memory is taken
    kernels = platform.kernels
    plain = () if kernels is None else plain_operations(memory.blueprint, kernels)
    return Start(checkpoint, draft_files, memory, plain, defaults, grammars)


def _check_shares(model: ModelConfig, drafts: Drafts, count: int) -> None:
    """Refuses a number of ranks that a model, or what drafts, does not divide among."""
    try:
        local(model, count), drafts.local(count)
    except ValueError as error:
        raise ConfigError(f"--tp-size {count} does not fit: {error}") from error


def _in_codes(checkpoint: Weights, wanted: Sequence[Parameter]) -> frozenset[str]:
    in_codes, some = checkpoint.in_codes(wanted), checkpoint.has_scales(wanted)
    if not some:
        raise ConfigError(
            "--fp8-activations needs weights in FP8, and this checkpoint has none; leave it out"
        )
    if mixed := min(some - in_codes, default=None):
        raise ConfigError(
            "--fp8-activations takes products whose tensors are all FP8 with scales of blocks, and "
            f"those of {mixed} are not; leave it out"
        )
    return in_codes


def _refuse_without_kernels(device: Device, in_codes: Sequence[Parameter]) -> None:
    """Refuses what the kernels of a GPU do not multiply."""
    if in_codes and not HOPPERS & {*device.name.replace("-", " ").split()}:
        raise ConfigError(
            f"--fp8-activations needs the matrix units of a Hopper (an H100 or H200), and this is "
            f"an {device.name}; leave it out"
        )
    for parameter in in_codes:
        if parameter.name.endswith(EXPERTS):
            raise ConfigError(
                "--fp8-activations multiplies no experts on a GPU, and those of this model are in "
                "FP8; leave it out"
            )
        if not all(are_whole_blocks(source.shape) for source in parameter.sources):
            raise ConfigError(
                f"--fp8-activations takes whole blocks of {BLOCK} x {BLOCK} on a GPU, and those of "
                f"{parameter.name} are not; leave it out"
            )


def _dummy(model: ModelConfig, folder: str, vision: VisionConfig | None) -> DummyCheckpoint:
    return DummyCheckpoint.of_model(model, stated_granularity(folder), vision)


def _refuse_graph_flags(options: Options) -> None:
    for name in ("disable_cuda_graph", "disable_piecewise_cuda_graph"):
        if getattr(options.engine, name):
            raise ConfigError(
                f"{spelling(name)} is for torch, and JAX compiles every step as a whole; leave the "
                "flag out"
            )


def _open_draft(options: Options, path: str, model: ModelConfig) -> Stored:
    """The files of what drafts, or what stands for them."""
    if not options.model.is_dummy:
        return open_head(path)
    if options.speculative.drafts_with_a_model:
        return _dummy(_small_config(options, path), path, None)
    return dummy_head(_head_config(options, path, model))


def _head_config(options: Options, path: str, model: ModelConfig) -> DraftConfig:
    told, known = (
        options.speculative.speculative_draft_layer_ids,
        tokens_of(options.model.model_path),
    )
    num_known = None if known is None else 1 + max(known.values(), default=-1)
    layer_ids = None if told is None else Ids(told)
    return DraftConfig.from_folder(path, model, layer_ids, num_known)


def _drafts(
    options: Options, model: ModelConfig, stored: Stored | None, checkpoint: Weights
) -> Drafts:
    """What drafts on the device; its files are held against its settings and the target."""
    draft, path = options.speculative, options.speculative.head_path
    if stored is None or path is None:
        return Drafts.of_mtp(model) if draft.with_mtp else Drafts.none()
    if draft.drafts_with_a_model:
        small = as_stored(_small_config(options, path), stored)
        stored.check(small, with_mtp=False)
        check_same_tokenizer(options.model.model_path, model, path, small)
        return Drafts.of_model(small)
    config = _head_config(options, path, model)
    if isinstance(stored, Checkpoint):
        own = checkpoint if isinstance(checkpoint, Checkpoint) else None
        config = fitted(config, stored, own)
    check_head(stored, config)
    return Drafts.of_head(config.with_window(draft.speculative_draft_window_size))


def _with_map(options: Options, model: ModelConfig, drafts: Drafts) -> Drafts:
    """With the tokens of `--speculative-token-map`, whose rows of the target's head are read."""
    if (path := options.speculative.speculative_token_map) is None:
        return drafts
    if drafts.head is not None and drafts.head.own_lm_head:
        own = f" of {drafts.head.draft_vocab} tokens" if drafts.head.has_draft_vocab else ""
        raise ConfigError(
            "--speculative-token-map chooses rows of the target's lm_head, and the draft model has "
            f"an lm_head{own} of its own; leave the flag out"
        )
    return replace(drafts, token_map=read_token_map(path, model.vocab))


def _check_map(drafts: Drafts, width: int) -> None:
    """Refuses a map of fewer tokens than a node of the draft trees, whoever shapes them, has."""
    if drafts.token_map is not None and len(drafts.token_map) < width:
        raise ConfigError(
            f"--speculative-token-map has {len(drafts.token_map)} tokens, and a node of the draft "
            f"trees may have {width} drafts below it; name more tokens"
        )


def _block(path: str, kind: str) -> int | None:
    """Nodes of the chain that a head with blocks states; None where its settings cannot be read."""
    try:
        return stated_nodes(read_json(Path(path) / "config.json"), kind)
    except (OSError, ValueError):
        return None  # `DraftConfig` says what is wrong


def _small_config(options: Options, path: str) -> ModelConfig:
    try:
        return config_from_folder(path, options.model.context_length)
    except ValueError as error:
        raise ConfigError(f"the draft model cannot be served: {error}") from error


def with_whole_paths(options: Options) -> Options:
    """With each path in full, as a start has several processes."""
    parts = {name: in_full(getattr(options, name)) for name in PARTS}
    return replace(options, **parts)


def _with_candidates(options: Options) -> Options:
    """With the draft shapes that a file names."""
    path = options.adaptive.speculative_adaptive_config
    return replace(options, candidates=read_candidates(path)) if path else options
