"""Selection of the drafter with `--speculative-algorithm auto`, and NEXTN with an assistant."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared.drafts.kinds import ASSISTANT, NEXTN
from shared.drafts.published import cached_head
from shared.options.algorithms import WITH_COPIES
from shared.options.flags import AUTO, ConfigError, raise_fault
from shared.options.options import Options

_FLAG = "--speculative-algorithm"
_NOTHING = "the checkpoint has no MTP layer, and the hub cache has no published head for it"


def with_algorithm(
    options: Options,
    has_mtp: Callable[[], bool],
    algorithm_of: Callable[[str], str],
    is_assistant: Callable[[str], bool],
) -> Options:
    """Replaces `auto` by an algorithm: an MTP layer, else a cached draft head, else none.

    NEXTN, the name of other engines for an assistant, is replaced by ASSISTANT if the draft model
    is one.

    NGRAM is not selected: it gains where output repeats, and otherwise costs up to a third of the
    speed of plain decoding (docs/performance.md).

    Args:
      options: The options, with absolute paths.
      has_mtp: Returns True if the checkpoint contains an MTP layer; reads its files.
      algorithm_of: Returns the algorithm of a draft model by the path of its folder; reads its
        files.
      is_assistant: Returns True if the draft model at a path is an assistant, by its config.json.

    Raises:
      ValueError: A draft model cannot be opened, or other flags require a drafter and there is
        none.
    """
    draft = options.speculative
    if (path := draft.mtp_path) is not None and is_assistant(path):
        name = ASSISTANT.name + WITH_COPIES * draft.joins_copies
        return _with(options, f"the draft model {path} is an assistant", name)
    if draft.speculative_algorithm != AUTO:
        return options
    if (path := draft.speculative_draft_model_path) is not None:
        name = algorithm_of(path)
        return _with(options, f"kind of the draft model {path}", name)
    if has_mtp():
        return _with(options, "the checkpoint has an MTP layer", NEXTN.name)
    head = cached_head(Path(options.model.model_path), options.model.download_dir)
    if head is None:
        return _without(options)
    repo_id, folder = head
    reason = f"found {repo_id} in the hub cache"
    path = str(folder)
    return _with(options, reason, algorithm_of(path), speculative_draft_model_path=path)


def _with(options: Options, reason: str, name: str | None, **more: Any) -> Options:
    draft = replace(options.speculative, speculative_algorithm=name, **more)
    reasons = (*options.reasons, f"{_FLAG} {name or 'none'}: {reason}")
    return replace(options, speculative=draft, reasons=reasons)


def _without(options: Options) -> Options:
    try:
        raise_fault(options.adaptive.drafter_fault(has_drafter=False))
        return _with(options, _NOTHING, None)
    except ConfigError as error:
        raise ConfigError(
            f"{_FLAG} auto found no drafter: {_NOTHING}; give an algorithm, or remove the "
            f"flags of speculative decoding ({error})"
        ) from error
