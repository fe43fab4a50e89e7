"""Models of a startup: each folder is opened once, and each of its files is parsed once.

Files are read when they are first needed, so that the checks run in the order of
`shared.process.model_check`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from shared.drafts.aux_hidden_states import LayerIdMeaning
from shared.drafts.checkpoint import dummy_head, is_head, kind_of, open_head
from shared.drafts.config import DRAFT_FOLDER, DraftConfig
from shared.drafts.config_formats import ARCHITECTURES
from shared.drafts.dflash_config import stated_nodes
from shared.drafts.kinds import ASSISTANT, BLOCK_KINDS, NEXTN, STANDALONE
from shared.drafts.mtp import with_mtp_of
from shared.drafts.raw_config import PLACE
from shared.drafts.tokenizer import tokens_of
from shared.models.checkpoint import Checkpoint
from shared.models.config import ModelConfig
from shared.models.config_fields import listed
from shared.models.dummy_weights import DummyCheckpoint, Stored
from shared.models.families import model_config, stated_encoding
from shared.models.formats.weight_format import StoredTensor
from shared.models.model_folder import ModelFolder
from shared.models.parameter import Parameter
from shared.models.tied import as_stored
from shared.models.vision_config import VisionConfig
from shared.options.flags import ConfigError
from shared.options.options import Options
from shared.process.image_startup import find_vision
from shared.text.tokenizer_files import TokenizerFiles


class WeightSource(Protocol):
    """Interface of an opened checkpoint, such as `shared.models.checkpoint.Checkpoint`."""

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors, without prefix."""
        ...

    def has_mtp(self, config: ModelConfig) -> bool:
        """Returns True if the files contain an MTP layer that the config names."""
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

    def stored(self, parameter: Parameter) -> Sequence[StoredTensor | None]:
        """Returns the quantised tensors of a parameter; None for each that is not quantised."""
        ...


class OpenedTarget:
    """Target of a startup.

    Attributes:
      folder: Its folder.
      tokenizer: Its tokenizer files.
    """

    def __init__(self, options: Options, opens: Callable[[str], WeightSource]) -> None:
        """Opens no file.

        Args:
          options: Options with absolute paths; only those of the model are used.
          opens: Opens the weights of a model by the path of its folder.
        """
        self.folder = ModelFolder(options.model.model_path)
        self.tokenizer = TokenizerFiles(self.folder)
        self._options, self._opens = options, opens

    @cached_property
    def stated_config(self) -> ModelConfig:
        """Config that config.json states; the weights may contain another LM head."""
        return model_config(self.folder, self._options.model.context_length)

    @cached_property
    def weights(self) -> WeightSource:
        """Opened weight files, or dummy weights."""
        if self._options.model.is_dummy:
            return _dummy_model(self.stated_config, self.folder, self.vision)
        return self._opens(str(self.folder.path))

    @cached_property
    def config(self) -> ModelConfig:
        """Config that fits the weights."""
        return as_stored(self.stated_config, self.weights)

    @cached_property
    def vision(self) -> VisionConfig | None:
        """Vision encoder config; None for text-only serving."""
        return find_vision(self._options, self.folder, self.stated_config)

    @property
    def has_mtp(self) -> bool:
        """True if there is an MTP layer."""
        return self.weights.has_mtp(self.config)


class DraftFolder:
    """Folder of a draft head, a draft model or an MTP layer.

    Attributes:
      folder: The folder.
      tokenizer: Its tokenizer files.
    """

    def __init__(self, path: str) -> None:
        """Opens no file."""
        self.folder = ModelFolder(path, DRAFT_FOLDER)
        self.tokenizer = TokenizerFiles(self.folder)

    @cached_property
    def weights(self) -> Checkpoint:
        """Opened weight files."""
        return open_head(self.folder.path)

    @property
    def algorithm(self) -> str:
        """Algorithm that the tensors are made for."""
        names = self.weights.names
        return kind_of(names) if is_head(names) else STANDALONE.name

    @property
    def is_assistant(self) -> bool:
        """True if config.json names the architecture of an assistant."""
        names = listed(self.folder.config, "architectures", str, PLACE) or []
        return any(ARCHITECTURES.get(name) == ASSISTANT.name for name in names)


class OpenedDraft:
    """Draft head or draft model of a startup.

    Attributes:
      folder: Its folder.
      tokenizer: Its tokenizer files.
    """

    def __init__(self, options: Options, target: OpenedTarget, files: DraftFolder) -> None:
        """Opens no file.

        Args:
          options: Options with the resolved algorithm.
          target: The target.
          files: Folder of the draft head or draft model.
        """
        self.folder, self.tokenizer = files.folder, files.tokenizer
        self._options, self._target, self._files = options, target, files

    @cached_property
    def weights(self) -> Stored:
        """Opened weight files, or dummy weights."""
        if not self._options.model.is_dummy:
            return self._files.weights
        if self._options.speculative.drafts_with_a_model:
            return _dummy_model(self.draft_model_config, self.folder, None)
        return dummy_head(self.head_config)

    @property
    def head_kind(self) -> str | None:
        """Kind of the draft head by its tensors; None for a draft model."""
        names = self.weights.names
        if self._options.speculative.drafts_with_a_model and not is_head(names):
            return None
        return kind_of(names)

    @cached_property
    def draft_model_config(self) -> ModelConfig:
        """Config of a draft model, as its config.json states it."""
        try:
            return model_config(self.folder, self._options.model.context_length)
        except ValueError as error:
            raise ConfigError(f"the draft model is not supported: {error}") from error

    @cached_property
    def head_config(self) -> DraftConfig:
        """Config of a draft head, as its config.json states it."""
        convention = self._options.speculative.speculative_aux_layer_convention
        known = tokens_of(self._target.tokenizer)
        num_known = None if known is None else 1 + max(known.values(), default=-1)
        layer_ids = None if convention is None else LayerIdMeaning(convention)
        return DraftConfig.from_dict(self.folder.config, self._target.config, layer_ids, num_known)

    @property
    def block(self) -> int | None:
        """Chain nodes of a block head; None for other drafters, or if config.json is invalid."""
        if self.head_kind not in BLOCK_KINDS:
            return None
        try:
            return stated_nodes(self.folder.config, self.head_kind)
        except ValueError:
            return None  # `head_config` raises the error


@dataclass(frozen=True)
class OpenedModels:
    """Target and drafter of a startup.

    Attributes:
      target: The target.
      draft: Draft head or draft model; None without one.
      model, checkpoint: Config and weights of the target, with the MTP layer of another folder if
        that drafts.
      head_kind: See `shared.options.rule_context.RuleContext`.
    """

    target: OpenedTarget
    draft: OpenedDraft | None
    model: ModelConfig
    checkpoint: WeightSource
    head_kind: str | None


def open_models(
    options: Options, target: OpenedTarget, folder_of: Callable[[str], DraftFolder]
) -> OpenedModels:
    """Opens the weights of the target and of the drafter.

    Args:
      options: Options with the resolved algorithm.
      target: The target.
      folder_of: Returns the folder of a draft model by its path.

    Raises:
      ValueError: A file is missing or invalid, or the drafter belongs to another target.
    """
    speculative, model, checkpoint = options.speculative, target.config, target.weights
    draft, head_kind = None, None
    if speculative.head_path:
        draft = OpenedDraft(options, target, folder_of(speculative.head_path))
        head_kind = draft.head_kind
    if speculative.mtp_path and not options.model.is_dummy:
        layer = folder_of(speculative.mtp_path)
        head_kind = kind_of(layer.weights.names)
        if head_kind == NEXTN.name and isinstance(checkpoint, Checkpoint):
            model, checkpoint = with_mtp_of(layer.folder.config, layer.weights, model, checkpoint)
    return OpenedModels(target, draft, model, checkpoint, head_kind)


def _dummy_model(
    config: ModelConfig, folder: ModelFolder, vision: VisionConfig | None
) -> DummyCheckpoint:
    return DummyCheckpoint.of_model(config, stated_encoding(folder.config), vision)
