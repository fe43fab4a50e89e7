"""Model folders of a start: those of the hub are found in the local cache, or downloaded.

The settings of a hub model come first, then the headers of its weights. A start that its flags or
files do not allow ends there, before gigabytes are downloaded.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from shared.models.checkpoint import open_checkpoint
from shared.models.families import config_from_folder
from shared.models.file_kind import CONFIG_FILE, TOKENIZER_FILE
from shared.models.hub import DEFAULT_REVISION, Hub, HubError, Repository, is_complete
from shared.models.hub_client import offline_fault
from shared.models.hub_files import Snapshot, check_space
from shared.options.flags import ConfigError, spelling
from shared.options.options import DUMMY, Options
from shared.process import logs
from shared.process.model_check import check_model
from shared.process.progress import downloading_progress, size

TARGET, DRAFT = "model_path", "speculative_draft_model_path"
REVISIONS = {TARGET: "revision", DRAFT: "speculative_draft_model_revision"}
"""The options that name a model, each with that of its revision."""


def local_models(options: Options, console: Console) -> Options:
    """Replaces the models of a start by folders of this machine.

    Args:
      console: Where the progress of a download is drawn if it is a terminal.

    Returns:
      The options with folders as paths, and with the hub id as the name of the model unless
      another is given.

    Raises:
      ValueError: A model cannot be found or read, or the start would be refused with it.
    """
    hub = Hub.of_environment(options.model.download_dir)
    places = {field: place for field in REVISIONS if (place := _place(options, field, hub))}
    if options.model.download_dir and not any(each.repository for each in places.values()):
        raise ConfigError("--download-dir is for a model that is given by its hub id; leave it out")
    found = {field: place.path for field, place in places.items() if place.path is not None}
    absent = {x: p.repository for x, p in places.items() if p.path is None and p.repository}
    if absent:
        found |= _downloaded(options, found, absent, hub, console)
    served = options.server.served_model_name or places[TARGET].served_name
    server = replace(options.server, served_model_name=served)
    return _with_paths(replace(options, server=server), found)


def settings_folder(given: str) -> Path:
    """The folder of a model whose settings and tokenizer are read, and not its weights.

    Args:
      given: A folder, or a hub id, whose weights are not downloaded.

    Raises:
      ValueError: See `local_models`.
    """
    options = Options.from_values({TARGET: given, "load_format": DUMMY})
    return Path(local_models(options, Console(quiet=True)).model.model_path)


@dataclass(frozen=True)
class _Place:
    """The place of a model.

    Attributes:
      path: Its folder on this machine; None where it must be downloaded.
      repository: Its repository on the hub; None of a folder.
    """

    path: Path | None
    repository: Repository | None

    @property
    def served_name(self) -> str | None:
        """The hub id; None of a folder that is no snapshot of the cache."""
        known = self.repository or (Repository.of_snapshot(self.path) if self.path else None)
        return None if known is None else known.repo_id


def _place(options: Options, field: str, hub: Hub) -> _Place | None:
    """Finds a model without any network access; None where the option is not given.

    Raises:
      ConfigError: There is no such folder, and the option is no hub id.
    """
    given, revision = _values(options, field)
    if given is None:
        if revision is not None:
            raise ConfigError(
                f"{spelling(REVISIONS[field])} is for a hub id; give one as {spelling(field)}, or "
                "leave the flag out"
            )
        return None
    path = Path(os.path.expanduser(given))
    if repository := Repository.of_folder(path.absolute(), revision):  # the root of a cached model
        return _Place(_snapshot(repository, path.absolute().parent), repository)
    if os.path.lexists(path):
        if revision is not None:
            raise ConfigError(
                f"{spelling(REVISIONS[field])} is for a hub id, and {given} is a folder; leave the "
                "flag out"
            )
        return _Place(path.absolute(), None)
    repository = Repository.of_id(given, revision)
    if repository is None:
        raise ConfigError(_absent(given, path, field))
    return _Place(_cached(options, field, repository, hub), repository)


def _absent(given: str, path: Path, field: str) -> str:
    named = "the model folder" if field == TARGET else "the draft model folder"
    scheme, is_address, after = given.partition("://")
    if is_address:
        parts = after.split("/")[scheme.startswith("http") :]  # an address of the web has a host
        return (
            f"{spelling(field)} {given} is an address; give a folder, or the hub id "
            f"{'/'.join(parts[:2])}"
        )
    return f"{named} {path.absolute()} does not exist; give a folder, or a hub id as ORG/NAME"


def _snapshot(repository: Repository, cache: Path) -> Path:
    """The commit's folder of a cached model that is given by its root.

    Raises:
      HubError: The cache has no such revision.
    """
    commit = repository.cached_commit(cache)
    folders = sorted(path for path in (repository.folder(cache) / "snapshots").iterdir())
    if commit is None and repository.revision == DEFAULT_REVISION and len(folders) == 1:
        return folders[0]
    if commit is None or not repository.snapshot(cache, commit).is_dir():
        raise HubError(
            f"{repository.folder(cache)} has no revision {repository.revision}; give one of its "
            f"folders in snapshots, or the hub id {repository.repo_id}"
        )
    return repository.snapshot(cache, commit)


def _cached(options: Options, field: str, repository: Repository, hub: Hub) -> Path | None:
    """The folder of a cached model that lacks nothing that the start reads."""
    commit = repository.cached_commit(hub.cache)
    folder = None if commit is None else repository.snapshot(hub.cache, commit)
    if folder is None or not (folder / CONFIG_FILE).is_file():
        return None
    if options.model.is_dummy:
        return folder
    marks = (folder / TOKENIZER_FILE, repository.absence(hub.cache, folder.name))
    may_lack = field != TARGET or hub.is_offline or any(mark.exists() for mark in marks)
    return folder if may_lack and is_complete(folder) else None


def _downloaded(
    options: Options,
    found: Mapping[str, Path],
    absent: Mapping[str, Repository],
    hub: Hub,
    console: Console,
) -> dict[str, Path]:
    """Downloads models, after flags and files have been checked with their headers alone."""
    if hub.is_offline:
        raise HubError(offline_fault(hub, next(iter(absent.values()))))
    snapshots = {field: Snapshot(hub, repository) for field, repository in absent.items()}
    for snapshot in snapshots.values():
        logs.info(f"Reading {snapshot.source} into {hub.cache}")
        snapshot.download_settings()
    folders = {field: snapshot.folder for field, snapshot in snapshots.items()}
    if TARGET in folders:
        config_from_folder(folders[TARGET], options.model.context_length)
    if options.model.is_dummy:
        return folders
    with TemporaryDirectory(prefix="tandem-headers-") as scratch:
        _check_headers(options, found, snapshots, Path(scratch))
    num_bytes = sum(snapshot.missing_bytes for snapshot in snapshots.values())
    check_space(hub, num_bytes)
    if num_bytes:
        logs.report(f"Downloading {size(num_bytes)} of weights", total_bytes=num_bytes)
    with downloading_progress(console, num_bytes) as progress:
        for snapshot in snapshots.values():
            snapshot.download_weights(progress)
    return folders


def _check_headers(
    options: Options, found: Mapping[str, Path], snapshots: Mapping[str, Snapshot], scratch: Path
) -> None:
    """Checks a start as if the weights were there; sentences name the hub's models.

    Raises:
      ValueError: See `check_model`.
    """
    folders = {field: scratch / field for field in snapshots}
    for field, snapshot in snapshots.items():
        folders[field].mkdir()
        snapshot.write_headers(folders[field])
    try:
        check_model(_with_paths(options, {**found, **folders}), open_checkpoint)
    except ValueError as error:
        sentence = str(error)
        for field, folder in folders.items():
            sentence = sentence.replace(str(folder), str(snapshots[field]))
        raise ConfigError(sentence) from error


def _values(options: Options, field: str) -> tuple[str | None, str | None]:
    """The path and the revision of a model."""
    part = options.model if field == TARGET else options.speculative
    return getattr(part, field), getattr(part, REVISIONS[field])


def _with_paths(options: Options, paths: Mapping[str, Path]) -> Options:
    """The options with other models, whose revisions are decided."""
    model, draft = options.model, options.speculative
    if TARGET in paths:
        model = replace(model, model_path=str(paths[TARGET]), revision=None)
    if DRAFT in paths:
        draft = replace(
            draft,
            speculative_draft_model_path=str(paths[DRAFT]),
            speculative_draft_model_revision=None,
        )
    return replace(options, model=model, speculative=draft)
